"""`Budget` of amortised checkpoints, without streams and with a simulated clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trio_smc.stack import budget as module
from trio_smc.stack.budget import MAX_PASS_NS, Budget

CALL_NS = 10_000
NO_DEADLINE = 10**18


class _Task:
    custom_sleep_data: object = None


class World:
    """A task whose calls take `CALL_NS` each, and the deadline of another task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        self.now = 0
        self.deadline = NO_DEADLINE
        self.requests = 0
        self.request_ns = 0  # duration of a request for the next deadline
        self.pump: Any = SimpleNamespace(passes=1, machine=SimpleNamespace(state=state))
        self.budget = Budget(cast(Any, self.pump))
        monkeypatch.setattr(module, "_now", lambda: self.now)
        monkeypatch.setattr(module, "_statistics", self._statistics)
        self._task = _Task()
        monkeypatch.setattr(module, "_current_task", lambda: self._task)

    def _statistics(self) -> Any:
        self.requests += 1
        seconds = (self.deadline - self.now) / 1e9
        self.now += self.request_ns
        return SimpleNamespace(seconds_to_next_deadline=seconds)

    def run_pass(self) -> int:
        """Run calls until one yields. Returns the duration in nanoseconds."""
        start = self.now
        while not self.budget.is_exceeded():
            self.now += CALL_NS
        self.end_pass()
        return self.now - start

    def end_pass(self) -> None:
        """Let other tasks run."""
        self._task.custom_sleep_data = None
        if self.pump.machine.state == "BUSY":
            self.pump.passes += 1  # the hook of the pump counts passes


@pytest.fixture(params=["BUSY", "SOLO"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, request.param)


def test_a_pass_uses_its_budget(world: World) -> None:
    world.run_pass()
    assert MAX_PASS_NS <= world.run_pass() <= MAX_PASS_NS + CALL_NS
    assert world.requests <= 2


@pytest.mark.parametrize("due", [30_000, 100_000, 390_000])
def test_a_deadline_ends_a_pass(world: World, due: int) -> None:
    world.run_pass()
    world.deadline = world.now + due
    assert due <= world.run_pass() <= due + CALL_NS
    # Trio runs tasks in random order, so the task with the deadline may not have run yet.
    assert world.run_pass() == 0
    world.deadline = NO_DEADLINE
    assert MAX_PASS_NS <= world.run_pass() <= MAX_PASS_NS + CALL_NS


def test_short_passes_do_not_request_the_deadline(world: World) -> None:
    for _ in range(100):
        world.budget.is_exceeded()
        world.now += CALL_NS
        world.budget.is_exceeded()
        world.end_pass()
    assert not world.requests


@pytest.mark.parametrize("request_ns", [1_000, 5_000, 100_000])
def test_requests_for_the_deadline_take_little_time(world: World, request_ns: int) -> None:
    """Requests take at most 5 % of the time; their duration grows with the number of sockets."""
    world.request_ns = request_ns
    start, passes = world.now, 0
    while world.now - start < 50_000_000:
        world.run_pass()
        passes += 1
    assert 1 <= world.requests <= passes
    assert world.requests * request_ns < 0.05 * (world.now - start)


def test_a_deadline_ends_a_pass_shortly_after_the_last_request(world: World) -> None:
    world.request_ns = 5_000
    world.run_pass()
    for _ in range(20):
        world.deadline = world.now + 300_000
        assert 300_000 <= world.run_pass() <= 300_000 + CALL_NS
        assert world.run_pass() == 0
