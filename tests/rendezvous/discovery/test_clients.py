"""Same-host discovery: datagrams that other processes send to a listener."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.rendezvous.discovery.world import agree, claimed, serving, short_path, sockets_below
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import announcing, messages
from trio_smc.rendezvous.discovery.messages import Kind
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery


def send(private: Path, packet: bytes) -> None:
    """Send a datagram to the only listener."""
    (name,) = sockets_below(private)
    with short_path(name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        raw.setblocking(False)
        raw.sendto(packet, path)


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"x",
        b"TSMC",
        b"GET / HTTP/1.0\r\n\r\n",
        bytes(44),
        messages.accepted(bytes(8), 4),
        messages.refused(FallbackReason.NO_RNIC),
        messages.not_mine(bytes(8)),
        messages.not_mine(bytes(8))[:-1],
        messages.prove(bytes(36), bytes(16)),
        messages.prove(bytes(36), bytes(15)),
        struct.pack(">4sBBBB", b"TSMC", 3, 2, 8, 0) + bytes(36),
        struct.pack(">4sBBBB", b"TSMC", 5, 5, 99, 0) + bytes(36),
        struct.pack(">4sBBBB", b"TSMC", 7, 9, Kind.PROVE, 0) + bytes(52),
        random.Random(7).randbytes(50_000),
    ],
)
async def test_garbage_is_ignored(packet: bytes, private: Path) -> None:
    async with serving(private) as server:
        send(private, packet)
        await trio.testing.wait_all_tasks_blocked()
        await agree(private, server, server.address)
        assert server.publication.claims == {}
        assert server.publication.probes == set()


async def test_a_sender_that_never_stops(private: Path) -> None:
    """A listener receives a limited number of datagrams, and then lets other tasks run."""
    async with serving(private) as server, trio.open_nursery() as nursery:

        async def flood() -> None:
            while True:
                with contextlib.suppress(BlockingIOError):
                    send(private, b"?")
                await trio.lowlevel.checkpoint()

        nursery.start_soon(flood)
        with trio.fail_after(PATIENCE):
            for _ in range(5):
                await agree(private, server, server.address)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("limit", "most"),
    [(256, 64), (1024, 256), (20_000, 4096), (1, 1), (resource.RLIM_INFINITY, 4096)],
)
def test_announcements_leave_descriptors_to_the_program(
    private: Path, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert Discovery(private).most_open == most


async def test_an_announcement_waits_for_a_place(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "MOST_OPEN", 1)
    discovery = Discovery(private)
    async with serving(private) as server, trio.open_nursery() as nursery:
        first = discovery.announce(("127.0.0.1", 1), server.address, None, required=False)
        assert isinstance(first, Announcement)
        assert discovery.is_full
        second = discovery.announce(("127.0.0.1", 2), server.address, None, required=False)
        assert second is FallbackReason.OUT_OF_RESOURCES
        waited: list[bool] = []

        async def wait() -> None:
            await discovery.wait_for_place(required=True)
            waited.append(not discovery.is_full)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert waited == []
        first.close()
        await trio.testing.wait_all_tasks_blocked()
        assert waited == [True]


async def test_a_program_that_can_import_nothing_more_listens(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example after a change of its user or its root directory, or without descriptors."""
    monkeypatch.setitem(sys.modules, "resource", None)
    async with serving(private) as server:
        await agree(private, server, server.address)


async def test_a_handshake_that_is_over_keeps_no_other_from_spinning(private: Path) -> None:
    """While one task sleeps, no other task spins (`rnic.spinner.Spinner.sleeping`)."""
    async with serving(private) as server:
        await agree(private, server, server.address)
        assert server.publication.answerer.spinner.sleeping == 0


async def test_a_claim_that_is_refused_twice(private: Path) -> None:
    async with claimed(private) as pair:
        pair.claim.refuse(FallbackReason.NO_RNIC)
        pair.claim.refuse(FallbackReason.NO_RNIC)
        assert await pair.client_result() is FallbackReason.NO_RNIC
        assert not await pair.server_result()
