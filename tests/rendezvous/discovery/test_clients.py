"""Same-host discovery: what clients may do to a listener."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import (
    LONG,
    SHORT,
    Both,
    Server,
    agree,
    announce,
    both_go,
    bound,
    serving,
    sockets_below,
    soon,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages, publication
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.same_host import Discovery, Search


def dial(private: Path) -> socket.socket:
    """A raw Unix connection to the only publication."""
    (name,) = sockets_below(private)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(str(name))
    raw.settimeout(LONG)
    return raw


async def hear(raw: socket.socket) -> bytes:
    await trio.lowlevel.wait_readable(raw)
    return raw.recv(100)


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"TSMC",
        b"GET / HTTP/1.0\r\n\r\n",
        bytes(44),
        messages.announce(bytes(36))[:-1],
        messages.accepted(bytes(36)),
        messages.refused(FallbackReason.NO_RNIC),
        struct.pack(">4sBBBB", b"TSMC", 3, 2, 1, 0) + bytes(36),
        struct.pack(">4sBBBB", b"TSMC", 2, 2, 99, 0) + bytes(36),
        random.Random(7).randbytes(50_000),
    ],
)
async def test_garbage_costs_its_sender_only(packet: bytes, private: Path) -> None:
    async with serving(private) as server:
        with dial(private) as raw:
            raw.send(packet)
            with contextlib.suppress(ConnectionResetError):
                assert await hear(raw) == b""
            await agree(private, server, server.address)


async def test_clients_that_say_nothing_are_dropped(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_ANNOUNCE_TIMEOUT", SHORT)
    async with serving(private) as server:
        with dial(private) as raw:
            await agree(private, server, server.address)
            assert await hear(raw) == b""
        assert server.publication._silent == {}


async def test_garbage_after_the_announcement(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        announcement.asked[0].connection.send(b"what?")
        await agree(private, server, server.address)
        assert await announcement.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE
        assert server.publication.claims.pending == {}


async def test_a_withdrawal_of_what_another_client_announced(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        with dial(private) as raw:
            raw.send(messages.withdraw(announcement.key))
            await client.connect(server.address)
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                raw.send(messages.withdraw(announcement.key))
                await both_go(Both(client, announcement, connection, claim))


async def test_a_port_that_is_drawn_while_a_connection_from_it_is_being_made(private: Path) -> None:
    """It turns out to be taken; the announcement that is withdrawn is the later one."""
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        raw = announcement.asked[0].connection
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            claim.accept()
            raw.send(messages.announce(announcement.key))
            raw.send(messages.withdraw(announcement.key))
            await both_go(Both(client, announcement, connection, claim))


async def test_too_many_clients(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_MAX_CLIENTS", 2)
    async with serving(private) as server, bound() as one, bound() as two, bound() as three:
        first, second = Discovery(private), Discovery(private)
        held = [
            await announce(first, one, server.address),
            await announce(second, two, server.address),
        ]
        await trio.testing.wait_all_tasks_blocked()
        turned_away = await announce(private, three, server.address)
        assert await turned_away.accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        for each in held:
            each.close()
        first.close()
        await trio.testing.wait_all_tasks_blocked()
        await agree(private, server, server.address)


async def test_one_user_with_all_places(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user gets its place; users with equally many take none from each other."""
    users = iter((1, 1, 2, 2))
    monkeypatch.setattr(publication, "_MAX_CLIENTS", 2)
    monkeypatch.setattr(publication, "peer_user", lambda _: next(users))
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        held = []
        for _ in range(4):
            client = await opened.enter_async_context(bound())
            asking = Discovery(private)
            opened.callback(asking.close)
            held.append(await announce(asking, client, server.address))
            await trio.testing.wait_all_tasks_blocked()
        assert await held[0].accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        assert await held[3].accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        known = server.publication.clients.values()
        for each in known:
            server.publication.hear_all(each)
        assert [each.user for each in known] == [1, 2]
        assert list(server.publication.claims.pending) == [held[1].key, held[2].key]


