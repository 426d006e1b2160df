"""Same-host discovery: one end gives up, and both ends come to the same result."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import (
    SHORT,
    Pair,
    announce,
    bound,
    claimed,
    deadline_after,
    serving,
    short_path,
    sockets_below,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.wire.clc import EYE_CATCHER


async def test_a_client_that_withdraws_before_the_answer(private: Path) -> None:
    async with claimed(private) as pair:
        assert not pair.announcement.withdraw()
        assert not pair.claim.accept()
        assert not await pair.claim.confirm(pair.connection, deadline_after())


async def test_a_client_that_withdraws_after_the_answer_must_send_clc(private: Path) -> None:
    """The server waits for a CLC message.  If the client has lost its RNIC, it sends a Decline."""
    async with claimed(private) as pair:
        pair.claim.accept()
        assert pair.announcement.withdraw()
        await pair.client.send(b"C")
        pair.announcement.close()
        assert await pair.claim.confirm(pair.connection, deadline_after())


async def test_a_client_that_denies_a_connection_and_sends_nothing(private: Path) -> None:
    """The connection is not the announced one; no byte over TCP wakes the server."""
    async with claimed(private) as pair, trio.open_nursery() as nursery:

        async def close() -> None:
            await trio.testing.wait_all_tasks_blocked()
            pair.announcement.close()

        nursery.start_soon(close)
        with trio.fail_after(PATIENCE):
            assert not await pair.claim.confirm(pair.connection, deadline_after())


async def test_a_client_that_withdraws_before_the_claim(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        announcement.close()
        announcement.close()
        connection, claim = await server.accept()
        with connection:
            assert claim is None


async def test_a_client_that_reaches_its_deadline(private: Path) -> None:
    async with claimed(private) as pair:
        assert await pair.client_result(SHORT) is FallbackReason.PEER_NOT_CAPABLE
        assert not await pair.server_result()


async def test_a_server_that_reaches_its_deadline(private: Path) -> None:
    """The server cannot know if the client's next bytes are CLC: no fallback (RFC 7609, C.5)."""
    async with claimed(private) as pair:
        with pytest.raises(TimeoutError):
            await pair.claim.confirm(pair.connection, deadline_after(SHORT))
        # ACCEPTED has arrived, but the client has not read it.
        assert await pair.client_result() is None


async def test_a_denial_is_known_before_the_bytes_behind_it(private: Path) -> None:
    """The denial and application data that looks like CLC arrive before the server reads."""
    async with claimed(private) as pair:
        pair.claim.accept()
        pair.announcement.close()
        await pair.client.send(EYE_CATCHER)
        assert not await pair.claim.confirm(pair.connection, deadline_after())


@pytest.mark.parametrize(
    ("reason", "arrives_as"),
    [
        (FallbackReason.HANDSHAKE_LIMIT, FallbackReason.HANDSHAKE_LIMIT),
        (FallbackReason.DIRECTORY_UNUSABLE, FallbackReason.DIRECTORY_UNUSABLE),
        (FallbackReason.DECLINED, FallbackReason.PEER_NOT_CAPABLE),  # DECLINED has no code
    ],
)
async def test_a_server_that_refuses(
    reason: FallbackReason, arrives_as: FallbackReason, private: Path
) -> None:
    async with claimed(private) as pair:
        pair.claim.refuse(reason)
        pair.claim.refuse(reason)
        assert await pair.announcement.accepted(deadline_after()) is arrives_as
        assert not await pair.claim.confirm(pair.connection, deadline_after())


async def test_a_publication_that_ends_drops_its_announcements(private: Path) -> None:
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        server.publication.close()
        server.publication.close()
        assert sockets_below(private) == []
        assert await announcement.accepted(deadline_after()) is FallbackReason.PEER_NOT_CAPABLE


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


@pytest.mark.parametrize("stacks", [1, 2])
async def test_two_announcements_of_one_connection(stacks: int, private: Path) -> None:
    """Two sockets may share a port.  The second announcement fails, and its socket uses another
    port."""
    one = Discovery(private)
    other = one if stacks == 1 else Discovery(private)
    async with serving(private) as server, bound() as client:
        first = await announce(one, client, server.address)
        assert other.announce(client.getsockname(), server.address, client) is None
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await start_smc_r(Pair(client, first, connection, claim))


@pytest.mark.parametrize("impatient", [0, 1, 2])
async def test_of_three_that_wait_one_gives_up(impatient: int, private: Path) -> None:
    """The waits use the timers of a stack."""
    timers = Timers(trio.current_time, lambda: None)
    discovery = Discovery(private, timers)
    answers: dict[int, FallbackReason | None] = {}

    async def wait(number: int, pair: Pair, deadline: float) -> None:
        with pair.announcement:
            answers[number] = await pair.announcement.accepted(deadline)

    async with (
        claimed(private, discovery=discovery) as first,
        claimed(private, discovery=discovery) as second,
        claimed(private, discovery=discovery) as third,
        trio.open_nursery() as nursery,
    ):
        for number, pair in enumerate((first, second, third)):
            deadline = deadline_after(SHORT) if number == impatient else deadline_after()
            nursery.start_soon(wait, number, pair, deadline)
        while impatient not in answers:
            await trio.sleep(SHORT / 10)
            timers.run_due()
        assert answers == {impatient: FallbackReason.PEER_NOT_CAPABLE}
        for number, pair in enumerate((first, second, third)):
            if number != impatient:
                pair.claim.accept()
    assert answers.pop(impatient) is FallbackReason.PEER_NOT_CAPABLE
    assert set(answers.values()) == {None}


async def test_a_denial_with_another_token_is_ignored(private: Path) -> None:
    """Every process of the user can send this datagram."""
    async with claimed(private) as pair:
        pair.claim.accept()
        (name,) = sockets_below(private)
        with short_path(name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
            raw.sendto(messages.not_mine(bytes(8)), path)
        await start_smc_r(pair)


async def test_an_announcement_that_is_cancelled_ends_the_wait(private: Path) -> None:
    async with claimed(private) as pair, trio.open_nursery() as nursery:

        async def wait() -> None:
            reason = await pair.announcement.accepted(deadline_after())
            assert reason is FallbackReason.PEER_NOT_CAPABLE

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        pair.announcement.cancel()
