"""Socket options of SMC-R streams: a table of all of them, and `StreamOptions`, which applies them.

Theory of operation
-------------------
`OPTIONS` is the only list: `StreamOptions` works from it, and docs/socket-options.md is generated
from it.  Every option has one `Owner`:

- data path: the connection core replaces TCP's send and receive buffers, Nagle's algorithm and the
  user timeout;
- links and TCP: keepalive tests links, and the TCP connection sends its own probes (RFC 7609,
  4.5.3);
- closing: `RdmaStream.aclose` reads `StreamOptions.linger`;
- refused: setting the option is an error;
- TCP connection: the kernel applies the option.  Every option without a row has this owner.

If the kernel's socket can store a value, it is stored there.  So options that are inherited from
the listening socket, or set through `SmcStream.socket`, have the same effect.  The TCP connection
may end before the stream is closed; the stream still accepts and returns options then, as a socket
does after a reset.

With TCP_CORK on, or TCP_NODELAY off, a small write goes into the peer's RMBE at once.  Only the CDC
message that announces it is deferred: until the cork is removed, or until all data announced before
has arrived (Nagle's algorithm).  In both cases the message is posted earlier if the deferred data
fills a quarter of the peer's element, if the window or the send buffer is full, or if the stream
ends; and after `MAX_MERGE_DELAY` seconds at the latest (RFC 7609, 4.5.2).

Keepalive makes the link group test idle links sooner, once for all their connections, and lets the
TCP connection send its own probes at a limited rate (4.5.3).

For the user timeout, a timer compares counters of the connection from time to time.  So the hot
path need not record times.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.host.tcp import CLOSE, CLOSE_WAIT, ESTABLISHED, FIN_WAIT2

if TYPE_CHECKING:
    import trio
    from typing_extensions import Buffer

    from trio_smc._base.timers import Timer, Timers
    from trio_smc.config.config import Config
    from trio_smc.datapath.connection import Connection

__all__ = [
    "MAX_MERGE_DELAY",
    "MIN_SEND_BUFFER",
    "MIN_TCP_KEEPALIVE",
    "OPTIONS",
    "SNDBUF_LOCKED",
    "Inherited",
    "KeepaliveGroup",
    "Key",
    "Option",
    "Owner",
    "StreamOptions",
    "inherited",
    "int_or_bytes",
    "integer",
    "receive_buffer_for",
    "render",
]


MAX_MERGE_DELAY: Final = 0.2
"""The longest delay of the CDC message of a small write, in seconds: that of TCP_CORK (tcp(7))."""
MIN_TCP_KEEPALIVE: Final = 10
"""The shortest time in seconds between keepalive probes of TCP.  RFC 7609, 4.5.3 recommends such a
limit, because links are tested; the value was chosen."""
MIN_SEND_BUFFER: Final = 4096
"""Bytes; a smaller SO_SNDBUF is raised to this.  Chosen."""

_LINGER: Final = struct.Struct("ii")
_MAX_CHECK_INTERVAL: Final = 1.0
"""The longest time in seconds between two checks of the user timeout.  Chosen."""
_INT_MAX: Final = 2**31 - 1

_Flush = Callable[[], None]
_FlushLater = Callable[[_Flush], None]
Key = tuple[int, int]
"""Level and number of an option."""


def int_or_bytes(value: int | Buffer | None) -> int | bytes:
    """The value of an option as it is stored.

    Raises:
      OSError: EFAULT if there is no value.
      TypeError: the value does not fit into a C int, as with the socket module.
    """
    if value is None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    if not isinstance(value, int):
        return bytes(value)
    if not -_INT_MAX - 1 <= value <= _INT_MAX:
        raise TypeError("the value of a socket option is a C int")
    return int(value)


_INT: Final = struct.Struct("i")


class Owner(StrEnum):
    """The part that applies an option of an SMC-R stream."""

    DATA_PATH = "data path"
    KEEPALIVE = "links and TCP"
    CLOSING = "closing"
    REFUSED = "refused"
    TCP = "TCP connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table.

    Attributes:
      level, name: names of constants of the socket module.
      owner: the part that applies the option.
      meaning: a sentence or two for users.
      number: the number of an option that the socket module does not know.
      write: applies an integer value; None: the owner decides.
      read: returns the value; None: the value that was set, or that of the TCP connection.
    """

    level: str
    name: str
    owner: Owner
    meaning: str
    number: int | None = None
    write: Callable[[StreamOptions, int], None] | None = None
    read: Callable[[StreamOptions], int] | None = None

    @property
    def key(self) -> Key | None:
        """(level, number) for the kernel; None if this system does not know the option."""
        number = getattr(socket, self.name, self.number)
        return None if number is None else (getattr(socket, self.level), number)


