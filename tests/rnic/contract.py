"""Tests that every kind of RNIC must pass, over the interface `trio_smc.rnic.verbs`.

A test module subclasses `RnicContract` and gives it two RNICs that reach each other.  The tests
allow for hardware: they wait for completions with a deadline, and an error may take a second.
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import pytest

from tests.timing import PATIENCE
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    MemoryRegion,
    ProtectionDomain,
    QpState,
    QueueFull,
    QueuePair,
    Rnic,
    RnicError,
    WcOpcode,
    WcStatus,
)
from trio_smc.rnic.words import VARIANT

MEMORY = 256 * 1024
RECEIVES = 64
HAS_RINGS = VARIANT != "socket"
PACKETS = [False, True] if HAS_RINGS else [True]
"""Values of `SoftRnic.sends_packets` to test on this machine: False for rings, True for packets."""
needs_rings = pytest.mark.skipif(
    not HAS_RINGS, reason="this machine has no rings; tests/rnic/test_packets.py tests packets"
)


def _closes_truncated_descriptors() -> bool:
    """True if recvmsg(2) closes the descriptors for which the caller has no room.

    QEMU's user mode receives twice as many, and its program does not learn of the others.
    """

    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        socket.send_fds(left, [b"x"], [left.fileno()] * 3)
        before = descriptors()
        for each in socket.recv_fds(right, 1, 2)[1]:
            os.close(each)
        leaked = descriptors() - before
        for name in leaked:
            os.close(int(name))
    return not leaked


needs_truncation = pytest.mark.skipif(
    not _closes_truncated_descriptors(),
    reason="recvmsg(2) leaks the descriptors for which there is no room, as in QEMU's user mode",
)


@dataclass(kw_only=True)
class End:
    """One end of a connection, and the completions that it has received."""

    rnic: Rnic
    pd: ProtectionDomain
    qp: QueuePair
    memory: Memory
    region: MemoryRegion
    received: list[bytes] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)
    """(wr_id, status) of each completed request."""
    flushed: list[int] = field(default_factory=list)
    """Statuses of the failed receives."""

    def take(self, completion: Completion) -> None:
        # A failed completion has only status and request number; receives have the number 0 here.
        if completion.status == 0 and completion.opcode == WcOpcode.RECV:
            assert completion.data is not None
            self.received.append(completion.data)
        elif completion.wr_id == 0:
            self.flushed.append(completion.status)
        else:
            self.sent.append((completion.wr_id, completion.status))

    def write(
        self,
        wr_id: int,
        other: End,
        offset: int,
        data: bytes,
        more: bytes | None = None,
        signaled: bool = True,
    ) -> None:
        self.qp.post_write(
            wr_id,
            memoryview(data),
            None if more is None else memoryview(more),
            address=other.region.address + offset,
            rkey=other.region.rkey,
            signaled=signaled,
        )

    def close(self) -> None:
        self.qp.close()
        self.region.close()
        self.pd.close()
        self.memory.close()


def make_end(rnic: Rnic) -> End:
    """A queue pair in INIT, with a protection domain and registered memory of its own."""
    pd = rnic.alloc_pd()
    memory = rnic.alloc_memory(MEMORY)
    qp = rnic.create_qp(pd)
    qp.to_init()
    return End(rnic=rnic, pd=pd, qp=qp, memory=memory, region=pd.register(memory))


def connect(a: End, b: End, *, receives: int = RECEIVES, psns: tuple[int, int] = (7, 9)) -> None:
    """Bring both ends to RTS."""
    for end in (a, b):
        if receives:
            end.qp.post_receive(receives)
    resolve_addresses(a, b)
    a.qp.to_rtr(gid=b.rnic.gid, qp_num=b.qp.qp_num, psn=psns[1], mtu=min(a.rnic.mtu, b.rnic.mtu))
    b.qp.to_rtr(gid=a.rnic.gid, qp_num=a.qp.qp_num, psn=psns[0], mtu=min(a.rnic.mtu, b.rnic.mtu))
    a.qp.to_rts(psn=psns[0])
    b.qp.to_rts(psn=psns[1])


def resolve_addresses(a: End, b: End) -> None:
    """Wait until each RNIC knows the other's address."""
    deadline = time.monotonic() + PATIENCE
    while not (a.rnic.address_known(b.rnic.gid) and b.rnic.address_known(a.rnic.gid)):
        assert time.monotonic() < deadline, "the peer's address was not resolved"
        time.sleep(0.002)


