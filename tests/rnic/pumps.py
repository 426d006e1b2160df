"""What tests ask of a pump."""

from __future__ import annotations

import trio

from trio_smc.rnic.pump import Pump


async def is_awake(pump: Pump) -> bool:
    """Whether it has its hooks, and takes part in each pass of the scheduler."""
    before = pump.passes
    await trio.lowlevel.checkpoint()
    return pump.passes > before
