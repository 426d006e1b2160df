"""Both ends of same-host discovery, each with its TCP sockets."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import trio

from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import directory, names
from trio_smc.rendezvous.discovery.older_releases import is_signpost
from trio_smc.rendezvous.discovery.same_host import (
    Announcement,
    Claim,
    Discovery,
    Publication,
)

LONG = 2 * PATIENCE
"""Seconds until a deadline that a test does not reach: a wait fails before, after `PATIENCE`."""
SHORT = 0.05
"""Seconds until a deadline that a test reaches."""


def deadline_after(seconds: float = LONG) -> float:
    """The time in ``seconds``, by Trio's clock."""
    return trio.current_time() + seconds


class Server:
    """A listening TCP socket and its publication."""

    def __init__(self, plain: socket.socket, publication: Publication) -> None:
        self.plain = plain
        self.listening = trio.socket.from_stdlib_socket(plain)
        self.publication = publication
        self.address: tuple[str, int] = plain.getsockname()[:2]

    async def accept(self) -> tuple[trio.socket.SocketType, Claim | None]:
        await trio.lowlevel.wait_readable(self.plain)
        accepted, remote = self.plain.accept()
        connection = trio.socket.from_stdlib_socket(accepted)
        local = accepted.getsockname()[:2]
        return connection, self.publication.claim(local, remote[:2], accepted)


@contextlib.asynccontextmanager
async def serving(
    private: Path, address: str = "127.0.0.1", *, port: int = 0, dual_stack: bool = False
) -> AsyncIterator[Server]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        listening.bind((address, port))
        listening.listen(1000)
        async with trio.open_nursery() as nursery:
            publication = Discovery(private).publish(
                listening.getsockname()[:2], nursery, dual_stack=dual_stack
            )
            yield Server(listening, publication)
            publication.close()


@contextlib.asynccontextmanager
async def bound(address: str = "127.0.0.1") -> AsyncIterator[trio.socket.SocketType]:
    """A client's TCP socket, bound and not connected."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with trio.socket.socket(family) as client:
        await client.bind((address, 0))
        yield client


async def announce(
    discovery: Path | Discovery,
    client: trio.socket.SocketType,
    destination: tuple[str, int],
    *,
    required: bool = False,
) -> Announcement:
    if isinstance(discovery, Path):
        discovery = Discovery(discovery)
    source: tuple[str, int] = client.getsockname()[:2]
    outcome = discovery.announce(source, destination, client, required=required)
    assert isinstance(outcome, Announcement)
    return outcome


async def agree(discovery: Path | Discovery, server: Server, destination: tuple[str, int]) -> None:
    """Open one TCP connection, and check that both ends start SMC-R on it."""
    async with bound("::1" if ":" in destination[0] else "127.0.0.1") as client:
        announcement = await announce(discovery, client, destination)
        await client.connect(destination)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await start_smc_r(Pair(client, announcement, connection, claim))


class Pair(NamedTuple):
    """The two ends of a TCP connection that was announced and accepted."""

    client: trio.socket.SocketType
    announcement: Announcement
    connection: trio.socket.SocketType
    claim: Claim

    async def client_result(self, patience: float = LONG) -> FallbackReason | None:
        """Wait for the client's result, and send "C" for CLC, or "A" for application data."""
        reason = await self.announcement.accepted(deadline_after(patience))
        await self.client.send(b"C" if reason is None else b"A")
        return reason

    async def server_result(self, patience: float = LONG) -> bool:
        """Wait for the server's result, and check that the client has sent the matching byte."""
        agreed = await self.claim.confirm(self.connection, deadline_after(patience))
        assert await self.connection.recv(1) == (b"C" if agreed else b"A")
        return agreed


async def start_smc_r(pair: Pair) -> None:
    """Check that both ends come to the result SMC-R, and end the handshake."""
    answers: list[object] = []

    async def run_server() -> None:
        answers.append(await pair.server_result())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_server)
        assert await pair.client_result() is None
    pair.announcement.close()
    assert answers == [True]


def sockets_below(private: Path) -> list[Path]:
    """The sockets of listeners."""
    return [path for path in _sockets(private, directory.TOP) if not is_signpost(path.name)]


def signposts_below(private: Path) -> list[Path]:
    """The sockets that refuse clients of older releases."""
    return [path for path in _sockets(private, directory.TOP) if is_signpost(path.name)]


def names_below(private: Path) -> list[Path]:
    """The names of announcements."""
    return _sockets(private, names.KIND)


@contextlib.contextmanager
def short_path(name: Path) -> Iterator[str]:
    """A path to a socket that is short enough for the address of a Unix socket."""
    directory = os.open(name.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{directory}/{name.name}"
    finally:
        os.close(directory)


def _sockets(private: Path, kind: str) -> list[Path]:
    below = private.glob(f"{kind}*/**/*")
    return [path for path in below if path.is_socket()]


@contextlib.asynccontextmanager
async def claimed(private: Path, *, discovery: Discovery | None = None) -> AsyncIterator[Pair]:
    async with serving(private) as server, bound() as client:
        announcement = await announce(discovery or private, client, server.address)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            with announcement:
                yield Pair(client, announcement, connection, claim)
            claim.forget()
