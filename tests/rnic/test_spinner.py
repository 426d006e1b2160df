"""Busy-waiting for a peer, and the conditions under which it stops."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import trio

from trio_smc.rnic.spinner import AcceptSpin, AdaptiveSpin, Crowd, Spinner

QUICK = 1e-3
PATIENT = 10.0


def nothing() -> bool:
    return False


async def test_an_arrival_ends_the_spin() -> None:
    polls = iter([False] * 20 + [True])
    assert Spinner(PATIENT, nothing).until(lambda: next(polls))
    assert not list(polls)


async def test_the_spin_ends_in_time() -> None:
    start = time.perf_counter()
    assert not Spinner(QUICK, nothing).until(nothing)
    assert time.perf_counter() - start >= QUICK


@pytest.mark.parametrize("why", ["off", "another handshake", "another task"])
async def test_other_tasks_are_not_delayed(why: str) -> None:
    spinner = Spinner(0.0 if why == "off" else PATIENT, nothing)
    polls: list[int] = []

    def poll() -> bool:
        polls.append(1)
        return True

    async with trio.open_nursery() as nursery:
        if why == "another handshake":
            spinner.sleeping = 1
        if why == "another task":
            nursery.start_soon(trio.lowlevel.checkpoint)
        assert not spinner.until(poll)
    assert not polls


@pytest.mark.parametrize("woken", ["a task", "no task"])
async def test_completions_end_the_spin_if_they_wake_a_task(woken: str) -> None:
    drained: list[bool] = []
    async with trio.open_nursery() as nursery:

        def drain() -> bool:
            drained.append(True)
            if len(drained) == 2 and woken == "a task":
                nursery.start_soon(trio.lowlevel.checkpoint)
            return len(drained) == 2

        polls = iter([False] * 20 + [True])
        assert Spinner(PATIENT, drain).until(lambda: next(polls, False)) is (woken == "no task")
    if woken == "a task":
        assert len(drained) == 2


@pytest.mark.parametrize("soon", [False, True])
async def test_an_answer_that_is_due_does_not_wait_for_other_connections(soon: bool) -> None:
    """If the answer is expected soon, the spin polls for it before it drains other connections."""
    order: list[str] = []

    def drain() -> bool:
        order.append("drain")
        return False

    def ready() -> bool:
        order.append("poll")
        return "drain" in order

    assert Spinner(PATIENT, drain).until(ready, soon=soon)
    assert order.count("drain") == 1
    if soon:
        assert order.index("drain") >= 16
    else:
        assert order[0] == "drain"


async def test_failures_make_spins_rare() -> None:
    spinner = Spinner(QUICK, nothing)
    polled = 0

    def poll() -> bool:
        nonlocal polled
        polled = 1
        return False

    tries = 0
    for _ in range(600):
        polled = 0
        spinner.until(poll)
        tries += polled
    assert 1 <= tries <= 8  # fewer if another process keeps the processor
    while not spinner.until(lambda: True):
        pass
    assert spinner.until(lambda: True), "spins are frequent again after a success"


def test_a_spin_is_as_long_as_waits_that_are_a_little_longer_than_it() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    for _ in range(3):
        spin.slept(190_000)
    assert spin.ns == 50_000
    spin.slept(190_000)
    assert spin.ns == 200_000


def test_a_spin_that_was_given_up_as_too_short_is_tried_again_when_it_is_longer() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    for _ in range(2):
        spin.spin_failed()
    assert spin.discouraged
    for _ in range(4):
        spin.slept(100_000)
    assert not spin.discouraged


def test_one_long_wait_makes_a_spin_short_again() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    for _ in range(6):
        spin.slept(100_000)
    spin.slept(1_000_000)
    assert spin.ns == 50_000
    spin.slept(100_000)
    assert spin.ns == 50_000


@pytest.mark.parametrize(("failures", "given_up"), [(2, False), (3, True)])
def test_one_success_outweighs_two_failures(failures: int, given_up: bool) -> None:
    spin = AdaptiveSpin(50e-6, max_failures=8, retry_every=64, crowd=Crowd())
    gave_up = False
    for _ in range(20):
        spin.spin_succeeded()
        for _ in range(failures):
            spin.spin_failed()
            gave_up |= spin.discouraged
    assert gave_up is given_up


def test_failing_spins_are_retried_less_and_less_often() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    spin.spin_failed()
    spin.spin_failed()
    waits: list[int] = []
    since = 0
    while len(waits) < 8:
        since += 1
        if spin.should_spin():
            spin.spin_failed()
            waits.append(since)
            since = 0
    assert waits == [64, 128, 256, 512, 1024, 1024, 1024, 1024]
    spin.spin_succeeded()
    spin.spin_failed()
    spin.spin_failed()
    assert [spin.should_spin() for _ in range(64)] == [False] * 63 + [True]


def test_skipped_spins_discourage_too() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    spin.spin_skipped()
    assert spin.should_spin()
    spin.spin_skipped()
    assert [spin.should_spin() for _ in range(64)] == [False] * 63 + [True]


@pytest.mark.parametrize(
    ("turn", "wait", "expected"),
    [(0.0, 1e-3, 66), (50e-6, 1e-3, 200), (2e-3, 50e-6, 2), (2e-3, 1e-3, 133)],
    ids=["nobody", "peer", "strangers", "workers"],
)
def test_the_processor_is_yielded_to_peers(
    turn: float, wait: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Yields become rare after 64 that no process used, or after one long turn of strangers.

    A long turn is one of the program's own processes if a wait asleep takes nearly as long.  Then
    16 waits sleep after 33 yields.
    """
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    now, yields = 0, 0

    def sched_yield() -> None:
        nonlocal now, yields
        yields += 1
        now += int(turn * 1e9)

    monkeypatch.setattr(os, "sched_yield", sched_yield)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    for _ in range(200):
        if spin.should_yield():
            spin.yield_processor()
        spin.slept(int(wait * 1e9))
    assert yields == expected


