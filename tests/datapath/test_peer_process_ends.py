"""The peer's process ends: what its shared memory shows decides between the end and an error."""

from __future__ import annotations

import os
import struct

import pytest

from tests.peers import open_pair
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.receiver import Receiver
from trio_smc.rnic.memory import NOT_SHOWN, PROGRESS_SIZE, PROGRESS_WORDS

SIZE = 4096


def claim(connection: Connection, count: int, kind: int = 0) -> None:
    """Store a progress word, as the peer does; ``kind``: `PROGRESS_WORDS` for the bytes taken."""
    memory = connection.rmbe.rmb.memory
    place = memory.mapped - PROGRESS_SIZE + (kind + connection.rmbe.index - 1) * 8
    os.pwrite(memory.fd, struct.pack("=Q", count), place)


@pytest.fixture(params=[0, 3])
def announced(request: pytest.FixtureRequest) -> int:
    """Bytes that the peer has announced."""
    return int(request.param)


def test_data_that_was_not_announced_is_received(announced: int) -> None:
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        if announced:
            pair.a.send(memoryview(b"abc"))
            pair.settle()
        pair.b.rmbe.data[announced : announced + 4] = b"defg"
        claim(pair.b, announced + 4)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert pair.b.receiver.receive(100) == b"abc"[:announced] + b"defg"
        assert pair.b.receiver.at_eof
        assert pair.b.receiver.receive(100) == b""


@pytest.mark.parametrize("beyond", [1, 1 << 40, (1 << 64) - 1])
def test_more_than_the_window_is_an_error(beyond: int) -> None:
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        claim(pair.b, min(pair.b.receiver.usable + beyond, (1 << 64) - 1))
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)


@pytest.mark.parametrize(("claimed", "tcp"), [(0, "close_tcp"), (1 << 40, "reset_tcp")])
def test_nothing_is_posted_on_a_link_that_has_ended(claimed: int, tcp: str) -> None:
    """Data in flight, and a hostile progress word, lead to an abort."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(b"abc"))
        claim(pair.b, claimed)
        posted = len(pair.ba.log)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert len(pair.ba.log) == posted
        assert pair.b.state == "CLOSED"
        assert pair.hosts[1].calls[-2:] == [tcp, "closed"]


@pytest.mark.parametrize(("end", "all_received"), [("reset", True), ("none", True), ("fin", False)])
def test_without_fin_or_with_a_loss_it_is_an_error(end: str, all_received: bool) -> None:
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.a.send(memoryview(b"abc"))
        pair.settle()
        pair.hosts[1].end = end  # type: ignore[assignment]
        pair.b.links_lost(all_received=all_received)
        assert pair.b.receiver.receive(100) == b"abc"
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)


@pytest.mark.parametrize("ended", ["no", "half", "closed"])
@pytest.mark.parametrize("in_flight", [True, False])
def test_nothing_is_posted_on_a_closed_link(in_flight: bool, ended: str) -> None:
    """4.8.1 (4A) answers the peer's C by A if data is in flight, and here no link is left for A."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        if in_flight:
            pair.b.send(memoryview(b"abc"))
        if ended == "half":
            pair.b.shutdown_write()
        elif ended == "closed":
            pair.b.close()
        pair.hosts[1].end = "fin"
        posted = len(pair.ba.log)
        pair.b.links_lost(all_received=True)
        assert len(pair.ba.log) == posted
        assert pair.b.state == "CLOSED"
        if in_flight:
            with pytest.raises(ConnectionResetError):
                pair.b.receiver.receive(100)
        assert pair.b.receiver.receive(100) == b""


