"""End a hung async test with the stack of every Trio task, and an orderly cancellation.

pytest-timeout raises from its signal handler, which inside Trio's scheduler breaks the run and
buries the reason. Here the handler only notes the tasks' stacks and asks Trio to cancel the test,
so that fixtures close what they opened. A test that does not react (blocked in a system call, or
shielded) meets pytest-timeout's own way a few seconds later.

A test that only calculates (``@pytest.mark.calculates``) waits for nothing, so that a busy machine
alone can make it slow: its time is processor time.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import pytest_timeout
import trio

_STACKS = pytest.StashKey[str]()
GRACE = 5.0
BUSY = 10
"""A test that only calculates may take so many times longer by the clock on the wall."""


def arm(item: pytest.Item, settings: Any) -> None:
    """Start the clock for an async test; `settings` are pytest-timeout's."""

    def handler(_signum: int, _frame: FrameType | None) -> None:
        main = _main_task()
        if main is None or _STACKS in item.stash:
            pytest_timeout.timeout_sigalrm(item, settings)
            return
        item.stash[_STACKS] = "".join(_describe(task) for task in _tree(main))
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        trio.lowlevel.current_trio_token().run_sync_soon(_cancel, main)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    # Where pytest-timeout looks for the way to stop the clock.
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)


def arm_processor(item: pytest.Item, settings: Any) -> None:
    """Start the clocks for a test that only calculates."""
    clocks = (
        (signal.ITIMER_PROF, signal.SIGPROF, settings.timeout),
        (signal.ITIMER_REAL, signal.SIGALRM, BUSY * settings.timeout),
    )

    def cancel() -> None:
        for clock, number, _ in clocks:
            signal.setitimer(clock, 0)
            signal.signal(number, signal.SIG_DFL)

    def handler(_signum: int, _frame: FrameType | None) -> None:
        cancel()
        pytest_timeout.timeout_sigalrm(item, settings)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    for clock, number, seconds in clocks:
        signal.signal(number, handler)
        signal.setitimer(clock, seconds)


def fail_if_hung(item: pytest.Item) -> None:
    """After the test: fail it when its time had run out."""
    stacks = item.stash.get(_STACKS, None)
    if stacks is not None:
        pytest.fail(f"hung; its tasks were waiting here:\n{stacks}", pytrace=False)


def _main_task() -> trio.lowlevel.Task | None:
    """The task in which pytest-trio runs the test, or None when Trio does not run."""
    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        return None
    if root is None:
        return None
    return next((task for task in _tree(root) if task.name.startswith("pytest_trio.")), None)


def _tree(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tree(child)


def _describe(task: trio.lowlevel.Task) -> str:
    lines = traceback.StackSummary.extract(task.iter_await_frames()).format()
    return f"task {task.name}\n{''.join(lines)}\n"


def _cancel(task: trio.lowlevel.Task) -> None:
    for nursery in task.child_nurseries:
        nursery.cancel_scope.cancel()
