"""The names of announcements: binding one, and sending to the socket behind one.

Theory of operation
-------------------
A client binds a datagram socket whose name contains the network namespace and the four-tuple of its
TCP connection.  The name is in the client's own directory.  So in a group's directory no member can
remove, replace or occupy the names of another member.  A server searches the directories of all
members: one system call for each, at most `_MOST_DIRECTORIES`.

The name may be a symbolic link, a FIFO or the socket of another service, and another process may
replace it at any moment.  In a group's directory each member can replace its own names.  If
containers share a private directory, a process of the same user in another container can, and such
a process could not send to the services of this container otherwise.  So the server opens the name
with O_PATH and O_NOFOLLOW, which neither follows a link nor opens a device, and sends to the open
descriptor.  The kernel sends only to a socket.  In a group's directory the socket must also belong
to the owner of the member's directory.  The server never waits.

The server uses the descriptor of the directory and not its path: if a cleaner of /tmp removes the
directory, another user may make one with the same path.

If two members have a name for the same connection, both get the answer.  So a member cannot take
the answer from another member.

If the client requires SMC-R, the mode of the name has the sticky bit, which has no meaning for a
socket.

If connections to an address are too short for SMC-R, the client keeps them on TCP and does not
announce them.  Instead it sets a *mark* now and then, so that servers know the reason, too.  The
mark is an empty file in the same directory, whose name has the port 0.

A cleaner of /tmp may remove the directories.  A client makes its directory again if it cannot bind
a name there, and a server checks its directories every ten seconds (`publication`).

A killed process does not remove its names.  Each stack removes old names when it opens its
directory, and a client removes a dead name that it needs itself.
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

__all__ = ["DATAGRAM", "KIND", "MARK_HOLDS", "Names", "announced_name", "send_to"]

_MARK: Final = "short-"
MARK_HOLDS: Final = 60.0
"""Seconds for which a mark is valid.  Chosen."""
DATAGRAM: Final = int(socket.SOCK_DGRAM) | int(getattr(socket, "SOCK_NONBLOCK", 0))
"""The type of all sockets of discovery."""
KIND: Final = "announced"
"""The kind of directories (`PrivateDirectory.member_directory`) that contain the names."""
_MOST_DIRECTORIES: Final = 64
"""Members of a group whose directories a server searches.  Chosen."""
_TICKS_NS: Final = 100_000_000
"""Nanoseconds: an upper limit of the step of a directory's change time.  Chosen: the kernel's clock
for it steps at each timer interrupt, at most 10 ms apart."""
_LISTING_SHARE: Final = 10
"""A server spends at most one tenth of its time on listing the directories of a group, even if a
member changes the group's directory all the time.  Chosen."""


def announced_name(namespace: str, key: bytes) -> str:
    """The name of an announcement: at most 83 bytes, so that it fits into a Unix address.

    namespace: the network namespace of the server (`directory.namespace_name`).
    key: `messages.four_tuple`.
    """
    return f"{namespace}-{key.hex()}"


def send_to(sender: socket.socket, message: bytes) -> bool:
    """Send a datagram without waiting.

    sender: a nonblocking datagram socket that is connected to the receiver.

    False: the socket is closed or shut down, its queue is full, or this process lacks memory.  Then
    the receiver gets no part of it.
    """
    try:
        sender.sendmsg([message], own_credentials())
    except OSError:
        return False
    return True


def _is_fresh(mark: os.stat_result) -> bool:
    return abs(time.time() - mark.st_mtime) < MARK_HOLDS


def _remove_marks(directory: PrivateDirectory) -> None:
    """Remove the marks that are no longer valid."""
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
        self._path = ""  # of that directory
        self._root: PrivateDirectory | None = None  # the private directory, if a group shares it
        self._members: list[PrivateDirectory] = []  # the directories of names of all users
        self._stamp = 0  # change time of `_root` when `_members` was made; 0: unknown
        self._not_before = 0  # earliest time of the next listing, by `time.monotonic_ns`
        self._sender: socket.socket | None = None

    def open(self) -> PrivateDirectory:
        """Open this user's directory, and make it if it is missing.  Closes it first if it is open.

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
        """True if all users of a group can have names; otherwise only this user can."""
        return self._root is not None

    @property
    def are_open(self) -> bool:
        """True after `open`, until `close`."""
        return self._own is not None

    def renew(self) -> None:
        """Open the directories again if a cleaner has removed them, or if they are not open.

        Raises DirectoryUnusable, OSError.
        """
        if self._own is not None:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self._path, follow_symlinks=False)
                if os.path.samestat(found, os.fstat(self._own.descriptor)):
                    return
        self.open()

    def close(self) -> None:
        """Close all descriptors; also for a forked child.  Idempotent."""
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
        """A datagram socket with this name, for `messages.receive`.

        Replaces the name of a process that has ended.

        required: the client requires SMC-R.

        Raises:
          DirectoryUnusable, OSError: the name cannot be made; EADDRINUSE: another socket has it.
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
        """Set a mark: an empty file, valid from its time on.  Raises DirectoryUnusable, OSError."""
        directory = self._own or self.open()
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(_MARK + name, flags, 0o600, dir_fd=directory.descriptor), "wb") as file:
            os.utime(file.fileno())
        self._marks.add(name)

    def remove_marks(self) -> None:
        """Remove the marks of this stack.  Other clients that need them set them again."""
        for name in self._marks:
            self.remove(_MARK + name)
        self._marks.clear()

    def has(self, name: str) -> bool:
        """True if this user still has the name."""
        return self._own is not None and self._own.has(name)

    def remove(self, name: str) -> None:
        """Remove a name of this user.  No-op if it is missing."""
        if self._own is not None:
            try:  # noqa: SIM105 - each connection comes here, and this takes half the time
                os.unlink(name, dir_fd=self._own.descriptor)
            except OSError:
                pass

    # --- for a server ------------------------------------------------------------------------

    def find(self, name: str) -> list[PrivateDirectory]:
        """The directories with this name, nearly always none or one.

        Never waits.  If this process lacks descriptors, returns none.  Then the client gives up
        after a while, as with a server that does not speak SMC-R.
        """
        if self._root is not None:
            self._list_members(self._root)
        return [
            each
            for each in self._members
            if os.access(name, os.F_OK, dir_fd=each.descriptor, follow_symlinks=False)
        ]

    def is_marked(self, name: str) -> bool:
        """True if a client has set a mark that is still valid (`mark`)."""
        if self._root is not None:
            self._list_members(self._root)
        for each in self._members:
            with contextlib.suppress(OSError):
                found = os.stat(_MARK + name, dir_fd=each.descriptor, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and _is_fresh(found):
                    return True
        return False

    def is_required(self, directory: PrivateDirectory, name: str) -> bool:
        """True if the client of this name requires SMC-R.  ``directory``: from `find`."""
        with contextlib.suppress(OSError):
            found = os.stat(name, dir_fd=directory.descriptor, follow_symlinks=False)
            return bool(found.st_mode & stat.S_ISVTX)
        return False

    def send(self, directory: PrivateDirectory, name: str, message: bytes) -> bool:
        """Send a datagram to a name, without waiting.

        directory: from `find`.

        False: a reason of `send_to`, the name is not a socket, or this process lacks descriptors.
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
            # The buffer of the sending socket may be full instead: the kernel charges it for each
            # datagram that a receiver has not read (278 datagrams with the usual buffer, 208 KiB).
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
        # A second change within the same step of the clock does not change the time.
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
