"""The server's half of same-host discovery; `trio_smc.rendezvous.discovery` explains it.

Theory of operation: one task of a publication sleeps on an epoll of its own, for the Unix listener
and all Unix connections of clients, and answers at once: an announcement costs no task and no pass
of the scheduler beyond the one that brought it.  When an accepted TCP connection is claimed, its
Unix connection leaves that epoll and belongs to the claim, whose task waits for GO itself.
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
from trio_smc.rendezvous._local_connection import is_same_user, send, take
from trio_smc.rendezvous._local_directory import NewSocket
from trio_smc.rendezvous._local_protocol import Kind

__all__ = ["Claim", "Publication"]

_log = logging.getLogger(__name__)

_MAX_PENDING = 4096  # Unix connections per publication, each of them a descriptor
_ACCEPTS_AT_ONCE = 64  # before other tasks have their turn
_EVENTS_AT_ONCE = 64
_ANNOUNCE_TIMEOUT = 2.0  # from a Unix connection to its announcement, seconds
_PENDING_TIMEOUT = 60.0  # from an announcement to the accepted TCP connection, seconds
_EXHAUSTED_INTERVAL = 0.1  # after an accept that found no descriptors or memory, seconds
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Pending:
    """A client's Unix connection, and the TCP connection that it announced, if it has yet."""

    __slots__ = ("_publication", "accepted", "connection", "deadline", "go", "key", "settled")

    def __init__(self, publication: Publication, connection: socket.socket) -> None:
        self._publication = publication
        self.connection = connection
        self.key = b""
        self.deadline = trio.current_time() + _ANNOUNCE_TIMEOUT
        self.accepted = False  # ACCEPTED was sent, so that a GO counts
        self.go = False
        self.settled = False

    def settle(self) -> None:
        """Decide, once and for both sides, whether the client has said GO; close."""
        if self.settled:
            return
        self.settled = True
        if self.key:
            # After this the client's GO fails; what it sent before is still there to be read.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)
            with contextlib.suppress(BlockingIOError):
                message = take(self.connection)
                self.go = self.accepted and message is not None and message.kind is Kind.GO
        self.connection.close()
        self._publication.forget(self)

    def spoke_early(self) -> bool:
        """Whether anything came, or the client went, before it was told ACCEPTED: no GO then."""
        try:
            take(self.connection)
        except BlockingIOError:
            return False
        self.settle()
        return True


class Claim:
    """An accepted TCP connection whose client announced itself: to be confirmed or refused."""

    __slots__ = ("_pending",)

    def __init__(self, pending: _Pending) -> None:
        self._pending = pending

    async def confirm(self, deadline: float) -> bool:
        """Tell the client that its connection was accepted; whether it goes on with SMC-R.

        deadline: when to stop waiting for the client, as `trio.current_time`.

        True: the client's next bytes on the TCP connection are CLC.  False: the connection is
        plain TCP, and the client knows.  When this is cancelled nobody knows here what the
        client was told: close the TCP connection.
        """
        pending = self._pending
        if pending.settled or pending.spoke_early():
            return False
        pending.accepted = send(pending.connection, protocol.ACCEPTED)
        try:
            # GO, the end, or a broken rule: each of them settles.
            with trio.move_on_at(deadline), contextlib.suppress(trio.ClosedResourceError):
                await trio.lowlevel.wait_readable(pending.connection)
        finally:
            pending.settle()
        return pending.go

    def refuse(self, reason: FallbackReason) -> None:
        """Tell the client at once that its connection is plain TCP, and why."""
        if not self._pending.settled:
            send(self._pending.connection, protocol.refused(reason))
            self._pending.settle()


