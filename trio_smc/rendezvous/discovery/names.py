"""The names of announcements: binding one, and finding the socket behind one.

Theory of operation
-------------------
A client binds a datagram socket whose name is the network namespace and the four-tuple of its TCP
connection.  It does so in a directory of its own, so in a directory that a group shares no member
can remove, replace or occupy the names of another one.  A server looks a name up in the directories
of all members: one system call for each, at most `_MOST_DIRECTORIES`.

A member may put anything under a name: a symbolic link to a socket of another service, a FIFO, a
socket whose process has stopped.  So the server opens the name without following a link and without
opening what is behind it (O_PATH, O_NOFOLLOW), uses it only if it is a socket of a user to whom it
talks, and sends without waiting.  The address is that of the open descriptor, so the name may
change meanwhile.

If two members have a name for the same connection, both get the answer.  So a member gains nothing
by occupying the names of others.

The mode of the name has the sticky bit, which means nothing for a socket, if the client takes SMC-R
or nothing.

A cleaner of /tmp may remove the directories.  A removed directory has no links any more, so each
side notices and opens the new one.

A process that was killed leaves its names behind.  Each stack removes the old ones when it opens
its directory, and a client that meets one under the name that it wants removes that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path
from typing import Final

from trio_smc._base.resources import is_lack
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    own_credentials,
    socket_path,
)

__all__ = [
    "DATAGRAM",
    "KIND",
    "AllNames",
    "OwnNames",
    "announced_name",
    "mark_required",
    "requires_smc",
    "send_to",
]

DATAGRAM: Final = int(socket.SOCK_DGRAM) | int(getattr(socket, "SOCK_NONBLOCK", 0))
"""The type of all sockets of discovery."""
KIND: Final = "announced"
"""The kind of directories (`PrivateDirectory.member_directory`) that contain the names."""
_ATTEMPTS: Final = 4
_MOST_DIRECTORIES: Final = 64
_TICKS_NS: Final = 100_000_000  # the clock of a directory's change time ticks at least so often
_LISTING_SHARE: Final = 10
"""Listing the directories of a group takes at most one part in so many of the time, so that a
member that changes the group's directory all the time does not keep servers busy."""


def announced_name(namespace: str, key: bytes) -> str:
    """The name of an announcement: at most 83 bytes, so that it fits into a Unix address.

    namespace: where the server is (`directory.namespace_name`).
    key: `messages.four_tuple`.
    """
    return f"{namespace}-{key.hex()}"


def send_to(sender: socket.socket, descriptor: int, message: bytes) -> bool:
    """Send a datagram to the socket that `PrivateDirectory.open_socket` has opened.

    sender: a datagram socket that does not block.

    False: it was not sent, as the socket is closed or shut down, its queue is full, or this process
    lacks memory.  The receiver has nothing of it then.
    """
    path = socket_path(descriptor)
    try:
        if credentials := own_credentials():
            sender.sendmsg([message], credentials, 0, path)
        else:
            sender.sendto(message, path)
    except OSError:
        return False
    return True


class OwnNames:
    """This user's directory of announcements, for a client."""

    def __init__(self, private: Path) -> None:
        """``private``: the user's private directory (`Config.private_directory`)."""
        self._private = private
        self._directory: PrivateDirectory | None = None

    def bind(self, sock: socket.socket, name: str) -> None:
        """Give a socket a name; the name of a process that is gone is taken over.

        Raises:
          DirectoryUnusable, OSError: it cannot be done; EADDRINUSE: the name is another socket's.
        """
        for attempt in range(_ATTEMPTS):
            directory = self._directory or self.open()
            try:
                directory.bind(sock, name)
            except FileNotFoundError:
                self.close()  # a cleaner has removed the directory
                if attempt == _ATTEMPTS - 1:
                    raise
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not directory.remove_dead(name):
                    raise
            else:
                return
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), name)

    def has(self, name: str) -> bool:
        """True if the name is still there."""
        return self._directory is not None and self._directory.has(name)

    def remove(self, name: str) -> None:
        """Remove a name; one that is gone already is fine."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._directory.remove(name)

    def is_current(self) -> bool:
        """True if servers look at the directory that is open here, or none is open."""
        if self._directory is None:
            return True
        with contextlib.suppress(OSError, DirectoryUnusable):
            root = PrivateDirectory.open(self._private, create=False)
            try:
                found = root.below(root.member_directory(KIND))
            finally:
                root.close()
            try:
                ours = os.fstat(self._directory.descriptor)
                return os.path.samestat(ours, os.fstat(found.descriptor))
            finally:
                found.close()
        return False

    def close(self) -> None:
        """Close the directory; it is opened anew when it is needed.  Idempotent."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def open(self) -> PrivateDirectory:
        """Open the directory, and make it if it is missing.  Raises DirectoryUnusable, OSError."""
        self.close()
        root = PrivateDirectory.open(self._private, create=True)
        try:
            name = root.member_directory(KIND, create=True)
            self._directory = root.below(name, create=True)
        finally:
            root.close()
        self._directory.remove_dead_sockets()
        return self._directory


