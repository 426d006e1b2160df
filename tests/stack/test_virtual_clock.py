"""A stack under a virtual clock: its timers run in real time and do not stop the clock's jumps."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

import trio_smc
from tests.peers import connect_sockets
from tests.streams.stream_pairs import Pairs, close_both, open_pairs, read, smc_config
from tests.timing import PATIENCE
from trio_smc.control import server
from trio_smc.rendezvous.discovery import publication
from trio_smc.sockets.drop_in import DropInSocket

YEAR = 365 * 24 * 3600.0


def run(main: Callable[[], Awaitable[object]]) -> list[float]:
    """Run with a clock that jumps after a call of `let_jump`. Returns the times of its jumps."""
    clock = trio.testing.MockClock()
    stops: list[float] = []

    class Watch(trio.abc.Instrument):
        def before_io_wait(self, _: float) -> None:
            now = clock.current_time()
            if now != (stops[-1] if stops else 0.0):
                stops.append(now)

    began = time.monotonic()
    trio.run(main, clock=clock, instruments=[Watch()])
    assert time.monotonic() - began < PATIENCE
    return stops


def let_jump() -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.autojump_threshold = 0.0


async def sleep_with_idle_connection(pairs: Pairs) -> None:
    pair = a, b = await pairs.make()
    let_jump()
    await a.send_all(b"before")
    assert await read(b, 6) == b"before"
    await trio.sleep(YEAR)
    await b.send_all(b"after")
    assert await read(a, 5) == b"after"
    await close_both(pair)


@pytest.mark.parametrize("stacks", [1, 2])
def test_a_long_sleep_with_an_idle_connection(stacks: int) -> None:
    async def main() -> None:
        async with open_pairs(smc_config(), stacks=stacks) as pairs:
            assert pairs.mode is trio_smc.Mode.SMC_R
            await sleep_with_idle_connection(pairs)

    stops = run(main)
    assert stops[-1] == pytest.approx(YEAR, rel=0.001)
    assert len(stops) < 20, stops[:30]


def test_a_long_sleep_of_an_unmodified_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `trio-smc run`: a control socket, listeners and a report each second."""
    monkeypatch.setenv("TRIO_SMC_RUN", "/nowhere")
    for module in (server, publication):
        monkeypatch.setattr(module, "NAME_INTERVAL", 1.0)

    async def main() -> None:
        client, accepted = await connect_sockets()
        assert isinstance(client.socket, DropInSocket)
        async with client, accepted:
            let_jump()
            await client.send_all(b"x")
            assert await accepted.receive_some() == b"x"
            await trio.sleep(YEAR)
            await accepted.send_all(b"y")
            assert await client.receive_some() == b"y"

    trio_smc.enable()
    try:
        stops = run(main)
    finally:
        trio_smc.disable()
    assert len(stops) < 20, stops[:30]


def test_data_arrives_although_the_clock_has_jumped() -> None:
    """Closing a stream, and leaving a stack, waits for the peer in real time."""
    data = bytes(5_000_000)
    got = bytearray()

    async def main() -> None:
        async with open_pairs(smc_config(), stacks=1) as pairs:
            a, b = await pairs.make()
            let_jump()

            async def receive() -> None:
                while piece := await b.receive_some():
                    got.extend(piece)
                await b.aclose()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await a.send_all(data)
                await a.aclose()

    run(main)
    assert got == data


def test_timers_run_in_real_time_on_a_clock_that_stands_still() -> None:
    """Timers of the stack expire although no deadline of the Trio run does."""

    async def main() -> None:
        async with trio_smc.open_stack() as stack:
            expired = trio.Event()
            stack.runtime.timers.call_later(3600.0, expired.set)
            timer = stack.runtime.timers.call_later(0.05, expired.set)
            began = time.monotonic()
            await expired.wait()
            assert time.monotonic() - began >= 0.05
            assert timer.callback is None

    trio.run(main, clock=trio.testing.MockClock())


async def test_timers_and_trio_have_the_same_time() -> None:
    async with trio_smc.open_stack() as stack:
        for _ in range(100):
            assert abs(stack.runtime.timers.now() - trio.current_time()) < 0.05
            await trio.lowlevel.checkpoint()
