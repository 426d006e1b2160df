"""Same-host discovery: datagrams to a client that waits, from listeners and other processes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import (
    SHORT,
    announce,
    bound,
    deadline_after,
    names_below,
    serving,
    short_path,
)
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import announcing, directory, messages
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery
from trio_smc.rnic.soft.messages import VERSION

HERE, THERE = ("127.0.0.1", 1), ("127.0.0.1", 9)


class FakeListener:
    """A socket that looks like a published listener, and a client's announcement to it."""

    def __init__(self, private: Path) -> None:
        name = directory.listener_name(*THERE, dual_stack=False)
        self.made = directory.NewSocket(private, name)
        announced = Discovery(private).announce(HERE, THERE)
        assert isinstance(announced, Announcement)
        self.announcement: Announcement = announced
        (self.name,) = names_below(private)

    def answer(self, *packets: bytes) -> None:
        with short_path(self.name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
            for each in packets:
                raw.sendto(each, path)

    def close(self) -> None:
        self.announcement.close()
        self.made.remove()
        self.made.socket.close()


ACCEPTED = messages.accepted(bytes(8), VERSION)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", FallbackReason.PEER_NOT_CAPABLE),
        (b"HTTP/1.0 400 Bad Request", FallbackReason.PEER_NOT_CAPABLE),
        (messages.not_mine(bytes(8)), FallbackReason.PEER_NOT_CAPABLE),
        (ACCEPTED[:-1], FallbackReason.PEER_NOT_CAPABLE),
        (struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.REFUSED, 1), "local-version-mismatch"),
        (messages.refused(FallbackReason.NO_RNIC), FallbackReason.NO_RNIC),
        (ACCEPTED, None),
        (ACCEPTED + b"of a later version", None),
    ],
)
async def test_each_answer_of_a_listener(
    answer: bytes, reason: FallbackReason | None, private: Path
) -> None:
    fake = FakeListener(private)
    fake.answer(answer)
    assert await fake.announcement.accepted(deadline_after(SHORT)) == reason
    fake.close()


@pytest.mark.parametrize(
    ("answer", "software", "roce"),
    [
        (ACCEPTED, None, None),
        (messages.accepted(bytes(8), VERSION + 1), FallbackReason.VERSION_MISMATCH, None),
        (
            struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.ACCEPTED, 0),
            FallbackReason.LOCAL_VERSION_MISMATCH,
            FallbackReason.LOCAL_VERSION_MISMATCH,
        ),
    ],
)
async def test_an_acceptance_by_another_release(
    answer: bytes,
    software: FallbackReason | None,
    roce: FallbackReason | None,
    private: Path,
) -> None:
    """The server still expects a CLC message, so the client has to send a Decline."""
    fake = FakeListener(private)
    fake.answer(answer)
    assert await fake.announcement.accepted(deadline_after()) is None
    assert fake.announcement.mismatch("software") is software
    assert fake.announcement.mismatch("roce") is roce
    fake.close()


async def test_invalid_datagrams_are_ignored(private: Path) -> None:
    fake = FakeListener(private)
    fake.answer(b"", b"?", messages.not_mine(bytes(8)), ACCEPTED)
    assert await fake.announcement.accepted(deadline_after()) is None
    fake.close()


async def test_an_acceptance_behind_a_refusal_counts(private: Path) -> None:
    """The two answers belong to two connections with the same addresses.  The server that has sent
    ACCEPTED expects a CLC message."""
    fake = FakeListener(private)
    fake.answer(messages.refused(FallbackReason.NO_RNIC), ACCEPTED)
    assert await fake.announcement.accepted(deadline_after()) is None
    fake.close()


async def test_an_empty_datagram_does_not_hide_the_answer_from_a_client_that_gives_up(
    private: Path,
) -> None:
    """The server expects a CLC message, and `withdraw` reports this to the client."""
    fake = FakeListener(private)
    fake.answer(b"", ACCEPTED)
    assert fake.announcement.withdraw()
    fake.close()


