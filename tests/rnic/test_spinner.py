"""Who waits awake for a peer, and when it is given up."""

from __future__ import annotations

import os
import time

import pytest
import trio

from trio_smc.rnic.spinner import PAUSE_NS, AcceptSpin, AdaptiveSpin, Spinner

QUICK = 1e-3
PATIENT = 10.0


def nothing_came() -> bool:
    return False


async def test_what_comes_ends_it() -> None:
    looks = iter([False] * 20 + [True])
    assert Spinner(PATIENT, nothing_came).until(lambda: next(looks))
    assert not list(looks)


async def test_it_ends_in_time() -> None:
    start = time.perf_counter()
    assert not Spinner(QUICK, nothing_came).until(nothing_came)
    assert time.perf_counter() - start >= QUICK


@pytest.mark.parametrize("why", ["off", "another handshake", "another task"])
async def test_others_are_not_kept_waiting(why: str) -> None:
    spinner = Spinner(0.0 if why == "off" else PATIENT, nothing_came)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        return True

    async with trio.open_nursery() as nursery:
        if why == "another handshake":
            spinner.sleeping = 1
        if why == "another task":
            nursery.start_soon(trio.lowlevel.checkpoint)
        assert not spinner.until(look)
    assert not looks


@pytest.mark.parametrize("for_whom", ["a task", "nobody"])
async def test_completions_end_it_when_they_wake_somebody(for_whom: str) -> None:
    drained: list[bool] = []
    async with trio.open_nursery() as nursery:

        def drain() -> bool:
            drained.append(True)
            if len(drained) == 2 and for_whom == "a task":
                nursery.start_soon(trio.lowlevel.checkpoint)
            return len(drained) == 2

        looks = iter([False] * 20 + [True])
        assert Spinner(PATIENT, drain).until(lambda: next(looks, False)) is (for_whom == "nobody")
    if for_whom == "a task":
        assert len(drained) == 2


@pytest.mark.parametrize("soon", [False, True])
async def test_an_answer_that_is_near_does_not_wait_for_other_connections(soon: bool) -> None:
    """To take their completions may be to end them; it is done first where the peer has work."""
    order: list[str] = []

    def drain() -> bool:
        order.append("drain")
        return False

    def ready() -> bool:
        order.append("look")
        return "drain" in order

    assert Spinner(PATIENT, drain).until(ready, soon=soon)
    assert order.count("drain") == 1
    if soon:
        assert order.index("drain") >= 16
    else:
        assert order[0] == "drain"


async def test_misses_make_it_rare() -> None:
    spinner = Spinner(QUICK, nothing_came)
    looked = 0

    def look() -> bool:
        nonlocal looked
        looked = 1
        return False

    tries = 0
    for _ in range(600):
        looked = 0
        spinner.until(look)
        tries += looked
    assert 5 <= tries <= 8
    while not spinner.until(lambda: True):
        pass
    assert spinner.until(lambda: True), "a hit brings it back"


def test_a_spin_is_as_long_as_waits_that_are_a_little_longer_than_it() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
    for _ in range(3):
        spin.slept(190_000)
    assert spin.ns == 50_000
    spin.slept(190_000)
    assert spin.ns == 200_000


def test_a_spin_that_was_given_up_as_too_short_is_tried_again_when_it_is_longer() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
    for _ in range(2):
        assert spin.spin([nothing_came], 0) is None
    assert spin.discouraged
    for _ in range(4):
        spin.slept(100_000)
    assert not spin.discouraged


def test_one_long_wait_makes_a_spin_short_again() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
    for _ in range(6):
        spin.slept(100_000)
    spin.slept(1_000_000)
    assert spin.ns == 50_000
    spin.slept(100_000)
    assert spin.ns == 50_000


def test_a_peer_that_makes_pauses_is_not_waited_for_awake_for_long() -> None:
    """Two of them are enough, one is not, where it takes eight tries else."""
    spin = AdaptiveSpin(50e-6, max_failures=8, retry_every=64)
    for _ in range(2):
        assert spin.should_spin()
        assert spin.spin([nothing_came], 0) is None
        spin.slept(PAUSE_NS + 1)
    assert not spin.should_spin()


