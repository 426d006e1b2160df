"""What the socket options of an SMC-R stream do; `trio_smc._options` says which there are.

Theory of operation
-------------------
What can be kept in the kernel's socket is kept there, so that options inherited from the listening
socket, or set by way of `SmcStream.socket`, count just as well.  The TCP connection may end before
the stream is closed; options are accepted and returned until then, as a reset socket does it.

Corked, or with TCP_NODELAY off, small writes go into the peer's RMBE at once and only the CDC
message that tells of them is put off: until the cork is pulled, or until what was told of before
has arrived (Nagle's algorithm).  Both end with a chunk's worth of data, with the window or the
send buffer full, with the stream's end, and after `HOLD` seconds at the latest (RFC 7609, 4.5.2).

Keepalive asks the link group to test idle links sooner, which serves all their connections, and
lets the TCP connection send probes of its own, not too many (4.5.3).

The user timeout looks at the connection's counts every now and then, so that the hot path need not
note times.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trio_smc._option_inherited import SNDBUF_LOCKED, Inherited

if TYPE_CHECKING:
    import trio
    from typing_extensions import Buffer

    from trio_smc.datapath.connection import Connection
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer, Timers

__all__ = [
    "HOLD",
    "LEAST_SEND_BUFFER",
    "LEAST_TCP_KEEPALIVE",
    "Key",
    "OptionActions",
    "plain",
]

HOLD: Final = 0.2
"""Seconds that the CDC message of a small write is put off at most."""
LEAST_TCP_KEEPALIVE: Final = 10
"""Seconds; TCP probes for keepalive are sent no closer (RFC 7609, 4.5.3): links are tested."""
LEAST_SEND_BUFFER: Final = 4096
"""Bytes; a smaller SO_SNDBUF is taken for this."""

_LINGER: Final = struct.Struct("ii")
_LONGEST_CHECK: Final = 1.0
_INT_MAX: Final = 2**31 - 1

_Flush = Callable[[], None]
_FlushLater = Callable[[_Flush], None]
Key = tuple[int, int]
"""Level and number of an option."""


class OptionActions:
    """What options do to one SMC-R stream.

    Args:
      core, group: the connection and its link group.
      sock: its TCP connection.
      timers: of the stack.
      flush_later: how CDC messages are put off while no option says otherwise.
    """

    __slots__ = (
        "_core", "_corked", "_flush_later", "_group", "_hold_timer", "_kept", "_nodelay",
        "_progress", "_sock", "_timers", "_user_timeout", "_watch",
    )  # fmt: skip

    def __init__(
        self,
        core: Connection,
        group: LinkGroup,
        sock: trio.socket.SocketType,
        timers: Timers,
        flush_later: _FlushLater | None,
    ) -> None:
        self._core = core
        self._group = group
        self._sock = sock
        self._timers = timers
        self._flush_later = flush_later
        self._kept: dict[Key, int | bytes] = {}
        self._nodelay = True  # as Trio has it
        self._corked = False
        self._hold_timer: Timer | None = None
        self._user_timeout = 0  # milliseconds
        self._watch: Timer | None = None
        self._progress = ((0, 0.0), (0, 0.0))

    @property
    def linger(self) -> int | None:
        """SO_LINGER: how many seconds `aclose` may wait, 0: abort; None: it is off."""
        if self._tcp_gone:
            return None
        on, seconds = _LINGER.unpack(
            self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size)
        )
        return seconds if on else None

    # --- the TCP connection ------------------------------------------------------------------

    @property
    def _tcp_gone(self) -> bool:
        return self._sock.fileno() < 0

    def _set_tcp(
        self, level: int, option: int, value: int | Buffer | None, length: int | None
    ) -> None:
        if self._tcp_gone:
            self._keep((level, option), plain(value))
        elif value is not None:
            self._sock.setsockopt(level, option, value)
        else:
            assert length is not None
            self._sock.setsockopt(level, option, None, length)

    def _keep(self, key: Key, value: int | bytes) -> None:
        self._kept[key] = value

    def inherit(self, found: Inherited) -> None:
        """Act on what an accepted TCP connection has from its listening socket."""
        if found.keepalive:
            self.set_keepalive(1)
        if found.user_timeout:
            self.set_user_timeout(found.user_timeout)
        if found.locks & SNDBUF_LOCKED:
            # Linux doubles what is set, for its own books.
            self.set_send_buffer(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2)

    # --- buffers -----------------------------------------------------------------------------

    def set_receive_buffer(self, value: int) -> None:
        """The RMBE stays as it is; the TCP connection keeps the number."""
        self._set_tcp(socket.SOL_SOCKET, socket.SO_RCVBUF, value, None)

    def receive_buffer(self) -> int:
        """Bytes of our RMBE."""
        return self._core.rmbe.size

    def set_send_buffer(self, value: int) -> None:
        """Bound unacknowledged bytes."""
        # Negative numbers are the kernel's "as much as there may be".
        limit = max(LEAST_SEND_BUFFER, value) if value >= 0 else None
        self._core.limit_unacknowledged(limit)

    def send_buffer(self) -> int:
        """Bytes that may be unacknowledged."""
        limit = self._core.send_limit
        return self._core.peer_ring if limit is None else limit

    # --- merging small writes ----------------------------------------------------------------

    def set_nodelay(self, value: int) -> None:
        """On: every write is told of at once."""
        self._nodelay = bool(value)
        self._apply_merging()

    def nodelay(self) -> int:
        """0 or 1."""
        return int(self._nodelay)

    def set_cork(self, value: int) -> None:
        """On: small writes are told of together."""
        self._corked = bool(value)
        self._apply_merging()

    def cork(self) -> int:
        """0 or 1."""
        return int(self._corked)

    def _apply_merging(self) -> None:
        core = self._core
        if self._corked:
            core.merge_messages(self._hold, corked=True)
        elif self._nodelay:
            core.merge_messages(self._flush_later)
        else:
            core.merge_messages(self._hold_until_delivered, when_delivered=True)

    def _hold(self, flush: _Flush) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        self._hold_timer = self._timers.call_later(HOLD, flush)

    def _hold_until_delivered(self, flush: _Flush) -> None:
        if not self._core.quiet:
            self._hold(flush)
        elif self._flush_later is not None:
            self._flush_later(flush)
        else:
            flush()

    def set_urgent_inline(self, value: int) -> None:
        """SO_OOBINLINE."""
        self._core.urgent_inline = bool(value)

    def urgent_inline(self) -> int:
        """SO_OOBINLINE: 0 or 1."""
        return int(self._core.urgent_inline)

    # --- keepalive ---------------------------------------------------------------------------

    def set_keepalive(self, value: int) -> None:
        """SO_KEEPALIVE."""
        self._keep((socket.SOL_SOCKET, socket.SO_KEEPALIVE), int(bool(value)))
        self._set_tcp(socket.SOL_SOCKET, socket.SO_KEEPALIVE, value, None)
        self._set_floored(socket.TCP_KEEPIDLE, self.keepalive_time(socket.TCP_KEEPIDLE))
        self._set_floored(socket.TCP_KEEPINTVL, self.keepalive_time(socket.TCP_KEEPINTVL))
        self._apply_keepalive()

    def keepalive(self) -> int:
        """0 or 1."""
        value = self._kept.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 0)
        assert isinstance(value, int)
        return value

    def set_keepalive_time(self, option: int, seconds: int) -> None:
        """TCP_KEEPIDLE or TCP_KEEPINTVL."""
        # As asked first, for the kernel to say whether it is a time at all.
        self._set_tcp(socket.IPPROTO_TCP, option, seconds, None)
        self._keep((socket.IPPROTO_TCP, option), seconds)
        self._set_floored(option, seconds)
        self._apply_keepalive()

    def keepalive_time(self, option: int) -> int:
        """Seconds: what was asked for, else the system's."""
        key = (socket.IPPROTO_TCP, option)
        if key not in self._kept:
            self._keep(key, 0 if self._tcp_gone else self._sock.getsockopt(*key))
        value = self._kept[key]
        assert isinstance(value, int)
        return value

    def _set_floored(self, option: int, seconds: int) -> None:
        if seconds < LEAST_TCP_KEEPALIVE and not self._tcp_gone:
            self._sock.setsockopt(socket.IPPROTO_TCP, option, LEAST_TCP_KEEPALIVE)

    def _apply_keepalive(self) -> None:
        if self._core.state != "CLOSED":
            idle = self.keepalive_time(socket.TCP_KEEPIDLE) if self.keepalive() else None
            self._group.keep_alive(self._core, idle or None)

    # --- user timeout ------------------------------------------------------------------------

    def set_user_timeout(self, milliseconds: int) -> None:
        """How long data may stay unacknowledged, or unsent for want of window; 0: any time."""
        if milliseconds < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._user_timeout = milliseconds
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if milliseconds:
            now = self._timers.now()
            self._progress = ((-1, now), (-1, now))
            self._look()

    def user_timeout(self) -> int:
        """Milliseconds."""
        return self._user_timeout

    def _look(self) -> None:
        """Compare with the last look: the hot path keeps no times for this."""
        core = self._core
        self._watch = None
        if core.state == "CLOSED":
            return
        now = self._timers.now()
        arrived, posted = self._progress
        delivered = core.bytes_sent - core.unacknowledged
        if not core.unacknowledged or delivered != arrived[0]:
            arrived = (delivered, now)
        if not core.starved or core.bytes_sent != posted[0]:
            posted = (core.bytes_sent, now)
        self._progress = (arrived, posted)
        patience = self._user_timeout / 1000
        if now - min(arrived[1], posted[1]) >= patience:
            core.user_timeout()
            return
        self._watch = self._timers.call_later(min(patience / 4, _LONGEST_CHECK), self._look)


def plain(value: int | Buffer | None) -> int | bytes:
    """A value as it is kept: an int or bytes.

    Raises:
      OSError: EFAULT for none.
      TypeError: it does not fit a C int; the socket module says so too.
    """
    if value is None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    if not isinstance(value, int):
        return bytes(value)
    if not -_INT_MAX - 1 <= value <= _INT_MAX:
        raise TypeError("the value of a socket option is a C int")
    return int(value)
