"""Named sockets in the private directory: who is alive, who is gone, who is only just coming."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_admitted,
    is_same_user,
    peer_user,
)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[PrivateDirectory]:
    directory = PrivateDirectory.open(tmp_path / "private", create=True)
    yield directory
    directory.close()
    directory.close()
    for path in (*tmp_path.iterdir(), *(tmp_path / "private").iterdir()):
        if path.is_socket() and not path.is_symlink():
            path.unlink()


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_who_is_alive_stays_and_is_not_woken(
    opened: PrivateDirectory, kind: socket.SocketKind
) -> None:
    with opened.listen("alive", 1, kind) as listener:
        opened.remove_stale()
        assert opened.sockets() == ["alive"]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_who_is_gone_goes(opened: PrivateDirectory, tmp_path: Path) -> None:
    for name in ("a-dead", "b-dead"):
        dead_socket(tmp_path / "private" / name)
    opened.remove_stale("a-")
    assert opened.sockets() == ["b-dead"]
    with pytest.raises(ConnectionRefusedError):
        opened.connect("b-dead")
    assert opened.sockets() == []


def test_who_is_just_coming_has_a_minute(opened: PrivateDirectory, tmp_path: Path) -> None:
    old, new = tmp_path / "private" / ".x-old", tmp_path / "private" / ".x-new"
    for path in (old, new):
        dead_socket(path)
    os.utime(old, (0, 0))
    assert opened.sockets() == []
    opened.remove_stale("x-")
    assert not old.exists()
    assert new.exists()


def test_what_is_no_socket_is_left_alone(opened: PrivateDirectory, tmp_path: Path) -> None:
    (tmp_path / "private" / "file").touch()
    dead_socket(tmp_path / "elsewhere")
    (tmp_path / "private" / "link").symlink_to(tmp_path / "elsewhere")
    opened.remove_stale()
    assert sorted(os.listdir(tmp_path / "private")) == ["file", "link"]
    assert (tmp_path / "elsewhere").exists()


def test_a_name_comes_with_its_listener(opened: PrivateDirectory, tmp_path: Path) -> None:
    """Nobody may find a name that refuses and is not dead."""
    path = tmp_path / "private" / "name"
    with opened.listen("name", 1):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with opened.connect("name") as connection:
            assert is_same_user(connection)
            assert peer_user(connection) == os.geteuid()
    opened.remove("name")
    opened.remove("name")
    (tmp_path / "private" / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        opened.listen("taken", 1)
    assert os.listdir(tmp_path / "private") == ["taken"]


def shared_with(path: Path, group: int, mode: int = 0o3770) -> Path:
    path.mkdir()
    os.chown(path, -1, group)
    path.chmod(mode)
    return path


def test_what_is_made_in_a_directory_of_a_group_is_the_groups(tmp_path: Path) -> None:
    path = shared_with(tmp_path / "shared", os.getegid())
    umask = os.umask(0o077)
    try:
        with contextlib.closing(PrivateDirectory.open(path, create=False)) as opened:
            assert opened.group == os.getegid()
            with contextlib.closing(opened.below("one/two", create=True)) as below:
                assert below.group == os.getegid()
                with below.listen("name", 1), below.connect("name") as connection:
                    mode = (path / "one/two/name").stat().st_mode
                    assert is_admitted(connection, below.group)
                below.remove("name")
            opened.below("one/two", create=True).close()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(mode) == 0o660
    for each in ("one", "one/two"):
        found = (path / each).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o3770, os.getegid())
    assert sorted(os.listdir(path)) == ["one"], "nothing hidden is left"


@pytest.mark.parametrize("mode", [0o770, 0o2770, 0o1770, 0o3775, 0o3750, 0o750])
def test_no_other_mode_shares_a_directory(tmp_path: Path, mode: int) -> None:
    path = shared_with(tmp_path / "shared", os.getegid(), mode)
    with pytest.raises(DirectoryUnusable, match="700 is private"):
        PrivateDirectory.open(path, create=False)


def test_a_default_place_is_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have put it there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = shared_with(tmp_path / "trio-smc", os.getegid())
    with pytest.raises(DirectoryUnusable, match="700 is private"):
        PrivateDirectory.open(path, create=False)


def test_a_group_of_others_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_with(tmp_path / "shared", os.getegid())
    real = os.getegid()
    monkeypatch.setattr(os, "getegid", lambda: real + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [real + 2])
    with pytest.raises(DirectoryUnusable, match="700 is private"):
        PrivateDirectory.open(path, create=False)


def test_a_member_of_the_group_is_admitted_and_nobody_else(
    opened: PrivateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    with opened.listen("name", 1), opened.connect("name") as connection:
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert not is_admitted(connection, None)
        assert all(is_admitted(connection, group) for group in groups)
        assert not is_admitted(connection, max(groups) + 1)


def test_another_user(opened: PrivateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    with opened.listen("name", 1), opened.connect("name") as connection:
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert not is_same_user(connection)
