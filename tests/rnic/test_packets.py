"""Messages that are sent as packets: hostile senders, full sockets, and the end of either side."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.rnic.contract import RECEIVES, End, assert_no_completions, got, make_end, until
from tests.rnic.packets import receive
from tests.rnic.test_soft_hostile import ARMED, HEAD, KEY_PAGE, POSTED, Attacker, ended, state
from tests.timing import SLOWER
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.messages import DOORBELL, Hello, Register, Revoke, Send, Waiting, close_all
from trio_smc.rnic.soft.ring import CLOSED, PORT_DOWN, SLOTS
from trio_smc.rnic.verbs import RECEIVE_SIZE, QpState, WcStatus


@pytest.fixture
def rnic(runtime_directory: Path) -> Iterator[SoftRnic]:
    rnic = SoftRnic()
    rnic.open(runtime_directory / "smc")
    yield rnic
    rnic.close()


@pytest.fixture
def victim(rnic: SoftRnic) -> Iterator[End]:
    end = make_end(rnic)
    yield end
    end.close()


@pytest.fixture
def attacker(rnic: SoftRnic, runtime_directory: Path) -> Iterator[Attacker]:
    with Attacker(runtime_directory / "smc", packets=True) as attacker:
        yield attacker


def messages_to(attacker: Attacker) -> list[bytes]:
    """Return the packets that the victim has sent since its Hello."""
    found: list[bytes] = []
    while (packet := receive(attacker.open[0])) is not None:
        close_all(packet[1])
        if not packet[0]:
            break
        found.append(packet[0])
    return found


def has_sent_more(victim: End, than: int) -> bool:
    return len(victim.sent) > than or than == SLOTS


def test_both_directions_use_the_socket(attacker: Attacker, victim: End) -> None:
    sock = attacker.connect(victim)
    victim.qp.post_send(1, b"hello")
    until(lambda: victim.sent == [(1, 0)], victim)
    assert Send(data=b"hello").encode() in messages_to(attacker)
    sock.send(Send(data=b"").encode())
    sock.send(Send(data=bytes(RECEIVE_SIZE)).encode())
    until(got(victim, 2), victim)
    assert victim.received == [b"", bytes(RECEIVE_SIZE)]
    assert attacker.victim_ring is not None
    assert bytes(attacker.victim_ring.view[HEAD:][:8]) == bytes(8)


def test_words_written_into_the_ring_are_ignored(attacker: Attacker, victim: End) -> None:
    attacker.connect(victim)
    for value in (3, CLOSED):
        for word in (HEAD, ARMED):
            attacker.word(word, value)
        assert_no_completions(victim)
    assert state(victim.qp) is QpState.RTS


@pytest.mark.parametrize("count", [RECEIVES, RECEIVES + 1, 3 * RECEIVES])
def test_more_messages_than_receives_end_the_queue_pair(
    attacker: Attacker, victim: End, count: int
) -> None:
    sock = attacker.connect(victim)
    sent = [b"%d" % number for number in range(count)]
    for each in sent:
        sock.send(Send(data=each).encode())
    until(lambda: len(victim.received) >= RECEIVES, victim)
    assert victim.received == sent[:RECEIVES]
    if count > RECEIVES:
        until(lambda: state(victim.qp) is QpState.ERR, victim)
        assert ended(sock)
    else:
        assert state(victim.qp) is QpState.RTS


def test_a_forged_word_allows_no_more_messages(attacker: Attacker, victim: End) -> None:
    sock = attacker.connect(victim)
    attacker.word(POSTED, SLOTS)
    for _ in range(RECEIVES + 1):
        sock.send(Send(data=b"x").encode())
    until(lambda: state(victim.qp) is QpState.ERR, victim)
    assert len(victim.received) == RECEIVES


@pytest.mark.parametrize(
    "garbage",
    [
        b"x",
        Send(data=b"").encode()[:-1],
        Send(data=bytes(RECEIVE_SIZE + 1)).encode(),
        bytes(100_000),
        b"HTTP" + Send(data=b"message").encode()[4:],
        Send(data=b"message").encode()[:4] + b"\1" + Send(data=b"message").encode()[5:],
        Waiting().encode() + b"x",
        Hello(gid=bytes(16), qp_num=1, peer_qp_num=1, peer_psn=1, packets=True).encode(),
        Register(rkey=1, slot=1, address=4096, length=4096).encode(),
        Waiting().encode()[:5] + b"\x77" + Waiting().encode()[6:],
    ],
)
def test_garbage_ends_the_queue_pair_and_keeps_earlier_messages(
    attacker: Attacker, victim: End, garbage: bytes
) -> None:
    sock = attacker.connect(victim)
    sock.send(Send(data=b"before").encode())
    sock.send(garbage)
    until(lambda: bool(victim.flushed), victim)
    assert victim.received[:1] == [b"before"]
    assert victim.flushed == [WcStatus.WR_FLUSH_ERR]
    assert state(victim.qp) is QpState.ERR
    assert not victim.qp.received_all
    assert ended(sock)


@pytest.mark.parametrize("packet", [Send(data=b"x"), Waiting(), Revoke(rkey=1)])
def test_unexpected_descriptors_end_the_queue_pair(
    attacker: Attacker, victim: End, packet: Send | Waiting | Revoke
) -> None:
    sock = attacker.connect(victim)
    memory = Memory(4096)
    socket.send_fds(sock, [packet.encode()], [memory.fd])
    until(lambda: state(victim.qp) is QpState.ERR, victim)
    assert victim.received == []
    memory.close()


@pytest.mark.processes
@pytest.mark.parametrize("packet", [DOORBELL, Waiting().encode(), Revoke(rkey=5).encode()])
def test_endless_packets_delay_only_their_sender(
    attacker: Attacker, victim: End, rnic: SoftRnic, packet: bytes
) -> None:
    """Each call reads a bounded number of packets, and `to_err` returns."""
    sock = attacker.connect(victim)
    flooder = os.fork()
    if flooder == 0:
        with contextlib.suppress(BaseException):
            sock.setblocking(True)
            while True:
                sock.send(packet)
        os._exit(0)
    try:
        begun = time.thread_time()
        for _ in range(300):
            rnic.poll()
            rnic.arm()
            rnic.service()
        assert state(victim.qp) is QpState.RTS
        victim.qp.to_err()
        assert time.thread_time() - begun < 10 * SLOWER
    finally:
        os.kill(flooder, signal.SIGKILL)
        os.waitpid(flooder, 0)


def test_one_poll_reads_a_bounded_number_of_packets(
    attacker: Attacker, victim: End, rnic: SoftRnic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound does not depend on the speed of the peer."""
    attacker.connect(victim)
    reads = 0

    def read(_sock: socket.socket) -> tuple[bytes, list[int]]:
        nonlocal reads
        reads += 1
        assert reads < 1000
        return Send(data=b"x").encode() if reads == 1 else DOORBELL, []

    monkeypatch.setattr(rnic.intake, "receive", read)
    rnic.poll()
    rnic.arm()
    assert reads > 1
    monkeypatch.undo()


