"""The names of announcements: binding one, and sending to the socket behind one.

Theory of operation
-------------------
A client binds a datagram socket whose name is the network namespace and the four-tuple of its TCP
connection.  It does so in a directory of its own, so in a directory that a group shares no member
can remove, replace or occupy the names of another one.  A server looks a name up in the directories
of all members: one system call for each, at most `_MOST_DIRECTORIES`.

A name counts only if it is a socket that belongs to the owner of the directory, so a symbolic link,
a FIFO or another user's socket does not.  In a private directory only this user can make names, so
the name itself is the address to send to.  A member of a group may replace a name between the look
and the datagram.  There the server opens the name without following a link and without opening what
is behind it (O_PATH, O_NOFOLLOW), and sends to the socket that is open.  The server never waits.

If two members have a name for the same connection, both get the answer.  So a member gains nothing
by occupying the names of others.

The mode of the name has the sticky bit, which means nothing for a socket, if the client takes SMC-R
or nothing.

A cleaner of /tmp may remove the directories.  A client makes its directory again as soon as it
cannot bind a name there, and a server checks its directories every few seconds.

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
from trio_smc.host.descriptors import refuse_descriptors
from trio_smc.host.private_directory import (
    PrivateDirectory,
    own_credentials,
)

__all__ = ["DATAGRAM", "KIND", "Names", "announced_name", "send_to"]

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


def send_to(sender: socket.socket, message: bytes, path: str | None = None) -> bool:
    """Send a datagram without waiting.

    sender: a datagram socket that does not block.
    path: where to; None: to the socket that ``sender`` is connected to.

    False: it was not sent, as the socket is closed or shut down, its queue is full, or this process
    lacks memory.  The receiver has nothing of it then.
    """
    try:
        sender.sendmsg([message], own_credentials(), 0, path)
    except OSError:
        return False
    return True


class Names:
    """The names of announcements in one private directory: this user's, and those of all members.

    Args:
      private: the private directory (`Config.private_directory`).
    """

    def __init__(self, private: Path) -> None:
        self._private = private
        self._own: PrivateDirectory | None = None  # this user's directory of names
        self._path = ""  # where it is
        self._root: PrivateDirectory | None = None  # the private directory, if a group shares it
        self._members: list[PrivateDirectory] = []  # directories of names in it
        self._stamp = 0  # change time of `_root` when `_members` was made; 0: look again
        self._not_before = 0  # no listing before that, by `time.monotonic_ns`
        self._sender: socket.socket | None = None

    def open(self) -> PrivateDirectory:
        """Open this user's directory, again if it was replaced; it is made if it is missing.

        Raises DirectoryUnusable, OSError.
        """
        self.close()
        self._sender = socket.socket(socket.AF_UNIX, DATAGRAM)
        root = PrivateDirectory.open(self._private, create=True)
        try:
            name = root.member_directory(KIND, create=True)
            self._path = f"{self._private}/{name}"
            self._own = root.below(name, create=True)
        except BaseException:
            root.close()
            raise
        if root.group is None:
            root.close()
        else:
            self._root = root
        self._own.remove_dead_sockets()
        return self._own

    def is_current(self) -> bool:
        """True if other processes look at the directory that is open here."""
        if self._own is None:
            return False
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._own.descriptor))

    def close(self) -> None:
        """Close all descriptors, in a forked child, too.  Idempotent."""
        self._close_members()
        for each in (self._own, self._root, self._sender):
            if each is not None:
                each.close()
        self._own = self._root = self._sender = None

    def _close_members(self) -> None:
        for each in self._members:
            each.close()
        self._members = []
        self._stamp = 0

    # --- for a client ------------------------------------------------------------------------

    def listen(self, name: str, *, required: bool = False) -> socket.socket:
        """A datagram socket with this name, for `messages.receive`; the name of a process that is
        gone is taken over.

        required: the client takes SMC-R or nothing.

        Raises:
          DirectoryUnusable, OSError: it cannot be done; EADDRINUSE: the name is another socket's.
        """
        sock = socket.socket(socket.AF_UNIX, DATAGRAM)
        try:
            refuse_descriptors(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            if required:
                os.fchmod(sock.fileno(), stat.S_ISVTX | 0o700)  # becomes the mode of the name
            self._bind(sock, name)
        except BaseException:
            sock.close()
            raise
        return sock

    def _bind(self, sock: socket.socket, name: str) -> None:
        for attempt in range(_ATTEMPTS):
            directory = self._own or self.open()
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
        """True if a name of this user is still there."""
        return self._own is not None and self._own.has(name)

    def remove(self, name: str) -> None:
        """Remove a name of this user; one that is gone already is fine."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.remove(name)

    # --- for a server ------------------------------------------------------------------------

    def find(self, name: str) -> tuple[list[PrivateDirectory], bool]:
        """The directories with a socket of this name, and if one of the clients takes SMC-R or
        nothing.

        Never waits.  Nothing is found if this process lacks descriptors: the client gives up after
        a time, as if the server did not speak SMC-R.
        """
        found: list[PrivateDirectory] = []
        is_required = False
        for directory in self._directories():
            number = directory.descriptor
            if not os.access(name, os.F_OK, dir_fd=number, follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                attributes = os.stat(name, dir_fd=number, follow_symlinks=False)
                if stat.S_ISSOCK(attributes.st_mode) and attributes.st_uid == directory.owner:
                    found.append(directory)
                    is_required |= bool(attributes.st_mode & stat.S_ISVTX)
        return found, is_required

    def send(self, directory: PrivateDirectory, name: str, message: bytes) -> bool:
        """Send a datagram to a name that was found, as `send_to`."""
        if self._sender is None:
            return False
        if directory.group is None:
            return send_to(self._sender, message, directory.reach(name))
        with contextlib.suppress(OSError), directory.socket_at(name) as path:
            return send_to(self._sender, message, path)
        return False

    def _directories(self) -> list[PrivateDirectory]:
        if self._root is not None:
            self._list_members(self._root)
            return self._members
        return [self._own] if self._own is not None else []

    def _list_members(self, root: PrivateDirectory) -> None:
        """Open the directories of all members of the group, if the names in ``root`` changed."""
        changed = os.fstat(root.descriptor).st_ctime_ns
        began = time.monotonic_ns()
        if changed == self._stamp or began < self._not_before:
            return
        self._close_members()
        with contextlib.suppress(OSError):
            for name in root.member_directories(KIND)[:_MOST_DIRECTORIES]:
                try:
                    self._members.append(root.below(name))
                except OSError as error:
                    if is_lack(error):
                        raise
        # A change within the same tick of the clock does not show.
        settled = time.time_ns() - changed > _TICKS_NS
        self._stamp = changed if settled else 0
        now = time.monotonic_ns()
        self._not_before = now + _LISTING_SHARE * (now - began)
