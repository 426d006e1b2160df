"""Hearing which TCP connections were announced to a listener: the server's half of discovery.

What is said, and why both sides come to one answer, `trio_smc.rendezvous.discovery.same_host`
tells.

Theory of operation: clients keep their Unix connections, and what they say waits there until it
is needed.  A client has announced a TCP connection before the kernel hears of it, so whoever looks
for an announcement takes what waits first, and finds it or knows that there is none.  Nothing is
woken by an announcement: the one task of a publication sleeps until a client comes or goes, and
wakes claims that wait for long, to look again; a cancel scope for each of them would cost a
short-lived connection as much as two system calls.

A client of another network namespace asks for a proof before it announces anything.  It gets a TCP
socket that listens at the very address the client is going to connect to, and says to who connects
there what nobody else knows.  That socket goes with the client's Unix connection, within seconds.

Unix connections and announcements are counted by user (`trio_smc.rendezvous.discovery.shares`).
If no place is left, the user that has most of them loses the oldest one to a user that has fewer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import select
import socket
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import trio

# Imported early: a program that has dropped its privileges may be unable to read the module.
with contextlib.suppress(ImportError):  # only Unix has it
    import resource

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import LACK_ERRORS, is_lack
from trio_smc._base.timers import Timer, Timers
from trio_smc.host.addresses import plain_address
from trio_smc.host.descriptors import Closer
from trio_smc.host.private_directory import DirectoryUnusable, is_admitted, peer_user
from trio_smc.host.tcp import end_waits, unread_bytes
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.directory import NewSocket
from trio_smc.rendezvous.discovery.messages import Kind, take
from trio_smc.rendezvous.discovery.shares import Shares
from trio_smc.rnic.spinner import NEVER, Spinner
from trio_smc.wire.clc import EYE_CATCHER

__all__ = [
    "BACKLOG",
    "Announced",
    "Claim",
    "Claims",
    "Client",
    "Publication",
    "Search",
]


_log = logging.getLogger(__name__)

BACKLOG = 1024  # Unix connections that wait to be let in
_MAX_CLIENTS = 1024  # Unix connections per publication, each of them a descriptor
_DESCRIPTOR_SHARE = 4  # and at most the process's limit of descriptors divided by this
_ACCEPTS_AT_ONCE = 64  # before other tasks have their turn
_EVENTS_AT_ONCE = 64
_AT_ONCE = 64  # packets and clients that a claim looks through before other tasks have their turn
_MOST_QUEUED = 1024  # packets of one client that nobody has read: many times what a queue holds
_LOOK_INTERVAL = 0.05  # how often a claim that waits looks whether its client withdrew, seconds
_NAME_INTERVAL = 10.0  # how often to look whether the socket still has its name, seconds
_EXHAUSTED_INTERVAL = 0.1  # after an accept that found no descriptors or memory, seconds

_MAX_PENDING = 4096  # announcements per publication
_ANNOUNCE_TIMEOUT = 2.0  # from a Unix connection to its first announcement, seconds
_ANY = ("0.0.0.0", "::")
_MAX_PROBES = 16  # TCP sockets that listen at a time for clients that ask for a proof
_PENDING_TIMEOUT = 60.0  # from an announcement to the accepted TCP connection, seconds


class Client:
    """A client's Unix connection."""

    __slots__ = ("connection", "pending", "probe", "user")

    def __init__(self, connection: socket.socket) -> None:
        self.connection: socket.socket = connection
        self.user: int = peer_user(connection)
        self.pending: set[bytes] = set()  # what it announced, and nobody claimed
        self.probe: Probe | None = None

    def tell(self, message: bytes) -> bool:
        """Send a packet without waiting; False when it is gone or takes nothing more."""
        try:
            self.connection.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True


