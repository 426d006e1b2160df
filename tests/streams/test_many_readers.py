"""Many tasks wait at once: which of them drains, and when a call yields to the other tasks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import pytest
import trio
import trio.testing

import trio_smc
from tests.api.api_peers import HOST, close_all, connect
from tests.peers import echo
from tests.timing import PATIENCE
from trio_smc import Config, SmcStream
from trio_smc.rnic.dispatch import Dispatcher
from trio_smc.streams import parking

CONNECTIONS = 10
FEW = 4
ROUNDS = 20
CheckpointMode = Literal["strict", "amortised"]
LONG_TURN = 0.001
"""Seconds; with amortised checkpoints, a turn may not last so long."""


async def request(stream: SmcStream) -> None:
    for number in range(ROUNDS):
        await stream.send_all(bytes([number]))
        assert await stream.receive_some() == bytes([number])


async def test_requests_of_many_tasks_hardly_need_the_eventfd() -> None:
    """`Pump.wakeups` counts the events of the eventfd, which ends the scheduler's wait while every
    task is parked."""
    config = Config(receive_buffer=16384, checkpoints="amortised", spin=0)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(CONNECTIONS)]
            async with trio.open_nursery() as servers:
                for _, there in pairs:
                    servers.start_soon(echo, there)
                before = stack.runtime.pump.wakeups
                async with trio.open_nursery() as clients:
                    for here, _ in pairs:
                        clients.start_soon(request, here)
                assert stack.runtime.pump.wakeups - before < ROUNDS // 2
                await trio.testing.wait_all_tasks_blocked()
                assert stack.runtime.pump.woken == 0
                assert stack.runtime.pump.waiting == CONNECTIONS
                with trio.move_on_after(0.01) as scope:
                    await pairs[0][0].receive_some()
                assert scope.cancelled_caught
                assert stack.runtime.pump.woken == 0, "a cancelled task counts as woken"
                for here, _ in pairs:
                    await here.send_eof()
            await close_all(*(stream for pair in pairs for stream in pair))
            assert stack.runtime.pump.woken == stack.runtime.pump.waiting == 0


@contextlib.asynccontextmanager
async def second_connection(
    checkpoints: CheckpointMode,
) -> AsyncIterator[tuple[SmcStream, SmcStream]]:
    """Open two connections, let a task wait for data of the first, and return the second."""
    config = Config(receive_buffer=16384, checkpoints=checkpoints, spin=0)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
            [listener] = await stack.open_listeners(0, host=HOST)
            other, pair = [await connect(stack, listener) for _ in range(2)]
            nursery.start_soon(other[0].receive_some)
            await trio.testing.wait_all_tasks_blocked()
            assert stack.runtime.pump.waiting == 1
            yield pair
            nursery.cancel_scope.cancel()
            await close_all(*other, *pair)


class Counted:
    """Replaces one of Trio's functions in `trio_smc.streams.parking`, and counts the calls of one
    task."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.calls = 0
        self._call: Callable[..., Awaitable[object]] = getattr(parking, name)
        monkeypatch.setattr(parking, name, self)

    async def __call__(self, *arguments: object) -> object:
        self.calls += trio.lowlevel.current_task() is self.task
        return await self._call(*arguments)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_a_reader_that_finds_nothing_parks_at_once(
    monkeypatch: pytest.MonkeyPatch, checkpoints: CheckpointMode
) -> None:
    """The reader parks without a yield before."""
    parks, yields = Counted("_sleep", monkeypatch), Counted("_yield", monkeypatch)
    async with second_connection(checkpoints) as (here, there):

        async def read() -> None:
            parks.task = yields.task = trio.lowlevel.current_task()
            for _ in range(ROUNDS):
                await there.receive_some()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for _ in range(ROUNDS):
                await trio.testing.wait_all_tasks_blocked()
                await here.send_all(b"x")
    assert parks.calls == ROUNDS
    assert yields.calls == 0


async def test_of_tasks_that_wake_together_the_last_drains() -> None:
    """An earlier drain finds only completions for tasks that run after all of these tasks."""
    readers: list[trio.lowlevel.Task] = []
    drained: list[trio.lowlevel.Task] = []

    class CountingDispatcher(Dispatcher):
        __slots__ = ()

        def drain(self) -> bool:
            with contextlib.suppress(RuntimeError):  # raised if no task runs and a hook drains
                if (task := trio.lowlevel.current_task()) in readers:
                    drained.append(task)
            return super().drain()

    async def read(stream: SmcStream) -> None:
        readers.append(trio.lowlevel.current_task())
        while await stream.receive_some():
            pass

    config = Config(receive_buffer=16384, checkpoints="amortised", spin=0)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(FEW)]
            stack.runtime.pump.dispatcher.__class__ = CountingDispatcher
            async with trio.open_nursery() as nursery:
                for _, there in pairs:
                    nursery.start_soon(read, there)
                for _ in range(2):
                    await trio.testing.wait_all_tasks_blocked()
                    drained.clear()
                    for here, _ in pairs:
                        await here.send_all(b"x")
                await trio.testing.wait_all_tasks_blocked()
                assert len(drained) == 1
                for here, _ in pairs:
                    await here.send_eof()
            await close_all(*(stream for pair in pairs for stream in pair))


async def test_the_turn_of_another_task_does_not_use_up_the_budget() -> None:
    """With amortised checkpoints, a call yields only after a long turn of its own task."""
    config = Config(receive_buffer=16384, checkpoints="amortised")
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            here, there = await connect(stack, listener)
            await here.send_all(b"x")
            time.sleep(LONG_TURN)  # noqa: ASYNC251  # replaces the turns of other tasks
            await trio.lowlevel.checkpoint()
            passes = stack.runtime.pump.passes
            await here.send_all(b"x")
            assert stack.runtime.pump.passes == passes
            time.sleep(LONG_TURN)  # noqa: ASYNC251
            await here.send_all(b"x")
            assert stack.runtime.pump.passes == passes + 1
            await close_all(here, there)


async def test_in_a_long_pass_each_task_makes_one_call() -> None:
    """With amortised checkpoints, many busy tasks take turns as with strict checkpoints."""
    config = Config(receive_buffer=16384, checkpoints="amortised")
    turns, writers = 10, 4
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(writers)]

            async def write(stream: SmcStream) -> None:
                for _ in range(turns):
                    time.sleep(LONG_TURN / writers)  # noqa: ASYNC251
                    await stream.send_all(b"x")

            await trio.lowlevel.checkpoint()
            passes = stack.runtime.pump.passes
            async with trio.open_nursery() as nursery:
                for here, _ in pairs:
                    nursery.start_soon(write, here)
            # The first turn has two calls: one within the budget, and one that ends the turn.
            assert stack.runtime.pump.passes - passes >= turns - 2
            for pair in pairs:
                await close_all(*pair)
