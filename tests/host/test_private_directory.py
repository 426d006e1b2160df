"""The private directory, directories below it, and named sockets of live and dead processes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trio_smc import FallbackReason
from trio_smc.host import private_directory
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
def test_a_live_socket_stays_and_is_not_woken(
    opened: PrivateDirectory, kind: socket.SocketKind
) -> None:
    with opened.listen("alive", 1, kind) as listener:
        opened.remove_stale()
        assert opened.sockets() == ["alive"]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_name_that_may_not_be_removed_any_more_is_no_error(
    opened: PrivateDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the program has given up the user that made the name."""

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    dead_socket(tmp_path / "private" / "kept")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        opened.remove("kept")
    assert opened.sockets() == ["kept"]


def test_a_dead_socket_is_removed(opened: PrivateDirectory, tmp_path: Path) -> None:
    for name in ("a-dead", "b-dead"):
        dead_socket(tmp_path / "private" / name)
    opened.remove_stale("a-")
    assert opened.sockets() == ["b-dead"]
    with pytest.raises(ConnectionRefusedError):
        opened.connect("b-dead")
    assert opened.sockets() == []


def test_a_socket_without_its_final_name_has_a_minute(
    opened: PrivateDirectory, tmp_path: Path
) -> None:
    old, new = tmp_path / "private" / ".x-old", tmp_path / "private" / ".x-new"
    for path in (old, new):
        dead_socket(path)
    os.utime(old, (0, 0))
    assert opened.sockets() == []
    opened.remove_stale("x-")
    assert not old.exists()
    assert new.exists()


def test_only_sockets_are_removed(opened: PrivateDirectory, tmp_path: Path) -> None:
    (tmp_path / "private" / "file").touch()
    dead_socket(tmp_path / "elsewhere")
    (tmp_path / "private" / "link").symlink_to(tmp_path / "elsewhere")
    opened.remove_stale()
    assert sorted(os.listdir(tmp_path / "private")) == ["file", "link"]
    assert (tmp_path / "elsewhere").exists()


def test_a_name_comes_with_its_listener(opened: PrivateDirectory, tmp_path: Path) -> None:
    """The name of a live listener never refuses a connection."""
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


@contextlib.contextmanager
def opened_shared(tmp_path: Path) -> Iterator[tuple[PrivateDirectory, Path]]:
    path = shared_with(tmp_path / "shared", os.getegid())
    with contextlib.closing(PrivateDirectory.open(path, create=False)) as opened:
        assert opened.group == os.getegid()
        yield opened, path


def test_a_member_of_a_group_has_directories_that_only_it_may_change(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        with opened_shared(tmp_path) as (opened, path):
            own = opened.member_directory("tcp", create=True)
            assert own == opened.member_directory("tcp", create=True)
            assert opened.member_directories("tcp") == [own]
            with contextlib.closing(opened.below(f"{own}/one/two", create=True)) as below:
                assert below.group == os.getegid()
                with below.listen("name", 1), below.connect("name") as connection:
                    mode = (path / own / "one/two/name").stat().st_mode
                    assert is_admitted(connection, below.group)
                    assert below.has("name")
                below.remove("name")
                assert not below.has("name")
            hidden = opened.member_directory("control", create=True, private=True)
            with contextlib.closing(opened.below(hidden)) as below:
                assert below.group is None
    finally:
        os.umask(umask)
    assert stat.S_IMODE(mode) == 0o660
    for each in (own, f"{own}/one", f"{own}/one/two"):
        found = (path / each).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o2750, os.getegid())
    assert stat.S_IMODE((path / hidden).stat().st_mode) == 0o700
    assert sorted(os.listdir(path)) == sorted([own, hidden]), "nothing else is left"
    with contextlib.closing(PrivateDirectory.open(path, create=False)) as opened:
        opened.remove_empty(f"{own}/one/two")
        with pytest.raises(FileNotFoundError):
            opened.member_directory("tcp")
    assert os.listdir(path) == [hidden]


HOSTILE = ["link", "file", "fifo", "3770", "2770", "0777", "0755", "owner", "group"]


def hostile(path: Path, kind: str, target: Path) -> None:
    """Put a file, a link or a directory in the place of a private directory."""
    match kind:
        case "link":
            path.symlink_to(target)
        case "file":
            path.touch()
        case "fifo":
            os.mkfifo(path)
        case "owner":
            path.mkdir()
            os.chown(path, 64201, -1)
            path.chmod(0o2750)
        case "group":
            path.mkdir()
            os.chown(path, -1, 64210)
            path.chmod(0o2750)
        case mode:
            path.mkdir()
            path.chmod(int(mode, 8))


