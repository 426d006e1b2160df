"""Hearing which TCP connections were announced to a listener: the server's half of discovery.

What is said, and why both sides come to one answer, `trio_smc.rendezvous.discovery.same_host`
tells.

Theory of operation: clients keep their Unix connections, and what they say waits there until it
is needed.  A client has announced a TCP connection before the kernel hears of it, so whoever looks
for an announcement takes what waits first, and finds it or knows that there is none.  Nothing is
woken by an announcement: the one task of a publication sleeps until a client comes or goes, and
wakes claims that wait for long, to look again; a cancel scope for each of them would cost a
short-lived connection as much as two system calls.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
from functools import partial

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timer, Timers
from trio_smc.host.private_directory import is_admitted
from trio_smc.rendezvous.discovery import messages
from trio_smc.rendezvous.discovery.directory import NewSocket
from trio_smc.rendezvous.discovery.messages import Kind, take
from trio_smc.rnic.spinner import NEVER, Spinner

__all__ = [
    "Claim",
    "Claims",
    "Client",
    "Publication",
]


_log = logging.getLogger(__name__)

_MAX_CLIENTS = 1024  # Unix connections per publication, each of them a descriptor
_ACCEPTS_AT_ONCE = 64  # before other tasks have their turn
_EVENTS_AT_ONCE = 64
_LOOK_INTERVAL = 0.05  # how often a claim that waits looks whether its client withdrew, seconds
_EXHAUSTED_INTERVAL = 0.1  # after an accept that found no descriptors or memory, seconds
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_MAX_PENDING = 4096  # announcements per publication
_ANNOUNCE_TIMEOUT = 2.0  # from a Unix connection to its first announcement, seconds
_PENDING_TIMEOUT = 60.0  # from an announcement to the accepted TCP connection, seconds


class Client:
    """A client's Unix connection."""

    __slots__ = ("connection", "pending")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pending: set[bytes] = set()  # what it announced, and nobody claimed

    def tell(self, message: bytes) -> bool:
        """Send a packet without waiting; False when it is gone or takes nothing more."""
        try:
            self.connection.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True


class Claim:
    """An accepted TCP connection whose client announced it: to be confirmed or refused."""

    __slots__ = ("_client", "_key", "_publication", "_settled", "_told", "withdrawn")

    def __init__(self, publication: Publication, client: Client, key: bytes) -> None:
        self._publication = publication
        self._client = client
        self._key = key
        self._settled = False
        self._told = False
        self.withdrawn = False

    def accept(self) -> None:
        """Tell the client at once that its connection was accepted; `confirm` is to follow."""
        self._told = not self._is_over() and self._client.tell(messages.accepted(self._key))

    async def confirm(self, connection: trio.socket.SocketType, deadline: float) -> bool:
        """Tell the client that its connection was accepted; whether it goes on with SMC-R.

        connection: the accepted TCP connection, which nobody has read from.
        deadline: when to stop waiting for the client, as `trio.current_time`.

        True: the client's next bytes on the TCP connection are CLC, and they are there.  False:
        the connection is plain TCP, and the client knows.

        Raises OSError (ETIMEDOUT) when the client decided nothing in time.  Then, and when this
        is cancelled, nobody knows here what the client is going to say: close the TCP connection.
        """
        publication, client = self._publication, self._client
        try:
            if not self._told:
                self.accept()
            if self._is_over() or not self._told:
                return False
            while not await publication.wait(connection):
                publication.hear_all(client)
                if self._is_over():
                    return False
                if trio.current_time() >= deadline:
                    raise OSError(errno.ETIMEDOUT, "the client announced SMC-R and says nothing")
            # Before a client sends anything else than CLC it withdraws.
            publication.hear_all(client)
            return not self._is_over()
        finally:
            self._settle()

    def refuse(self, reason: FallbackReason) -> None:
        """Tell the client at once that its connection is plain TCP, and why."""
        if not self._settled:
            self._client.tell(messages.refused(reason, self._key))
            self._settle()

    def _is_over(self) -> bool:
        return self._settled or self.withdrawn

    def _settle(self) -> None:
        self._settled = True
        self._publication.claims.forget(self._key, self)


