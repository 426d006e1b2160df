"""The server's half of same-host discovery; `trio_smc.rendezvous.discovery` explains it.

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
import math
import select
import socket

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_protocol as protocol
from trio_smc.rendezvous._claims import Claim, Claims, Client
from trio_smc.rendezvous._local_connection import is_same_user, take
from trio_smc.rendezvous._local_directory import NewSocket
from trio_smc.rendezvous._local_protocol import Kind
from trio_smc.rendezvous.spinning import NEVER, Spinner

__all__ = ["Publication"]

_log = logging.getLogger(__name__)

_MAX_CLIENTS = 1024  # Unix connections per publication, each of them a descriptor
_ACCEPTS_AT_ONCE = 64  # before other tasks have their turn
_EVENTS_AT_ONCE = 64
_LOOK_INTERVAL = 0.05  # how often a claim that waits looks whether its client withdrew, seconds
_EXHAUSTED_INTERVAL = 0.1  # after an accept that found no descriptors or memory, seconds
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        self.unavailable = unavailable
        self._scope = trio.CancelScope()
        self._clients: dict[int, Client] = {}  # by descriptor
        self._silent: dict[Client, None] = {}  # nothing announced yet; oldest first
        self.claims = Claims()
        # When to look again, by descriptor of a TCP connection that is waited for; oldest first.
        self._looks: dict[int, float] = {}
        self._listener: socket.socket | None = None
        # Who says something; and who comes or goes, which is what the task sleeps for.
        self._heard: select.epoll | None = None
        self._moves: select.epoll | None = None
        self._accepts_again = math.inf
        self._nap = trio.CancelScope()  # around the task's sleep

    def claim(self, local: tuple[str, int], remote: tuple[str, int]) -> Claim | None:
        """Look an accepted TCP connection up; None when its client did not announce itself.

        local, remote: its two addresses, text and port.

        Never waits: who announces does so before it connects.  Every claim is to be confirmed
        or refused, or the client waits in vain.
        """
        if self._heard is None:
            return None
        key = protocol.four_tuple(remote, local)
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
        until = trio.current_time() + _LOOK_INTERVAL
        self.spinner.sleeping += 1
        try:
            if self._moves is None:  # closed meanwhile
                with trio.move_on_at(until):
                    await trio.lowlevel.wait_readable(number)
                    return True
                return False
            self._looks[number] = until
            if until < self._nap.deadline:
                self._nap.deadline = until
            await trio.lowlevel.wait_readable(number)
        except trio.ClosedResourceError:
            if connection.fileno() < 0:
                raise trio.ClosedResourceError("given up while this task waited") from None
            return False
        else:
            return True
        finally:
            self.spinner.sleeping -= 1
            if self._looks.get(number) == until:  # else another connection has that number now
                del self._looks[number]

    def _wake(self, now: float) -> None:
        """Let claims look again that wait since long ago."""
        for number, until in self._looks.items():
            if until > now:
                break
            trio.lowlevel.notify_closing(number)

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
                        with trio.move_on_at(self._next_deadline()) as self._nap:
                            await trio.lowlevel.wait_readable(moves.fileno())
                        self._look(listener, moves)
                finally:
                    for client in list(self._clients.values()):
                        self._drop(client)
                    self._heard = self._moves = self._listener = None
                    self._wake(math.inf)
        except Exception:
            # A defect; the connections of this listener are TCP from now on.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self.close()

    def _next_deadline(self) -> float:
        """When something is due that nobody reports."""
        due = self._accepts_again
        for oldest in self._silent:
            due = min(due, oldest.deadline)
            break
        for until in self._looks.values():
            return min(due, until)
        return due

    def _look(self, listener: socket.socket, moves: select.epoll) -> None:
        """Attend to whoever came or went, and to what is due."""
        for number, _ in moves.poll(0, _EVENTS_AT_ONCE):
            if number == listener.fileno():
                if self._accept(listener) in _EXHAUSTED:
                    self._accepts_again = trio.current_time() + _EXHAUSTED_INTERVAL
                    moves.modify(listener, 0)
            elif (client := self._clients.get(number)) is not None:
                self.hear_all(client)
                self._drop(client)
        now = trio.current_time()
        self._wake(now)
        if now >= self._accepts_again:
            self._accepts_again = math.inf
            moves.modify(listener, select.EPOLLIN)
        while self._silent and (oldest := next(iter(self._silent))).deadline <= now:
            self.hear_all(oldest)
            if oldest in self._silent:
                self._drop(oldest)

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
            self._silent[client] = None
            self._clients[connection.fileno()] = client
            heard.register(connection, select.EPOLLIN)
            moves.register(connection, select.EPOLLRDHUP)
            self.hear_all(client)
            if client in self._silent:
                self._nap.deadline = min(self._nap.deadline, client.deadline)
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
        """Take all that a client has said; it is dropped when it went or broke the protocol."""
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
        elif client in self._silent and not is_same_user(client.connection):
            client.tell(protocol.refused(FallbackReason.OTHER_USER))
            self._drop(client)
        elif message.kind is Kind.ANNOUNCE:
            self._silent.pop(client, None)
            self.claims.announced(client, message.connection)
        elif message.kind is Kind.WITHDRAW:
            self.claims.withdrawn(client, message.connection)
        else:
            if message.kind is None:
                client.tell(protocol.refused(FallbackReason.LOCAL_VERSION_MISMATCH))
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
        self._silent.pop(client, None)
        client.connection.close()


def _turn_away(client: Client) -> None:
    with client.connection as connection:
        # Unread data would turn our answer into a reset.
        with contextlib.suppress(BlockingIOError):
            take(connection)
        client.tell(protocol.refused(FallbackReason.HANDSHAKE_LIMIT))