class Probe:
    """A TCP socket that shows who connects to it that an address leads to this network namespace.

    Args:
      connection: the `messages.four_tuple` of the PROVE.

    Raises OSError: the address is none of this namespace's.

    Attributes:
      said: what the client is to be told.
    """

    __slots__ = ("_nonce", "_source", "listener", "said")

    def __init__(self, connection: bytes) -> None:
        source, address = messages.parties(connection)
        self._source = plain_address(source)
        self._nonce = secrets.token_bytes(messages.NONCE_SIZE)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener: socket.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.listener.setblocking(False)
            self.listener.bind((address, 0))
            self.listener.listen()
            port = self.listener.getsockname()[1]
        except BaseException:
            self.listener.close()
            raise
        self.said: bytes = messages.listening(connection, port, self._nonce)

    def answer(self) -> None:
        """Let in who waits: the client itself is shown what it asked for, others nothing.

        Raises OSError when there are no descriptors to let anybody in.
        """
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, name = self.listener.accept()
            with connection:
                connection.setblocking(False)
                here = connection.getsockname()
                if plain_address(name[0]) == self._source:
                    connection.send(messages.proof(self._nonce, name[:2], here[:2]))


class Announced(NamedTuple):
    """A TCP connection that a client has announced.

    Fields:
      key: the `messages.four_tuple`.
      number: which of the client's announcements it is.
      required: the client takes SMC-R or nothing.
    """

    client: Client
    key: bytes
    number: bytes = b""
    required: bool = False

    def refuse(self, reason: FallbackReason) -> None:
        self.client.tell(messages.refused(reason, self.key, self.number))


class Claim:
    """An accepted TCP connection whose client announced it: to be confirmed or refused.

    Args:
      announced: what the client said.
      accepted: the connection, which nobody has read from; None: only its addresses are known.

    Attributes:
      required: the client takes SMC-R or nothing.
      withdrawn: the client says that its connection is plain TCP, or will never be opened.
    """

    __slots__ = ("_accepted", "_publication", "_settled", "_told", "announced", "withdrawn")

    def __init__(
        self, publication: Publication, announced: Announced, accepted: socket.socket | None = None
    ) -> None:
        self._publication = publication
        self.announced: Announced = announced
        self._accepted = accepted
        self._settled = False
        self._told = False
        self.withdrawn: bool = False

    @property
    def required(self) -> bool:
        return self.announced.required

    def accept(self, *, required: bool = False) -> None:
        """Tell the client at once that its connection was accepted; `confirm` is to follow.

        required: this side takes SMC-R or nothing.
        """
        to = self.announced
        said = messages.accepted(to.key, to.number, required=required)
        self._told = not self._is_over() and to.client.tell(said)

    async def confirm(self, connection: trio.socket.SocketType, deadline: float) -> bool:
        """Tell the client that its connection was accepted; whether it goes on with SMC-R.

        connection: the accepted TCP connection, which nobody has read from.
        deadline: when to stop waiting for the client, as `trio.current_time`.

        True: the client's next bytes on the TCP connection are CLC, and they are there.  False:
        the connection is plain TCP, and the client knows.

        Raises OSError (ETIMEDOUT) when the client decided nothing in time.  Then, and when this
        is cancelled, nobody knows here what the client is going to say: close the TCP connection.
        """
        publication = self._publication
        try:
            if not self._told:
                self.accept()
            if self._is_over() or not self._told:
                return False
            while not await publication.wait(connection):
                self._hear()
                if self._is_over():
                    return False
                if trio.current_time() >= deadline:
                    raise OSError(errno.ETIMEDOUT, "the client announced SMC-R and says nothing")
            # Before a client sends anything else than CLC it withdraws.
            self._hear()
            return not self._is_over()
        finally:
            self._settle()

    def refuse(self, reason: FallbackReason) -> None:
        """Tell the client at once that its connection is plain TCP, and why."""
        if not self._settled:
            self.announced.refuse(reason)
            self._settle()

    def is_right(self) -> bool:
        """Whether the bytes that are there, and stay unread, may be CLC.

        Otherwise it is the connection of somebody else, who had the port before the client, and
        what the client has announced waits for its own connection.

        Raises OSError: there are none, or the connection was reset.
        """
        right = False
        try:
            right = self._begins_with_clc()
        finally:
            if not right:
                self._settle()
                if not self.withdrawn:
                    self._publication.claims.restore(self.announced)
        return right

    def _begins_with_clc(self) -> bool:
        if self._accepted is None:
            raise OSError(errno.ENOTCONN, "only the addresses of the connection are known")
        # Trio's `recv` takes a pass of the scheduler.
        first = self._accepted.recv(len(EYE_CATCHER), socket.MSG_PEEK)
        return bool(first) and EYE_CATCHER.startswith(first)

    def _hear(self) -> None:
        if not self._publication.hear_all(self.announced.client):
            raise OSError(errno.ECONNABORTED, "the client says more than anybody could read")

    def _is_over(self) -> bool:
        return self._settled or self.withdrawn

    def _settle(self) -> None:
        self._settled = True
        self._publication.claims.forget(self)


