"""Broken and hostile peers: the software RNIC ends only their own connections."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rnic.contract import (
    RECEIVES,
    End,
    connect,
    got,
    make_end,
    needs_rings,
    needs_truncation,
    until,
    use_completion_fd,
)
from tests.rnic.packets import receive
from tests.timing import PATIENCE
from trio_smc._base.errors import ProtocolError
from trio_smc.rnic.memory import Memory, PeerMemory
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.messages import (
    DOORBELL,
    Directory,
    Doorbell,
    Hello,
    Register,
    Revoke,
    close_all,
    decode_untrusted,
)
from trio_smc.rnic.soft.regions import MAX_MAPPED, MAX_REGIONS
from trio_smc.rnic.soft.ring import CLOSED, PORT_DOWN, RING_SIZE, SLOTS
from trio_smc.rnic.verbs import RECEIVE_SIZE, QpState, QueuePair, WcStatus

# Offsets in a ring; repeated here on purpose, so that the tests notice a change.
HEAD, POSTED, ARMED, WAITING, FIRST_SLOT, KEY_PAGE = 0, 64, 128, 192, 4096, 4096 + 64 * 1024
WORDS = (HEAD, POSTED, ARMED, WAITING)
PSN = 3


class Attacker:
    """Implements the protocol of the software RNIC independently; a context manager."""

    def __init__(self, path: Path, *, packets: bool = False) -> None:
        self.gid = bytes.fromhex("fd534d4352000000") + secrets.token_bytes(8)
        self.qp_num = 4711
        self.packets = packets
        self.directory = Directory(path)
        self.name = f"rnic-{self.gid.hex()}"
        self.listener = self.directory.listen(self.name)
        self.ring = Memory(RING_SIZE)
        self.open: list[socket.socket] = []
        self.victim_ring: PeerMemory | None = None
        self.doorbells: list[int] = []
        """Write ends of the doorbells of its victims."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.open:
            sock.close()
        close_all(self.doorbells)
        if self.victim_ring is not None:
            self.victim_ring.close()
        self.listener.close()
        self.directory.remove(self.name)
        self.directory.close()
        self.ring.close()

    def fds(self) -> list[int]:
        return [self.ring.fd]

    def hello(self, victim: End, *, qp_num: int | None = None) -> bytes:
        return Hello(
            packets=self.packets,
            gid=self.gid,
            qp_num=self.qp_num if qp_num is None else qp_num,
            peer_qp_num=victim.qp.qp_num,
            peer_psn=PSN,
        ).encode()

    def dial(self, victim: End) -> socket.socket:
        sock = self.directory.dial(f"rnic-{victim.rnic.gid.hex()}")
        self.open.append(sock)
        return sock

    def dial_and_send(self, victim: End, data: bytes, fds: list[int]) -> socket.socket:
        sock = self.dial(victim)
        socket.send_fds(sock, [data], fds)
        return sock

    def connect(self, victim: End, *more: int) -> socket.socket:
        """Exchange Hellos and rings with the victim.

        Args:
          more: descriptors that our Hello carries beside the ring.

        Returns:
          The socket for our messages.
        """
        victim.qp.post_receive(RECEIVES)
        victim.qp.to_rtr(gid=self.gid, qp_num=self.qp_num, psn=PSN, mtu=5)
        victim.qp.to_rts(psn=PSN)
        accepted, _ = self.listener.accept()
        self.open.append(accepted)
        packet = receive(accepted)
        assert packet is not None
        self.victim_ring = PeerMemory.map_untrusted(packet[1][0], RING_SIZE)
        os.close(packet[1].pop(0))
        self.doorbells += packet[1]
        self.put(self.ring.view, POSTED, SLOTS)
        sock = self.dial_and_send(victim, self.hello(victim), [*self.fds(), *more])
        victim.rnic.service()
        return sock

    @staticmethod
    def put(view: memoryview, offset: int, value: int) -> None:
        struct.pack_into("<Q", view, offset, value)

    def word(self, offset: int, value: int) -> None:
        """Set a word of the victim's ring."""
        assert self.victim_ring is not None
        self.put(self.victim_ring.view, offset, value)


