"""Timers without a clock of their own: deadlines in, callbacks out.

Everything in the protocol that waits for time hangs here, so that one task of a stack (or a
test with a clock of its own) runs all of it.

Theory of operation: many things that end together
--------------------------------------------------
The end of a link group takes a fraction of a millisecond, and hundreds may end together: their
first contacts time out, their process is killed, the port fails.  The loop must serve others
meanwhile, so all of these ends are called by `Timers`, about a millisecond of them at a time.  An
end that a timer brings is due in `Timers.run_due`; any other one goes through `Timers.in_turn`,
which calls at once what is rare.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

__all__ = [
    "Timer",
    "Timers",
]

_TURN_LENGTH: Final = 0.001
"""Seconds after which `Timers.run_due` leaves the rest to its next call.  The same as in other
places where many things end together: a loop that serves others meanwhile notices no less."""
_RECOVERY: Final = 0.25
"""Of the time that passes: so much of it the ends outside of `Timers.run_due` may take."""


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

    Attributes:
      now: ``clock``.
      work_clock: returns the seconds of processor time that this thread has used.  Tests replace it
        by a clock of their own, so that the same seed always takes the same turns.
    """

    def __init__(self, clock: Callable[[], float], earlier: Callable[[], None]) -> None:
        self.now = clock
        self.work_clock: Callable[[], float] = time.thread_time
        self._earlier = earlier
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = count()
        self._cancelled_bound = 64
        self._abandoned = False
        self._turn_end = 0.0  # when `run_due` leaves the rest to its next call
        # For `in_turn`: what was put off, and its charge; seconds of processor time that calls took
        # lately, and when that was last reckoned; True within such a call, and within `run_due`.
        self._deferred: deque[tuple[Callable[[], object], float]] = deque()
        self._spent = 0.0
        self._measured_at = 0.0
        self._in_turn = False

    def abandon(self) -> None:
        """Call nothing any more: this process is a forked child, the timers are its parent's."""
        self._abandoned = True
        self._heap.clear()
        self._deferred.clear()

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
        """Call what is due, in the order of its deadlines, for about a millisecond.

        The rest stays due: `next_deadline` is in the past then, and the next call goes on with it.
        The caller lets others run before that.

        Returns:
          True: something was called.
        """
        now, called = self.now(), False
        self._turn_end = self.work_clock() + _TURN_LENGTH
        inside, self._in_turn = self._in_turn, True
        try:
            while self.next_deadline() <= now:
                timer = heapq.heappop(self._heap)[2]
                callback, timer.callback = timer.callback, None
                if callback is not None:
                    callback()
                    called = True
                    if self.work_clock() >= self._turn_end:
                        break
        finally:
            self._in_turn = inside
        return called

    def charge(self, seconds: float) -> None:
        """For a callback that wakes a task: the task will take so many seconds in the same pass of
        the scheduler, which count as part of the turn of `run_due`."""
        self._turn_end -= seconds

    def in_turn(self, callback: Callable[[], object], charge: float = 0.0) -> None:
        """Call ``callback`` once: at once, or by a timer if such calls took long just now.

        The calls are made in the order in which they were asked for, and one that was put off is
        made even if what it is about has ended meanwhile.

        Args:
          callback: what to call.
          charge: seconds of processor time that tasks will take which the callback wakes.
        """
        if self._in_turn:
            callback()  # part of an end that has its turn
            return
        if self._deferred or self._is_over_budget():
            self._deferred.append((callback, charge))
            if len(self._deferred) == 1:
                self.call_later(0.0, self._next_in_turn)
            return
        began = self.work_clock()
        self._in_turn = True
        try:
            callback()
        finally:
            self._in_turn = False
            self._spent += self.work_clock() - began + charge

    def _is_over_budget(self) -> bool:
        now = self.now()
        self._spent = max(0.0, self._spent - _RECOVERY * (now - self._measured_at))
        self._measured_at = now
        return self._spent >= _TURN_LENGTH

    def _next_in_turn(self) -> None:
        """Make calls that were put off, until the turn of `run_due` is over."""
        try:
            while self._deferred:
                callback, charge = self._deferred.popleft()
                self.charge(charge)
                callback()
                if self.work_clock() >= self._turn_end:
                    break
        finally:
            if self._deferred:
                self.call_later(0.0, self._next_in_turn)

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
