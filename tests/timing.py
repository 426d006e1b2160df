"""How long tests wait for an event that must come."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["PATIENCE", "SLOWER"]

_USUAL: Final = 25.0

PATIENCE: Final = float(os.environ.get("TRIO_SMC_PATIENCE", _USUAL))
"""Seconds after which a wait has failed; no passing test waits that long.

Less than the 30 s of `Config.test_link_interval` and the 60 s of `Config.close_timeout`: if a test
passes only because such a timer fires, its wait fails first.  For a process that starts, works and
ends, twice as long, which is less than the minute after which pytest ends a test.

The environment variable `TRIO_SMC_PATIENCE` sets another value for slow machines; the lab sets it
for its guests.
"""

SLOWER: Final = max(1.0, PATIENCE / _USUAL)
"""Factor for other limits of time: the time-out of a single test (`pytest.mark.timeout`), and
the processor time that something may cost.  1 on a usual machine."""
