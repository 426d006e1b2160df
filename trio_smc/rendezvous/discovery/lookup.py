"""Which listeners of this host may accept a TCP connection: the client's view of the directories.

Theory of operation
-------------------
A `Found` is the result of one look into the directories of `discovery.directory`.  If there are
no listeners, it counts until the directories change.  If there are some, it counts until a client
looks again, because an answer does not come, or because it relies on what was learned of them.
Other listeners that have come since make no difference, as each of them answers the announcement if
it accepts the connection.

A listener is alive if a datagram socket connects to its name: that fails if no process has the
socket.  It fails in another way if a process of an older release has it
(`discovery.older_releases`); then connections to the address are TCP, and the reason is known.  A
process of an older release that comes or goes may not show in the times of directories, so a result
without listeners counts for `_EMPTY_HOLDS` at most.

Listeners of another network namespace are kept apart, since they must prove first that the address
leads to them (`discovery.proofs`).  What came of that counts for ten seconds at most.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Final

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc._base.timers import Timers
from trio_smc.host.addresses import is_same_host
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import PrivateDirectory, admits_user
from trio_smc.host.real_time import now
from trio_smc.rendezvous.discovery import directory
from trio_smc.rendezvous.discovery.names import DATAGRAM, Names, send_to
from trio_smc.rendezvous.discovery.older_releases import (
    connects,
    is_signpost,
    signpost_name,
)
from trio_smc.rendezvous.discovery.proofs import Listener, Proofs

__all__ = ["AnySocket", "Found", "Lookups"]

_SO_NETNS_COOKIE: Final = 71  # linux/include/uapi/asm-generic/socket.h; 8 bytes
_MOST_LISTENERS: Final = 64  # that are looked at for one address
_MOST_LOOKUPS: Final = 1024  # TCP addresses that are remembered
_SEARCH_INTERVAL: Final = 1.0
"""Seconds between two looks for listeners that may have been killed, which changes no directory."""
_COMPARE_INTERVAL: Final = 0.01
"""Seconds between two comparisons of directories with their former times, if the listener that is
known has its name.  Chosen: the comparison takes 10 µs, and the check of the name takes 2."""
_EMPTY_HOLDS: Final = 10.0
"""Seconds for which it counts that there is no listener, if the directories look the same.  Chosen:
to look again takes some tens of microseconds."""
_PROOF_HOLDS: Final = 10.0  # how long a proof counts, seconds
_DISPROOF_HOLDS: Final = 60.0  # how long it counts that no process accepted a connection, seconds
_SILENCE_HOLDS: Final = 60.0  # how long it counts that no listener has answered, seconds
_MOST_SILENCES: Final = 256  # addresses where that is so

AnySocket = trio.socket.SocketType | socket.socket


class Found:
    """The listeners that may accept connections to a TCP address; false if there are none.

    Attributes:
      namespace: the network namespace where they are.
      users: their owners.
      names: of their sockets.
      stamps: of the directories that were looked at.
      is_general: False if this holds for one source address only.
      searched: when that was, by the clock of the stack's timers.
      compared: when the directories were found to be unchanged, by the same clock.
      until: when this ends to count at the latest, by the same clock.
      reason: why there are none.
    """

    __slots__ = (
        "compared", "is_general", "searched", "names", "namespace", "reason", "stamps", "until",
        "users",
    )  # fmt: skip

    def __init__(self, namespace: str, stamps: directory.Stamps, searched: float) -> None:
        self.namespace: str = namespace
        self.stamps: directory.Stamps = stamps
        self.users: set[int] = set()
        self.names: set[str] = set()
        self.is_general: bool = True
        self.searched: float = searched
        self.compared: float = searched
        self.until: float = math.inf
        self.reason: FallbackReason = FallbackReason.PEER_NOT_CAPABLE

    def __bool__(self) -> bool:
        return bool(self.users)

    def add(self, listener: Listener) -> None:
        """Add a listener."""
        self.users.add(listener.user)
        self.names.add(listener.name)

    def disprove(self, moment: float) -> FallbackReason:
        """Note that no listener accepted a connection; returns why it is plain TCP.

        moment: the current time, by the clock of the stack's timers.
        """
        if self.is_elsewhere:
            # The connection reached another process than the proof did.
            self.users.clear()
            self.until = moment + _DISPROOF_HOLDS
            self.reason = FallbackReason.PATH_NOT_PROVEN
        return self.reason

    @property
    def is_elsewhere(self) -> bool:
        """True if the listeners are in another network namespace, and had to prove the path."""
        return not math.isinf(self.until)


class _Silence:
    """No listener has answered for a connection to an address.

    Attributes:
      reason: why.
      names: of the listeners that did not answer.
      stamps: of the directories where they were found.
      until: when this ends to count, by the clock of the stack's timers.
    """

    __slots__ = ("names", "reason", "stamps", "until")

    def __init__(self, found: Found, reason: FallbackReason, until: float) -> None:
        self.reason = reason
        self.names: frozenset[str] = frozenset(found.names)
        self.stamps: directory.Stamps = found.stamps
        self.until: float = until


class Lookups:
    """The listeners of the TCP addresses that one stack has connected to.

    Attributes:
      known: by namespace, address and port.
      elsewhere: the same for other namespaces, by our own, source, address and port.
    """

    def __init__(
        self, private: Path, names: Names, ended: Callable[[], object], timers: Timers | None
    ) -> None:
        """
        Args:
          private: the user's private directory (`Config.private_directory`).
          names: where the announcements are made.
          ended: called when listeners that were known are gone.
          timers: of the stack; None: there are none.
        """
        self._private = private
        self._prefix = f"{private}/"
        self._names = names
        self._ended = ended
        self._timers = timers
        self._namespaces: dict[bytes, str] = {}
        self.known: dict[tuple[str, str, int], Found] = {}
        self.elsewhere: dict[tuple[str, str, str, int], Found] = {}
        # By namespace, address and port; the oldest first.
        self._silences: dict[tuple[str, str, int], _Silence] = {}

    def namespace(self, sock: AnySocket | None) -> str:
        """The name of a socket's network namespace in the directories."""
        if sock is None:
            return directory.namespace_name()
        try:
            cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return directory.namespace_name()  # Linux before 5.14
        known = self._namespaces.get(cookie)
        if known is None:
            known = directory.namespace_name()
            # The thread may have changed its namespace since the socket was made.
            with socket.socket(sock.family, socket.SOCK_DGRAM) as ours:
                if ours.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) == cookie:
                    self._namespaces[cookie] = known
        return known

    def find(self, namespace: str, source: str, destination: tuple[str, int]) -> Found:
        """The listeners that may accept connections from ``source`` to ``destination``.

        Raises DirectoryUnusable, OSError.
        """
        known = self.known.get((namespace, *destination))
        if known is not None and (
            known
            or (now(self._timers) < known.searched + _EMPTY_HOLDS and known.stamps.unchanged())
        ):
            return known
        return self.search(namespace, source, destination)

    def search(self, namespace: str, source: str, destination: tuple[str, int]) -> Found:
        """As `find`, but look into the directories.  Raises DirectoryUnusable, OSError."""
        key = (namespace, *destination)
        before = self.known.pop(key, None)
        try:
            root = PrivateDirectory.open(self._private, create=False)
        except FileNotFoundError:
            found = Found(namespace, directory.Stamps(self._private, None), now(self._timers))
        else:
            with contextlib.closing(root):
                found = Found(namespace, directory.Stamps(self._private, root), now(self._timers))
                self._search(root, found, source, destination)
        if found.is_general and (found or found.stamps.settled()):
            if len(self.known) >= _MOST_LOOKUPS:
                self.known.clear()
                self._ended()
            self.known[key] = found
        if before and not before.names & found.names:
            self._ended()
        return found

    def _search(
        self, root: PrivateDirectory, found: Found, source: str, destination: tuple[str, int]
    ) -> None:
        if self._names.are_open:
            self._names.renew()
        is_here = is_same_host(source, destination[0])
        paths = directory.namespace_paths(root, found.namespace)
        older: list[Listener] = []
        for each, _ in _listeners(root, paths, destination, older):
            # A wildcard listener of this host does not serve the same port of another host.
            if each.is_wildcard and not is_here:
                found.is_general = False
            elif not admits_user(each.user, root.group):
                found.reason = FallbackReason.OTHER_USER
            else:
                found.add(each)
        if any(is_here or not each.is_wildcard for each in older):
            found.reason = FallbackReason.LOCAL_VERSION_MISMATCH
        elif older:
            found.is_general = False

    def has_listeners(self, namespace: str) -> bool:
        """True if any address of a network namespace has a listener in the private directory.

        Raises DirectoryUnusable, OSError.
        """
        try:
            root = PrivateDirectory.open(self._private, create=False)
        except FileNotFoundError:
            return False
        with contextlib.closing(root):
            for path in directory.namespace_paths(root, namespace):
                with (
                    contextlib.suppress(FileNotFoundError),
                    contextlib.closing(root.below(path)) as below,
                ):
                    if below.entries():
                        return True
        return False

    def note_silence(
        self, found: Found, destination: tuple[str, int], reason: FallbackReason
    ) -> None:
        """No listener of an address has answered: see `silence`."""
        key = (found.namespace, *destination)
        self._silences.pop(key, None)
        if len(self._silences) >= _MOST_SILENCES:
            del self._silences[next(iter(self._silences))]
        self._silences[key] = _Silence(
            self.known.get(key, found), reason, now(self._timers) + _SILENCE_HOLDS
        )

    def forget_silence(self, found: Found, destination: tuple[str, int]) -> None:
        """A listener of an address has answered."""
        if self._silences:
            self._silences.pop((found.namespace, *destination), None)

    def silence(
        self, found: Found, source: str, destination: tuple[str, int]
    ) -> FallbackReason | None:
        """Why no listener has answered for a connection to this address within the last minute.

        None: that is unknown, or another listener has come since.

        Raises DirectoryUnusable, OSError.
        """
        noted = self._silences.get((found.namespace, *destination)) if self._silences else None
        if noted is None:
            return None
        if now(self._timers) < noted.until:
            if noted.stamps.unchanged():
                return noted.reason
            found = self.search(found.namespace, source, destination)
            if found.names <= noted.names:
                noted.stamps = found.stamps
                return noted.reason
        self.forget_silence(found, destination)
        return None

    def may_answer(self, found: Found, source: str, destination: tuple[str, int]) -> Found:
        """Those of the listeners of ``found`` that are alive, and others that have come since.

        Raises DirectoryUnusable, OSError.
        """
        if not found.is_elsewhere:
            return self.search(found.namespace, source, destination)
        alive = Found(found.namespace, found.stamps, now(self._timers))
        with contextlib.closing(PrivateDirectory.open(self._private, create=False)) as root:
            paths = directory.namespace_paths(root, found.namespace)
            for each, _ in _listeners(root, paths, destination):
                if each.name in found.names:
                    alive.add(each)
        return alive

    def send_to_all(self, found: Found, destination: tuple[str, int], message: bytes) -> None:
        """Send a datagram to all listeners of the namespace of ``found`` that may have accepted a
        connection.  Raises DirectoryUnusable, OSError."""
        with contextlib.closing(PrivateDirectory.open(self._private, create=False)) as root:
            paths = directory.namespace_paths(root, found.namespace)
            for _, connected in _listeners(root, paths, destination):
                send_to(connected, message)

    def has_ended(self, namespace: str, source: str, destination: tuple[str, int]) -> bool:
        """True if all listeners of an address that were known are found to be gone.

        Looks at once if their names are gone, soon if a directory has changed, and once a second
        otherwise.
        """
        known = self.known.get((namespace, *destination))
        if known is None or not known.users:
            return False
        moment = now(self._timers)
        if moment < known.searched + _SEARCH_INTERVAL:
            if moment < known.compared + _COMPARE_INTERVAL and self._has_name(known):
                return False
            if known.stamps.unchanged():
                known.compared = moment
                return False
        return not known.names & self.search(namespace, source, destination).names

    def _has_name(self, known: Found) -> bool:
        """True if a listener has its name, which it removes when it ends."""
        for name in known.names:
            if os.access(self._prefix + name, os.F_OK, follow_symlinks=False):
                return True
        return False

    async def find_elsewhere(
        self, source: str, destination: tuple[str, int], sock: AnySocket, closer: Closer
    ) -> Found:
        """The listeners of another network namespace that prove that the address leads there.

        They are not announced to before that.

        Raises DirectoryUnusable, OSError.
        """
        namespace = self.namespace(sock)
        key = (namespace, source, *destination)
        known = self.elsewhere.get(key)
        if known is not None and now(self._timers) < known.until and known.stamps.unchanged():
            return known
        try:
            root = PrivateDirectory.open(self._private, create=False)
        except FileNotFoundError:
            return Found(namespace, directory.Stamps(self._private, None), now(self._timers))
        with (
            contextlib.closing(root),
            Proofs(source, destination[0], sock, root.group, self._names, closer) as proofs,
        ):
            found = Found(namespace, directory.Stamps(self._private, root), now(self._timers))
            paths = directory.other_namespaces(root, namespace)
            listeners = _listeners(root, paths, destination)
            for each, connected in islice(listeners, _MOST_LISTENERS):
                proofs.request(each, connected)
            for each in await proofs.collect():
                there = each.name.split("/")[1]
                # One announcement has one name, in one namespace.
                if not found or there == found.namespace:
                    found.namespace = there
                    found.add(each)
            found.reason = proofs.reason
        found.until = now(self._timers) + _PROOF_HOLDS
        if found.stamps.settled():
            if len(self.elsewhere) >= _MOST_LOOKUPS:
                self.elsewhere.clear()
            self.elsewhere[key] = found
        return found


