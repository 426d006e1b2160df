"""A plain program that knows nothing of SMC: the SHA-256 of what a URL has."""

from __future__ import annotations

import hashlib
import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
    sys.stdout.write(hashlib.sha256(answer.read()).hexdigest() + "\n")
