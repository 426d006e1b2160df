"""Waits for events of the implementation under test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import trio

from smc_conform.verdicts import Failed, Silence

__all__ = ["Waits", "Watched"]

_GRACE: Final = 0.3
"""Seconds that a wait goes on after a connection or link has ended: the messages before its end may
not have been polled yet."""


class Watched(ABC):
    """A TCP connection, a link or a connection: its end ends the waits for its messages."""

    @property
    @abstractmethod
    def ended(self) -> str:
        """How it has ended; empty if it goes on."""


class Waits:
    """The waits of one check.

    Args:
      patience: seconds that an event may take.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._news = trio.Event()

    def changed(self) -> None:
        """Let all waits look again."""
        self._news.set()
        self._news = trio.Event()

    async def until(
        self,
        condition: Callable[[], bool],
        what: str,
        *watched: Watched,
        patience: float | None = None,
    ) -> None:
        """Wait until the condition is true.

        Args:
          what: the awaited event, for the report: "SMC Accept".
          watched: if one of these ends, the event cannot come any more.
          patience: seconds, in place of the usual ones.

        Raises:
          Failed: something watched has ended.
          Silence: the event did not come in time.
        """
        limit = self._patience if patience is None else patience
        deadline = trio.current_time() + limit
        ended = ""
        while not condition():
            if not ended and (ended := next((each.ended for each in watched if each.ended), "")):
                deadline = min(deadline, trio.current_time() + _GRACE)
            news = self._news
            with trio.move_on_at(deadline) as scope:
                await news.wait()
            if scope.cancelled_caught and not condition():
                if ended:
                    raise Failed(f"{what} did not come: {ended}")
                raise Silence(f"{what} did not come within {limit:g} s")
