"""Waiting until an RNIC knows a peer's address, before a queue pair is connected to it.

A queue pair that is connected to an address which nobody answers for would hold up everything in
this process (`Rnic.address_known`), and a peer may name any address.  So whoever connects one waits
by a timer first, not for long, and then goes on in any case: connecting is refused at once if the
address is still not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc._base.timers import Timer, Timers
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "PATIENCE",
    "AddressWait",
]


PATIENCE: Final = 1.0
"""Seconds: the kernel's own, in which it asks the network once."""
_FIRST_PAUSE: Final = 0.002
_LAST_PAUSE: Final = 0.064
"""Seconds between two looks: doubled each time."""


class AddressWait:
    """One wait at a time; a new one takes the place of the one before."""

    __slots__ = ("_timer", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._timer: Timer | None = None

    def begin(self, rnic: Rnic, gid: bytes, then: Callable[[], None]) -> bool:
        """Call ``then`` once: when ``rnic`` knows the address of this GID, or after `PATIENCE`.

        Returns:
          True: it was called already, as is the rule.  False: it will be called by a timer, and
            anything may have happened until then.
        """
        self.cancel()
        if rnic.address_known(gid):
            then()
            return True
        give_up = self._timers.now() + PATIENCE
        pause = _FIRST_PAUSE

        def look() -> None:
            nonlocal pause
            self._timer = None
            now = self._timers.now()
            if now >= give_up or rnic.address_known(gid):
                then()
                return
            pause = min(2 * pause, _LAST_PAUSE)
            self._timer = self._timers.call_at(min(now + pause, give_up), look)

        self._timer = self._timers.call_later(pause, look)
        return False

    def cancel(self) -> None:
        """Nobody waits any more.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
