"""Helpers for tests of a pump."""

from __future__ import annotations

import trio

from trio_smc.rnic.pump import Pump


class Passes(trio.abc.Instrument):
    """Counts how often Trio's event loop polls for I/O."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def is_hooked(pump: Pump) -> bool:
    """True if the pump has a hook, which counts each pass of the scheduler."""
    before = pump.passes
    await trio.lowlevel.checkpoint()
    return pump.passes > before