def needs_root(kind: str) -> None:
    if kind in ("owner", "group") and os.geteuid():
        pytest.skip("takes root: to give a directory to another user")


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_directory_that_another_user_could_change_is_entered(
    tmp_path: Path, kind: str, depth: int
) -> None:
    """In a group's directory, at each depth, for makers and for readers of sockets."""
    needs_root(kind)
    if kind == "owner" and depth == 0:
        return  # another member's own
    (tmp_path / "target/b/c").mkdir(parents=True)
    with opened_shared(tmp_path) as (opened, path):
        own = opened.member_directory("tcp", create=True)
        names = [own, "b", "c"]
        place = path
        for name in names[:depth]:
            place = place / name
            if name != own:
                place.mkdir(mode=0o700)
                place.chmod(0o2750)
        place = place / names[depth]
        if depth == 0:
            place.rmdir()
        hostile(place, kind, (tmp_path / "target").joinpath(*names[1 : depth + 1]))
        for create in (False, True):
            with pytest.raises(OSError, match=r"mode|belongs|Not a directory"):
                opened.below("/".join(names), create=create)
        if kind == "fifo":
            place.unlink()
        if depth == 0:
            fresh = opened.member_directory("tcp", create=True)
            assert fresh != own or kind == "fifo"
            opened.below(f"{fresh}/b/c", create=True).close()


@pytest.mark.parametrize("kind", [each for each in HOSTILE if each != "group"])
def test_inner_directories_of_a_private_one_are_private_too(
    opened: PrivateDirectory, tmp_path: Path, kind: str
) -> None:
    needs_root(kind)
    (tmp_path / "target/b").mkdir(parents=True)
    hostile(tmp_path / "private/a", kind, tmp_path / "target")
    for create in (False, True):
        with pytest.raises(OSError, match=r"mode|belongs|Not a directory"):
            opened.below("a/b", create=create)
    assert os.listdir(tmp_path / "target/b") == []
    if kind == "fifo":
        (tmp_path / "private/a").unlink()


def test_names_of_any_kind_and_number_are_bounded(opened: PrivateDirectory, tmp_path: Path) -> None:
    private = tmp_path / "private"
    for name in (b"\xff\xfe", b"new\nline", b"\x1b[2J", b"-rf", "ü".encode(), b"x" * 255):
        (private / os.fsdecode(name)).touch()
    os.mkfifo(private / "fifo")
    (private / "loop").symlink_to("loop")
    with opened.listen("alive", 1):
        assert opened.sockets() == ["alive"]
        opened.remove_stale()
        for number in range(5000):
            os.mknod(private / f"n{number}", stat.S_IFSOCK | 0o600)
        assert len(opened.entries()) == 4096
        assert len(opened.sockets()) <= 1024
        opened.remove_stale("alive")
        opened.remove("alive")
    for each in private.iterdir():
        each.unlink()


def test_members_that_make_thousands_of_directories_are_bounded(tmp_path: Path) -> None:
    with opened_shared(tmp_path) as (opened, path):
        for number in range(1000):
            (path / f"tcp-{number}").mkdir()
        assert len(opened.member_directories("tcp")) == 4
        own = opened.member_directory("tcp", create=True)
        assert stat.S_IMODE((path / own).stat().st_mode) == 0o2750


def test_a_directory_that_cannot_be_found_among_too_many_names(tmp_path: Path) -> None:
    """The error is not "missing": then a command would report that no process runs."""
    with opened_shared(tmp_path) as (opened, path):
        with pytest.raises(FileNotFoundError):
            opened.member_directory("control", private=True)
        for number in range(4096):
            (path / f"n{number}").touch()
        with pytest.raises(OSError, match="4096 names or more") as caught:
            opened.member_directory("control", private=True)
        assert caught.value.errno == errno.E2BIG


