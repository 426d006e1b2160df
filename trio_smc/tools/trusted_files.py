"""Read files that only this user or root can have put in place, without ever waiting.

Theory of operation
-------------------
A path that another process names may lead to a FIFO, a device, a file that grows, or a FUSE file
system whose server answers late or never: even `stat` waits for the server.  A symbolic link in the
path may lead to a file that the other process cannot read.

Therefore `TrustedFiles` opens each component of a path separately, with O_PATH and O_NOFOLLOW,
which calls no driver and no file system server.  The first check of a component is that of its
mount: the number in /proc/self/fdinfo, looked up in /proc/self/mountinfo, must be that of a local
file system.  The component must also belong to root or this user, and other users must not be able
to replace its name.  (A sticky directory such as /tmp protects the names in it from other users.)
The target of a symbolic link is opened and checked in the same way, component by component.

Only regular files and directories are read, through the checked descriptor and up to a limit.  The
descriptor is opened with O_NONBLOCK, because a lease of another process (fcntl(2), F_SETLEASE)
makes a plain `open` wait.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from trio_smc._base.regular_file import read_up_to

__all__ = ["TrustedFiles", "UntrustedPathError"]

_LOCAL_FILE_SYSTEMS: Final = frozenset({
    "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs",
    "reiserfs", "rootfs", "squashfs", "tmpfs", "xfs", "zfs",
})  # fmt: skip
"""File systems that answer without a server in user space or on the network."""
_MAX_LINKS: Final = 40
"""Symbolic links in one path, as in the kernel (path_resolution(7))."""
_MAX_DEPTH: Final = 128
"""Nested directories, all of which are open at the same time.  Chosen."""
_MAX_STEPS: Final = 4096
"""Components of a path, including those of its symbolic links.  Chosen."""
_SHOWN_CHARACTERS: Final = 100
"""Characters of a path in an error.  Chosen."""
_MAX_PATH: Final = 4096
"""Characters of a path: PATH_MAX of Linux."""
_MAX_MOUNTINFO: Final = 1 << 22
"""Bytes of /proc/self/mountinfo.  Chosen; a line has about 150 bytes."""
_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_PIECE: Final = 65536  # bytes of one read(2); chosen


class UntrustedPathError(Exception):
    """A path is not trusted.  The text is the reason, without a full stop."""


class _Entry(NamedTuple):
    """A component of a path: its O_PATH descriptor, the number of its mount, and its status."""

    descriptor: int
    mount: str
    found: os.stat_result


class TrustedFiles:
    """Reads files that another process names.

    All methods raise `UntrustedPathError` if the path is not trusted or the time is over.  `read`
    and `names` also raise FileNotFoundError or NotADirectoryError if there is no such file.

    Args:
      seconds: the time for all calls together.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._users = {0, os.geteuid()}

    def is_file(self, path: str) -> bool:
        """True if the path is a regular file."""
        return self._has_kind(path, stat.S_ISREG)

    def exists(self, path: str) -> bool:
        """True if the path exists, even as a dangling symbolic link."""
        return self._has_kind(path, lambda _: True, follow=False)

    def read(self, path: str, limit: int) -> bytes:
        """The contents of a regular file.

        Args:
          path: the file.
          limit: its largest size in bytes.
        """
        with self._opened(path) as entry:
            if not stat.S_ISREG(entry.found.st_mode):
                raise UntrustedPathError(f"{path} is not a regular file")
            if entry.found.st_mode & 0o022:
                raise UntrustedPathError(f"other users can write to {path}")
            with self._reopened(entry, path, os.O_RDONLY) as descriptor:
                return _read_up_to(descriptor, limit, path)

    def names(self, path: str, limit: int) -> list[str]:
        """The names in a directory.

        Args:
          path: the directory.
          limit: the largest number of names.
        """
        with self._opened(path) as entry:
            self._check_directory(entry, path)
            with (
                self._reopened(entry, path, os.O_RDONLY | os.O_DIRECTORY) as descriptor,
                os.scandir(descriptor) as entries,
            ):
                found: list[str] = []
                for each in entries:
                    if len(found) >= limit:
                        raise UntrustedPathError(f"{path} has more than {limit} names")
                    found.append(each.name)
                return found

    def _has_kind(self, path: str, kind: Callable[[int], bool], *, follow: bool = True) -> bool:
        try:
            with self._opened(path, follow=follow) as entry:
                return kind(entry.found.st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    # --- the walk ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, path: str, *, follow: bool = True) -> Iterator[_Entry]:
        """Open a path component by component, and yield its last component, checked."""
        if not path.startswith("/") or len(path) > _MAX_PATH or "\0" in path:
            raise UntrustedPathError(f"{path[:_SHOWN_CHARACTERS]!r} is not an absolute path")
        opened = [self._entry("/", None, path)]
        remaining = deque(path.split("/"))
        links = 0
        try:
            for _ in range(_MAX_STEPS):
                if not remaining:
                    break
                if time.monotonic() > self._deadline:
                    raise UntrustedPathError("reading its files took too long")
                name = remaining.popleft()
                if name in ("", "."):
                    continue
                if name == "..":
                    _close(opened, max(1, len(opened) - 1))
                    continue
                if len(opened) > _MAX_DEPTH:
                    remaining.append(name)
                    break
                self._check_directory(opened[-1], path)
                opened.append(self._entry(name, opened[-1], path))
                if stat.S_ISLNK(opened[-1].found.st_mode) and (follow or any(remaining)):
                    links += 1
                    if links > _MAX_LINKS:
                        raise UntrustedPathError(f"{path} has too many symbolic links")
                    target = os.readlink("", dir_fd=opened[-1].descriptor)
                    _close(opened, 1 if target.startswith("/") else len(opened) - 1)
                    remaining.extendleft(reversed(target.split("/")))
            if remaining:
                raise UntrustedPathError(f"{path[:_SHOWN_CHARACTERS]} has too many components")
            yield opened[-1]
        finally:
            _close(opened, 0)

    def _entry(self, name: str, parent: _Entry | None, path: str) -> _Entry:
        """Open one component, and check its mount and its owner."""
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=None if parent is None else parent.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise UntrustedPathError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            mount = _mount_of(descriptor)
            # Check the mount before `fstat`, which may wait for a file system server.
            if parent is None or mount != parent.mount:
                kind = _file_system(mount)
                if kind is None:
                    raise UntrustedPathError(f"it is unknown which file system {path} is on")
                if kind not in _LOCAL_FILE_SYSTEMS:
                    raise UntrustedPathError(f"{path} is not on a local file system")
            found = os.fstat(descriptor)
            if found.st_uid not in self._users:
                raise UntrustedPathError(f"part of {path} belongs to user {found.st_uid}")
        except BaseException:
            os.close(descriptor)
            raise
        return _Entry(descriptor, mount, found)

    def _check_directory(self, entry: _Entry, path: str) -> None:
        """Raise UntrustedPathError if other users can replace names in the directory."""
        mode = entry.found.st_mode
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(path)
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise UntrustedPathError(f"other users can write to a directory of {path}")

    @contextlib.contextmanager
    def _reopened(self, entry: _Entry, path: str, flags: int) -> Iterator[int]:
        """Open a checked file or directory for reading, by its O_PATH descriptor."""
        try:
            descriptor = os.open(f"/proc/self/fd/{entry.descriptor}", flags | _OPEN_FLAGS)
        except OSError as error:
            raise UntrustedPathError(f"{path} cannot be read: {error.strerror}") from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _close(entries: list[_Entry], count: int) -> None:
    """Close all entries but the first ``count``."""
    while len(entries) > count:
        os.close(entries.pop().descriptor)


def _read_up_to(descriptor: int, limit: int, path: str) -> bytes:
    try:
        return read_up_to(descriptor, limit)
    except ValueError:
        raise UntrustedPathError(f"{path} is larger than {limit} bytes") from None


def _mount_of(descriptor: int) -> str:
    """The mount number of a descriptor.  The kernel provides it without calling the file system."""
    info = os.open(f"/proc/self/fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for line in os.read(info, _PIECE).splitlines():
            if line.startswith(b"mnt_id:"):
                return line.split()[1].decode("ascii")
    finally:
        os.close(info)
    raise UntrustedPathError("the kernel does not name the mount of a file")


def _file_system(mount: str) -> str | None:
    """The type of the file system of a mount; None if it is unknown, as in a chroot."""
    info = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = _read_up_to(info, _MAX_MOUNTINFO, "/proc/self/mountinfo").decode("utf-8", "replace")
    finally:
        os.close(info)
    for line in text.split("\n"):
        number, _, rest = line.partition(" ")
        if number == mount:
            return rest.partition(" - ")[2].split(" ", 1)[0]
    return None
