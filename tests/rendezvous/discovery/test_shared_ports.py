"""Same-host discovery where connections of several sockets have the same port, one after another.

The server takes an announcement for the connection of somebody else who had the port first.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import Both, Server, announce, both_go, serving, soon
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery.publication import Claim
from trio_smc.rendezvous.discovery.same_host import Discovery

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)


@contextmanager
def sharing(port: int = 0) -> Iterator[trio.socket.SocketType]:
    """A client's socket, bound to a port that others may be bound to; its end is a reset."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    plain.bind((HOST, port))
    with trio.socket.from_stdlib_socket(plain) as made:
        yield made


async def claimed(server: Server) -> tuple[trio.socket.SocketType, Claim]:
    connection, claim = await server.accept()
    assert claim is not None
    return connection, claim


@pytest.mark.parametrize("settled", ["before the next", "after it"])
async def test_an_answer_to_the_announcement_before(private: Path, settled: str) -> None:
    """It arrives when the same addresses have been announced again."""
    asking = Discovery(private)
    async with serving(private) as server:
        with sharing() as stranger:
            port = stranger.getsockname()[1]
            with sharing(port) as first:
                announcement = await announce(asking, first, server.address)
                await stranger.connect(server.address)
                theirs, mistaken = await claimed(server)
                mistaken.accept()
                announcement.close()  # `first` cannot connect
            with sharing(port) as second:
                again = await announce(asking, second, server.address)
                if settled == "before the next":
                    assert not await mistaken.confirm(theirs, soon())
                stranger.close()
                await second.connect(server.address)
                ours, claim = await server.accept()
                with theirs, ours:
                    if claim is not None:
                        await both_go(Both(second, again, ours, claim))
                    else:
                        assert await again.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE
                    assert not await mistaken.confirm(theirs, soon())
    asking.close()


@pytest.mark.parametrize("ends", ["speaking", "reset", "reset before anybody looks"])
async def test_an_announcement_that_a_strangers_connection_took(private: Path, ends: str) -> None:
    """Whose connection it was connects, and has it back."""
    asking = Discovery(private)
    async with serving(private) as server:
        with sharing() as stranger, sharing(stranger.getsockname()[1]) as client:
            announcement = await announce(asking, client, server.address)
            await stranger.connect(server.address)
            theirs, mistaken = await claimed(server)
            mistaken.accept()
            if ends == "speaking":
                await stranger.send(b"GET /")
                assert await mistaken.confirm(theirs, soon())
                assert not mistaken.is_right()
            stranger.close()
            if ends == "reset":
                assert await mistaken.confirm(theirs, soon())
                with pytest.raises(ConnectionResetError):
                    mistaken.is_right()
            await client.connect(server.address)
            ours, claim = await claimed(server)
            with theirs, ours:
                await both_go(Both(client, announcement, ours, claim))
                assert not await mistaken.confirm(theirs, soon())
    asking.close()


async def test_a_stranger_after_the_announced_connection(private: Path) -> None:
    """That one has said CLC, so the announcement is not the stranger's."""
    async with serving(private) as server:
        with sharing() as client, sharing(client.getsockname()[1]) as stranger:
            announcement = await announce(private, client, server.address)
            await client.connect(server.address)
            ours, claim = await claimed(server)
            claim.accept()
            assert await announcement.accepted(soon()) is None
            await client.send(b"\xe2\xd4\xc3\xd9")
            client.close()
            await stranger.connect(server.address)
            theirs, none = await server.accept()
            with ours, theirs:
                assert none is None
                assert await claim.confirm(ours, soon())


async def test_an_acceptance_before_the_connection_is_open(private: Path) -> None:
    """It is somebody else's, and is withdrawn although it was answered."""
    asking = Discovery(private)
    async with serving(private) as server:
        with sharing() as stranger, sharing(stranger.getsockname()[1]) as client:
            announcement = await announce(asking, client, server.address)
            assert not announcement.is_too_late()
            await stranger.connect(server.address)
            theirs, mistaken = await claimed(server)
            mistaken.accept()
            assert announcement.is_too_late()
            announcement.close()
            with theirs:
                assert not await mistaken.confirm(theirs, soon())
                assert server.publication.claims.pending == {}
    asking.close()
