"""Timers without a clock of their own: deadlines in, callbacks out.

Everything in the protocol that waits for time hangs here, so that one task of a stack (or a
test with a clock of its own) runs all of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

__all__ = [
    "Timer",
    "Timers",
]


class Timer:
    """One armed timer; `cancel` makes it never fire."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when: float = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Never fire.  Idempotent; harmless after it fired."""
        self.callback = None


class Timers:
    """A heap of timers.

    Args:
      clock: returns the present in seconds.
      earlier: called when a new timer is due before all others, so that a sleeper can be woken.
    """

    def __init__(self, clock: Callable[[], float], earlier: Callable[[], None]) -> None:
        self.now = clock
        self._earlier = earlier
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = count()
        self._cancelled_bound = 64
        self._abandoned = False

    def abandon(self) -> None:
        """Call nothing any more: this process is a forked child, the timers are its parent's."""
        self._abandoned = True
        self._heap.clear()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` once, ``seconds`` from now."""
        return self.call_at(self.now() + seconds, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` once, at this time of the clock."""
        timer = Timer(when, callback)
        if self._abandoned:
            return timer
        if len(self._heap) > self._cancelled_bound:
            self._sweep()
        heapq.heappush(self._heap, (timer.when, next(self._number), timer))
        if self._heap[0][2] is timer:
            self._earlier()
        return timer

    def next_deadline(self) -> float:
        """When `run_due` has something to do: seconds on the clock, infinity for never."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def run_due(self) -> bool:
        """Call everything that is due; whether there was something."""
        now, called = self.now(), False
        while self.next_deadline() <= now:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
                called = True
        return called

    def run_all(self) -> None:
        """Call everything now: nobody will, later."""
        while self._heap:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _sweep(self) -> None:
        # Most timers are cancelled before they fire; without this they would pile up.
        self._heap = [entry for entry in self._heap if entry[2].callback is not None]
        heapq.heapify(self._heap)
        self._cancelled_bound = max(64, 2 * len(self._heap))
