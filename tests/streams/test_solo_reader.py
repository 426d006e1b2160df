"""One reader alone, who waits for the RNIC's doorbell itself (`SoloReader.wait`)."""

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
from tests.rnic.pumps import Passes, is_awake
from tests.streams.stream_pairs import SMALL_RING, Pairs, close_both, open_pairs, read, smc_config
from trio_smc import SmcStream
from trio_smc.rnic import solo
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.solo import SOLO_AFTER_WAITS, SoloReader
from trio_smc.stack import budget

PATIENCE = 20
PAUSE = 0.001
"""Seconds between requests: the loop sleeps."""


@pytest.fixture(autouse=True)
def long_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(solo, "_MAX_GAP", PATIENCE)
    monkeypatch.setattr(solo, "_WATCHDOG_INTERVAL", PATIENCE)


def pump_of(stack: trio_smc.Stack) -> Pump:
    return stack.runtime.pump


@dataclass
class Led:
    """A connection whose server, which echoes, leads, as it waits for requests one by one."""

    pairs: Pairs
    here: SmcStream
    there: SmcStream

    @property
    def pump(self) -> Pump:
        return pump_of(self.pairs.server)

    async def ask(self, data: bytes = b"x") -> None:
        await self.here.send_all(data)
        assert await read(self.here, len(data)) == data

    async def until_led(self) -> None:
        with trio.fail_after(PATIENCE):
            while self.pump.machine.state != "SOLO":
                await trio.sleep(PAUSE)
                await self.ask()
            await trio.testing.wait_all_tasks_blocked()
        assert not await is_awake(self.pump)


async def echo(stream: SmcStream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


@pytest.fixture
async def passes() -> AsyncIterator[Passes]:
    counter = Passes()
    trio.lowlevel.add_instrument(counter)
    yield counter
    trio.lowlevel.remove_instrument(counter)


@asynccontextmanager
async def led(checkpoints: str = "strict", **settings: object) -> AsyncIterator[Led]:
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints, **settings)
    with trio.fail_after(PATIENCE):
        async with open_pairs(config, stacks=2) as pairs:
            pair = await pairs.make()
            connection = Led(pairs, *pair)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(echo, connection.there)
                await connection.until_led()
                yield connection
                await connection.here.send_eof()
            await close_both(pair)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_requests_are_answered(checkpoints: str) -> None:
    async with led(checkpoints) as connection:
        pump = connection.pump
        before = pump.passes
        for number in range(100):
            await trio.sleep(PAUSE)
            await connection.ask(b"%d" % number)
        assert pump.machine.state == "SOLO"
        assert 100 <= pump.passes - before <= 110, "each wait is counted, and nothing else"
        await trio.testing.wait_all_tasks_blocked()
        assert pump.waiting == 1


async def test_what_comes_for_others_again_and_again_lets_them_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(1)
            await trio.lowlevel.checkpoint()

    async with led() as connection:
        finds, lead = [False] * 20, SoloReader.wait

        async def find_something(pump: SoloReader, **how: bool) -> bool:
            if finds and pump is connection.pump.solo:
                return finds.pop()
            return await lead(pump, **how)

        monkeypatch.setattr(SoloReader, "wait", find_something)
        await connection.ask()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            while finds:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert len(turns) > 15
        await connection.ask()


