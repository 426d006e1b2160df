"""The solo reader, which waits on the RNIC's doorbell itself (`trio_smc.rnic.solo`)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import trio
import trio.testing

import trio_smc
from tests.peers import echo
from tests.rnic.pumps import Passes, is_hooked
from tests.streams.stream_pairs import SMALL_RING, Pairs, close_both, open_pairs, read, smc_config
from tests.timing import PATIENCE
from trio_smc import SmcStream
from trio_smc.rnic import solo
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.solo import SOLO_AFTER_WAITS, SoloReader
from trio_smc.stack import budget

PAUSE = 0.001
"""Seconds between requests, so that the event loop sleeps."""


@pytest.fixture(autouse=True)
def long_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent time limits from ending solo mode on a busy machine."""
    monkeypatch.setattr(solo, "MAX_GAP", PATIENCE)
    monkeypatch.setattr(solo, "WATCHDOG_INTERVAL", PATIENCE)


def pump_of(stack: trio_smc.Stack) -> Pump:
    return stack.runtime.pump


@dataclass
class EchoConnection:
    """A connection to an echo server.  After `until_solo` the server's task is a solo reader."""

    pairs: Pairs
    here: SmcStream
    there: SmcStream

    @property
    def pump(self) -> Pump:
        return pump_of(self.pairs.server)

    async def request(self, data: bytes = b"x") -> None:
        await self.here.send_all(data)
        assert await read(self.here, len(data)) == data

    async def until_solo(self) -> None:
        with trio.fail_after(PATIENCE):
            while self.pump.machine.state != "SOLO":
                await trio.sleep(PAUSE)
                await self.request()
            await trio.testing.wait_all_tasks_blocked()
        assert not await is_hooked(self.pump)


@pytest.fixture
async def passes() -> AsyncIterator[Passes]:
    counter = Passes()
    trio.lowlevel.add_instrument(counter)
    yield counter
    trio.lowlevel.remove_instrument(counter)


@asynccontextmanager
async def solo_server(
    checkpoints: str = "strict", **settings: object
) -> AsyncIterator[EchoConnection]:
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints, **settings)
    with trio.fail_after(PATIENCE):
        async with open_pairs(config, stacks=2) as pairs:
            pair = await pairs.make()
            connection = EchoConnection(pairs, *pair)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, connection.there)
                await connection.until_solo()
                yield connection
                await connection.here.send_eof()
            await close_both(pair)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_a_solo_reader_answers_requests(checkpoints: str) -> None:
    async with solo_server(checkpoints) as connection:
        pump = connection.pump
        before = pump.passes
        for number in range(100):
            await trio.sleep(PAUSE)
            await connection.request(b"%d" % number)
        assert pump.machine.state == "SOLO"
        assert 100 <= pump.passes - before <= 110, "only waits count as passes"
        await trio.testing.wait_all_tasks_blocked()
        assert pump.waiting == 1


async def test_a_reader_that_finds_only_completions_for_others_lets_them_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(1)
            await trio.lowlevel.checkpoint()

    async with solo_server() as connection:
        finds, wait = [False] * 20, SoloReader.wait

        async def find_something(reader: SoloReader, **how: bool) -> bool:
            if finds and reader is connection.pump.solo:
                return finds.pop()
            return await wait(reader, **how)

        monkeypatch.setattr(SoloReader, "wait", find_something)
        await connection.request()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            while finds:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert len(turns) > 15
        await connection.request()


