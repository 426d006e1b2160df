"""Connections of a program that stops all clocks, as its tests may do with freezegun."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.timing import PATIENCE
from trio_smc.rnic.spinner import AdaptiveSpin, Crowd

CLOCKS: Final = (
    "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns",
)  # fmt: skip
ROUND_TRIPS: Final = 30


@contextmanager
def stopped_clocks() -> Iterator[None]:
    """No clock goes on, by whichever name a module of trio_smc knows it.

    Trio's clock goes on, because the deadlines of the test need it.
    """
    clocks = [getattr(time, name) for name in CLOCKS]
    stopped = {id(clock): partial(lambda now: now, clock()) for clock in clocks}
    modules = [time, *(m for name, m in sys.modules.items() if name.startswith("trio_smc"))]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if id(value) in stopped:
                    patch.setattr(module, name, stopped[id(value)])
        yield


@pytest.fixture
def enabled() -> Iterator[None]:
    """SMC-R with spins that are tried at each wait."""
    trio_smc.enable(trio_smc.Config(learn_short=False, tcp_option="off"))
    try:
        yield
    finally:
        trio_smc.disable()


async def answer(listener: Any) -> None:
    with trio.move_on_after(PATIENCE):
        while True:
            sock, _ = await listener.accept()
            with sock:
                while data := await sock.recv(100):
                    await sock.send(data)


async def request(address: Any, *, silent: bool) -> None:
    with trio.socket.socket() as sock:
        await sock.connect(address)
        if silent:
            with trio.move_on_after(0.2) as scope:
                await sock.recv(1)
            assert scope.cancelled_caught
            return
        for number in range(ROUND_TRIPS):
            await sock.send(b"%d" % number)
            assert await sock.recv(100) == b"%d" % number


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("silent", [True, False])
def test_requests_are_answered(from_the_start: bool, silent: bool) -> None:
    """``silent``: the client waits for an answer that never comes, until its deadline."""

    async def main() -> None:
        with trio.fail_after(PATIENCE), trio.socket.socket() as listener:
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, listener)
                await wait_all_tasks_blocked(0.01)
                if from_the_start:
                    await request(listener.getsockname(), silent=silent)
                else:
                    await request(listener.getsockname(), silent=False)
                    with stopped_clocks():
                        await request(listener.getsockname(), silent=silent)
                nursery.cancel_scope.cancel()

    if from_the_start:
        with stopped_clocks():
            trio.run(main)
    else:
        trio.run(main)


def test_a_spin_ends_without_a_clock() -> None:
    spin = AdaptiveSpin(0.001, max_failures=4, retry_every=8, crowd=Crowd(judges=False))
    with stopped_clocks():
        for _ in range(4):
            assert not spin.discouraged
            assert spin.spin([lambda: False], time.perf_counter_ns() + spin.ns) is None
    assert spin.discouraged
