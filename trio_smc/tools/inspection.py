"""The child process in which root inspects another user's processes; see `tools.users`."""

from __future__ import annotations

import codecs
import grp  # noqa: F401 - see `main`
import json
import os
import sys

from trio_smc.tools.client import take_untrusted
from trio_smc.tools.output import print_text

__all__ = ["main"]


def main() -> None:
    """Read the request from standard input, and print the result.  Both are JSON."""
    with os.fdopen(os.dup(0), "rb") as file:
        request = json.load(file)
    # Modules that are imported at first use: the user may have no right to read their files.
    for encoding in ("ascii", "latin-1", "unicode_escape"):
        codecs.lookup(encoding)
    # A path in the environment of this process would be root's, not the user's.
    for name in ("TRIO_SMC_CONFIG", "TRIO_SMC_DIRECTORY", "XDG_RUNTIME_DIR"):
        os.environ.pop(name, None)
    print_text(json.dumps(take_untrusted(request)))
    sys.exit(0)
