"""The server's half of same-host discovery; `trio_smc.rendezvous.discovery` explains it."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import _local_protocol as protocol
from trio_smc.rendezvous._local_connection import is_same_user, receive, send, take
from trio_smc.rendezvous._local_directory import NewSocket
from trio_smc.rendezvous._local_protocol import Kind

__all__ = ["Claim", "Publication"]

_log = logging.getLogger(__name__)

_MAX_PENDING = 4096  # Unix connections per publication, each of them a descriptor
_ACCEPTS_AT_ONCE = 64  # before other tasks have their turn
_ANNOUNCE_TIMEOUT = 2.0  # from a Unix connection to its announcement, seconds
_PENDING_TIMEOUT = 60.0  # from an announcement to the accepted TCP connection, seconds
_EXHAUSTED_INTERVAL = 0.1  # after an accept that found no descriptors or memory, seconds
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Pending:
    """An announced TCP connection and the Unix connection to its client."""

    __slots__ = ("accepted", "connection", "go", "settled")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.accepted = False  # ACCEPTED was sent, so that a GO counts
        self.go = False
        self.settled = trio.Event()

    def settle(self) -> None:
        """Decide, once and for both sides, whether the client has said GO."""
        if self.settled.is_set():
            return
        # After this the client's GO fails; what it sent before is still there to be read.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        with contextlib.suppress(BlockingIOError):
            message = take(self.connection)
            self.go = self.accepted and message is not None and message.kind is Kind.GO
        self.settled.set()


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
        pending.accepted = send(pending.connection, protocol.ACCEPTED)
        try:
            with trio.move_on_at(deadline):
                await pending.settled.wait()
        finally:
            pending.settle()
        return pending.go

    def refuse(self, reason: FallbackReason) -> None:
        """Tell the client at once that its connection is plain TCP, and why."""
        if not self._pending.settled.is_set():
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
        self._pending: dict[bytes, _Pending] = {}
        self._connections = 0

    def claim(self, local: tuple[str, int], remote: tuple[str, int]) -> Claim | None:
        """Look an accepted TCP connection up; None when its client did not announce itself.

        local, remote: its two addresses, text and port.

        Never waits: who announces does so before it connects.  Every claim is to be confirmed
        or refused, or the client waits in vain.
        """
        pending = self._pending.pop(protocol.four_tuple(remote, local), None)
        return None if pending is None else Claim(pending)

    def close(self) -> None:
        """Take the listener's name away and drop all pending announcements; idempotent."""
        made, self._made = self._made, None
        if made is not None:
            made.remove()
            self._scope.cancel()

    def start(self, nursery: trio.Nursery) -> None:
        """Accept announcements in a background task of `nursery`, until `close`."""
        made = self._made
        if made is None:
            return
        try:
            nursery.start_soon(self._run, made.listener, name="trio_smc same-host discovery")
        except BaseException:
            self.close()
            made.listener.close()
            raise

    async def _run(self, listener: socket.socket) -> None:
        try:
            with listener, self._scope:
                async with trio.open_nursery() as nursery:
                    await self._accept(listener, nursery)
        except Exception:
            # A defect; the connections of this listener are TCP from now on.
            _log.exception("same-host discovery ends for one listener")
        finally:
            self.close()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(_ACCEPTS_AT_ONCE):
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in _EXHAUSTED:
                        _log.warning("same-host discovery cannot accept: %s", error)
                        await trio.sleep(_EXHAUSTED_INTERVAL)
                    break
                connection.setblocking(False)
                if self._connections >= _MAX_PENDING:
                    _turn_away(connection)
                    continue
                self._connections += 1
                nursery.start_soon(self._attend, connection)

    async def _attend(self, connection: socket.socket) -> None:
        """Serve one client until its connection is settled or it goes away."""
        try:
            with connection:
                tcp_connection = await self._hear(connection)
                if tcp_connection is not None:
                    await self._hold(connection, tcp_connection)
        finally:
            self._connections -= 1

    async def _hear(self, connection: socket.socket) -> bytes | None:
        """The four-tuple that the client announces; None when it is not listened to."""
        message = None
        with trio.move_on_after(_ANNOUNCE_TIMEOUT):
            message = await receive(connection)
        if message is None:
            return None
        if not is_same_user(connection):
            send(connection, protocol.refused(FallbackReason.OTHER_USER))
        elif message.kind is None:
            send(connection, protocol.refused(FallbackReason.LOCAL_VERSION_MISMATCH))
        elif message.kind is Kind.ANNOUNCE:
            return message.connection
        return None

    async def _hold(self, connection: socket.socket, tcp_connection: bytes) -> None:
        """Keep an announcement until a claim settles it, its client goes, or it is too old."""
        older = self._pending.get(tcp_connection)
        if older is not None:
            # The new client is bound to the port, so the old one no longer is.
            older.settle()
        pending = self._pending[tcp_connection] = _Pending(connection)
        try:
            if send(connection, protocol.HEARD):
                with trio.move_on_after(_PENDING_TIMEOUT):
                    # GO, the end, or a broken rule: each of them settles.
                    await trio.lowlevel.wait_readable(connection)
        finally:
            if self._pending.get(tcp_connection) is pending:
                del self._pending[tcp_connection]
            pending.settle()


def _turn_away(connection: socket.socket) -> None:
    with connection:
        # Unread data would turn our answer into a reset.
        with contextlib.suppress(BlockingIOError):
            take(connection)
        send(connection, protocol.refused(FallbackReason.HANDSHAKE_LIMIT))
