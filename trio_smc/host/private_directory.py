"""The user's private directory, and Unix sockets in it and below.

Theory of operation: the private directory is opened once, without following a symbolic link, and
what was opened is checked (ours, mode 0700); everything below is reached through that descriptor
and cannot be anybody else's.  Sockets are bound and connected as /proc/self/fd/N/name, since a
Unix address ends at 107 bytes and directories may be deeper.

Connecting to the socket of a dead process is refused, and so is connecting to one that is bound
and does not listen yet.  So a socket gets its name only when it listens, and a refused name may be
removed by whoever met it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from pathlib import Path

from trio_smc._base.reasons import FallbackReason

__all__ = [
    "FLAGS",
    "HIDDEN",
    "DirectoryUnusable",
    "connect_or_remove",
    "listen_as",
    "open_private",
    "sockets_in",
    "unusable",
]


if sys.platform == "linux":
    FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
else:
    FLAGS = 0  # nobody comes here
HIDDEN = "."  # names of sockets that do not listen yet start so
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


class DirectoryUnusable(Exception):
    """The private directory cannot be used; connections stay on TCP.

    Attributes:
      reason: what to tell the user.
    """

    def __init__(self, reason: FallbackReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def unusable(error: OSError, path: Path) -> DirectoryUnusable:
    """The `DirectoryUnusable` for an error met in the directory `path`."""
    reason = FallbackReason.DIRECTORY_UNUSABLE
    if error.errno in _RESOURCE_ERRORS:
        reason = FallbackReason.OUT_OF_RESOURCES
    elif error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                reason = FallbackReason.OTHER_USER
    return DirectoryUnusable(reason, f"{path}: {error}")


def open_private(path: Path, *, create: bool) -> int:
    """Open the private directory; the caller closes the descriptor.

    create: make it when it is missing.

    Raises:
      FileNotFoundError: it is missing, without `create`.
      DirectoryUnusable: it is a symbolic link, not a directory, somebody else's, accessible to
        others, or cannot be made.
    """
    try:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, FLAGS)
    except FileNotFoundError:
        if create:
            text = f"{path} cannot be made"
            raise DirectoryUnusable(FallbackReason.DIRECTORY_UNUSABLE, text) from None
        raise
    except OSError as error:
        raise unusable(error, path) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        os.close(descriptor)
        raise DirectoryUnusable(FallbackReason.OTHER_USER, f"{path} belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        os.close(descriptor)
        mode = stat.S_IMODE(found.st_mode)
        raise DirectoryUnusable(
            FallbackReason.DIRECTORY_UNUSABLE, f"{path} has mode {mode:o} where only 700 is private"
        )
    return descriptor


def listen_as(listener: socket.socket, directory: int, name: str, backlog: int) -> None:
    """Let a Unix socket listen; it gets its name only then, so a name that refuses is stale.

    directory: open; it stays so.
    """
    hidden = HIDDEN + name
    listener.bind(_reach(directory, hidden))
    try:
        listener.listen(backlog)
        os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(hidden, dir_fd=directory)
        raise


def connect_or_remove(directory: int, name: str) -> socket.socket:
    """A connection to the socket `name`; BlockingIOError when its backlog is full.

    The name of a socket that refuses is removed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_reach(directory, name))
    except BaseException as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
        raise
    return connection


def _reach(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"


def sockets_in(directory: int) -> list[str]:
    """The names of the sockets in an open directory."""
    found = []
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            # A symbolic link could lead out of the private directory.
            if stat.S_ISSOCK(mode) and not name.startswith(HIDDEN):
                found.append(name)
    return found
