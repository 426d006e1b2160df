"""The user's private directory, and Unix sockets in it and below.

Theory of operation: the private directory is opened once, without following a symbolic link, and
what was opened is checked (ours, mode 0700); everything below is reached through that descriptor
and cannot be anybody else's.  Sockets are bound and connected as /proc/self/fd/N/name, since a
Unix address ends at 107 bytes and directories may be deeper.

Connecting to the socket of a dead process is refused, and so is connecting to one that is bound
and does not listen yet.  So a socket gets its name only when it listens, and a refused name may be
removed by whoever met it.  Who only wants to know whether a process is behind a name connects with
a socket of another type: that too is refused when nobody is there, and fails otherwise without
waking anybody.

Who is at the other end of a Unix socket the kernel tells (SO_PEERCRED, unix(7)).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Self

from trio_smc._base.reasons import FallbackReason

__all__ = [
    "DirectoryUnusable",
    "PrivateDirectory",
    "is_same_user",
    "peer_user",
    "unusable",
]


if sys.platform == "linux":
    _FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
else:
    _FLAGS = 0  # nobody comes here
_HIDDEN = "."  # names of sockets that do not listen yet start so
_STALE_AFTER = 60.0  # seconds after which such a name is left over from a crash
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


class DirectoryUnusable(Exception):
    """The private directory cannot be used; connections stay on TCP.

    Attributes:
      reason: what to tell the user.
      number: the error number that fits best.
    """

    def __init__(self, reason: FallbackReason, text: str, number: int = errno.EPERM) -> None:
        super().__init__(text)
        self.reason = reason
        self.number = number


def unusable(error: OSError, path: Path) -> DirectoryUnusable:
    """The `DirectoryUnusable` for an error met in the directory `path`."""
    reason = FallbackReason.DIRECTORY_UNUSABLE
    if error.errno in _RESOURCE_ERRORS:
        reason = FallbackReason.OUT_OF_RESOURCES
    elif error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                reason = FallbackReason.OTHER_USER
    return DirectoryUnusable(reason, f"{path}: {error}", error.errno or errno.EIO)


class PrivateDirectory:
    """The user's private directory, or one below it, held open until `close`."""

    def __init__(self, descriptor: int) -> None:
        """See `open` and `below`.  ``descriptor``: the open directory, from now on this one's."""
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path, *, create: bool) -> Self:
        """Open the private directory itself.

        create: make it when it is missing.

        Raises:
          FileNotFoundError: it is missing, without `create`.
          DirectoryUnusable: it is a symbolic link, not a directory, somebody else's, accessible
            to others, or cannot be made.
        """
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, _FLAGS)
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
            text = f"{path} belongs to user {found.st_uid}"
            raise DirectoryUnusable(FallbackReason.OTHER_USER, text)
        if found.st_mode & 0o077:
            os.close(descriptor)
            text = f"{path} has mode {stat.S_IMODE(found.st_mode):o} where only 700 is private"
            raise DirectoryUnusable(FallbackReason.DIRECTORY_UNUSABLE, text)
        return cls(descriptor)

    def below(self, path: str, *, create: bool = False) -> PrivateDirectory:
        """Open a directory below this one; ``create`` what is missing of its path.

        Raises:
          OSError: it cannot be opened or made; FileNotFoundError also when somebody removed it
            just now.
        """
        if create:
            made = ""
            for part in path.split("/"):
                made = f"{made}/{part}" if made else part
                with contextlib.suppress(FileExistsError):
                    os.mkdir(made, mode=0o700, dir_fd=self.descriptor)
        return PrivateDirectory(os.open(path, _FLAGS, dir_fd=self.descriptor))

    def close(self) -> None:
        """Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- sockets -----------------------------------------------------------------------------

    def listen(
        self, name: str, backlog: int, kind: socket.SocketKind = socket.SOCK_SEQPACKET
    ) -> socket.socket:
        """A listening socket, which does not block; it gets its name only when it listens."""
        listener, hidden = socket.socket(socket.AF_UNIX, kind), _HIDDEN + name
        try:
            listener.setblocking(False)
            os.fchmod(listener.fileno(), 0o600)  # becomes the mode of the name
            listener.bind(self._reach(hidden))
            try:
                listener.listen(backlog)
                os.rename(hidden, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except BaseException:
                self.remove(hidden)
                raise
        except BaseException:
            listener.close()
            raise
        return listener

    def connect(self, name: str) -> socket.socket:
        """A SOCK_SEQPACKET connection, which does not block, to the socket `name`.

        Raises:
          BlockingIOError: its backlog is full.
          ConnectionRefusedError: its process is gone; so is the name now.
          OSError: there is no such socket.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self._reach(name))
        except BaseException as error:
            connection.close()
            if isinstance(error, ConnectionRefusedError):
                with contextlib.suppress(OSError):
                    self.remove(name)
            raise
        return connection

    def remove(self, name: str) -> None:
        """Remove a name; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sockets(self) -> list[str]:
        """The names of the sockets."""
        return [name for name in self._sockets() if not name.startswith(_HIDDEN)]

    def remove_stale(self, prefix: str = "") -> None:
        """Remove the sockets that dead processes left behind, of names that begin so."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            for name in self._sockets():
                if not name.removeprefix(_HIDDEN).startswith(prefix):
                    continue
                with contextlib.suppress(OSError):
                    try:
                        sock.connect(self._reach(name))
                    except ConnectionRefusedError:
                        if not self._is_new(name):
                            self.remove(name)

    def _sockets(self) -> list[str]:
        found = []
        for name in os.listdir(self.descriptor):
            with contextlib.suppress(OSError):
                mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
                # A symbolic link could lead out of the private directory.
                if stat.S_ISSOCK(mode):
                    found.append(name)
        return found

    def _is_new(self, name: str) -> bool:
        """Whether it is just being made: for a moment nobody seems to be there."""
        if not name.startswith(_HIDDEN):
            return False
        made = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
        return time.time() - made < _STALE_AFTER

    def _reach(self, name: str) -> str:
        return f"/proc/self/fd/{self.descriptor}/{name}"


def peer_user(connection: socket.socket) -> int:
    """The effective user at the other end of a Unix socket, when it connected or listened."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(found)[1]
    return user


def is_same_user(connection: socket.socket) -> bool:
    """Whether that user is ours."""
    return peer_user(connection) == os.geteuid()
