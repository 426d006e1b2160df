"""Deadlines in real time, whatever clock the Trio run has.

Theory of operation.  A Trio run may have a virtual clock, such as `trio.testing.MockClock`, which
jumps to the next deadline of the run as soon as all tasks wait.  The kernel's timers of a TCP
connection are no deadlines of the run, so they neither stop the clock between two deadlines of the
program, nor does a jump make them expire.  The same must be true of SMC-R.  So a stack has no
deadline of the Trio run: its `Timers` use the clock of this module, a descriptor wakes the task
that runs them (`host.alarm`), and one of these timers cancels the scope of a wait that has a
deadline.

As long as the Trio run has its usual clock, both clocks show the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import trio

from trio_smc._base.timers import Timers

__all__ = ["move_on_after", "move_on_at", "now", "real_clock", "sleep"]


def real_clock() -> Callable[[], float]:
    """A clock that shows the same time as Trio's clock now, and then advances in real time.

    The result returns seconds.  Call this within a Trio run.
    """
    offset = trio.current_time() - time.perf_counter()
    return lambda: offset + time.perf_counter()


def now(timers: Timers | None) -> float:
    """The time of the clock of ``timers``, or of Trio's clock if there are none, in seconds."""
    return trio.current_time() if timers is None else timers.now()


@contextmanager
def move_on_at(timers: Timers | None, deadline: float) -> Iterator[trio.CancelScope]:
    """As `trio.move_on_at`, with a deadline of the clock of ``timers``.

    Args:
      timers: of the stack; None: there are none, so the deadline is one of Trio's clock.
      deadline: the time of that clock in seconds.
    """
    if timers is None:
        with trio.move_on_at(deadline) as scope:
            yield scope
        return
    with trio.CancelScope() as scope:
        timer = timers.call_at(deadline, scope.cancel)
        try:
            yield scope
        finally:
            timer.cancel()


def move_on_after(
    timers: Timers | None, seconds: float
) -> AbstractContextManager[trio.CancelScope]:
    """As `trio.move_on_after`, with the clock of ``timers``; see `move_on_at`."""
    return move_on_at(timers, now(timers) + seconds)


async def sleep(timers: Timers | None, seconds: float) -> None:
    """As `trio.sleep`, with the clock of ``timers``."""
    with move_on_after(timers, seconds):
        await trio.sleep_forever()