async def test_a_solo_server_echoes_much_data() -> None:
    async with solo_server() as connection:
        data = bytes(range(256)) * (SMALL_RING // 16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.here.send_all, data)
            assert await read(connection.here, len(data)) == data
        await connection.until_solo()
        await connection.request()


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_a_busy_reader_becomes_solo(checkpoints: str) -> None:
    """A reader that is slower than its peer drains when it has read all received data."""
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints)
    data = bytes(range(256)) * (SMALL_RING // 4)
    async with open_pairs(config, stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        got = bytearray()
        solo_reads = 0
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair[0].send_all, data)
                while len(got) < len(data):
                    got += await pair[1].receive_some(64)
                    await trio.lowlevel.checkpoint()
                    solo_reads += pump.machine.state == "SOLO"
            assert got == data
            assert solo_reads > len(data) / 64 / 2
            await close_both(pair)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_of_several_busy_readers_none_becomes_solo(checkpoints: str) -> None:
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints, receive_buffer=1 << 20)
    async with open_pairs(config, stacks=2) as pairs:
        both = [await pairs.make() for _ in range(2)]
        pump = pump_of(pairs.server)
        size = 1 << 19
        solo_reads: list[bool] = []

        async def take(stream: SmcStream) -> None:
            got = 0
            while got < size:
                got += len(await stream.receive_some(64))
                solo_reads.append(pump.machine.state == "SOLO")

        with trio.fail_after(PATIENCE):
            for here, _ in both:
                await here.send_all(bytes(size))
            async with trio.open_nursery() as nursery:
                for _, there in both:
                    nursery.start_soon(take, there)
            assert sum(solo_reads[: size // 64]) < size / 64 / 10, "one of two readers was solo"
            for pair in both:
                await close_both(pair)


async def test_rare_waits_do_not_make_a_reader_solo(monkeypatch: pytest.MonkeyPatch) -> None:
    async with solo_server() as connection:
        monkeypatch.setattr(solo, "MAX_GAP", 0.0)
        connection.pump.resume_hooks()
        for _ in range(3 * SOLO_AFTER_WAITS):
            await trio.sleep(PAUSE)
            await connection.request()
            assert connection.pump.machine.state != "SOLO"
        monkeypatch.setattr(solo, "MAX_GAP", PATIENCE)
        await connection.until_solo()


async def test_a_second_reader_ends_solo_mode() -> None:
    async with solo_server() as connection:
        other = await connection.pairs.make()
        await connection.until_solo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, other[1])
            await trio.testing.wait_all_tasks_blocked()
            assert await is_hooked(connection.pump)
            assert connection.pump.waiting == 2
            for _ in range(2 * SOLO_AFTER_WAITS):
                await trio.sleep(PAUSE)
                for stream in connection.here, other[0]:
                    await stream.send_all(b"x")
                    assert await read(stream, 1) == b"x"
            assert connection.pump.machine.state != "SOLO"
            await other[0].send_eof()
        await connection.until_solo()
        await close_both(other)


async def test_a_writer_ends_solo_mode() -> None:
    async with solo_server() as connection:
        clogged = await connection.pairs.clogged()
        await connection.until_solo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clogged[1].send_all, b"x")
            await trio.testing.wait_all_tasks_blocked()
            assert await is_hooked(connection.pump)
            await read(clogged[0], SMALL_RING + 1)
        await read(clogged[1], SMALL_RING)
        await close_both(clogged)
        await connection.until_solo()


async def test_another_task_may_send_in_solo_mode() -> None:
    """While one task is the solo reader, the messages of the other task leave at once."""
    async with solo_server("amortised") as connection:
        for _ in range(3):
            await connection.there.send_all(b"a")
            await connection.there.send_all(b"b")
            assert await read(connection.here, 2) == b"ab"
        assert connection.pump.machine.state == "SOLO"
        await connection.request()


async def test_a_task_that_sends_occasionally_does_not_end_solo_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In solo mode no hook counts passes, so a call long after the last one must not count as part
    of a long pass."""
    async with solo_server("amortised") as connection:
        monkeypatch.setattr(budget, "MAX_PASS_NS", 0)
        for _ in range(5):
            await connection.there.send_all(b"x")
            assert connection.pump.machine.state == "SOLO"
            assert await read(connection.here, 1) == b"x"


def work() -> None:
    """Compute for longer than a pass of the scheduler may last."""
    end = time.thread_time_ns() + 2 * budget.MAX_PASS_NS
    while time.thread_time_ns() < end:
        pass


async def test_a_task_that_has_yielded_need_not_yield_in_its_next_call(passes: Passes) -> None:
    """The rule also holds in solo mode, in which no hook counts the passes of the scheduler."""
    async with solo_server("amortised") as connection:
        before = 0
        for give_way in trio.lowlevel.checkpoint, partial(trio.sleep, 2 * PAUSE):
            for _ in range(4):
                work()
                await give_way()
                before = passes.count
                await connection.there.send_all(b"x")
                assert passes.count == before
        work()
        await connection.there.send_all(b"x")
        assert passes.count == before + 1
        assert connection.pump.machine.state == "SOLO"
        assert await read(connection.here, 9) == b"x" * 9


@asynccontextmanager
async def solo_task() -> AsyncIterator[tuple[Pairs, SmcStream, SmcStream, trio.CancelScope]]:
    """Open a connection whose server has a solo reader that waits for one byte.

    Returns the stacks, the client's and the server's stream, and the cancel scope of the reader.
    """
    # With amortised checkpoints, a byte may be announced after the server's hook, in the pass that
    # ends a `wait_all_tasks_blocked`.
    config = smc_config(spin=0, wake="trio", checkpoints="strict")
    async with open_pairs(config, stacks=2) as pairs:
        here, there = await pairs.make()
        pump = pump_of(pairs.server)

        async def read_one(scope: trio.CancelScope) -> None:
            with scope:
                await read(there, 1)

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                while True:
                    scope = trio.CancelScope()
                    nursery.start_soon(read_one, scope)
                    await trio.testing.wait_all_tasks_blocked()
                    if pump.machine.state == "SOLO":
                        break
                    await here.send_all(b"x")
                    await trio.testing.wait_all_tasks_blocked()
                yield pairs, here, there, scope
            await close_both((here, there))


async def test_solo_mode_ends_if_the_reader_is_cancelled() -> None:
    """The cancelled task may never wait again, but other connections still need the completions."""
    async with solo_task() as (pairs, here, _, scope):
        pump = pump_of(pairs.server)
        assert pump.waiting == 1
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert pump.waiting == 0
        assert await is_hooked(pump)
        [connection] = pairs.server.connections
        await here.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert connection.state == "APPCLOSEWAIT1"


@pytest.mark.parametrize("how", ["send_all", "send_some", "send_urgent", "send_eof"])
async def test_a_send_in_solo_mode_notices_the_end_of_the_peer(how: str) -> None:
    """The solo reader is busy with other work, so it does not poll."""
    async with solo_task() as (pairs, here, there, _):
        pump = pump_of(pairs.server)
        await here.send_all(b"x")
        await trio.testing.wait_all_tasks_blocked()
        assert pump.machine.state == "SOLO"
        here.abort()
        send = getattr(there, how)
        with pytest.raises(trio.BrokenResourceError):
            await (send() if how == "send_eof" else send(b"x"))


async def test_solo_mode_ends_if_the_reader_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stack soon notices messages that arrive while no task waits, such as the peer's close."""
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        with trio.fail_after(PATIENCE):
            while pump.machine.state != "SOLO":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, pair[1], 1)
                    await trio.testing.wait_all_tasks_blocked()
                    await pair[0].send_all(b"x")
            monkeypatch.setattr(solo, "WATCHDOG_INTERVAL", PAUSE)
            pump.solo.watchdog.deadline = trio.current_time()  # type: ignore[union-attr]
            await pair[0].aclose()
            [connection] = pairs.server.connections
            while connection.state == "ACTIVE":  # noqa: ASYNC110  # no event reports a change of state
                await trio.sleep(PAUSE)
            assert await is_hooked(pump)
            await pair[1].aclose()


