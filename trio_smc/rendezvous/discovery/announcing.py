"""Announcing TCP connections to other processes of this host: the client's half of discovery.

What is said, and why both sides come to one answer, `trio_smc.rendezvous.discovery.same_host`
tells.

Theory of operation: a Unix connection to each listening process, a `Server`, is made once and kept.
Which of them may be behind a TCP address the directories of `discovery.directory` say.  What such a
`Lookup` came to is kept as long as the directories have not changed: looking at their time of
change is all that a connection costs then.

Whoever waits for an answer reads for all who wait: one of them sleeps on an epoll of all Unix
connections, hands the others what is theirs, and leaves the reading to one of them when it goes.
So there is no task between a packet and the task that wants it.  The one task of a stack (`run`)
sleeps until a process ends, to let go of its Unix connections, or until somebody has waited for too
long, to end that wait.

Ports are shared (see `trio_smc.connecting.dial`), so somebody else's connection with the announced
addresses may be accepted first, and be over when the announced one is opened.  Answers carry the
number of the announcement, so that one that was withdrawn is not taken for the next one of the same
addresses; and who was told ACCEPTED and sends no CLC withdraws all the same.

Listening processes of other network namespaces are first asked for a proof, each on a Unix
connection for that alone.  What a `Lookup` of them came to counts for ten seconds at most.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import select
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Self

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc._base.timers import Timer, Timers
from trio_smc.host.addresses import is_same_host
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import PrivateDirectory, is_admitted
from trio_smc.rendezvous.discovery import directory, messages
from trio_smc.rendezvous.discovery.messages import Kind, Message, take
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = [
    "Announcement",
    "Announcer",
    "AnySocket",
    "Lookup",
]


_MOST_SERVERS = 256  # Unix connections that are kept, each of them a descriptor
_RETRY_INTERVAL = 0.005  # after a full queue or backlog, seconds
_EVENTS_AT_ONCE = 64
_ANSWERS = (Kind.ACCEPTED, Kind.REFUSED)
_MAX_ASKED = 64  # listening processes that a client asks
_PROOF_PATIENCE = 1.0  # for all that are asked for a proof together, seconds
_PROOF_HOLDS = 10.0  # how long what came of it counts, seconds
_DISPROOF_HOLDS = 60.0  # how long it counts that a connection did not arrive where it was proven
_MOST_LOOKUPS = 1024  # TCP addresses that are remembered
_log = logging.getLogger(__name__)
_IFNAMSIZ = 16
_SO_NETNS_COOKIE = 71  # linux/include/uapi/asm-generic/socket.h; 8 bytes
_GIVEN_UP: Final = 0.0001
"""Seconds of processor time that a task takes to go on without an answer, as by TCP."""

AnySocket = trio.socket.SocketType | socket.socket


class Server:
    """A process that listens, at the other end of a Unix connection."""

    __slots__ = ("announced", "connection", "entry")

    def __init__(self, connection: socket.socket, entry: tuple[int, int, str]) -> None:
        self.connection: socket.socket = connection
        self.entry: tuple[int, int, str] = entry  # device and inode of the directory, name there
        self.announced: set[Announcement] = set()

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() >= 0

    def send(self, message: bytes) -> None:
        """Send a packet without waiting.  Raises OSError, BlockingIOError: not now."""
        self.connection.send(message, socket.MSG_NOSIGNAL)


class Announcement:
    """A TCP connection that was announced; settled by `accepted` or `close`.

    Leaving it as a context manager withdraws, when it is not settled yet.

    Attributes:
      required: this side takes SMC-R or nothing.
      wanted: the process that accepted it does.
    """

    __slots__ = (
        "_acceptor", "_owner", "answered", "asked", "elsewhere", "key", "number", "reason",
        "required", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        owner: Announcer,
        key: bytes,
        number: bytes,
        required: bool,
        elsewhere: Lookup | None = None,
    ) -> None:
        self._owner = owner
        self._acceptor: Server | None = None
        self.elsewhere: Lookup | None = elsewhere
        self.key: bytes = key
        self.number: bytes = number
        self.required: bool = required
        self.wanted: bool = False
        self.asked: list[Server] = []  # who may still say that it is theirs
        self.answered: bool = False
        self.reason: FallbackReason | None = FallbackReason.PEER_NOT_CAPABLE

    async def accepted(self, deadline: float) -> FallbackReason | None:
        """Wait until the process that accepted the TCP connection says so; settles in any case.

        deadline: when to stop waiting, as `trio.current_time`.

        None: both sides start SMC-R; send the Proposal, or end the TCP connection.  A reason:
        both sides stay on TCP.
        """
        try:
            if not self.answered and not self._owner.spin(self):
                await self._owner.wait(self, deadline)
            self._acceptor = None  # which gets a Proposal
        finally:
            self.close()
        return self.reason

    def tell(self, server: Server) -> bool:
        """Announce it there; False when nothing can be sent now, or ever."""
        try:
            server.send(messages.announce(self.key, self.number, required=self.required))
        except BlockingIOError:
            return False
        except OSError as error:
            if not is_lack(error):
                self._owner.drop(server)
            return False
        self.asked.append(server)
        server.announced.add(self)
        return True

    def heard(self, server: Server, message: Message | None) -> None:
        """What a listening process answered; None: its Unix connection ended."""
        self.asked.remove(server)
        server.announced.discard(self)
        if message is not None and message.kind is Kind.ACCEPTED:
            self.reason = None
            self.wanted = message.required
            self._acceptor = server
        elif message is not None and message.reason not in (None, FallbackReason.PEER_NOT_CAPABLE):
            self.reason = message.reason
        self.answered = self.reason is None or not self.asked

    def give_up(self) -> None:
        """Nobody has answered in time."""
        if self.elsewhere is not None and self.asked:
            # The connection went to somebody else than the proof did.
            self.elsewhere.disprove()
            self.reason = FallbackReason.PATH_NOT_PROVEN
        self.close()

    def cancel(self) -> None:
        """Withdraw, and end the wait for an answer."""
        self.close()
        self._owner.end_wait(self)

    def is_too_late(self) -> bool:
        """Whether the connection was accepted that is not open yet: that is somebody else's."""
        self._owner.hear(self)
        return self.answered and self.reason is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw: the connection is plain TCP, or was never opened; idempotent.

        To be called before anything is sent over TCP.
        """
        self.answered = True
        asked, self.asked = self.asked, []
        if self._acceptor is not None:
            asked.append(self._acceptor)
            self._acceptor = None
        for server in asked:
            server.announced.discard(self)
            try:
                server.send(messages.withdraw(self.key))
            except OSError:
                # The end of the Unix connection tells the other side the same.
                self._owner.drop(server)
        self._owner.forget(self)


class Lookup:
    """Who may be behind a TCP address, while the directories are as they were.

    Attributes:
      until: when it ends to count at the latest, as `trio.current_time`.
      reason: why there is nobody.
    """

    __slots__ = ("reason", "servers", "stamps", "until")

    def __init__(self, servers: list[Server], stamps: directory.Stamps) -> None:
        self.servers: list[Server] = servers
        self.stamps: directory.Stamps = stamps
        self.until: float = math.inf
        self.reason: FallbackReason = FallbackReason.PEER_NOT_CAPABLE

    def disprove(self) -> None:
        """The servers were asked in vain."""
        self.servers = []
        self.until = trio.current_time() + _DISPROOF_HOLDS
        self.reason = FallbackReason.PATH_NOT_PROVEN

    def holds(self) -> bool:
        """Whether nobody came or went since."""
        for server in self.servers:
            if not server.is_open:
                return False
        return self.stamps.unchanged()


class Lookups:
    """What one stack knows of the TCP addresses that it has connected to.

    Attributes:
      known: by namespace, address and port; each to be asked first whether it still holds.
      elsewhere: the same of other namespaces, by our own, source, address and port.
    """

    def __init__(self, private: Path, owner: Announcer) -> None:
        """`private`: the user's private directory (`Config.private_directory`)."""
        self._private = private
        self._owner = owner
        self._listings = directory.Listings()
        self._namespaces: dict[bytes, str] = {}
        self.known: dict[tuple[str, str, int], Lookup] = {}
        self.elsewhere: dict[tuple[str, str, str, int], Lookup] = {}

    def namespace(self, sock: AnySocket | None) -> str:
        """How the directories of a socket's network namespace are named."""
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

    async def look_up(
        self, servers: list[Server], namespace: str, source: str, destination: tuple[str, int]
    ) -> FallbackReason:
        """Add everyone who might accept the TCP connection to ``servers``; why there is none."""
        address, port = destination
        try:
            root = PrivateDirectory.open(self._private, create=False)
        except FileNotFoundError:
            return FallbackReason.PEER_NOT_CAPABLE
        listeners: list[directory.Listeners] = []
        try:
            stamps = self._find_listeners(root, namespace, destination, listeners)
            # Our own wildcard listener says nothing about the same port of another host.
            wildcards = [each for each in listeners if each.is_wildcard]
            others = any(each.waiting for each in wildcards) and not is_same_host(source, address)
            if others:
                for each in wildcards:
                    each.waiting.clear()
            for each in listeners:
                self._owner.connect(each, servers, _MAX_ASKED)
                while each.waiting and len(servers) < _MAX_ASKED:
                    await trio.sleep(_RETRY_INTERVAL)
                    self._owner.connect(each, servers, _MAX_ASKED)
        finally:
            for each in listeners:
                each.close()
            root.close()
        ours = [each for each in servers if is_admitted(each.connection, root.group)]
        if not others and ours == servers and stamps.settled():
            if len(self.known) >= _MOST_LOOKUPS:
                self.known.clear()
            self.known[namespace, address, port] = Lookup(ours, stamps)
        foreign = [server for server in servers if server not in ours]
        for server in foreign:
            self._owner.drop(server)
        servers[:] = ours
        return FallbackReason.OTHER_USER if foreign else FallbackReason.PEER_NOT_CAPABLE

    def _find_listeners(
        self,
        root: PrivateDirectory,
        namespace: str,
        destination: tuple[str, int],
        listeners: list[directory.Listeners],
    ) -> directory.Stamps:
        """Add the directories of all that may listen at ``destination`` to ``listeners``, one by
        one, as another may not open; the stamps of what was looked at."""
        stamps = directory.Stamps(self._private)
        stamps.add_root(root)
        exact = directory.listener_name(*destination, dual_stack=False)
        for path in directory.namespace_paths(root, namespace):
            if root.group is not None:
                stamps.add(root, path.rpartition("/")[0])
            stamps.add(root, path)
            for name in (exact, *directory.wildcard_names(*destination)):
                each = directory.Listeners(root, path, name, self._listings)
                each.is_wildcard = name != exact
                listeners.append(each)
                stamps.add(root, f"{path}/{name}")
        return stamps

    async def look_elsewhere(
        self, source: str, destination: tuple[str, int], sock: AnySocket
    ) -> Lookup:
        """Who listens there in other network namespaces, and proves that the address leads there.

        What is found is not announced to before that.
        """
        namespace = self.namespace(sock)
        key = (namespace, source, *destination)
        known = self.elsewhere.get(key)
        if known is not None and trio.current_time() < known.until and known.holds():
            return known
        found = Lookup([], directory.Stamps(self._private))
        try:
            root = PrivateDirectory.open(self._private, create=False)
        except FileNotFoundError:
            return found
        listeners: list[directory.Listeners] = []
        try:
            found.stamps.add_root(root)
            for top in root.member_directories(directory.TOP):
                found.stamps.add(root, top)
            for other in directory.other_namespaces(root, namespace):
                found.stamps.add(root, other)
                self._list_elsewhere(root, other, destination, found, listeners)
            asked = _Proofs(source, destination[0], sock, root.group, self._owner.closer)
            await asked.ask(listeners)
            if asked.lack is not None:
                raise asked.lack
            found.reason = asked.reason
            for each in listeners:
                while each.waiting:  # those that have proven it
                    self._owner.connect(each, found.servers, _MAX_ASKED)
                    if each.waiting:
                        await trio.sleep(_RETRY_INTERVAL)
        finally:
            for each in listeners:
                each.close()
            root.close()
        found.until = trio.current_time() + _PROOF_HOLDS
        if found.stamps.settled():
            if len(self.elsewhere) >= _MOST_LOOKUPS:
                self.elsewhere.clear()
            self.elsewhere[key] = found
        return found

    def _list_elsewhere(
        self,
        root: PrivateDirectory,
        namespace: str,
        destination: tuple[str, int],
        found: Lookup,
        listeners: list[directory.Listeners],
    ) -> None:
        """Add the listeners of one other network namespace, and the stamps of their directories."""
        exact = directory.listener_name(*destination, dual_stack=False)
        for name in (exact, *directory.wildcard_names(*destination)):
            try:
                listeners.append(directory.Listeners(root, namespace, name, self._listings))
                found.stamps.add(root, f"{namespace}/{name}")
            except OSError as error:
                if is_lack(error):
                    raise