@pytest.mark.parametrize(
    ("limit", "most"),
    [(256, 64), (1024, 256), (20_000, 1024), (1, 1), (resource.RLIM_INFINITY, 1024)],
)
async def test_clients_leave_descriptors_to_the_program(
    private: Path, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    async with serving(private) as server:
        assert server.publication.most_clients == most


async def test_a_program_that_can_import_nothing_more_listens(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of its user or its root, or without descriptors."""
    monkeypatch.setitem(sys.modules, "resource", None)
    async with serving(private) as server:
        await agree(private, server, server.address)


async def test_a_client_of_a_claim_keeps_its_place(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter((1, 1, 2))
    monkeypatch.setattr(publication, "_MAX_CLIENTS", 2)
    monkeypatch.setattr(publication, "peer_user", lambda _: next(users))
    first, second, third = Discovery(private), Discovery(private), Discovery(private)
    async with (
        serving(private) as server,
        bound() as one,
        bound() as two,
        bound() as three,
    ):
        claimed = await announce(first, one, server.address)
        await one.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            idle = await announce(second, two, server.address)
            await trio.testing.wait_all_tasks_blocked()
            await announce(third, three, server.address)
            await trio.testing.wait_all_tasks_blocked()
            assert await idle.accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
            await both_go(Both(one, claimed, connection, claim))
    for each in (first, second, third):
        each.close()


async def test_one_user_with_all_announcements(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with places: another user's announcement takes that of the oldest one."""
    users = iter((1, 2))
    monkeypatch.setattr(publication, "_MAX_PENDING", 3)
    monkeypatch.setattr(publication, "peer_user", lambda _: next(users))
    many, few = Discovery(private), Discovery(private)
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        held = []
        for asking in (many, many, many, few, few, many):
            client = await opened.enter_async_context(bound())
            held.append(await announce(asking, client, server.address))
            await trio.testing.wait_all_tasks_blocked()
            for each in list(server.publication.clients.values()):
                server.publication.hear_all(each)
        for refused in (held[0], held[4], held[5]):
            assert await refused.accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        assert list(server.publication.claims.pending) == [each.key for each in held[1:4]]
    many.close()
    few.close()


async def test_too_many_announcements(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_MAX_PENDING", 2)
    asking = Discovery(private)
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        held = []
        for _ in range(3):
            client = await opened.enter_async_context(bound())
            held.append(await announce(asking, client, server.address))
        await trio.testing.wait_all_tasks_blocked()
        (known,) = server.publication.clients.values()
        server.publication.hear_all(known)
        assert await held[2].accepted(soon()) is FallbackReason.HANDSHAKE_LIMIT
        for each in held:
            each.close()
        await agree(asking, server, server.address)


async def test_accept_without_descriptors_waits_for_better_times(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_EXHAUSTED_INTERVAL", 0.001)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(private) as server, bound() as client:
        with dial(private) as raw:
            raw.send(messages.announce(bytes(36)))
            highest = max(map(int, os.listdir("/proc/self/fd")))
            filler = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
                with contextlib.suppress(OSError):
                    while True:
                        filler.append(os.open("/dev/null", os.O_RDONLY))
                await trio.testing.wait_all_tasks_blocked()
                # A client without descriptors gets its TCP connection all the same.
                outcome = await Discovery(private).announce(
                    client.getsockname(), server.address, soon()
                )
                assert outcome is FallbackReason.OUT_OF_RESOURCES
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for each in filler:
                    os.close(each)
            raw.send(messages.announce(bytes(36)))
            await agree(private, server, server.address)
            assert bytes(36) in server.publication.claims.pending


async def test_a_newer_client_learns_that_no_version_is_common(private: Path) -> None:
    async with serving(private):
        with dial(private) as raw:
            raw.send(struct.pack(">4sBBBB", b"TSMC", 5, 6, Kind.ANNOUNCE, 0) + b"whatever")
            answer = messages.decode_untrusted(await hear(raw))
            assert answer.kind is Kind.REFUSED
            assert answer.reason is FallbackReason.LOCAL_VERSION_MISMATCH


async def test_a_newer_client_that_still_speaks_our_version(private: Path) -> None:
    async with serving(private) as server:
        with dial(private) as raw:
            head = struct.pack(">4sBBBB", b"TSMC", 2, 5, Kind.ANNOUNCE, 0)
            raw.send(head + bytes(36) + b"an extension")
            await agree(private, server, server.address)
            assert bytes(36) in server.publication.claims.pending


@pytest.mark.parametrize("announced", [True, False])
async def test_a_client_that_never_stops(
    announced: bool, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for an announcement has turns and an end, and finds what is there."""
    taken = 0
    async with serving(private) as server, bound() as client:
        with dial(private) as raw:
            raw.send(messages.withdraw(bytes(36)))

            def take_and_say_more(connection: socket.socket) -> messages.Message | None:
                nonlocal taken
                message = messages.take(connection)
                with contextlib.suppress(OSError):
                    raw.send(messages.withdraw(bytes(36)))
                taken += 1
                return message

            monkeypatch.setattr(publication, "take", take_and_say_more)
            announcement = None
            if announced:
                announcement = await announce(private, client, server.address)
            await client.connect(server.address)
            connection, _ = await server.listening.accept()
            with connection:
                before = taken
                found = server.publication.claim(local_name(connection), connection.getpeername())
                assert taken - before <= 2 * publication._AT_ONCE
                if isinstance(found, Search):
                    with trio.fail_after(LONG):
                        found = await found.finish()
                if announcement is not None:
                    assert found is not None
                    await both_go(Both(client, announcement, connection, found))
                else:
                    assert found is None
                    with contextlib.suppress(ConnectionResetError):
                        assert await hear(raw) == b""  # its Unix connection has ended


def local_name(connection: trio.socket.SocketType) -> tuple[str, int]:
    name: tuple[str, int] = connection.getsockname()
    return name


def knock(server: Server) -> tuple[socket.socket, bytes]:
    """A TCP connection made without any other task having a turn, and its four-tuple."""
    client = socket.create_connection(server.address)
    return client, messages.four_tuple(client.getsockname(), server.address)


def search(server: Server) -> Search:
    """The search for the announcement of who has just connected."""
    accepted, _ = server.plain.accept()
    with accepted:
        key = messages.four_tuple(accepted.getpeername(), accepted.getsockname())
    return Search(server.publication, key)


async def test_an_announcement_behind_a_crowd_that_wants_to_be_let_in(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few are let in at a time, who waited when the TCP connection came has its turn."""
    monkeypatch.setattr(publication, "_ACCEPTS_AT_ONCE", 2)
    async with serving(private) as server:
        with contextlib.ExitStack() as crowd:
            for _ in range(5):
                crowd.enter_context(dial(private))
            announcer = crowd.enter_context(dial(private))
            tcp, key = knock(server)
            with tcp:
                announcer.send(messages.announce(key))
                looking = search(server)
                while not looking.look():
                    pass
                assert looking.claim is not None
                assert looking.claim.announced.key == key


async def test_a_crowd_that_never_ends_does_not_keep_a_search_going(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes later than the backlog is long has not announced the connection."""
    monkeypatch.setattr(publication, "_ACCEPTS_AT_ONCE", 2)
    monkeypatch.setattr(publication, "BACKLOG", 5)
    async with serving(private) as server:
        with contextlib.ExitStack() as crowd:

            def come(client: publication.Client) -> bool:
                crowd.enter_context(dial(private))
                assert len(server.publication.clients) < 50, "the search goes on for ever"
                return True

            crowd.enter_context(dial(private))
            monkeypatch.setattr(server.publication, "hear_all", come)
            tcp, _ = knock(server)
            with tcp:
                looking = search(server)
                while not looking.look():
                    pass
                assert looking.claim is None


async def test_a_handshake_that_is_over_keeps_nobody_from_waiting_awake(private: Path) -> None:
    """While one waits asleep no other one spins (`rnic.spinner.Spinner.sleeping`)."""
    async with serving(private) as server:
        await agree(private, server, server.address)
        assert server.publication.spinner.sleeping == 0


async def test_what_a_forked_child_holds_of_a_client_that_went_wakes_nobody(private: Path) -> None:
    """The child's copy keeps the socket open when the listener has closed its own."""
    async with serving(private) as server:
        raw = dial(private)
        await trio.testing.wait_all_tasks_blocked()
        [client] = server.publication.clients.values()
        with client.connection.dup():
            raw.send(b"no message")
            await trio.testing.wait_all_tasks_blocked()
            assert not server.publication.clients
            raw.close()
            for each in (server.publication._heard, server.publication._moves):
                assert each is not None
                assert each.poll(0) == []