async def test_much_data() -> None:
    async with led() as connection:
        data = bytes(range(256)) * (SMALL_RING // 16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.here.send_all, data)
            assert await read(connection.here, len(data)) == data
        await connection.until_led()
        await connection.ask()


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_who_reads_without_waiting_leads(checkpoints: str) -> None:
    """A reader that is slower than its peer: it looks when it has taken what it knew of."""
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints)
    data = bytes(range(256)) * (SMALL_RING // 4)
    async with open_pairs(config, stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        got = bytearray()
        led_reads = 0
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair[0].send_all, data)
                while len(got) < len(data):
                    got += await pair[1].receive_some(64)
                    await trio.lowlevel.checkpoint()
                    led_reads += pump.machine.state == "SOLO"
            assert got == data
            assert led_reads > len(data) / 64 / 2
            await close_both(pair)


@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
async def test_of_several_busy_readers_none_leads(checkpoints: str) -> None:
    config = smc_config(spin=0, wake="trio", checkpoints=checkpoints, receive_buffer=1 << 20)
    async with open_pairs(config, stacks=2) as pairs:
        both = [await pairs.make() for _ in range(2)]
        pump = pump_of(pairs.server)
        size = 1 << 19
        led_reads: list[bool] = []

        async def take(stream: SmcStream) -> None:
            got = 0
            while got < size:
                got += len(await stream.receive_some(64))
                led_reads.append(pump.machine.state == "SOLO")

        with trio.fail_after(PATIENCE):
            for here, _ in both:
                await here.send_all(bytes(size))
            async with trio.open_nursery() as nursery:
                for _, there in both:
                    nursery.start_soon(take, there)
            assert sum(led_reads[: size // 64]) < size / 64 / 10, "while both read"
            for pair in both:
                await close_both(pair)


async def test_not_while_waits_are_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    async with led() as connection:
        monkeypatch.setattr(solo, "_MAX_GAP", 0.0)
        connection.pump.resume_hooks()
        for _ in range(3 * SOLO_AFTER_WAITS):
            await trio.sleep(PAUSE)
            await connection.ask()
            assert connection.pump.machine.state != "SOLO"
        monkeypatch.setattr(solo, "_MAX_GAP", PATIENCE)
        await connection.until_led()


async def test_a_second_reader_ends_it() -> None:
    async with led() as connection:
        other = await connection.pairs.make()
        await connection.until_led()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, other[1])
            await trio.testing.wait_all_tasks_blocked()
            assert await is_awake(connection.pump)
            assert connection.pump.waiting == 2
            for _ in range(2 * SOLO_AFTER_WAITS):
                await trio.sleep(PAUSE)
                for stream in connection.here, other[0]:
                    await stream.send_all(b"x")
                    assert await read(stream, 1) == b"x"
            assert connection.pump.machine.state != "SOLO"
            await other[0].send_eof()
        await connection.until_led()
        await close_both(other)


async def test_a_writer_ends_it() -> None:
    async with led() as connection:
        clogged = await connection.pairs.clogged()
        await connection.until_led()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clogged[1].send_all, b"x")
            await trio.testing.wait_all_tasks_blocked()
            assert await is_awake(connection.pump)
            await read(clogged[0], SMALL_RING + 1)
        await read(clogged[1], SMALL_RING)
        await close_both(clogged)
        await connection.until_led()


async def test_two_tasks_on_one_stream() -> None:
    """One leads; what the other one sends leaves at once, though nobody has a hook."""
    async with led("amortised") as connection:
        for _ in range(3):
            await connection.there.send_all(b"a")
            await connection.there.send_all(b"b")
            assert await read(connection.here, 2) == b"ab"
        assert connection.pump.machine.state == "SOLO"
        await connection.ask()


async def test_who_sends_now_and_then_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts passes meanwhile; a call long after the last one is none of a long pass."""
    async with led("amortised") as connection:
        monkeypatch.setattr(budget, "MAX_PASS_NS", 0)
        for _ in range(5):
            await connection.there.send_all(b"x")
            assert connection.pump.machine.state == "SOLO"
            assert await read(connection.here, 1) == b"x"


def work() -> None:
    """Longer than a pass of the scheduler may take."""
    end = time.thread_time_ns() + 2 * budget.MAX_PASS_NS
    while time.thread_time_ns() < end:
        pass


async def test_who_has_let_others_run_need_not_do_so_in_its_next_call(passes: Passes) -> None:
    """While nobody counts passes of the scheduler."""
    async with led("amortised") as connection:
        before = 0
        for let in trio.lowlevel.checkpoint, partial(trio.sleep, 2 * PAUSE):
            for _ in range(4):
                work()
                await let()
                before = passes.count
                await connection.there.send_all(b"x")
                assert passes.count == before
        work()
        await connection.there.send_all(b"x")
        assert passes.count == before + 1
        assert connection.pump.machine.state == "SOLO"
        assert await read(connection.here, 9) == b"x" * 9


async def test_who_is_cancelled_leaves_nothing_behind() -> None:
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        with trio.fail_after(PATIENCE):
            while pump.machine.state != "SOLO":
                with trio.move_on_after(PAUSE) as scope:
                    await pair[1].receive_some()
                assert scope.cancelled_caught
            with trio.move_on_after(PAUSE):
                await pair[1].receive_some()
            assert pump.waiting == 0
            assert pump.machine.state == "SOLO"
            await pair[0].send_all(b"x")
            assert await pair[1].receive_some() == b"x"
            await close_both(pair)


async def test_who_stays_away_leads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while nobody waits is seen soon all the same: here, that the peer goes."""
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        pump = pump_of(pairs.server)
        with trio.fail_after(PATIENCE):
            while pump.machine.state != "SOLO":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, pair[1], 1)
                    await trio.testing.wait_all_tasks_blocked()
                    await pair[0].send_all(b"x")
            monkeypatch.setattr(solo, "_WATCHDOG_INTERVAL", PAUSE)
            pump.solo._watchdog.deadline = trio.current_time()  # type: ignore[union-attr]
            await pair[0].aclose()
            state = pair[1]._core  # type: ignore[attr-defined]
            while not state.got_closed:  # noqa: ASYNC110
                await trio.sleep(PAUSE)
            assert await is_awake(pump)
            await pair[1].aclose()


async def test_who_waits_for_long_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, passes: Passes
) -> None:
    """A server without requests sleeps."""
    async with led() as connection:
        monkeypatch.setattr(solo, "_WATCHDOG_INTERVAL", PAUSE)
        term = connection.pump.solo._watchdog
        assert term is not None
        term.deadline = trio.current_time()
        await trio.testing.wait_all_tasks_blocked(10 * PAUSE)
        assert connection.pump.machine.state == "SOLO"
        before = passes.count
        await trio.sleep(50 * PAUSE)
        assert passes.count - before <= 5
        monkeypatch.setattr(solo, "_WATCHDOG_INTERVAL", PATIENCE)
        await connection.ask()
        await connection.ask()


@pytest.mark.parametrize("how", ["close", "shut down", "the peer closes"])
async def test_its_own_end_ends_the_wait(how: str) -> None:
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
                await Led(pairs, *pair).until_led()
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
async def test_leaving_the_stack_ends_it() -> None:
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
            assert trio.current_time() - before < PATIENCE / 4, "it waited for who is not there"
            for stream in pair:
                await trio.aclose_forcefully(stream)
    assert ended == [trio.ClosedResourceError]


async def test_a_failing_rnic_ends_it() -> None:
    async with open_pairs(smc_config(spin=0, wake="trio"), stacks=2) as pairs:
        pair = await pairs.make()
        connection = Led(pairs, *pair)
        failed = trio.Event()

        async def wait() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await echo(pair[1])
            failed.set()

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await connection.until_led()
                [rnic] = (lane.rnic for lane in connection.pump.dispatcher.lanes)
                rnic.fail()  # type: ignore[attr-defined]
                await failed.wait()
            for stream in pair:
                await trio.aclose_forcefully(stream)


async def test_a_busy_reader_lets_others_run() -> None:
    """Amortised checkpoints while nobody counts the scheduler's passes."""
    async with led("amortised") as connection:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        connection.pump.resume_hooks()
        await connection.until_led()
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