class Claims:
    """The announced connections of one listening socket.

    Attributes:
      pending: those that wait to be claimed, by four-tuple, with the time when to forget them, as
        `trio.current_time`; oldest first.
      taken: the claims that are not settled.
    """

    def __init__(self) -> None:
        self.pending: dict[bytes, tuple[Client, float]] = {}
        self.taken: dict[bytes, Claim] = {}

    def announced(self, client: Client, key: bytes) -> None:
        """It waits to be claimed, or the client is told that too many wait."""
        now = trio.current_time()
        while self.pending:
            oldest = next(iter(self.pending))
            other, until = self.pending[oldest]
            if until > now:
                break
            self.withdrawn(other, oldest)
        older = self.pending.pop(key, None)
        if older is not None:
            # The new client is bound to the port, so the old one no longer is.
            older[0].pending.discard(key)
        if len(self.pending) >= _MAX_PENDING:
            client.tell(messages.refused(FallbackReason.HANDSHAKE_LIMIT, key))
            return
        self.pending[key] = client, now + _PENDING_TIMEOUT
        client.pending.add(key)

    def withdrawn(self, client: Client, key: bytes) -> None:
        """It is plain TCP, or will never be opened; a claim is told."""
        claim = self.taken.get(key)
        if claim is not None and claim._client is client:
            claim.withdrawn = True
        if key in client.pending:
            client.pending.discard(key)
            del self.pending[key]

    def forget(self, key: bytes, claim: Claim) -> None:
        """A claim is settled."""
        if self.taken.get(key) is claim:
            del self.taken[key]

    def lost(self, client: Client) -> None:
        """Nothing it has announced can be claimed any more; claims know already."""
        for key in client.pending:
            del self.pending[key]
        client.pending.clear()


