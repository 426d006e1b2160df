"""The user's private directory, or one that a group shares, and Unix sockets in it and below.

Theory of operation: the private directory is opened once, without following a symbolic link, and
what was opened is checked (ours, mode 0700); everything below is reached through that descriptor
and cannot be anybody else's.  A directory that was named outright, and is none of the default
places, where others could put one, may be a group's instead: mode 3770, the group one of ours.  By
the set-group-ID bit all below is the group's too, and by the sticky bit nobody takes away or
replaces what is another's.  Who names it trusts the group's members.  Sockets are bound and
connected as /proc/self/fd/N/name, since a Unix address ends at 107 bytes and directories may be
deeper.

Connecting to the socket of a dead process is refused, and so is connecting to one that is bound
and does not listen yet.  So a socket gets its name only when it listens, and a refused name may be
removed by whoever met it.  Who only wants to know whether a process is behind a name connects with
a socket of another type: that too is refused when nobody is there, and fails otherwise without
waking anybody.

Who is at the other end of a Unix socket the kernel tells (SO_PEERCRED and SO_PEERGROUPS, unix(7)).
Users and groups that a user namespace does not know all have one number there, which is nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
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
    "default_directories",
    "is_admitted",
    "is_named",
    "is_same_user",
    "peer_user",
    "shared_group",
    "unusable",
]


if sys.platform == "linux":
    _FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
else:
    _FLAGS = 0  # nobody comes here
_HIDDEN = "."  # names of sockets that do not listen yet start so
_STALE_AFTER = 60.0  # seconds after which such a name is left over from a crash
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # linux/include/uapi/asm-generic/socket.h; 4 bytes for each
_MOST_GROUPS = 256  # of a peer, as many as Python has room for
_SHARED_MODE = 0o3770
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


def default_directories() -> tuple[Path, ...]:
    """Where the private directory is when no other is named; the first is the one to use."""
    # Not every system has user numbers; those that have none have no use for the directory.
    last = Path(f"/tmp/trio-smc-{os.getuid() if hasattr(os, 'getuid') else 0}")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "trio-smc", last) if runtime else (last,)


def is_named(path: Path) -> bool:
    """Whether a directory was named outright: it is none of the default places."""
    return path not in default_directories()


def shared_group(path: Path, found: os.stat_result) -> int | None:
    """The group that shares a directory, if it is one that may be shared, and with this process.

    path: as it was named.
    found: what is there.
    """
    if not is_named(path) or stat.S_IMODE(found.st_mode) != _SHARED_MODE:
        return None
    if found.st_gid not in (os.getegid(), *os.getgroups()) or _is_nobody(found.st_gid, "gid"):
        return None
    return found.st_gid


class PrivateDirectory:
    """The user's private directory, or a group's, or one below it, held open until `close`.

    Attributes:
      group: whose members may be talked to besides processes of this user; None: nobody else.
    """

    def __init__(self, descriptor: int, group: int | None = None) -> None:
        """See `open` and `below`.  ``descriptor``: the open directory, from now on this one's."""
        self.descriptor: int = descriptor
        self.group = group

    @classmethod
    def open(cls, path: Path, *, create: bool) -> Self:
        """Open the private directory itself, or one that a group shares.

        create: make it when it is missing.

        Raises:
          FileNotFoundError: it is missing, without `create`.
          DirectoryUnusable: it is a symbolic link, not a directory, somebody else's, accessible
            to others and no group's, or cannot be made.
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
        group = shared_group(path, found)
        if group is not None:
            return cls(descriptor, group)
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
                    self._make(made)
        return PrivateDirectory(os.open(path, _FLAGS, dir_fd=self.descriptor), self.group)

    def _make(self, path: str) -> None:
        """Make one directory; it appears with all its bits.  Raises FileExistsError."""
        if self.group is None:
            os.mkdir(path, mode=0o700, dir_fd=self.descriptor)
            return
        if os.access(path, os.F_OK, dir_fd=self.descriptor, follow_symlinks=False):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        parent, _, name = path.rpartition("/")
        hidden = f"{parent}{'/' * bool(parent)}{_HIDDEN}{name}-{secrets.token_hex(8)}"
        os.mkdir(hidden, mode=0o700, dir_fd=self.descriptor)
        try:
            descriptor = os.open(hidden, _FLAGS, dir_fd=self.descriptor)
            try:
                os.fchmod(descriptor, _SHARED_MODE)  # the umask does not matter
            finally:
                os.close(descriptor)
            os.rename(hidden, path, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            os.rmdir(hidden, dir_fd=self.descriptor)
            if not os.access(path, os.F_OK, dir_fd=self.descriptor, follow_symlinks=False):
                raise  # nobody else made it meanwhile

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
                if self.group is not None:
                    self._share(hidden)
                listener.listen(backlog)
                os.rename(hidden, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except BaseException:
                self.remove(hidden)
                raise
        except BaseException:
            listener.close()
            raise
        return listener

    def _share(self, name: str) -> None:
        """Let the group connect to a socket of ours, whatever the umask left."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise FileNotFoundError(errno.ENOENT, "somebody put another in its place", name)
            os.chmod(f"/proc/self/fd/{descriptor}", 0o660)
        finally:
            os.close(descriptor)

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
    user = peer_user(connection)
    return user == os.geteuid() and not _is_nobody(user, "uid")


def is_admitted(connection: socket.socket, group: int | None) -> bool:
    """Whether to talk to the process at the other end: this user's, or a member of the group.

    group: `PrivateDirectory.group`.
    """
    return is_same_user(connection) or (group is not None and group in _peer_groups(connection))


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """All groups at the other end, the primary one first."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    primary: int = _CREDENTIALS.unpack(found)[2]
    try:
        more = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:  # more than there is room for: only the primary one is known
        more = b""
    return (primary, *struct.unpack(f"{len(more) // 4}I", more))


def _is_nobody(number: int, kind: str) -> bool:
    """Whether this number stands for all users or groups that our namespace does not know."""
    try:
        if number != _number_of_nobody(kind):
            return False
        known = Path(f"/proc/self/{kind}_map").read_bytes().split()
    except OSError:
        return False
    return known != [b"0", b"0", b"4294967295"]


@functools.cache  # each accepted connection asks; a failure is not kept
def _number_of_nobody(kind: str) -> int:
    """What all users or groups have that a user namespace does not know; raises OSError."""
    return int(Path(f"/proc/sys/kernel/overflow{kind}").read_bytes())
