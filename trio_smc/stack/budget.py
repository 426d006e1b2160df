"""The budget of amortised checkpoints: how much the calls of one scheduler pass may do.

With `Config(checkpoints="amortised")`, the default, a call on a stream that need not wait yields
only if the budget of this pass is used up. All streams of a stack share one budget.

The budget ends after `_MAX_CALLS` calls, after `MAX_PASS_NS`, or when a deadline of the run is due:
a task that sleeps must not wait longer than over TCP, where every call yields. Trio reports the
next deadline, but that takes as long as a small call, and with a thousand waiting sockets as long
as ten: Trio counts them. So only a pass that lasts `_SHORT_PASS_NS` requests it, once, and not
before `_REQUEST_SHARE` times the duration of the last request have passed. A deadline that was not
requested, or that a task sets later in the same pass, may be missed; `MAX_PASS_NS` limits the
delay. Trio runs the tasks of a pass in random order, so the budget of the next pass is used up at
once: the task that the deadline has woken may come last.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

from trio_smc.rnic.pump import UNHOOKED

if TYPE_CHECKING:
    from trio_smc.rnic.pump import Pump

__all__ = ["MAX_PASS_NS", "Budget"]

_MAX_CALLS: Final = 64
"""Calls in one pass until calls have to yield.  Chosen; no measurement is recorded."""

MAX_PASS_NS: Final = 400_000
"""Nanoseconds from the first call of a pass until calls have to yield.  With 200 µs a writer and
its reader took 1.6 times as many passes; with 200 µs for each stream a timer beside 100 streams was
up to 3 times as late as over TCP (docs/decisions.md)."""

_SHORT_PASS_NS: Final = 20_000
"""Nanoseconds of a pass that requests no deadline: about one call of 64 KiB.  Chosen."""

_REQUEST_SHARE: Final = 32
"""At most one part in so many of the time is spent on requests for the next deadline.  Chosen."""

_RUNNING: Final = object()
"""In a task's ``custom_sleep_data``, which Trio clears when it reschedules the task."""

# Looked up once, because each call needs them.
_now: Final = time.perf_counter_ns
_current_task: Final = trio.lowlevel.current_task
_statistics: Final = trio.lowlevel.current_statistics


class Budget:
    """Counts the calls of one pass of the scheduler, and the time that they took.

    Args:
      pump: counts the passes while it has hooks in Trio's loop.
    """

    __slots__ = (
        "_calls", "_due", "_end", "_last", "_next_request", "_pass", "_pump", "_task", "_yielded",
        "_yielding",
    )  # fmt: skip

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._pass = 0  # the pass of the last call
        self._end = 0  # of the budget, or of the time for which no deadline is known
        self._last = 0  # the end of the budget if no deadline is due
        self._due = False  # a deadline ends the budget
        self._next_request = 0  # for the next deadline, not before that time
        self._calls = 0  # in that pass
        self._task: trio.lowlevel.Task | None = None  # which called last, in a pass over budget
        # The tasks that had to yield in the pass before, and in this one.
        self._yielded: set[trio.lowlevel.Task] = set()
        self._yielding: set[trio.lowlevel.Task] = set()

    def is_exceeded(self) -> bool:
        """Count a call of the running task; True if it has to yield.

        While the pass is within its budget, no call yields. Once the budget is exceeded, each task
        makes only one more call in this pass, as with strict checkpoints. That is the rest of the
        call in which the task yielded in the pass before, or, if the task was woken by something
        else, its next call. So a task of the first kind yields in its first call, and any other
        task in its second.
        """
        pump = self._pump
        now = _now()
        if self._pass != pump.passes:
            task = _current_task()
            due = self._begin_pass(now, task)
            if self._yielded or self._yielding:
                self._yielded, self._yielding = self._yielding, set()
            if due:
                self._yielding.add(task)
            return due
        if pump.machine.state in UNHOOKED:
            return self._is_exceeded_unhooked(now)
        self._calls = calls = self._calls + 1
        if calls < _MAX_CALLS and (now < self._end or now < self._find_end(now)):
            return False
        task = _current_task()
        if self._task is not task:
            self._task = task
            if task not in self._yielded:
                return False
        self._yielding.add(task)
        return True

    def _is_exceeded_unhooked(self, now: int) -> bool:
        """As `is_exceeded`, while no hook counts the passes."""
        task = _current_task()
        if task.custom_sleep_data is not _RUNNING:  # other tasks have run since its last call
            task.custom_sleep_data = _RUNNING
            if self._task is task:
                return self._begin_pass(now, task)
        self._calls += 1
        if self._calls < _MAX_CALLS and (now < self._end or now < self._find_end(now)):
            return False
        self._begin(now)
        if self._task is not task:
            self._task = task
            if self._calls < _MAX_CALLS:
                return False  # the loop may have slept in between
            self._pump.resume_hooks()  # with several busy tasks the passes have to be counted
        self._calls = 0
        return True

    def _begin_pass(self, now: int, task: trio.lowlevel.Task) -> bool:
        """Count the first call of a pass; True if it has to yield, because of a deadline."""
        self._pass = self._pump.passes
        self._begin(now)
        due, self._due = self._due, False
        if due:
            self._end = self._last = now
        self._calls = 1
        self._task = task
        return due

    def _begin(self, now: int) -> None:
        self._end = now + _SHORT_PASS_NS
        self._last = now + MAX_PASS_NS

    def _find_end(self, now: int) -> int:
        """The end of the budget of a pass that is no longer short."""
        if self._end != self._last:
            if now < self._next_request:
                self._end = min(self._next_request, self._last)
                return self._end
            seconds = _statistics().seconds_to_next_deadline
            self._next_request = now + _REQUEST_SHARE * (_now() - now)
            if seconds < (self._last - now) / 1e9:
                self._last = now + int(seconds * 1e9)
                self._due = True
            self._end = self._last
        return self._end
