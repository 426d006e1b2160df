"""The names of announcements: binding one, and sending to the socket behind one.

Theory of operation
-------------------
A client binds a datagram socket whose name is the network namespace and the four-tuple of its TCP
connection.  It does so in a directory of its own, so in a directory that a group shares no member
can remove, replace or occupy the names of another one.  A server looks a name up in the directories
of all members: one system call for each, at most `_MOST_DIRECTORIES`.

The name may be a symbolic link, a FIFO or the socket of another service, and may become one at any
moment.  In a group's directory each member can do that.  In a private directory that containers
share, a process of the same user in another container can, which has no other way to send to the
services of this container.  So the server opens the name without following a link and without
opening what is behind it (O_PATH, O_NOFOLLOW), and sends to what is open.  The kernel refuses to
send to anything but a socket.  In a group's directory the socket must also belong to the owner of
the member's directory.  The server never waits.

The directory is named by its descriptor, because another user may make a directory with its path
when a cleaner of /tmp has removed it.

If two members have a name for the same connection, both get the answer.  So a member gains nothing
by occupying the names of others.

The mode of the name has the sticky bit, which means nothing for a socket, if the client takes SMC-R
or nothing.

A client that keeps its connections to an address on TCP, because they are too short, does not
announce them.  It sets a *mark* once in a while instead, so that servers know the reason, too: an
empty file in the same directory, whose name has the port 0.

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
from trio_smc.host.private_directory import PATH_FLAGS, PrivateDirectory, own_credentials

__all__ = ["DATAGRAM", "KIND", "Names", "announced_name", "send_to"]

_MARK: Final = "short-"
_MARK_HOLDS: Final = 60.0
"""Seconds for which a mark holds after it was set.  Chosen."""
DATAGRAM: Final = int(socket.SOCK_DGRAM) | int(getattr(socket, "SOCK_NONBLOCK", 0))
"""The type of all sockets of discovery."""
KIND: Final = "announced"
"""The kind of directories (`PrivateDirectory.member_directory`) that contain the names."""
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


def send_to(sender: socket.socket, message: bytes) -> bool:
    """Send a datagram without waiting.

    sender: a datagram socket that does not block, and is connected to the receiver.

    False: it was not sent, as the socket is closed or shut down, its queue is full, or this process
    lacks memory.  The receiver has nothing of it then.
    """
    try:
        sender.sendmsg([message], own_credentials())
    except OSError:
        return False
    return True


def _is_fresh(mark: os.stat_result) -> bool:
    return abs(time.time() - mark.st_mtime) < _MARK_HOLDS


def _remove_marks(directory: PrivateDirectory) -> None:
    """Remove the marks that do not hold any more."""
    for entry in directory.entries():
        if entry.name.startswith(_MARK):
            with contextlib.suppress(OSError):
                if not _is_fresh(entry.stat(follow_symlinks=False)):
                    directory.remove(entry.name)


class Names:
    """The names of announcements in one private directory: this user's, and those of all members.

    Args:
      private: the private directory (`Config.private_directory`).
    """

    def __init__(self, private: Path) -> None:
        self._private = private
        self._marks: set[str] = set()
        self._own: PrivateDirectory | None = None  # this user's directory of names
        self._path = ""  # where it is
        self._root: PrivateDirectory | None = None  # the private directory, if a group shares it
        self._members: list[PrivateDirectory] = []  # the directories of names of all users
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
            self._members = [self._own]
        else:
            self._root = root
        self._own.remove_stale(listening=False)
        _remove_marks(self._own)
        return self._own

    @property
    def are_shared(self) -> bool:
        """True if users of a group can have names; otherwise only this user can, and send to
        them."""
        return self._root is not None

    @property
    def are_open(self) -> bool:
        """True after `open`, until `close`."""
        return self._own is not None

    def renew(self) -> None:
        """Open the directories unless the right ones are open: a cleaner may have removed them.

        Raises DirectoryUnusable, OSError.
        """
        if self._own is not None:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self._path, follow_symlinks=False)
                if os.path.samestat(found, os.fstat(self._own.descriptor)):
                    return
        self.open()

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
            if required:
                os.fchmod(sock.fileno(), stat.S_ISVTX | 0o700)  # becomes the mode of the name
            directory = self._own or self.open()
            if directory.group is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                directory.bind(sock, name)
            except FileNotFoundError:
                self.open().bind(sock, name)  # a cleaner has removed the directory
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not directory.remove_dead(name):
                    raise
                directory.bind(sock, name)
        except BaseException:
            sock.close()
            raise
        return sock

    def mark(self, name: str) -> None:
        """Set a mark: an empty file, whose time counts.  Raises DirectoryUnusable, OSError."""
        directory = self._own or self.open()
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(_MARK + name, flags, 0o600, dir_fd=directory.descriptor), "wb") as file:
            os.utime(file.fileno())
        self._marks.add(name)

    def remove_marks(self) -> None:
        """Remove the marks that were set.  Other clients set theirs again when they need them."""
        for name in self._marks:
            self.remove(_MARK + name)
        self._marks.clear()

    def has(self, name: str) -> bool:
        """True if a name of this user is still there."""
        return self._own is not None and self._own.has(name)

    def remove(self, name: str) -> None:
        """Remove a name of this user; one that is gone already is fine."""
        if self._own is not None:
            try:  # noqa: SIM105 - each connection comes here, and this takes half the time
                os.unlink(name, dir_fd=self._own.descriptor)
            except OSError:
                pass

    # --- for a server ------------------------------------------------------------------------

    def find(self, name: str) -> list[PrivateDirectory]:
        """The directories with this name, nearly always none or one.

        Never waits.  Nothing is found if this process lacks descriptors: the client gives up after
        a time, as if the server did not speak SMC-R.
        """
        if self._root is not None:
            self._list_members(self._root)
        return [
            each
            for each in self._members
            if os.access(name, os.F_OK, dir_fd=each.descriptor, follow_symlinks=False)
        ]

    def is_marked(self, name: str) -> bool:
        """True if a client has set a mark (`mark`) a short time ago."""
        if self._root is not None:
            self._list_members(self._root)
        for each in self._members:
            with contextlib.suppress(OSError):
                found = os.stat(_MARK + name, dir_fd=each.descriptor, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and _is_fresh(found):
                    return True
        return False

    def is_required(self, directory: PrivateDirectory, name: str) -> bool:
        """True if the client with a name that was found takes SMC-R or nothing."""
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
            return bool(found.st_mode & stat.S_ISVTX)
        return False

    def send(self, directory: PrivateDirectory, name: str, message: bytes) -> bool:
        """Send a datagram to a name that was found, without waiting.

        False: it was not sent, for a reason of `send_to`, because the name is no socket, or because
        this process lacks descriptors.
        """
        try:
            descriptor = os.open(name, PATH_FLAGS, dir_fd=directory.descriptor)
        except OSError:
            return False
        try:
            path = f"/proc/self/fd/{descriptor}"
            if directory.group is None:
                return self._send(message, path, [])
            is_its_own = os.stat(path).st_uid == directory.owner
            return is_its_own and self._send(message, path, own_credentials())
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def _send(self, message: bytes, path: str, credentials: list[tuple[int, int, bytes]]) -> bool:
        """Send a datagram to a path; False if the receiver's queue is full.  Raises OSError."""
        if self._sender is None:
            return False
        try:
            self._sender.sendmsg([message], credentials, 0, path)
        except BlockingIOError:
            # Or the buffer of the sending socket is full: it is charged for all datagrams that
            # their receivers have not read (278 with the buffer of 208 KiB that is usual).
            fresh = socket.socket(socket.AF_UNIX, DATAGRAM)
            self._sender.close()
            self._sender = fresh
            try:
                self._sender.sendmsg([message], credentials, 0, path)
            except BlockingIOError:
                return False
        return True

    def _list_members(self, root: PrivateDirectory) -> None:
        """Open the directories of all members of the group, if the names in ``root`` changed."""
        changed = os.fstat(root.descriptor).st_ctime_ns
        began = time.monotonic_ns()
        if changed == self._stamp or began < self._not_before:
            return
        self._close_members()
        # A change within the same tick of the clock does not show.
        settled = time.time_ns() - changed > _TICKS_NS
        with contextlib.suppress(OSError):
            for name in root.member_directories(KIND)[:_MOST_DIRECTORIES]:
                try:
                    self._members.append(root.below(name))
                except OSError as error:
                    if is_lack(error):
                        raise
            self._stamp = changed if settled else 0
        now = time.monotonic_ns()
        self._not_before = now + _LISTING_SHARE * (now - began)
