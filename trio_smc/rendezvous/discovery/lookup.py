"""Which listeners of this host may accept a TCP connection: the client's view of the directories.

Theory of operation
-------------------
A `Found` is the result of one search in the directories of `discovery.directory`.  If there are no
listeners, the result is valid until the directories change.  If there are listeners, the result is
valid until a client searches again: after a missing answer, or before it uses the cached listeners.
New listeners do not make the result wrong, because the listener that accepts a connection answers
its announcement.

A listener is alive if a datagram socket can connect to its name.  ECONNREFUSED: no process has the
socket.  Another error: a process of an older release has it (`discovery.older_releases`), so
connections to the address are TCP, and the client knows the reason.  If a process of an older
release starts or ends, the times of the directories may stay the same.  So a result without
listeners is valid for at most `EMPTY_HOLDS`.

Listeners of other network namespaces are kept apart, because they must first prove that the address
leads to them (`discovery.proofs`).  The result is valid for ten seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
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
from trio_smc.rendezvous.discovery.allowance import (
    DIRECTORY_COSTS,
    NAMESPACE_COSTS,
    Allowance,
    Allowances,
)
from trio_smc.rendezvous.discovery.names import DATAGRAM, Names, send_to
from trio_smc.rendezvous.discovery.older_releases import (
    connects,
    is_signpost,
    signpost_name,
)
from trio_smc.rendezvous.discovery.proofs import Listener, Proofs

__all__ = ["EMPTY_HOLDS", "MOST_SILENCES", "SILENCE_HOLDS", "AnySocket", "Found", "Lookups"]

_SO_NETNS_COOKIE: Final = 71  # linux/include/uapi/asm-generic/socket.h; 8 bytes
_MOST_LISTENERS: Final = 64
"""Listeners of one address that a search reads.  Chosen."""
_MOST_REQUESTS: Final = 16
"""Listeners of each other member from which a client requests a proof.  Chosen: a quarter of
`_MOST_LISTENERS`, so that one member leaves requests for the others."""
_MOST_LOOKUPS: Final = 1024
"""TCP addresses whose listeners are cached.  Chosen."""
_SEARCH_INTERVAL: Final = 1.0
"""Seconds between two searches for killed listeners, whose end changes no directory.  Chosen."""
_COMPARE_INTERVAL: Final = 0.01
"""Seconds between two comparisons of the directories with their former times, if a known listener
still has its name.  Chosen: the comparison takes 10 µs, and the check of the name takes 2."""
EMPTY_HOLDS: Final = 10.0
"""Seconds for which a result without listeners is valid, if the directories have not changed.
Chosen: a search takes some tens of microseconds."""
_PROOF_HOLDS: Final = 10.0
"""Seconds for which a proof is valid.  Chosen; no measurement is recorded."""
_DISPROOF_HOLDS: Final = 60.0
"""Seconds for which an address counts as not proven after no process accepted a connection.
Chosen; no measurement is recorded."""
SILENCE_HOLDS: Final = 60.0
"""Seconds for which connections are TCP after no listener of their address answered.  Chosen; no
measurement is recorded."""
MOST_SILENCES: Final = 256
"""Addresses without an answer that are remembered.  Chosen."""

AnySocket = trio.socket.SocketType | socket.socket


class Found:
    """The listeners that may accept connections to a TCP address; false if there are none.

    Attributes:
      namespace: the network namespace of the listeners.
      users: the owners of their sockets.
      names: the names of their sockets.
      stamps: of the directories that were searched.
      is_general: False if the result is valid for one source address only.
      searched: time of the search, by the clock of the stack's timers.
      compared: time of the last check that the directories are unchanged, by the same clock.
      until: expiry time, by the same clock.
      reason: why there are no listeners.
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
        """No listener has accepted a connection; returns the reason why it is TCP.

        moment: the current time, by the clock of the stack's timers.
        """
        if self.is_elsewhere:
            # Another process than the one that sent the proof has accepted the connection.
            self.users.clear()
            self.until = moment + _DISPROOF_HOLDS
            self.reason = FallbackReason.PATH_NOT_PROVEN
        return self.reason

    @property
    def is_elsewhere(self) -> bool:
        """True if the listeners are in another network namespace, and have proven the path."""
        return not math.isinf(self.until)


