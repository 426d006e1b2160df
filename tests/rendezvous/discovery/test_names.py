"""Same-host discovery: the names of announcements, and other files in their place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.lingering import full_table
from tests.rendezvous.discovery.world import (
    Pair,
    agree,
    announce,
    bound,
    claimed,
    deadline_after,
    names_below,
    serving,
    short_path,
    sockets_below,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.host import private_directory
from trio_smc.rendezvous.discovery import messages, names, publication
from trio_smc.rendezvous.discovery.announcing import Announcement
from trio_smc.rendezvous.discovery.directory import namespace_name
from trio_smc.rendezvous.discovery.names import Names, announced_name
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.rnic.soft.messages import VERSION

DATAGRAM = socket.SOCK_DGRAM


def name_of(client: trio.socket.SocketType, address: tuple[str, int]) -> str:
    """The name of the announcement of a connection."""
    key = messages.four_tuple(client.getsockname()[:2], address)
    return announced_name(namespace_name(), key)


@pytest.mark.parametrize("kind", ["fifo", "file", "directory", "dead", "stream", "link"])
async def test_only_the_socket_of_a_client_is_an_announcement(
    kind: str, private: Path, tmp_path: Path
) -> None:
    """The server does not wait, uses plain TCP, and sends nothing to another service."""
    with (
        serving_socket(tmp_path) as stream,
        socket.socket(socket.AF_UNIX, DATAGRAM) as other,
    ):
        other.bind(str(tmp_path / "other"))
        other.setblocking(False)
        async with serving(private) as server, bound() as client:
            with open_names(private):
                pass
            place = private / names.KIND / name_of(client, server.address)
            if kind == "fifo":
                os.mkfifo(place)
            elif kind == "file":
                place.touch()
            elif kind == "directory":
                place.mkdir()
            elif kind == "dead":
                with socket.socket(socket.AF_UNIX, DATAGRAM) as dead, short_path(place) as path:
                    dead.bind(path)
            elif kind == "link":
                place.symlink_to(tmp_path / "other")
            else:
                os.link(stream, place)
            await client.connect(server.address)
            with trio.fail_after(PATIENCE):
                connection, claim = await server.accept()
                with connection:
                    if claim is not None:
                        assert not claim.accept()
                        assert not await claim.confirm(connection, deadline_after())
            place.rmdir() if kind == "directory" else place.unlink()
        with pytest.raises(BlockingIOError):
            other.recv(1)
    stream.unlink()
    (tmp_path / "other").unlink()


class serving_socket:  # noqa: N801 - a context manager
    """A listening Unix socket of another type.  The context manager returns its path."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "stream"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Path:
        self.sock.bind(str(self.path))
        self.sock.listen()
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()


@contextlib.contextmanager
def open_names(private: Path) -> Iterator[Names]:
    """Open all directories of announcements."""
    names = Names(private)
    names.open()
    try:
        yield names
    finally:
        names.close()


KILLED = """
import sys
from pathlib import Path
import trio
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.rnic.soft.messages import VERSION
where = sys.argv[2], int(sys.argv[3])

async def main():
    client = Discovery(Path(sys.argv[1]))
    kept = [client.announce(("127.0.0.1", port), where) for port in (1, 2, 3)]
    print(kept[0], flush=True)
    sys.stdin.read()

trio.run(main)
"""


