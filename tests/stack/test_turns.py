"""Timers that are due together run in bounded turns, in order and completely."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

import trio_smc
from tests.timing import PATIENCE
from trio_smc._base.timers import Timers

COUNT = 200
EACH = 0.0002
"""Processor time of a callback in seconds."""
LONGEST = 0.003


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timers(clock: Clock) -> Timers:
    return Timers(clock, lambda: None)


def work() -> None:
    end = time.thread_time() + EACH
    while time.thread_time() < end:
        pass


def run(timers: Timers, now: float) -> list[float]:
    """Call `run_due` until nothing is due. Returns the processor time of each call."""
    took = []
    while timers.next_deadline() <= now:
        start = time.thread_time()
        assert timers.run_due()
        took.append(time.thread_time() - start)
    return took


def test_timers_that_are_due_together_are_called_in_turns(clock: Clock, timers: Timers) -> None:
    called: list[int] = []

    def call(number: int) -> None:
        work()
        called.append(number)

    for number in range(COUNT):
        timers.call_later(1.0 - number % 2 * 0.5, lambda number=number: call(number))  # type: ignore[misc]
    clock.now += 1.0
    took = run(timers, clock.now)
    assert max(took) < LONGEST
    assert len(took) > COUNT * EACH / LONGEST
    assert called == [*range(1, COUNT, 2), *range(0, COUNT, 2)], "in the order of deadlines"
    assert not timers.run_due()


def test_a_timer_due_during_a_turn_does_not_wait_for_later_ones(
    clock: Clock, timers: Timers
) -> None:
    called: list[str] = []
    timers.call_later(2.0, lambda: called.append("late"))

    def call_another() -> None:
        timers.call_later(0.5, lambda: called.append("early"))

    timers.call_later(1.0, call_another)
    clock.now += 3.0
    timers.run_due()
    clock.now += 1.0
    timers.run_due()
    assert called == ["late", "early"]


def test_a_single_timer_is_called_at_once(timers: Timers) -> None:
    called: list[int] = []
    timers.in_turn(lambda: called.append(1))
    assert called == [1]
    assert timers.next_deadline() > 1e9


def test_the_ends_of_many_connections_take_turns(clock: Clock, timers: Timers) -> None:
    called: list[int] = []

    def end(number: int) -> None:
        work()
        called.append(number)
        timers.in_turn(lambda: called.append(number))  # the second part of this end

    start = time.thread_time()
    for number in range(COUNT):
        timers.in_turn(lambda number=number: end(number))  # type: ignore[misc]
    assert time.thread_time() - start < 3 * LONGEST
    assert 0 < len(called) < COUNT
    assert timers.next_deadline() <= clock.now
    while timers.next_deadline() <= clock.now:
        timers.run_due()
    assert called == [number for number in range(COUNT) for _ in "12"]


def test_an_end_that_fails_does_not_stop_the_others(clock: Clock, timers: Timers) -> None:
    called: list[int] = []

    def fail() -> None:
        raise RuntimeError("a defect")

    for _ in range(COUNT):
        timers.in_turn(work)
    timers.in_turn(fail)
    timers.in_turn(lambda: called.append(1))
    defects = 0
    while timers.next_deadline() <= clock.now:
        try:
            timers.run_due()
        except RuntimeError:
            defects += 1
    assert (defects, called) == (1, [1])


async def test_an_earlier_timer_wakes_no_task_before_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with trio_smc.open_stack(trio_smc.Config(tcp_option="off")) as stack:
        timers = stack.runtime.timers
        runs: list[float] = []
        run_due = timers.run_due

        def counted() -> bool:
            runs.append(timers.now())
            return run_due()

        monkeypatch.setattr(timers, "run_due", counted)
        called = trio.Event()
        start = timers.now()
        timers.call_later(4 * PATIENCE, called.set)
        for seconds in (3 * PATIENCE, 2 * PATIENCE):
            timers.call_later(seconds, called.set).cancel()
            await trio.testing.wait_all_tasks_blocked()
        assert not runs
        timers.call_later(0.01, called.set)
        await called.wait()
        assert start + 0.01 <= runs[0] < start + PATIENCE