@pytest.mark.parametrize("sent", [b"abcdefgh", bytes(SIZE // 2)], ids=["few", "half a ring"])
@pytest.mark.parametrize("link", ["first", "second", "changed before the read"])
@pytest.mark.parametrize("way", ["receive", "receive_into", "lend", "discard"])
@pytest.mark.parametrize("left", [0, 1, 7, 8])
def test_unread_data_makes_the_end_a_reset(left: int, way: str, link: str, sent: bytes) -> None:
    """The peer had read all, also what it has not announced: the end; otherwise it is a reset."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        if link == "second":
            pair.next_channel(0)
            pair.move(0)
        pair.a.send(memoryview(b"answer"))
        pair.b.send(memoryview(sent))
        pair.settle()
        if link == "changed before the read":
            pair.next_channel(0)
            pair.move(0)
            pair.settle()
        count = len(sent) - left
        if count:
            take(pair.a.receiver, way, count)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert pair.b.receiver.receive(100) == b"answer"
        if left:
            with pytest.raises(ConnectionResetError):
                pair.b.receiver.receive(100)
        assert pair.b.receiver.receive(100) == b""
        assert pair.b.receiver.at_eof
        if not left:
            assert pair.b.send(memoryview(b"x")) == 1
        with pytest.raises(BrokenPipeError):
            pair.b.send(memoryview(b"x"))


def take(receiver: Receiver, way: str, count: int) -> None:
    """Take bytes by one of the ways in which an application can."""
    if way == "receive":
        receiver.receive(count)
    elif way == "receive_into":
        receiver.receive_into(bytearray(count))
    elif way == "discard":
        receiver.discard(count)
    else:
        receiver.lend(count).release()
        receiver.take_back(count)


def test_data_that_was_not_announced_arrives_though_the_ring_is_full() -> None:
    """The peer has read nothing, and its own data was not announced when it was killed."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(bytes(2 * SIZE)))
        pair.b.rmbe.data[:4] = b"last"
        claim(pair.b, 4)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert pair.b.receiver.receive(100) == b"last"
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)


@pytest.mark.parametrize("data", [b"", b"abc"])
@pytest.mark.parametrize("taken", [False, True])
def test_an_urgent_byte_at_the_end_is_unread(taken: bool, data: bytes) -> None:
    """Over TCP it stays in the receive buffer, also if the process has taken it by MSG_OOB."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        if data:
            pair.b.send(memoryview(data))
        pair.b.send_urgent(memoryview(b"U"))
        pair.settle()
        assert pair.a.receiver.receive(100) == data
        if taken:
            assert pair.a.receiver.receive_urgent() == ord("U")
        pair.settle()
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)


def test_data_that_the_peer_has_not_noticed_is_unread() -> None:
    """It is in the ring, and its message has not been processed."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(b"abc"))
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)


def test_without_the_word_the_end_is_in_order() -> None:
    """Older releases do not store the word."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(b"abc"))
        claim(pair.b, NOT_SHOWN, PROGRESS_WORDS)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert pair.b.receiver.receive(100) == b""


@pytest.mark.parametrize(("end", "sends"), [("fin", True), ("reset", False)])
def test_a_reset_of_a_peer_that_had_closed_is_noticed(end: str, sends: bool) -> None:
    """After its C, such as after SHUT_RDWR, only TCP shows it: SO_LINGER with 0 s, for example."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.a.close()
        pair.ab.deliver()
        pair.hosts[1].end = end  # type: ignore[assignment]
        pair.b.links_lost(all_received=True)
        assert pair.b.receiver.receive(100) == b""
        if sends:
            assert pair.b.send(memoryview(b"x")) == 1
        with pytest.raises(BrokenPipeError):
            pair.b.send(memoryview(b"x"))
        assert pair.b.receiver.at_eof


def test_nothing_is_shown_in_memory_that_has_gone() -> None:
    """The link has ended, and the reader has not heard of it yet."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(b"abcdef"))
        pair.settle()
        pair.mapped[1].close()
        assert pair.a.receiver.receive(3) == b"abc"
        assert pair.a.receiver.receive_into(bytearray(3)) == 3


def test_a_full_ring_shows_that_the_peer_had_not_read_all() -> None:
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(bytes(2 * SIZE)))
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)
