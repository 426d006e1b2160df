"""Descriptors that peers send to a software RNIC, also if the descriptor table is full."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest

from tests.lingering import AT_ONCE, Stopwatch, full_table, give_away, lingering
from tests.peers import open_pair
from tests.rnic.contract import End, connect, got, make_end, needs_rings, needs_truncation, until
from tests.rnic.packets import receive
from tests.rnic.test_soft_hostile import Attacker, ended, state
from trio_smc.rnic.memory import QUICK_TO_FREE, Memory, PeerMemory
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.soft.messages import DOORBELL, Register, Revoke
from trio_smc.rnic.verbs import QpState, RnicError, WcStatus

FALLOC_FL_KEEP_SIZE = 1  # linux/include/uapi/linux/falloc.h
MANY = [1, pytest.param(253, marks=needs_truncation)]
"""Numbers of descriptors in one packet; the receiver has room for fewer than 253."""


@pytest.fixture
def rnic(runtime_directory: Path) -> Iterator[SoftRnic]:
    rnic = SoftRnic()
    rnic.open(runtime_directory / "smc")
    yield rnic
    rnic.close()


@pytest.fixture
def attacker(rnic: SoftRnic, runtime_directory: Path) -> Iterator[Attacker]:
    with Attacker(runtime_directory / "smc") as attacker:
        yield attacker


@pytest.fixture
def victim(rnic: SoftRnic) -> Iterator[End]:
    end = make_end(rnic)
    yield end
    end.close()


@pytest.fixture
def pair(rnic: SoftRnic) -> Iterator[tuple[End, End]]:
    """Two connected ends, which must still work after the test."""
    with open_pair("link", rnic) as ends:
        yield ends
        before = len(ends[1].received)
        ends[0].qp.post_send(99, b"unharmed")
        until(got(ends[1], before + 1), *ends)


def register(rkey: int, length: int = 4096) -> bytes:
    return Register(rkey=rkey, slot=rkey, address=4096, length=length).encode()


class TestLingering:
    """Closing a received descriptor may block, so this thread must not close it."""

    @pytest.mark.parametrize("count", MANY)
    @pytest.mark.parametrize(
        "data", ["hello", "garbage", "doorbell", "empty", "revoke", "register"]
    )
    def test_descriptors_of_a_dialler(
        self, attacker: Attacker, victim: End, pair: tuple[End, End], data: str, count: int
    ) -> None:
        packets = {
            "hello": attacker.hello(victim),
            "garbage": b"garbage",
            "doorbell": DOORBELL,
            "empty": b"",
            "revoke": Revoke(rkey=1).encode(),
            "register": register(1),
        }
        sock = attacker.dial(victim)
        watch = Stopwatch()
        with lingering() as fd:
            assert give_away(sock, packets[data], fd, count)
            with watch:
                victim.rnic.service()
                victim.qp.to_err()
        assert watch.seconds < AT_ONCE
        assert ended(sock)

    @pytest.mark.parametrize("count", MANY)
    @pytest.mark.parametrize("which", [0, 1], ids=["where it listens", "where it speaks"])
    @pytest.mark.parametrize("data", ["doorbell", "register", "empty"])
    def test_descriptors_of_a_peer(
        self, attacker: Attacker, victim: End, pair: tuple[End, End], data: str, which: int,
        count: int,
    ) -> None:  # fmt: skip
        attacker.connect(victim)
        packets = {"doorbell": DOORBELL, "register": register(1), "revoke": Revoke(rkey=1).encode()}
        watch = Stopwatch()
        sock = attacker.open[-2:][which]
        with lingering() as fd:
            with contextlib.suppress(OSError):
                sock.send(DOORBELL)
            assert give_away(sock, packets.get(data, b""), fd, count)
            with watch:
                victim.rnic.service()
                victim.rnic.poll()
                victim.qp.to_err()
        assert watch.seconds < AT_ONCE
        assert state(victim.qp) is QpState.ERR

    def test_a_descriptor_behind_a_valid_message(self, attacker: Attacker, victim: End) -> None:
        """The peer sends the descriptor with its second message; the first one is valid."""
        sock = attacker.connect(victim)
        memory = Memory(4096)
        socket.send_fds(sock, [register(9)], [memory.fd])
        memory.close()
        watch = Stopwatch()
        with lingering() as fd:
            assert give_away(sock, register(10), fd)
            sock.send(Revoke(rkey=9).encode())
            with watch:
                victim.rnic.service()
                victim.rnic.poll()
        assert watch.seconds < AT_ONCE
        assert state(victim.qp) is QpState.ERR

    @pytest.mark.parametrize("empty", [False, True])
    def test_unread_descriptors_when_the_queue_pair_is_closed(
        self, attacker: Attacker, victim: End, pair: tuple[End, End], empty: bool
    ) -> None:
        sock = attacker.connect(victim)
        watch = Stopwatch()
        with lingering() as fd:
            if empty:
                sock.send(b"")
            assert give_away(sock, b"", fd)
            with watch:
                victim.qp.to_err()
        assert watch.seconds < AT_ONCE

    def test_unread_descriptors_when_the_port_is_down(
        self, attacker: Attacker, rnic: SoftRnic
    ) -> None:
        victim = make_end(rnic)
        sock = attacker.connect(victim)
        watch = Stopwatch()
        with lingering() as fd:
            assert give_away(sock, b"x", fd)
            with watch:
                rnic.fail()
                victim.close()
                rnic.restore()
        assert watch.seconds < AT_ONCE

    @pytest.mark.parametrize("accepted", [False, True])
    def test_unread_descriptors_when_the_rnic_is_closed(
        self, attacker: Attacker, runtime_directory: Path, accepted: bool
    ) -> None:
        rnic = SoftRnic()
        rnic.open(runtime_directory / "smc")
        watch = Stopwatch()
        sock = attacker.directory.dial(f"rnic-{rnic.gid.hex()}")
        if accepted:
            rnic.service()
        with lingering() as fd, sock:
            assert give_away(sock, b"x", fd)
            with watch:
                rnic.close()
        assert watch.seconds < AT_ONCE

    def test_descriptors_without_room_in_the_table(
        self, attacker: Attacker, victim: End, pair: tuple[End, End]
    ) -> None:
        """The kernel would close a descriptor for which the table has no room."""
        sock = attacker.connect(victim)
        watch = Stopwatch()
        with lingering() as fd:
            assert give_away(sock, register(1), fd)
            with full_table(), watch:
                for _ in range(3):
                    victim.rnic.service()
        assert watch.seconds < AT_ONCE

    def test_a_full_closer_refuses_new_peers(
        self, attacker: Attacker, victim: End, pair: tuple[End, End]
    ) -> None:
        """Pending closes are bounded; older connections continue, and new ones wait."""
        intake = cast(SoftRnic, victim.rnic).intake
        stuck = threading.Event()
        intake.closer.run(stuck.wait)
        socks = [attacker.dial_and_send(victim, b"x", [0]) for _ in range(200)]
        for _ in range(20):
            victim.rnic.service()
        assert intake.closer.is_full
        held = sum(not ended(sock) for sock in socks)
        assert held >= 200 - 64
        before = len(pair[1].received)
        pair[0].qp.post_send(7, b"x")
        until(got(pair[1], before + 1), *pair)
        stuck.set()
        until(lambda: all(map(ended, socks)), victim)

    def test_memory_that_takes_long_to_free(self) -> None:
        """The process that unmaps memory last frees its pages, but not in this thread."""
        memory = Memory(QUICK_TO_FREE + 4096)
        peer = PeerMemory.map_untrusted(memory.fd, memory.size)
        small = PeerMemory.map_untrusted(memory.fd, memory.size)
        later: list[Any] = []
        peer.close(later.append)
        peer.close(later.append)
        assert len(later) in (1, 2)
        for each in later:
            each()
        small.close()
        memory.close()

    @pytest.mark.parametrize("message", ["hello", "register"])
    def test_memory_with_pages_behind_its_end(
        self, attacker: Attacker, rnic: SoftRnic, victim: End, pair: tuple[End, End], message: str
    ) -> None:
        """Such pages do not count as size, but freeing them takes long, so a thread closes them."""
        fd = behind_its_end(4096)
        packets = {"hello": attacker.hello(victim), "register": register(1)}
        sock = attacker.dial(victim) if message == "hello" else attacker.connect(victim)
        socket.send_fds(sock, [packets[message]], [fd])
        os.close(fd)
        closed: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rnic.intake.closer, "close", closed.extend)
            patch.setattr(rnic.intake.closer, "run", closed.append)
            victim.rnic.service()
            victim.rnic.poll()
            victim.qp.to_err()
        assert closed
        assert ended(sock) or message == "hello"
        for each in closed:
            os.close(each) if isinstance(each, int) else each()


def behind_its_end(size: int) -> int:
    """Make a memfd that is sealed like a region, with many pages behind its end."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_long(2 * QUICK_TO_FREE)
    assert libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), length) == 0
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class TestLack:
    """An operation that lacks resources fails or waits; other operations are not affected."""

    @pytest.mark.pure
    @pytest.mark.parametrize(
        "number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.EPERM]
    )
    def test_a_region_that_cannot_be_announced(
        self, rnic: SoftRnic, pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def failing(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        memory = Memory(4096)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", failing)
            with pytest.raises(RnicError) as caught:
                pair[0].pd.register(memory)
        assert caught.value.errno == number
        assert len(cast(Any, pair[0].pd).regions) == 1
        region = pair[0].pd.register(memory)  # now the peer can be notified
        pair[1].qp.post_write(5, memoryview(b"x"), None, region.address, region.rkey, signaled=True)
        until(lambda: (5, 0) in pair[1].sent, *pair)
        region.close()
        memory.close()

    @pytest.mark.pure
    @pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
    def test_a_revocation_waits(
        self, pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        memory = Memory(4096)
        region = pair[0].pd.register(memory)
        until(lambda: pair[1].qp.can_reach(region.rkey), *pair)
        failures = [number] * 3
        send = socket.send_fds

        def failing(*arguments: Any) -> int:
            if failures:
                raise OSError(failures.pop(), "injected")
            return send(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", failing)
            region.close()
            until(lambda: not pair[1].qp.can_reach(region.rkey), *pair)
        assert not failures
        memory.close()

    @pytest.mark.pure
    @pytest.mark.parametrize("number", [errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN])
    def test_a_peer_that_is_gone_ends_the_queue_pair(
        self, rnic: SoftRnic, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        a, b = make_end(rnic), make_end(rnic)
        connect(a, b)
        memory = Memory(4096)

        def failing(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", failing)
            region = a.pd.register(memory)
        until(lambda: bool(a.flushed), a, b)
        assert state(a.qp) is QpState.ERR
        region.close()
        memory.close()
        a.close()
        b.close()

    def test_spare_descriptors_receive_a_region_into_a_full_table(
        self, attacker: Attacker, victim: End
    ) -> None:
        """A region needs a descriptor only until it is mapped, so a few spare ones are enough."""
        sock = attacker.connect(victim)
        memory = Memory(4096)
        socket.send_fds(sock, [register(1)], [memory.fd])
        with full_table():
            victim.rnic.service()
            assert victim.qp.can_reach(1)
        for rkey in range(2, 10):
            socket.send_fds(sock, [register(rkey)], [memory.fd])
        with full_table():
            victim.rnic.service()
            assert all(victim.qp.can_reach(rkey) for rkey in range(1, 10))
        memory.close()
        assert state(victim.qp) is QpState.RTS

    def test_a_region_waits_if_no_spare_descriptor_is_left(
        self, attacker: Attacker, victim: End, pair: tuple[End, End]
    ) -> None:
        """The region and all later announcements wait; messages do not."""
        sock = attacker.connect(victim)
        memory = Memory(4096)
        intake = cast(SoftRnic, victim.rnic).intake
        with full_table():
            for fd in intake.spare:
                os.dup2(0, fd)
            spare, intake.spare = intake.spare, []
            socket.send_fds(sock, [register(1)], [memory.fd])
            socket.send_fds(sock, [register(2)], [memory.fd])
            sock.send(Revoke(rkey=2).encode())
            victim.rnic.service()
            assert not victim.qp.can_reach(1)
            assert state(victim.qp) is QpState.RTS
            before = len(pair[1].received)
            pair[0].qp.post_send(7, b"x")
            until(got(pair[1], before + 1), *pair)
            victim.qp.post_send(3, b"over the same queue pair")
            until(lambda: (3, 0) in victim.sent, victim)
        for fd in spare:
            os.close(fd)
        until(lambda: victim.qp.can_reach(1), victim)
        until(lambda: not victim.qp.can_reach(2), victim)
        memory.close()
        assert state(victim.qp) is QpState.RTS

    @pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.ENFILE])
    def test_memory_that_cannot_be_mapped_now(
        self, attacker: Attacker, victim: End, pair: tuple[End, End],
        monkeypatch: pytest.MonkeyPatch, number: int,
    ) -> None:  # fmt: skip
        sock = attacker.connect(victim)
        memory = Memory(4096)

        def failing(fd: int, size: int) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr("trio_smc.rnic.memory.map_descriptor", failing)
            socket.send_fds(sock, [register(1)], [memory.fd])
            until(lambda: not victim.qp.can_reach(1), victim)
        until(lambda: victim.qp.can_reach(1), victim)
        memory.close()
        assert state(victim.qp) is QpState.RTS

    @pytest.mark.parametrize("dialled", [False, True])
    def test_a_hello_that_cannot_be_mapped_now(
        self, rnic: SoftRnic, monkeypatch: pytest.MonkeyPatch, dialled: bool
    ) -> None:
        a, b = make_end(rnic), make_end(rnic)
        mapped = PeerMemory.__init__

        def failing(*_: object, **__: object) -> None:
            raise OSError(errno.ENOMEM, "injected")

        with monkeypatch.context() as patch:
            patch.setattr(PeerMemory, "__init__", failing)
            connect(a, b)
            if dialled:
                rnic.service()
        assert PeerMemory.__init__ is mapped
        a.qp.post_send(1, b"late")
        until(got(b, 1), a, b)
        a.close()
        b.close()

    def test_a_first_contact_that_cannot_be_accepted_now(
        self, attacker: Attacker, victim: End, pair: tuple[End, End]
    ) -> None:
        """The dialler waits in the backlog, and posted requests wait for the connection."""
        with full_table():
            pass
        victim.qp.post_receive(4)
        victim.qp.to_rtr(gid=attacker.gid, qp_num=attacker.qp_num, psn=3, mtu=5)
        victim.qp.to_rts(psn=3)
        sock = attacker.dial(victim)
        attacker.put(attacker.ring.view, 64, 4)
        socket.send_fds(sock, [attacker.hello(victim)], attacker.fds())
        with full_table():
            victim.rnic.service()
            assert cast(SoftRnic, victim.rnic).accepting_later
            victim.qp.post_send(1, b"x")
        until(lambda: victim.sent == [(1, 0)], victim)

    @pytest.mark.pure
    @needs_rings
    def test_a_doorbell_that_lacked_memory_is_rung_again(
        self, attacker: Attacker, victim: End, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attacker.connect(victim)
        ring = attrgetter("_sockets.peer.ring")(victim.qp)
        rings: list[int] = []

        def doorbell() -> None:
            rings.append(1)
            if len(rings) < 3:
                raise OSError(errno.ENOBUFS, "injected")

        monkeypatch.setattr(ring, "doorbell", doorbell)
        attacker.put(attacker.ring.view, 128, 1)  # armed
        victim.qp.post_send(1, b"x")
        until(lambda: len(rings) == 3, victim)
        until(lambda: (1, 0) in victim.sent, victim)

    def test_a_region_that_was_never_announced_is_refused(
        self, attacker: Attacker, victim: End
    ) -> None:
        attacker.connect(victim)
        assert not victim.qp.can_reach(77)
        assert state(victim.qp) is QpState.RTS

    def test_a_write_waits_for_its_region(
        self, attacker: Attacker, victim: End, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sock = attacker.connect(victim)
        memory = Memory(4096)
        attacker.ring.view[:].cast("Q")[(4096 + 64 * 1024) // 8 + 1] = 1

        def failing(fd: int, size: int) -> None:
            raise OSError(errno.ENOMEM, "injected")

        with monkeypatch.context() as patch:
            patch.setattr("trio_smc.rnic.memory.map_descriptor", failing)
            socket.send_fds(sock, [register(1)], [memory.fd])
            victim.qp.post_write(6, memoryview(b"late"), None, 4096, 1, signaled=True)
            victim.rnic.service()
            assert victim.sent == []
        until(lambda: victim.sent == [(6, WcStatus.SUCCESS)], victim)
        assert bytes(memory.view[:4]) == b"late"
        memory.close()
        assert receive(sock) is None
