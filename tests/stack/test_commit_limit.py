"""If the system refuses memory, a connection falls back to TCP and leaks nothing."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SoftRnic
from trio_smc.host import overcommit, private_directory
from trio_smc.host.descriptors import Closer
from trio_smc.rnic import memory
from trio_smc.rnic.poller import NoThread, Poller
from trio_smc.rnic.soft.ring import RING_SIZE

CONFIG = Config(tcp_option="off", receive_buffer=1 << 20)
TEXT = b"bytes" * 1000


class Limit:
    """A commit limit that refuses allocations of exactly ``refused`` bytes."""

    def __init__(self) -> None:
        self.refused = 0
        self.refusals = 0
        self._allocate = os.posix_fallocate

    def __call__(self, fd: int, start: int, length: int) -> None:
        if length == self.refused:
            self.refusals += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._allocate(fd, start, length)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Let the software RNIC assume that vm.overcommit_memory is 2."""
    limit = Limit()
    monkeypatch.setattr(memory, "may_refuse_pages", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", limit)
    return limit


async def pair(
    listener: trio_smc.SmcListener, port: int
) -> tuple[trio_smc.SmcStream, trio_smc.SmcStream]:
    """Open a connection and send data in both directions.

    Returns:
      The client's stream and the server's.
    """
    found: list[trio_smc.SmcStream] = []

    async def accept() -> None:
        found.append(await listener.accept())

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            client = await trio_smc.open_stream("127.0.0.1", port)
        for one, other in ((client, found[0]), (found[0], client)):
            await one.send_all(TEXT)
            came = b""
            while len(came) < len(TEXT):
                came += await other.receive_some()
            assert came == TEXT
    return client, found[0]


@pytest.mark.parametrize("refused", [RING_SIZE, 1 << 20])
async def test_a_first_contact_without_memory_uses_tcp(limit: Limit, refused: int) -> None:
    async with trio_smc.open_stack(CONFIG) as stack:
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        limit.refused = refused
        for stream in await pair(listener, port):
            assert stream.mode is Mode.TCP
            assert stream.fallback is not None
            assert stream.fallback.reason is FallbackReason.OUT_OF_RESOURCES
            await stream.aclose()
        assert limit.refusals
        assert not stack.runtime.groups.groups
        limit.refused = 0
        for stream in await pair(listener, port):
            assert stream.mode is Mode.SMC_R
            await stream.aclose()
        await listener.aclose()


async def test_a_later_connection_without_memory_uses_tcp(limit: Limit) -> None:
    async with trio_smc.open_stack(CONFIG):
        [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        first = await pair(listener, port)
        limit.refused = 1 << 20
        second = await pair(listener, port)
        assert [stream.mode for stream in (*first, *second)] == ["smc-r"] * 2 + ["tcp"] * 2
        assert {stream.fallback and stream.fallback.reason for stream in second} == {
            FallbackReason.OUT_OF_RESOURCES
        }
        await first[0].send_all(TEXT)
        assert await first[1].receive_some(len(TEXT))
        limit.refused = 0
        third = await pair(listener, port)
        assert {stream.mode for stream in third} == {Mode.SMC_R}
        for stream in (*first, *second, *third):
            await stream.aclose()
        await listener.aclose()


def test_other_users_are_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a commit limit another user could punch holes into shared memory."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        group = os.getegid()
        monkeypatch.setattr(private_directory, "is_same_user", lambda _: False)
        monkeypatch.setattr(private_directory, "commit_is_limited", lambda: False)
        assert private_directory.is_admitted(one, group)
        monkeypatch.setattr(private_directory, "commit_is_limited", lambda: True)
        assert not private_directory.is_admitted(one, group)
        monkeypatch.setattr(private_directory, "is_same_user", lambda _: True)
        assert private_directory.is_admitted(one, group)


def test_no_thread_is_started_without_memory(
    monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    """`threading.Thread.start` would wait forever for a thread that has no memory to start."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    def start(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} was started")

    rnic = SoftRnic()
    rnic.open(runtime_directory / "smc")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closer = Closer("test")
    with monkeypatch.context() as patch:
        patch.setattr(overcommit, "commit_is_limited", lambda: True)
        patch.setattr(mmap, "mmap", refuse)
        patch.setattr(threading.Thread, "start", start)
        assert not overcommit.can_start_thread()
        with pytest.raises(NoThread, match="no memory"):
            Poller(rnic, lambda: None)
        closer.run(ours.close)
        assert ours.fileno() >= 0
    closer.join()  # memory is available again
    assert ours.fileno() < 0
    theirs.close()
    rnic.close()
