"""Many tasks that wait at once: when one sleeps, who looks for all of them, whose turn it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
import trio.testing

import trio_smc
import trio_smc.streams.rdma_stream
from tests.api.api_peers import HOST, PATIENCE, close_all, connect
from trio_smc import Config, SmcStream

CONNECTIONS = 10
FEW = 4
ROUNDS = 20
LONG = 0.001
"""Seconds; longer than a turn with amortised checkpoints may last."""


async def echo(stream: SmcStream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


async def ask(stream: SmcStream) -> None:
    for number in range(ROUNDS):
        await stream.send_all(bytes([number]))
        assert await stream.receive_some() == bytes([number])


async def test_requests_of_many_tasks_hardly_need_the_eventfd() -> None:
    """With every task parked only that ends the scheduler's wait (`Pump.wakeups`)."""
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
                        clients.start_soon(ask, here)
                assert stack.runtime.pump.wakeups - before < ROUNDS // 2
                await trio.testing.wait_all_tasks_blocked()
                assert stack.runtime.pump.woken == 0
                assert stack.runtime.pump.waiting == CONNECTIONS
                with trio.move_on_after(0.01) as scope:
                    await pairs[0][0].receive_some()
                assert scope.cancelled_caught
                assert stack.runtime.pump.woken == 0, "who is cancelled was not woken"
                for here, _ in pairs:
                    await here.send_eof()
            await close_all(*(stream for pair in pairs for stream in pair))
            assert stack.runtime.pump.woken == stack.runtime.pump.waiting == 0


@contextlib.asynccontextmanager
async def one_waits() -> AsyncIterator[tuple[SmcStream, SmcStream]]:
    """Two ends of a connection, beside another one that a task reads from."""
    config = Config(receive_buffer=16384, checkpoints="amortised", spin=0)
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
    """One of Trio's calls in `trio_smc.streams.rdma_stream`, and how often a task made it."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.calls = 0
        self._call: Callable[..., Awaitable[object]] = getattr(trio_smc.streams.rdma_stream, name)
        monkeypatch.setattr(trio_smc.streams.rdma_stream, name, self)

    async def __call__(self, *arguments: object) -> object:
        self.calls += trio.lowlevel.current_task() is self.task
        return await self._call(*arguments)


async def test_a_reader_lets_others_run_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = Counted("_sleep", monkeypatch)
    got: list[bytes | bytearray] = []
    async with one_waits() as (here, there):

        async def read() -> None:
            sleeps.task = trio.lowlevel.current_task()
            got.append(await there.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.lowlevel.checkpoint()  # both are in the next pass of the scheduler
            await here.send_all(b"x")
        assert got == [b"x"]
        assert not sleeps.calls


async def test_a_reader_for_whom_that_brings_nothing_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps, yields = Counted("_sleep", monkeypatch), Counted("_yield", monkeypatch)
    async with one_waits() as (here, there):

        async def read() -> None:
            sleeps.task = yields.task = trio.lowlevel.current_task()
            for _ in range(2 * trio_smc.streams.rdma_stream._SELDOM):
                await there.receive_some()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for _ in range(2 * trio_smc.streams.rdma_stream._SELDOM):
                await trio.testing.wait_all_tasks_blocked()
                await here.send_all(b"x")
        assert sleeps.calls == 2 * trio_smc.streams.rdma_stream._SELDOM
        assert yields.calls == 2, "it tries again now and then"


async def test_of_those_that_wake_together_the_last_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others could find would be for tasks whose turn comes after all of theirs."""
    readers: list[trio.lowlevel.Task] = []
    drained: list[trio.lowlevel.Task] = []

    async def read(stream: SmcStream) -> None:
        readers.append(trio.lowlevel.current_task())
        while await stream.receive_some():
            pass

    config = Config(receive_buffer=16384, checkpoints="amortised", spin=0)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(FEW)]
            drain = stack.runtime.pump.drain

            def counted() -> bool:
                with contextlib.suppress(RuntimeError):  # no task runs: a hook drains
                    if (task := trio.lowlevel.current_task()) in readers:
                        drained.append(task)
                return drain()

            monkeypatch.setattr(stack.runtime.pump, "drain", counted)
            async with trio.open_nursery() as nursery:
                for _, there in pairs:
                    nursery.start_soon(read, there)
                # In the first turn they look for whether letting others run helps.
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


async def test_the_turn_of_others_is_not_counted_as_ones_own() -> None:
    """Amortised checkpoints: a call is a full one after a long turn, of its own task only."""
    config = Config(receive_buffer=16384, checkpoints="amortised")
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            here, there = await connect(stack, listener)
            await here.send_all(b"x")
            time.sleep(LONG)  # noqa: ASYNC251  # for others' turns
            await trio.lowlevel.checkpoint()
            passes = stack.runtime.pump.passes
            await here.send_all(b"x")
            assert stack.runtime.pump.passes == passes
            time.sleep(LONG)  # noqa: ASYNC251
            await here.send_all(b"x")
            assert stack.runtime.pump.passes == passes + 1
            await close_all(here, there)


async def test_in_a_long_pass_each_task_makes_one_call() -> None:
    """Amortised checkpoints: with many busy tasks each lets the others run as with strict ones."""
    config = Config(receive_buffer=16384, checkpoints="amortised")
    turns, writers = 10, 4
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(writers)]

            async def write(stream: SmcStream) -> None:
                for _ in range(turns):
                    time.sleep(LONG / writers)  # noqa: ASYNC251
                    await stream.send_all(b"x")

            await trio.lowlevel.checkpoint()
            passes = stack.runtime.pump.passes
            async with trio.open_nursery() as nursery:
                for here, _ in pairs:
                    nursery.start_soon(write, here)
            # The first turn has two calls, the one that is for nothing and the next.
            assert stack.runtime.pump.passes - passes >= turns - 2
            for pair in pairs:
                await close_all(*pair)
