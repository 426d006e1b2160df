"""Named sockets in the private directory: who is alive, who is gone, who is only just coming."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_smc.host.private_directory import PrivateDirectory, is_same_user, peer_user


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


def test_another_user(opened: PrivateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    with opened.listen("name", 1), opened.connect("name") as connection:
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
        assert not is_same_user(connection)
