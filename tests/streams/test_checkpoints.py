"""Amortised checkpoints, the default: each call checks for cancellation, and no other task waits
long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from tests.streams.stream_pairs import close_both, open_pairs, smc_config, tcp_config
from tests.timing import PATIENCE
from trio_smc import Config, Mode, SmcStream

CONFIGS = {
    "amortised": smc_config(),
    "strict": smc_config(checkpoints="strict"),
    "tcp": tcp_config(),
}
Call = Callable[[SmcStream], Awaitable[object]]
CALLS: dict[str, Call] = {
    "send_all": lambda stream: stream.send_all(b"data"),
    "send_all of nothing": lambda stream: stream.send_all(b""),
    "receive_some": lambda stream: stream.receive_some(),
    "receive_some of one byte": lambda stream: stream.receive_some(1),
    "receive_some_into": lambda stream: stream.receive_some_into(bytearray(4)),
    "wait_send_all_might_not_block": lambda stream: stream.wait_send_all_might_not_block(),
    "send_eof": lambda stream: stream.send_eof(),
    "wait_urgent": lambda stream: stream.wait_urgent(),
    "send_urgent": lambda stream: stream.send_urgent(b"!"),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Config:
    return CONFIGS[request.param]


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_need_not_wait_is_cancelled(config: Config, name: str) -> None:
    """A cancelled call has no effect: it has sent and received no byte."""
    with trio.fail_after(PATIENCE):
        async with open_pairs(config) as pairs:
            stream, peer = pair = await pairs.make()
            await peer.send_all(b"0123456789")
            if "urgent" not in name:
                # All data has arrived, so no call would wait.
                assert await stream.receive_some(1) == b"0"
            with trio.CancelScope() as scope:
                scope.cancel()
                await CALLS[name](stream)
            assert scope.cancelled_caught
            await stream.send_all(b"end")
            assert await peer.receive_some() == b"end"
            if "urgent" not in name:
                assert await stream.receive_some() == b"123456789"
            else:
                assert await stream.receive_some() == b"0123456789"
            await close_both(pair)


async def test_a_loop_of_calls_that_never_wait_is_cancelled(config: Config) -> None:
    with trio.fail_after(PATIENCE):
        async with open_pairs(config) as pairs:
            stream, peer = pair = await pairs.make()
            done = 0
            with trio.move_on_after(0.05):
                while True:
                    await stream.send_all(b"x")
                    assert await peer.receive_some() == b"x"
                    done += 1
            assert done
            assert stream.mode is (Mode.TCP if config.rnics == () else Mode.SMC_R)
            await close_both(pair)


async def test_the_deadline_of_another_task_ends_a_long_pass() -> None:
    """Without this rule, a task whose deadline has passed could wait for the end of a long pass."""
    calls = 0
    late: list[float] = []

    async def tick() -> None:
        for _ in range(200):
            due = trio.current_time() + 0.001
            await trio.sleep_until(due)
            late.append(trio.current_time() - due)

    with trio.fail_after(PATIENCE):
        async with open_pairs(smc_config()) as pairs:
            stream, peer = pair = await pairs.make()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tick)
                while len(late) < 200:
                    await stream.send_all(bytes(64))
                    await peer.receive_some()
                    calls += 1
            await close_both(pair)
    # 200 µs are half of the longest pass.  A busy machine delays some ticks by more.
    assert sorted(late)[len(late) // 4] < 200e-6


async def _count_steps(stream: SmcStream, calls: int) -> int:
    """Count the steps of this task in calls of `send_all` that need not wait."""
    counter = _Steps()
    trio.lowlevel.add_instrument(counter)
    for _ in range(calls):
        await stream.send_all(b"x")
    trio.lowlevel.remove_instrument(counter)
    return counter.steps


class _Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.steps = 0
        self._task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += task is self._task


@pytest.mark.parametrize(
    ("settings", "least", "most"), [({}, 0, 9), ({"checkpoints": "strict"}, 10, 20)]
)
async def test_the_default_is_amortised(settings: dict[str, Any], least: int, most: int) -> None:
    async with open_pairs(smc_config(**settings)) as pairs:
        pair = await pairs.make()
        await trio.lowlevel.checkpoint()
        assert least <= await _count_steps(pair[0], 10) <= most
        await close_both(pair)
