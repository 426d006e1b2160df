"""`python -m trio_smc.tools`: the command `trio-smc`."""

from __future__ import annotations

import sys

from trio_smc.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
