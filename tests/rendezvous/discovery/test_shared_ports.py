"""Same-host discovery if several client sockets use the same port one after another.

The server finds the announcement when it accepts the connection of another client, which had the
port first, and sends its answer to the wrong client.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import (
    Pair,
    Server,
    announce,
    deadline_after,
    serving,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc.rendezvous.discovery.same_host import Announcement, Claim

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)


@contextmanager
def sharing(port: int = 0) -> Iterator[trio.socket.SocketType]:
    """A client's socket on a port that other sockets may share.  Closing it resets the
    connection."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    plain.bind((HOST, port))
    with trio.socket.from_stdlib_socket(plain) as made:
        yield made


async def accept_announced(server: Server) -> tuple[trio.socket.SocketType, Claim]:
    connection, claim = await server.accept()
    assert claim is not None
    return connection, claim


@pytest.mark.parametrize("then", ["waits", "ends"])
async def test_a_connection_of_another_client_with_the_announced_addresses(
    private: Path, then: str
) -> None:
    """The announced connection fails.  The client notifies the server, which uses plain TCP."""
    async with serving(private) as server, trio.open_nursery() as nursery:
        with sharing() as other, sharing(other.getsockname()[1]) as client:
            announcement = await announce(private, client, server.address)
            await other.connect(server.address)
            theirs, wrong_claim = await accept_announced(server)
            wrong_claim.accept()
            with pytest.raises(OSError, match="Cannot assign requested address"):
                await client.connect(server.address)
            if then == "ends":
                other.close()
                nursery.start_soon(close_soon, announcement)
                assert await agreement(wrong_claim, theirs) in ("plain", "ended")
            else:
                nursery.start_soon(close_soon, announcement)
                with trio.fail_after(PATIENCE):
                    assert await agreement(wrong_claim, theirs) == "plain"
            theirs.close()


async def close_soon(announcement: Announcement) -> None:
    await trio.testing.wait_all_tasks_blocked()
    announcement.close()


async def agreement(claim: Claim, connection: trio.socket.SocketType) -> str:
    """The server's result for a connection, after it has sent ACCEPTED."""
    try:
        if await claim.confirm(connection, deadline_after()) and claim.first_bytes():
            return "smc"
    except ConnectionResetError:
        return "ended"
    return "plain"


@pytest.mark.parametrize("ends", ["speaking", "reset"])
async def test_an_announcement_that_another_connection_was_answered_for(
    private: Path, ends: str
) -> None:
    """The client connects afterwards, and the server answers for that connection as well."""
    async with serving(private) as server:
        with sharing() as other, sharing(other.getsockname()[1]) as client:
            announcement = await announce(private, client, server.address)
            await other.connect(server.address)
            theirs, wrong_claim = await accept_announced(server)
            wrong_claim.accept()
            if ends == "speaking":
                await other.send(b"GET /")
                assert await agreement(wrong_claim, theirs) == "plain"
                assert await theirs.recv(10) == b"GET /"
            other.close()
            if ends == "reset":
                assert await agreement(wrong_claim, theirs) == "ended"
            await client.connect(server.address)
            ours, claim = await accept_announced(server)
            with theirs, ours:
                await start_smc_r(Pair(client, announcement, ours, claim))


async def test_a_connection_that_has_ended_is_not_answered_for(private: Path) -> None:
    """The other connection is still in the backlog when the announced one is made."""
    async with serving(private) as server:
        with sharing() as other, sharing(other.getsockname()[1]) as client:
            await other.connect(server.address)
            other.close()
            announcement = await announce(private, client, server.address)
            await client.connect(server.address)
            theirs, missing = await server.accept()
            with theirs:
                assert missing is None
            ours, claim = await accept_announced(server)
            with ours:
                await start_smc_r(Pair(client, announcement, ours, claim))


async def test_another_client_after_the_announced_connection(private: Path) -> None:
    """The announcement has ended, so the connection is plain TCP."""
    async with serving(private) as server:
        with sharing() as client, sharing(client.getsockname()[1]) as other:
            with await announce(private, client, server.address) as announcement:
                await client.connect(server.address)
                ours, claim = await accept_announced(server)
                claim.accept()
                assert await announcement.accepted(deadline_after()) is None
                await client.send(b"\xe2\xd4\xc3\xd9")
            client.close()
            await other.connect(server.address)
            theirs, missing = await server.accept()
            with ours, theirs:
                assert missing is None
                assert await agreement(claim, ours) == "smc"


async def test_an_answer_before_the_connection_is_open(private: Path) -> None:
    """The answer belongs to another connection.  The client notifies the server before its own
    attempt to connect fails."""
    async with serving(private) as server, trio.open_nursery() as nursery:
        with sharing() as other, sharing(other.getsockname()[1]) as client:
            announcement = await announce(private, client, server.address)
            assert not announcement.is_too_late()
            await other.connect(server.address)
            theirs, wrong_claim = await accept_announced(server)
            wrong_claim.accept()
            assert announcement.is_too_late()
            nursery.start_soon(close_soon, announcement)
            with theirs, trio.fail_after(PATIENCE):
                assert await agreement(wrong_claim, theirs) == "plain"
            assert server.publication.claims == {}
