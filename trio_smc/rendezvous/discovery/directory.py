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

A listener that comes or goes changes the time of its user's directory ``tcp``, so a client looks at
these times only to find out if there may be other listeners.  The announcements are in directories
of their own (`trio_smc.rendezvous.discovery.names`), since each of them changes its directory.

Beside the socket of a listener is one for clients of older releases, ``<pid>-<random>.older``
(`trio_smc.rendezvous.discovery.older_releases`).
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

from trio_smc._base.resources import is_lack
from trio_smc.host.descriptors import datagram_probe
from trio_smc.host.private_directory import (
    DirectoryUnusable,
    PrivateDirectory,
    is_named,
    unusable,
)
from trio_smc.rendezvous.discovery.older_releases import Signpost

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
_MOST_CLEANED = 4
"""Listeners at which a new one looks whether their processes have ended.  Chosen: more than one, so
that the names of ended ones become fewer; each look takes about 0.1 ms."""
_MOST_SEEN = 256
"""Listeners among which a new one chooses these.  Chosen: to read so many names takes 0.1 ms."""
_MOST_NAMESPACES = 64  # network namespaces that share a directory
_MOST_NAMESPACE_NAMES = 256
"""Names read from the top directory of another member.  Chosen: four times `_MOST_NAMESPACES`,
because some names may be of namespaces that have ended."""


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
      has_datagram: true if a datagram has arrived.
      namespace: the network namespace where it was made.
      signpost: refuses clients of older releases; None if they cannot come here.
      socket: does not block, and receives the credentials of senders.
      user: the effective user that made it, to whom its name belongs.
    """

    def __init__(self, private: Path, name: str) -> None:
        """Make it.

        Raises:
          DirectoryUnusable: why it cannot be made.
        """
        self._private, self._below = private, name
        self.namespace: str = namespace_name()
        self._path = ""
        self.user: int = os.geteuid()
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
                    _touch(root, top)
                    _remove_dead_listeners(root, f"{top}/{self.namespace}")
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
        self.has_datagram: Callable[[], bool] = datagram_probe(self.socket)
        self._directory.remove_stale()
        self.signpost: Signpost | None = None
        if self.group is None:
            # Without one, for lack of descriptors, older clients have another reason for TCP.
            with contextlib.suppress(OSError):
                self.signpost = Signpost(self._directory, self._name)

    @property
    def path(self) -> str:
        """Its name, as clients find it: below the private directory."""
        return f"{self._path}/{self._name}"

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
        if self.signpost is not None:
            self.signpost.abandon()

    def remove(self) -> None:
        """Remove the name, and empty directories; the socket stays open."""
        if self._pid != os.getpid():
            self._directory.close()
            return  # a forked child; the listener is its parent's
        if self.signpost is not None:
            self.signpost.close()
        with contextlib.suppress(OSError):
            self._directory.remove(self._name)
        self._directory.close()
        with contextlib.suppress(OSError, DirectoryUnusable):
            root = PrivateDirectory.open(self._private, create=False)
            try:
                root.remove_empty(self._path)
                _touch(root, self._path.partition("/")[0])
            finally:
                root.close()


def _remove_dead_listeners(root: PrivateDirectory, path: str) -> None:
    """Remove the names of a few listeners whose processes have ended without removing them.

    A listener with a port that the system has chosen is the only one that would come here again.

    path: the directory of this user's listeners in this network namespace.
    """
    with contextlib.suppress(OSError), contextlib.closing(root.below(path)) as listeners:
        names = [entry.name for entry in listeners.entries(most=_MOST_SEEN)]
        for name in random.sample(names, min(len(names), _MOST_CLEANED)):
            with contextlib.suppress(OSError):
                with contextlib.closing(listeners.below(name)) as one:
                    one.remove_stale()
                root.remove_empty(f"{path}/{name}")


def _touch(root: PrivateDirectory, top: str) -> None:
    """Show to clients that a listener has come or gone (`Stamps`)."""
    os.utime(top, dir_fd=root.descriptor, follow_symlinks=False)


class Stamps:
    """The change times of directories when listeners were looked up in them.

    Each listener that comes or goes changes its user's directory of the kind `TOP`.  As long as
    these look the same, a lookup need not be done again.

    Args:
      private: the private directory.
      root: the same, open; None: it is missing.
    """

    def __init__(self, private: Path, root: PrivateDirectory | None) -> None:
        tops = root.member_directories(TOP) if root is not None else []
        self._paths = [f"{private}/{each}" for each in ("", *tops)]
        self._known = self._change_times()

    def _change_times(self) -> list[tuple[int, int, int]]:
        """Device, inode and change time in ns of each directory; zeros: it is missing."""
        found = []
        for path in self._paths:
            try:
                each = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                found.append((0, 0, 0))
            else:
                found.append((each.st_dev, each.st_ino, each.st_ctime_ns))
        return found

    def settled(self) -> bool:
        """True if a later change would show: the clock of change times ticks slowly."""
        return time.time_ns() - max(each[2] for each in self._known) > _TICKS_NS

    def unchanged(self) -> bool:
        """True if the directories have the names that they had."""
        try:
            return self._change_times() == self._known
        except OSError:
            return False


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
    """Where addresses of other network namespaces are, below the private directory: of each user in
    turn, this user first.

    root: the open private directory.
    but: what `namespace_name` returned.
    """
    found: dict[int | None, list[str]] = {}
    for name in root.member_directories(TOP):
        try:
            top = root.below(name)
        except OSError as error:
            if is_lack(error) or (root.group is None and not isinstance(error, FileNotFoundError)):
                raise
            continue
        is_own = top.owner == os.geteuid()
        try:
            entries = top.entries() if is_own else top.entries(most=_MOST_NAMESPACE_NAMES)
        finally:
            top.close()
        names = sorted(each.name for each in entries if each.name.isdecimal())
        found.setdefault(top.owner, []).extend(f"{name}/{each}" for each in names if each != but)
    # The first paths of each user, then the next ones: no user hides the paths of the others.
    turns = zip_longest(*found.values())
    return [path for turn in turns for path in turn if path is not None][:_MOST_NAMESPACES]