def killed_after_announcing(private: Path, address: tuple[str, int]) -> None:
    """A process announces connections from ports 1 to 3, and is killed."""
    command = [sys.executable, "-c", KILLED, str(private), address[0], str(address[1])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert "Announcement" in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("finder", ["the next client", "the next stack"])
async def test_names_of_a_killed_process_are_removed(
    finder: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(private) as server:
        client = Discovery(private)
        before = client.announce(("127.0.0.1", 9), server.address)
        assert isinstance(before, Announcement)
        before.close()
        await trio.to_thread.run_sync(killed_after_announcing, private, server.address)
        assert len(names_below(private)) == 3
        # For a moment, a new name looks like that of a dead process, so no name is removed at once.
        assert client.announce(("127.0.0.1", 1), server.address) is None
        monkeypatch.setattr(private_directory, "STALE_AFTER", 0.0)
        if finder == "the next client":
            found = client.announce(("127.0.0.1", 1), server.address)
            left = 2
        else:
            found = Discovery(private).announce(("127.0.0.1", 4), server.address)
            left = 0
        assert isinstance(found, Announcement)
        found.close()
        assert len(names_below(private)) == left
        Discovery(private).announce(("127.0.0.1", 5), ("127.0.0.1", 1))
        for each in names_below(private):
            each.unlink()


async def test_a_server_that_was_killed_while_a_client_waits(private: Path) -> None:
    """The announced connection ends, so no answer can come."""
    async with claimed(private) as pair:
        pair.claim.forget()
        pair.connection.close()
        with trio.fail_after(PATIENCE):
            reason = await pair.announcement.accepted(deadline_after())
        assert reason is FallbackReason.PEER_NOT_CAPABLE


@pytest.mark.parametrize("removed", ["names", "directory", "everything"])
async def test_connections_after_a_cleaner_are_smc_r(
    removed: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old names are removed, and the next connections are SMC-R."""
    monkeypatch.setattr(publication, "NAME_INTERVAL", 0.01)
    discovery = Discovery(private)
    async with serving(private) as server:
        await agree(discovery, server, server.address)
        if removed == "names":
            async with bound() as client:
                announcement = await announce(discovery, client, server.address)
                await client.connect(server.address)
                names_below(private)[0].unlink()
                connection, claim = await server.accept()
                with connection, trio.fail_after(PATIENCE):
                    assert claim is None
                    reason = await announcement.accepted(deadline_after())
                    assert reason is FallbackReason.PEER_NOT_CAPABLE
        else:
            place = private / names.KIND
            kept = os.open(place, os.O_PATH)  # so that the kernel does not reuse the inode number
            shutil.rmtree(place if removed == "directory" else private)
            with trio.fail_after(PATIENCE):
                while not (sockets_below(private) and place.exists()):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            os.close(kept)
        for _ in range(3):
            await agree(discovery, server, server.address)


async def test_a_full_directory(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file system is full or read-only, a connection is TCP; afterwards the next is SMC-R."""

    def full(number: int, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async with serving(private) as server:
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EROFS):
            with monkeypatch.context() as patch:
                patch.setattr(Names, "listen", partial(full, number))
                outcome = Discovery(private).announce(("127.0.0.1", 1), server.address)
                if number == errno.EROFS:
                    assert outcome is FallbackReason.DIRECTORY_UNUSABLE
                elif number in (errno.ENOSPC, errno.EDQUOT):
                    assert outcome is FallbackReason.DIRECTORY_FULL
                else:
                    assert outcome is FallbackReason.OUT_OF_RESOURCES
        await agree(private, server, server.address)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_file_system_without_room(tmp_path: Path) -> None:
    """No inode is left for the name."""
    code = (
        "import os, subprocess, sys, trio\n"
        "from pathlib import Path\n"
        "place = sys.argv[1]\n"
        "mount = ['mount', '-t', 'tmpfs', '-o', 'nr_inodes=40', 'none', place]\n"
        "subprocess.run(mount, check=True)\n"
        "from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery\n"
        "async def main():\n"
        "    private, where = Path(place) / 'private', ('127.0.0.1', 9)\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        publication = Discovery(private).publish(where, nursery)\n"
        "        client, results = Discovery(private), []\n"
        "        for port in range(1, 60):\n"
        "            results.append(client.announce(('127.0.0.1', port), where))\n"
        "            if not isinstance(results[-1], Announcement):\n"
        "                break\n"
        "        print(results[-1], len(results) > 5)\n"
        "        results[0].close()\n"
        "        again = client.announce(('127.0.0.1', 99), where)\n"
        "        print(isinstance(again, Announcement))\n"
        "        publication.close()\n"
        "trio.run(main)\n"
    )
    alone = ["unshare", "-m"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*alone, sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["directory-full", "True", "True"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o177])
async def test_an_announcement_shows_if_the_client_requires_smc_r(
    umask: int, private: Path
) -> None:
    async with serving(private) as server, bound() as client:
        before = os.umask(umask)
        try:
            for required in (True, False):
                announcement = Discovery(private).announce(
                    client.getsockname(), server.address, client, required=required
                )
                assert isinstance(announcement, Announcement)
                with announcement, open_names(private) as found:
                    name = name_of(client, server.address)
                    (place,) = found.find(name)
                    assert found.is_required(place, name) is required
        finally:
            os.umask(before)


UNREAD = 8
"""Datagrams in the queue of each client; net.unix.max_dgram_qlen is 10 by default."""


def test_answers_that_are_not_read_keep_no_other_client_from_its_answer(private: Path) -> None:
    """The kernel charges the sending socket for each unread answer; its buffer holds about 278."""
    with open_names(private) as found, contextlib.ExitStack() as clients:
        for name in map(str, range(60)):
            clients.enter_context(found.listen(name))
            [directory] = found.find(name)
            assert [found.send(directory, name, b"?") for _ in range(UNREAD)] == [True] * UNREAD
        [directory] = found.find("0")
        assert not all(found.send(directory, "0", b"?") for _ in range(1000)), "never full"
        for name in map(str, range(60)):
            found.remove(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_server_that_has_become_another_user(private: Path) -> None:
    """The process cannot answer, so the client does not wait until its deadline."""
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        os.seteuid(64201)
        try:
            connection, claim = await server.accept()
        finally:
            os.seteuid(0)
        with connection, trio.fail_after(PATIENCE):
            assert claim is None
            assert server.publication.unavailable is FallbackReason.OTHER_USER
            reason = await announcement.accepted(deadline_after())
            assert reason is FallbackReason.PEER_NOT_CAPABLE


async def test_a_flood_of_empty_datagrams_does_not_keep_a_client_waiting(private: Path) -> None:
    """The deadline holds even if the timers of the stack never fire."""
    discovery = Discovery(private, Timers(trio.current_time, lambda: None))
    async with claimed(private, discovery=discovery) as pair, trio.open_nursery() as nursery:
        [name] = names_below(private)

        async def flood() -> None:
            with short_path(name) as path, socket.socket(socket.AF_UNIX, DATAGRAM) as raw:
                raw.setblocking(False)
                while True:
                    with contextlib.suppress(OSError):
                        raw.sendto(b"", path)
                    await trio.lowlevel.checkpoint()

        nursery.start_soon(flood)
        with trio.fail_after(PATIENCE):
            reason = await pair.announcement.accepted(deadline_after(0.1))
        assert reason is FallbackReason.PEER_NOT_CAPABLE
        nursery.cancel_scope.cancel()


def test_a_name_that_is_taken(private: Path) -> None:
    with open_names(private) as names, names.listen("x"):
        with pytest.raises(OSError, match="in use") as refused:
            names.listen("x")
        assert refused.value.errno == errno.EADDRINUSE
        names.remove("x")
        names.listen("x").close()
        names.remove("x")


# --- directories that a group shares ------------------------------------------------------------


@pytest.fixture
def shared(private: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private directory that this process's group shares."""
    if os.geteuid():
        pytest.skip("makes files of other users")
    private.mkdir()
    os.chown(private, 0, os.getegid())
    private.chmod(0o3770)
    monkeypatch.setattr(private_directory, "is_named", lambda path: True)
    return private


def member(shared: Path, user: int, name: str = "member") -> Path:
    """A directory of announcements of another member."""
    path = shared / f"{names.KIND}-{name}"
    path.mkdir()
    os.chown(path, user, os.getegid())
    path.chmod(0o2750)
    return path


async def test_members_that_cannot_be_listed_now_are_listed_later(shared: Path) -> None:
    """A server that lacks descriptors for a moment finds their names afterwards."""
    place = member(shared, 64201)
    (place / "x").touch()
    await trio.sleep(0.15)  # until the time stamps of directories change
    with open_names(shared) as found:
        await trio.sleep(0.15)
        with full_table():
            assert found.find("x") == []
        with trio.fail_after(PATIENCE):
            while not found.find("x"):  # noqa: ASYNC110
                await trio.sleep(0.01)
    (place / "x").unlink()
    place.rmdir()


@pytest.mark.usefixtures("shared")
async def test_members_of_a_group_agree(private: Path) -> None:
    discovery = Discovery(private)
    async with serving(private) as server:
        for _ in range(3):
            await agree(discovery, server, server.address)


async def test_a_name_of_another_member_for_the_same_connection(shared: Path) -> None:
    """Both names receive the answer, so the announced connection is SMC-R.  A denial of the other
    member does not make the connection plain TCP."""
    place = member(shared, 64201)
    async with serving(shared) as server, bound() as client:
        name = place / name_of(client, server.address)
        with socket.socket(socket.AF_UNIX, DATAGRAM) as theirs:
            with short_path(name) as path:
                theirs.bind(path)
            os.chown(name, 64201, os.getegid())
            announcement = await announce(shared, client, server.address)
            await client.connect(server.address)
            connection, claim = await server.accept()
            with connection:
                assert claim is not None
                assert claim.accept()
                reply = messages.decode_untrusted(theirs.recv(100))
                claim.deny(reply.token)
                await start_smc_r(Pair(client, announcement, connection, claim))
        name.unlink()
    place.rmdir()


@pytest.mark.parametrize("kind", ["link", "fifo", "dead", "inner link", "open", "stolen"])
async def test_a_hostile_member(kind: str, shared: Path, tmp_path: Path) -> None:
    """The member puts any file into its directory, or replaces the directory.  Connections of other
    members are SMC-R, and no other service receives a message."""
    place = member(shared, 64201)
    with socket.socket(socket.AF_UNIX, DATAGRAM) as other:
        other.bind(str(tmp_path / "other"))
        other.setblocking(False)
        async with serving(shared) as server, bound() as client:
            name = place / name_of(client, server.address)
            if kind == "link":
                name.symlink_to(tmp_path / "other")
            elif kind == "fifo":
                os.mkfifo(name)
            elif kind == "dead":
                with socket.socket(socket.AF_UNIX, DATAGRAM) as dead, short_path(name) as path:
                    dead.bind(path)
            elif kind == "inner link":
                place.rmdir()
                place.symlink_to(tmp_path)
                (tmp_path / name.name).symlink_to(tmp_path / "other")
            elif kind == "open":
                place.chmod(0o2777)
                os.link(tmp_path / "other", name)
            else:
                os.link(tmp_path / "other", name)
                os.chown(place, 64201, 64201)
            announcement = await announce(shared, client, server.address)
            await client.connect(server.address)
            with trio.fail_after(PATIENCE):
                connection, claim = await server.accept()
            with connection:
                assert claim is not None
                await start_smc_r(Pair(client, announcement, connection, claim))
            with pytest.raises(BlockingIOError):
                other.recv(100)
    empty(place, tmp_path)


def empty(place: Path, tmp_path: Path) -> None:
    """Remove the files of the hostile member."""
    for each in (*place.glob("*"), *tmp_path.iterdir()):
        each.unlink(missing_ok=True)
    place.unlink() if place.is_symlink() else place.rmdir()


async def test_a_member_without_a_listener_cannot_answer(shared: Path) -> None:
    """The client ignores the member's datagram, although the kernel lets the member send it."""
    async with serving(shared) as server, bound() as client:
        announcement = await announce(shared, client, server.address)
        (name,) = names_below(shared)
        with short_path(name) as path:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    os.setgroups([])
                    os.setuid(64201)
                    with socket.socket(socket.AF_UNIX, DATAGRAM) as raw:
                        raw.sendto(messages.accepted(bytes(8), VERSION), path)
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
        assert not announcement.is_too_late()
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            await start_smc_r(Pair(client, announcement, connection, claim))


async def test_a_member_that_comes_later_is_found(shared: Path) -> None:
    """The other members can use the directory as soon as it exists."""
    with open_names(shared) as found:
        assert found.find("x") == []
        place = member(shared, 64201)
        with socket.socket(socket.AF_UNIX, DATAGRAM) as theirs, short_path(place / "x") as path:
            theirs.bind(path)
            with trio.fail_after(PATIENCE):
                while not found.find("x"):  # noqa: ASYNC110
                    await trio.sleep(0.01)
        (place / "x").unlink()
        place.rmdir()
        assert found.find("x") == []


async def test_a_member_that_changes_the_directory_all_the_time(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server spends at most a tenth of the time on listing the directory."""
    clock = [1]
    listed = 0
    real = private_directory.PrivateDirectory.member_directories

    def slow(self: private_directory.PrivateDirectory, kind: str) -> list[str]:
        nonlocal listed
        listed += 1
        clock[0] += 5_000_000
        return real(self, kind)

    with open_names(shared) as found:
        monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
        monkeypatch.setattr(private_directory.PrivateDirectory, "member_directories", slow)
        for _ in range(1000):
            (shared / "x").mkdir()
            (shared / "x").rmdir()
            found.find("y")
            clock[0] += 1_000_000
        assert 10 <= listed <= 1000 / 50 + 2
