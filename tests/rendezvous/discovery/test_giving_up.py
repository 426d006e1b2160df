"""Same-host discovery: whoever gives up, both ends know the same."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import (
    SHORT,
    Both,
    announce,
    both_go,
    bound,
    claimed,
    serving,
    sockets_below,
    soon,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages, publication
from trio_smc.rendezvous.discovery.publication import Announced, Claim, Claims, Client
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery


async def test_a_client_that_withdraws(private: Path) -> None:
    async with claimed(private) as both:
        both.announcement.close()
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_client_that_withdraws_and_lets_the_server_speak_first(private: Path) -> None:
    """Nothing comes over TCP that would wake the server."""
    async with claimed(private) as both, trio.open_nursery() as nursery:

        async def withdraw() -> None:
            await trio.testing.wait_all_tasks_blocked()
            both.announcement.close()

        nursery.start_soon(withdraw)
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_client_that_withdraws_before_the_claim(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        announcement.close()
        announcement.close()
        connection, claim = await server.accept()
        with connection:
            # Found before the withdrawal behind it was read: then that ends it.
            assert claim is None or not await claim.confirm(connection, soon())


async def test_a_client_that_is_tired_of_waiting(private: Path) -> None:
    async with claimed(private) as both:
        assert await both.client_says(SHORT) is FallbackReason.PEER_NOT_CAPABLE
        assert not await both.server_says()


async def test_a_server_that_is_tired_of_waiting(private: Path) -> None:
    """It does not know what the client is going to say: no fallback (RFC 7609, C.5)."""
    async with claimed(private) as both:
        with pytest.raises(TimeoutError):
            await both.claim.confirm(both.connection, soon(SHORT))
        # ACCEPTED is there to be read.
        assert await both.client_says() is None


async def test_bytes_of_an_application_come_after_a_withdrawal(private: Path) -> None:
    """Both are there when the server looks at the TCP connection for the first time."""
    async with claimed(private) as both:
        assert await both.client_says(0) is FallbackReason.PEER_NOT_CAPABLE
        assert not await both.server_says()


async def test_a_client_whose_queue_is_full_ends_its_unix_connection(private: Path) -> None:
    async with claimed(private) as both:
        (server,) = both.announcement.asked
        with contextlib.suppress(BlockingIOError):
            while True:
                server.connection.send(messages.withdraw(bytes(36)))
        assert await both.client_says(0) is FallbackReason.PEER_NOT_CAPABLE
        assert not server.is_open
        assert not await both.server_says()


@pytest.mark.parametrize(
    ("reason", "arrives_as"),
    [
        (FallbackReason.HANDSHAKE_LIMIT, FallbackReason.HANDSHAKE_LIMIT),
        (FallbackReason.DIRECTORY_UNUSABLE, FallbackReason.DIRECTORY_UNUSABLE),
        (FallbackReason.DECLINED, FallbackReason.PEER_NOT_CAPABLE),  # has no code
    ],
)
async def test_a_server_that_refuses(
    reason: FallbackReason, arrives_as: FallbackReason, private: Path
) -> None:
    async with claimed(private) as both:
        both.claim.refuse(reason)
        both.claim.refuse(reason)
        assert await both.announcement.accepted(soon()) is arrives_as
        assert not await both.claim.confirm(both.connection, soon())


async def test_a_publication_that_ends_drops_its_announcements(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        server.publication.close()
        server.publication.close()
        assert sockets_below(private) == []
        assert await announcement.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE


async def test_a_cancelled_nursery_removes_the_publication(private: Path) -> None:
    async with trio.open_nursery() as nursery:
        Discovery(private).publish(("127.0.0.1", 4), nursery)
        assert len(sockets_below(private)) == 1
        nursery.cancel_scope.cancel()
    assert sockets_below(private) == []


async def test_a_publication_closed_before_its_task_ran(private: Path) -> None:
    async with trio.open_nursery() as nursery:
        Discovery(private).publish(("127.0.0.1", 4), nursery).close()
    assert sockets_below(private) == []


async def test_an_announcement_that_no_connection_follows_is_forgotten(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "_PENDING_TIMEOUT", 0)
    asking = Discovery(private)
    async with serving(private) as server, bound() as one, bound() as two:
        first = await announce(asking, one, server.address)
        second = await announce(asking, two, server.address)
        await trio.testing.wait_all_tasks_blocked()
        (client,) = server.publication.clients.values()
        server.publication.hear_all(client)
        assert list(server.publication.claims.pending) == [second.key]
        first.close()
        second.close()
        server.publication.hear_all(client)
        assert server.publication.claims.pending == {}
        assert client.pending == set()


@pytest.mark.parametrize("stacks", [1, 2])
async def test_two_announcements_of_one_connection(stacks: int, private: Path) -> None:
    """Sockets may share a port, and one of them connects: who announced it nobody can tell."""
    one = Discovery(private)
    other = one if stacks == 1 else Discovery(private)
    async with serving(private) as server, bound() as client:
        first = await announce(one, client, server.address)
        second = await other.announce(client.getsockname(), server.address, soon(), client)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert await first.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE
            if stacks == 1:
                assert second is FallbackReason.PEER_NOT_CAPABLE
                assert claim is None or not await claim.confirm(connection, soon())
            else:
                assert claim is None
                assert isinstance(second, Announcement)
                assert await second.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE


@pytest.mark.parametrize("connects", ["first", "second"])
async def test_an_announcement_of_a_connection_that_was_accepted(
    connects: str, private: Path
) -> None:
    """The other one, which cannot connect, withdraws; whose connection it was is answered."""
    async with claimed(private) as both:
        again = await announce(private, both.client, both.connection.getsockname())
        if connects == "first":
            again.close()
            await both_go(both)
        else:
            both.announcement.close()
            assert not await both.claim.confirm(both.connection, soon())
            assert await again.accepted(soon()) is FallbackReason.PEER_NOT_CAPABLE


@pytest.mark.parametrize("impatient", [0, 1, 2])
async def test_of_three_who_wait_one_gives_up(impatient: int, private: Path) -> None:
    """A stack's own task ends the wait, of the one that reads for all or of another."""
    asking = Discovery(private)
    asking.open()
    answers: dict[int, FallbackReason | None] = {}

    async def wait(number: int, both: Both, deadline: float) -> None:
        answers[number] = await both.announcement.accepted(deadline)

    async with (
        claimed(private, asking=asking) as first,
        claimed(private, asking=asking) as second,
        claimed(private, asking=asking) as third,
        trio.open_nursery() as background,
    ):
        background.start_soon(asking.run)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            for number, both in enumerate((first, second, third)):
                deadline = soon(SHORT) if number == impatient else soon()
                nursery.start_soon(wait, number, both, deadline)
                await trio.testing.wait_all_tasks_blocked()
            while impatient not in answers:  # noqa: ASYNC110
                await trio.sleep(SHORT / 10)
            assert answers == {impatient: FallbackReason.PEER_NOT_CAPABLE}
            for number, both in enumerate((first, second, third)):
                if number != impatient:
                    both.claim.accept()
        assert answers.pop(impatient) is FallbackReason.PEER_NOT_CAPABLE
        assert set(answers.values()) == {None}
        background.cancel_scope.cancel()
    asking.close()


def test_another_clients_withdrawal_is_not_heard() -> None:
    """Every process of the user can say that it withdraws a connection."""
    key = bytes(range(36))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        client, stranger = Client(ours), Client(theirs)
        claims = Claims()
        unused: Any = None
        claim = claims.taken[key] = Claim(unused, Announced(client, key))
        claims.withdrawn(stranger, key)
        assert not claim.withdrawn
        claims.withdrawn(client, key)
        assert claim.withdrawn