class Publication:
    """One listening TCP socket that clients on this host can announce connections to.

    Attributes:
      address: the address and port listened on.
      unavailable: why nothing is published, or None.
      claims: what clients have announced to it.
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
        self._made = made
        self._group = made.group if made is not None else None
        self.unavailable = unavailable
        self._scope = trio.CancelScope()
        self._clients: dict[int, Client] = {}  # by descriptor
        self._silent: dict[Client, Timer] = {}  # nothing announced yet, and not for ever
        self.claims = Claims()
        self._timers = Timers(trio.current_time, self._timer_is_earlier)
        self._listener: socket.socket | None = None
        # Who says something; and who comes or goes, which is what the task sleeps for.
        self._heard: select.epoll | None = None
        self._moves: select.epoll | None = None
        self._nap = trio.CancelScope()  # around the task's sleep

    def claim(self, local: tuple[str, int], remote: tuple[str, int]) -> Claim | None:
        """Look an accepted TCP connection up; None when its client did not announce itself.

        local, remote: its two addresses, text and port.

        Never waits: who announces does so before it connects.  Every claim is to be confirmed
        or refused, or the client waits in vain.
        """
        if self._heard is None:
            return None
        key = messages.four_tuple(remote, local)
        pending = self.claims.pending
        found = pending.pop(key, None)
        while found is None and self._hear():
            found = pending.pop(key, None)
        if found is None:
            return None
        client = found[0]
        client.pending.discard(key)
        claim = self.claims.taken[key] = Claim(self, client, key)
        return claim

    async def wait(self, connection: trio.socket.SocketType) -> bool:
        """Wait for bytes on an accepted TCP connection; False: it is time to look again."""
        number = connection.fileno()
        if number < 0:
            raise trio.ClosedResourceError("given up while this task was to go on")
        self.spinner.sleeping += 1
        timer: Timer | None = None
        try:
            if self._moves is None:  # closed meanwhile
                with trio.move_on_after(_LOOK_INTERVAL):
                    await trio.lowlevel.wait_readable(number)
                    return True
                return False
            look_again = partial(trio.lowlevel.notify_closing, number)
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
        if made is not None:
            made.remove()
            self._scope.cancel()

    def abandon(self) -> None:
        """Let go of the descriptors: this process is a forked child, they are its parent's."""
        for client in self._clients.values():
            client.connection.close()
        for each in (self._listener, self._heard, self._moves):
            if each is not None:
                each.close()

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
            nursery.start_soon(self._run, made.listener, heard, moves, name=name)
            self._listener, self._heard, self._moves = made.listener, heard, moves
            undo.pop_all()

    async def _run(self, listener: socket.socket, heard: select.epoll, moves: select.epoll) -> None:
        try:
            with listener, heard, moves, self._scope:
                try:
                    while True:
                        with trio.move_on_at(self._timers.next_deadline()) as self._nap:
                            await trio.lowlevel.wait_readable(moves.fileno())
                        self._look(listener, moves)
                finally:
                    for client in list(self._clients.values()):
                        self._drop(client)
                    self._heard = self._moves = self._listener = None
                    self._timers.run_all()  # claims look again
        except Exception:
            # A defect; the connections of this listener are TCP from now on.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self.close()

    def _look(self, listener: socket.socket, moves: select.epoll) -> None:
        """Attend to whoever came or went, and to what is due."""
        for number, _ in moves.poll(0, _EVENTS_AT_ONCE):
            if number == listener.fileno():
                if self._accept(listener) in _EXHAUSTED:
                    moves.modify(listener, 0)
                    again = partial(moves.modify, listener, select.EPOLLIN)
                    self._timers.call_later(_EXHAUSTED_INTERVAL, again)
            elif (client := self._clients.get(number)) is not None:
                self.hear_all(client)
                self._drop(client)
        self._timers.run_due()

    def _waited_enough(self, client: Client) -> None:
        """Who comes and announces nothing has to go."""
        self.hear_all(client)
        if client in self._silent:
            self._drop(client)

    def _heard_of(self, client: Client) -> None:
        """It has announced something, or is gone."""
        timer = self._silent.pop(client, None)
        if timer is not None:
            timer.cancel()

    def _accept(self, listener: socket.socket) -> int:
        """Let clients in; the error number that ended it, EAGAIN for no more; 0: all it may."""
        heard, moves = self._heard, self._moves
        if heard is None or moves is None:
            return errno.EBADF
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("same-host discovery cannot accept: %s", error)
                return error.errno or errno.EBADF
            connection.setblocking(False)
            client = Client(connection)
            if len(self._clients) >= _MAX_CLIENTS:
                _turn_away(client)
                continue
            timer = self._timers.call_later(_ANNOUNCE_TIMEOUT, partial(self._waited_enough, client))
            self._silent[client] = timer
            self._clients[connection.fileno()] = client
            heard.register(connection, select.EPOLLIN)
            moves.register(connection, select.EPOLLRDHUP)
            self.hear_all(client)
        return 0

    def _hear(self) -> bool:
        """Take one packet of each client that has sent some; False: nobody has."""
        heard = self._heard
        if heard is None:
            return False
        came = False
        for number, _ in heard.poll(0, _EVENTS_AT_ONCE):
            client = self._clients.get(number)
            if client is not None:
                came = self._take(client) or came
            elif self._listener is not None and number == self._listener.fileno():
                # Without descriptors it goes on being ready.
                came = self._accept(self._listener) in (0, errno.EAGAIN) or came
        return came

    def hear_all(self, client: Client) -> None:
        """Take all that a client has said; it is dropped when it went or broke the messages."""
        while client.connection.fileno() >= 0 and self._take(client):
            pass

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
        elif message.kind is Kind.ANNOUNCE:
            self._heard_of(client)
            self.claims.announced(client, message.connection)
        elif message.kind is Kind.WITHDRAW:
            self.claims.withdrawn(client, message.connection)
        else:
            if message.kind is None:
                client.tell(messages.refused(FallbackReason.LOCAL_VERSION_MISMATCH))
            self._drop(client)
        return True

    def _drop(self, client: Client) -> None:
        """Its Unix connection ends, and with it what it announced; claims know already."""
        number = client.connection.fileno()
        if self._clients.pop(number, None) is None:
            return
        for each in (self._heard, self._moves):
            if each is not None:
                each.unregister(number)
        self.claims.lost(client)
        self._heard_of(client)
        client.connection.close()


def _turn_away(client: Client) -> None:
    with client.connection as connection:
        # Unread data would turn our answer into a reset.
        with contextlib.suppress(BlockingIOError):
            take(connection)
        client.tell(messages.refused(FallbackReason.HANDSHAKE_LIMIT))