@pytest.mark.parametrize("yields", ["in a spin", "alone"])
def test_waits_sleep_after_a_time_slice_of_another_process(
    yields: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two busy loops on two processors: each yield would cost 4 ms, and a sleep costs 50 us."""
    spin = AdaptiveSpin(50e-6, max_failures=8, retry_every=64, crowd=Crowd())
    now = lost = 0

    def sched_yield() -> None:
        nonlocal now, lost
        lost += 1
        now += 4_000_000

    monkeypatch.setattr(os, "sched_yield", sched_yield)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    waits: list[int] = []
    for number in range(50_000):
        before = lost
        if yields == "alone":
            if spin.should_yield():
                spin.yield_processor()
        elif spin.should_spin():
            assert spin.spin([nothing], now + spin.ns) is None
        if lost > before:
            waits.append(number)
            assert spin.discouraged
        now += 50_000
        spin.slept(50_000)
    pauses = [later - earlier for earlier, later in pairwise(waits)]
    assert pauses == sorted(pauses)
    assert 64 <= pauses[0] <= 16 + 130
    assert 10 * pauses[0] < pauses[-1] <= 16 + 16_400
    assert lost < 16


def test_spins_come_back_when_the_processors_are_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spin = AdaptiveSpin(50e-6, max_failures=8, retry_every=64, crowd=Crowd())
    now = 0

    def sched_yield() -> None:
        nonlocal now
        now += 4_000_000

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_yield", sched_yield)
        patch.setattr(time, "perf_counter_ns", lambda: now)
        assert spin.spin([nothing], now + spin.ns) is None
    waits = 1
    while not spin.should_spin():
        spin.slept(50_000)
        waits += 1
    assert waits <= 16 + 130
    assert spin.spin([lambda: True], 0)
    assert not spin.discouraged


@pytest.mark.parametrize("succeeds", [False, True])
def test_a_longer_spin_that_fails_is_tried_less_and_less_often(succeeds: bool) -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64, crowd=Crowd())
    waits, before = [], 0
    for number in range(4000):
        spin.slept(150_000)
        if spin.ns == 50_000:
            continue
        waits.append(number - before)
        before = number
        if succeeds:
            assert spin.spin([lambda: True], 0)
            spin.slept(500_000)
        else:
            spin.spin_failed()
            spin.spin_failed()
        assert spin.ns == 50_000
        assert spin.discouraged is not succeeds
    if succeeds:
        assert set(waits) == {3, 4}
    else:
        assert waits == [3, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]


def test_a_disabled_spin_stays_disabled() -> None:
    spin = AdaptiveSpin(0.0, max_failures=2, retry_every=64, crowd=Crowd())
    for _ in range(6):
        spin.slept(1)
    assert spin.ns == 0


# --- AcceptSpin --------------------------------------------------------------------------------


async def test_an_accept_spin_keeps_the_loop_awake_until_an_arrival() -> None:
    others = 0

    async def other() -> None:
        nonlocal others
        while others < 10:
            await trio.lowlevel.checkpoint()
            others += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await AcceptSpin(PATIENT).spin(lambda: others >= 5)
        assert others >= 5, "runnable tasks run"


@pytest.mark.parametrize("seconds", [0.0, QUICK])
async def test_a_failing_accept_spin_ends(seconds: float) -> None:
    start = time.perf_counter()
    await AcceptSpin(seconds).spin(nothing)
    assert seconds <= time.perf_counter() - start < PATIENT


async def test_failing_accept_spins_become_rare_and_come_back() -> None:
    accept_spin = AcceptSpin(QUICK)
    polled = 0

    def poll() -> bool:
        nonlocal polled
        polled = 1
        return arrived

    async def tried() -> int:
        nonlocal polled
        polled = 0
        await accept_spin.spin(poll)
        return polled

    arrived = False
    tries = [await tried() for _ in range(200)]
    assert tries[:5] == [1, 1, 1, 1, 0]
    assert 5 <= sum(tries) <= 8
    arrived = True
    while not await tried():
        pass
    assert await tried(), "spins are frequent again after a success"


async def test_one_task_at_a_time_makes_an_accept_spin() -> None:
    accept_spin, arrived = AcceptSpin(PATIENT), trio.Event()
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        return arrived.is_set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_spin.spin, poll)
        while not polls:
            await trio.lowlevel.checkpoint()

        def refuse() -> bool:
            raise AssertionError("a second one polls")

        await accept_spin.spin(refuse)
        arrived.set()
