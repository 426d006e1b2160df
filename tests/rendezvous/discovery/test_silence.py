"""An announcement without an answer: how long the client waits, and how long it remembers that."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import LONG, Server, announce, bound, deadline_after, serving
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import lookup
from trio_smc.rendezvous.discovery.lookup import Lookups
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery

AT_MOST = 2.0
"""Time limit in seconds.  A client waits for an answer for at most one second and a quarter."""
SOURCE = "127.0.0.1", 1


@pytest.fixture
def plain() -> Iterator[socket.socket]:
    """A listening TCP socket that is not published."""
    with socket.create_server(("127.0.0.1", 0)) as plain:
        plain.setblocking(False)
        yield plain


async def unanswered(discovery: Discovery, server: Server) -> FallbackReason | None:
    """Connect and return the reason for TCP.  Fails after `AT_MOST`."""
    async with bound() as client:
        announcement = await announce(discovery, client, server.address)
        await client.connect(server.address)
        with trio.fail_after(AT_MOST):
            return await announcement.accepted(deadline_after())


def next_one(discovery: Discovery, server: Server) -> FallbackReason | None:
    """The reason why the next connection is not announced; None: it is announced."""
    found = discovery.announce(SOURCE, server.address)
    if isinstance(found, Announcement):
        found.close()
        return None
    return found


async def test_a_connection_that_stays_queued(private: Path) -> None:
    """No process accepts the connection, as if the server were stopped or busy."""
    discovery = Discovery(private)
    async with serving(private) as server:
        assert await unanswered(discovery, server) is FallbackReason.NOT_ACCEPTED
        assert next_one(discovery, server) is FallbackReason.NOT_ACCEPTED, "for a minute"


async def test_a_listener_that_waits_for_data(private: Path) -> None:
    discovery = Discovery(private)
    async with serving(private) as server:
        server.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 10)
        assert await unanswered(discovery, server) is FallbackReason.NOT_ACCEPTED
        assert next_one(discovery, server) is FallbackReason.NOT_ACCEPTED


async def test_a_process_that_accepts_and_does_not_answer(private: Path) -> None:
    """The client gives up sooner than for a process that may be busy."""
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client:
        announcement = await announce(discovery, client, server.address)
        await client.connect(server.address)
        accepted, _ = server.plain.accept()
        longest, began = discovery.patience_for(server.address), trio.current_time()
        with accepted:
            assert await announcement.accepted(deadline_after()) is FallbackReason.PEER_NOT_CAPABLE
        assert trio.current_time() - began < longest
        assert next_one(discovery, server) is FallbackReason.PEER_NOT_CAPABLE


async def test_an_answer_ends_the_memory_of_silence(private: Path) -> None:
    """A connection that requires SMC-R is still announced."""
    discovery = Discovery(private)
    async with serving(private) as server:
        assert await unanswered(discovery, server) is FallbackReason.NOT_ACCEPTED
        queued, _ = server.plain.accept()
        queued.close()
        async with bound() as client:
            announcement = await announce(discovery, client, server.address, required=True)
            await client.connect(server.address)
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                assert claim.accept()
                assert await announcement.accepted(deadline_after()) is None
                claim.forget()
            announcement.close()
        assert next_one(discovery, server) is None


async def test_another_listener_ends_the_memory_of_silence(private: Path) -> None:
    """A new listener at the same address ends the memory; one at another address does not."""
    discovery = Discovery(private)
    async with serving(private) as server:
        assert await unanswered(discovery, server) is FallbackReason.NOT_ACCEPTED
        async with serving(private):
            assert next_one(discovery, server) is FallbackReason.NOT_ACCEPTED
        async with trio.open_nursery() as nursery:
            other = Discovery(private).publish(server.address, nursery)
            assert next_one(discovery, server) is None
            other.close()


async def test_the_memory_of_silence_is_short_and_bounded(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Discovery(private).names
    async with serving(private) as server:
        lookups = Lookups(private, names, lambda: None, None)
        found = lookups.find(lookups.namespace(None), SOURCE[0], server.address)

        def remembered(port: int) -> bool:
            return lookups.silence(found, SOURCE[0], ("127.0.0.1", port)) is not None

        ports = range(1, 2 * lookup.MOST_SILENCES)
        for port in ports:
            lookups.note_silence(found, ("127.0.0.1", port), FallbackReason.NOT_ACCEPTED)
        assert [*filter(remembered, ports)] == [*ports[-lookup.MOST_SILENCES :]], "the newest"
        hour = found.searched + 3600
        monkeypatch.setattr(trio, "current_time", lambda: hour)
        assert not any(map(remembered, ports))


async def test_a_client_that_requires_smc_r_waits_longer(private: Path) -> None:
    """The process is busy for more than a second, and the client waits, like a TCP connect."""
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client, trio.open_nursery() as nursery:
        announcement = await announce(discovery, client, server.address, required=True)
        await client.connect(server.address)

        async def answer() -> None:
            await trio.sleep(AT_MOST)
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                assert await claim.confirm(connection, deadline_after())

        nursery.start_soon(answer)
        with trio.fail_after(PATIENCE):
            assert await announcement.accepted(deadline_after(0.1)) is None
        announcement.close()
        await client.send(b"C")


@pytest.mark.parametrize("before", ["no listener", "a listener that ends"])
async def test_a_client_that_requires_smc_r_waits_for_a_listener(
    before: str, plain: socket.socket, private: Path
) -> None:
    """The connection waits in the backlog, as over TCP, until a new worker accepts it."""
    discovery = Discovery(private)
    async with bound() as client, trio.open_nursery() as nursery:
        address = plain.getsockname()[:2]
        first = None
        if before == "a listener that ends":
            first = Discovery(private).publish(address, nursery)
        announcement = await announce(discovery, client, address, required=True)
        if first is not None:
            first.close()
        await client.connect(address)

        async def come() -> None:
            await trio.sleep(0.3)
            server = Server(plain, Discovery(private).publish(address, nursery))
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                assert await claim.confirm(connection, deadline_after())
            server.publication.close()

        nursery.start_soon(come)
        # If there has been a listener, the client waits like TCP, beyond its deadline.
        patience = LONG if before == "no listener" else 0.1
        with trio.fail_after(PATIENCE):
            assert await announcement.accepted(deadline_after(patience)) is None
        announcement.close()
        await client.send(b"C")


@pytest.mark.parametrize("server", ["accepts", "is closed"])
async def test_a_client_that_requires_smc_r_gives_up_at_a_plain_server(
    plain: socket.socket, private: Path, server: str
) -> None:
    """The client gives up when a process without SMC-R accepts, or when no process can accept."""
    async with bound() as client:
        address = plain.getsockname()[:2]
        announcement = await announce(private, client, address, required=True)
        await client.connect(address)
        with contextlib.ExitStack() as accepted, trio.fail_after(AT_MOST):
            if server == "accepts":
                accepted.enter_context(plain.accept()[0])
            else:
                plain.close()
            reason = await announcement.accepted(deadline_after())
        assert reason is FallbackReason.PEER_NOT_CAPABLE


async def test_the_wait_for_a_first_listener_ends(plain: socket.socket, private: Path) -> None:
    """The server speaks no SMC-R and does not accept, so the client waits until its deadline."""
    async with bound() as client:
        address = plain.getsockname()[:2]
        announcement = await announce(private, client, address, required=True)
        await client.connect(address)
        with trio.fail_after(AT_MOST):
            reason = await announcement.accepted(deadline_after(0.5))
        assert reason is FallbackReason.PEER_NOT_CAPABLE


async def test_a_client_that_accepts_tcp_does_not_wait_for_a_listener(
    plain: socket.socket, private: Path
) -> None:
    found = Discovery(private).announce(SOURCE, plain.getsockname()[:2])
    assert found is FallbackReason.PEER_NOT_CAPABLE


def test_the_patience_follows_the_usual_answer(private: Path) -> None:
    discovery = Discovery(private)
    there = ("127.0.0.1", 9)
    longest = discovery.patience_for(there)
    assert longest <= 1.0

    async def note(*seconds: float) -> float:
        for each in seconds:
            discovery.note_answer(there, each)
        return discovery.patience_for(there)

    shortest = trio.run(note, 0.001)
    assert 8 * 0.001 < shortest < 8 * 0.05
    assert trio.run(note, 0.05) == pytest.approx(8 * 0.05)
    assert trio.run(note, 5.0) == longest < 8 * 5.0
    assert trio.run(note, *[0.001] * 100) == shortest