class KeepaliveGroup(Protocol):
    """A link group, as seen by keepalive."""

    def keep_alive(self, user: Connection, seconds: float | None) -> None:
        """Test links that are idle for this time while ``user`` is open; None: no longer."""


class StreamOptions:
    """The socket options of one SMC-R stream.

    Args:
      core, group: the connection and its link group.
      sock: its TCP connection.
      timers: of the stack.
      flush_later: defers a CDC message, if neither TCP_CORK nor Nagle's algorithm applies.
    """

    __slots__ = (
        "_core", "_corked", "_flush_later", "_group", "_merge_timer", "_kept", "_nodelay",
        "_progress", "_sock", "_timers", "_user_timeout", "_progress_timer",
    )  # fmt: skip

    def __init__(
        self,
        core: Connection,
        group: KeepaliveGroup,
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
        self._nodelay = True  # as in Trio
        self._corked = False
        self._merge_timer: Timer | None = None
        self._user_timeout = 0  # milliseconds
        self._progress_timer: Timer | None = None
        self._progress = ((0, 0.0), (0, 0.0))

    def set(self, level: int, option: int, value: int | Buffer | None, length: int | None) -> None:
        """As `trio.SocketStream.setsockopt`.

        Raises:
          OSError: EOPNOTSUPP for a refused option, or the kernel's error.
        """
        if (value is None) is (length is None):
            raise TypeError("setsockopt: needs either a value, or None and a length")
        row = _BY_KEY.get((level, option))
        if row is None or row.owner is Owner.TCP:
            self._set_tcp(level, option, value, length)
        elif row.owner is Owner.REFUSED:
            raise OSError(errno.EOPNOTSUPP, f"{row.name} is not supported over SMC-R")
        elif row.owner is Owner.CLOSING:
            self._set_tcp(level, option, value, length)
        elif row.write is None:
            raise OSError(errno.ENOPROTOOPT, f"{row.name} is read-only")
        else:
            row.write(self, integer(value))

    def get(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`.  Raises OSError."""
        row = _BY_KEY.get((level, option))
        if row is not None and row.read is not None:
            return _in_requested_form(row.read(self), buffersize)
        if self._tcp_closed:
            kept = self._kept.get((level, option))
            if kept is not None:
                return _in_requested_form(kept, buffersize)
            with self._new_socket() as new:
                if new is None:
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
                value = new.getsockopt(level, option, buffersize or _INT.size)
            return _in_requested_form(value, buffersize)
        if (level, option) == _TCP_INFO:
            info = self._sock.getsockopt(level, option, buffersize or _INT.size)
            return _in_requested_form(self._with_state(info), buffersize)
        if buffersize:
            return self._sock.getsockopt(level, option, buffersize)
        return self._sock.getsockopt(level, option)

    def _with_state(self, info: bytes) -> bytes:
        """struct tcp_info with the state that TCP would have if it carried the data."""
        state = _STATE_OF_ENDS[self._core.write_closed, self._core.receiver.peer_done]
        return bytes((state,)) + info[1:] if info[:1] == bytes((ESTABLISHED,)) else info

    def keep_values(self) -> None:
        """Read the options of the TCP connection, which ends now: a program may ask for them as
        long as its stream is open."""
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            with contextlib.suppress(OSError):  # the program has closed the descriptor
                self.keepalive_time(option)
        for level, option in _KEPT_AT_END:
            with contextlib.suppress(OSError):  # the same, or the kernel does not know it
                value = self._sock.getsockopt(level, option, _LONGEST_VALUE)
                if (level, option) == _TCP_INFO and value:
                    value = bytes((CLOSE,)) + value[1:]
                self._kept.setdefault((level, option), value)

    @property
    def linger(self) -> int | None:
        """SO_LINGER: seconds that `aclose` may wait; 0: abort; None: the option is off."""
        if self._tcp_closed:
            return None
        try:
            value = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size)
        except OSError:  # the program has closed the descriptor by its number
            return None
        on, seconds = _LINGER.unpack(value)
        return seconds if on else None

    # --- the TCP connection ------------------------------------------------------------------

    @property
    def _tcp_closed(self) -> bool:
        return self._sock.fileno() < 0

    def _set_tcp(
        self, level: int, option: int, value: int | Buffer | None, length: int | None
    ) -> None:
        if self._tcp_closed:
            kept = int_or_bytes(value)
            with self._new_socket() as new:
                if new is not None:
                    new.setsockopt(level, option, kept)
            self._keep_value((level, option), kept)
        elif value is not None:
            self._sock.setsockopt(level, option, value)
        else:
            assert length is not None
            self._sock.setsockopt(level, option, None, length)

    def _new_socket(self) -> AbstractContextManager[socket.socket | None]:
        """A socket in place of the one that has ended: it has the default of each option, and the
        kernel's errors.  None if the system lacks descriptors or memory."""
        try:
            return socket.socket(self._sock.family, socket.SOCK_STREAM)
        except OSError:
            return contextlib.nullcontext()

    def _keep_value(self, key: Key, value: int | bytes) -> None:
        self._kept[key] = value

    def inherit(self, found: Inherited) -> None:
        """Apply the options that an accepted TCP connection has from its listening socket."""
        if found.keepalive:
            self.set_keepalive(1)
        if found.urgent_inline:
            self.set_urgent_inline(1)
        if found.user_timeout:
            self.set_user_timeout(found.user_timeout)
        if found.locks & SNDBUF_LOCKED:
            # Linux returns twice the number that was set (socket(7)).
            self.set_send_buffer(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2)

    # --- buffers -----------------------------------------------------------------------------

    def set_receive_buffer(self, value: int) -> None:
        """Only store the number, at the TCP connection: the RMBE keeps its size."""
        self._set_tcp(socket.SOL_SOCKET, socket.SO_RCVBUF, value, None)

    def receive_buffer(self) -> int:
        """Bytes of this side's RMBE."""
        return self._core.rmbe.size

    def set_send_buffer(self, value: int) -> None:
        """Limit the unacknowledged bytes."""
        # For the kernel a negative number is the largest one.
        limit = max(MIN_SEND_BUFFER, value) if value >= 0 else None
        self._core.limit_unacknowledged(limit)

    def send_buffer(self) -> int:
        """Bytes that may be unacknowledged."""
        limit = self._core.sender.send_limit
        return self._core.sender.peer_ring if limit is None else limit

    # --- merging small writes ----------------------------------------------------------------

    def set_nodelay(self, value: int) -> None:
        """TCP_NODELAY.  On: every write is announced at once."""
        self._nodelay = bool(value)
        self._apply_merging()

    def nodelay(self) -> int:
        """0 or 1."""
        return int(self._nodelay)

    def set_cork(self, value: int) -> None:
        """TCP_CORK.  On: small writes are announced together."""
        self._corked = bool(value)
        self._apply_merging()

    def cork(self) -> int:
        """0 or 1."""
        return int(self._corked)

    def _apply_merging(self) -> None:
        core = self._core
        if self._corked:
            core.sender.merge_messages(self._delay, corked=True)
        elif self._nodelay:
            core.sender.merge_messages(self._flush_later)
        else:
            core.sender.merge_messages(self._delay_until_delivered, when_delivered=True)

    def send_more(self, core: Connection, data: memoryview) -> int:
        """Send with MSG_MORE; see `Sender.send_more`."""
        return core.send_more(data, self._delay)

    def _delay(self, flush: _Flush) -> None:
        if self._merge_timer is not None:
            self._merge_timer.cancel()
        self._merge_timer = self._timers.call_later(MAX_MERGE_DELAY, flush)

    def _delay_until_delivered(self, flush: _Flush) -> None:
        if not self._core.sender.announced_is_delivered:
            self._delay(flush)
        elif self._flush_later is not None:
            self._flush_later(flush)
        else:
            flush()

    def set_urgent_inline(self, value: int) -> None:
        """SO_OOBINLINE."""
        self._core.receiver.urgent_inline = bool(value)
        self._core.wake_all()  # a waiting `receive_urgent` must now raise EINVAL

    def urgent_inline(self) -> int:
        """SO_OOBINLINE: 0 or 1."""
        return int(self._core.receiver.urgent_inline)

    # --- keepalive ---------------------------------------------------------------------------

    def set_keepalive(self, value: int) -> None:
        """SO_KEEPALIVE."""
        self._keep_value((socket.SOL_SOCKET, socket.SO_KEEPALIVE), int(bool(value)))
        self._set_tcp(socket.SOL_SOCKET, socket.SO_KEEPALIVE, value, None)
        self._set_tcp_time(socket.TCP_KEEPIDLE, self.keepalive_time(socket.TCP_KEEPIDLE))
        self._set_tcp_time(socket.TCP_KEEPINTVL, self.keepalive_time(socket.TCP_KEEPINTVL))
        self._apply_keepalive()

    def keepalive(self) -> int:
        """0 or 1."""
        value = self._kept.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 0)
        assert isinstance(value, int)
        return value

    def set_keepalive_time(self, option: int, seconds: int) -> None:
        """TCP_KEEPIDLE or TCP_KEEPINTVL."""
        # First set the value as it is, because the kernel rejects an invalid one.
        self._set_tcp(socket.IPPROTO_TCP, option, seconds, None)
        self._keep_value((socket.IPPROTO_TCP, option), seconds)
        self._set_tcp_time(option, seconds)
        self._apply_keepalive()

    def keepalive_time(self, option: int) -> int:
        """Seconds: the value that was set, or the system's default."""
        key = (socket.IPPROTO_TCP, option)
        if key not in self._kept:
            self._keep_value(key, 0 if self._tcp_closed else self._sock.getsockopt(*key))
        value = self._kept[key]
        assert isinstance(value, int)
        return value

    def _set_tcp_time(self, option: int, seconds: int) -> None:
        if seconds < MIN_TCP_KEEPALIVE and not self._tcp_closed:
            self._sock.setsockopt(socket.IPPROTO_TCP, option, MIN_TCP_KEEPALIVE)

    def _apply_keepalive(self) -> None:
        if self._core.state != "CLOSED":
            idle = self.keepalive_time(socket.TCP_KEEPIDLE) if self.keepalive() else None
            self._group.keep_alive(self._core, idle or None)

    # --- user timeout ------------------------------------------------------------------------

    def set_user_timeout(self, milliseconds: int) -> None:
        """Limit how long data may stay unacknowledged, or unsent without a window; 0: no limit."""
        if milliseconds < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._user_timeout = milliseconds
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None
        if milliseconds:
            now = self._timers.now()
            self._progress = ((-1, now), (-1, now))
            self._check_progress()

    def user_timeout(self) -> int:
        """Milliseconds."""
        return self._user_timeout

    def _check_progress(self) -> None:
        """Abort the connection if it has made no progress for the user timeout."""
        core = self._core
        self._progress_timer = None
        if core.state == "CLOSED":
            return
        now = self._timers.now()
        arrived, posted = self._progress
        delivered = core.sender.bytes_sent - core.sender.unacknowledged
        if not core.sender.unacknowledged or delivered != arrived[0]:
            arrived = (delivered, now)
        if not core.starved or core.sender.bytes_sent != posted[0]:
            posted = (core.sender.bytes_sent, now)
        self._progress = (arrived, posted)
        limit = self._user_timeout / 1000
        if now - min(arrived[1], posted[1]) >= limit:
            core.user_timeout()
            return
        self._progress_timer = self._timers.call_later(
            min(limit / 4, _MAX_CHECK_INTERVAL), self._check_progress
        )


def integer(value: int | Buffer | None) -> int:
    """The value as an int, as the kernel reads it.  Raises OSError (EINVAL): too few bytes."""
    kept = int_or_bytes(value)
    if isinstance(kept, int):
        return kept
    if len(kept) < _INT.size:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return int(_INT.unpack_from(kept)[0])


def _in_requested_form(value: int | bytes, buffersize: int) -> int | bytes:
    """The value in the form of `socket.getsockopt`: an int, or bytes if there is a buffer size."""
    if not buffersize:
        return value if isinstance(value, int) else _INT.unpack(value[:4].ljust(4, b"\0"))[0]
    return (_INT.pack(value) if isinstance(value, int) else value)[:buffersize]


def _connection_error(options: StreamOptions) -> int:
    error = options._core.receiver.take_error()
    return 0 if error is None else error.errno or 0


def _tcp_rows(level: str, names: str, meaning: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(level=level, name=name, owner=Owner.TCP, meaning=meaning)


def _keepalive_time_entries(name: str) -> dict[str, Any]:
    """Name, writer and reader of TCP_KEEPIDLE or TCP_KEEPINTVL."""
    number = getattr(socket, name, 0)
    return {
        "name": name,
        "write": lambda options, value: options.set_keepalive_time(number, value),
        "read": lambda options: options.keepalive_time(number),
    }


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        level="SOL_SOCKET", name="SO_RCVBUF", owner=Owner.DATA_PATH,
        meaning="Read: bytes of this side's RMB element. Set: accepted, but the element keeps its "
        "size (the TCP connection stores the number). Set on the socket of a listener: connections "
        "accepted later get elements for that number of bytes and an eye catcher (4 bytes), "
        "rounded up to 16 KiB << n. The kernel limits the number to net.core.rmem_max; "
        "Config.receive_buffer has no such limit.",
        write=StreamOptions.set_receive_buffer, read=StreamOptions.receive_buffer,
    ),
    Option(
        level="SOL_SOCKET", name="SO_SNDBUF", owner=Owner.DATA_PATH,
        meaning="Maximum of the bytes that are posted and not yet acknowledged by the RNIC, at "
        f"least {MIN_SEND_BUFFER}: the stream's share of the send ring, if the RNIC needs one. "
        "Unset: the size of the peer's RMB element. Returned as it was set, not doubled.",
        write=StreamOptions.set_send_buffer, read=StreamOptions.send_buffer,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_NODELAY", owner=Owner.DATA_PATH,
        meaning="On (the default): every write is announced to the peer at once. Off: small writes "
        "are announced when all data announced before has arrived, when they fill a quarter of the "
        f"peer's RMB element, or after {MAX_MERGE_DELAY} s.",
        write=StreamOptions.set_nodelay, read=StreamOptions.nodelay,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_CORK", owner=Owner.DATA_PATH,
        meaning="On: small writes are announced to the peer together: when the option is turned "
        "off, when they fill a quarter of the peer's RMB element, at the end of the stream, or "
        f"after {MAX_MERGE_DELAY} s. Setting TCP_NODELAY announces them at once.",
        write=StreamOptions.set_cork, read=StreamOptions.cork,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_USER_TIMEOUT", owner=Owner.DATA_PATH,
        meaning="Milliseconds that data may stay unacknowledged by the RNIC, or unsent because "
        "the peer's RMB element is full. After that the stream is aborted, and its errors name "
        "ETIMEDOUT. 0: no limit. The abort may be late by a quarter of the time, at most 1 s.",
        write=StreamOptions.set_user_timeout, read=StreamOptions.user_timeout,
    ),
    Option(
        level="SOL_SOCKET", name="SO_OOBINLINE", owner=Owner.DATA_PATH,
        meaning="On: urgent bytes that arrive from now on stay in the stream, where a read that "
        "begins before such a byte also ends before it, and receive_urgent() raises EINVAL.",
        write=StreamOptions.set_urgent_inline, read=StreamOptions.urgent_inline,
    ),
    Option(
        level="SOL_SOCKET", name="SO_ERROR", owner=Owner.DATA_PATH,
        meaning="Read: the number of the error that ended the connection, if no call has reported "
        "it yet, or 0. Reading clears it.",
        read=_connection_error,
    ),
    Option(
        level="SOL_SOCKET", name="SO_KEEPALIVE", owner=Owner.KEEPALIVE,
        meaning="On: a link of the link group is tested (TEST LINK) when it has been idle for "
        "TCP_KEEPIDLE seconds. One test serves all connections; the shortest of their times "
        "applies. Config.test_link_interval is an upper limit, also without the option. The TCP "
        "connection sends its own probes, too.",
        write=StreamOptions.set_keepalive, read=StreamOptions.keepalive,
    ),
    Option(
        level="IPPROTO_TCP", owner=Owner.KEEPALIVE,
        meaning="Seconds that a link may be idle before it is tested. The TCP connection uses at "
        f"least {MIN_TCP_KEEPALIVE} for its own probes.",
        **_keepalive_time_entries("TCP_KEEPIDLE"),
    ),
    Option(
        level="IPPROTO_TCP", owner=Owner.KEEPALIVE,
        meaning="Seconds between unanswered probes of the TCP connection, which uses at least "
        f"{MIN_TCP_KEEPALIVE}. An unanswered TEST LINK ends a link after "
        "Config.test_link_timeout.",
        **_keepalive_time_entries("TCP_KEEPINTVL"),
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_KEEPCNT", owner=Owner.TCP,
        meaning="Number of unanswered probes after which the TCP connection and the stream end.",
    ),
    Option(
        level="SOL_SOCKET", name="SO_LINGER", owner=Owner.CLOSING,
        meaning="How aclose() waits. Off: until this side's data and end have reached the peer's "
        "memory. On with 0 s: it does not wait, and resets the connection, as every other way to "
        "close does. On with n s: at most n seconds; the rest is sent in the background.",
    ),
    *_tcp_rows(
        "SOL_SOCKET", "SO_RCVLOWAT SO_SNDLOWAT SO_RCVTIMEO SO_SNDTIMEO",
        "No effect on the stream: tasks wait in Trio, not in the kernel.",
    ),
    *_tcp_rows(
        "IPPROTO_TCP", "TCP_QUICKACK TCP_NOTSENT_LOWAT TCP_MAXSEG TCP_WINDOW_CLAMP "
        "TCP_CONGESTION",
        "No effect on the stream: SMC-R has no segments, acknowledgements or congestion control of "
        "its own.",
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_ULP", number=31, owner=Owner.REFUSED,
        meaning="EOPNOTSUPP: a protocol in the kernel would not see the stream's bytes.",
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_REPAIR", number=19, owner=Owner.REFUSED,
        meaning="EOPNOTSUPP: the stream's state is not that of the TCP connection.",
    ),
    *_tcp_rows(
        "SOL_SOCKET", "SO_PRIORITY SO_MARK SO_BINDTODEVICE",
        "Applies to the packets of the TCP connection.",
    ),
    *_tcp_rows("IPPROTO_IP", "IP_TOS IP_TTL", "Applies to the packets of the TCP connection."),
    *_tcp_rows(
        "IPPROTO_TCP", "TCP_INFO",
        "The kernel's information about the TCP connection. The state is the one that TCP would "
        "have if it carried the data.",
    ),
)  # fmt: skip
"""The rows of docs/socket-options.md."""

_BY_KEY: Final = {row.key: row for row in OPTIONS if row.key is not None}

_TCP_INFO: Final = socket.IPPROTO_TCP, getattr(socket, "TCP_INFO", 11)
_STATE_OF_ENDS: Final = {
    (False, False): ESTABLISHED,
    (True, False): FIN_WAIT2,
    (False, True): CLOSE_WAIT,
    (True, True): CLOSE,
}
"""The state of TCP, by "this side has ended sending" and "the peer's end has arrived"."""
_LONGEST_VALUE: Final = 256
"""Bytes; the longest option, TCP_INFO, has 248 in Linux 6.18."""
_KEPT_AT_END: Final = tuple(
    {
        *(key for key, row in _BY_KEY.items() if row.read is None and row.owner != Owner.REFUSED),
        *(
            (socket.SOL_SOCKET, getattr(socket, name))
            for name in (
                "SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_REUSEADDR", "SO_REUSEPORT",
                "SO_ACCEPTCONN", "SO_DONTROUTE",
            )
            if hasattr(socket, name)
        ),
    }
)  # fmt: skip
"""Options whose values outlive the TCP connection."""


_HEAD: Final = """\
<!-- Made by `python -m scripts.socket_options` from trio_smc/streams/socket_options.py. -->

# Socket options

`SmcStream.setsockopt` and `getsockopt` have the arguments of `trio.SocketStream`. Over TCP, after a
fallback, they set and read options of the TCP socket. Over SMC-R:

| option | applied by | effect |
| --- | --- | --- |
"""
_TAIL: Final = """
Every option that is not listed belongs to the TCP connection (`SmcStream.socket`). Accepted
connections inherit SO_RCVBUF, SO_SNDBUF, SO_KEEPALIVE and its times, SO_LINGER, SO_OOBINLINE and
TCP_USER_TIMEOUT from the listening socket (the buffer sizes since Linux 5.16).
"""


def render() -> str:
    """The text of docs/socket-options.md."""
    rows: dict[tuple[Owner, str], list[str]] = {}
    for row in OPTIONS:
        rows.setdefault((row.owner, row.meaning), []).append(f"`{row.name}`")
    lines = (
        f"| {', '.join(names)} | {owner} | {meaning} |\n"
        for (owner, meaning), names in rows.items()
    )
    return _HEAD + "".join(lines) + _TAIL


SNDBUF_LOCKED: Final = 1
"""Bit of `Inherited.locks`: SO_SNDBUF was set (SOCK_SNDBUF_LOCK in linux/socket.h)."""
_RCVBUF_LOCKED: Final = 2
_SO_BUF_LOCK: Final = 72
"""SO_BUF_LOCK (asm-generic/socket.h)."""


class Inherited(NamedTuple):
    """Options of an accepted TCP connection that have an effect on the stream from its start.

    Fields:
      keepalive: SO_KEEPALIVE.
      urgent_inline: SO_OOBINLINE.
      user_timeout: TCP_USER_TIMEOUT, milliseconds.
      locks: bits for the buffer sizes that were set; 0 before Linux 5.16, which does not report
        them.
    """

    keepalive: int
    urgent_inline: int
    user_timeout: int
    locks: int


def inherited(sock: trio.socket.SocketType | socket.socket) -> Inherited:
    """The options that were set on ``sock``, or on the listening socket that accepted it."""
    if sys.platform != "linux":
        return Inherited(0, 0, 0, 0)  # on other systems every connection stays on TCP
    return Inherited(
        _option_or_zero(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        _option_or_zero(sock, socket.SOL_SOCKET, socket.SO_OOBINLINE),
        _option_or_zero(sock, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        _option_or_zero(sock, socket.SOL_SOCKET, _SO_BUF_LOCK),
    )


def receive_buffer_for(
    sock: trio.socket.SocketType,
    found: Inherited,
    config: Config,
    kind: Literal["software", "roce"],
) -> int:
    """Bytes of the RMBE for an accepted TCP connection.

    If SO_RCVBUF was set on the listening socket (the accepted socket inherits it), the result is
    that number and the size of an eye catcher, rounded up to 16 KiB << n; otherwise it is
    ``config.receive_buffer``.  So at least the requested number of bytes can be received (RFC 7609,
    4.1), with or without an eye catcher.
    """
    if found.locks & _RCVBUF_LOCKED:
        requested = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2 + len(EYE_CATCHER)
        config = replace(config, receive_buffer=requested)
    return config.receive_buffer_for(kind)


def _option_or_zero(sock: trio.socket.SocketType | socket.socket, level: int, option: int) -> int:
    try:
        return sock.getsockopt(level, option)
    except OSError:
        return 0