def test_messages_wait_for_room_in_a_full_socket(attacker: Attacker, victim: End) -> None:
    """Messages that do not fit into the socket are sent later, in order, and no post blocks."""
    attacker.connect(victim)
    begun = time.monotonic()
    for number in range(1, SLOTS + 1):
        victim.qp.post_send(number, b"%d" % number)
    assert time.monotonic() - begun < 10 * SLOWER
    until(lambda: bool(victim.sent), victim)
    accepted = len(victim.sent)
    assert 0 < accepted < SLOTS, "the socket was never full"
    found: list[bytes] = []
    while len(found) < SLOTS:
        found += [each for each in messages_to(attacker) if each[5] == 4]  # of kind Send
        already = len(victim.sent)
        until(partial(has_sent_more, victim, already), victim)
    assert found == [Send(data=b"%d" % number).encode() for number in range(1, SLOTS + 1)]
    until(lambda: len(victim.sent) == SLOTS, victim)
    assert victim.sent == [(number, 0) for number in range(1, SLOTS + 1)]


def test_a_sender_without_a_receive_reports_it_once(attacker: Attacker, victim: End) -> None:
    attacker.connect(victim)
    attacker.put(attacker.ring.view, POSTED, 0)
    victim.qp.post_send(1, b"x")
    assert_no_completions(victim)
    assert [each for each in messages_to(attacker) if each[5] in (4, 5)] == [Waiting().encode()]
    attacker.put(attacker.ring.view, POSTED, 1)
    until(lambda: victim.sent == [(1, 0)], victim)
    assert [each for each in messages_to(attacker) if each[5] in (4, 5)] == [
        Send(data=b"x").encode()
    ]


@pytest.mark.parametrize(
    ("posted", "status"),
    [
        (SLOTS + 1, WcStatus.GENERAL_ERR),
        (1 << 63, WcStatus.GENERAL_ERR),
        (PORT_DOWN, WcStatus.RETRY_EXC_ERR),
        (CLOSED, WcStatus.RETRY_EXC_ERR),
    ],
)
def test_impossible_credits_end_the_queue_pair(
    attacker: Attacker, victim: End, posted: int, status: WcStatus
) -> None:
    attacker.connect(victim)
    attacker.put(attacker.ring.view, POSTED, posted)
    victim.qp.post_send(1, b"x")
    until(lambda: victim.sent == [(1, status)], victim)
    assert state(victim.qp) is QpState.ERR