def _listeners(
    root: PrivateDirectory,
    paths: list[str],
    destination: tuple[str, int],
    older: list[Listener] | None = None,
) -> Iterator[tuple[Listener, socket.socket]]:
    """The listeners that are alive in the directories of network namespaces, for one address; with
    a datagram socket that is connected to each in its turn.

    The names of dead sockets are removed.

    older: those of older releases are added here.

    Raises OSError: this process lacks descriptors, or cannot use its own directory.
    """
    exact = directory.listener_name(*destination, dual_stack=False)
    places = exact, *directory.wildcard_names(*destination)
    with socket.socket(socket.AF_UNIX, DATAGRAM) as probe:
        for namespace, place in product(paths, places):
            path = f"{namespace}/{place}"
            try:
                below = root.below(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                # Of another member: its listeners are not reached, and those of others are.
                if root.group is None or is_lack(error):
                    raise
                continue
            with contextlib.closing(below):
                names = [name for name in below.sockets() if not is_signpost(name)]
                for name in names[:_MOST_LISTENERS]:
                    user, is_older = _connect(probe, below, name)
                    if user is None:
                        continue
                    found = Listener(user, f"{path}/{name}", place != exact)
                    if not is_older:
                        yield found, probe
                    # No older release uses a directory that a group shares.
                    elif older is not None and root.group is None:
                        older.append(found)


def _connect(probe: socket.socket, below: PrivateDirectory, name: str) -> tuple[int | None, bool]:
    """Connect to a listener; returns its user, None if it is dead, and removes its name then.

    The second value is True if it is one of an older release, and there is no connection.

    Raises OSError: this process lacks descriptors.
    """
    try:
        with below.socket_at(name) as path:
            is_older = not connects(probe, path)
            return os.stat(path).st_uid, is_older
    except OSError as error:
        if is_lack(error):
            raise
        if isinstance(error, ConnectionRefusedError):
            for each in (name, signpost_name(name)):
                with contextlib.suppress(OSError):
                    below.remove(each)
        return None, False
