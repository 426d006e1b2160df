"""Views of connections for users: read-only, for connections over SMC-R and over TCP.

Like a view of a link group, a view of a connection has a reference to its core and reads every
value on access.  The data path does not use views.
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
from trio_smc.wire.cdc import ABNORMAL_CLOSE, CONNECTION_CLOSED, SENDING_DONE

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
TCP_STATES: Final = (
    "CLOSED", "ESTABLISHED", "SYN-SENT", "SYN-RECEIVED", "FIN-WAIT-1", "FIN-WAIT-2", "TIME-WAIT",
    "CLOSED", "CLOSE-WAIT", "LAST-ACK", "LISTEN", "CLOSING",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCursors:
    """The cursors of an SMC-R connection, in bytes since its start (RFC 7609, 4.3).

    Attributes:
      produced: bytes written into the peer's RMBE.
      delivered: bytes of `produced` that the RNIC has acknowledged.
      taken: bytes of `produced` that the peer's application has consumed, according to the peer's
        last message.
      window: bytes that may be written before the peer consumes more.
      peer_ring: capacity of the peer's RMBE.
      received: bytes that have arrived in this side's RMBE.
      consumed: bytes of `received` that the application has consumed.
      ring: capacity of this side's RMBE.
      sequence_sent, sequence_received: numbers of the last CDC message that is complete, and that
        was received (4.6.1).
      alert_token: identifies the connection in CDC messages to this side (A.4).
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
    """The current state of one connection of a stack; from `Stack.connections`.

    A connection that is closing has a view until its close has finished.  Two views of the same
    connection are equal.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """The protocol of the connection."""

    @property
    @abstractmethod
    def state(self) -> str:
        """Over SMC-R the state of RFC 7609, 4.8 ("ACTIVE", "PEERCLOSEWAIT1"; INIT during the
        handshake); over TCP the state of the TCP connection ("ESTABLISHED")."""

    @property
    def fallback(self) -> Fallback | None:
        """The reason why the mode is TCP; None over SMC-R."""
        return None

    @property
    def local_address(self) -> tuple[str, int] | None:
        """Address and port of this side; None if there is no TCP connection yet, or no longer."""
        return socket_name(self._socket(), "getsockname")

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """Address and port of the peer; None in the same cases as `local_address`."""
        return socket_name(self._socket(), "getpeername")

    @property
    def link_group(self) -> LinkGroupView | None:
        """The link group; None over TCP."""
        return None

    @property
    def link(self) -> LinkView | None:
        """The link that this side sends on; None over TCP, and if the connection has no link."""
        return None

    @property
    @abstractmethod
    def send_queue(self) -> int:
        """Bytes that were sent and are not known to be consumed by the peer's application (SMC-R),
        or received by the peer's kernel (TCP)."""

    @property
    @abstractmethod
    def receive_queue(self) -> int:
        """Bytes that have arrived, and that the application has not received."""

    @property
    def cursors(self) -> ConnectionCursors | None:
        """The cursors; None over TCP, and before the peer's RMBE is known."""
        return None

    @property
    def flags_sent(self) -> str | None:
        """The flags of this side in CDC messages (RFC 7609, A.4), as letters: "B" a sender waits
        for the window, "D" sending done, "C" closed, "A" abnormal close; None over TCP."""
        return None

    @property
    def flags_received(self) -> str | None:
        """The flags that the peer has sent, like `flags_sent`; None over TCP."""
        return None

    @abstractmethod
    def statistics(self) -> StreamStatistics:
        """Counters of the connection; over TCP only its bytes are counted."""

    @abstractmethod
    def _socket(self) -> trio.socket.SocketType | None:
        """The TCP connection, or None."""

    def __repr__(self) -> str:
        return f"<connection {self.mode} {self.state} to {self.peer_address}>"


class RdmaConnectionView(View[Endpoint], ConnectionView):
    """A view of a connection over SMC-R."""

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

    @property
    def flags_sent(self) -> str:
        messenger = self._core.connection.messenger
        return _letters(messenger.flags, blocked=messenger.blocked)

    @property
    def flags_received(self) -> str:
        core = self._core.connection
        return _letters(core.peer_flags, blocked=core.receiver.writer_waits)

    def statistics(self) -> StreamStatistics:
        return self._core.connection.statistics()

    def _socket(self) -> trio.socket.SocketType | None:
        return self._core.sock


class TcpConnectionView(View[TcpStream], ConnectionView):
    """A view of a connection over plain TCP."""

    __slots__ = ()

    @property
    def mode(self) -> Mode:
        return Mode.TCP

    @property
    def state(self) -> str:
        with contextlib.suppress(OSError):
            info = self._core.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if info[0] < len(TCP_STATES):
                return TCP_STATES[info[0]]
        return TCP_STATES[0]

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
    """Address and port of one end; None if the socket is closed or not connected."""
    if sock is not None:
        with contextlib.suppress(OSError):
            name = getattr(sock, which)()
            return name[0], name[1]
    return None


def _letters(endings: int, *, blocked: bool) -> str:
    """Flags as the letters of RFC 7609, A.4."""
    named = (("D", SENDING_DONE), ("C", CONNECTION_CLOSED), ("A", ABNORMAL_CLOSE))
    return "B" * blocked + "".join(letter for letter, flag in named if endings & flag)


def _queue(measure: Callable[[trio.socket.SocketType], int], sock: trio.socket.SocketType) -> int:
    """Bytes in a queue of a TCP socket; 0 if the socket is closed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return measure(sock)
    return 0