class _Proofs:
    """Asking listening processes of other network namespaces to prove that an address leads there.

    Args:
      source, destination: the addresses of the TCP connections to come.
      sock: the socket of the first of them.
      group: `PrivateDirectory.group`.
      closer: of the sockets that were asked.

    Attributes:
      reason: why nobody has proven it.
      lack: what kept this process from asking one of them.
    """

    def __init__(
        self,
        source: str,
        destination: str,
        sock: AnySocket,
        group: int | None,
        closer: Closer,
    ) -> None:
        self._closer = closer
        self.lack: OSError | None = None
        self._source, self._destination = source, destination
        self._key = messages.four_tuple((source, 0), (destination, 0))
        self._sock = sock
        self._group = group
        self.reason = FallbackReason.PEER_NOT_CAPABLE

    async def ask(self, listeners: list[directory.Listeners]) -> None:
        """Ask all who wait there at once; those that prove nothing wait no more."""
        with trio.move_on_after(_PROOF_PATIENCE):
            async with trio.open_nursery() as nursery:
                for each in listeners:
                    names, each.waiting = each.waiting[:_MAX_ASKED], []
                    for name in names:
                        nursery.start_soon(self._ask, each, name)

    async def _ask(self, listeners: directory.Listeners, name: str) -> None:
        try:
            connection = listeners.connect_to(name)
        except OSError as error:
            self.lack = error
            return
        if connection is None:
            return
        try:
            if not is_admitted(connection, self._group):
                self.reason = FallbackReason.OTHER_USER
                return
            self.reason = FallbackReason.PATH_NOT_PROVEN
            try:
                connection.send(messages.prove(self._key), socket.MSG_NOSIGNAL)
                await trio.lowlevel.wait_readable(connection)
                said = take(connection)
                if said is None or said.kind is not Kind.LISTENING or said.connection != self._key:
                    return
                if await self._is_true(said):
                    listeners.waiting.append(name)
            except OSError as error:
                _log.debug("same-host discovery: no proof: %s", error)
        finally:
            trio.lowlevel.notify_closing(connection.fileno())
            self._closer.discard(connection)

    async def _is_true(self, said: Message) -> bool:
        """Whether the address leads from here to who said so, and untranslated.  Raises OSError."""
        family = socket.AF_INET6 if ":" in self._destination else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as plain:
            if not _goes_the_same_way(plain, self._sock):
                return False
            plain.bind((self._source, 0))
            with trio.socket.from_stdlib_socket(plain) as probe:
                await probe.connect((self._destination, said.port))
                here, there = probe.getsockname()[:2], probe.getpeername()[:2]
                wanted = messages.proof(said.nonce, here, there)
                got = b""
                while len(got) < len(wanted):
                    more = await probe.recv(len(wanted) - len(got))
                    if not more:
                        return False
                    got += more
        return secrets.compare_digest(got, wanted)


