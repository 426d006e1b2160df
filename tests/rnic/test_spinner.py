"""Who waits awake for a peer, and when it is given up."""

from __future__ import annotations

import time

import pytest
import trio

from trio_smc.rnic.spinner import Spinner

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


async def test_completions_end_it() -> None:
    """They may have made a task runnable."""
    drained = iter([False, True])
    assert not Spinner(PATIENT, lambda: next(drained)).until(nothing_came)
    assert not list(drained)


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
