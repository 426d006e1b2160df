"""Same-host discovery: Unix connections that many announcements share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.lingering import full_table
from tests.rendezvous.discovery.world import (
    Both,
    Server,
    agree,
    announce,
    both_go,
    bound,
    serving,
    soon,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import announcing
from trio_smc.rendezvous.discovery.same_host import Announcement, Claim, Discovery


async def test_many_at_once(private: Path) -> None:
    count = 200
    results: list[bool] = []

    async def serve(server: Server, nursery: trio.Nursery) -> None:
        for _ in range(count):
            connection, claim = await server.accept()
            assert claim is not None
            nursery.start_soon(confirm, connection, claim)

    async def confirm(connection: trio.socket.SocketType, claim: Claim) -> None:
        with connection:
            results.append(await claim.confirm(connection, soon()))

    asking = Discovery(private)

    async def call(server: Server) -> None:
        async with bound() as client:
            announcement = await announce(asking, client, server.address)
            await client.connect(server.address)
            results.append(await announcement.accepted(soon()) is None)
            await client.send(b"C")

    async with serving(private) as server, trio.open_nursery() as nursery:
        nursery.start_soon(serve, server, nursery)
        for _ in range(count):
            nursery.start_soon(call, server)
    assert results == [True] * (2 * count)


async def test_a_unix_connection_is_made_once_and_kept(private: Path) -> None:
    asking = Discovery(private)
    async with serving(private) as server:
        for _ in range(5):
            await agree(asking, server, server.address)
        assert len(server.publication.clients) == 1


async def test_only_idle_unix_connections_make_room_for_others(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "_MOST_SERVERS", 1)
    asking = Discovery(private)
    async with serving(private) as one, serving(private) as other, bound() as client:
        announcement = await announce(asking, client, one.address)
        await agree(asking, other, other.address)
        await client.connect(one.address)
        connection, claim = await one.accept()
        with connection:
            assert claim is not None
            await both_go(Both(client, announcement, connection, claim))
        assert len(asking._announcer._servers) == 2
        async with serving(private) as third:
            await agree(asking, third, third.address)
            await trio.testing.wait_all_tasks_blocked()
            assert len(one.publication.clients) == 0, "the oldest has gone"
            assert len(other.publication.clients) == 1


def left_in_a_child(made: list[Discovery], descriptors: list[int]) -> int:
    """How many of these descriptors are open in a forked child that has abandoned them."""
    child = os.fork()
    if child == 0:
        left = 99
        with contextlib.suppress(BaseException):
            for each in made:
                each.abandon()
            left = sum(os.path.exists(f"/proc/self/fd/{each}") for each in descriptors)
        os._exit(left)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_a_forked_child_lets_go_and_its_parent_goes_on(private: Path) -> None:
    asking = Discovery(private)
    async with trio.open_nursery() as nursery, serving(private) as server:
        await agree(asking, server, server.address)
        publishing = Discovery(private)
        publication = publishing.publish(("127.0.0.1", 9), nursery)
        await trio.testing.wait_all_tasks_blocked()
        assert publication._listener is not None
        (kept,) = asking._announcer._servers.values()
        held = [kept.connection.fileno(), publication._listener.fileno()]
        assert left_in_a_child([asking, publishing], held) == 0
        await agree(asking, server, server.address)
        assert len(server.publication.clients) == 1, "the parent's is as it was"
        publication.close()


async def test_what_is_remembered_of_a_directory_ends_with_its_next_change(private: Path) -> None:
    asking = Discovery(private)
    async with serving(private, "0.0.0.0") as server:
        there = ("127.0.0.1", server.address[1])
        while not asking._announcer._lookups.known:
            await agree(asking, server, there)
            await trio.sleep(0.01)
        (found,) = asking._announcer._lookups.known.values()
        assert found.holds()
        async with trio.open_nursery() as nursery:
            more = Discovery(private).publish(there, nursery)
            assert not found.holds()
            outcome = await asking.announce(("127.0.0.1", 1), there, soon())
            assert isinstance(outcome, Announcement)
            assert len(outcome.asked) == 2, "the new listener is asked as well"
            outcome.close()
            more.close()
        await agree(asking, server, there)


async def test_of_several_who_wait_each_gets_its_own_answer(private: Path) -> None:
    """Whoever reads does it for all, and leaves it to another one when it goes."""
    asking = Discovery(private)
    async with serving(private) as server, contextlib.AsyncExitStack() as opened:
        both: list[Both] = []
        for _ in range(4):
            client = await opened.enter_async_context(bound())
            announcement = await announce(asking, client, server.address)
            await client.connect(server.address)
            connection, claim = await server.accept()
            opened.enter_context(connection)
            assert claim is not None
            both.append(Both(client, announcement, connection, claim))
        reader = trio.CancelScope()
        said: dict[int, object] = {}

        async def ask(number: int) -> None:
            said[number] = await both[number].client_says()

        async def read() -> None:
            with reader:
                await both[0].announcement.accepted(soon())
            said[0] = "cancelled"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            for number in (1, 2, 3):
                nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
            reader.cancel()
            await trio.testing.wait_all_tasks_blocked()
            both[3].claim.refuse(FallbackReason.NO_RNIC)
            for each in both[1:3]:
                assert await each.server_says()
        assert said == {0: "cancelled", 1: None, 2: None, 3: FallbackReason.NO_RNIC}


async def test_a_full_table_does_not_hide_a_listener(private: Path) -> None:
    """The process that could not be reached for lack of descriptors is asked the next time."""
    async with serving(private) as server:
        discovery = Discovery(private)
        discovery.open()
        await trio.sleep(0.15)  # until the clock of the directories has ticked
        reasons = []
        for room in range(1, 5):
            with full_table(room):
                found = await discovery.announce(("127.0.0.1", 9), server.address, soon())
                reasons.append(found)
                if not isinstance(found, FallbackReason):
                    found.close()
        assert FallbackReason.OUT_OF_RESOURCES in reasons
        assert FallbackReason.PEER_NOT_CAPABLE not in reasons
        found = await discovery.announce(("127.0.0.1", 9), server.address, soon())
        assert not isinstance(found, FallbackReason)
        found.close()
        discovery.close()
