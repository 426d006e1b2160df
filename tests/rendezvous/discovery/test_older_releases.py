"""Processes of release 0.1.0 and of this release on one host: both use TCP and know the reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

import trio_smc
from tests.rendezvous.discovery.test_processes import Worker, worker
from tests.rendezvous.discovery.world import (
    bound,
    deadline_after,
    serving,
    short_path,
    signposts_below,
    sockets_below,
)
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, SmcUnavailable
from trio_smc.host import private_directory
from trio_smc.rendezvous.discovery import lookup, messages, older_releases
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery

TREE = Path(__file__).parents[2] / "golden" / "release-0.1.0.tar.xz"
QUICK = 5.0
"""Seconds for one connection on a busy machine.  An older client waits 10 s for an answer."""
MISMATCH = FallbackReason.LOCAL_VERSION_MISMATCH


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the older release."""
    place = tmp_path_factory.mktemp("release")
    with tarfile.open(TREE) as archive:
        archive.extractall(place, filter="data")
    return place


@contextlib.asynccontextmanager
async def older(release: Path, private: Path, *arguments: object) -> AsyncIterator[Worker]:
    """Run a process of the older release until the block ends."""
    os.makedirs(private, mode=0o700, exist_ok=True)
    program = Path(__file__).with_name("older_process.py")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    process = await trio.lowlevel.open_process(
        [sys.executable, program, release, private, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Worker(process)
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            with trio.move_on_after(PATIENCE):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await process.stdout.aclose()


async def reason_of(stack: trio_smc.Stack, port: int) -> FallbackReason | None:
    """Open one connection and return its reason for TCP.  Fails if this takes long."""
    with trio.fail_after(QUICK):
        async with await stack.open_stream("127.0.0.1", port) as stream:
            return None if stream.fallback is None else stream.fallback.reason


# --- a listener of the older release -------------------------------------------------------------


async def test_a_client_recognises_an_older_listener(release: Path, private: Path) -> None:
    """The client announces nothing, and the older process has a plain TCP connection."""
    async with older(release, private, "serve", 0) as server, trio_smc.open_stack() as stack:
        port = int(await server.line())
        [entry] = sockets_below(private)
        for _ in range(3):
            assert await reason_of(stack, port) is MISMATCH
            assert await server.line() == "plain"
        assert sockets_below(private) == [entry], "the name of a live process was removed"
        with pytest.raises(SmcUnavailable) as caught:
            await stack.open_stream("127.0.0.1", port, config=Config(require_smc=True))
        assert caught.value.fallback.reason is MISMATCH


async def test_an_older_listener_comes_and_goes(
    release: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older process can start without a change of the directory that a client checks."""
    moment = 0.0
    monkeypatch.setattr(lookup, "now", lambda timers: moment)
    discovery = Discovery(private)
    async with serving(private), older(release, private, "serve", 0) as first:
        port = int(await first.line())

        def found() -> object:
            return discovery.announce(("127.0.0.1", 1), ("127.0.0.1", port))

        assert found() is MISMATCH
        first.process.kill()
        await first.process.wait()
        moment += lookup.EMPTY_HOLDS
        assert found() is FallbackReason.PEER_NOT_CAPABLE
        assert len(sockets_below(private)) == 1, "the name of the dead process was not removed"
        async with older(release, private, "serve", port) as second:
            await second.line()
            moment += lookup.EMPTY_HOLDS
            assert found() is MISMATCH


async def test_releases_that_share_a_port(release: Path, private: Path) -> None:
    """With a listener of each release, the process that accepts determines the reason."""
    async with worker(private) as (newer, port), older(release, private, "serve", port) as server:
        assert await server.line() == str(port)
        os.kill(newer.process.pid, 9)
        await newer.process.wait()
        async with trio_smc.open_stack() as stack:
            assert await reason_of(stack, port) is MISMATCH


async def test_a_silent_older_process_on_a_shared_port(private: Path) -> None:
    """An older process shares the port with a listener of this release, and accepts."""
    discovery = Discovery(private)
    async with serving(private) as server, bound() as client:
        place = sockets_below(private)[0].parent
        with forged_listener(place / "1-0"), trio.fail_after(PATIENCE):
            announced = discovery.announce(client.getsockname(), server.address, client)
            assert isinstance(announced, Announcement)
            await client.connect(server.address)
            with server.plain.accept()[0]:
                assert await announced.accepted(deadline_after()) is MISMATCH
            (place / "1-0").unlink()


def make_place(place: Path, mode: int) -> None:
    """Make the directory of an address, as a publication does."""
    place.mkdir(parents=True, exist_ok=True)
    for each in (place, place.parent, place.parent.parent):
        each.chmod(mode)


def remove_place(place: Path) -> None:
    shutil.rmtree(place)


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, Path.mkdir, lambda p: p.symlink_to("/")])
async def test_entries_that_are_no_sockets(private: Path, make: Callable[[Path], object]) -> None:
    discovery = Discovery(private)
    async with serving(private) as server:
        [entry] = sockets_below(private)
        place = entry.parent
        server.publication.close()
        make_place(place, 0o700)
        make(place / "1-0")
        found = discovery.announce(("127.0.0.1", 1), server.address)
        assert found is FallbackReason.PEER_NOT_CAPABLE
        remove_place(place)


# --- a client of the older release ---------------------------------------------------------------


async def test_an_older_client_is_refused(release: Path, private: Path) -> None:
    async with serving(private) as server:
        port = server.address[1]
        async with older(release, private, "connect", port, port, port) as client:
            with trio.fail_after(QUICK + PATIENCE):
                assert [await client.line() for _ in range(3)] == [str(MISMATCH)] * 3
        assert len(sockets_below(private)) == len(signposts_below(private)) == 1
    assert sockets_below(private) == signposts_below(private) == []


async def test_an_older_client_of_a_stack(release: Path, private: Path) -> None:
    """The listener serves clients of this release as usual."""
    async with trio_smc.open_stack() as stack:
        [listener] = await stack.open_listeners(0, host="127.0.0.1")
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, lambda stream: stream.aclose(), [listener])
            port = listener.socket.getsockname()[1]
            async with older(release, private, "connect", port) as client:
                with trio.fail_after(QUICK + PATIENCE):
                    assert await client.line() == str(MISMATCH)
            assert await reason_of(stack, port) is None
            nursery.cancel_scope.cancel()


async def test_an_older_client_reaches_a_listener_of_its_release(
    release: Path, private: Path
) -> None:
    """The signpost of another process on the port does not prevent the agreement."""
    async with worker(private) as (_, port), older(release, private, "serve", port) as server:
        await server.line()
        async with older(release, private, "connect-briefly", *[port] * 4) as client:
            with trio.fail_after(PATIENCE):
                reasons = {await client.line() for _ in range(4)}
        assert reasons <= {"smc-r", str(MISMATCH)}, "a reason that the signpost must prevent"


async def test_the_signpost_of_a_killed_process_is_removed(private: Path) -> None:
    async with worker(private) as (server, port):
        assert len(signposts_below(private)) == 1
        os.kill(server.process.pid, 9)
        await server.process.wait()
    found = Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", port))
    assert found is FallbackReason.PEER_NOT_CAPABLE
    assert signposts_below(private) == []


def connected(name: Path) -> socket.socket:
    """A Unix connection to a signpost."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with short_path(name) as path:
        sock.connect(path)
    sock.setblocking(False)
    return sock


async def received(sock: socket.socket) -> bytes:
    with trio.fail_after(PATIENCE):
        await trio.lowlevel.wait_readable(sock)
    return sock.recv(100)


async def test_hostile_clients_of_a_signpost(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signpost disconnects silent clients after a while, and they delay no answer."""
    # Longer than a busy machine may suspend this process while the silent clients connect.
    monkeypatch.setattr(older_releases, "CLIENT_TIMEOUT", 1.0)
    answer = messages.refused(MISMATCH)
    async with serving(private):
        [name] = signposts_below(private)
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(connected(name)) for _ in range(older_releases.MAX_CLIENTS)
            ]
            await trio.testing.wait_all_tasks_blocked()
            excess = opened.enter_context(connected(name))
            assert await received(excess) == answer
            assert await received(excess) == b""
            for each in silent:
                assert await received(each) == b""
            garbage = opened.enter_context(connected(name))
            garbage.send(os.urandom(1000))
            assert await received(garbage) == answer
            with contextlib.suppress(ConnectionError):
                for _ in range(2 * older_releases.MAX_PACKETS):
                    with contextlib.suppress(BlockingIOError):
                        garbage.send(b"more")
                    await trio.lowlevel.checkpoint()
            sender = opened.enter_context(connected(name))
            with contextlib.suppress(PermissionError):  # Linux 6.16 refuses descriptors
                socket.send_fds(sender, [b"x"], [sender.fileno()])
            last = opened.enter_context(connected(name))
            last.send(b"x")
            assert await received(last) == answer


async def test_a_directory_that_a_group_shares(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases use no shared directory, and a member could forge an older listener."""
    monkeypatch.setattr(private_directory, "is_named", lambda path: True)
    os.mkdir(private)
    os.chown(private, -1, os.getegid())
    os.chmod(private, 0o3770)
    discovery = Discovery(private)
    async with serving(private) as server:
        [entry] = sockets_below(private)
        assert signposts_below(private) == []
        place = entry.parent
        server.publication.close()
        assert sockets_below(private) == []
        make_place(place, 0o2750)
        with forged_listener(place / "1-0"):
            found = discovery.announce(("127.0.0.1", 1), server.address)
            assert found is FallbackReason.PEER_NOT_CAPABLE
            (place / "1-0").unlink()


@contextlib.contextmanager
def forged_listener(name: Path) -> Iterator[None]:
    """A listening socket like that of older releases."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with short_path(name) as path:
            sock.bind(path)
        sock.listen()
        yield
