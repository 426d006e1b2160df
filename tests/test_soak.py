"""A short soak, and whether it would notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from examples.chaos_load import Wrong
from scripts import soak
from scripts.soak import LIMITS, Soak, Watched, line_through
from scripts.soak_process import TlsFrames
from tests.timing import PATIENCE

SECONDS = 15.0
LEVEL = {"memory": 50 << 20, "descriptors": 100, "memfds": 40, "mappings": 30, "threads": 3}


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_a_short_one(runtime_directory: object, seed: int) -> None:
    lines: list[str] = []
    seen = await Soak(SECONDS, seed & 0xFFFF, lines.append).run()
    assert seen.problems == [], lines
    assert set(seen.whole) == {"plain", "tls", "websocket"}
    assert seen.counts["killed"] >= 1
    assert seen.counts["cut by a kill or stop"] >= 1
    assert seen.whole_bytes > 0
    for name in ("server", "client", "stopped", "chaos server", "chaos client"):
        assert seen.samples[name]


async def test_two_waiters_are_both_woken() -> None:
    """The second waiter took the first one's wakeup away, for a minute."""
    one = Soak(15.0, 1, lambda _: None)
    ready: set[str] = set()
    seen: dict[str, bool] = {}

    async def wait(name: str) -> None:
        seen[name] = await one.wait_until(lambda: name in ready, 60.0)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for name in ("first", "second"):
                nursery.start_soon(wait, name)
                await trio.testing.wait_all_tasks_blocked()
            for name in ("first", "second"):
                ready.add(name)
                one.wake_all()
                await trio.testing.wait_all_tasks_blocked()
    assert seen == {"first": True, "second": True}


def problems_of(**held: list[int]) -> list[str]:
    """The problems of an hour with such samples of the server."""
    one = Soak(3600.0, 1, lambda _: None)
    for index in range(100):
        sample = LEVEL | {what: values[index % len(values)] for what, values in held.items()}
        one.seen.samples.setdefault("server", []).append((index * 36.0, sample))
    one.seen.counts["killed"] = 1
    one.seen.cut["plain"] = 1
    for transport in ("plain", "tls", "websocket"):
        one.seen.whole[transport] = 1
    one.judge()
    return one.seen.problems


def test_a_line() -> None:
    assert line_through([(when, 3.0 * when + 5) for when in range(10)]) == pytest.approx(27)
    assert line_through([(0.0, 1.0), (1.0, 9.0)]) == 0


@pytest.mark.parametrize("what", LIMITS)
def test_growth_is_a_problem(what: str) -> None:
    """By a tenth more than is allowed, after the warm-up."""
    rise = LIMITS[what] * 1.1 / 0.75
    growing = [LEVEL[what] + round(rise * index / 99) for index in range(100)]
    [problem] = problems_of(**{what: growing})
    assert problem.startswith(f"server: {what} rose by ")
    assert problems_of(**{what: growing[::-1]}) == []


def test_fluctuation_is_no_problem() -> None:
    assert problems_of(memory=[50 << 20, 90 << 20], descriptors=[100, 190]) == []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Soak:
    """A soak of two minutes, at its hundredth second: processes 1, 2 and 3."""
    one = Soak(120.0, 1, lambda _: None)
    monkeypatch.setattr(one, "elapsed", lambda: 100.0)
    process: Any = None
    for number, role in enumerate(("server", "client", "killed"), 1):
        one.processes[number] = Watched(role, number, process, tmp_path / role)
    return one


ENDED: dict[str, Any] = {
    "transport": "plain",
    "bytes": 10,
    "activity": "7 (stream)",
    "seconds": 5.0,
    "log": [],
}


class TestJudgement:
    def test_a_connection_of_the_survivors_must_not_break(self, watched: Soak) -> None:
        watched.on_fault(watched.processes[2], kind="link-down")
        watched.on_ended(watched.processes[1], other=2, how="reset", **ENDED)
        assert len(watched.seen.problems) == 1

    @pytest.mark.parametrize(
        ("until", "problems"), [(float("inf"), 0), (96.0, 0), (94.0, 1), (-1.0, 1)]
    )
    def test_one_with_a_killed_or_stopped_process_may(
        self, until: float, problems: int, watched: Soak
    ) -> None:
        watched.processes[3].excused = until
        watched.on_ended(watched.processes[1], other=3, how="reset", **ENDED)
        assert len(watched.seen.problems) == problems
        assert watched.seen.prefix_bytes == (0 if problems else 10)

    @pytest.mark.parametrize("killed", [True, False])
    def test_only_a_killed_process_ends_a_stream_early(self, killed: bool, watched: Soak) -> None:
        watched.processes[3].excused = float("inf")
        watched.processes[3].killed = killed
        watched.on_ended(watched.processes[1], other=3, how="ended early: at 3", **ENDED)
        assert len(watched.seen.problems) == (0 if killed else 1)
        assert watched.seen.prefix_bytes == (10 if killed else 0)

    @pytest.mark.parametrize("how", ["hung", "wrong: a wrong byte at position 3"])
    def test_nothing_excuses_a_wrong_byte(self, how: str, watched: Soak) -> None:
        watched.processes[3].excused = float("inf")
        watched.on_ended(watched.processes[1], other=3, how=how, **ENDED)
        assert len(watched.seen.problems) == 1

    def test_a_word_on_standard_error_is_a_problem(self, watched: Soak) -> None:
        for number, text in ((1, ""), (2, "Traceback")):
            watched.processes[number].errors.write_text(text)
            watched.look_at_errors(watched.processes[number])
        assert watched.seen.problems == ["client 2 wrote to standard error: Traceback"]


async def test_tls_that_ends_in_order_in_the_middle_is_wrong() -> None:
    class Over:
        async def receive_some(self) -> bytes:
            return b""

    stream: Any = Over()
    with pytest.raises(Wrong, match="in the middle"):
        await TlsFrames(stream).receive_some(10)


def test_resources_of_a_process_are_counted() -> None:
    descriptors = [os.memfd_create("soak") for _ in range(5)]
    try:
        before = soak.held_by(os.getpid())
    finally:
        for each in descriptors:
            os.close(each)
    after = soak.held_by(os.getpid())
    assert before["memfds"] - after["memfds"] == 5
    assert before["descriptors"] - after["descriptors"] == 5
    assert after["memory"] > 1 << 20
    assert after["threads"] >= 1
