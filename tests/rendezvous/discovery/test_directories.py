"""Same-host discovery: other users, hostile directories."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import (
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
from trio_smc._base.reasons import FallbackReason
from trio_smc.host.private_directory import PrivateDirectory
from trio_smc.rendezvous.discovery import directory, lookup, messages
from trio_smc.rendezvous.discovery.same_host import Discovery

_CLONE_NEWUSER = 0x10000000  # linux/sched.h


async def test_a_client_of_another_user_is_refused(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrivateDirectory, "is_admitted", lambda self: False)
    async with serving(private) as server, bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        connection, claim = await server.accept()
        with connection:
            assert claim is not None
            assert not claim.accept()
            assert not await claim.confirm(connection, deadline_after())
            assert await announcement.accepted(deadline_after()) is FallbackReason.OTHER_USER


async def test_a_listener_of_another_user_is_not_believed(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "admits_user", lambda user, group: False)
    async with serving(private) as server:
        outcome = Discovery(private).announce(("127.0.0.1", 1), server.address)
        assert outcome is FallbackReason.OTHER_USER


def send_as_nobody(name: Path, message: bytes) -> None:
    """Send a datagram as another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with short_path(name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
                raw.sendto(message, path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("namespace", [False, True])
async def test_another_user_reaches_no_name_in_a_private_directory(
    namespace: bool, private: Path
) -> None:
    """The kernel refuses the other user, even as root of a user namespace.  So in a private
    directory a datagram needs no credentials, and discovery need not check the owner of a name."""
    libc = ctypes.CDLL(None)
    async with serving(private) as server, bound() as client:
        with await announce(private, client, server.address):
            (name,) = names_below(private)
            for directory in private.parents:  # the directories of this test
                if directory.is_relative_to(private.parent.parent):
                    directory.chmod(0o755)
            assert attempts_of_nobody(name, libc if namespace else None) == [
                errno.EACCES,
                errno.EACCES,
                errno.ENOENT,
            ]
        for directory in private.parents:
            if directory.is_relative_to(private.parent.parent):
                directory.chmod(0o700)


def attempts_of_nobody(name: Path, libc: ctypes.CDLL | None) -> list[int]:
    """Return the error numbers of three calls of another user; 0: no error.

    The other user sends to ``name``, binds a name beside it, and sends to a name outside of the
    private directory, in a directory that the user may enter.

    libc: if given, the user first enters a user namespace of its own.
    """
    read, write = os.pipe()
    beside = name.parent.parent.parent
    below = str(name.relative_to(beside))  # short enough for a socket address
    child = os.fork()
    if child == 0:
        try:
            os.chdir(beside)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            if libc is not None and libc.unshare(_CLONE_NEWUSER):
                os.write(write, b"none")
                return []
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
                failed = (
                    failure(raw.sendto, b"?", below),
                    failure(raw.bind, below + "x"),
                    failure(raw.sendto, b"?", "none"),
                )
            os.write(write, bytes(failed))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    output = os.read(read, 4)
    for each in (read, write):
        os.close(each)
    if output == b"none":
        pytest.skip("no user namespaces here")
    return list(output)


def failure(call: Callable[..., object], *arguments: object) -> int:
    """The error number with which a call fails."""
    try:
        call(*arguments)
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_shows_the_sender_of_a_denial(private: Path) -> None:
    """Another user cannot make a connection plain TCP, even with the right token."""
    async with claimed(private) as pair:
        pair.claim.accept()
        [token] = pair.claim.tokens
        (name,) = sockets_below(private)
        name.chmod(0o777)
        for directory in name.parents:
            if directory.is_relative_to(private.parent.parent):
                directory.chmod(0o755)
        await trio.to_thread.run_sync(send_as_nobody, name, messages.not_mine(token))
        await start_smc_r(pair)


async def unavailable(private: Path) -> FallbackReason:
    """Publish and announce in a bad directory.  Returns the reason, which both calls report."""
    async with trio.open_nursery() as nursery:
        publication = Discovery(private).publish(("127.0.0.1", 9), nursery)
        assert publication.unavailable is not None
        assert publication.claim(("127.0.0.1", 9), ("127.0.0.1", 1)) is None
        publication.close()
    outcome = Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 9))
    assert outcome is publication.unavailable
    return outcome


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
async def test_a_directory_that_others_can_enter(mode: int, private: Path) -> None:
    os.mkdir(private)
    os.chmod(private, mode)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE


async def test_a_symbolic_link_is_not_followed(private: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    os.mkdir(real, mode=0o700)
    os.symlink(real, private)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE
    assert os.listdir(real) == []


async def test_a_file_in_the_place_of_the_directory(private: Path) -> None:
    os.mknod(private, mode=0o600)
    assert await unavailable(private) is FallbackReason.DIRECTORY_UNUSABLE
    os.unlink(private)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user(private: Path) -> None:
    os.mkdir(private, mode=0o700)
    os.chown(private, 65534, 65534)
    assert await unavailable(private) is FallbackReason.OTHER_USER


async def test_a_full_file_system(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        async with trio.open_nursery() as nursery:
            publication = Discovery(private).publish(("127.0.0.1", 9), nursery)
            assert publication.unavailable is FallbackReason.DIRECTORY_FULL


async def test_entries_that_are_no_sockets_are_left_alone(private: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as decoy:
        decoy.bind(str(elsewhere))
        async with serving(private) as server:
            (name,) = sockets_below(private)
            (name.parent / "1-link").symlink_to(elsewhere)
            (name.parent / "2-file").touch()
            os.mkfifo(name.parent / "3-pipe")
            await agree(private, server, server.address)
            name.unlink()
            outcome = Discovery(private).announce(("127.0.0.1", 1), server.address)
            assert outcome is FallbackReason.PEER_NOT_CAPABLE
            for each in ("1-link", "2-file", "3-pipe"):
                (name.parent / each).unlink()
    elsewhere.unlink()


async def test_other_systems_have_only_tcp(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert await unavailable(private) is FallbackReason.UNSUPPORTED_PLATFORM
    assert os.listdir(private.parent) == []


async def test_publishers_that_come_and_go_do_not_disturb_each_other(private: Path) -> None:
    """One process removes the directory while another one makes its socket there."""

    def come_and_go() -> None:
        for _ in range(200):
            made = directory.NewSocket(private, "4-127.0.0.1-9")
            made.remove()
            made.socket.close()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.to_thread.run_sync, come_and_go)
    assert sockets_below(private) == []
