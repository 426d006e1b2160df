"""`Endpoint`: the joint between a connection core, its TCP connection and its link group."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.host.tcp import close_with_reset, resets_on_close

if TYPE_CHECKING:
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
    """What an endpoint wants of its stack."""

    observer: Observer | None
    timers: Timers
    tcp_watch: TcpWatch
    pump: Pump

    def connection_closed(self, endpoint: Endpoint) -> None:
        """Its connection is CLOSED and has given everything back."""

    def connection_moved(self) -> None:
        """A connection that nobody waits for may owe its peer nothing more."""


class Endpoint:
    """What one connection core wants of the world (`trio_smc.datapath.connection.Host`).

    Lives from the moment an RMB element is taken until the connection is CLOSED, which may be
    long after its stream was closed.
    """

    __slots__ = ("_stack", "_timer", "abandoned", "closed_by_user", "connection", "group",
                 "lingers", "reset", "rmbe", "sock")  # fmt: skip

    connection: Connection

    def __init__(self, stack: EndpointOwner, group: LinkGroup, rmbe: Rmbe) -> None:
        self._stack = stack
        self._timer: Timer | None = None
        self.group: LinkGroup = group
        self.rmbe: Rmbe = rmbe
        self.sock: trio.socket.SocketType | None = None
        """The TCP connection, once it belongs to SMC-R; None before and after."""
        self.reset: bool = False
        """The TCP connection is to end by RST, or has; it may not have been adopted yet."""
        self.closed_by_user: bool = False
        """Its stream was closed; what is left to do happens here."""
        self.lingers: bool = True
        """SO_LINGER is on, for all that is known here."""
        self.abandoned: bool = False
        """Closed because its stream was forgotten or its stack left; nobody waits for it."""

    def adopt(self, sock: trio.socket.SocketType) -> None:
        """The rendezvous is complete: the TCP connection ends with the SMC-R connection."""
        self.sock = sock
        self._stack.tcp_watch.add(sock, self)

    def forgotten(self) -> None:
        """Nobody closes the stream any more: what close(2) does to a socket is done here.

        What was sent still arrives, and the end after it, unless data is unread (4.8.1, 3A).
        """
        if self.closed_by_user:
            return
        self.closed_by_user = self.abandoned = True
        self._stack.pump.drain()  # what has come is unread, too
        if self.sock is not None and resets_on_close(self.sock):
            self.connection.abort()
        else:
            self.connection.disown()
        self._watch_delivery()

    def _watch_delivery(self) -> None:
        """Have whoever leaves the stack look again, from time to time."""
        self._stack.connection_moved()
        if self.connection.state != "CLOSED":
            self.connection.on_writable = self._watch_delivery

    @property
    def owes(self) -> bool:
        """Whether leaving the stack now could cost the peer something.

        A user who has closed a stream gets its end in order.  Of the others data and C must have
        arrived; on RoCE the peer must have taken the data, too: a kernel drops what was not read
        when its link group ends.
        """
        connection = self.connection
        if not self.abandoned or connection.ending:
            return True
        return self.group.rnic.kind == "roce" and not connection.sender.announced_is_delivered

    # --- trio_smc.datapath.connection.Host ------------------------------------------------------

    def connection_closed(self, connection: Connection) -> None:
        """CLOSED: element, alert token and timer go back (RFC 7609, 4.8.1)."""
        self.set_timer(connection, None)
        self.group.own_rmbs.release(self.rmbe, connection.used)
        self.group.remove_connection(connection.alert_token, connection)
        self._stack.connection_closed(self)

    def set_timer(self, connection: Connection, seconds: float | None) -> None:
        """(Re)start or stop the connection's timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._stack.timers.call_later(seconds, connection.on_timer)

    def reset_tcp(self, connection: Connection) -> None:
        """End the TCP connection by RST; whoever has it still must not let it be adopted."""
        self.reset = True
        sock = self._let_go()
        if sock is not None:
            close_with_reset(sock)

    def close_tcp(self, connection: Connection) -> None:
        """End the TCP connection by FIN, after the SMC-R connection (4.8.1)."""
        sock = self._let_go()
        if sock is not None:
            if self.lingers:
                # That was the stream's affair; here it would make a reset of the FIN.
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_BY_FIN)
            sock.close()

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        """Tell observers."""
        observer = self._stack.observer
        if observer is not None:
            observer.state(connection, old, new, event)

    # --- trio_smc.stack.tcp_watch.TcpWatcher ----------------------------------------------------

    def tcp_reset(self) -> None:
        """4.8.2: a reset of the TCP connection is an abort."""
        self._stack.pump.drain()  # what the peer said before
        self.connection.tcp_reset()

    def tcp_data(self) -> None:
        """Bytes on the TCP connection after the switch: the peer is out of step."""
        self.connection.protocol_error(ProtocolError("data on the TCP connection"))

    def _let_go(self) -> trio.socket.SocketType | None:
        sock, self.sock = self.sock, None
        if sock is not None:
            self._stack.tcp_watch.remove(sock)
        return sock
