"""Files that a stack or a command writes: always new, with mode 0600, at a safe path.

Theory of operation
-------------------
A path is safe if no other user can make it lead elsewhere.  Therefore its parts are opened one by
one, each relative to the directory that was opened before it.  Each directory must belong to this
user or root, and only they may write to it, unless it is sticky like /tmp.  A symbolic link is
followed only if it belongs to this user or root.

The file is created under a random name with O_EXCL and then renamed to its final name.  So an
existing file is not written to: neither a FIFO, which could block, nor a file that another process
has open.  A regular file of this user is replaced.  Anything else at that path is an error.  The
only existing file that is written to is one that root has prepared for this user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

if sys.platform == "linux":  # other systems capture nothing
    import fcntl

__all__ = ["create", "trust_directory"]

_DIRECTORY: Final = (
    getattr(os, "O_PATH", 0)
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_NEW: Final = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_PRESENT: Final = (
    os.O_WRONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_MODE: Final = 0o600
_MAX_LINKS: Final = 40
"""Largest number of symbolic links in one path, as in the kernel (MAXSYMLINKS)."""
_ATTEMPTS: Final = 10
"""Tries to replace a file that other processes replace at the same time. Chosen."""


def create(path: Path | str) -> int:
    """Create a file for writing and return its descriptor, with an exclusive flock(2) on it.

    A regular file of this user at that path is replaced.

    Raises:
      OSError: the file cannot be created; another user could replace a part of the path (EPERM);
        the path is not a regular file (EINVAL); another capture is writing to it (EBUSY).
    """
    with _parent(os.fspath(path)) as (directory, name):
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return _replace(directory, name, path)
    raise OSError(errno.EBUSY, f"{path} is being replaced by another process")


def trust_directory(path: Path | str) -> None:
    """Check that no other user can make the path of a directory lead elsewhere.

    Raises:
      OSError: another user can do so (EPERM), or there is no such directory.
    """
    with _parent(os.path.join(path, ".")):
        pass


# --- the file ----------------------------------------------------------------------------------


def _replace(directory: int, name: str, path: Path | str) -> int:
    """Try once to create the file.  Raises FileNotFoundError if another process has replaced it."""
    present = _lock_present(directory, name, path)
    try:
        hidden = f".{name[:100]}.{secrets.token_hex(8)}"
        try:
            fd = os.open(hidden, _NEW, _MODE, dir_fd=directory)
        except PermissionError:
            if present is None:
                raise
            # An administrator has created the file in a directory that only root may write to.
            os.fchmod(present, _MODE)
            os.ftruncate(present, 0)
            return os.dup(present)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, _MODE)  # the umask may have removed bits
            os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(hidden, dir_fd=directory)
            raise
        return fd
    finally:
        if present is not None:
            os.close(present)


def _lock_present(directory: int, name: str, path: Path | str) -> int | None:
    """Open and lock the file that has this name; None: there is no such file."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    _check_present(found, path)
    # Opened only after the check, because opening a device can have effects.
    fd = os.open(name, _PRESENT, dir_fd=directory)
    try:
        opened = os.fstat(fd)
        _check_present(opened, path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, f"{path} is being written by another process") from None
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
            raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_present(found: os.stat_result, path: Path | str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise _is_directory(os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} belongs to user {found.st_uid}")


# --- the path ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """The opened parent directory of a path, and the last part of the path."""
    if path.endswith("/"):
        raise _is_directory(path)
    start = "" if path.startswith("/") else os.getcwd()
    parts = _parts(f"{start}/{path}")
    if path.endswith("/."):
        parts.append(".")
    here, links = os.open("/", _DIRECTORY), 0
    try:
        while parts:
            _check_directory(here, path)
            part, *parts = parts
            target = None if part in (".", "..") else _link(here, part, path)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                parts = [*_parts(target), *parts]
                inner = os.open("/" if target.startswith("/") else ".", _DIRECTORY, dir_fd=here)
            elif parts:
                inner = os.open(part, _DIRECTORY, dir_fd=here)
            elif part == "..":
                break
            else:
                yield here, part
                return
            os.close(here)
            here = inner
        raise _is_directory(path)
    finally:
        os.close(here)


def _parts(path: str) -> list[str]:
    return [each for each in path.split("/") if each not in ("", ".")]


def _is_directory(path: str) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _link(directory: int, name: str, path: str) -> str | None:
    """The target of a symbolic link; None: ``name`` is not a symbolic link."""
    try:
        target = os.readlink(name, dir_fd=directory)
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise
    if not _is_trusted(found.st_uid):
        text = f"{path} leads through a symbolic link of user {found.st_uid}"
        raise PermissionError(errno.EPERM, text)
    return target


def _check_directory(directory: int, path: str) -> None:
    """Raise PermissionError if another user may rename or replace names in a directory."""
    found = os.fstat(directory)
    if not _is_trusted(found.st_uid):
        text = f"{path} leads through the directory of another user, {found.st_uid}"
        raise PermissionError(errno.EPERM, text)
    others = stat.S_IWOTH
    if not _is_own_group(found.st_gid):
        others |= stat.S_IWGRP
    if found.st_mode & others and not found.st_mode & stat.S_ISVTX:
        text = (
            f"{path} leads through a directory that other users may write, and that is not sticky"
        )
        raise PermissionError(errno.EPERM, text)


def _is_trusted(user: int) -> bool:
    """True if a user is root or this user, or is unknown in this user namespace, as root may be."""
    return user in (0, os.geteuid()) or (user == _overflow() and not _knows_all_users())


def _overflow() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_bytes())
    except (OSError, ValueError):
        return -1


def _knows_all_users() -> bool:
    try:
        return Path("/proc/self/uid_map").read_bytes().split() == [b"0", b"0", b"4294967295"]
    except OSError:
        return True


def _is_own_group(group: int) -> bool:
    """True if a group is root's, or has the name of this user and this user as its only member."""
    if group == 0:
        return True
    import grp
    import pwd

    try:
        own, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        own.pw_gid == group and found.gr_name == own.pw_name and set(found.gr_mem) <= {own.pw_name}
    )
