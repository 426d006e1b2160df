"""Same-host discovery: other users, hostile directories."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import agree, serving, sockets_below, soon
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.discovery import announcing, directory, messages, publication
from trio_smc.rendezvous.discovery.same_host import Announcement, Discovery


async def test_a_client_of_another_user_is_refused(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "is_admitted", lambda connection, group: False)
    async with serving(private) as server:
        outcome = await Discovery(private).announce(("127.0.0.1", 1), server.address, soon())
        assert isinstance(outcome, Announcement)
        assert await outcome.accepted(soon()) is FallbackReason.OTHER_USER


async def test_a_listener_of_another_user_is_not_believed(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "is_admitted", lambda connection, group: False)
    async with serving(private) as server:
        outcome = await Discovery(private).announce(("127.0.0.1", 1), server.address, soon())
        assert outcome is FallbackReason.OTHER_USER


def announce_as_nobody(path: str) -> bytes:
    """The answer to an announcement that another user makes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                    raw.connect(path)
                    raw.send(messages.announce(bytes(36)))
                    theirs.send(raw.recv(100))
            finally:
                os._exit(0)
        theirs.close()
        answer = ours.recv(100)
        os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_tells_who_a_client_is(private: Path) -> None:
    async with serving(private):
        (name,) = sockets_below(private)
        # Open everything, so that only the credentials are left to refuse.
        name.chmod(0o777)
        for directory in name.parents:
            if directory.is_relative_to(private.parent.parent):
                directory.chmod(0o755)
        answer = await trio.to_thread.run_sync(announce_as_nobody, str(name))
        assert answer == messages.refused(FallbackReason.OTHER_USER)


async def unavailable(private: Path) -> FallbackReason:
    """Publish and announce where neither can work: the same reason and no exception."""
    async with trio.open_nursery() as nursery:
        publication = Discovery(private).publish(("127.0.0.1", 9), nursery)
        assert publication.unavailable is not None
        assert publication.claim(("127.0.0.1", 9), ("127.0.0.1", 1)) is None
        publication.close()
    outcome = await Discovery(private).announce(("127.0.0.1", 1), ("127.0.0.1", 9), soon())
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
            assert publication.unavailable is FallbackReason.OUT_OF_RESOURCES


async def test_entries_that_are_no_sockets_are_left_alone(private: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as decoy:
        decoy.bind(str(elsewhere))
        decoy.listen()
        decoy.setblocking(False)
        async with serving(private) as server:
            (name,) = sockets_below(private)
            (name.parent / "1-link").symlink_to(elsewhere)
            (name.parent / "2-file").touch()
            await agree(private, server, server.address)
            with pytest.raises(BlockingIOError):
                decoy.accept()
            (name.parent / "1-link").unlink()
            (name.parent / "2-file").unlink()
    elsewhere.unlink()


async def test_other_systems_have_only_tcp(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert await unavailable(private) is FallbackReason.UNSUPPORTED_PLATFORM
    assert os.listdir(private.parent) == []


async def test_publishers_that_come_and_go_do_not_disturb_each_other(private: Path) -> None:
    """One removes the directory while another makes its socket there."""

    def come_and_go() -> None:
        for _ in range(200):
            made = directory.NewSocket(private, "4-127.0.0.1-9", 1)
            made.remove()
            made.listener.close()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.to_thread.run_sync, come_and_go)
    assert sockets_below(private) == []
