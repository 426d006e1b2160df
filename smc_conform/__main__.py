"""``python -m smc_conform``: the same as ``smc-conform``."""

from __future__ import annotations

import sys

from smc_conform.cli import main

if __name__ == "__main__":
    sys.exit(main())
