"""Where same-host discovery keeps its sockets, in the private directory.

::

    <private directory>/tcp/<network namespace>/<family>-<address>-<port>/<pid>-<random>
    <private directory>/announced/<network namespace>-<four-tuple>

In a directory that a group shares, each member has directories ``tcp-<random>`` and
``announced-<random>`` of its own (`trio_smc.host.private_directory`).  Names are looked up in those
of all members.

There is one directory per TCP address that is listened on.  It contains one Unix socket per
listening process (or stack): several if workers share the port.  An address means something only
within its network namespace, whose inode number is therefore part of the path.  <family> is "4" or
"6", or "d" for an IPv6 wildcard that takes IPv4 connections as well.

The announcements are in a directory of their own (`trio_smc.rendezvous.discovery.names`), since
each of them changes its directory, and a client that knows the listeners of an address looks at the
change times of their directories only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

from trio_smc._base.resources import is_lack
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_named,
    unusable,
)

__all__ = [
    "TOP",
    "NewSocket",
    "Stamps",
    "listener_name",
    "namespace_name",
    "namespace_paths",
    "other_namespaces",
    "wildcard_names",
]


TOP = "tcp"
"""The kind of directories below the private one in which each network namespace has its own."""

# Publishers that come and go may remove a directory while another wants to use it.
_ATTEMPTS = 20
_TICKS_NS = 100_000_000
_MOST_NAMESPACES = 64  # network namespaces that share a directory


def listener_name(address: str, port: int, *, dual_stack: bool) -> str:
    """The directory name of a listener.

    address: its own, as `trio_smc.host.addresses.plain_address` writes it.
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


class NewSocket:
    """A datagram socket in the directory `name`, which stands for a listener until `remove`.

    Attributes:
      group: `PrivateDirectory.group`.
      namespace: the network namespace where it was made.
      socket: does not block, and receives the credentials of senders.
    """

    def __init__(self, private: Path, name: str) -> None:
        """Make it.

        Raises:
          DirectoryUnusable: why it cannot be made.
        """
        self._private, self._below = private, name
        self.namespace: str = namespace_name()
        self._path = ""
        self._pid = os.getpid()
        self._name = f"{self._pid}-{secrets.token_hex(8)}"
        for attempt in range(_ATTEMPTS):
            root = PrivateDirectory.open(private, create=True)
            self.group: int | None = root.group
            try:
                top = root.member_directory(TOP, create=True)
                self._path = f"{top}/{self.namespace}/{name}"
                self._directory = root.below(self._path, create=True)
                try:
                    self.socket: socket.socket = self._directory.listen(
                        self._name, 0, socket.SOCK_DGRAM
                    )
                except BaseException:
                    self._directory.close()
                    raise
            except FileNotFoundError as error:
                if attempt == _ATTEMPTS - 1:
                    raise unusable(error, private) from error
            except OSError as error:
                raise unusable(error, private) from error
            else:
                break
            finally:
                root.close()
        self._directory.remove_stale()

    def may_prove(self) -> bool:
        """True if this thread may prove which addresses lead to the listener: the directory was
        named outright, and the thread is still in the namespace where it was published."""
        return is_named(self._private) and namespace_name() == self.namespace

    def is_there(self) -> bool:
        """True if its name still leads to it."""
        try:
            place = os.stat(f"{self._private}/{self._path}", follow_symlinks=False)
        except OSError:
            return False
        ours = os.fstat(self._directory.descriptor)
        return os.path.samestat(place, ours) and self._directory.has(self._name)

    def renewed(self) -> NewSocket:
        """Another one for the same listener.  Raises DirectoryUnusable."""
        return NewSocket(self._private, self._below)

    def abandon(self) -> None:
        """Close the descriptors: this process is a forked child, the name is its parent's."""
        self._directory.close()
        self.socket.close()

    def remove(self) -> None:
        """Remove the name, and empty directories; the socket stays open."""
        if self._pid != os.getpid():
            self._directory.close()
            return  # a forked child; the listener is its parent's
        with contextlib.suppress(OSError):
            self._directory.remove(self._name)
        self._directory.close()
        with contextlib.suppress(OSError, DirectoryUnusable):
            root = PrivateDirectory.open(self._private, create=False)
            try:
                root.remove_empty(self._path)
            finally:
                root.close()


