"""What users see of connections: a read-only view of each, SMC-R and TCP alike.

As the views of link groups, one holds a reference to what it shows and reads everything when
asked.  Nothing here is on the way of data.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from trio_smc._base.reasons import Fallback, Mode
from trio_smc.host.tcp import unread_bytes, unsent_bytes
from trio_smc.rendezvous.links.link import Link
from trio_smc.stack.connection_host import Endpoint
from trio_smc.streams.group_views import LinkGroupView, LinkView, View
from trio_smc.streams.tcp_stream import TcpStream

if TYPE_CHECKING:
    import trio

    from trio_smc._base.statistics import StreamStatistics
    from trio_smc.streams.stream import SmcSocket

__all__ = [
    "ConnectionCursors",
    "ConnectionView",
    "RdmaConnectionView",
    "TcpConnectionView",
    "socket_name",
]


# TCP_INFO's first byte (linux/tcp_states.h); the names are those of RFC 9293, 3.3.2.
_TCP_STATES: Final = (
    "CLOSED", "ESTABLISHED", "SYN-SENT", "SYN-RECEIVED", "FIN-WAIT-1", "FIN-WAIT-2", "TIME-WAIT",
    "CLOSED", "CLOSE-WAIT", "LAST-ACK", "LISTEN", "CLOSING",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCursors:
    """Where an SMC-R connection stands, in bytes since it began (RFC 7609, 4.3).

    Attributes:
      produced: written into the peer's RMBE.
      delivered: of these, known to have arrived there.
      taken: of these, taken by the peer's application, as far as it told.
      window: what may still be written before the peer takes more.
      peer_ring: bytes that the peer's RMBE holds.
      received: arrived in this side's RMBE.
      consumed: of these, taken by the application.
      ring: bytes that this side's RMBE holds.
      sequence_sent, sequence_received: of the last CDC message completed, and received (4.6.1).
      alert_token: names the connection in CDC messages to this side (A.4).
    """

    produced: int
    delivered: int
    taken: int
    window: int
    peer_ring: int
    received: int
    consumed: int
    ring: int
    sequence_sent: int
    sequence_received: int
    alert_token: int


class ConnectionView(ABC):
    """One connection of a stack, as it is now; of `Stack.connections`.

    Closing connections are there too, until nothing is left to do for them.  Two views of one
    connection are equal.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """How its bytes travel."""

    @property
    @abstractmethod
    def state(self) -> str:
        """Over SMC-R the state as RFC 7609, 4.8 names it ("ACTIVE", "PEERCLOSEWAIT1"; INIT is a
        handshake that is not finished); else the state of the TCP connection ("ESTABLISHED")."""

    @property
    def fallback(self) -> Fallback | None:
        """Why the mode is TCP; None over SMC-R."""
        return None

    @property
    def local_address(self) -> tuple[str, int] | None:
        """Address and port of this side; None before and after the TCP connection is known."""
        return socket_name(self._socket(), "getsockname")

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """Address and port of the other side; None as `local_address`."""
        return socket_name(self._socket(), "getpeername")

    @property
    def link_group(self) -> LinkGroupView | None:
        """The link group; None over TCP."""
        return None

    @property
    def link(self) -> LinkView | None:
        """The link this side sends on; None over TCP, and while there is none."""
        return None

    @property
    @abstractmethod
    def send_queue(self) -> int:
        """Bytes sent that the peer has not taken, as far as this side knows: over SMC-R its
        application, over TCP its system."""

    @property
    @abstractmethod
    def receive_queue(self) -> int:
        """Bytes that arrived and were not received by the application."""

    @property
    def cursors(self) -> ConnectionCursors | None:
        """Where it stands; None over TCP, and before the peer's RMBE is known."""
        return None

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Counters of the connection; over TCP only its bytes are counted."""

    @abstractmethod
    def _socket(self) -> trio.socket.SocketType | None:
        """The TCP connection, while it is known."""

    def __repr__(self) -> str:
        return f"<connection {self.mode} {self.state} to {self.peer_address}>"


class RdmaConnectionView(View[Endpoint], ConnectionView):
    """A connection whose bytes travel by RDMA writes."""

    __slots__ = ("_group",)

    def __init__(self, group: LinkGroupView, core: Endpoint) -> None:
        super().__init__(core)
        self._group = group

    @property
    def mode(self) -> Mode:
        return Mode.SMC_R

    @property
    def state(self) -> str:
        return self._core.connection.state

    @property
    def link_group(self) -> LinkGroupView:
        return self._group

    @property
    def link(self) -> LinkView | None:
        channel = self._core.connection.channel
        return LinkView(channel) if isinstance(channel, Link) else None

    @property
    def send_queue(self) -> int:
        core = self._core.connection
        return core.sender.peer_ring - core.sender.window if core.peer_rmbe_known else 0

    @property
    def receive_queue(self) -> int:
        return self._core.connection.receiver.readable

    @property
    def cursors(self) -> ConnectionCursors | None:
        core = self._core.connection
        if not core.peer_rmbe_known:
            return None
        return ConnectionCursors(
            produced=core.sender.bytes_sent,
            delivered=core.sender.bytes_sent - core.sender.unacknowledged,
            taken=core.sender.bytes_sent - self.send_queue,
            window=core.sender.window,
            peer_ring=core.sender.peer_ring,
            received=core.receiver.bytes_received,
            consumed=core.receiver.bytes_received - core.receiver.readable,
            ring=core.rmbe.usable,
            sequence_sent=core.sequence_sent,
            sequence_received=core.sequence_received,
            alert_token=core.alert_token,
        )

    def statistics(self) -> StreamStatistics:
        return self._core.connection.statistics()

    def _socket(self) -> trio.socket.SocketType | None:
        return self._core.sock


class TcpConnectionView(View[TcpStream], ConnectionView):
    """A connection that stays plain TCP."""

    __slots__ = ()

    @property
    def mode(self) -> Mode:
        return Mode.TCP

    @property
    def state(self) -> str:
        with contextlib.suppress(OSError):
            info = self._core.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] < len(_TCP_STATES):
                return _TCP_STATES[info[0]]
        return _TCP_STATES[0]

    @property
    def fallback(self) -> Fallback | None:
        return self._core.fallback

    @property
    def send_queue(self) -> int:
        return _queue(unsent_bytes, self._core.socket)

    @property
    def receive_queue(self) -> int:
        return _queue(unread_bytes, self._core.socket)

    def statistics(self) -> StreamStatistics:
        return self._core.statistics()

    def _socket(self) -> trio.socket.SocketType | None:
        return self._core.socket


def socket_name(
    sock: trio.socket.SocketType | SmcSocket | None, which: Literal["getsockname", "getpeername"]
) -> tuple[str, int] | None:
    """Address and port of one end; None when the socket is closed or not connected."""
    if sock is not None:
        with contextlib.suppress(OSError):
            name = getattr(sock, which)()
            return name[0], name[1]
    return None


def _queue(measure: Callable[[trio.socket.SocketType], int], sock: trio.socket.SocketType) -> int:
    """Bytes in a queue of a TCP socket; 0 when it is closed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return measure(sock)
    return 0