@pytest.fixture
def rnic(runtime_directory: Path) -> Iterator[SoftRnic]:
    rnic = SoftRnic()
    rnic.open(runtime_directory / "smc")
    yield rnic
    rnic.close()


@pytest.fixture
def victim(rnic: SoftRnic) -> Iterator[End]:
    """A queue pair in INIT. Another pair on the same RNIC must still work after the test."""
    bystanders = make_end(rnic), make_end(rnic)
    connect(*bystanders)
    end = make_end(rnic)
    yield end
    end.close()
    bystanders[0].qp.post_send(1, b"unharmed")
    until(got(bystanders[1], 1), *bystanders)
    for bystander in bystanders:
        bystander.close()


@pytest.fixture
def attacker(rnic: SoftRnic, runtime_directory: Path) -> Iterator[Attacker]:
    with Attacker(runtime_directory / "smc") as attacker:
        yield attacker


def state(qp: QueuePair) -> QpState:
    return qp.state


def ended(sock: socket.socket) -> bool:
    """True if the other side has closed the socket."""
    packet = receive(sock)
    return packet is not None and packet[0] == b""


def unsealed(size: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


class TestHello:
    @needs_rings
    def test_a_valid_hello_is_accepted(self, attacker: Attacker, victim: End) -> None:
        sock = attacker.connect(victim)
        assert not ended(sock)
        victim.qp.post_send(1, b"hello")
        until(lambda: victim.sent == [(1, 0)], victim)
        assert bytes(attacker.ring.view[FIRST_SLOT + 8 :][:5]) == b"hello"

    @pytest.mark.parametrize(
        "mangle",
        [
            lambda hello: b"x",
            lambda hello: hello[:-1],
            lambda hello: hello + b"\0",
            lambda hello: b"HTTP" + hello[4:],
            lambda hello: hello[:4] + b"\1" + hello[5:],
            lambda hello: hello[:5] + b"\7" + hello[6:],
            lambda hello: bytes(100_000),
            lambda hello: Register(rkey=1, slot=1, address=4096, length=4096).encode(),
            lambda hello: Revoke(rkey=1).encode(),
        ],
    )
    def test_a_mangled_hello_is_refused(
        self, attacker: Attacker, victim: End, mangle: Callable[[bytes], bytes]
    ) -> None:
        sock = attacker.dial_and_send(victim, mangle(attacker.hello(victim)), attacker.fds())
        victim.rnic.service()
        assert ended(sock)

    @pytest.mark.parametrize(
        "count", [0, *(pytest.param(many, marks=needs_truncation) for many in (3, 50, 250))]
    )
    def test_a_hello_with_a_wrong_number_of_descriptors_is_refused(
        self, attacker: Attacker, victim: End, count: int
    ) -> None:
        fds = (attacker.fds() * 100)[:count]
        sock = attacker.dial_and_send(victim, attacker.hello(victim), fds)
        victim.rnic.service()
        assert ended(sock)

    @needs_rings
    @pytest.mark.parametrize("bad", ["doorbell", "ring"])
    def test_a_ring_is_no_doorbell_and_a_doorbell_no_ring(
        self, attacker: Attacker, victim: End, bad: str
    ) -> None:
        """The RNIC refuses a memfd as a doorbell and a pipe as a ring, and closes both."""
        doorbell = Doorbell()
        mixed = {
            "doorbell": [attacker.ring.fd, attacker.ring.fd],
            "ring": [doorbell.write_fd, doorbell.write_fd],
        }
        before = len(os.listdir("/proc/self/fd"))
        attacker.fds = lambda: mixed[bad]  # type: ignore[method-assign]
        sock = attacker.connect(victim)
        assert ended(sock)
        assert state(victim.qp) is QpState.RTS  # the real peer may still connect
        victim.qp.to_err()
        for each in attacker.open:
            each.close()
        close_all(attacker.doorbells)
        # Since its Hello, the victim's ring has no descriptor any more.
        assert len(os.listdir("/proc/self/fd")) == before - 1
        doorbell.close()

    def test_a_hello_to_a_missing_queue_pair_is_refused(
        self, attacker: Attacker, victim: End
    ) -> None:
        hello = Hello(gid=attacker.gid, qp_num=1, peer_qp_num=1, peer_psn=1).encode()
        sock = attacker.dial_and_send(victim, hello, attacker.fds())
        victim.rnic.service()
        assert ended(sock)

    def test_a_second_connection_does_not_replace_the_peer(
        self, attacker: Attacker, victim: End
    ) -> None:
        attacker.connect(victim)
        sock = attacker.dial_and_send(victim, attacker.hello(victim, qp_num=5), attacker.fds())
        again = attacker.dial_and_send(victim, attacker.hello(victim), attacker.fds())
        victim.rnic.service()
        assert ended(sock)
        assert ended(again)
        assert state(victim.qp) is QpState.RTS

    @pytest.mark.parametrize("qp_num", [None, 5], ids=["the same", "another name"])
    def test_a_second_hello_of_the_peer_ends_the_queue_pair(
        self, attacker: Attacker, victim: End, qp_num: int | None
    ) -> None:
        sock = attacker.connect(victim)
        socket.send_fds(sock, [attacker.hello(victim, qp_num=qp_num)], attacker.fds())
        until(lambda: state(victim.qp) is QpState.ERR, victim)
        assert ended(sock)

    @pytest.mark.parametrize("kind", ["eventfd", "null", "file", "unsealed", "short", "socket"])
    def test_descriptors_of_a_wrong_kind_are_refused(
        self, attacker: Attacker, victim: End, kind: str, tmp_path: Path
    ) -> None:
        victim.qp.to_rtr(gid=attacker.gid, qp_num=attacker.qp_num, psn=PSN, mtu=5)
        victim.qp.to_rts(psn=PSN)
        with contextlib.ExitStack() as stack:
            fd = self._bad_descriptor(kind, stack, tmp_path)
            sock = attacker.dial_and_send(victim, attacker.hello(victim), [fd])
            victim.rnic.service()
        assert ended(sock)
        victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, WcStatus.RETRY_EXC_ERR)], victim)

    def _bad_descriptor(self, kind: str, stack: contextlib.ExitStack, tmp_path: Path) -> int:
        if kind == "socket":
            return stack.enter_context(socket.socket(socket.AF_UNIX)).fileno()
        if kind == "short":
            memory = Memory(100)
            stack.callback(memory.close)
            return memory.fd
        if kind == "unsealed":
            fd = unsealed(RING_SIZE)
        elif kind == "eventfd":
            fd = os.eventfd(0)
        else:
            path = "/dev/null" if kind == "null" else str(tmp_path / "file")
            fd = os.open(path, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, fd)
        return fd

    def test_silent_connections_are_bounded(
        self, attacker: Attacker, victim: End, rnic: SoftRnic
    ) -> None:
        socks = [attacker.dial(victim) for _ in range(200)]
        rnic.service()
        while rnic.accepting_later:
            rnic.service()
        assert sum(ended(sock) for sock in socks) == 200 - 64
        attacker.connect(victim)
        victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, 0)], victim)

    def test_connections_to_a_queue_pair_in_init_are_bounded(
        self, attacker: Attacker, victim: End
    ) -> None:
        socks = [
            attacker.dial_and_send(victim, attacker.hello(victim, qp_num=index), attacker.fds())
            for index in range(1, 20)
        ]
        victim.rnic.service()
        assert sum(ended(sock) for sock in socks) == 19 - 4

    def test_an_early_connection_of_another_queue_pair_is_not_the_peer(
        self, attacker: Attacker, victim: End
    ) -> None:
        early = attacker.dial_and_send(victim, attacker.hello(victim, qp_num=1), attacker.fds())
        victim.rnic.service()
        attacker.connect(victim)
        victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, 0)], victim)
        assert ended(early)

    def test_a_peer_that_has_dialled_is_not_dialled(self, attacker: Attacker, victim: End) -> None:
        sock = attacker.dial_and_send(victim, attacker.hello(victim), attacker.fds())
        victim.rnic.service()
        victim.qp.to_rtr(gid=attacker.gid, qp_num=attacker.qp_num, psn=PSN, mtu=5)
        attacker.listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            attacker.listener.accept()
        packet = receive(sock)
        assert packet is not None
        data, fds = packet
        for fd in fds:
            os.close(fd)
        hello = decode_untrusted(data, len(fds))
        assert isinstance(hello, Hello)
        assert (hello.qp_num, hello.peer_qp_num) == (victim.qp.qp_num, attacker.qp_num)

    def test_a_flood_of_connections_is_accepted_in_turns(
        self, attacker: Attacker, victim: End, rnic: SoftRnic
    ) -> None:
        """Each call of `service` accepts some connections, and the RNIC requests another call."""
        sleeper = select.epoll()
        sleeper.register(rnic.wait_fd(), select.EPOLLIN | select.EPOLLET)
        socks = [attacker.dial(victim) for _ in range(500)]
        attacker.connect(victim)
        turns = 0
        while rnic.accepting_later or not turns:
            assert sleeper.poll(PATIENCE), "the sockets would not be polled again"
            rnic.service()
            turns += 1
        assert 10 <= turns <= 20
        sleeper.close()
        assert sum(ended(sock) for sock in socks) == 500 - 63, "the attacker's own counts, too"
        victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, 0)], victim)

    def test_a_peer_behind_a_flood_is_accepted(
        self, attacker: Attacker, victim: End, rnic: SoftRnic
    ) -> None:
        flood = [attacker.dial(victim) for _ in range(500)]
        attacker.connect(victim)
        victim.qp.post_send(1, b"x")
        assert rnic.accepting_later
        until(lambda: victim.sent == [(1, 0)], victim)
        assert len(flood) == 500

    def test_connections_may_be_closed_before_they_are_accepted(
        self, attacker: Attacker, victim: End
    ) -> None:
        for index in range(20):
            sock = attacker.dial(victim)
            if index % 2:
                socket.send_fds(sock, [attacker.hello(victim)], attacker.fds())
            sock.close()
        victim.rnic.service()

    @given(st.binary(max_size=64), st.integers(0, 4))
    def test_decoding_random_bytes_raises_only_protocol_errors(self, data: bytes, fds: int) -> None:
        with contextlib.suppress(ProtocolError):
            message = decode_untrusted(data, fds)
            assert message.encode() == data

    @given(st.binary(max_size=40), st.sampled_from([1, 2, 3]), st.integers(0, 3))
    def test_decoding_random_bodies_raises_only_protocol_errors(
        self, body: bytes, kind: int, fds: int
    ) -> None:
        data = b"SMCN\3" + bytes([kind]) + b"\0\0" + body
        with contextlib.suppress(ProtocolError):
            assert decode_untrusted(data, fds).encode() == data