Stamp = tuple[str, int, int, int]
"""Path of a directory below the private one, device, inode, and when its names changed last, in
ns."""


class Stamps:
    """The change times of directories when listeners were looked up in them.

    As long as they look the same, a lookup need not be done again.  A directory that is missing
    shows when the one above it changes.
    """

    def __init__(self, private: Path) -> None:
        """``private``: the private directory."""
        self._private = private
        self._known: list[Stamp] = []
        self._shared = False

    def add(self, root: PrivateDirectory, path: str) -> None:
        """Add the directory ``path`` below ``root``, the open private one, if it is there.

        One of another member that cannot be entered is left out.  Raises OSError for any other
        problem, a lack of descriptors among them.
        """
        parent, _, name = path.rpartition("/")
        try:
            above = root.below(parent) if parent else root
            try:
                found = os.stat(name, dir_fd=above.descriptor, follow_symlinks=False)
            finally:
                if above is not root:
                    above.close()
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._shared or is_lack(error):
                raise
        else:
            self._known.append(_stamp(path, found))

    def add_root(self, root: PrivateDirectory) -> None:
        """If a group shares the private directory, add it: other members may come."""
        self._shared = root.group is not None
        if self._shared:
            self._known.append(_stamp("", os.fstat(root.descriptor)))

    def settled(self) -> bool:
        """True if there are some, and a later change would show: their clock ticks slowly."""
        now = time.time_ns()
        return bool(self._known) and all(now - each[3] > _TICKS_NS for each in self._known)

    def unchanged(self) -> bool:
        """True if the directories have the names that they had.

        A directory that was moved into the place of another has another inode, so what was checked
        of the way there need not be checked again.
        """
        try:
            return self._unchanged_shared() if self._shared else self._unchanged()
        except (OSError, DirectoryUnusable):
            return False

    def _unchanged(self) -> bool:
        private = self._private
        return all(_is_same(os.stat(f"{private}/{stamp[0]}"), stamp) for stamp in self._known)

    def _unchanged_shared(self) -> bool:
        """As `_unchanged`, but follow no symbolic link that a member may have put there."""
        with contextlib.ExitStack() as opened:
            root = PrivateDirectory.open(self._private, create=False)
            opened.callback(root.close)
            above = {"": root}
            for stamp in self._known:
                path = stamp[0]
                parent, _, name = path.rpartition("/")
                if parent not in above:
                    above[parent] = root.below(parent)
                    opened.callback(above[parent].close)
                descriptor = above[parent].descriptor
                found = (
                    os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if path
                    else os.fstat(descriptor)
                )
                if not _is_same(found, stamp):
                    return False
        return True


def _stamp(path: str, found: os.stat_result) -> Stamp:
    return path, found.st_dev, found.st_ino, found.st_ctime_ns


def _is_same(found: os.stat_result, stamp: Stamp) -> bool:
    return _stamp(stamp[0], found) == stamp


def namespace_name() -> str:
    """How directories of the calling thread's network namespace are named."""
    return str(os.stat("/proc/thread-self/ns/net").st_ino)


def namespace_paths(root: PrivateDirectory, namespace: str) -> list[str]:
    """Where addresses of a network namespace are, below the private directory: one directory for
    each user with listeners.

    root: the open private directory.
    namespace: what `namespace_name` returned.
    """
    return [f"{top}/{namespace}" for top in root.member_directories(TOP)]


def other_namespaces(root: PrivateDirectory, but: str) -> list[str]:
    """Where addresses of other network namespaces are, below the private directory.

    root: the open private directory.
    but: what `namespace_name` returned.
    """
    found: list[str] = []
    for name in root.member_directories(TOP):
        try:
            top = root.below(name)
        except OSError as error:
            if is_lack(error) or (root.group is None and not isinstance(error, FileNotFoundError)):
                raise
            continue
        try:
            names = sorted(each.name for each in top.entries() if each.name.isdecimal())
        finally:
            top.close()
        found += [f"{name}/{each}" for each in names if each != but][:_MOST_NAMESPACES]
    return found[:_MOST_NAMESPACES]