_completion_fds: WeakKeyDictionary[Rnic, int] = WeakKeyDictionary()


def use_completion_fd(rnic: Rnic) -> None:
    """From now on, the RNIC reports completions on a descriptor of their own."""
    fd = rnic.completion_fd()
    assert fd is not None
    _completion_fds[rnic] = fd


def sleep_on(*rnics: Rnic) -> select.poll:
    """Return a poll object for the descriptors of these RNICs."""
    sleeper = select.poll()
    for rnic in rnics:
        sleeper.register(rnic.wait_fd(), select.POLLIN)
        if rnic in _completion_fds:
            sleeper.register(_completion_fds[rnic], select.POLLIN)
    return sleeper


def clear_readiness(rnic: Rnic) -> None:
    """Clear the readiness of the RNIC's descriptors."""
    if rnic in _completion_fds:
        assert rnic.acknowledge()
    rnic.service()


def until(condition: Callable[[], bool], *ends: End, seconds: float = PATIENCE) -> None:
    """Record completions until the condition is true. Sleep on the RNICs while there are none."""
    rnics = list({id(end.rnic): end.rnic for end in ends}.values())
    deadline = time.monotonic() + seconds
    while True:
        found = False
        for rnic in rnics:
            for completion in rnic.poll():
                found = True
                for end in ends:
                    if end.rnic is rnic and end.qp.qp_num == completion.qp_num:
                        end.take(completion)
        if condition():
            return
        left = deadline - time.monotonic()
        assert left > 0, f"no more completions arrived: {ends}"
        if not found and all(rnic.arm() for rnic in rnics):
            sleep_on(*rnics).poll(left * 1000)
            for rnic in rnics:
                clear_readiness(rnic)


def got(end: End, count: int) -> Callable[[], bool]:
    """A condition for `until`: the end has received this number of messages."""
    return lambda: len(end.received) == count


def state_of(qp: QueuePair) -> QpState:
    """Return the state now; unlike ``qp.state``, mypy does not narrow the result."""
    return qp.state


def assert_no_completions(*ends: End) -> None:
    """Assert that no completion arrives within 50 ms."""
    before = [(len(end.received), len(end.sent), len(end.flushed)) for end in ends]
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        for end in ends:
            clear_readiness(end.rnic)
            for completion in end.rnic.poll():
                for other in ends:
                    if other.rnic is end.rnic and other.qp.qp_num == completion.qp_num:
                        other.take(completion)
    assert before == [(len(end.received), len(end.sent), len(end.flushed)) for end in ends]