class TestAnnouncements:
    @pytest.mark.parametrize(
        ("rkey", "slot", "length"),
        [(0, 1, 4096), (1, 1024, 4096), (1, 1, 0), (1, 1, 4097), (1, 1, 1 << 63), (9, 1, 4096)],
    )
    def test_impossible_regions_end_the_queue_pair(
        self, attacker: Attacker, victim: End, rkey: int, slot: int, length: int
    ) -> None:
        sock = attacker.connect(victim)
        good = Register(rkey=9, slot=0, address=4096, length=4096).encode()
        memory = Memory(4096)
        socket.send_fds(sock, [good], [memory.fd])
        bad = Register(rkey=rkey, slot=slot, address=4096, length=length).encode()
        socket.send_fds(sock, [bad], [memory.fd])
        memory.close()
        until(lambda: bool(victim.flushed), victim)
        assert state(victim.qp) is QpState.ERR
        assert ended(sock)

    @pytest.mark.parametrize("announced", [False, True])
    def test_missing_progress_words_end_the_queue_pair(
        self, attacker: Attacker, victim: End, announced: bool
    ) -> None:
        """The memfd must have exactly the announced pages."""
        sock = attacker.connect(victim)
        memory = Memory(4096, progress=not announced)
        bad = Register(rkey=9, slot=0, address=4096, length=4096, progress=announced)
        socket.send_fds(sock, [bad.encode()], [memory.fd])
        memory.close()
        until(lambda: bool(victim.flushed), victim)
        assert state(victim.qp) is QpState.ERR
        assert ended(sock)

    @pytest.mark.parametrize(("count", "length"), [(MAX_REGIONS, 4096), (4, MAX_MAPPED // 4)])
    def test_too_many_regions_end_the_queue_pair(
        self, attacker: Attacker, victim: End, count: int, length: int
    ) -> None:
        """Mapped regions cost address space, which is bounded, and no descriptors."""
        sock = attacker.connect(victim)
        try:
            memory = Memory(length)
        except OSError as error:  # ulimit -v, QEMU's user mode
            pytest.skip(str(error))
        before = len(os.listdir("/proc/self/fd"))
        for index in range(count):
            data = Register(rkey=9 + index, slot=index, address=4096, length=length).encode()
            socket.send_fds(sock, [data], [memory.fd])
            victim.rnic.service()
        gone = Revoke(rkey=9).encode()
        socket.send_fds(sock, [gone], [])
        data = Register(rkey=5, slot=0, address=4096, length=length).encode()
        socket.send_fds(sock, [data], [memory.fd])
        until(lambda: 5 in cast(Any, victim.qp)._sockets.peer.regions, victim)
        assert state(victim.qp) is QpState.RTS
        assert len(os.listdir("/proc/self/fd")) == before
        data = Register(rkey=6, slot=0, address=4096, length=4096).encode()
        socket.send_fds(sock, [data], [memory.fd])
        memory.close()
        until(lambda: bool(victim.flushed), victim)
        assert state(victim.qp) is QpState.ERR
        assert len(os.listdir("/proc/self/fd")) < before

    def test_a_region_may_be_closed_before_it_is_announced(
        self, attacker: Attacker, victim: End, tmp_path: Path
    ) -> None:
        """A peer that reads late gets the announced memory, not another file with its number."""
        attacker.connect(victim)
        accepted = attacker.open[0]
        for _ in range(500):
            memory = Memory(4096)
            region = victim.pd.register(memory)
            number = memory.fd
            memory.close()
            with open(tmp_path / "secret", "w") as secret:
                assert secret.fileno() == number
                victim.rnic.service()
                region.close()
        kept = [os.open(tmp_path / "secret", os.O_RDONLY) for _ in range(20)]
        announced = 0
        while (packet := receive(accepted)) is not None:
            for fd in packet[1]:
                assert "memfd:" in os.readlink(f"/proc/self/fd/{fd}")
                os.close(fd)
                announced += 1
            victim.rnic.service()
        assert announced == 501
        for fd in kept:
            os.close(fd)

    def test_a_flood_of_announcements_is_read_in_turns(
        self, attacker: Attacker, victim: End
    ) -> None:
        sock = attacker.connect(victim)
        sleeper = select.epoll()
        sleeper.register(victim.rnic.wait_fd(), select.EPOLLIN | select.EPOLLET)
        announced = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(Revoke(rkey=1).encode())
                announced += 1
        assert announced > 128
        victim.rnic.service()
        with contextlib.suppress(BlockingIOError):
            sock.send(Revoke(rkey=1).encode())
        turns = 0
        unread = struct.Struct("i")
        while unread.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]:
            assert sleeper.poll(PATIENCE), "the sockets would not be polled again"
            victim.rnic.service()
            turns += 1
        assert turns >= announced // 64 - 2
        sleeper.close()
        assert state(victim.qp) is QpState.RTS

    @pytest.mark.parametrize("kind", ["unsealed", "hello", "garbage", "revoke with descriptor"])
    def test_impossible_messages_end_the_queue_pair(
        self, attacker: Attacker, victim: End, kind: str
    ) -> None:
        sock = attacker.connect(victim)
        fd = unsealed(4096)
        if kind == "unsealed":
            data = Register(rkey=1, slot=1, address=4096, length=4096).encode()
            socket.send_fds(sock, [data], [fd])
        elif kind == "hello":
            socket.send_fds(sock, [attacker.hello(victim)], attacker.fds())
        elif kind == "garbage":
            socket.send_fds(sock, [b"garbage"], [fd] * 200)
        else:
            socket.send_fds(sock, [Revoke(rkey=1).encode()], [fd])
        os.close(fd)
        until(lambda: bool(victim.flushed), victim)
        assert state(victim.qp) is QpState.ERR

    def test_a_write_to_an_unannounced_region_fails(self, attacker: Attacker, victim: End) -> None:
        attacker.connect(victim)
        victim.qp.post_write(1, memoryview(b"x"), None, address=1 << 20, rkey=9)
        until(lambda: victim.sent == [(1, WcStatus.REM_ACCESS_ERR)], victim, seconds=5)

    @pytest.mark.parametrize("which", [0, 1], ids=["where it listens", "where it speaks"])
    def test_a_peer_that_closes_one_socket_ends_the_queue_pair(
        self, attacker: Attacker, victim: End, which: int
    ) -> None:
        attacker.connect(victim)
        attacker.open[-2:][which].close()
        until(lambda: bool(victim.flushed), victim)
        assert state(victim.qp) is QpState.ERR

    def test_a_write_with_a_key_that_is_not_on_the_key_page_fails(
        self, attacker: Attacker, victim: End
    ) -> None:
        sock = attacker.connect(victim)
        memory = Memory(4096)
        data = Register(rkey=9, slot=3, address=1 << 20, length=4096).encode()
        socket.send_fds(sock, [data], [memory.fd])
        victim.qp.post_write(1, memoryview(b"x"), None, address=1 << 20, rkey=9)
        until(lambda: victim.sent == [(1, WcStatus.REM_ACCESS_ERR)], victim)
        assert memory.view[0] == 0
        memory.close()

    def test_the_key_page_lists_exactly_the_registered_regions(
        self, attacker: Attacker, victim: End
    ) -> None:
        """A slot without a region contains 0, which is never an RKey."""
        attacker.connect(victim)
        assert attacker.victim_ring is not None
        keys = attacker.victim_ring.view[KEY_PAGE:].cast("Q")
        before = keys.tolist()
        memories = [Memory(4096) for _ in range(2)]
        first, second = (victim.pd.register(memory) for memory in memories)
        assert set(keys) - set(before) == {first.rkey, second.rkey}
        first.close()
        assert set(keys) - set(before) == {second.rkey}
        second.close()
        assert keys.tolist() == before
        keys.release()
        for memory in memories:
            memory.close()

    def test_a_write_past_the_end_of_the_address_space_fails(
        self, attacker: Attacker, victim: End
    ) -> None:
        sock = attacker.connect(victim)
        memory = Memory(4096)
        top = (1 << 64) - 16
        struct.pack_into("=Q", attacker.ring.view, KEY_PAGE + 3 * 8, 9)
        data = Register(rkey=9, slot=3, address=top, length=4096).encode()
        socket.send_fds(sock, [data], [memory.fd])
        victim.qp.post_write(1, memoryview(b"x"), None, address=top + 4096, rkey=9)
        until(lambda: victim.sent == [(1, WcStatus.REM_ACCESS_ERR)], victim)
        memory.close()


@needs_rings
class TestRing:
    @pytest.mark.parametrize("head", [RECEIVES + 1, SLOTS * 2, 1 << 63, CLOSED])
    def test_more_messages_than_receives_end_the_queue_pair(
        self, attacker: Attacker, victim: End, head: int
    ) -> None:
        attacker.connect(victim)
        attacker.word(HEAD, head)
        until(lambda: bool(victim.flushed), victim)
        assert victim.flushed == [WcStatus.GENERAL_ERR, WcStatus.WR_FLUSH_ERR]
        assert victim.received == []
        assert state(victim.qp) is QpState.ERR

    def test_a_head_that_goes_backwards_ends_the_queue_pair(
        self, attacker: Attacker, victim: End
    ) -> None:
        attacker.connect(victim)
        attacker.word(HEAD, 2)
        until(got(victim, 2), victim)
        attacker.word(HEAD, 1)
        until(lambda: bool(victim.flushed), victim)
        assert victim.flushed[0] == WcStatus.GENERAL_ERR

    def test_a_message_longer_than_a_slot_ends_the_queue_pair(
        self, attacker: Attacker, victim: End
    ) -> None:
        attacker.connect(victim)
        assert attacker.victim_ring is not None
        attacker.victim_ring.view[FIRST_SLOT + 64] = RECEIVE_SIZE + 1
        attacker.word(HEAD, 3)
        until(lambda: bool(victim.flushed), victim)
        assert victim.received == [b""]
        assert victim.flushed[0] == WcStatus.GENERAL_ERR

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
        self, attacker: Attacker, victim: End, posted: int, status: WcStatus
    ) -> None:
        attacker.connect(victim)
        attacker.put(attacker.ring.view, POSTED, posted)
        victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, status)], victim)
        assert state(victim.qp) is QpState.ERR

    def test_withdrawn_credits_fail_the_next_send(self, attacker: Attacker, victim: End) -> None:
        attacker.connect(victim)
        victim.qp.post_send(1, b"x")
        victim.qp.post_send(2, b"x")
        attacker.put(attacker.ring.view, POSTED, 1)
        victim.qp.post_send(3, b"x")
        until(lambda: len(victim.sent) == 3, victim)
        assert victim.sent[-1] == (3, WcStatus.GENERAL_ERR)

    def test_a_full_doorbell_does_not_delay_sends(self, attacker: Attacker, victim: End) -> None:
        """The attacker requests a ring for each message, and reads none of them."""
        attacker.connect(victim)
        accepted = attacker.open[0]
        accepted.setblocking(True)  # affects only the end of the attacker
        start = time.monotonic()
        for number in range(1, 1001):
            attacker.put(attacker.ring.view, ARMED, 1)
            victim.qp.post_send(number, b"x")
        assert time.monotonic() - start < 2
        until(lambda: len(victim.sent) == 1000, victim)
        assert {status for _, status in victim.sent} == {0}
        accepted.setblocking(False)
        rung = 0
        while (packet := receive(accepted)) is not None:
            rung += packet[0] == DOORBELL
            close_all(packet[1])
        assert 100 < rung < 1000, "the doorbell was never full"

    @pytest.mark.parametrize("how", ["full", "waits", "gone"])
    def test_a_bad_doorbell_does_not_delay_sends(
        self, attacker: Attacker, victim: End, how: str
    ) -> None:
        """The attacker requests a ring for each message on a doorbell that is full or closed."""
        doorbell = Doorbell()
        attacker.connect(victim, doorbell.write_fd)
        if how == "full":
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(doorbell.write_fd, bytes(4096))
        if how == "waits":
            os.set_blocking(doorbell.write_fd, True)  # the victim has an open file of its own
            os.set_blocking(doorbell.fd, True)
        if how == "gone":
            doorbell.close()
        handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            start = time.monotonic()
            for number in range(1, 70_001 if how == "waits" else 101):
                attacker.put(attacker.ring.view, ARMED, 1)
                attacker.put(attacker.ring.view, POSTED, number + SLOTS - 1)
                victim.qp.post_send(number, b"x")
            assert time.monotonic() - start < 10
        finally:
            signal.signal(signal.SIGPIPE, handler)
        until(lambda: len(victim.sent) >= 100, victim)
        assert {status for _, status in victim.sent} == {0}
        if how != "gone":
            doorbell.close()

    def test_an_endless_doorbell_is_read_in_turns(self, attacker: Attacker, victim: End) -> None:
        """The RNIC reads the doorbell in small parts until it is empty."""
        use_completion_fd(victim.rnic)
        attacker.connect(victim)
        [write_end] = attacker.doorbells
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, bytes(4096))
        sleeper = select.poll()
        sleeper.register(cast(int, victim.rnic.completion_fd()), select.POLLIN)
        times = 0
        while sleeper.poll(0):
            assert victim.rnic.acknowledge()
            times += 1
        assert 10 < times < 10_000
        assert state(victim.qp) is QpState.RTS

    def test_random_words_affect_only_their_queue_pair(
        self, attacker: Attacker, rnic: SoftRnic, rng: random.Random
    ) -> None:
        """Random words cause valid completions, or the end of the queue pair that reads them."""
        ends = 0
        for _ in range(150):
            end = make_end(rnic)
            attacker.qp_num = rng.randint(1, (1 << 24) - 1)
            sock = attacker.connect(end)
            assert attacker.victim_ring is not None
            views = [attacker.victim_ring.view, attacker.ring.view]
            for step in range(20):
                view = rng.choice(views)
                value = rng.choice([rng.randint(0, 70), rng.getrandbits(64), CLOSED, PORT_DOWN])
                attacker.put(view, rng.choice(WORDS), value)
                attacker.put(view, FIRST_SLOT + rng.randrange(SLOTS) * 64, rng.getrandbits(64))
                end.qp.post_send(step + 1, b"message")
                for completion in rnic.poll():
                    assert completion.qp_num == end.qp.qp_num
                    end.take(completion)
                rnic.arm()
                rnic.service()
            assert all(len(data) <= RECEIVE_SIZE for data in end.received)
            ends += end.qp.state is QpState.ERR
            end.close()
            sock.close()
            attacker.victim_ring.close()
            attacker.victim_ring = None
            attacker.ring.zero(0, RING_SIZE)
        assert ends > 50


