"""Where same-host discovery keeps its sockets: names, checks, and removing what is stale.

::

    <private directory>/tcp/<network namespace>/<family>-<address>-<port>/<pid>-<random>

One directory per TCP address that is listened on, in it one Unix socket per listening process
(or stack): several of them when workers share the port.  An address means something only within
its network namespace, whose inode number is therefore part of the path.  <family> is "4" or "6",
or "d" for an IPv6 wildcard that takes IPv4 connections as well.

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
import secrets
import socket
import stat
import sys
import time
from pathlib import Path

from trio_smc._base.reasons import FallbackReason

__all__ = [
    "HIDDEN",
    "DirectoryUnusable",
    "Listeners",
    "Listings",
    "NewSocket",
    "Stamp",
    "listen_as",
    "listener_name",
    "namespace_path",
    "open_private",
    "settled",
    "stamps",
    "unchanged",
    "wildcard_names",
]

if sys.platform == "linux":  # elsewhere nobody comes here
    _FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HIDDEN = "."  # names of sockets that do not listen yet start so
# Publishers that come and go may remove a directory while another wants to use it.
_ATTEMPTS = 20
_TICKS_NS = 100_000_000
_MOST_KNOWN = 256
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


class DirectoryUnusable(Exception):
    """The private directory cannot be used; connections stay on TCP.

    Attributes:
      reason: what to tell the user.
    """

    def __init__(self, reason: FallbackReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


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
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        if create:
            text = f"{path} cannot be made"
            raise DirectoryUnusable(FallbackReason.DIRECTORY_UNUSABLE, text) from None
        raise
    except OSError as error:
        raise _unusable(error, path) from error
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


def listener_name(address: str, port: int, *, dual_stack: bool) -> str:
    """The directory name of a listener.

    address: its own, as `trio_smc.rendezvous.prefixes.plain_address` writes it.
    dual_stack: an IPv6 wildcard that accepts IPv4 too.
    """
    family = "d" if dual_stack and address == "::" else "6" if ":" in address else "4"
    return f"{family}-{address}-{port}"


def wildcard_names(address: str, port: int) -> tuple[str, ...]:
    """The directory names of the wildcard listeners that serve this address, if it is local."""
    wildcard = "::" if ":" in address else "0.0.0.0"
    return (
        listener_name(wildcard, port, dual_stack=False),
        listener_name("::", port, dual_stack=True),
    )


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


class NewSocket:
    """A listening Unix socket in the directory `name`, reachable until `remove`."""

    def __init__(self, private: Path, name: str, backlog: int) -> None:
        """Make it.

        Raises:
          DirectoryUnusable: why it cannot be made.
        """
        self._private = private
        self._path = f"{namespace_path()}/{name}"
        self._pid = os.getpid()
        self._name = f"{self._pid}-{secrets.token_hex(8)}"
        for attempt in range(_ATTEMPTS):
            root = open_private(private, create=True)
            try:
                self._directory = _make(root, self._path)
                try:
                    self.listener = self._listen(backlog)
                except BaseException:
                    os.close(self._directory)
                    raise
            except FileNotFoundError as error:
                if attempt == _ATTEMPTS - 1:
                    raise _unusable(error, private) from error
            except OSError as error:
                raise _unusable(error, private) from error
            else:
                break
            finally:
                os.close(root)
        self._remove_stale()

    def remove(self) -> None:
        """Take the name away, and directories that nobody uses; the listener stays open."""
        if self._pid != os.getpid():
            os.close(self._directory)
            return  # a forked child; the listener is its parent's
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        os.close(self._directory)
        with contextlib.suppress(OSError, DirectoryUnusable):
            root = open_private(self._private, create=False)
            try:
                os.rmdir(self._path, dir_fd=root)
                os.rmdir(os.path.dirname(self._path), dir_fd=root)
            finally:
                os.close(root)

    def _listen(self, backlog: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listen_as(listener, self._directory, self._name, backlog)
        except BaseException:
            listener.close()
            raise
        return listener

    def _remove_stale(self) -> None:
        with contextlib.suppress(OSError):
            for name in _sockets(self._directory):
                if name != self._name:
                    with contextlib.suppress(OSError):
                        _connect(self._directory, name).close()


class Listings:
    """The names in directories as they were listed last, for those that have not changed since."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, list[str]]] = {}

    def sockets(self, directory: int) -> list[str]:
        """The names of the sockets in an open directory, a list of the caller's own."""
        found = os.fstat(directory)
        place, changed = (found.st_dev, found.st_ino), found.st_ctime_ns
        known = self._known.get(place)
        if known is not None and known[0] == changed:
            return known[1].copy()
        names = _sockets(directory)
        # The clock of a directory ticks slowly: what changes right after may not show.
        if time.time_ns() - changed > _TICKS_NS:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[place] = changed, names.copy()
        return names