class Search:
    """Looking for the announcement of an accepted TCP connection, in turns.

    It lies in some queue since before the TCP connection was made.  So who has been read for
    longer than a queue holds has not announced it, and whoever came meanwhile neither.

    Attributes:
      claim: what was found.
    """

    def __init__(
        self, publication: Publication, key: bytes, accepted: socket.socket | None = None
    ) -> None:
        self._publication = publication
        self._key = key
        self._accepted = accepted
        self._heard: defaultdict[Client | None, int] = defaultdict(int)
        self.claim: Claim | None = None

    def look(self) -> bool:
        """Have a turn; whether that was all."""
        came = 0
        while True:
            self.claim = self._publication.take_pending(self._key, self._accepted)
            if self.claim is not None:
                return True
            some = self._publication.hear_some(self._heard)
            if not some:
                if self._publication.claims.release(self._key):
                    continue
                return True
            came += some
            if came >= _AT_ONCE:
                return False

    async def finish(self) -> Claim | None:
        """The claim, or None; other tasks have their turns."""
        while not self.look():
            await trio.lowlevel.checkpoint()
        return self.claim


class Claims:
    """The announced connections of one listening socket.

    Attributes:
      pending: those that wait to be claimed, by four-tuple, with the time when to forget them, as
        `trio.current_time`; oldest first.
      taken: the claims that are not settled.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, tuple[Announced, float]] = {}
        self._shares: Shares[bytes] = Shares()  # of the four-tuples in `pending`
        self.taken: dict[bytes, Claim] = {}

    def add(self, announced: Announced) -> None:
        """It waits to be claimed, or the client is told that too many wait."""
        client, key = announced.client, announced.key
        now = trio.current_time()
        while self.pending:
            oldest, until = next(iter(self.pending.values()))
            if until > now:
                break
            self.withdrawn(oldest.client, oldest.key)
        if key in self.pending:
            older, _ = self.pending[key]
            self._remove(older.client, key)
            if older.client is not client:
                # Two want one port, and one of them is going to have it: nobody can tell which.
                for each in (older, announced):
                    each.refuse(FallbackReason.PEER_NOT_CAPABLE)
                return
        if len(self.pending) >= _MAX_PENDING:
            loser = self._shares.oldest_of_largest(client.user)
            refused = announced if loser is None else self.pending[loser][0]
            refused.refuse(FallbackReason.HANDSHAKE_LIMIT)
            if loser is None:
                return
            self._remove(refused.client, loser)
        self.pending[key] = announced, now + _PENDING_TIMEOUT
        client.pending.add(key)
        self._shares.add(client.user, key)

    def _remove(self, client: Client, key: bytes) -> None:
        """An announcement of ``client`` waits no more."""
        del self.pending[key]
        client.pending.discard(key)
        self._shares.remove(client.user, key)

    def withdrawn(self, client: Client, key: bytes) -> None:
        """It is plain TCP, or will never be opened; a claim is told."""
        if key in client.pending:
            # Announced after the claim that there may be: somebody has drawn a port that is taken.
            self._remove(client, key)
            return
        claim = self.taken.get(key)
        if claim is not None and claim.announced.client is client:
            claim.withdrawn = True

    def take(self, key: bytes) -> Announced | None:
        """What was announced waits no more."""
        found = self.pending.get(key)
        if found is None:
            return None
        announced = found[0]
        self._remove(announced.client, key)
        return announced

    def forget(self, claim: Claim) -> None:
        """A claim is settled."""
        key = claim.announced.key
        if self.taken.get(key) is not claim:
            return
        del self.taken[key]
        other = self.take(key)
        if other is not None:
            # It may be the connection of this one; it is in the hands of the program by now.
            other.refuse(FallbackReason.PEER_NOT_CAPABLE)

    def restore(self, announced: Announced) -> None:
        """What was claimed waits again, unless its client is gone or has announced it anew."""
        if announced.client.connection.fileno() >= 0 and announced.key not in self.pending:
            self.add(announced)

    def release(self, key: bytes) -> bool:
        """Whether the announcement waits again that another connection of these addresses took.

        That one is over, as there is a new one.
        """
        claim = self.taken.get(key)
        if claim is None:
            return False
        with contextlib.suppress(OSError):
            if claim.is_right():
                return False
        return key in self.pending

    def lost(self, client: Client) -> None:
        """Nothing it has announced can be claimed any more; claims know already."""
        for key in list(client.pending):
            self._remove(client, key)


class Publication:
    """One listening TCP socket that clients on this host can announce connections to.

    Attributes:
      address: the address and port listened on.
      unavailable: why nothing is published, or None.
      claims: what clients have announced to it.
      clients: the Unix connections of clients, by descriptor number.
      most_clients: Unix connections that are accepted at most; set by `start`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        made: NewSocket | None,
        unavailable: FallbackReason | None,
        spinner: Spinner = NEVER,
    ) -> None:
        self.address = address
        self.spinner = spinner
        self._closer = Closer("same-host discovery")
        self._made = made
        self._group = made.group if made is not None else None
        self.unavailable = unavailable
        self._scope = trio.CancelScope()
        self.clients: dict[int, Client] = {}  # by descriptor
        self._shares: Shares[Client] = Shares()
        self.most_clients = 0  # set by `start`
        self._probes: dict[int, Client] = {}  # by descriptor of the probe's listener
        self._silent: dict[Client, Timer] = {}  # nothing announced yet, and not for ever
        self.claims: Claims = Claims()
        self._timers = Timers(trio.current_time, self._timer_is_earlier)
        self._listener: socket.socket | None = None
        # Who says something; and who comes or goes, which is what the task sleeps for.
        self._heard: select.epoll | None = None
        self._moves: select.epoll | None = None
        self._nap = trio.CancelScope()  # around the task's sleep
        self._abandoned = False

    def claim(
        self,
        local: tuple[str, int],
        remote: tuple[str, int],
        accepted: socket.socket | None = None,
    ) -> Claim | Search | None:
        """Look an accepted TCP connection up; None when its client did not announce itself.

        local, remote: its two addresses, text and port.
        accepted: the connection, which nobody has read from.

        Never waits: who announces does so before it connects.  Every claim is to be confirmed
        or refused, or the client waits in vain.  A search: so much is to be read first that other
        tasks must have their turn.
        """
        if self._heard is None:
            return None
        search = Search(self, messages.four_tuple(remote, local), accepted)
        return search.claim if search.look() else search

    def take_pending(self, key: bytes, accepted: socket.socket | None = None) -> Claim | None:
        """The claim of a four-tuple that was announced, as far as anybody has listened."""
        announced = self.claims.take(key)
        if announced is None:
            return None
        claim = self.claims.taken[key] = Claim(self, announced, accepted)
        return claim

    async def wait(self, connection: trio.socket.SocketType) -> bool:
        """Wait for bytes on an accepted TCP connection; False: it is time to look again."""
        number = connection.fileno()
        if number < 0:
            raise trio.ClosedResourceError("given up while this task was to go on")
        if unread_bytes(number) or self.spinner.until(lambda: unread_bytes(number) > 0, soon=True):
            return True
        self.spinner.sleeping += 1
        timer: Timer | None = None
        try:
            if self._moves is None:  # closed meanwhile
                with trio.move_on_after(_LOOK_INTERVAL):
                    await trio.lowlevel.wait_readable(number)
                    return True
                return False
            # A closed connection's number may be another file's when the timer fires.
            look_again = partial(end_waits, connection)
            timer = self._timers.call_later(_LOOK_INTERVAL, look_again)
            await trio.lowlevel.wait_readable(number)
        except trio.ClosedResourceError:
            if connection.fileno() < 0:
                raise trio.ClosedResourceError("given up while this task waited") from None
            return False
        else:
            return True
        finally:
            self.spinner.sleeping -= 1
            if timer is not None:
                timer.cancel()

    def _timer_is_earlier(self) -> None:
        self._nap.deadline = self._timers.next_deadline()

    def close(self) -> None:
        """Take the listener's name away and drop all pending announcements; idempotent."""
        made, self._made = self._made, None
        if made is not None and not self._abandoned:
            made.remove()
            self._scope.cancel()

    def abandon(self) -> None:
        """Let go of the descriptors: this process is a forked child, they are its parent's."""
        self._abandoned = True
        self._timers.abandon()
        for client in self.clients.values():
            client.connection.close()
            if client.probe is not None:
                client.probe.listener.close()
        for each in (self._heard, self._moves):
            if each is not None:
                each.close()
        if self._made is not None:
            self._made.abandon()
        # Nothing may be changed in the sets of watched descriptors, which the parent shares.
        self._heard = self._moves = self._listener = None
        self.clients.clear()
        self._probes.clear()
        self._silent.clear()

    def start(self, nursery: trio.Nursery) -> None:
        """Serve clients in a background task of `nursery`, until `close`.

        Raises OSError when descriptors have run out; it is closed then.
        """
        made = self._made
        if made is None:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(made.listener.close)
            undo.callback(self.close)
            # Here and not in the task, which nobody could tell that there are no descriptors.
            heard = undo.enter_context(select.epoll())
            moves = undo.enter_context(select.epoll())
            for each in (heard, moves):
                each.register(made.listener, select.EPOLLIN)
            name = "trio_smc same-host discovery"
            nursery.start_soon(self._run, heard, moves, name=name)
            self._listener, self._heard, self._moves = made.listener, heard, moves
            self.most_clients = _most_clients()
            self._timers.call_later(_NAME_INTERVAL, self._keep_name)
            undo.pop_all()

    async def _run(self, heard: select.epoll, moves: select.epoll) -> None:
        try:
            with heard, moves, self._scope:
                try:
                    while True:
                        with trio.move_on_at(self._timers.next_deadline()) as self._nap:
                            await trio.lowlevel.wait_readable(moves.fileno())
                        if self._abandoned:
                            await trio.sleep_forever()
                        self._look(moves)
                finally:
                    if self._listener is not None:
                        self._closer.discard_listener(self._listener)
                    for client in list(self.clients.values()):
                        self._drop(client)
                    self._heard = self._moves = self._listener = None
                    self._timers.run_all()  # claims look again
        except Exception:
            # A defect; the connections of this listener are TCP from now on.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self.close()
            self._closer.join()

    def _look(self, moves: select.epoll) -> None:
        """Attend to whoever came or went, and to what is due."""
        waiting = False
        for number, events in moves.poll(0, _EVENTS_AT_ONCE):
            listener = self._listener
            if listener is not None and number == listener.fileno():
                waiting = True
            elif (client := self.clients.get(number)) is not None:
                self.hear_all(client)
                if events & ~select.EPOLLIN:
                    self._drop(client)
            elif (client := self._probes.get(number)) is not None and client.probe is not None:
                try:
                    client.probe.answer()
                except OSError:
                    self._drop(client)
        if waiting and self._listener is not None:
            # Last: a new client may have the number of one that is dropped for it, and the events
            # above are those of the dropped one.
            error = self._accept(self._listener)
            if error in LACK_ERRORS and error != errno.EAGAIN:
                moves.modify(self._listener, 0)
                self._timers.call_later(_EXHAUSTED_INTERVAL, self._accept_again)
        self._timers.run_due()

    def _accept_again(self) -> None:
        if self._moves is not None and self._listener is not None:
            self._moves.modify(self._listener, select.EPOLLIN)

    def _keep_name(self) -> None:
        """Listen anew when somebody has removed the socket's name, as cleaners of /tmp do."""
        made, heard, moves = self._made, self._heard, self._moves
        if made is None or heard is None or moves is None or self._abandoned:
            return
        self._timers.call_later(_NAME_INTERVAL, self._keep_name)
        if made.is_there():
            return
        try:
            renewed = made.renewed()
        except DirectoryUnusable as error:
            _log.info("same-host discovery cannot listen again: %s", error)
            return
        try:
            heard.register(renewed.listener, select.EPOLLIN)
            moves.register(renewed.listener, select.EPOLLIN)
        except OSError as error:  # there are too many epoll watches; again at the next look
            _log.info("same-host discovery cannot listen again: %s", error)
            with contextlib.suppress(OSError):
                heard.unregister(renewed.listener)
            renewed.listener.close()
            renewed.remove()
            return
        for each in (heard, moves):
            each.unregister(made.listener)
        self._closer.discard_listener(made.listener)
        made.remove()
        self._made, self._listener = renewed, renewed.listener

    def _waited_enough(self, client: Client) -> None:
        """Who comes and announces nothing has to go."""
        self.hear_all(client)
        if client in self._silent:
            self._drop(client)

    def _heard_of(self, client: Client) -> None:
        """It has announced something, or is gone; it wants no proof any more."""
        timer = self._silent.pop(client, None)
        if timer is not None:
            timer.cancel()
        probe, client.probe = client.probe, None
        if probe is not None:
            del self._probes[probe.listener.fileno()]
            if self._moves is not None:
                self._moves.unregister(probe.listener)
            probe.listener.close()

    def _accept(self, listener: socket.socket) -> int:
        """Let clients in; the error number that ended it, EAGAIN for no more; 0: all it may."""
        heard, moves = self._heard, self._moves
        if heard is None or moves is None:
            return errno.EBADF
        for _ in range(_ACCEPTS_AT_ONCE):
            if self._closer.is_full:
                return errno.ENOBUFS
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if is_lack(error) and not isinstance(error, BlockingIOError):
                    _log.warning("same-host discovery cannot accept: %s", error)
                return error.errno or errno.EBADF
            connection.setblocking(False)
            client = Client(connection)
            if not self._has_place(client) or not _watch(connection, heard, moves):
                self._turn_away(client)
                continue
            self._shares.add(client.user, client)
            timer = self._timers.call_later(_ANNOUNCE_TIMEOUT, partial(self._waited_enough, client))
            self._silent[client] = timer
            self.clients[connection.fileno()] = client
            self.hear_all(client)
        return 0

    def _has_place(self, client: Client) -> bool:
        """True if another client may be let in; the user with most clients may lose one to it."""
        if len(self.clients) < self.most_clients:
            return True
        # The client of a claim may still withdraw, for which it needs its Unix connection.
        kept = {claim.announced.client for claim in self.claims.taken.values()}
        loser = self._shares.oldest_of_largest(client.user, kept)
        if loser is None or not is_admitted(client.connection, self._group):
            return False
        loser.tell(messages.refused(FallbackReason.HANDSHAKE_LIMIT))
        self._drop(loser)
        return True

    def hear_some(self, heard: defaultdict[Client | None, int]) -> int:
        """Take one packet of each client that has sent some; how many, and clients let in.

        heard: to be counted up for each; None stands for who waits to be let in.
        """
        if self._heard is None:
            return 0
        came = 0
        for number, _ in self._heard.poll(0, _EVENTS_AT_ONCE):
            client = self.clients.get(number)
            if client is not None:
                came += self._take(client)
                heard[client] += 1
                if heard[client] > _MOST_QUEUED:
                    self._drop(client)
            elif self._listener is not None and heard[None] <= BACKLOG:
                # Beyond that, who waits to be let in has come after the search began.
                came += 1
                # Without descriptors it goes on being ready.
                exhausted = self._accept(self._listener) not in (0, errno.EAGAIN)
                heard[None] += BACKLOG + 1 if exhausted else _ACCEPTS_AT_ONCE
        return came

    def hear_all(self, client: Client) -> bool:
        """Take all that a client has said; it is dropped when it went or broke the messages.

        False: it goes on saying things, more than its queue can have held, and is dropped.
        """
        for _ in range(_MOST_QUEUED):
            if client.connection.fileno() < 0 or not self._take(client):
                return True
        self._drop(client)
        return False

    def _take(self, client: Client) -> bool:
        """Take one packet; False: there is none."""
        try:
            message = take(client.connection)
        except BlockingIOError:
            return False
        if message is None:
            self._drop(client)
        elif client in self._silent and not is_admitted(client.connection, self._group):
            client.tell(messages.refused(FallbackReason.OTHER_USER))
            self._drop(client)
        elif message.kind is Kind.PROVE and client in self._silent and client.probe is None:
            self._prove(client, message.connection)
        elif message.kind is Kind.ANNOUNCE:
            if client in self._silent and self._moves is not None:
                self._moves.modify(client.connection, select.EPOLLRDHUP)
            self._heard_of(client)
            self.claims.add(Announced(client, message.connection, message.number, message.required))
        elif message.kind is Kind.WITHDRAW:
            self.claims.withdrawn(client, message.connection)
        else:
            if message.kind is None:
                client.tell(messages.refused(FallbackReason.LOCAL_VERSION_MISMATCH))
            self._drop(client)
        return True

    def _prove(self, client: Client, connection: bytes) -> None:
        """Listen where the client of another network namespace is going to connect to."""
        made, moves = self._made, self._moves
        try:
            if made is None or moves is None or not made.may_prove():
                raise OSError(errno.EPERM, "a default directory, or not the listener's network")
            if self.address[0] not in (*_ANY, messages.parties(connection)[1]):
                raise OSError(errno.EADDRNOTAVAIL, "this listener has another address")
            if len(self._probes) >= _MAX_PROBES:
                raise OSError(errno.EMFILE, "many ask for a proof")
            client.probe = Probe(connection)
            moves.register(client.probe.listener, select.EPOLLIN)
        except OSError as error:
            if client.probe is not None:
                client.probe.listener.close()
                client.probe = None
            _log.debug("same-host discovery: no proof of an address: %s", error)
            client.tell(messages.refused(FallbackReason.PATH_NOT_PROVEN, connection))
            return
        number = client.probe.listener.fileno()
        self._probes[number] = client
        client.tell(client.probe.said)

    def _drop(self, client: Client) -> None:
        """Its Unix connection ends, and with it what it announced; claims know already."""
        number = client.connection.fileno()
        if self.clients.pop(number, None) is None:
            return
        self._shares.remove(client.user, client)
        for each in (self._heard, self._moves):
            if each is not None:
                each.unregister(number)
        self.claims.lost(client)
        self._heard_of(client)
        self._closer.discard(client.connection)

    def _turn_away(self, client: Client) -> None:
        # Unread data would turn our answer into a reset.
        with contextlib.suppress(BlockingIOError):
            take(client.connection)
        client.tell(messages.refused(FallbackReason.HANDSHAKE_LIMIT))
        self._closer.discard(client.connection)


def _most_clients() -> int:
    """How many Unix connections one listener may have: clients must not use up the descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CLIENTS
    return min(_MAX_CLIENTS, max(limit // _DESCRIPTOR_SHARE, 1))


def _watch(connection: socket.socket, heard: select.epoll, moves: select.epoll) -> bool:
    """Have both report a client; False: there are too many epoll watches."""
    try:
        heard.register(connection, select.EPOLLIN)
        # Until it has announced something it may want to have an answer.
        moves.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
    except OSError as error:
        _log.warning("same-host discovery refuses a client: %s", error)
        with contextlib.suppress(OSError):
            heard.unregister(connection)
        return False
    return True