class _Silence:
    """No listener has answered for a connection to an address.

    Attributes:
      reason: why connections to the address are TCP.
      names: of the listeners that did not answer.
      stamps: of the directories of these listeners.
      until: expiry time, by the clock of the stack's timers.
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
      known: listeners by namespace, address and port.
      elsewhere: listeners of other namespaces, by own namespace, source, address and port.
    """

    def __init__(
        self, private: Path, names: Names, ended: Callable[[], object], timers: Timers | None
    ) -> None:
        """
        Args:
          private: the user's private directory (`Config.private_directory`).
          names: of the stack's announcements.
          ended: called when known listeners have ended.
          timers: of the stack; None: it has none.
        """
        self._private = private
        self._prefix = f"{private}/"
        self._names = names
        self._ended = ended
        self._timers = timers
        self._allowances = Allowances(timers)
        self._namespaces: dict[bytes, str] = {}
        self.known: dict[tuple[str, str, int], Found] = {}
        self.elsewhere: dict[tuple[str, str, str, int], Found] = {}
        # By namespace, address and port, the oldest first.
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
            # The thread may have changed its namespace after it made the socket.
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
            known or (now(self._timers) < known.searched + EMPTY_HOLDS and known.stamps.unchanged())
        ):
            return known
        return self.search(namespace, source, destination)

    def search(self, namespace: str, source: str, destination: tuple[str, int]) -> Found:
        """As `find`, but always search.  Raises DirectoryUnusable, OSError."""
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
        allowance = self._allowances.grant(found.searched)
        for each, _ in _listeners(root, paths, destination, allowance, older):
            # A wildcard listener of this host does not serve the same port of another host.
            if each.is_wildcard and not is_here:
                found.is_general = False
            elif not admits_user(each.user, root.group):
                found.reason = FallbackReason.OTHER_USER
            else:
                found.add(each)
        self._allowances.settle(allowance, found.searched)
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
                    if below.entries(most=1):
                        return True
        return False

    def note_silence(
        self, found: Found, destination: tuple[str, int], reason: FallbackReason
    ) -> None:
        """No listener of an address has answered: see `silence`."""
        key = (found.namespace, *destination)
        self._silences.pop(key, None)
        if len(self._silences) >= MOST_SILENCES:
            del self._silences[next(iter(self._silences))]
        self._silences[key] = _Silence(
            self.known.get(key, found), reason, now(self._timers) + SILENCE_HOLDS
        )

    def forget_silence(self, found: Found, destination: tuple[str, int]) -> None:
        """A listener of an address has answered."""
        if self._silences:
            self._silences.pop((found.namespace, *destination), None)

    def silence(
        self, found: Found, source: str, destination: tuple[str, int]
    ) -> FallbackReason | None:
        """Why connections to an address are TCP whose listeners did not answer recently.

        None: a listener has answered, a new listener has started, or `SILENCE_HOLDS` is over.

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
        """The listeners of ``found`` that are alive; in this network namespace also new ones.

        Raises DirectoryUnusable, OSError.
        """
        if not found.is_elsewhere:
            return self.search(found.namespace, source, destination)
        alive = Found(found.namespace, found.stamps, now(self._timers))
        with contextlib.closing(PrivateDirectory.open(self._private, create=False)) as root:
            paths = directory.namespace_paths(root, found.namespace)
            allowance = self._allowances.grant(alive.searched)
            for each, _ in _listeners(root, paths, destination, allowance):
                if each.name in found.names:
                    alive.add(each)
            self._allowances.settle(allowance, alive.searched)
        return alive

    def send_to_all(self, found: Found, destination: tuple[str, int], message: bytes) -> None:
        """Send a datagram to each listener that may have accepted a connection.

        Only the listeners in the namespace of ``found``.  Raises DirectoryUnusable, OSError.
        """
        began = now(self._timers)
        with contextlib.closing(PrivateDirectory.open(self._private, create=False)) as root:
            paths = directory.namespace_paths(root, found.namespace)
            allowance = self._allowances.grant(began)
            for _, connected in _listeners(root, paths, destination, allowance):
                send_to(connected, message)
            self._allowances.settle(allowance, began)

    def has_ended(self, namespace: str, source: str, destination: tuple[str, int]) -> bool:
        """True if all known listeners of an address have ended.

        If their names are gone, the search is made at once; if a directory has changed, within
        `_COMPARE_INTERVAL`; otherwise once in `_SEARCH_INTERVAL`.
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
        """True if a listener still has its name.  A listener removes the name when it ends."""
        for name in known.names:
            if os.access(self._prefix + name, os.F_OK, follow_symlinks=False):
                return True
        return False

    async def find_elsewhere(
        self, source: str, destination: tuple[str, int], sock: AnySocket, closer: Closer
    ) -> Found:
        """The listeners of another network namespace that prove that the address leads to them.

        A client announces connections to them only after the proof.

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
            # Each request makes a name, and waits for an answer.
            allowance = self._allowances.grant(found.searched, listeners=_MOST_REQUESTS)
            listeners = _listeners(root, paths, destination, allowance)
            for each, connected in islice(listeners, _MOST_LISTENERS):
                proofs.request(each, connected)
            self._allowances.settle(allowance, found.searched)
            for each in await proofs.collect():
                there = each.name.split("/")[1]
                # An announcement has one name, which contains one namespace.
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
    allowance: Allowance,
    older: list[Listener] | None = None,
) -> Iterator[tuple[Listener, socket.socket]]:
    """Search network namespaces for living listeners of one address.

    Yields each listener with a datagram socket that is connected to it until the next step.
    Removes the names of dead sockets.

    allowance: for the directories of other members of a group.
    older: gets the listeners of older releases.

    Raises OSError: this process lacks descriptors, or cannot use its own directory.
    """
    exact = directory.listener_name(*destination, dual_stack=False)
    places = exact, *directory.wildcard_names(*destination)
    with socket.socket(socket.AF_UNIX, DATAGRAM) as probe:
        for namespace in paths:
            for place, below in _opened(root, namespace, places, allowance):
                may_take = partial(allowance.take, below.owner)
                names = [name for name in below.sockets(may_take) if not is_signpost(name)]
                for name in names[:_MOST_LISTENERS]:
                    if not allowance.take_listener(below.owner):
                        break
                    user, is_older = _connect(probe, below, name)
                    if user is None:
                        continue
                    found = Listener(user, f"{namespace}/{place}/{name}", place != exact)
                    if not is_older:
                        yield found, probe
                    # No older release uses a directory that a group shares.
                    elif older is not None and root.group is None:
                        older.append(found)


def _opened(
    root: PrivateDirectory, namespace: str, places: tuple[str, ...], allowance: Allowance
) -> Iterator[tuple[str, PrivateDirectory]]:
    """The directories of a network namespace that exist, each open until the next step.

    places: their names.

    Raises OSError: this process lacks descriptors, or cannot use its own directory.
    """
    above = _below(root, namespace, root.group)
    if above is None:
        return
    with contextlib.closing(above):
        allowance.take(above.owner, NAMESPACE_COSTS)
        for place in places:
            if not allowance.take(above.owner, DIRECTORY_COSTS):
                return
            below = _below(above, place, root.group)
            if below is not None:
                with contextlib.closing(below):
                    yield place, below


def _below(above: PrivateDirectory, path: str, group: int | None) -> PrivateDirectory | None:
    """A directory below another one.  None: it is missing, or another member's and not usable.

    Raises OSError: this process lacks descriptors, or cannot use its own directory.
    """
    try:
        return above.below(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        # The directory of another member: only the listeners of that member are skipped.
        if group is None or is_lack(error):
            raise
        return None


def _connect(probe: socket.socket, below: PrivateDirectory, name: str) -> tuple[int | None, bool]:
    """Connect to a listener; returns its user, and True if it is one of an older release.

    The user is None if the listener is dead; then its name is removed.  A listener of an older
    release is not connected.

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