async def test_a_flood_ends_the_wait(private: Path) -> None:
    """The connection becomes plain TCP.  The server notices this, because its send fails."""
    fake = FakeListener(private)
    result: list[FallbackReason | None] = []

    async def wait() -> None:
        result.append(await fake.announcement.accepted(deadline_after()))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            for _ in range(announcing.MOST_IGNORED + 1):
                fake.answer(b"?")
                await trio.testing.wait_all_tasks_blocked()
                if result:
                    break
    assert result == [FallbackReason.PEER_NOT_CAPABLE]
    fake.close()


async def test_a_full_queue_is_no_answer(private: Path) -> None:
    """The server cannot send ACCEPTED, so both sides use plain TCP."""
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        (name,) = names_below(private)
        with short_path(name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
            raw.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    raw.sendto(b"?", path)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            assert not claim.accept()
            assert not await claim.confirm(connection, deadline_after())
            reason = await announcement.accepted(deadline_after(SHORT))
            assert reason is FallbackReason.PEER_NOT_CAPABLE


async def test_a_listener_that_dies_ends_the_wait(private: Path) -> None:
    fake = FakeListener(private)
    result: list[FallbackReason | None] = []

    async def wait() -> None:
        result.append(await fake.announcement.accepted(deadline_after()))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            fake.made.socket.close()
    assert result == [FallbackReason.PEER_NOT_CAPABLE]
    fake.close()


@pytest.mark.parametrize("news", ["bytes", "reset", "no name"])
async def test_the_wait_ends_when_no_answer_can_come(news: str, private: Path) -> None:
    """A plain server sends data, the process that has accepted ends, or a cleaner removes the
    name."""
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        await trio.lowlevel.wait_readable(server.plain)
        accepted, _ = server.plain.accept()
        if news == "bytes":
            accepted.send(b"220 ready")
        elif news == "reset":
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
        else:
            os.unlink(names_below(private)[0])
        with accepted, trio.fail_after(PATIENCE):
            assert await announcement.accepted(deadline_after()) is FallbackReason.PEER_NOT_CAPABLE


async def test_the_server_that_has_the_connection_answers_after_the_first_checks(
    private: Path,
) -> None:
    """The client checks at intervals that an answer is still possible, and continues to wait."""
    async with serving(private) as server, bound() as client, trio.open_nursery() as nursery:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)

        async def answer() -> None:
            await trio.sleep(3 * announcing.FIRST_CHECK)
            connection, claim = await server.accept()
            nursery.start_soon(hold, connection)
            assert claim is not None
            assert await claim.confirm(connection, deadline_after())

        async def hold(connection: trio.socket.SocketType) -> None:
            with connection:
                await trio.sleep_forever()

        nursery.start_soon(answer)
        with announcement:
            assert await announcement.accepted(deadline_after()) is None
        await client.send(b"C")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


def test_names_of_killed_listeners_are_removed_by_later_ones(private: Path) -> None:
    """The system chooses other ports for the next listeners, so they have other names."""
    ports = range(1000, 1012)
    child = os.fork()
    if not child:
        for port in ports:
            directory.NewSocket(private, listener_on(port))
        os._exit(0)
    os.waitpid(child, 0)
    living = directory.NewSocket(private, listener_on(2000))
    left = len(list(private.rglob("4-*-1???")))
    assert len(ports) - left > 1, "fewer names than listeners have to come"
    for port in range(2001, 2001 + len(ports)):
        made = directory.NewSocket(private, listener_on(port))
        made.remove()
        made.socket.close()
    assert [path.name for path in private.rglob("4-*")] == [listener_on(2000)]
    assert living.is_there()
    living.remove()
    living.socket.close()


def listener_on(port: int) -> str:
    return directory.listener_name("127.0.0.1", port, dual_stack=False)