def test_a_waiting_sender_is_rung_when_a_receive_is_posted(attacker: Attacker, victim: End) -> None:
    sock = attacker.connect(victim)
    for _ in range(RECEIVES):
        sock.send(Send(data=b"x").encode())
    sock.send(Waiting().encode())
    until(got(victim, RECEIVES), victim)
    assert DOORBELL not in messages_to(attacker)
    victim.qp.post_receive(1)
    assert messages_to(attacker) == [DOORBELL]
    sock.send(Waiting().encode())  # a receive was posted already, so the victim rings at once
    until(lambda: messages_to(attacker) == [DOORBELL], victim)
    victim.qp.post_receive(1)
    assert messages_to(attacker) == []


def test_a_peer_that_shuts_down_receiving_ends_the_queue_pair(
    attacker: Attacker, victim: End
) -> None:
    attacker.connect(victim)
    attacker.open[0].shutdown(socket.SHUT_RD)
    victim.qp.post_send(1, b"x")
    until(lambda: bool(victim.sent) and bool(victim.flushed), victim)
    assert state(victim.qp) is QpState.ERR
    assert victim.sent == [(1, WcStatus.WR_FLUSH_ERR)]
    assert not victim.qp.received_all


@pytest.mark.parametrize("closed", [False, True])
def test_the_last_messages_of_an_ended_peer_are_received(
    attacker: Attacker, victim: End, closed: bool
) -> None:
    """A killed process cannot set CLOSED in its words."""
    sock = attacker.connect(victim)
    for number in range(RECEIVES):
        sock.send(Send(data=b"%d" % number).encode())
    if closed:
        attacker.put(attacker.ring.view, POSTED, CLOSED)
    for each in attacker.open:
        each.close()
    until(lambda: bool(victim.flushed) or len(victim.received) == RECEIVES, victim)
    until(lambda: state(victim.qp) is QpState.ERR, victim)
    assert victim.received == [b"%d" % number for number in range(RECEIVES)]
    assert victim.qp.received_all is not closed


@pytest.mark.parametrize("regions", [1, 3, 20])
def test_messages_behind_an_unmapped_region_are_received(
    attacker: Attacker, victim: End, monkeypatch: pytest.MonkeyPatch, regions: int
) -> None:
    """Messages behind a few such regions are received; behind many they wait for the mapping."""
    sock = attacker.connect(victim)
    memory = Memory(4096)
    for number in range(1, regions + 1):
        struct.pack_into("=Q", attacker.ring.view, KEY_PAGE + number * 8, number)

    def failing(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "injected")

    with monkeypatch.context() as patch:
        patch.setattr("trio_smc.rnic.memory.map_descriptor", failing)
        for number in range(1, regions + 1):
            packet = Register(rkey=number, slot=number, address=4096, length=4096).encode()
            socket.send_fds(sock, [packet], [memory.fd])
        sock.send(Send(data=b"behind").encode())
        if regions < 8:
            until(got(victim, 1), victim)
        else:
            assert_no_completions(victim)
        assert victim.qp.lacks_resources()
        assert not victim.qp.can_reach(1)
    until(lambda: victim.qp.can_reach(regions), victim)
    until(got(victim, 1), victim)
    assert victim.received == [b"behind"]
    memory.close()


def test_random_packets_affect_only_their_queue_pair(
    attacker: Attacker, rnic: SoftRnic, rng: random.Random
) -> None:
    """Random packets cause valid completions, or the end of the queue pair that gets them."""
    ends = 0
    for _ in range(100):
        end = make_end(rnic)
        attacker.qp_num = rng.randint(1, (1 << 24) - 1)
        sock = attacker.connect(end)
        assert attacker.victim_ring is not None
        for step in range(20):
            packet = rng.choice(
                [
                    Send(data=rng.randbytes(rng.randint(0, RECEIVE_SIZE))).encode(),
                    Waiting().encode(),
                    DOORBELL,
                    Revoke(rkey=rng.getrandbits(32)).encode(),
                    rng.randbytes(rng.randint(1, 64)),
                ]
                if rng.random() < 0.2
                else [Send(data=b"x").encode(), Waiting().encode(), DOORBELL]
            )
            attacker.put(attacker.ring.view, POSTED, rng.choice([0, step, SLOTS, CLOSED, 1 << 40]))
            try:
                sock.send(packet)
            except OSError:
                break
            if rng.random() < 0.1:
                sock.shutdown(rng.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
            end.qp.post_send(step + 1, b"message")
            for completion in rnic.poll():
                assert completion.qp_num == end.qp.qp_num
                end.take(completion)
            rnic.arm()
            rnic.service()
        assert all(len(data) <= RECEIVE_SIZE for data in end.received)
        ends += end.qp.state is QpState.ERR
        end.close()
        for each in attacker.open:
            each.close()
        attacker.open.clear()
        attacker.victim_ring.close()
        attacker.victim_ring = None
    assert ends > 30
