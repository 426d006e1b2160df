"""The peer's process ends: what its shared memory shows decides between the end and an error."""

from __future__ import annotations

import os
import struct

import pytest

from tests.peers import open_pair
from trio_smc.datapath.connection import Connection
from trio_smc.rnic.memory import PROGRESS_SIZE

SIZE = 4096


def claim(connection: Connection, count: int) -> None:
    """Store a progress word, as the peer does."""
    memory = connection.rmbe.rmb.memory
    place = memory.mapped - PROGRESS_SIZE + (connection.rmbe.index - 1) * 8
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


@pytest.mark.parametrize("claimed", [0, 1 << 40])
def test_nothing_is_posted_on_a_link_that_has_ended(claimed: int) -> None:
    """Data in flight, and a hostile progress word, lead to an abort."""
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(b"abc"))
        claim(pair.b, claimed)
        posted = len(pair.ba.log)
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        assert len(pair.ba.log) == posted
        assert pair.b.state == "CLOSED"
        assert pair.hosts[1].calls[-2:] == ["reset_tcp", "closed"]


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
        assert pair.b.receiver.receive(100) == b""


def test_a_full_ring_shows_that_the_peer_had_not_read_all() -> None:
    with open_pair("core", (SIZE, SIZE), progress=True) as pair:
        pair.b.send(memoryview(bytes(2 * SIZE)))
        pair.hosts[1].end = "fin"
        pair.b.links_lost(all_received=True)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(100)
