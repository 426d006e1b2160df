"""The budget of amortised checkpoints: how much the calls of one scheduler pass may do.

With `Config(checkpoints="amortised")` a call on a stream that need not wait yields only if the
budget of this pass is used up. All streams of a stack share one budget.
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

_RUNNING: Final = object()
"""In a task's ``custom_sleep_data``, which Trio clears when it reschedules the task."""

# Looked up once, because each call needs them.
_now: Final = time.perf_counter_ns
_current_task: Final = trio.lowlevel.current_task


class Budget:
    """Counts the calls of one pass of the scheduler, and the time that they took.

    Args:
      pump: counts the passes while it has hooks in Trio's loop.
    """

    __slots__ = ("_began", "_calls", "_pass", "_pump", "_task", "_yielded", "_yielding")

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._pass = 0  # the pass of the last call
        self._began = 0  # when the first call of that pass came
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
            self._begin_pass(now, _current_task())
            if self._yielded or self._yielding:
                self._yielded, self._yielding = self._yielding, set()
            return False
        if pump.machine.state in UNHOOKED:
            return self._is_exceeded_unhooked(now)
        self._calls = calls = self._calls + 1
        if calls < _MAX_CALLS and now - self._began < MAX_PASS_NS:
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
                self._begin_pass(now, task)
                return False
        self._calls += 1
        if self._calls < _MAX_CALLS and now - self._began < MAX_PASS_NS:
            return False
        self._began = now
        if self._task is not task:
            self._task = task
            if self._calls < _MAX_CALLS:
                return False  # the loop may have slept in between
            self._pump.resume_hooks()  # with several busy tasks the passes have to be counted
        self._calls = 0
        return True

    def _begin_pass(self, now: int, task: trio.lowlevel.Task) -> None:
        self._pass = self._pump.passes
        self._began = now
        self._calls = 1
        self._task = task
