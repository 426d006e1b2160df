"""Fault injection in the software RNIC: each fault has its effect, and a seed replays a run."""

from __future__ import annotations

import contextlib
import random
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.peers import open_pair
from tests.rnic.contract import (
    PACKETS,
    End,
    assert_no_completions,
    connect,
    got,
    make_end,
    state_of,
    until,
)
from tests.timing import PATIENCE
from trio_smc.rnic import words
from trio_smc.rnic.soft import ring as _ring
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.faults import Fault, FaultPlan, FaultyQueuePair
from trio_smc.rnic.soft.messages import Message
from trio_smc.rnic.soft.peer_sockets import PeerSockets
from trio_smc.rnic.verbs import DeliveryUnknown, QpState, RnicEvent, WcStatus

FLUSHED = WcStatus.WR_FLUSH_ERR
UNREACHABLE = WcStatus.RETRY_EXC_ERR
ERR, RTS = QpState.ERR, QpState.RTS
SIZE = 4096


class Faulty:
    """Two RNICs, the first of which has a fault plan, and connected queue pairs on them."""

    def __init__(self, directory: Path, plan: FaultPlan, *, packets: bool = False) -> None:
        self.plan = plan
        self.rnic = SoftRnic("faulty", faults=plan)
        self.other = SoftRnic("sound")
        self.rnic.sends_packets = self.rnic.sends_packets or packets
        self.rnic.open(directory)
        self.other.open(directory)
        self._pairs = contextlib.ExitStack()

    def pair(self) -> tuple[End, End]:
        return self._pairs.enter_context(open_pair("link", self.rnic, self.other))

    def close(self) -> None:
        self._pairs.close()
        self.rnic.close()
        self.other.close()


@pytest.fixture(params=PACKETS, ids=lambda packets: "packets" if packets else "rings")
def faulty(runtime_directory: Path, seed: int, request: pytest.FixtureRequest) -> Iterator[Faulty]:
    faulty = Faulty(runtime_directory / "smc", FaultPlan(seed), packets=request.param)
    yield faulty
    faulty.close()


def count_sockets() -> int:
    """Return the number of open sockets of this process."""
    found = Path("/proc/self/fd").iterdir()
    return sum(str(each.readlink()).startswith("socket:") for each in found if each.is_symlink())


def kinds(plan: FaultPlan) -> list[Fault]:
    return [struck.kind for struck in plan.log]