@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_only_a_socket_is_connected_to(opened: PrivateDirectory, tmp_path: Path, kind: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as elsewhere:
        elsewhere.bind(str(tmp_path / "elsewhere"))
        elsewhere.listen()
        elsewhere.setblocking(False)
        hostile(tmp_path / "private/name", kind, tmp_path / "elsewhere")
        with pytest.raises(OSError, match="Socket operation on non-socket"):
            opened.connect("name")
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert not opened.has("name")
    for path in (tmp_path / "private/name", tmp_path / "elsewhere"):
        path.unlink()


def test_missing_directories_above_are_not_made(tmp_path: Path) -> None:
    path = tmp_path / "mistyped" / "trio-smc"
    with pytest.raises(DirectoryUnusable) as caught:
        PrivateDirectory.open(path, create=True)
    assert str(caught.value) == f"{path} cannot be made: there is no directory {path.parent}"
    assert caught.value.reason is FallbackReason.DIRECTORY_UNUSABLE
    assert caught.value.number == errno.ENOENT
    assert not path.parent.exists()


@pytest.mark.parametrize("kind", ["directory", "file", "nothing", "loop"])
def test_a_symbolic_link_is_named(tmp_path: Path, kind: str) -> None:
    """The user's own links are not followed either; the message says which path to use."""
    path, target = tmp_path / "link", tmp_path / "target"
    path.symlink_to("link" if kind == "loop" else target)
    remedy = "name a directory"
    if kind == "directory":
        target.mkdir(mode=0o700)
        remedy = f"name the directory itself, {target.resolve()}"
    elif kind == "file":
        target.touch()
    text = f"{path} is a symbolic link, which trio_smc does not follow: {remedy}"
    for create in (True, False):
        with pytest.raises(DirectoryUnusable) as caught:
            PrivateDirectory.open(path, create=create)
        assert str(caught.value) == text
        assert caught.value.reason is FallbackReason.DIRECTORY_UNUSABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_target_of_another_users_link_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(tmp_path)
    other = 65534
    os.chown(path, other, other, follow_symlinks=False)
    with pytest.raises(DirectoryUnusable) as caught:
        PrivateDirectory.open(path, create=False)
    assert str(caught.value) == (
        f"{path} is a symbolic link, which trio_smc does not follow; it belongs to user {other}: "
        "name a directory of your own"
    )


@pytest.mark.parametrize("mode", [0o770, 0o2770, 0o1770, 0o3775, 0o3750, 0o750])
def test_no_other_mode_shares_a_directory(tmp_path: Path, mode: int) -> None:
    path = shared_with(tmp_path / "shared", os.getegid(), mode)
    with pytest.raises(DirectoryUnusable, match="700 is private"):
        PrivateDirectory.open(path, create=False)


def test_a_default_place_is_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have made it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = shared_with(tmp_path / "trio-smc", os.getegid())
    with pytest.raises(DirectoryUnusable, match="700 is private"):
        PrivateDirectory.open(path, create=False)


def test_a_group_of_others_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared_with(tmp_path / "shared", os.getegid())
    real = os.getegid()
    monkeypatch.setattr(os, "getegid", lambda: real + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [real + 2])
    with pytest.raises(DirectoryUnusable, match="this process is not in that group"):
        PrivateDirectory.open(path, create=False)


def test_only_members_of_the_group_are_admitted(
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


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o1777, True), (0o777, False), (0o1755, False), (None, False)]
)
def test_a_place_for_all_users(tmp_path: Path, mode: int | None, expected: bool) -> None:
    """Without the sticky bit another user could replace the directory."""
    place = tmp_path / "place"
    if mode is not None:
        place.mkdir()
        place.chmod(mode)
    as_root = os.geteuid() == 0
    assert private_directory.is_for_all_users(str(place)) is (expected and as_root)


@pytest.mark.skipif(os.geteuid() != 0, reason="the user of the directory must not be root")
@pytest.mark.parametrize("mask", [0o022, 0o177, 0o277, 0o777])
def test_a_umask_takes_nothing_from_other_processes(mask: int) -> None:
    """Root would get in whatever the mode is, so another user makes and uses the directories."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        path = Path(place) / "private"
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                os.umask(mask)
                made = PrivateDirectory.open(path, create=True).below("tcp/1", create=True)
                with made.listen("name", 1), socket.socket(socket.AF_UNIX) as other:
                    made.bind(other, "other")
                    os.umask(0o022)
                    below = PrivateDirectory.open(path, create=False).below("tcp/1")
                    below.connect("name").close()
                    modes = [os.stat(each, dir_fd=made.descriptor) for each in ("name", "other")]
                    os._exit(any(each.st_mode & 0o600 != 0o600 for each in modes))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_opened_leaves_no_name(
    opened: PrivateDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the process has no free descriptor."""

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for path in (tmp_path / "another", tmp_path / "third"):
            with pytest.raises(DirectoryUnusable):
                PrivateDirectory.open(path, create=True)
            assert not path.exists()
