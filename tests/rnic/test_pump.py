"""The poller thread, and the pump in each of its states."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.reused_numbers import Victim, reusing
from tests.rnic.contract import End, connect, make_end, needs_rings
from tests.rnic.pumps import Passes, is_hooked
from tests.rnic.soft_peer import Peer
from tests.timing import PATIENCE, SLOWER
from trio_smc.rnic.deferred import DEFERRED_PASSES
from trio_smc.rnic.dispatch import Dispatcher
from trio_smc.rnic.poller import Poller
from trio_smc.rnic.pump import AWAKE_PASSES, UNUSED_PASSES, Pump
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.spinner import Probe
from trio_smc.rnic.verbs import (
    Completion,
    PlainCompletion,
    QpState,
    QueuePair,
    RnicError,
    RnicEvent,
    WcOpcode,
)

NAP = 0.05 * SLOWER
"""Seconds: long enough for the loop to sleep."""


class Sink:
    """Records completions and wakes a waiting task."""

    def __init__(self, pump: Pump, end: End) -> None:
        self.end = end
        self.pump = pump
        self.messages: list[bytes] = []
        self.completions: list[Completion] = []
        self._task: trio.lowlevel.Task | None = None
        pump.register(end.rnic, end.qp, self)

    def on_completion(self, plain: PlainCompletion) -> None:
        completion = Completion(*plain)
        self.completions.append(completion)
        if completion.status == 0 and completion.opcode == WcOpcode.RECV:
            assert completion.data is not None
            self.messages.append(completion.data)
            self.end.qp.post_receive(1)
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    async def wait(self, count: int, *, spin: bool = False) -> None:
        """Wait until ``count`` messages have arrived, or the queue pair has failed."""
        with trio.fail_after(PATIENCE):
            await trio.lowlevel.checkpoint()
            while len(self.messages) < count and self.end.qp.state is QpState.RTS:
                if spin and self.pump.try_spin():
                    continue
                self._task = trio.lowlevel.current_task()
                self.pump.waiting += 1
                self.pump.spin_due = True
                try:
                    await trio.lowlevel.wait_task_rescheduled(self._give_up)
                finally:
                    self.pump.waiting -= 1

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Chain(Sink):
    """A sink that lets the other end send another message after each completion."""

    def __init__(self, pump: Pump, end: End, other: End) -> None:
        super().__init__(pump, end)
        self.other = other

    def on_completion(self, plain: PlainCompletion) -> None:
        super().on_completion(plain)
        number = len(self.messages)
        self.other.qp.post_send(number, b"%d" % number)


@pytest.fixture
def directory(runtime_directory: Path) -> Path:
    return runtime_directory / "smc"


@pytest.fixture
def rnics(directory: Path) -> Iterator[tuple[SoftRnic, SoftRnic]]:
    pair = SoftRnic("soft0"), SoftRnic("soft1")
    for rnic in pair:
        rnic.open(directory)
    yield pair
    for rnic in pair:
        rnic.close()


@pytest.fixture
def ends(rnics: tuple[SoftRnic, SoftRnic]) -> Iterator[tuple[End, End]]:
    a, b = make_end(rnics[0]), make_end(rnics[1])
    connect(a, b)
    yield a, b
    a.close()
    b.close()


@pytest.fixture(params=["trio", "thread"], autouse=True)
def wake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test twice: Trio waits for completions itself, or a thread of each RNIC does."""
    by: str = request.param
    monkeypatch.setattr(Pump.__init__, "__kwdefaults__", {"wake": by})
    return by


@contextlib.asynccontextmanager
async def running(*rnics: SoftRnic, spin: float = 0) -> AsyncIterator[Pump]:
    """Run a pump with these RNICs."""
    pump = Pump(spin=spin)
    for rnic in rnics:
        pump.add(rnic)
    async with trio.open_nursery() as nursery:
        await nursery.start(pump.run)
        yield pump
        nursery.cancel_scope.cancel()
    assert pump.broken is None


async def events_of_failure(rnic: SoftRnic) -> list[RnicEvent]:
    """Let an RNIC fail, and wait for its event.

    Returns:
      The list of events; later ones are appended.
    """
    events: list[RnicEvent] = []
    reported = trio.Event()

    def on_event(event: RnicEvent) -> None:
        events.append(event)
        reported.set()

    rnic.on_event = on_event
    rnic.fail()
    with trio.fail_after(PATIENCE):
        await reported.wait()
    return events


def state(qp: QueuePair) -> QpState:
    return qp.state


def pollers() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("trio_smc poller"))