class TestWithoutPlan:
    def test_queue_pairs_without_a_plan_have_no_fault_code(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        assert type(b.qp) is not type(a.qp)
        assert isinstance(a.qp, FaultyQueuePair)
        assert not isinstance(b.qp, FaultyQueuePair)

    def test_one_plan_serves_one_rnic(self, faulty: Faulty) -> None:
        with pytest.raises(ValueError, match="belongs to another RNIC"):
            SoftRnic("another", faults=faulty.plan)


class TestRequests:
    def test_nothing_happens_without_a_fault(self, faulty: Faulty, rng: random.Random) -> None:
        a, b = faulty.pair()
        texts = [rng.randbytes(44) for _ in range(40)]
        for number, text in enumerate(texts, 1):
            a.write(number, b, 16 * number, text[:16], signaled=False)
            a.qp.post_send(number, text)
        until(lambda: len(a.sent) == 40 and b.received == texts, a, b)
        assert a.sent == [(number, 0) for number in range(1, 41)]
        assert bytes(b.memory.view[16 : 41 * 16]) == b"".join(text[:16] for text in texts)
        assert faulty.plan.log == []

    def test_a_lost_completion_fails_the_sender(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        faulty.plan.inject(Fault.COMPLETION_LOST)
        assert list(faulty.plan.armed) == [Fault.COMPLETION_LOST]
        a.write(1, b, 0, b"written", signaled=False)
        a.qp.post_send(2, b"told")
        a.qp.post_send(3, b"flushed")
        until(lambda: len(a.sent) == 2 and bool(b.flushed), a, b)
        assert a.sent == [(2, UNREACHABLE), (3, FLUSHED)]
        assert b.received == [b"told"]
        assert bytes(b.memory.view[:7]) == b"written"
        assert state_of(a.qp) is state_of(b.qp) is ERR
        assert not faulty.plan.armed
        assert faulty.plan.log[0][1:] == (Fault.COMPLETION_LOST, a.qp.qp_num, b"told")

    def test_a_lost_completion_waits_until_the_message_can_arrive(self, faulty: Faulty) -> None:
        a, b = make_end(faulty.rnic), make_end(faulty.other)
        connect(a, b, receives=0)
        faulty.plan.inject(Fault.COMPLETION_LOST)
        a.qp.post_send(1, b"told")
        assert_no_completions(a, b)
        assert faulty.plan.log == []
        b.qp.post_receive(1)
        until(lambda: bool(a.sent) and bool(b.received), a, b)
        assert a.sent == [(1, UNREACHABLE)]
        assert kinds(faulty.plan) == [Fault.COMPLETION_LOST]
        a.close()
        b.close()

    def test_a_message_that_is_not_placed_is_acknowledged(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        b.qp.post_send(1, b"the other way")
        faulty.plan.inject(Fault.NOT_PLACED)
        a.qp.post_send(1, b"never arrives")
        a.qp.post_send(2, b"nor does this")
        until(lambda: len(a.sent) == 2 and bool(b.flushed), a, b)
        assert a.sent == [(1, 0), (2, FLUSHED)]
        assert b.received == []
        assert a.received == [b"the other way"]
        assert state_of(a.qp) is state_of(b.qp) is ERR

    def test_a_lost_message_fails_the_sender(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        faulty.plan.inject(Fault.MESSAGE_LOST)
        a.write(1, b, 0, b"written", signaled=False)
        a.qp.post_send(2, b"never arrives")
        until(lambda: bool(a.sent) and bool(b.flushed), a, b)
        assert a.sent == [(2, UNREACHABLE)]
        assert b.received == []
        assert bytes(b.memory.view[:7]) == b"written"

    def test_a_lost_write_fails_the_sender(self, faulty: Faulty) -> None:
        """A beginning of the lost write may be placed, but no later write."""
        lengths = set()
        for _ in range(20):
            a, b = faulty.pair()
            a.qp.post_send(1, b"before")
            faulty.plan.inject(Fault.WRITE_LOST)
            a.write(2, b, 0, b"x" * SIZE, signaled=False)
            a.write(3, b, SIZE, b"x" * SIZE)
            until(lambda: len(a.sent) == 3 and bool(b.flushed), a, b)  # noqa: B023
            assert a.sent == [(1, 0), (2, UNREACHABLE), (3, FLUSHED)]
            there = bytes(b.memory.view)
            length = there.count(b"x")
            assert there == b"x" * length + bytes(len(there) - length)
            assert length <= SIZE
            lengths.add(length)
        assert len(lengths) > 10

    def test_only_messages_of_the_plan_are_faulty(self, faulty: Faulty) -> None:
        faulty.plan.concerns = lambda message: message[:1] == b"\xfe"
        a, b = faulty.pair()
        c, d = faulty.pair()
        faulty.plan.inject(Fault.MESSAGE_LOST, c.qp.qp_num)
        a.qp.post_send(1, b"\xfe")
        c.qp.post_send(1, b"\x07")
        until(lambda: bool(b.received) and bool(d.received), a, b, c, d)
        c.qp.post_send(2, b"\xfe")
        until(lambda: bool(d.flushed), a, b, c, d)
        assert c.sent == [(1, 0), (2, UNREACHABLE)]
        assert state_of(a.qp) is state_of(b.qp) is RTS


class TestDeliver:
    """`QueuePair.deliver` on an RNIC with a fault plan."""

    def test_deliver_succeeds_while_no_fault_is_due(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        struck: list[tuple[int, bytes, int]] = []
        faulty.plan.on_message = lambda *each: struck.append(each)
        address, rkey = b.region.address, b.region.rkey
        until(lambda: a.qp.deliver(b"message", memoryview(b"data"), address, rkey), a, b)
        a.qp.post_send(1, b"posted")
        until(lambda: len(b.received) == 2 and len(a.sent) == 1, a, b)
        assert b.received == [b"message", b"posted"]
        assert bytes(b.memory.view[:4]) == b"data"
        assert struck == [(a.qp.qp_num, b"message", 0), (a.qp.qp_num, b"posted", 0)]

    @pytest.mark.parametrize("kind", [Fault.NOT_PLACED, Fault.MESSAGE_LOST, Fault.COMPLETION_LOST])
    def test_deliver_is_refused_if_a_fault_is_due_for_a_posted_send(
        self, faulty: Faulty, kind: Fault
    ) -> None:
        a, b = faulty.pair()
        struck: list[tuple[int, bytes, int]] = []
        faulty.plan.on_message = lambda *each: struck.append(each)
        until(lambda: a.qp.deliver(b"before", None, 0, 0), a, b)
        faulty.plan.inject(kind)
        assert not a.qp.deliver(b"message", None, 0, 0)
        assert kinds(faulty.plan) == []
        a.qp.post_send(1, b"message")
        assert kinds(faulty.plan) == [kind]
        assert not a.qp.deliver(b"after", None, 0, 0)
        until(lambda: bool(a.sent) and bool(b.flushed), a, b)
        status = 0 if kind is Fault.NOT_PLACED else UNREACHABLE
        assert a.sent == [(1, status)]
        assert struck[1:] == [(a.qp.qp_num, b"message", status)]
        arrived = [b"message"] if kind is Fault.COMPLETION_LOST else []
        assert b.received == [b"before", *arrived]

    @pytest.mark.parametrize("kind", [Fault.LINK_SILENT, Fault.DELAY, Fault.PORT_DOWN])
    def test_deliver_is_refused_while_nothing_is_sent(self, faulty: Faulty, kind: Fault) -> None:
        a, b = faulty.pair()
        until(lambda: a.qp.deliver(b"before", None, 0, 0), a, b)
        until(got(b, 1), a, b)
        faulty.plan.delay = 60
        faulty.plan.inject(kind)
        assert not a.qp.deliver(b"message", None, 0, 0)
        assert_no_completions(b)
        assert b.received == [b"before"]

    def test_periodic_faults_strike_posted_requests(
        self, runtime_directory: Path, seed: int
    ) -> None:
        plan = FaultPlan(seed, kinds=(Fault.MESSAGE_LOST,), every=20)
        faulty = Faulty(runtime_directory / "smc", plan)
        a, b = faulty.pair()
        sent = 0
        while state_of(a.qp) is RTS:
            data = memoryview(b"data") if sent % 2 else None
            if not a.qp.deliver(b"message", data, b.region.address, b.region.rkey):
                a.qp.post_send(sent, b"message")
            sent += 1
        until(lambda: bool(b.flushed), a, b)
        assert len(b.received) == sent - 1
        assert kinds(plan) == [Fault.MESSAGE_LOST]
        assert 1 <= plan.log[0].request <= 40
        faulty.close()


class TestLinks:
    def test_both_sides_notice_a_link_down(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        c, d = faulty.pair()
        b.qp.post_send(1, b"arrived before")
        faulty.plan.inject(Fault.LINK_DOWN, a.qp.qp_num)
        until(lambda: bool(a.flushed) and bool(b.flushed), a, b)
        assert a.received == [b"arrived before"]
        assert state_of(a.qp) is state_of(b.qp) is ERR
        assert state_of(c.qp) is state_of(d.qp) is RTS
        with pytest.raises(ValueError, match="no such queue pair"):
            faulty.plan.inject(Fault.LINK_DOWN, a.qp.qp_num)

    @pytest.mark.parametrize("write", [False, True])
    def test_the_peer_notices_a_link_down_when_it_posts(self, faulty: Faulty, write: bool) -> None:
        a, b = faulty.pair()
        faulty.plan.inject(Fault.LINK_DOWN_HERE)
        until(lambda: bool(a.flushed), a, b)
        assert_no_completions(a, b)
        assert state_of(b.qp) is RTS
        a.qp.close()
        assert_no_completions(b)
        assert state_of(b.qp) is RTS
        if write:
            b.write(1, a, 0, b"lost")
        else:
            b.qp.post_send(1, b"lost")
        until(lambda: bool(b.sent), b)
        assert b.sent == [(1, UNREACHABLE)]
        assert state_of(b.qp) is ERR

    def test_sockets_of_queue_pairs_that_noticed_are_not_kept(self, faulty: Faulty) -> None:
        before = count_sockets()
        for _ in range(20):
            a, b = faulty.pair()
            faulty.plan.inject(Fault.LINK_DOWN_HERE)
            b.qp.post_send(1, b"lost")
            until(lambda: bool(b.sent), a, b)  # noqa: B023
            a.qp.close()
            b.qp.close()
            until(lambda: count_sockets() <= before + 4, a, b)

    def test_a_silent_link_notifies_neither_side(self, faulty: Faulty) -> None:
        """Neither side is notified, and no lost message is reported as sent."""
        a, b = faulty.pair()
        b.qp.post_send(1, b"before")
        faulty.plan.inject(Fault.LINK_SILENT)
        a.qp.post_send(1, b"lost")
        b.qp.post_send(2, b"lost")
        until(got(a, 1), a, b)
        a.qp.post_receive(1)
        assert_no_completions(a, b)
        assert (a.sent, b.received, b.sent) == ([], [], [(1, 0)])
        assert state_of(a.qp) is state_of(b.qp) is RTS
        a.qp.to_err()
        until(lambda: len(a.sent) == 1 and len(b.sent) == 2, a, b)
        assert a.sent == [(1, FLUSHED)]
        assert b.sent[1][1] in (FLUSHED, UNREACHABLE)
        assert b.received == []

    def test_delayed_messages_arrive_in_order(self, faulty: Faulty) -> None:
        """Messages arrive late, complete and in order, and Trio does not sleep meanwhile."""
        faulty.plan.delay = 0.2
        a, b = faulty.pair()
        a.qp.post_send(1, b"before")
        faulty.plan.inject(Fault.DELAY)
        a.write(2, b, 0, b"written", signaled=False)
        a.qp.post_send(3, b"after")
        assert not a.rnic.arm()
        until(lambda: len(a.sent) == 2 and len(b.received) == 2, a, b)
        assert b.received == [b"before", b"after"]
        assert bytes(b.memory.view[:7]) == b"written"
        assert a.rnic.arm()

    def test_a_spurious_wakeup_has_no_effect(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        a.rnic.service()
        b.rnic.service()
        assert a.rnic.arm()
        assert b.rnic.arm()
        faulty.plan.inject(Fault.WAKEUP)
        for end in (a, b):
            assert select.select([end.rnic.wait_fd()], [], [], 1)[0]
        assert_no_completions(a, b)
        a.qp.post_send(1, b"as before")
        until(got(b, 1), a, b)


class TestPorts:
    def test_a_port_flap_flushes_requests(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        c, d = faulty.pair()
        events: list[RnicEvent] = []
        a.rnic.on_event = events.append
        faulty.plan.inject(Fault.PORT_FLAP)
        assert not faulty.rnic.port_active
        a.qp.post_send(1, b"lost")
        until(lambda: faulty.rnic.port_active, a, b)
        a.rnic.service()
        assert events == [RnicEvent.PORT_DOWN, RnicEvent.PORT_UP]
        assert a.sent == [(1, FLUSHED)]
        # A queue pair that was not used during the flap still works.
        c.qp.post_send(1, b"there")
        until(got(d, 1), c, d)

    def test_a_port_is_down_until_it_is_restored(self, faulty: Faulty) -> None:
        a, b = faulty.pair()
        faulty.plan.inject(Fault.PORT_DOWN)
        b.qp.post_send(1, b"lost")
        until(lambda: bool(b.sent), a, b)
        assert b.sent == [(1, UNREACHABLE)]
        faulty.rnic.restore()
        e, f = faulty.pair()
        e.qp.post_send(1, b"there")
        f.qp.post_send(1, b"and back")
        until(lambda: f.received == [b"there"] and e.received == [b"and back"], e, f)

    async def test_events_are_reported_on_the_trio_thread(self) -> None:
        rnic = SoftRnic("left")
        async with trio_smc.open_stack(trio_smc.Config(rnics=(rnic,))):
            task_thread = trio.lowlevel.current_trio_token()
            events: list[tuple[RnicEvent, bool]] = []
            changed = trio.Event()

            def on_event(event: RnicEvent) -> None:
                nonlocal changed
                events.append((event, trio.lowlevel.current_trio_token() is task_thread))
                changed.set()
                changed = trio.Event()

            rnic.on_event = on_event
            for change in (rnic.fail, rnic.restore):
                waiting = changed
                change()
                with trio.fail_after(PATIENCE):
                    await waiting.wait()
            assert events == [(RnicEvent.PORT_DOWN, True), (RnicEvent.PORT_UP, True)]


class TestBySeed:
    def run(self, directory: Path, seed: int) -> tuple[FaultPlan, list[tuple[int, Fault]]]:
        # About 20 faults of each kind: a kind is missing in less than one of a million runs.
        plan = FaultPlan(seed, kinds=tuple(Fault), every=4, flap=0, delay=0)
        faulty = Faulty(directory, plan)
        try:
            for _ in range(200):
                a, b = faulty.pair()
                for number in range(1, 11):
                    a.write(number, b, 0, b"data", signaled=False)
                    a.qp.post_send(number, b"message")
                    if not faulty.rnic.port_active:
                        a.rnic.poll()
                        faulty.rnic.restore()
                    if state_of(a.qp) is ERR:
                        break
        finally:
            faulty.close()
        return plan, [(struck.request, struck.kind) for struck in plan.log]

    def test_a_seed_replays_its_faults(self, runtime_directory: Path, seed: int) -> None:
        plan, first = self.run(runtime_directory / "smc", seed)
        assert set(kinds(plan)) == set(Fault)
        _, again = self.run(runtime_directory / "smc", seed)
        assert first == again
        _, different = self.run(runtime_directory / "smc", seed + 1)
        assert first != different

    def test_a_disarmed_plan_has_no_faults(self, runtime_directory: Path) -> None:
        plan = FaultPlan(7, kinds=(Fault.LINK_DOWN,), every=1)
        faulty = Faulty(runtime_directory / "smc", plan)
        plan.inject(Fault.MESSAGE_LOST)
        plan.disarm()
        a, b = faulty.pair()
        for number in range(1, 11):
            a.qp.post_send(number, b"message")
        until(got(b, 10), a, b)
        assert plan.log == []
        faulty.close()


def end_during_next_send(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None], *, before: bool
) -> None:
    """Call ``end()`` while the next sender, which has seen a posted receive, publishes its message.

    Args:
      before: True to call it just before the message is published, False for just after.
    """
    send = PeerSockets.send_packet

    def send_and_end(sockets: PeerSockets, message: Message) -> int:
        monkeypatch.setattr(PeerSockets, "send_packet", send)
        if before:
            end()
        sent = send(sockets, message)
        if not before:
            end()
        return sent

    if faulty.rnic.sends_packets:
        monkeypatch.setattr(PeerSockets, "send_packet", send_and_end)
        return
    pack, fence = _ring.pack_slot, words.fence

    def pack_and_end(*arguments: Any) -> None:
        monkeypatch.setattr(_ring, "pack_slot", pack)
        pack(*arguments)
        end()

    def fence_and_end() -> None:
        monkeypatch.setattr(_ring, "fence", fence)
        fence()
        end()

    if before:
        monkeypatch.setattr(_ring, "pack_slot", pack_and_end)
    else:
        monkeypatch.setattr(_ring, "uses_lock", False)  # the ring then calls `fence`
        monkeypatch.setattr(_ring, "fence", fence_and_end)


@pytest.mark.pure  # compiled code would not call the replaced functions
class TestRace:
    """The receiver's end is closed while a message is published."""

    @pytest.mark.parametrize("quietly", [False, True])
    @pytest.mark.parametrize("before", [False, True])
    def test_an_acknowledged_message_is_received(
        self, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, before: bool, quietly: bool
    ) -> None:
        a, b = faulty.pair()
        assert isinstance(a.qp, FaultyQueuePair)
        end: Callable[[], None] = a.qp.to_err_quietly if quietly else a.qp.to_err
        end_during_next_send(faulty, monkeypatch, end, before=before)
        b.qp.post_send(1, b"message")
        until(lambda: bool(b.sent) and bool(a.flushed), a, b)
        arrived = a.received == [b"message"]
        assert arrived is not before
        assert b.sent[0][1] in ((UNREACHABLE,) if not arrived else (0, UNREACHABLE))

    @pytest.mark.parametrize("before", [False, True])
    def test_an_immediate_delivery_may_have_been_received(
        self, faulty: Faulty, monkeypatch: pytest.MonkeyPatch, before: bool
    ) -> None:
        """With rings the sender cannot know if the message was received, and reports neither.

        A packet that the kernel has accepted is received, so the result is known.
        """
        a, b = faulty.pair()
        until(lambda: b.qp.deliver(b"first", None, 0, 0), a, b)
        end_during_next_send(faulty, monkeypatch, a.qp.to_err, before=before)
        data = memoryview(b"data")
        if faulty.rnic.sends_packets:
            sent = b.qp.deliver(b"message", data, a.region.address, a.region.rkey)
            assert sent is not before
            until(lambda: bool(a.flushed), a, b)
            assert a.received == [b"first", *[b"message"][before:]]
            return
        with pytest.raises(DeliveryUnknown):
            b.qp.deliver(b"message", data, a.region.address, a.region.rkey)
        assert state_of(b.qp) is ERR
        until(lambda: bool(a.flushed) and len(b.flushed) == 2, a, b)
        assert a.received == [b"first", *[b"message"][before:]]
        assert b.flushed == [UNREACHABLE, FLUSHED]
        assert not b.qp.deliver(b"after", None, 0, 0)
