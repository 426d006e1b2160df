"""A plain program without support for SMC: prints the SHA-256 of the content of a URL."""

from __future__ import annotations

import hashlib
import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
    sys.stdout.write(hashlib.sha256(answer.read()).hexdigest() + "\n")