Stamp = tuple[str, int, int, int]
"""Path of a directory, device, inode, and when its names changed last, in ns."""


def stamps(private: Path, root: int, path: str) -> list[Stamp]:
    """The stamp of the directory `path` below `root`, the open private one; none: it is missing.

    A directory that is missing shows when the one above it changes.
    """
    try:
        found = os.stat(path, dir_fd=root)
    except FileNotFoundError:
        return []
    return [(f"{private}/{path}", found.st_dev, found.st_ino, found.st_ctime_ns)]


def settled(known: list[Stamp]) -> bool:
    """Whether a change from now on would show in these stamps: their clock ticks slowly."""
    now = time.time_ns()
    return all(now - changed > _TICKS_NS for _, _, _, changed in known)


def unchanged(known: list[Stamp]) -> bool:
    """Whether directories have the names that they had.

    A directory that was moved into the place of another has another inode, so what was checked
    of the way there need not be checked again.
    """
    try:
        for path, device, inode, changed in known:
            found = os.stat(path)
            if found.st_ctime_ns != changed or found.st_ino != inode or found.st_dev != device:
                return False
    except OSError:
        return False
    return True


class Listeners:
    """The sockets in the directory `name`, to be connected to one by one.

    Attributes:
      waiting: names still to be tried; none when the directory does not exist.
      place: device and inode of the directory.
    """

    def __init__(self, root: int, namespace: str, name: str, listings: Listings) -> None:
        """`root`: the open private directory; `namespace`: what `namespace_path` returned."""
        self._directory = -1
        self.waiting: list[str] = []
        self.place = (0, 0)
        try:
            self._directory = os.open(f"{namespace}/{name}", _FLAGS, dir_fd=root)
            found = os.fstat(self._directory)
            self.place = found.st_dev, found.st_ino
            self.waiting = listings.sockets(self._directory)
        except FileNotFoundError:
            self.close()
        except BaseException:
            self.close()
            raise

    def connect(self, limit: int) -> list[tuple[str, socket.socket]]:
        """Non-blocking connections to those that take one, each with its name; the sockets of the
        dead are removed.

        limit: connections to make, at most.

        Listeners that have too many connections to accept stay in `waiting`: try again later.
        """
        connected: list[tuple[str, socket.socket]] = []
        names, self.waiting = self.waiting[:limit], []
        for name in names:
            try:
                connected.append((name, _connect(self._directory, name)))
            except BlockingIOError:
                self.waiting.append(name)
            except OSError:
                continue
        return connected

    def close(self) -> None:
        """Idempotent."""
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)


def _connect(directory: int, name: str) -> socket.socket:
    """A connection to the socket `name`; BlockingIOError when its backlog is full."""
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


def _unusable(error: OSError, path: Path) -> DirectoryUnusable:
    """The `DirectoryUnusable` for an error met in the directory `path`."""
    reason = FallbackReason.DIRECTORY_UNUSABLE
    if error.errno in _RESOURCE_ERRORS:
        reason = FallbackReason.OUT_OF_RESOURCES
    elif error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                reason = FallbackReason.OTHER_USER
    return DirectoryUnusable(reason, f"{path}: {error}")


def namespace_path() -> str:
    """Where addresses of the calling thread's network namespace are, below the private one."""
    return f"tcp/{os.stat('/proc/thread-self/ns/net').st_ino}"


def _reach(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"


def _make(root: int, path: str) -> int:
    """Make and open the directory `path` below `root`."""
    made = ""
    for part in path.split("/"):
        made = f"{made}/{part}" if made else part
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, mode=0o700, dir_fd=root)
    return os.open(path, _FLAGS, dir_fd=root)


def _sockets(directory: int) -> list[str]:
    found = []
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            # A symbolic link could lead out of the private directory.
            if stat.S_ISSOCK(mode) and not name.startswith(HIDDEN):
                found.append(name)
    return found
