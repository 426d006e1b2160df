"""Timers of the protocol, whose clock is an argument.

All deadlines of the protocol are timers of one `Timers`, so that one task of a stack, or a test
with its own clock, runs them all.

Theory of operation: many ends at the same time
-----------------------------------------------
To end a link group takes a fraction of a millisecond, and hundreds may end at the same time:
because their first contacts time out, their process is killed, or the port fails.  Trio must run
other tasks meanwhile.  So `Timers` calls all of these ends, in turns of about a millisecond.  If
the end comes from a timer, `Timers.run_due` calls it.  All other ends use `Timers.in_turn`, which
calls them at once as long as they are rare.
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
"""Seconds of processor time after which `Timers.run_due` leaves the rest to its next call.  Chosen;
docs/decisions.md, "many ends at once", has the longest delays with this value."""
_RECOVERY: Final = 0.25
"""The share of all time that callbacks of `Timers.in_turn` may take before others are deferred.
Chosen; no measurement is recorded."""
_LONGEST_END: Final = 0.002
"""Seconds that a callback of `Timers.in_turn` counts for at most.  Chosen."""


class Timer:
    """One armed timer."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when: float = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call the callback.  Idempotent, and a no-op after the callback was called."""
        self.callback = None


class Timers:
    """A heap of timers.

    Args:
      clock: returns the current time in seconds.
      earlier: called if a new timer is due before all others, to wake the task that sleeps until
        the next deadline.

    Attributes:
      now: ``clock``.
      work_clock: returns the seconds of processor time that this thread has used.
      turn_clock: for `in_turn`, which each connection calls: a clock that needs no system call.  It
        also counts the time of other threads and processes, so a callback counts for at most
        `_LONGEST_END`.
    """

    def __init__(self, clock: Callable[[], float], earlier: Callable[[], None]) -> None:
        self.now = clock
        self.work_clock: Callable[[], float] = time.thread_time
        self.turn_clock: Callable[[], float] = time.perf_counter
        self._earlier = earlier
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = count()
        self._cancelled_bound = 64  # timers in the heap before `_sweep`; chosen
        self._abandoned = False
        self._turn_end = 0.0  # when `run_due` leaves the rest to its next call
        # For `in_turn`: deferred callbacks and their charges; the time in seconds that recent calls
        # took, and the time of that value; True during such a call and `run_due`.
        self._deferred: deque[tuple[Callable[[], object], float]] = deque()
        self._spent = 0.0
        self._measured_at = 0.0
        self._in_turn = False

    def abandon(self) -> None:
        """Drop all timers in a forked child: they belong to the parent process."""
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
        """The time of the next timer in seconds of the clock; infinity if there is none."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def run_due(self) -> bool:
        """Call the due callbacks for about a millisecond, in the order of their deadlines.

        The rest stays due: `next_deadline` is then in the past, and the next call continues.
        Before that call the caller lets other tasks run.

        Returns:
          True: a callback was called.
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
        """Add time to the turn of `run_due`, for a callback that wakes tasks.

        Args:
          seconds: the processor time that the tasks will take in the same pass of the scheduler.
        """
        self._turn_end -= seconds

    def in_turn(self, callback: Callable[[], object], charge: float = 0.0) -> None:
        """Call ``callback`` once: now, or from a timer if recent calls have taken too long.

        The order of the calls is kept.  A deferred callback is called even if its object has ended
        meanwhile.

        Args:
          callback: the function.
          charge: the processor time in seconds that the tasks woken by the callback will take.
        """
        if self._in_turn:
            callback()  # a part of the end that is running
            return
        if self._deferred or self._is_over_budget():
            self._deferred.append((callback, charge))
            if len(self._deferred) == 1:
                self.call_later(0.0, self._next_in_turn)
            return
        began = self.turn_clock()
        self._in_turn = True
        try:
            callback()
        finally:
            self._in_turn = False
            took = self.turn_clock() - began
            self._spent += min(took, _LONGEST_END) + charge

    def _is_over_budget(self) -> bool:
        now = self.now()
        self._spent = max(0.0, self._spent - _RECOVERY * (now - self._measured_at))
        self._measured_at = now
        return self._spent >= _TURN_LENGTH

    def _next_in_turn(self) -> None:
        """Call deferred callbacks until the turn of `run_due` is over."""
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
        """Call all callbacks now, because the stack ends and no later call will come."""
        while self._heap:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _sweep(self) -> None:
        # Most timers are cancelled before they are due; without this they would accumulate.
        self._heap = [entry for entry in self._heap if entry[2].callback is not None]
        heapq.heapify(self._heap)
        self._cancelled_bound = max(64, 2 * len(self._heap))