class TestPoller:
    def test_the_poller_wakes_trio_once_and_sleeps_again(self, ends: tuple[End, End]) -> None:
        a, b = ends
        a.rnic.service()
        b.rnic.service()
        assert b.rnic.arm()
        woken = threading.Semaphore(0)
        poller = Poller(b.rnic, woken.release)
        try:
            self._check(a, b, poller, woken)
        finally:
            poller.stop()
            poller.stop()
        assert poller.wakeups == 2
        assert pollers() == []

    def _check(self, a: End, b: End, poller: Poller, woken: threading.Semaphore) -> None:
        a.qp.post_send(1, b"x")
        assert woken.acquire(timeout=PATIENCE)
        assert poller.pending
        # The thread sleeps until the RNIC is serviced.
        time.sleep(0.05)
        assert poller.wakeups == 1
        b.rnic.service()
        b.rnic.poll()
        assert b.rnic.arm()
        a.qp.post_send(2, b"x")
        assert woken.acquire(timeout=PATIENCE)


def spins_of(pump: Pump) -> list[int]:
    """Return a list to which each spin of the pump appends a number."""
    spins: list[int] = []

    class Counted(Dispatcher):
        __slots__ = ()

        def probes(self) -> list[Probe]:
            spins.append(len(spins))
            return super().probes()

    pump.dispatcher.__class__ = Counted
    return spins