class RnicContract:
    """The tests.  Subclasses define the fixture ``rnics``: two open RNICs."""

    @pytest.fixture
    def rnics(self) -> Iterator[tuple[Rnic, Rnic]]:
        raise NotImplementedError

    @pytest.fixture
    def ends(self, rnics: tuple[Rnic, Rnic]) -> Iterator[tuple[End, End]]:
        """Two ends in INIT."""
        a, b = make_end(rnics[0]), make_end(rnics[1])
        yield a, b
        a.close()
        b.close()

    @pytest.fixture
    def pair(self, ends: tuple[End, End]) -> tuple[End, End]:
        """Two connected ends."""
        connect(*ends)
        return ends

    # -- states --------------------------------------------------------------------------

    def test_verbs_in_a_wrong_state_are_refused(self, rnics: tuple[Rnic, Rnic]) -> None:
        pd = rnics[0].alloc_pd()
        qp = rnics[0].create_qp(pd)

        def rtr() -> None:
            qp.to_rtr(gid=rnics[1].gid, qp_num=77, psn=1, mtu=1)

        def send() -> None:
            qp.post_send(1, b"x")

        def write() -> None:
            qp.post_write(1, memoryview(b"x"), None, address=1, rkey=1)

        assert state_of(qp) is QpState.RESET
        for verb in (rtr, lambda: qp.to_rts(psn=1), lambda: qp.post_receive(1), send, write):
            with pytest.raises(RnicError):
                verb()
        qp.to_init()
        assert state_of(qp) is QpState.INIT
        qp.post_receive(1)
        for verb in (qp.to_init, lambda: qp.to_rts(psn=1), send, write):
            with pytest.raises(RnicError):
                verb()
        qp.to_err()
        assert state_of(qp) is QpState.ERR
        qp.to_err()
        for verb in (qp.to_init, rtr, lambda: qp.to_rts(psn=1)):
            with pytest.raises(RnicError):
                verb()
        qp.close()
        qp.close()
        pd.close()
        pd.close()

    def test_a_queue_pair_passes_its_states_in_order(self, ends: tuple[End, End]) -> None:
        a, b = ends
        resolve_addresses(a, b)
        a.qp.to_rtr(gid=b.rnic.gid, qp_num=b.qp.qp_num, psn=9, mtu=1)
        assert state_of(a.qp) is QpState.RTR
        with pytest.raises(RnicError):
            a.qp.post_send(1, b"x")
        a.qp.to_rts(psn=7)
        assert state_of(a.qp) is QpState.RTS

    @pytest.mark.parametrize(
        ("qp_num", "mtu", "gid_size"),
        [(0, 5, 16), (1 << 24, 5, 16), (5, 0, 16), (5, 6, 16), (5, 5, 15)],
    )
    def test_to_rtr_refuses_an_invalid_address(
        self, ends: tuple[End, End], qp_num: int, mtu: int, gid_size: int
    ) -> None:
        a, b = ends
        with pytest.raises(RnicError):
            a.qp.to_rtr(gid=b.rnic.gid[:gid_size], qp_num=qp_num, psn=1, mtu=mtu)
        assert state_of(a.qp) is QpState.INIT

    def test_a_domain_in_use_cannot_be_closed(self, ends: tuple[End, End]) -> None:
        with pytest.raises(RnicError):
            ends[0].pd.close()
        with pytest.raises(RnicError):
            ends[0].rnic.create_qp(ends[1].pd)

    # -- send and receive ----------------------------------------------------------------

    def test_messages_arrive_whole_and_in_order(
        self, pair: tuple[End, End], rng: random.Random
    ) -> None:
        a, b = pair
        sizes = [1, 44, RECEIVE_SIZE, *(rng.randint(1, RECEIVE_SIZE) for _ in range(RECEIVES - 3))]
        messages = [rng.randbytes(size) for size in sizes]
        for index, message in enumerate(messages, 1):
            a.qp.post_send(index, message)
        until(lambda: len(b.received) == len(a.sent) == RECEIVES, a, b)
        assert b.received == messages
        assert a.sent == [(index, 0) for index in range(1, RECEIVES + 1)]

    def test_both_directions_at_once(self, pair: tuple[End, End]) -> None:
        a, b = pair
        for index in range(1, 21):
            a.qp.post_send(index, b"to b %d" % index)
            b.qp.post_send(index, b"to a %d" % index)
        until(lambda: len(a.received) == len(b.received) == 20, a, b)
        assert b.received == [b"to b %d" % index for index in range(1, 21)]
        assert a.received == [b"to a %d" % index for index in range(1, 21)]

    def test_a_message_longer_than_a_receive_is_refused(self, pair: tuple[End, End]) -> None:
        with pytest.raises(RnicError):
            pair[0].qp.post_send(1, bytes(RECEIVE_SIZE + 1))
        assert state_of(pair[0].qp) is QpState.RTS

    def test_unsignaled_success_is_silent(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.qp.post_send(1, b"one", signaled=False)
        a.write(2, b, 0, b"two", signaled=False)
        a.qp.post_send(3, b"three")
        until(lambda: len(b.received) == 2 and len(a.sent) == 1, a, b)
        assert a.sent == [(3, 0)]

    def test_an_immediate_delivery_has_no_completion(self, pair: tuple[End, End]) -> None:
        """An RNIC may also refuse an immediate delivery, which then has no effect."""
        a, b = pair
        a.write(1, b, 0, b"before", signaled=False)
        address, rkey = b.region.address, b.region.rkey
        done = a.qp.deliver(b"message", memoryview(b"data"), address + 8, rkey)
        if done:
            assert bytes(b.memory.view[:12]) == b"before\0\0data"
            assert a.qp.deliver(b"message alone", None, 0, 0)
            until(lambda: len(b.received) == 2, a, b)
            assert b.received == [b"message", b"message alone"]
            assert not a.qp.deliver(b"message", memoryview(b"data"), address, rkey ^ 1)
        assert_no_completions(a, b)
        assert a.sent == []
        assert state_of(a.qp) is QpState.RTS

    def test_no_immediate_delivery_overtakes_a_waiting_request(self, ends: tuple[End, End]) -> None:
        a, b = ends
        connect(a, b, receives=0)
        address, rkey = b.region.address, b.region.rkey
        assert not a.qp.deliver(b"no receive", memoryview(b"data"), address, rkey)
        a.qp.post_send(1, b"first")
        assert not a.qp.deliver(b"second", memoryview(b"data"), address, rkey)
        b.qp.post_receive(2)
        until(lambda: len(b.received) == 1 and len(a.sent) == 1, a, b)
        assert_no_completions(a, b)
        assert b.received == [b"first"]
        a.qp.to_err()
        assert not a.qp.deliver(b"third", memoryview(b"data"), address, rkey)

    def test_without_a_posted_receive_sends_wait(self, ends: tuple[End, End]) -> None:
        a, b = ends
        connect(a, b, receives=0)
        a.qp.post_send(1, b"first")
        a.write(2, b, 5, b"written")
        a.qp.post_send(3, b"second")
        assert_no_completions(a, b)
        assert bytes(b.memory.view[:16]) == bytes(16)
        b.qp.post_receive(1)
        until(lambda: len(b.received) == 1 and len(a.sent) >= 2, a, b)
        assert bytes(b.memory.view[5:12]) == b"written"
        b.qp.post_receive(1)
        until(lambda: len(b.received) == 2 and len(a.sent) == 3, a, b)
        assert b.received == [b"first", b"second"]
        assert a.sent == [(1, 0), (2, 0), (3, 0)]

    def test_the_send_queue_is_bounded(self, ends: tuple[End, End]) -> None:
        a, b = ends
        connect(a, b, receives=0)
        for index in range(1, a.rnic.send_depth + 1):
            a.qp.post_send(index, b"%d" % index)
        with pytest.raises(QueueFull):
            a.qp.post_send(9999, b"one too many")
        with pytest.raises(QueueFull):
            a.write(9999, b, 0, b"one too many")
        depth = a.rnic.send_depth
        for _ in range(depth):
            b.qp.post_receive(1)
            until(got(b, len(b.received) + 1), a, b)
        assert b.received == [b"%d" % index for index in range(1, depth + 1)]
        a.qp.post_send(9999, b"room again")

    def test_the_receive_queue_is_bounded(self, ends: tuple[End, End]) -> None:
        a, b = ends
        connect(a, b, receives=b.qp.receive_depth)
        with pytest.raises(QueueFull):
            b.qp.post_receive(1)
        a.qp.post_send(1, b"x")
        until(lambda: len(b.received) == 1, a, b)
        b.qp.post_receive(1)
        with pytest.raises(QueueFull):
            b.qp.post_receive(1)

    # -- RDMA write ----------------------------------------------------------------------

    def test_writes_are_placed_before_a_later_message_arrives(
        self, pair: tuple[End, End], rng: random.Random
    ) -> None:
        a, b = pair
        model = bytearray(MEMORY)
        for index in range(1, 31):
            size, split = rng.randint(1, 40_000), rng.random()
            offset = rng.randint(0, MEMORY - size)
            data = rng.randbytes(size)
            cut = int(size * split)
            if cut:
                a.write(index, b, offset, data[:cut], data[cut:], signaled=False)
            else:
                a.write(index, b, offset, data, signaled=False)
            model[offset : offset + size] = data
            a.qp.post_send(index, b"%d" % index)
            until(got(b, index), a, b)
            assert bytes(b.memory.view) == bytes(model)

    def test_a_write_reaches_both_bounds_of_a_region(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.write(1, b, 0, b"first")
        a.write(2, b, MEMORY - 4, b"la", b"st")
        until(lambda: len(a.sent) == 2, a, b)
        assert bytes(b.memory.view[:5]) == b"first"
        assert bytes(b.memory.view[-4:]) == b"last"

    @pytest.mark.parametrize(
        ("offset", "data", "more"),
        [
            (MEMORY - 3, b"four", None),
            (MEMORY - 3, b"tw", b"wo"),
            (-1, b"x", None),
            (MEMORY, b"x", None),
            (1 << 40, b"x", None),
        ],
    )
    def test_a_write_out_of_bounds_fails(
        self, pair: tuple[End, End], offset: int, data: bytes, more: bytes | None
    ) -> None:
        a, b = pair
        a.write(1, b, offset, data, more, signaled=False)
        self._assert_failure(a, b, [(1, WcStatus.REM_ACCESS_ERR)])
        assert bytes(b.memory.view) == bytes(MEMORY)

    def test_a_write_with_an_unknown_rkey_fails(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.qp.post_write(1, memoryview(b"x"), None, address=b.region.address, rkey=b.region.rkey ^ 1)
        self._assert_failure(a, b, [(1, WcStatus.REM_ACCESS_ERR)])

    def test_a_write_with_an_rkey_of_another_domain_fails(self, pair: tuple[End, End]) -> None:
        a, b = pair
        pd = b.rnic.alloc_pd()
        memory = b.rnic.alloc_memory(4096)
        other = pd.register(memory)
        a.qp.post_write(1, memoryview(b"x"), None, address=other.address, rkey=other.rkey)
        self._assert_failure(a, b, [(1, WcStatus.REM_ACCESS_ERR)])
        assert memory.view[0] == 0
        other.close()
        pd.close()
        memory.close()

    def test_a_write_with_a_revoked_rkey_fails(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.write(1, b, 0, b"before")
        until(lambda: len(a.sent) == 1, a, b)
        b.region.close()
        b.region.close()
        a.write(2, b, 0, b"after!", signaled=False)
        a.qp.post_send(3, b"never")
        self._assert_failure(
            a, b, [(1, 0), (2, WcStatus.REM_ACCESS_ERR), (3, WcStatus.WR_FLUSH_ERR)]
        )
        assert bytes(b.memory.view[:6]) == b"before"
        assert b.received == []

    def test_memory_registered_later_and_many_times(self, pair: tuple[End, End]) -> None:
        a, b = pair
        for index in range(1, 51):
            region = b.pd.register(b.memory)
            a.qp.post_write(
                index,
                memoryview(b"%04d" % index),
                None,
                address=region.address + 8,
                rkey=region.rkey,
            )
            a.qp.post_send(100 + index, b"written")
            until(got(b, index), a, b)
            assert bytes(b.memory.view[8:12]) == b"%04d" % index
            region.close()
        until(lambda: len(a.sent) == 50, a)
        assert a.sent == [(100 + index, 0) for index in range(1, 51)]

    def _assert_failure(self, a: End, b: End, sent: list[tuple[int, int]]) -> None:
        """Assert that the request failed, both queue pairs are in ERR and the rest is flushed."""
        until(lambda: len(a.sent) >= len(sent) and bool(a.flushed and b.flushed), a, b)
        assert a.sent == sent
        assert state_of(a.qp) is QpState.ERR
        assert set(a.flushed + b.flushed) == {WcStatus.WR_FLUSH_ERR}
        a.qp.post_send(100, b"too late", signaled=False)
        until(lambda: len(a.sent) > len(sent), a, b)
        assert a.sent[-1] == (100, WcStatus.WR_FLUSH_ERR)

    # -- endings -------------------------------------------------------------------------

    def test_to_err_flushes(self, ends: tuple[End, End]) -> None:
        a, b = ends
        a.qp.post_receive(3)
        connect(a, b, receives=0)
        a.qp.post_send(1, b"waits for a receive", signaled=False)
        a.qp.post_send(2, b"this too")
        a.write(3, b, 0, b"and this", signaled=False)
        a.qp.to_err()
        assert state_of(a.qp) is QpState.ERR
        until(lambda: len(a.sent) == 3 and bool(a.flushed), a)
        assert a.sent == [(index, WcStatus.WR_FLUSH_ERR) for index in (1, 2, 3)]
        a.qp.post_receive(1)

    def test_to_err_keeps_received_messages(self, pair: tuple[End, End]) -> None:
        a, b = pair
        for index in range(1, 4):
            a.qp.post_send(index, b"%d" % index)
        until(lambda: a.sent == [(1, 0), (2, 0), (3, 0)], a)
        b.qp.to_err()
        until(lambda: bool(b.flushed), b)
        assert b.received == [b"1", b"2", b"3"]

    def test_messages_sent_before_the_end_are_received(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.write(1, b, 0, b"data")
        for index in range(2, 22):
            a.qp.post_send(index, b"%d" % index)
        until(lambda: len(a.sent) == 21, a)
        a.qp.close()
        until(lambda: len(b.received) == 20, a, b)
        assert bytes(b.memory.view[:4]) == b"data"
        b.qp.post_send(1, b"hello?", signaled=False)
        until(lambda: bool(b.sent) and bool(b.flushed), b)
        assert b.sent[0][1] in (WcStatus.RETRY_EXC_ERR, WcStatus.WR_FLUSH_ERR)
        assert b.qp.state is QpState.ERR

    def test_a_closed_queue_pair_has_no_completions(self, pair: tuple[End, End]) -> None:
        a, b = pair
        a.qp.post_send(1, b"x")
        b.qp.post_send(1, b"y")
        until(lambda: len(b.received) == 1, b)
        a.qp.close()
        a.rnic.service()
        assert [c for c in a.rnic.poll() if c.qp_num == a.qp.qp_num] == []
        with pytest.raises(RnicError):
            a.qp.post_send(1, b"x")
        with pytest.raises(RnicError):
            a.qp.post_receive(1)
        with pytest.raises(RnicError):
            a.qp.to_init()

    def test_an_unexpected_sequence_number_is_not_acknowledged(self, ends: tuple[End, End]) -> None:
        a, b = ends
        for end in ends:
            end.qp.post_receive(1)
        resolve_addresses(a, b)
        a.qp.to_rtr(gid=b.rnic.gid, qp_num=b.qp.qp_num, psn=9, mtu=1)
        b.qp.to_rtr(gid=a.rnic.gid, qp_num=a.qp.qp_num, psn=7, mtu=1)
        a.qp.to_rts(psn=1_000_000)
        b.qp.to_rts(psn=9)
        a.qp.post_send(1, b"x")
        until(lambda: bool(a.sent), a, b)
        assert a.sent == [(1, WcStatus.RETRY_EXC_ERR)]
        assert b.received == []

    # -- sleeping ------------------------------------------------------------------------

    def test_arming_reports_earlier_completions(self, pair: tuple[End, End]) -> None:
        a, b = pair
        clear_readiness(b.rnic)
        while b.rnic.poll() or not b.rnic.arm():
            pass
        a.qp.post_send(1, b"x")
        readable = [fd for fd, _ in sleep_on(b.rnic).poll(PATIENCE * 1000)]
        assert _completion_fds.get(b.rnic, b.rnic.wait_fd()) in readable, (
            "no wakeup, or on the wrong descriptor"
        )
        # `arm` finds the completion although `poll` was not called before.
        clear_readiness(b.rnic)
        deadline = time.monotonic() + PATIENCE
        while b.rnic.arm():
            assert time.monotonic() < deadline
        until(lambda: len(b.received) == 1, a, b)

    def test_service_clears_the_readiness(self, pair: tuple[End, End]) -> None:
        a, b = pair
        until(lambda: not b.rnic.poll() and b.rnic.arm(), a, b)
        a.qp.post_send(1, b"x")
        until(lambda: len(b.received) == len(a.sent) == 1, a, b)
        sleeper = sleep_on(b.rnic)
        deadline = time.monotonic() + PATIENCE
        while sleeper.poll(20):  # the wakeup may come after the completion
            assert time.monotonic() < deadline
            clear_readiness(b.rnic)

    # -- more than one -------------------------------------------------------------------

    def test_an_rnic_can_connect_to_itself(self, rnics: tuple[Rnic, Rnic]) -> None:
        a, b = make_end(rnics[0]), make_end(rnics[0])
        connect(a, b)
        a.write(1, b, 3, b"own")
        a.qp.post_send(2, b"note to self")
        until(lambda: len(b.received) == 1 and len(a.sent) == 2, a, b)
        assert bytes(b.memory.view[3:6]) == b"own"
        assert b.received == [b"note to self"]
        a.close()
        b.close()

    def test_queue_pairs_do_not_disturb_each_other(self, rnics: tuple[Rnic, Rnic]) -> None:
        pairs = [(make_end(rnics[0]), make_end(rnics[1])) for _ in range(4)]
        for a, b in pairs:
            connect(a, b)
        everyone = [end for pair in pairs for end in pair]
        pairs[1][0].qp.to_err()
        pairs[2][1].write(1, pairs[2][0], MEMORY, b"out of bounds", signaled=False)
        for a, b in (pairs[0], pairs[3]):
            a.qp.post_send(1, b"unharmed")
            b.qp.post_send(1, b"me too")
        until(lambda: all(pairs[i][j].received for i in (0, 3) for j in (0, 1)), *everyone)
        assert [a.qp.state for a, _ in pairs] == [
            QpState.RTS, QpState.ERR, pairs[2][0].qp.state, QpState.RTS
        ]  # fmt: skip
        assert pairs[2][1].qp.state is QpState.ERR
        for end in everyone:
            end.close()
