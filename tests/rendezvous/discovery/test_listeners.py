"""Same-host discovery: what listeners may answer a client."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import SHORT, sockets_below, soon
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import directory, messages
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery


class FakeListener:
    """A raw socket in the place of a publication, answering one client with given packets."""

    def __init__(self, private: Path, *answers: bytes, backlog: int = 5) -> None:
        self.name = directory.listener_name("127.0.0.1", 9, dual_stack=False)
        self.made = directory.NewSocket(private, self.name, backlog)
        self.answers = answers

    async def serve(self) -> None:
        await trio.lowlevel.wait_readable(self.made.listener)
        connection, _ = self.made.listener.accept()
        with connection:
            await trio.lowlevel.wait_readable(connection)
            connection.recv(100)
            for answer in self.answers:
                connection.send(answer)
            with contextlib.suppress(OSError):
                await trio.lowlevel.wait_readable(connection)

    def close(self) -> None:
        self.made.remove()
        self.made.listener.close()


NAME = messages.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", FallbackReason.PEER_NOT_CAPABLE),
        (b"HTTP/1.0 400 Bad Request", FallbackReason.PEER_NOT_CAPABLE),
        (messages.announce(NAME), FallbackReason.PEER_NOT_CAPABLE),
        (messages.accepted(NAME)[:-1], FallbackReason.PEER_NOT_CAPABLE),
        (
            struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.ACCEPTED, 0) + NAME,
            FallbackReason.LOCAL_VERSION_MISMATCH,
        ),
        (
            struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.REFUSED, 1),
            FallbackReason.LOCAL_VERSION_MISMATCH,
        ),
        (messages.refused(FallbackReason.NO_RNIC), FallbackReason.NO_RNIC),
        (messages.refused(FallbackReason.NO_RNIC, NAME), FallbackReason.NO_RNIC),
    ],
)
async def test_what_a_listener_may_answer(
    answer: bytes, reason: FallbackReason, private: Path
) -> None:
    fake = FakeListener(private, answer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.serve)
        there = ("127.0.0.1", 9)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), there, soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is reason
        nursery.cancel_scope.cancel()
    fake.close()


async def test_an_answer_for_a_connection_that_was_not_announced_is_ignored(private: Path) -> None:
    other = messages.four_tuple(("127.0.0.1", 2), ("127.0.0.1", 9))
    fake = FakeListener(private, messages.accepted(other), messages.accepted(NAME))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.serve)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 9), soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is None
        nursery.cancel_scope.cancel()
    fake.close()


async def test_a_listener_whose_backlog_stays_full(private: Path) -> None:
    fake = FakeListener(private, backlog=0)
    waiting = []
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(sockets_below(private)[0]))
        there = ("127.0.0.1", 9)
        outcome = await Discovery(private).announce(("127.0.0.1", 1), there, soon(SHORT))
        assert outcome is FallbackReason.PEER_NOT_CAPABLE
        # Once there is room again, a client that is still waiting gets through.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, fake.made.listener)
            found = await Discovery(private).announce(("127.0.0.1", 1), there, soon())
            assert isinstance(found, Announcement)
            found.close()
            nursery.cancel_scope.cancel()
    finally:
        for each in waiting:
            each.close()
        fake.close()


async def drain(listener: socket.socket) -> None:
    """Accept everybody."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        connection, _ = listener.accept()
        connection.close()