async def test_the_watchdog_does_not_wake_an_idle_server(
    monkeypatch: pytest.MonkeyPatch, passes: Passes
) -> None:
    """While the solo reader waits, the watchdog has nothing to check."""
    async with solo_server() as connection:
        monkeypatch.setattr(solo, "WATCHDOG_INTERVAL", PAUSE)
        watchdog = connection.pump.solo.watchdog
        assert watchdog is not None
        watchdog.deadline = trio.current_time()
        await trio.testing.wait_all_tasks_blocked(10 * PAUSE)
        assert connection.pump.machine.state == "SOLO"
        before = passes.count
        await trio.sleep(50 * PAUSE)
        assert passes.count - before <= 5
        monkeypatch.setattr(solo, "WATCHDOG_INTERVAL", PATIENCE)
        await connection.request()
        await connection.request()


@pytest.mark.parametrize("how", ["close", "shut down", "the peer closes"])
async def test_the_end_of_the_stream_ends_the_wait(how: str) -> None:
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        ended: list[object] = []

        async def wait() -> None:
            try:
                await echo(pair[1])
                ended.append(b"")
            except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
                ended.append(type(error))

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await EchoConnection(pairs, *pair).until_solo()
                if how == "close":
                    await pair[1].aclose()
                elif how == "shut down":
                    pair[1].shut_down_reading()  # type: ignore[attr-defined]
                else:
                    await trio.aclose_forcefully(pair[0])
            if how == "shut down":
                assert ended == [b""]
            elif how == "close":
                assert ended == [trio.ClosedResourceError]
            assert len(ended) == 1
            assert pump.waiting == 0
            await close_both(pair)


@pytest.mark.filterwarnings("ignore:.* was open when its stack was closed:ResourceWarning")
async def test_leaving_the_stack_ends_the_wait() -> None:
    ended: list[type[BaseException]] = []

    async def wait(stream: SmcStream) -> None:
        try:
            await echo(stream)
        except trio.ClosedResourceError as error:
            ended.append(type(error))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
                pair = await pairs.make()
                nursery.start_soon(wait, pair[0])
                client = pump_of(pairs.client)
                while client.machine.state != "SOLO":
                    await trio.sleep(PAUSE)
                    await pair[1].send_all(b"x")
                    assert await read(pair[1], 1) == b"x"
                await trio.testing.wait_all_tasks_blocked()
                assert client.waiting == 1
                before = trio.current_time()
            assert trio.current_time() - before < PATIENCE / 4, "the stack waited for a closed peer"
            for stream in pair:
                await trio.aclose_forcefully(stream)
    assert ended == [trio.ClosedResourceError]


async def test_a_failing_rnic_ends_the_wait() -> None:
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        connection = EchoConnection(pairs, *pair)
        failed = trio.Event()

        async def wait() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await echo(pair[1])
            failed.set()

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await connection.until_solo()
                [rnic] = (lane.rnic for lane in connection.pump.dispatcher.lanes)
                rnic.fail()  # type: ignore[attr-defined]
                await failed.wait()
            for stream in pair:
                await trio.aclose_forcefully(stream)


async def test_a_busy_sender_lets_others_run() -> None:
    """Amortised checkpoints also work in solo mode, in which no hook counts the passes."""
    async with solo_server("amortised") as connection:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        connection.pump.resume_hooks()
        await connection.until_solo()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await trio.lowlevel.checkpoint()
            assert connection.pump.machine.state == "SOLO"
            before = turns
            for _ in range(640):
                await connection.there.send_all(b"x")
            assert turns - before >= 9
            await read(connection.here, 640)
            nursery.cancel_scope.cancel()
