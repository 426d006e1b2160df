"""The sockets of announcements are used again, and a late answer counts for no other one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import (
    agree,
    announce,
    bound,
    claimed,
    names_below,
    reached,
    serving,
)
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery
from trio_smc.rnic.soft.messages import VERSION


def idle_names(private: Path) -> list[Path]:
    return [path for path in private.glob("idle*/*") if path.is_socket()]


def datagram_sockets() -> set[str]:
    """The inodes of this process's Unix datagram sockets."""
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    datagram = {f"socket:[{words[6]}]" for words in table if words[4] == "0002"}
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return found & datagram


@contextlib.contextmanager
def a_client(private: Path) -> Iterator[Discovery]:
    asking = Discovery(private)
    try:
        yield asking
    finally:
        asking.close()


async def test_one_socket_after_the_other(private: Path) -> None:
    async with serving(private) as server:
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            before, name = datagram_sockets(), idle_names(private)
            assert len(name) == 1
            for _ in range(3):
                await agree(asking, server, server.address)
                assert names_below(private) == []
                assert idle_names(private) == name
                assert datagram_sockets() == before
        assert idle_names(private) == []


@pytest.mark.parametrize("kind", ["accepted", "refused"])
async def test_a_late_answer_to_another_connection(private: Path, kind: str) -> None:
    """It arrives before the connection is open, or instead of an answer."""
    async with serving(private) as server:
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            [idle] = idle_names(private)
            other = messages.four_tuple(("127.0.0.1", 1), server.address)
            late = (
                messages.accepted(bytes(8), VERSION, other)
                if kind == "accepted"
                else messages.refused(FallbackReason.NO_RNIC, other)
            )
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, reached(idle) as path:
                sender.sendto(late, path)
                async with bound() as client:
                    announcement = await announce(asking, client, server.address)
                    assert not announcement.is_too_late()
                    await client.connect(server.address)
                    sender.sendto(late, path)
                    connection, claim = await server.accept()
                    with connection:
                        assert claim is not None
                        assert claim.accept()
                        assert await announcement.accepted(trio.current_time() + 60) is None
                        assert announcement.mismatch("software") is None
                        claim.forget()
                    announcement.close()


async def test_an_answer_to_another_connection_is_none(private: Path) -> None:
    async with claimed(private) as both:
        [name] = names_below(private)
        other = messages.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 2))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, reached(name) as path:
            sender.sendto(messages.accepted(bytes(8), VERSION, other), path)
        both.claim.refuse(FallbackReason.NO_RNIC)
        reason = await both.announcement.accepted(trio.current_time() + 60)
        assert reason is FallbackReason.NO_RNIC


async def test_a_withdrawn_announcement_leaves_no_socket(private: Path) -> None:
    """Its socket was shut down, so a server could not send to it any more."""
    async with serving(private) as server:
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            before = datagram_sockets()
            async with bound() as client:
                announcement = await announce(asking, client, server.address)
                assert datagram_sockets() == before, "an idle one serves"
                assert not announcement.withdraw()
            assert len(before - datagram_sockets()) == 1
            assert idle_names(private) == names_below(private) == []
            await agree(asking, server, server.address)


async def test_a_name_that_another_announcement_has(private: Path) -> None:
    """No second one with these addresses, although there is an idle socket."""
    async with serving(private) as server:
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            with a_client(private) as other:
                first = other.announce(("127.0.0.1", 1), server.address)
                assert isinstance(first, Announcement)
                assert asking.announce(("127.0.0.1", 1), server.address) is None
                first.close()
                second = asking.announce(("127.0.0.1", 1), server.address)
                assert isinstance(second, Announcement)
                second.close()


@pytest.mark.parametrize("removed", ["names", "directory"])
async def test_a_cleaner_removes_idle_names(private: Path, removed: str) -> None:
    async with serving(private) as server:
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            before = datagram_sockets()
            [idle] = idle_names(private)
            if removed == "names":
                idle.unlink()
            else:
                shutil.rmtree(idle.parent)
            for _ in range(3):
                await agree(asking, server, server.address)
            assert len(datagram_sockets()) <= len(before)


async def test_idle_names_of_a_killed_client(private: Path) -> None:
    async with serving(private) as server:
        dead = Discovery(private)
        await agree(dead, server, server.address)
        [idle] = idle_names(private)
        dead.abandon()  # as the kernel closes the descriptors of a process that is killed
        os.utime(idle, (0, 0))
        with a_client(private) as asking:
            await agree(asking, server, server.address)
            assert idle not in idle_names(private)


async def test_no_idle_socket_in_a_forked_child(private: Path) -> None:
    async with serving(private) as server:
        with a_client(private) as asking:
            before = datagram_sockets()
            await agree(asking, server, server.address)
            kept = datagram_sockets() - before
            assert len(kept) >= 1
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    asking.abandon()
                    os._exit(len(datagram_sockets() & kept))
                os._exit(99)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
            await agree(asking, server, server.address)