class TestDispatch:
    async def test_completions_reach_their_sinks(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(*rnics) as pump:
            to_a, to_b = Sink(pump, a), Sink(pump, b)
            for index in range(10):
                a.qp.post_send(index, b"%d" % index)
            b.qp.post_send(1, b"back")
            await to_b.wait(10)
            await to_a.wait(1)
            assert to_b.messages == [b"%d" % index for index in range(10)]
            assert [c.wr_id for c in to_a.completions if c.opcode == WcOpcode.SEND] == list(
                range(10)
            )

    async def test_unregistered_queue_pairs_are_ignored(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(*rnics) as pump:
            to_b = Sink(pump, b)
            pump.unregister(b.rnic, b.qp)
            pump.unregister(b.rnic, b.qp)
            a.qp.post_send(1, b"x")
            assert pump.drain()
            assert not pump.drain()
            assert to_b.completions == []

    async def test_a_sink_that_raises_ends_only_its_queue_pair(
        self,
        rnics: tuple[SoftRnic, SoftRnic],
        ends: tuple[End, End],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        a, b = ends
        c, d = make_end(rnics[0]), make_end(rnics[1])
        connect(c, d)

        class Broken:
            def on_completion(self, plain: PlainCompletion) -> None:
                raise RuntimeError("out of order")

        async with running(*rnics) as pump:
            pump.register(b.rnic, b.qp, Broken())
            to_d = Sink(pump, d)
            a.qp.post_send(1, b"x")
            c.qp.post_send(1, b"x")
            await to_d.wait(1)
            assert state(b.qp) is QpState.ERR
            assert state(d.qp) is QpState.RTS
        assert "out of order" in caplog.text
        c.close()
        d.close()

    async def test_draining_from_within_a_sink(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        seen: list[bool] = []
        async with running(*rnics) as pump:

            class Nested:
                def on_completion(self, plain: PlainCompletion) -> None:
                    seen.append(pump.drain())

            pump.register(b.rnic, b.qp, Nested())
            a.qp.post_send(1, b"x")
            a.qp.post_send(2, b"y")
            assert pump.drain()
        assert seen == [False, False]

    async def test_draining_a_queue_pair_within_a_drain_of_it(
        self, ends: tuple[End, End], rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        """The inner call also dispatches completions that the outer call has only polled yet."""
        a, b = ends
        async with running(*rnics) as pump:
            seen: list[bytes | None] = []
            at_once: list[bytes | None] = []

            class Nested:
                def on_completion(self, plain: PlainCompletion) -> None:
                    completion = Completion(*plain)
                    seen.append(completion.data)
                    if len(seen) == 1:
                        pump.drain_queue_pair(b.rnic, b.qp)
                        at_once.extend(seen)

            pump.register(b.rnic, b.qp, Nested())
            for text in (b"1", b"2", b"3"):
                a.qp.post_send(1, text, signaled=False)
            pump.drain_queue_pair(b.rnic, b.qp)
            assert at_once == seen == [b"1", b"2", b"3"]

    def test_completions_that_were_deferred_are_not_overtaken(
        self, ends: tuple[End, End], rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        """Completions of a queue pair keep their order, whichever call has polled them."""
        a, b = ends
        c, d = make_end(rnics[0]), make_end(rnics[1])
        connect(c, d)
        pump = Pump(spin=0)
        for rnic in rnics:
            pump.add(rnic)
        to_d = Sink(pump, d)

        class Nested:
            def on_completion(self, _: PlainCompletion) -> None:
                c.qp.post_send(1, b"1", signaled=False)
                pump.drain_queue_pair(b.rnic, b.qp)
                assert to_d.messages == []
                c.qp.post_send(2, b"2", signaled=False)

        pump.register(a.rnic, a.qp, Nested())
        b.qp.post_send(1, b"x", signaled=False)
        pump.drain()
        assert to_d.messages == [b"1", b"2"]
        c.close()
        d.close()

    def test_register_refuses_an_rnic_of_another_pump(self, ends: tuple[End, End]) -> None:
        with pytest.raises(ValueError, match="does not belong"):
            Sink(Pump(spin=0), ends[0])


class TestLoop:
    async def test_flushes_run_once_before_the_loop_sleeps(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        calls: list[str] = []
        async with running(*rnics) as pump:
            to_b = Sink(pump, b)

            def flush() -> None:
                calls.append("flush")
                a.qp.post_send(1, b"flushed")

            pump.flush_later(flush)
            pump.flush_later(lambda: pump.flush_later(lambda: calls.append("nested")))
            assert calls == []
            await to_b.wait(1)
            assert calls == ["flush", "nested"]
            await trio.sleep(0.01)
            assert calls == ["flush", "nested"]

    async def test_work_that_is_due_soon_waits_for_a_sleep(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        calls: list[int] = []
        async with running(*rnics) as pump:
            pump.flush_soon(lambda: calls.append(1))
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            assert calls == []
            await trio.sleep(NAP)
            assert calls == [1]

    async def test_work_that_is_due_soon_does_not_wait_for_ever_for_a_sleep(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        calls: list[int] = []
        async with running(*rnics) as pump:
            for _ in range(2):
                pump.flush_soon(lambda: calls.append(1))
            for _ in range(DEFERRED_PASSES + 1):
                await trio.lowlevel.checkpoint()
            assert calls == [1, 1]
            pump.flush_soon(lambda: calls.append(2))
            await trio.lowlevel.checkpoint()
            assert calls == [1, 1]

    @needs_rings  # a packet wakes the thread of its RNIC
    async def test_completions_that_wake_no_task_do_not_end_a_sleep(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """For example, the last messages of a connection that no task uses any more."""
        a, b = ends
        async with running(*rnics) as pump:
            to_b = Sink(pump, b)
            await trio.sleep(NAP)
            wakeups, passes = pump.wakeups, pump.passes
            a.qp.post_send(1, b"x")
            await trio.sleep(NAP)
            assert to_b.messages == [b"x"]
            assert pump.wakeups == wakeups
            assert pump.passes == passes + 1

    @pytest.mark.parametrize("by", ["event", "deferred work"])
    async def test_completions_that_wake_a_task_end_the_sleep(
        self, by: str, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """A sink may wake the task directly or through deferred work."""
        a, b = ends
        arrived = trio.Event()

        class Waker(Sink):
            def on_completion(self, plain: PlainCompletion) -> None:
                if by == "event":
                    arrived.set()
                else:
                    pump.flush_soon(arrived.set)

        async with running(*rnics) as pump:
            Waker(pump, b)
            await trio.sleep(NAP)
            a.qp.post_send(1, b"x")
            with trio.fail_after(PATIENCE):
                await arrived.wait()

    async def test_rnics_are_disarmed_after_the_first_sleep_of_a_busy_loop_too(
        self,
        rnics: tuple[SoftRnic, SoftRnic],
        ends: tuple[End, End],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The hook that disarms the RNICs is removed while the loop is busy."""
        rnic = rnics[1]
        disarmed: list[bool] = []
        arm, disarm = rnic.arm, rnic.disarm

        def armed() -> bool:
            disarmed.clear()
            return arm()

        def disarmed_again() -> None:
            disarmed.append(True)
            disarm()

        monkeypatch.setattr(rnic, "arm", armed)
        monkeypatch.setattr(rnic, "disarm", disarmed_again)
        pump = Pump(spin=0)
        pump.add(rnic)

        def state() -> str:
            return pump.machine.state

        async with trio.open_nursery() as nursery:
            await nursery.start(pump.run)
            for _ in range(2):
                for _ in range(AWAKE_PASSES + 2):
                    await trio.lowlevel.checkpoint()
                assert state() == "BUSY"
                disarmed.clear()
                await trio.sleep(NAP)
                assert state() == "SLEEPY"
                assert disarmed == [True]
            nursery.cancel_scope.cancel()
        assert state() == "STOPPED"

    async def test_a_flush_that_raises_ends_the_pump_after_the_others(
        self, rnics: tuple[SoftRnic, SoftRnic], caplog: pytest.LogCaptureFixture
    ) -> None:
        pump = Pump(spin=0)
        pump.add(rnics[0])
        flushed: list[int] = []

        def flush() -> None:
            raise RuntimeError("no good")

        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with trio.open_nursery() as nursery:
                await nursery.start(pump.run)
                pump.flush_later(flush)
                pump.flush_later(flush)
                pump.flush_later(lambda: flushed.append(1))
                with trio.fail_after(PATIENCE):
                    await trio.sleep_forever()
        assert flushed == [1]
        assert caught.value.exceptions == (pump.broken,)
        assert caplog.text.count("RuntimeError: no good") == 1
        assert pollers() == []

    async def test_an_rnic_that_cannot_be_served_ends_the_pump(
        self, rnics: tuple[SoftRnic, SoftRnic], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def service() -> None:
            raise RuntimeError("no good")

        pump = Pump(spin=0)
        pump.add(rnics[1])
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with trio.open_nursery() as nursery:
                await nursery.start(pump.run)
                monkeypatch.setattr(rnics[1], "service", service)
                await trio.testing.wait_all_tasks_blocked()
                rnics[1].request_service()
                with trio.fail_after(PATIENCE):
                    await trio.sleep_forever()
        assert caught.group_contains(RuntimeError, match="no good")
        assert pollers() == []

    async def test_each_rnic_of_a_pump_has_a_thread(self, rnics: tuple[SoftRnic, SoftRnic]) -> None:
        async with running(rnics[0]) as pump:
            assert pollers() == ["trio_smc poller soft0"]
            pump.add(rnics[1])
            assert pollers() == ["trio_smc poller soft0", "trio_smc poller soft1"]
            pump.remove(rnics[0])
            pump.remove(rnics[0])
            assert pollers() == ["trio_smc poller soft1"]
        assert pollers() == []

    async def test_port_events_are_reported(self, rnics: tuple[SoftRnic, SoftRnic]) -> None:
        async with running(*rnics):
            events = await events_of_failure(rnics[1])
        assert events == [RnicEvent.PORT_DOWN]

    async def test_two_pumps_in_one_loop(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[0]) as first, running(rnics[1], spin=20e-6) as second:
            to_a, to_b = Sink(first, a), Sink(second, b)
            for index in range(1, 101):
                a.qp.post_send(index, b"x", signaled=False)
                await to_b.wait(index)
                b.qp.post_send(index, b"y", signaled=False)
                await to_a.wait(index)

    async def test_an_idle_stack_sleeps(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """Neither the loop nor a thread wakes up or polls continuously."""
        async with running(*rnics) as pump:
            for end in ends:
                Sink(pump, end)
            await trio.sleep(NAP)
            passes, start = Passes(), time.process_time()
            wakeups = [lane.poller.wakeups for lane in pump.dispatcher.lanes if lane.poller]
            trio.lowlevel.add_instrument(passes)
            await trio.sleep(1)
            trio.lowlevel.remove_instrument(passes)
            assert passes.count < 10
            assert [lane.poller.wakeups for lane in pump.dispatcher.lanes if lane.poller] == wakeups
            # A polling loop would use the whole second; garbage collection may use a part of it.
            assert time.process_time() - start < 0.5

    async def test_fruitless_spins_become_rare(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """The loop spins once for each completion, and after 8 failures only for every 64th."""
        a, b = ends
        async with running(*rnics, spin=1e-3) as pump:
            to_b = Sink(pump, b)
            pump.waiting = 1
            spins = spins_of(pump)
            for index in range(1, 65):
                pump.spin_due = True
                await trio.sleep(6e-3)
                a.qp.post_send(index, b"x", signaled=False)
                await to_b.wait(index)
            assert 1 <= len(spins) <= 10  # fewer if another process keeps the processor

    async def test_one_wait_is_one_spin_although_the_loop_wakes(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        async with running(*rnics, spin=1e-3) as pump:
            pump.waiting = 1
            pump.spin_due = True
            spins = spins_of(pump)
            for _ in range(5):
                await trio.sleep(2e-3)
            assert len(spins) == 1

    async def test_no_spin_for_a_task_that_has_waited_for_long(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """The reader of an idle connection waits while completions arrive for others."""
        a, b = ends
        async with running(*rnics, spin=1e-3) as pump:
            to_b = Sink(pump, b)
            pump.waiting = 1
            spins = spins_of(pump)
            for index in range(1, 5):
                a.qp.post_send(index, b"x", signaled=False)
                await trio.sleep(2e-3)
                assert len(to_b.messages) == index
            assert spins == []

    async def test_after_a_reader_has_spun_the_hook_does_not_spin_again(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        async with running(*rnics, spin=1e-3) as pump:
            spins = spins_of(pump)
            assert not pump.try_spin(lambda: False)
            pump.waiting = 1
            pump.spin_due = True
            await trio.sleep(2e-3)
            assert len(spins) == 1

    async def test_no_spin_while_no_task_waits_for_completions(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        async with running(*rnics, spin=0.5) as pump:
            spins = spins_of(pump)
            await trio.sleep(NAP)
            assert spins == []

    @needs_rings  # a packet wakes the thread of its RNIC
    async def test_no_doorbell_rings_for_a_loop_that_the_clock_woke(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(*rnics) as pump:
            to_b = Sink(pump, b)
            await trio.sleep(0.01 * SLOWER)  # the loop sleeps, armed, and the clock wakes it
            before = [lane.poller.wakeups for lane in pump.dispatcher.lanes if lane.poller]
            a.qp.post_send(1, b"x", signaled=False)
            await to_b.wait(1)
            await trio.sleep(0.01 * SLOWER)  # `wakeups` would count a woken thread
            assert [lane.poller.wakeups for lane in pump.dispatcher.lanes if lane.poller] == before

    async def test_a_reader_spins_until_its_own_data_has_arrived(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """Completions for others, and the reader's own send completions, do not end the spin."""
        a, b = ends
        async with running(*rnics, spin=PATIENCE) as pump:
            to_b = Chain(pump, b, a)
            a.qp.post_send(0, b"0")
            assert pump.try_spin(lambda: len(to_b.messages) == 5)
            assert to_b.messages == [b"%d" % index for index in range(5)]

    async def test_a_reader_does_not_spin_for_ever_if_all_completions_are_for_others(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(*rnics, spin=1e-3) as pump:
            to_b = Chain(pump, b, a)
            a.qp.post_send(0, b"0")
            assert not pump.try_spin(lambda: False)
            assert to_b.messages
            pump.unregister(b.rnic, b.qp)


async def until_idle(pump: Pump) -> None:
    """Wait until the pump is IDLE, and assert that it has no hook in the scheduler then."""
    pump.unused = True
    with trio.fail_after(PATIENCE):
        while pump.machine.state != "IDLE":
            await trio.lowlevel.checkpoint()
    assert not await is_hooked(pump)


class TestUnused:
    async def test_a_message_resumes_the_hooks(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[1]) as pump:
            to_b = Sink(pump, b)
            for number in range(3):
                await until_idle(pump)
                with trio.fail_after(PATIENCE):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(to_b.wait, number + 1)
                        await trio.sleep(NAP)
                        assert not await is_hooked(pump)
                        a.qp.post_send(number, b"%d" % number)
                assert await is_hooked(pump)
            assert to_b.messages == [b"0", b"1", b"2"]

    async def test_messages_just_before_the_pump_becomes_idle_are_not_lost(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[1]) as pump:
            to_b = Sink(pump, b)
            pump.unused = True
            for number in range(3 * UNUSED_PASSES):
                if number % 7 == 0:
                    a.qp.post_send(number, b"x")
                await trio.lowlevel.checkpoint()
            await to_b.wait(-(-3 * UNUSED_PASSES // 7))

    async def test_the_pump_is_not_idle_while_it_is_used(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        async with running(*rnics) as pump:
            for _ in range(2 * UNUSED_PASSES):
                await trio.lowlevel.checkpoint()
            assert await is_hooked(pump)
            pump.unused, pump.waiting = True, 1
            for _ in range(2 * UNUSED_PASSES):
                await trio.lowlevel.checkpoint()
            assert await is_hooked(pump)

    async def test_deferred_work_and_queue_pairs_resume_the_hooks(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        calls: list[int] = []
        async with running(*rnics) as pump:
            await until_idle(pump)
            pump.flush_later(lambda: calls.append(1))
            await trio.lowlevel.checkpoint()
            assert calls == [1]
            await until_idle(pump)
            pump.flush_soon(lambda: calls.append(2))
            await trio.sleep(NAP)
            assert calls == [1, 2]
            await until_idle(pump)
            Sink(pump, ends[0])
            assert await is_hooked(pump)

    async def test_an_event_of_the_rnic_resumes_the_hooks(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        async with running(*rnics) as pump:
            await until_idle(pump)
            events = await events_of_failure(rnics[0])
            assert await is_hooked(pump)
        assert events == [RnicEvent.PORT_DOWN]

    async def test_an_idle_pump_can_be_stopped(self, rnics: tuple[SoftRnic, SoftRnic]) -> None:
        async with running(*rnics) as pump:
            await until_idle(pump)
        assert pollers() == []


async def test_a_reader_is_solo_only_if_trio_waits_for_the_only_rnic(
    rnics: tuple[SoftRnic, SoftRnic], wake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_smc.rnic.solo.SOLO_AFTER_WAITS", 0)
    async with running(rnics[0]) as pump:
        await trio.testing.wait_all_tasks_blocked()
        assert pump.try_solo() is (wake == "trio")
    async with running(*rnics) as pump:
        await trio.testing.wait_all_tasks_blocked()
        assert not pump.try_solo()


@pytest.mark.parametrize("wake", ["trio"], indirect=True)
class TestSolo:
    """The solo reader; `tests.streams.test_solo_reader` has more."""

    @pytest.fixture(autouse=True)
    def become_solo_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trio_smc.rnic.solo.SOLO_AFTER_WAITS", 0)
        monkeypatch.setattr("trio_smc.rnic.solo.WATCHDOG_INTERVAL", PATIENCE)

    @contextlib.asynccontextmanager
    async def solo_reader(self, pump: Pump) -> AsyncIterator[list[bool]]:
        """Run a solo reader. The block must end its wait; the list gets the wait's result."""
        returned: list[bool] = []

        async def wait() -> None:
            assert pump.try_solo()
            returned.append(await pump.solo.wait())

        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                assert pump.waiting == 1
                assert not await is_hooked(pump)
                yield returned
        assert returned == [True]
        assert pump.waiting == 0

    async def test_a_message_ends_the_wait(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[1]) as pump:
            to_b = Sink(pump, b)
            for number in range(1, 4):
                async with self.solo_reader(pump):
                    a.qp.post_send(number, b"%d" % number)
                assert len(to_b.messages) == number
                assert not await is_hooked(pump)

    async def test_no_task_waits_on_the_doorbell_of_a_removed_rnic(self, directory: Path) -> None:
        """When the RNIC is closed, its descriptor number may be reused for another file."""
        rnic = SoftRnic("removed")
        rnic.open(directory)
        async with running(rnic) as pump, self.solo_reader(pump):
            number = rnic.completion_fd()
            pump.remove(rnic)
            rnic.close()
            with reusing(number) as pair:
                victim = Victim(*pair)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(victim.run)
                    await trio.testing.wait_all_tasks_blocked()
                    pair[1].send(b"x")
                assert victim.data == [b"x"]

    async def test_a_message_before_the_wait_is_drained(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[1]) as pump:
            to_b = Sink(pump, b)
            await trio.testing.wait_all_tasks_blocked()
            a.qp.post_send(1, b"x")
            assert pump.try_solo()
            with trio.testing.assert_no_checkpoints():
                assert not await pump.solo.wait()
            assert to_b.messages == [b"x"]
            async with self.solo_reader(pump):
                a.qp.post_send(2, b"y")

    async def test_a_solo_reader_does_not_yield_if_the_answer_has_arrived(
        self,
        rnics: tuple[SoftRnic, SoftRnic],
        ends: tuple[End, End],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A task that has just sent something yields, unless the answer has arrived."""
        a, b = ends
        yields: list[int] = []
        monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
        async with running(rnics[1], spin=1e-6) as pump:
            to_b = Sink(pump, b)
            while not pump.waits.spin.discouraged:
                pump.waits.spin.spin_failed()
            await trio.testing.wait_all_tasks_blocked()
            assert pump.try_solo()
            yields.clear()
            a.qp.post_send(1, b"x")
            assert not await pump.solo.wait(at_once=True, sent=True)
            assert not yields
            assert to_b.messages == [b"x"]
            with trio.move_on_after(0):
                await pump.solo.wait(at_once=True, sent=True)
            assert len(yields) == 1

    async def test_an_rnic_that_cannot_be_armed_is_polled(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        async with running(rnics[1]) as pump:
            await trio.testing.wait_all_tasks_blocked()
            assert pump.try_solo()
            rnics[1].timed_waits += 1
            assert not await pump.solo.wait()
            assert await is_hooked(pump)
            rnics[1].timed_waits -= 1

    async def test_a_defect_of_the_rnic_stops_the_stack_and_not_the_reader(
        self, rnics: tuple[SoftRnic, SoftRnic]
    ) -> None:
        pump = Pump(spin=0)
        pump.add(rnics[0])

        def arm() -> bool:
            raise RnicError(errno.EIO, "a defect")

        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with trio.open_nursery() as nursery:
                await nursery.start(pump.run)
                await trio.testing.wait_all_tasks_blocked()
                assert pump.try_solo()
                pump.dispatcher.lanes[0].arm = arm
                assert not await pump.solo.wait()
                with trio.fail_after(PATIENCE):
                    await trio.sleep_forever()
        assert isinstance(caught.value.exceptions[0], RnicError)
        assert pollers() == []

    async def test_a_solo_reader_spins_again_after_a_successful_spin(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends
        async with running(rnics[1], spin=1e-6) as pump:
            to_b = Sink(pump, b)
            while not pump.waits.spin.discouraged:
                pump.waits.spin.spin_failed()
            async with self.solo_reader(pump):
                a.qp.post_send(1, b"x")
            pump.waits.spin.slept(10**9)
            skipped = 0
            while not pump.waits.spin.should_spin():
                skipped += 1
            for _ in range(skipped):
                assert not pump.waits.spin.should_spin()
            assert pump.try_solo()
            a.qp.post_send(2, b"y")
            assert not await pump.solo.wait(at_once=True)
            assert to_b.messages == [b"x", b"y"]
            assert not pump.solo.should_wait_at_once()
            assert not await is_hooked(pump)

    @pytest.mark.parametrize("by", ["resume_hooks", "add", "remove", "event"])
    async def test_other_users_of_the_pump_end_solo_mode(
        self, rnics: tuple[SoftRnic, SoftRnic], by: str
    ) -> None:
        async with running(rnics[0]) as pump:
            async with self.solo_reader(pump):
                match by:
                    case "resume_hooks":
                        pump.resume_hooks()
                    case "add":
                        pump.add(rnics[1])
                    case "remove":
                        pump.remove(rnics[0])
                    case "event":
                        rnics[0].fail()
            assert await is_hooked(pump)

    async def test_solo_mode_ends_with_the_pump(self, rnics: tuple[SoftRnic, SoftRnic]) -> None:
        pump = Pump(spin=0)
        pump.add(rnics[0])
        scope = trio.CancelScope()

        async def run(task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await pump.run(task_status=task_status)

        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            async with self.solo_reader(pump):
                scope.cancel()
        assert pollers() == []

    async def test_a_task_that_drains_its_message_ends_the_wait(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        a, b = ends

        class Waking(Sink):
            def on_completion(self, plain: PlainCompletion) -> None:
                super().on_completion(plain)
                self.pump.solo.end_wait()

        async with running(rnics[1]) as pump:
            to_b = Waking(pump, b)
            async with self.solo_reader(pump) as returned:
                a.qp.post_send(1, b"x")
                pump.drain()
                assert to_b.messages == [b"x"]
                assert not returned
            a.qp.post_send(2, b"y")
            while len(to_b.messages) < 2:
                assert pump.try_solo()
                await pump.solo.wait()

    async def test_deferred_work_runs_at_once(self, rnics: tuple[SoftRnic, SoftRnic]) -> None:
        calls: list[int] = []
        async with running(rnics[0]) as pump, self.solo_reader(pump):
            pump.flush_later(lambda: calls.append(1))
            assert calls == [1]
            assert not await is_hooked(pump)
            pump.resume_hooks()

    async def test_a_reader_may_become_solo_as_the_doorbell_rings(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """The pump's own task waits on the doorbell first, then the solo reader does."""
        a, b = ends

        class Reader:
            is_solo = False

            def on_completion(self, plain: PlainCompletion) -> None:
                self.is_solo = pump.try_solo()

        async with running(rnics[1]) as pump:
            reader = Reader()
            pump.register(b.rnic, b.qp, reader)
            ringer = threading.Timer(NAP, lambda: a.qp.post_send(1, b"x", signaled=False))
            ringer.start()
            await trio.sleep(2 * NAP)
            ringer.join()
            await trio.testing.wait_all_tasks_blocked(NAP)
            assert reader.is_solo
            assert pump.machine.state == "SOLO"
            pump.resume_hooks()

    async def test_solo_mode_may_begin_in_a_hook(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """A completion starts solo mode during a hook, whose remaining code must not end it."""
        a, b = ends

        class Reader:
            def on_completion(self, plain: PlainCompletion) -> None:
                pump.try_solo()

        async with running(rnics[1]) as pump:
            pump.register(b.rnic, b.qp, Reader())
            for passes in range(AWAKE_PASSES - 1, AWAKE_PASSES + 3):
                await trio.testing.wait_all_tasks_blocked()
                pump.resume_hooks()
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                b.qp.post_receive(1)
                a.qp.post_send(1, b"x", signaled=False)
                await trio.lowlevel.checkpoint()
                assert pump.machine.state == "SOLO"
                assert pump.broken is None
            pump.resume_hooks()

    async def test_deferred_work_may_end_solo_mode_while_it_begins(
        self, rnics: tuple[SoftRnic, SoftRnic], ends: tuple[End, End]
    ) -> None:
        """Solo mode begins with deferred work; if the work needs the pump, the reader parks."""
        a, b = ends
        states: list[str] = []

        def work() -> None:
            states.append(pump.machine.state)
            pump.resume_hooks()

        async with running(rnics[1]) as pump:
            to_b = Sink(pump, b)
            await trio.testing.wait_all_tasks_blocked()
            pump.flush_soon(work)
            assert not pump.try_solo()
            assert states == ["SOLO"]
            assert pump.machine.state == "BUSY"
            await trio.testing.wait_all_tasks_blocked()
            a.qp.post_send(1, b"x", signaled=False)
            await to_b.wait(1)

    @pytest.mark.parametrize("state", ["STOPPED", "IDLE"])
    async def test_no_reader_is_solo_without_connections_or_a_running_pump(
        self, rnics: tuple[SoftRnic, SoftRnic], state: str
    ) -> None:
        if state == "STOPPED":
            assert not Pump(spin=0).try_solo()
            return
        async with running(rnics[1]) as pump:
            await until_idle(pump)
            assert not pump.try_solo()
            assert pump.machine.state == "IDLE"

    @pytest.mark.parametrize("when", ["the next wait", "the watchdog", "other users"])
    async def test_work_that_is_due_soon_runs_in_solo_mode(
        self, rnics: tuple[SoftRnic, SoftRnic], when: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called = trio.Event()
        async with running(rnics[0]) as pump:
            async with self.solo_reader(pump):
                if when == "the watchdog":
                    monkeypatch.setattr("trio_smc.rnic.solo.WATCHDOG_INTERVAL", NAP)
                pump.flush_soon(called.set)
                assert not await is_hooked(pump)
                pump.solo.end_wait()
            assert not called.is_set()
            if when == "the next wait":
                async with self.solo_reader(pump):
                    assert called.is_set()
                    pump.solo.end_wait()
            elif when == "other users":
                pump.resume_hooks()
            with trio.fail_after(PATIENCE):
                await called.wait()


@pytest.mark.processes
class TestSecondProcess:
    @pytest.mark.parametrize("spin", [0, 50e-6])
    @pytest.mark.parametrize("inline", [False, True])
    async def test_no_wakeup_is_lost(
        self,
        rnics: tuple[SoftRnic, SoftRnic],
        directory: Path,
        seed: int,
        spin: float,
        inline: bool,
    ) -> None:
        rng = random.Random(seed)
        end = make_end(rnics[0])
        with Peer("echo", directory, seed & 0xFFFF) as peer:
            peer.connect(end)
            async with running(*rnics, spin=spin) as pump:
                sink = Sink(pump, end)
                for index in range(1, 1501):
                    end.qp.post_send(index, b"%d" % index, signaled=False)
                    await sink.wait(index, spin=inline)
                    if rng.random() < 0.01:
                        await trio.sleep(0.001)
                assert sink.messages == [b"%d" % index for index in range(1, 1501)]
        end.close()

    async def test_a_sleeping_pump_notices_the_death_of_a_peer(
        self, rnics: tuple[SoftRnic, SoftRnic], directory: Path
    ) -> None:
        end = make_end(rnics[0])
        with Peer("echo", directory) as peer:
            peer.connect(end)
            async with running(*rnics) as pump:
                sink = Sink(pump, end)
                await trio.sleep(0.05)
                peer.process.kill()
                await sink.wait(1)
        assert state(end.qp) is QpState.ERR
        end.close()
        # Opening an RNIC removes the socket of the killed process.
        cleaner = SoftRnic("cleaner")
        cleaner.open(directory)
        cleaner.close()


@pytest.mark.pure  # a method of a compiled class is replaced
async def test_the_woken_task_runs_before_the_doorbell_is_acknowledged(
    ends: tuple[End, End], wake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sleep, the waiting task continues before the pump clears the doorbell."""
    a, b = ends
    done: list[str] = []
    acknowledge = b.rnic.acknowledge

    def acknowledge_then(self: SoftRnic) -> bool:
        done.append("read")
        return acknowledge()

    monkeypatch.setattr(SoftRnic, "acknowledge", acknowledge_then)
    async with running(b.rnic) as pump:  # type: ignore[arg-type]
        to_b = Sink(pump, b)
        for count in range(1, 4):
            await trio.sleep(NAP)
            wakeups = pump.wakeups
            timer = threading.Timer(NAP, lambda: a.qp.post_send(1, b"x"))
            timer.start()
            await to_b.wait(count)
            done.append("ran")
            timer.join()
            await trio.sleep(NAP)
            assert pump.wakeups - wakeups == 1
    assert done == (["ran", "read"] * 3 if wake == "trio" else ["ran"] * 3)


class TestYielding:
    """If a spin is not worthwhile, a task that has sent something yields the processor."""

    @pytest.fixture
    def yields(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Times at which the processor was yielded; each yield takes `takes` seconds."""
        times: list[float] = []

        def sched_yield() -> None:
            times.append(time.perf_counter())
            time.sleep(self.takes)

        monkeypatch.setattr("os.sched_yield", sched_yield)
        return times

    takes = 0.0

    @pytest.fixture
    def discouraged(self) -> Pump:
        pump = Pump(spin=1e-6)
        while not pump.waits.spin.discouraged:
            pump.waits.spin.spin_failed()
        return pump

    async def test_a_task_yields_only_after_a_send(
        self, discouraged: Pump, yields: list[float]
    ) -> None:
        assert not discouraged.try_spin()
        assert not yields
        assert not discouraged.try_spin(sent=True)
        assert len(yields) == 1

    async def test_a_task_does_not_yield_while_another_is_runnable(
        self, discouraged: Pump, yields: list[float]
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.checkpoint)
            assert not discouraged.try_spin(sent=True)
        assert not yields

    async def test_a_task_seldom_yields_to_a_process_that_keeps_the_processor(
        self, discouraged: Pump, yields: list[float]
    ) -> None:
        """A computing program keeps the processor for a whole time slice after each yield."""
        self.takes = 0.002
        for _ in range(16 + 130):
            assert not discouraged.try_spin(sent=True)
            discouraged.waits.spin.slept(50_000)
        assert len(yields) == 2

    async def test_a_message_that_arrives_during_a_yield_is_found(
        self, ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, discouraged: Pump
    ) -> None:
        a, b = ends
        discouraged.add(b.rnic)
        to_b = Sink(discouraged, b)
        monkeypatch.setattr("os.sched_yield", lambda: a.qp.post_send(1, b"x"))
        assert discouraged.try_spin(lambda: bool(to_b.messages), sent=True)


async def test_no_spin_while_another_task_is_runnable() -> None:
    pump = Pump(spin=1e-6)
    spins = spins_of(pump)
    pump.try_spin()
    assert len(spins) == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.lowlevel.checkpoint)
        for _ in range(20):
            pump.waits.spin.spin_succeeded()
            pump.try_spin()
    assert len(spins) == 1