class AllNames:
    """The directories of announcements of all users, for a server."""

    def __init__(self, private: Path) -> None:
        """``private``: the user's private directory (`Config.private_directory`)."""
        self._private = private
        self._root: PrivateDirectory | None = None
        self._directories: list[PrivateDirectory] = []
        self._stamp = 0  # change time of `_root` when `_directories` was made; 0: look again
        self._not_before = 0  # no listing before that, by `time.monotonic_ns`

    def open(self) -> None:
        """Open the directories; of a user that has none the directory is made.

        Raises DirectoryUnusable, OSError.
        """
        self.close()
        self._root = PrivateDirectory.open(self._private, create=True)
        if self._root.group is None:
            name = self._root.member_directory(KIND, create=True)
            self._directories = [self._root.below(name, create=True)]

    @property
    def are_own(self) -> bool:
        """True if only this user can have names: no group shares the private directory."""
        return self._root is not None and self._root.group is None

    def find(self, name: str) -> list[int]:
        """Descriptors (O_PATH) of all that has this name, as `PrivateDirectory.open_name` returns
        them.

        Never waits.  The caller closes the descriptors.  Returns nothing if this process lacks
        descriptors: the client gives up after a time, as if the server did not speak SMC-R.
        """
        root = self._root
        if root is None:
            return []
        if root.group is not None:
            self._list_members(root)
        found = self._look(name)
        if not found and any(each.was_removed() for each in (root, *self._directories)):
            try:
                self.open()
            except (OSError, DirectoryUnusable):
                return []
            if self._root is not None and self._root.group is not None:
                self._list_members(self._root)
            found = self._look(name)
        return found

    def _look(self, name: str) -> list[int]:
        found: list[int] = []
        for directory in self._directories:
            try:
                found.append(directory.open_name(name))
            except OSError:
                continue
        return found

    def _list_members(self, root: PrivateDirectory) -> None:
        """Open the directories of all members of the group, if the names in ``root`` changed."""
        changed = os.fstat(root.descriptor).st_ctime_ns
        began = time.monotonic_ns()
        if changed == self._stamp or began < self._not_before:
            return
        for each in self._directories:
            each.close()
        self._directories = []
        with contextlib.suppress(OSError):
            for name in root.member_directories(KIND)[:_MOST_DIRECTORIES]:
                try:
                    self._directories.append(root.below(name))
                except OSError as error:
                    if is_lack(error):
                        raise
        # A change within the same tick of the clock does not show.
        settled = time.time_ns() - changed > _TICKS_NS
        self._stamp = changed if settled else 0
        now = time.monotonic_ns()
        self._not_before = now + _LISTING_SHARE * (now - began)

    def close(self) -> None:
        """Close the directories.  Idempotent."""
        for each in self._directories:
            each.close()
        self._directories = []
        root, self._root = self._root, None
        if root is not None:
            root.close()
        self._stamp = 0


def requires_smc(descriptor: int) -> bool:
    """True if the client with this name takes SMC-R or nothing."""
    return bool(os.fstat(descriptor).st_mode & stat.S_ISVTX)


def mark_required(sock: socket.socket) -> None:
    """Have the name of a socket say so, before it is bound."""
    os.fchmod(sock.fileno(), stat.S_ISVTX | 0o700)