class TestMapping:
    def test_memory_that_could_shrink_is_refused(self) -> None:
        fd = unsealed(4096)
        with pytest.raises(ProtocolError, match="sealed"):
            PeerMemory.map_untrusted(fd, 4096)
        os.close(fd)

    def test_huge_pages_are_refused(self) -> None:
        """Huge pages can run out, and an access would then raise SIGBUS."""
        try:
            fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        except OSError as problem:
            pytest.skip(f"this kernel has no huge pages: {problem}")
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ProtocolError, match="huge"):
            PeerMemory.map_untrusted(fd, 4096)
        os.close(fd)

    @pytest.mark.parametrize("size", [0, 4097, 1 << 62, 1 << 64])
    def test_memory_of_a_wrong_size_is_refused(self, size: int) -> None:
        memory = Memory(4096)
        with pytest.raises(ProtocolError):
            PeerMemory.map_untrusted(memory.fd, size)
        memory.close()

    def test_memory_may_be_closed_twice(self) -> None:
        memory = Memory(5000)
        peer = PeerMemory.map_untrusted(memory.fd, 5000)
        words = peer.words(0, 64)
        words[1] = 7
        assert memory.view[8] == 7
        piece = memory.slice(10, 10)
        for closable in (peer, memory, peer, memory):
            closable.close()
        with pytest.raises(ValueError, match="released"):
            piece[0]

    @pytest.mark.parametrize("pinned", [False, True])
    @pytest.mark.parametrize(
        ("start", "end"), [(0, 200_000), (1, 5), (4095, 4097), (8192, 16384), (9, 150_000)]
    )
    def test_wipe_clears_its_range_in_pieces(self, start: int, end: int, pinned: bool) -> None:
        memory = Memory(200_000)
        memory.pinned = pinned
        memory.view[:] = b"\xff" * 200_000
        at = start
        while at < end:
            reached = memory.wipe(at, end, 50_000)
            assert at < reached <= min(end, at + 50_000)
            at = reached
        # Reading a hole allocates pages, so count them before.
        kept = os.fstat(memory.fd).st_blocks * 512
        whole = (end // 4096 - -(-start // 4096)) * 4096
        steps = (end - start) // 50_000
        assert kept >= 200_704 - (0 if pinned else max(0, whole))
        assert kept <= 200_704 - (0 if pinned else max(0, whole - steps * 4096))
        assert memory.view[:start] == b"\xff" * start
        assert memory.view[start:end] == bytes(end - start)
        assert memory.view[end:] == b"\xff" * (200_000 - end)
        memory.close()

    def test_wipe_skips_pages_that_were_never_written(self) -> None:
        memory = Memory(1 << 30)
        memory.view[5 << 20] = 1
        assert memory.wipe(0, 4 << 20, 4096) == 4 << 20
        assert memory.wipe(4 << 20, 8 << 20, 4096) == (5 << 20) + 4096
        assert memory.wipe((5 << 20) + 4096, 1 << 30, 4096) == 1 << 30
        assert memory.view[5 << 20] == 0
        assert os.fstat(memory.fd).st_blocks * 512 <= 4096
        memory.close()

    @pytest.mark.parametrize(("start", "length"), [(0, 200_000), (1, 5), (4095, 2), (9, 150_000)])
    def test_zero_clears_its_range(self, start: int, length: int) -> None:
        memory = Memory(200_000)
        memory.view[:] = b"\xff" * 200_000
        memory.zero(start, length)
        assert bytes(memory.view) == (
            b"\xff" * start + bytes(length) + b"\xff" * (200_000 - start - length)
        )
        memory.close()
