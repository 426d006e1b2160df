"""When a listener accepts a connection that another process could accept, too."""

from __future__ import annotations

from typing import Final

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.timers import Timers
from trio_smc.host.real_time import move_on_after
from trio_smc.states.engine import Machine
from trio_smc.states.tables import ACCEPTANCE

__all__ = ["Acceptance"]

_LEAVE_TO_OTHERS: Final = 0.01
"""Seconds that a connection waits for another process to accept it, if no task of this program
waits for a connection.  Chosen: less than the time of a client's first check for a listener, whose
name a cleaner may have removed (`rendezvous.discovery.announcing`)."""


@ki_protected
class Acceptance:
    """The model of `trio_smc.states.acceptance.AcceptanceChart`.

    Args:
      on_demand: accept only after the first call, or after a client of the same stack has waited.

    Attributes:
      calls: calls of `SmcListener.accept` and `SmcListener.hand_out` that are under way.
    """

    __slots__ = ("_changed", "_machine", "calls")

    def __init__(self, *, on_demand: bool) -> None:
        self.calls: int = 0
        self._machine = Machine(ACCEPTANCE, self, state="ON_DEMAND" if on_demand else "LATER")
        self._changed = trio.lowlevel.ParkingLot()

    def begin_call(self) -> None:
        """A call begins."""
        self.calls += 1
        if self.calls == 1:
            self._machine.send("call_begins")

    def end_call(self) -> None:
        """A call ends."""
        self.calls -= 1
        if not self.calls:
            self._machine.send("call_ends")

    def client_waits(self) -> None:
        """The connection of a client of the same stack is in the backlog."""
        self._machine.send("client_waits")

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Wake the accepting task."""
        if self._changed:  # rarely: the task mostly waits for a connection
            self._changed.unpark_all()

    @property
    def is_on_demand(self) -> bool:
        """True until this process may accept connections."""
        return self._machine.state == "ON_DEMAND"

    @property
    def is_later(self) -> bool:
        """True while other processes may accept a connection before this one does."""
        return self._machine.state == "LATER"

    async def wait_for_demand(self) -> None:
        """Wait until this process may accept connections."""
        while self._machine.state == "ON_DEMAND":
            await self._changed.park()

    async def leave_to_others(self, timers: Timers | None) -> None:
        """Give other processes time to accept a connection, while no task of this one waits."""
        with move_on_after(timers, _LEAVE_TO_OTHERS):
            while self._machine.state == "LATER":
                await self._changed.park()
