"""`Endpoint`: connects a connection core with its TCP connection and its link group."""

from __future__ import annotations

import contextlib
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from trio_smc.host.tcp import SocketIdentity, close_past_program, resets_on_close

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from trio_smc._base.observer import Observer
    from trio_smc._base.timers import Timer, Timers
    from trio_smc.datapath.connection import Connection
    from trio_smc.datapath.rmb import Rmbe
    from trio_smc.rendezvous.links.group import LinkGroup
    from trio_smc.rnic.pump import Pump
    from trio_smc.stack.tcp_watch import TcpWatch

__all__ = ["Endpoint", "EndpointOwner"]

_CLOSE_BY_FIN = struct.pack("ii", 0, 0)


class EndpointOwner(Protocol):
    """The stack, as seen by an endpoint."""

    observer: Observer | None
    timers: Timers
    tcp_watch: TcpWatch
    pump: Pump

    def connection_closed(self, endpoint: Endpoint) -> None:
        """The endpoint's connection is CLOSED and has freed everything."""

    def connection_moved(self) -> None:
        """An abandoned connection may have finished its work."""


class Endpoint:
    """The environment of one connection core (`trio_smc.datapath.connection.Host`).

    Exists from the allocation of an RMB element until the connection is CLOSED, which may be long
    after its stream was closed.
    """

    __slots__ = ("_identity", "_reset_waits", "_stack", "_timer", "abandoned", "close_socket",
                 "closed_by_user", "connection", "group", "lingers", "on_tcp_end", "reset", "rmbe",
                 "sock")  # fmt: skip

    connection: Connection

    def __init__(self, stack: EndpointOwner, group: LinkGroup, rmbe: Rmbe) -> None:
        self._stack = stack
        self._timer: Timer | None = None
        self.group: LinkGroup = group
        self.rmbe: Rmbe = rmbe
        self._identity: SocketIdentity | None = None
        self.sock: trio.socket.SocketType | None = None
        """The TCP connection while SMC-R owns it; otherwise None."""
        self.reset: bool = False
        """True if the TCP connection ends by RST, even before it is adopted."""
        self._reset_waits = False  # RST is due when the state is CLOSED
        self.closed_by_user: bool = False
        """True if the stream was closed, or shut down for both directions."""
        self.lingers: bool = True
        """True if SO_LINGER may be set."""
        self.on_tcp_end: Callable[[], None] | None = None
        """Called before TCP ends under a stream that the program has not closed."""
        self.close_socket: Callable[[bool], None] | None = None
        """Ends the TCP connection, by RST if its argument is True; None until there is a stream."""
        self.abandoned: bool = False
        """True if the program did not close the stream: it was collected, or the stack was left."""

    def adopt(self, sock: trio.socket.SocketType) -> None:
        """Own the TCP connection from now on, because the rendezvous is complete."""
        self.sock = sock
        try:  # noqa: SIM105 - each connection comes here, and this takes a third of the time
            self._identity = SocketIdentity(sock)
        except OSError:
            pass  # the program has closed the descriptor
        self._stack.tcp_watch.add(sock, self)
        if self.connection.receiver.peer_done and not self.show_end(self.connection):
            self.tcp_data()

    def announce_tcp_end(self) -> None:
        """Call `on_tcp_end`, because the caller closes the TCP connection now."""
        if self.on_tcp_end is not None and not self.closed_by_user:
            self.on_tcp_end()

    def forgotten(self) -> None:
        """Close a stream that the program has not closed, as close(2) closes a socket.

        Sent data still arrives, and the end after it. If data is unread, the connection is reset
        (4.8.1, 3A). With SO_LINGER of 0 s it is reset, too, even after a shutdown of both
        directions.
        """
        resets = self.sock is not None and resets_on_close(self.sock)
        if not self.closed_by_user:
            self.closed_by_user = self.abandoned = True
            self._stack.pump.drain()  # data that has just arrived is unread, too
        elif not resets:
            return
        if resets:
            self.connection.abort()
        else:
            self.connection.disown()
        self._watch_delivery()

    def _watch_delivery(self) -> None:
        """Let `Runtime.shut_down` check this connection again whenever it makes progress."""
        self._stack.connection_moved()
        if self.connection.state != "CLOSED":
            self.connection.on_writable = self._watch_delivery

    @property
    def is_unfinished(self) -> bool:
        """True if the peer could lose something when the stack is left now.

        Data and C, the flag that this side has closed, must have arrived. On one host that is
        enough, as over TCP: the peer reads the data and the end after this process has gone. On
        RoCE a kernel drops unread data when its link group ends, and reports an error in place of
        an end that its program has not read. So there a stream that the program has closed ends
        with the peer's close (4.8.1), and for an abandoned one the peer must have read the data.
        """
        connection = self.connection
        if connection.ending:
            return True
        if self.group.rnic.kind != "roce":
            return False
        return not self.abandoned or not connection.sender.announced_is_delivered

    # --- trio_smc.datapath.connection.Host ------------------------------------------------------

    def connection_closed(self, connection: Connection) -> None:
        """Free the element, the alert token and the timer (RFC 7609, 4.8.1)."""
        self.set_timer(connection, None)
        release = partial(self.group.own_rmbs.release, self.rmbe, connection.used)
        if connection.receiver.is_lent:
            connection.receiver.on_returned = release
        else:
            release()
        self.group.remove_connection(connection.alert_token, connection)
        self._stack.connection_closed(self)

    def set_timer(self, connection: Connection, seconds: float | None) -> None:
        """Start, restart or stop the connection's timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._stack.timers.call_later(seconds, connection.on_timer)

    def reset_tcp(self, connection: Connection) -> None:
        """End the TCP connection by RST. It must not be adopted afterwards.

        On RoCE, RST waits for the end of the connection while A is in flight: otherwise RST could
        overtake the data and A, and the peer would drop data that was sent before the abort.
        """
        self.reset = True
        if self.group.rnic.kind == "roce" and connection.abort_in_flight:
            self._reset_waits = True
        else:
            self._reset_now()

    def _reset_now(self) -> None:
        self._reset_waits = False
        sock = self._detach_socket()
        if sock is not None:
            self._close(sock, reset=True)

    def close_tcp(self, connection: Connection) -> None:
        """End the TCP connection by FIN, after the SMC-R connection (4.8.1)."""
        sock = self._detach_socket()
        if sock is not None:
            if self.lingers:
                # With SO_LINGER, close(2) could send RST instead of FIN.
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_BY_FIN)
            self._close(sock, reset=False)

    def _close(self, sock: trio.socket.SocketType, *, reset: bool) -> None:
        if self.close_socket is not None:
            self.close_socket(reset)
        else:
            close_past_program(sock, reset=reset)

    def show_end(self, connection: Connection) -> bool:
        """Let the descriptor of the TCP socket show the end of the stream to a program that polls
        it.  Sends nothing.

        Returns:
          False if bytes are unread on the TCP connection: the peer's program may have written a
          part of the stream to its descriptor.
        """
        sock = self.sock
        if sock is None or not self.owns_number:
            return True
        try:
            if self._stack.tcp_watch.has_bytes(sock):
                return False
            sock.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # the peer has reset TCP
        return True

    def tcp_end(self, connection: Connection) -> Literal["none", "fin", "reset"]:
        """How the peer has ended the TCP connection; unknown, "none", before it is adopted."""
        return "none" if self.sock is None else self._stack.tcp_watch.peer_end(self.sock)

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        """Send RST if it waits for CLOSED, and notify the observer."""
        if new == "CLOSED" and self._reset_waits:
            self._reset_now()
        observer = self._stack.observer
        if observer is not None:
            observer.state(connection, old, new, event)

    # --- trio_smc.stack.tcp_watch.TcpWatcher ----------------------------------------------------

    def tcp_reset(self) -> None:
        """Abort, because the TCP connection was reset (4.8.2)."""
        self._stack.pump.drain()  # messages that the peer sent before
        # The RDMA writes of a peer on this host are complete when they are posted.
        self.connection.tcp_reset(no_more_writes=self.group.rnic.kind == "software")

    def tcp_data(self) -> None:
        """Abort, because the peer sent bytes on the TCP connection after the switch."""
        self.connection.sent_past_smc()

    def _detach_socket(self) -> trio.socket.SocketType | None:
        sock, self.sock = self.sock, None
        if sock is not None:
            self.announce_tcp_end()
            self._stack.tcp_watch.remove(sock)
            if not self._is_own(sock):
                sock.detach()  # the number may belong to another file now
                return None
        return sock

    @property
    def owns_number(self) -> bool:
        """False if the program has closed the descriptor of the TCP socket, perhaps by its
        number, which may belong to another file now."""
        return self.sock is not None and self._is_own(self.sock)

    def _is_own(self, sock: trio.socket.SocketType) -> bool:
        return self._identity is not None and self._identity.is_of(sock)