def _goes_the_same_way(plain: socket.socket, sock: AnySocket) -> bool:
    """Whether nothing but its addresses decides where a socket's packets go, as for a plain one."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) or any(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _IFNAMSIZ)
    ):
        return False
    try:
        cookies = [
            each.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) for each in (plain, sock)
        ]
    except OSError:
        return True  # Linux before 5.14
    return cookies[0] == cookies[1]


class Announcer:
    """The Unix connections of one stack to listening processes of this host."""

    def __init__(
        self, private: Path, spinner: Spinner = NEVER, gone: Callable[[], object] = lambda: None
    ) -> None:
        """`private`: the user's private directory (`Config.private_directory`).  `gone`: called
        when a listening process has ended: what was learned of it may be so no more."""
        self._spinner = spinner
        self._gone = gone
        self._lookups = Lookups(private, self)
        self._servers: dict[int, Server] = {}  # by descriptor; oldest first
        self._entries: dict[tuple[int, int, str], Server] = {}
        self._announced: dict[bytes, Announcement] = {}
        self._count = 0  # announcements so far
        self.closer = Closer("announcements")
        # Who says something; and who is gone, which is what the task sleeps for.
        self._epoll: select.epoll | None = None
        self._ends: select.epoll | None = None
        self._reading = False
        self._timers = Timers(trio.current_time, self._timer_is_earlier)  # who waits, until when
        self._nap: trio.CancelScope | None = None  # around the sleep of `run`
        # Who waits while another one reads.
        self._others: dict[Announcement, trio.lowlevel.Task] = {}

    def open(self) -> None:
        """Make what `run` needs.  Raises OSError: there are no descriptors."""
        self._epoll = select.epoll()
        self._ends = select.epoll()

    async def run(self) -> None:
        """Let go of processes that have ended, until cancelled; after `open`."""
        try:
            while self._ends is not None:
                with trio.CancelScope(deadline=self._timers.next_deadline()) as self._nap:
                    await trio.lowlevel.wait_readable(self._ends.fileno())
                self._hear_ends()
                self._timers.run_due()
        finally:
            self._nap = None
            self._timers.run_all()

    def _timer_is_earlier(self) -> None:
        if self._nap is not None:
            self._nap.deadline = self._timers.next_deadline()

    def _give_up(self, announcement: Announcement) -> None:
        """End a wait that has taken too long."""
        self._timers.charge(_GIVEN_UP)
        announcement.give_up()
        self.end_wait(announcement)

    def end_wait(self, announcement: Announcement) -> None:
        """Let its task see that it is over."""
        if announcement in self._others:
            self.wake(announcement)
        elif self._epoll is not None:
            trio.lowlevel.notify_closing(self._epoll.fileno())  # it is the one that reads

    def _hear_ends(self) -> None:
        """Let go of processes that have ended by now."""
        if self._ends is None:
            return
        for number, _ in self._ends.poll(0, _EVENTS_AT_ONCE):
            server = self._servers.get(number)
            while server is not None and self._hear_one(server):
                pass  # the end is the last

    def close(self) -> None:
        """Withdraw what is not settled and end all Unix connections."""
        for server in list(self._servers.values()):
            self.drop(server)
        for each in (self._epoll, self._ends):
            if each is not None:
                trio.lowlevel.notify_closing(each.fileno())
                each.close()
        self._epoll = self._ends = None
        self.closer.join()

    def abandon(self) -> None:
        """Let go of the descriptors: this process is a forked child, they are its parent's."""
        self._timers.abandon()
        for server in self._servers.values():
            server.connection.close()
        for each in (self._epoll, self._ends):
            if each is not None:
                each.close()
        # Nothing may be changed in the sets of watched descriptors, which the parent shares.
        self._epoll = self._ends = None
        self._servers.clear()
        self._entries.clear()

    # --- announcing --------------------------------------------------------------------------

    def announce_now(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        sock: AnySocket | None,
        *,
        required: bool,
    ) -> Announcement | FallbackReason | None:
        """Announce a TCP connection; None when that takes looking around, or waiting."""
        address, port = destination
        lookups = self._lookups
        found = lookups.known.get((lookups.namespace(sock), address, port))
        if found is None or not found.holds():
            return None
        if not found.servers:
            return FallbackReason.PEER_NOT_CAPABLE
        announcement = self._new(source, destination, required)
        if announcement is None:
            return FallbackReason.PEER_NOT_CAPABLE
        for server in found.servers:
            if not announcement.tell(server):
                announcement.close()
                return None
        return announcement

    async def announce(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        sock: AnySocket | None,
        *,
        required: bool,
        elsewhere: Lookup | None = None,
    ) -> Announcement | FallbackReason:
        """Announce a TCP connection to all who might accept it.

        ``elsewhere``: what `prove` returned; None: in the network namespace of ``sock``.

        Raises:
          DirectoryUnusable, OSError: nobody can be asked.
        """
        servers: list[Server] = []
        # The name of a process that is gone is removed only by who cannot connect to it.
        self._hear_ends()
        if elsewhere is None:
            namespace = self._lookups.namespace(sock)
            reason = await self._lookups.look_up(servers, namespace, source[0], destination)
        else:
            servers, reason = elsewhere.servers, FallbackReason.PATH_NOT_PROVEN
        announcement = self._new(source, destination, required, elsewhere)
        if announcement is None:
            return FallbackReason.PEER_NOT_CAPABLE
        try:
            for server in servers:
                # Nobody says when its queue has room.
                while server.is_open and not announcement.tell(server):  # noqa: ASYNC110
                    await trio.sleep(_RETRY_INTERVAL)
        except BaseException:
            announcement.close()
            raise
        if announcement.asked:
            return announcement
        announcement.close()
        return reason

    async def prove(
        self, source: str, destination: tuple[str, int], sock: AnySocket
    ) -> Lookup | FallbackReason:
        """Who listens there in other network namespaces, for `announce`; why nobody does.

        Raises:
          DirectoryUnusable, OSError: nobody can be asked.
        """
        self._hear_ends()
        found = await self._lookups.look_elsewhere(source, destination, sock)
        return found if found.servers else found.reason

    def _new(
        self,
        source: tuple[str, int],
        destination: tuple[str, int],
        required: bool,
        elsewhere: Lookup | None = None,
    ) -> Announcement | None:
        """An announcement that nobody knows of yet; None: another one has these addresses."""
        key = messages.four_tuple(source, destination)
        self._count += 1
        number = messages.packed_number(self._count)
        announcement = Announcement(self, key, number, required, elsewhere)
        older = self._announced.get(announcement.key)
        if older is not None:
            # Two sockets want one port, and one of them is going to have it: nobody could tell
            # which, so both are TCP.
            older.close()
            self.wake(older)
            return None
        self._announced[announcement.key] = announcement
        return announcement

    def is_announced(self, source: tuple[str, int], destination: tuple[str, int]) -> bool:
        """Whether a connection with these addresses is on its way already."""
        return messages.four_tuple(source, destination) in self._announced

    def forget(self, announcement: Announcement) -> None:
        """It is settled."""
        if self._announced.get(announcement.key) is announcement:
            del self._announced[announcement.key]

    # --- answers -----------------------------------------------------------------------------

    def hear(self, announcement: Announcement) -> None:
        """Take the answers that are there."""
        for server in announcement.asked.copy():
            while self._hear_one(server):
                pass

    def spin(self, announcement: Announcement) -> bool:
        """Whether ``announcement`` is answered within a moment, with nothing else to do."""
        if self._reading or not announcement.asked:
            return False
        server = announcement.asked[-1]  # nearly always the only one

        def answered() -> bool:
            return self._hear_one(server) and announcement.answered

        return self._spinner.until(answered, soon=True)

    async def wait(self, announcement: Announcement, deadline: float) -> None:
        """Wait until ``announcement`` is answered, or given up at ``deadline``."""
        self._spinner.sleeping += 1
        timer: Timer | None = None
        try:
            if self._nap is None:
                with trio.CancelScope(deadline=deadline) as scope:
                    await self._wait(announcement)
                if scope.cancelled_caught:
                    announcement.give_up()
                return
            timer = self._timers.call_at(deadline, partial(self._give_up, announcement))
            await self._wait(announcement)
        finally:
            self._spinner.sleeping -= 1
            if timer is not None:
                timer.cancel()
            self._others.pop(announcement, None)
            if not self._reading and self._others:
                self.wake(next(iter(self._others)))

    async def _wait(self, announcement: Announcement) -> None:
        while not announcement.answered:
            if self._reading:
                await self._park(announcement)
                continue
            if self._epoll is None:
                raise trio.ClosedResourceError
            self._reading = True
            try:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
            except trio.ClosedResourceError:
                continue  # given up, or there is no epoll any more
            finally:
                self._reading = False
            self._look()

    async def _park(self, announcement: Announcement) -> None:
        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._others[announcement]
            return trio.lowlevel.Abort.SUCCEEDED

        self._others[announcement] = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self, announcement: Announcement) -> None:
        """Let it look again, when it waits."""
        task = self._others.pop(announcement, None)
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _look(self) -> None:
        """Take answers; more than one of a process only while others wait for theirs."""
        if self._epoll is None:
            return
        for number, _ in self._epoll.poll(0, _EVENTS_AT_ONCE):
            server = self._servers.get(number)
            while server is not None and self._hear_one(server) and self._others:
                pass

    def _hear_one(self, server: Server) -> bool:
        """Take one packet, or the end; False: there is nothing."""
        if not server.is_open:
            return False
        try:
            message = take(server.connection)
        except BlockingIOError:
            return False
        self._hear(server, message)
        return True

    def _hear(self, server: Server, message: Message | None) -> None:
        if message is not None and message.connection:
            if message.kind in _ANSWERS:
                announcement = self._announced.get(message.connection)
                if (
                    announcement is not None
                    and server in announcement.asked
                    and message.number in (announcement.number, b"")
                ):
                    self._answer(announcement, server, message)
                return
            message = None  # no listener says so
        if message is not None and message.kind is None:
            message = Message(Kind.REFUSED, FallbackReason.LOCAL_VERSION_MISMATCH)
        self.drop(server, message)

    def _answer(self, announcement: Announcement, server: Server, message: Message | None) -> None:
        announcement.heard(server, message)
        if announcement.answered:
            self.wake(announcement)

    def drop(self, server: Server, message: Message | None = None) -> None:
        """End a Unix connection; what was announced there is answered by ``message``."""
        number = server.connection.fileno()
        if self._servers.pop(number, None) is None:
            return
        for each in (self._epoll, self._ends):
            if each is not None:
                each.unregister(number)
        if self._entries.get(server.entry) is server:
            del self._entries[server.entry]
        self.closer.discard(server.connection)
        self._gone()
        for announcement in list(server.announced):
            self._answer(announcement, server, message)

    def connect(self, listeners: directory.Listeners, servers: list[Server], limit: int) -> None:
        """Add those of ``listeners`` that are connected to, and that can be now.

        limit: the most that ``servers`` may hold.
        """
        for name in listeners.waiting.copy():
            known = self._entries.get((*listeners.place, name))
            if known is not None:
                listeners.waiting.remove(name)
                servers.append(known)
        if self._epoll is None:
            self._epoll = select.epoll()
        if self.closer.is_full:
            raise OSError(errno.ENOBUFS, "closing what listening processes sent takes long")
        connected = listeners.connect(limit - len(servers))
        while connected:
            name, connection = connected.pop(0)
            if len(self._servers) >= _MOST_SERVERS:
                self._drop_idle(servers)
            try:
                self._watch(connection)
            except OSError:
                for _, each in ((name, connection), *connected):
                    self.closer.discard(each)
                raise
            server = Server(connection, (*listeners.place, name))
            self._servers[connection.fileno()] = self._entries[server.entry] = server
            servers.append(server)

    def _watch(self, connection: socket.socket) -> None:
        """Raises OSError: there are too many epoll watches."""
        if self._epoll is not None:
            self._epoll.register(connection, select.EPOLLIN)
        try:
            if self._ends is not None:
                self._ends.register(connection, select.EPOLLRDHUP)
        except OSError:
            if self._epoll is not None:
                self._epoll.unregister(connection)
            raise

    def _drop_idle(self, wanted: list[Server]) -> None:
        """Let go of the oldest of which no answer is waited for."""
        for server in self._servers.values():
            if not server.announced and server not in wanted:
                self.drop(server)
                return