@pytest.mark.parametrize(("vain", "given_up"), [(2, False), (3, True)])
def test_one_fruitful_try_outweighs_two_that_were_not(vain: int, given_up: bool) -> None:
    spin = AdaptiveSpin(50e-6, max_failures=8, retry_every=64)
    gave_up = False
    for _ in range(20):
        spin.spin_succeeded()
        for _ in range(vain):
            spin.spin_failed()
            gave_up |= spin.discouraged
    assert gave_up is given_up


def test_tries_in_vain_are_made_ever_less_often() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
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


def test_who_is_hindered_time_and_again_asks_less_often() -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
    spin.spin_skipped()
    assert spin.should_spin()
    spin.spin_skipped()
    assert [spin.should_spin() for _ in range(64)] == [False] * 63 + [True]


@pytest.mark.parametrize(
    ("turn", "asked"), [(0.0, 66), (50e-6, 200), (2e-3, 4)], ids=["nobody", "peer", "others"]
)
def test_stepping_aside_is_for_who_takes_a_short_turn(
    turn: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has run: after 64 times only each 65th time.  For long: so at once."""
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
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
    assert yields == asked


@pytest.mark.parametrize("fruitful", [False, True])
def test_a_longer_spin_is_tried_ever_less_often_while_it_is_in_vain(fruitful: bool) -> None:
    spin = AdaptiveSpin(50e-6, max_failures=2, retry_every=64)
    waits, before = [], 0
    for number in range(4000):
        spin.slept(150_000)
        if spin.ns == 50_000:
            continue
        waits.append(number - before)
        before = number
        if fruitful:
            assert spin.spin([lambda: True], 0)
            spin.slept(500_000)
        else:
            assert spin.spin([nothing_came], 0) is None
            assert spin.spin([nothing_came], 0) is None
        assert spin.ns == 50_000
        assert spin.discouraged is not fruitful
    if fruitful:
        assert set(waits) == {3, 4}
    else:
        assert waits == [3, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]


def test_no_spin_stays_none() -> None:
    spin = AdaptiveSpin(0.0, max_failures=2, retry_every=64)
    for _ in range(6):
        spin.slept(1)
    assert spin.ns == 0


# --- AcceptSpin --------------------------------------------------------------------------------


async def test_a_vigil_keeps_the_loop_awake_until_something_comes() -> None:
    others = 0

    async def other() -> None:
        nonlocal others
        while others < 10:
            await trio.lowlevel.checkpoint()
            others += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await AcceptSpin(PATIENT).spin(lambda: others >= 5)
        assert others >= 5, "who can run does"


@pytest.mark.parametrize("seconds", [0.0, QUICK])
async def test_a_vigil_in_vain_ends(seconds: float) -> None:
    start = time.perf_counter()
    await AcceptSpin(seconds).spin(nothing_came)
    assert seconds <= time.perf_counter() - start < PATIENT


async def test_vigils_in_vain_become_rare_and_come_back() -> None:
    vigil = AcceptSpin(QUICK)
    looked = 0

    def look() -> bool:
        nonlocal looked
        looked = 1
        return came

    async def kept() -> int:
        nonlocal looked
        looked = 0
        await vigil.spin(look)
        return looked

    came = False
    tries = [await kept() for _ in range(200)]
    assert tries[:5] == [1, 1, 1, 1, 0]
    assert 5 <= sum(tries) <= 8
    came = True
    while not await kept():
        pass
    assert await kept(), "one that was worth it brings it back"


async def test_one_task_at_a_time_keeps_a_vigil() -> None:
    vigil, came = AcceptSpin(PATIENT), trio.Event()
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return came.is_set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(vigil.spin, look)
        while not looks:
            await trio.lowlevel.checkpoint()

        def unasked() -> bool:
            raise AssertionError("a second one looks")

        await vigil.spin(unasked)
        came.set()
