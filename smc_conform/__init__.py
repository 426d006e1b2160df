"""The conformance suite for implementations of SMC-R (RFC 7609, and version 2): ``smc-conform``.

The suite is a peer that follows a script: each check drives it message by message, and states what
the implementation under test must do.  `docs/conformance.md` shows how to run it.
"""

from __future__ import annotations

__version__ = "0.1.0"
