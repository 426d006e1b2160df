"""A process that sends, closes its streams and exits at once loses nothing, 1,000 times in a row.

    python -m tests.campaigns.leaving --cases N --seed S

Clients and servers, in turn with `open_stack` and with the default stack, by the interpreter's own
end and by `os._exit` right after `aclose`; 1 byte to 4 MiB, in 1 to 3,000 pieces; the other process
begins to read at once or when the sender is gone. 50,000 cases are 1,000 processes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass

import trio

from tests.campaigns._options import parse
from tests.e2e.leaving import leave_at_once

CASES_PER_CLIENT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign."""

    clients: int
    bytes_sent: int


def run(cases: int, seed: int) -> Result:
    """Let clients come and go; AssertionError when a byte was lost."""
    clients = max(4, cases // CASES_PER_CLIENT)
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        return Result(clients=clients, bytes_sent=trio.run(leave_at_once, clients, seed))


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__)
    seed = arguments.seed
    start = time.perf_counter()
    result = run(arguments.cases, seed)
    print(
        f"leaving: {result.clients} processes sent {result.bytes_sent} bytes and were gone, "
        f"nothing lost, seed {seed}, {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