class Publication:
    """One listening TCP socket that clients on this host can announce connections to.

    Attributes:
      address: the address and port listened on.
      unavailable: why nothing is published, or None.
    """

    def __init__(
        self,
        address: tuple[str, int],
        made: NewSocket | None,
        unavailable: FallbackReason | None,
    ) -> None:
        self.address = address
        self._made = made
        self.unavailable = unavailable
        self._scope = trio.CancelScope()
        self._pending: dict[bytes, _Pending] = {}  # announced, by four-tuple; oldest first
        self._silent: dict[_Pending, None] = {}  # not announced yet; oldest first
        self._watched: dict[int, _Pending] = {}  # both, by descriptor
        self._claimed: set[_Pending] = set()
        self._watch: select.epoll | None = None
        self._accepts_again = math.inf

    @property
    def _connections(self) -> int:
        return len(self._pending) + len(self._silent) + len(self._claimed)

    def claim(self, local: tuple[str, int], remote: tuple[str, int]) -> Claim | None:
        """Look an accepted TCP connection up; None when its client did not announce itself.

        local, remote: its two addresses, text and port.

        Never waits: who announces does so before it connects.  Every claim is to be confirmed
        or refused, or the client waits in vain.
        """
        pending = self._pending.pop(protocol.four_tuple(remote, local), None)
        if pending is None:
            return None
        self._unwatch(pending)
        self._claimed.add(pending)
        return Claim(pending)

    def forget(self, pending: _Pending) -> None:
        """It is settled; its connection is closed."""
        self._claimed.discard(pending)
        if self._pending.get(pending.key) is pending:
            del self._pending[pending.key]

    def close(self) -> None:
        """Take the listener's name away and drop all pending announcements; idempotent."""
        made, self._made = self._made, None
        if made is not None:
            made.remove()
            self._scope.cancel()

    def start(self, nursery: trio.Nursery) -> None:
        """Accept announcements in a background task of `nursery`, until `close`.

        Raises OSError when descriptors have run out; it is closed then.
        """
        made = self._made
        if made is None:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(made.listener.close)
            undo.callback(self.close)
            # Here and not in the task, which nobody could tell that there are no descriptors.
            watch = undo.enter_context(select.epoll())
            name = "trio_smc same-host discovery"
            nursery.start_soon(self._run, made.listener, watch, name=name)
            undo.pop_all()

    async def _run(self, listener: socket.socket, watch: select.epoll) -> None:
        try:
            with listener, self._scope, watch as self._watch:
                self._watch.register(listener, select.EPOLLIN)
                while True:
                    due = self._next_deadline()
                    if due == math.inf:  # no scope for the usual case
                        await trio.lowlevel.wait_readable(self._watch.fileno())
                    else:
                        with trio.move_on_at(due):
                            await trio.lowlevel.wait_readable(self._watch.fileno())
                    self._look(listener)
        except Exception:
            # A defect; the connections of this listener are TCP from now on.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self._watch = None
            for each in self._claimed:
                trio.lowlevel.notify_closing(each.connection)
            for each in (*self._watched.values(), *self._claimed):
                each.settle()
            self._silent.clear()
            self._watched.clear()
            self.close()

    def _next_deadline(self) -> float:
        """When something is due that nobody reports."""
        due = self._accepts_again
        for each in (self._silent, self._pending.values()):
            for oldest in each:
                due = min(due, oldest.deadline)
                break
        return due

    def _look(self, listener: socket.socket) -> None:
        """Attend to whoever said something, and to what is due."""
        watch = self._watch
        assert watch is not None
        for number, _ in watch.poll(0, _EVENTS_AT_ONCE):
            if number == listener.fileno():
                self._accept(listener, watch)
            elif (pending := self._watched.get(number)) is None:
                continue  # dropped by what was looked at before it
            elif pending.key:
                self._drop(pending)
            else:
                self._hear(pending)
        now = trio.current_time()
        if now >= self._accepts_again:
            self._accepts_again = math.inf
            watch.modify(listener, select.EPOLLIN)
        while self._silent and (oldest := next(iter(self._silent))).deadline <= now:
            self._drop(oldest)
        while self._pending and (oldest := next(iter(self._pending.values()))).deadline <= now:
            self._drop(oldest)

    def _accept(self, listener: socket.socket, watch: select.epoll) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("same-host discovery cannot accept: %s", error)
                    self._accepts_again = trio.current_time() + _EXHAUSTED_INTERVAL
                    watch.modify(listener, 0)
                return
            connection.setblocking(False)
            if self._connections >= _MAX_PENDING:
                _turn_away(connection)
                continue
            pending = _Pending(self, connection)
            self._silent[pending] = None
            self._watched[connection.fileno()] = pending
            watch.register(connection, select.EPOLLIN)
            self._hear(pending)

    def _hear(self, pending: _Pending) -> None:
        """Take an announcement, if it has come: its client connects TCP once it reads HEARD."""
        connection = pending.connection
        try:
            message = take(connection)
        except BlockingIOError:
            return
        if message is not None and not is_same_user(connection):
            send(connection, protocol.refused(FallbackReason.OTHER_USER))
        elif message is not None and message.kind is None:
            send(connection, protocol.refused(FallbackReason.LOCAL_VERSION_MISMATCH))
        elif message is not None and message.kind is Kind.ANNOUNCE:
            older = self._pending.get(message.connection)
            if older is not None:
                # The new client is bound to the port, so the old one no longer is.
                self._drop(older)
            del self._silent[pending]
            pending.key = message.connection
            pending.deadline = trio.current_time() + _PENDING_TIMEOUT
            self._pending[pending.key] = pending
            if send(connection, protocol.HEARD):
                return
        self._drop(pending)

    def _drop(self, pending: _Pending) -> None:
        """It is over before any TCP connection claimed it."""
        self._unwatch(pending)
        self._silent.pop(pending, None)
        pending.settle()

    def _unwatch(self, pending: _Pending) -> None:
        if self._watch is not None:
            self._watch.unregister(pending.connection)
            del self._watched[pending.connection.fileno()]


def _turn_away(connection: socket.socket) -> None:
    with connection:
        # Unread data would turn our answer into a reset.
        with contextlib.suppress(BlockingIOError):
            take(connection)
        send(connection, protocol.refused(FallbackReason.HANDSHAKE_LIMIT))
