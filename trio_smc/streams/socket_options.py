"""Socket options of SMC-R streams: which there are, what each means, and who acts on it.

Theory of operation
-------------------
`OPTIONS` is the whole truth: it drives `StreamOptions`, and docs/socket-options.md is made from
it.  An option belongs to one of five:

- the data path: the connection core does what TCP's send and receive buffers, Nagle's algorithm
  and the user timeout do;
- keepalive: links are tested, and the TCP connection sends probes of its own (RFC 7609, 4.5.3);
- closing: `RdmaStream.aclose` asks `StreamOptions.linger`;
- nobody: it has no meaning where bytes travel by RDMA writes; it is kept and returned;
- TCP, with every option that is not in the table: the kernel has it for the TCP connection.

What can be kept in the kernel's socket is kept there, so that options inherited from the listening
socket, or set by way of `SmcStream.socket`, count just as well.  The TCP connection may end before
the stream is closed; options are accepted and returned until then, as a reset socket does it.

Corked, or with TCP_NODELAY off, small writes go into the peer's RMBE at once and only the CDC
message that tells of them is put off: until the cork is pulled, or until what was told of before
has arrived (Nagle's algorithm).  Both end with a chunk's worth of data, with the window or the
send buffer full, with the stream's end, and after `MAX_MERGE_DELAY` seconds at the latest (RFC
7609, 4.5.2).

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
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from trio_smc.datapath.rmb import EYE_CATCHER

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
"""Seconds that the CDC message of a small write is put off at most."""
MIN_TCP_KEEPALIVE: Final = 10
"""Seconds; TCP probes for keepalive are sent no closer (RFC 7609, 4.5.3): links are tested."""
MIN_SEND_BUFFER: Final = 4096
"""Bytes; a smaller SO_SNDBUF is taken for this."""

_LINGER: Final = struct.Struct("ii")
_MAX_CHECK_INTERVAL: Final = 1.0
_INT_MAX: Final = 2**31 - 1

_Flush = Callable[[], None]
_FlushLater = Callable[[_Flush], None]
Key = tuple[int, int]
"""Level and number of an option."""


def int_or_bytes(value: int | Buffer | None) -> int | bytes:
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


_INT: Final = struct.Struct("i")


class Owner(StrEnum):
    """Who acts on an option of an SMC-R stream."""

    DATA_PATH = "data path"
    KEEPALIVE = "links and TCP"
    CLOSING = "closing"
    KEPT = "kept"
    REFUSED = "refused"
    TCP = "TCP connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the table.

    Attributes:
      level, name: as the socket module has them.
      owner: who acts on it.
      meaning: a sentence or two for users.
      number: where the socket module does not have it.
      write: called with an integer once the option was accepted; None: see `owner`.
      read: what `getsockopt` returns; None: what was set, else the TCP connection's value.
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
        """(level, number) for the kernel; None where this system does not have it."""
        number = getattr(socket, self.name, self.number)
        return None if number is None else (getattr(socket, self.level), number)


class KeepaliveGroup(Protocol):
    """What keepalive wants of a link group."""

    def keep_alive(self, user: Connection, seconds: float | None) -> None:
        """Test idle links this often while ``user`` is open; None: it asks for nothing."""


class StreamOptions:
    """The socket options of one SMC-R stream.

    Args:
      core, group: the connection and its link group.
      sock: its TCP connection.
      timers: of the stack.
      flush_later: how CDC messages are put off while no option says otherwise.
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
        self._nodelay = True  # as Trio has it
        self._corked = False
        self._merge_timer: Timer | None = None
        self._user_timeout = 0  # milliseconds
        self._progress_timer: Timer | None = None
        self._progress = ((0, 0.0), (0, 0.0))

    def set(self, level: int, option: int, value: int | Buffer | None, length: int | None) -> None:
        """As `trio.SocketStream.setsockopt`.

        Raises:
          OSError: EOPNOTSUPP for what an SMC-R stream cannot do; else what the kernel says.
        """
        if (value is None) is (length is None):
            raise TypeError("setsockopt: a value, or None and a length")
        row = _BY_KEY.get((level, option))
        if row is None or row.owner is Owner.TCP:
            self._set_tcp(level, option, value, length)
        elif row.owner is Owner.REFUSED:
            raise OSError(errno.EOPNOTSUPP, f"{row.name} cannot be had over SMC-R")
        elif row.owner is Owner.KEPT:
            self._keep_value((level, option), int_or_bytes(value))
        elif row.owner is Owner.CLOSING:
            self._set_tcp(level, option, value, length)
        elif row.write is None:
            raise OSError(errno.ENOPROTOOPT, f"{row.name} can only be read")
        else:
            row.write(self, integer(value))

    def get(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`.  Raises OSError."""
        row = _BY_KEY.get((level, option))
        if row is not None and row.read is not None:
            return _in_requested_form(row.read(self), buffersize)
        kept = self._kept.get((level, option))
        if kept is not None and (row is None or row.owner is Owner.KEPT or self._tcp_closed):
            return _in_requested_form(kept, buffersize)
        if self._tcp_closed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if buffersize:
            return self._sock.getsockopt(level, option, buffersize)
        return self._sock.getsockopt(level, option)

    @property
    def linger(self) -> int | None:
        """SO_LINGER: how many seconds `aclose` may wait, 0: abort; None: it is off."""
        if self._tcp_closed:
            return None
        on, seconds = _LINGER.unpack(
            self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.size)
        )
        return seconds if on else None

    # --- the TCP connection ------------------------------------------------------------------

    @property
    def _tcp_closed(self) -> bool:
        return self._sock.fileno() < 0

    def _set_tcp(
        self, level: int, option: int, value: int | Buffer | None, length: int | None
    ) -> None:
        if self._tcp_closed:
            self._keep_value((level, option), int_or_bytes(value))
        elif value is not None:
            self._sock.setsockopt(level, option, value)
        else:
            assert length is not None
            self._sock.setsockopt(level, option, None, length)

    def _keep_value(self, key: Key, value: int | bytes) -> None:
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
        limit = max(MIN_SEND_BUFFER, value) if value >= 0 else None
        self._core.limit_unacknowledged(limit)

    def send_buffer(self) -> int:
        """Bytes that may be unacknowledged."""
        limit = self._core.sender.send_limit
        return self._core.sender.peer_ring if limit is None else limit

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
            core.sender.merge_messages(self._delay, corked=True)
        elif self._nodelay:
            core.sender.merge_messages(self._flush_later)
        else:
            core.sender.merge_messages(self._delay_until_delivered, when_delivered=True)

    def _delay(self, flush: _Flush) -> None:
        if self._merge_timer is not None:
            self._merge_timer.cancel()
        self._merge_timer = self._timers.call_later(MAX_MERGE_DELAY, flush)

    def _delay_until_delivered(self, flush: _Flush) -> None:
        if not self._core.sender.quiet:
            self._delay(flush)
        elif self._flush_later is not None:
            self._flush_later(flush)
        else:
            flush()

    def set_urgent_inline(self, value: int) -> None:
        """SO_OOBINLINE."""
        self._core.receiver.urgent_inline = bool(value)
        self._core.wake_all()  # `receive_urgent` has no byte to wait for

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
        # As asked first, for the kernel to say whether it is a time at all.
        self._set_tcp(socket.IPPROTO_TCP, option, seconds, None)
        self._keep_value((socket.IPPROTO_TCP, option), seconds)
        self._set_tcp_time(option, seconds)
        self._apply_keepalive()

    def keepalive_time(self, option: int) -> int:
        """Seconds: what was asked for, else the system's."""
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
        """How long data may stay unacknowledged, or unsent for want of window; 0: any time."""
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
        """Compare with the last look: the hot path keeps no times for this."""
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
    """What the kernel reads as an int.  Raises OSError (EINVAL) when there are too few bytes."""
    kept = int_or_bytes(value)
    if isinstance(kept, int):
        return kept
    if len(kept) < _INT.size:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return int(_INT.unpack_from(kept)[0])


def _in_requested_form(value: int | bytes, buffersize: int) -> int | bytes:
    """As socket.getsockopt returns it: an int, or with a buffer size its bytes."""
    if not buffersize:
        return value if isinstance(value, int) else _INT.unpack(value[:4].ljust(4, b"\0"))[0]
    return (_INT.pack(value) if isinstance(value, int) else value)[:buffersize]


def _connection_error(options: StreamOptions) -> int:
    error = options._core.error
    return 0 if error is None else error.errno or 0


def _kept_rows(level: str, names: str, meaning: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(level=level, name=name, owner=Owner.KEPT, meaning=meaning)


def _tcp_rows(level: str, names: str, meaning: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(level=level, name=name, owner=Owner.TCP, meaning=meaning)


def _keepalive_time_entries(name: str) -> dict[str, Any]:
    """Row entries of TCP_KEEPIDLE and TCP_KEEPINTVL."""
    number = getattr(socket, name, 0)
    return {
        "name": name,
        "write": lambda options, value: options.set_keepalive_time(number, value),
        "read": lambda options: options.keepalive_time(number),
    }


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        level="SOL_SOCKET", name="SO_RCVBUF", owner=Owner.DATA_PATH,
        meaning="Read: bytes of this side's RMB element. Set: accepted, the element stays as it "
        "is (the TCP connection keeps the number). Set on a listener's socket it sizes the "
        "elements of connections accepted later, with 4 bytes for an eye catcher, rounded up to "
        "16 KiB << n and bounded by "
        "net.core.rmem_max; Config.receive_buffer has no such bound.",
        write=StreamOptions.set_receive_buffer, read=StreamOptions.receive_buffer,
    ),
    Option(
        level="SOL_SOCKET", name="SO_SNDBUF", owner=Owner.DATA_PATH,
        meaning=f"The most bytes that are posted and not yet acknowledged by the RNIC, at least "
        f"{MIN_SEND_BUFFER}: this stream's share of the send ring where the RNIC needs one. "
        "Unset: as many as the peer's RMB element holds. Returned as it was set, not doubled.",
        write=StreamOptions.set_send_buffer, read=StreamOptions.send_buffer,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_NODELAY", owner=Owner.DATA_PATH,
        meaning="On by default: the peer is told of every write at once. Off: of small writes "
        "when what it was told of before has arrived, with a quarter of its RMB element full, or "
        f"after {MAX_MERGE_DELAY} s.",
        write=StreamOptions.set_nodelay, read=StreamOptions.nodelay,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_CORK", owner=Owner.DATA_PATH,
        meaning="On: the peer is told of small writes together: when it is turned off, with a "
        f"quarter of the peer's RMB element full, at the stream's end, or after {MAX_MERGE_DELAY} "
        "s. Setting TCP_NODELAY tells it now.",
        write=StreamOptions.set_cork, read=StreamOptions.cork,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_USER_TIMEOUT", owner=Owner.DATA_PATH,
        meaning="Milliseconds that data may stay unacknowledged by the RNIC, or unsent because "
        "the peer's RMB element is full; then the stream is aborted, and its errors name "
        "ETIMEDOUT. 0: no limit. Up to a quarter of the time, 1 s at most, may come on top.",
        write=StreamOptions.set_user_timeout, read=StreamOptions.user_timeout,
    ),
    Option(
        level="SOL_SOCKET", name="SO_OOBINLINE", owner=Owner.DATA_PATH,
        meaning="On: urgent bytes that arrive from now on stay in the stream, and "
        "receive_urgent() has none. At first as Config.urgent_inline says.",
        write=StreamOptions.set_urgent_inline, read=StreamOptions.urgent_inline,
    ),
    Option(
        level="SOL_SOCKET", name="SO_ERROR", owner=Owner.DATA_PATH,
        meaning="Read: the error number that ended the connection, else 0. It stays.",
        read=_connection_error,
    ),
    Option(
        level="SOL_SOCKET", name="SO_KEEPALIVE", owner=Owner.KEEPALIVE,
        meaning="On: links of the link group that carried nothing for TCP_KEEPIDLE seconds are "
        "tested (TEST LINK), one test for all connections, at the shortest time that any asks "
        "for; Config.test_link_interval is an upper bound and holds without the option too. The "
        "TCP connection sends its own probes as well.",
        write=StreamOptions.set_keepalive, read=StreamOptions.keepalive,
    ),
    Option(
        level="IPPROTO_TCP", owner=Owner.KEEPALIVE,
        meaning="Seconds a link may be idle before it is tested. For the probes of the TCP "
        f"connection at least {MIN_TCP_KEEPALIVE}.",
        **_keepalive_time_entries("TCP_KEEPIDLE"),
    ),
    Option(
        level="IPPROTO_TCP", owner=Owner.KEEPALIVE,
        meaning="Seconds between unanswered probes of the TCP connection, at least "
        f"{MIN_TCP_KEEPALIVE} there. An unanswered TEST LINK ends a link after "
        "Config.test_link_timeout.",
        **_keepalive_time_entries("TCP_KEEPINTVL"),
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_KEEPCNT", owner=Owner.TCP,
        meaning="Unanswered probes of the TCP connection that end it, and the stream with it.",
    ),
    Option(
        level="SOL_SOCKET", name="SO_LINGER", owner=Owner.CLOSING,
        meaning="What aclose() does. Off: it waits until this side's data and its end are on "
        "their way. On with 0 s: it aborts the connection. On with n s: it waits for at most n "
        "seconds; what is left is finished in the background.",
    ),
    *_kept_rows(
        "SOL_SOCKET", "SO_RCVLOWAT SO_SNDLOWAT SO_RCVTIMEO SO_SNDTIMEO",
        "No meaning: tasks wait in Trio, not in the kernel.",
    ),
    *_kept_rows(
        "IPPROTO_TCP", "TCP_QUICKACK TCP_NOTSENT_LOWAT TCP_MAXSEG TCP_WINDOW_CLAMP "
        "TCP_CONGESTION",
        "No meaning: SMC-R has no segments, acknowledgements or congestion control of its own.",
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
        "Of the packets of the TCP connection.",
    ),
    *_tcp_rows("IPPROTO_IP", "IP_TOS IP_TTL", "Of the packets of the TCP connection."),
    *_tcp_rows("IPPROTO_TCP", "TCP_INFO", "What the kernel knows of the TCP connection."),
)  # fmt: skip
"""Every option that has a meaning of its own, or none, on an SMC-R stream."""

_BY_KEY: Final = {row.key: row for row in OPTIONS if row.key is not None}


_HEAD: Final = """\
<!-- Made by `python -m scripts.socket_options` from trio_smc/streams/socket_options.py. -->

# Socket options

`SmcStream.setsockopt` and `getsockopt` take what those of `trio.SocketStream` take. Over TCP, after
a fallback, they are those of the TCP socket. Over SMC-R:

| option | who acts on it | what it does |
| --- | --- | --- |
"""
_TAIL: Final = """
"kept": accepted, kept and returned. Every option that is not listed is the TCP connection's, as
`SmcStream.socket` has it. Connections inherit SO_RCVBUF, SO_SNDBUF, SO_KEEPALIVE and its times,
SO_LINGER and TCP_USER_TIMEOUT from the listening socket (the buffer sizes from Linux 5.16 on).
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
"""In `Inherited.locks`: somebody set SO_SNDBUF."""
_RCVBUF_LOCKED: Final = 2
_SO_BUF_LOCK: Final = 72


class Inherited(NamedTuple):
    """Options that act by themselves, as a TCP connection has them before it is a stream's.

    Fields:
      keepalive: SO_KEEPALIVE.
      user_timeout: TCP_USER_TIMEOUT, milliseconds.
      locks: which buffer sizes were set by hand; 0 where the kernel cannot tell (before Linux
        5.16).
    """

    keepalive: int
    user_timeout: int
    locks: int


def inherited(sock: trio.socket.SocketType | socket.socket) -> Inherited:
    """What somebody set on ``sock``, or on the listening socket that it comes from."""
    if sys.platform != "linux":
        return Inherited(0, 0, 0)  # every connection is TCP
    return Inherited(
        _option_or_zero(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE),
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

    SO_RCVBUF of the listening socket, when somebody set it (the accepted socket inherits that),
    and an eye catcher, rounded up to 16 KiB << n; else ``config.receive_buffer``.  At least as much
    as was asked for can be received (RFC 7609, 4.1), whatever the peer's elements look like.
    """
    if found.locks & _RCVBUF_LOCKED:
        asked = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2 + len(EYE_CATCHER)
        config = replace(config, receive_buffer=asked)
    return config.receive_buffer_for(kind)


def _option_or_zero(sock: trio.socket.SocketType | socket.socket, level: int, option: int) -> int:
    try:
        return sock.getsockopt(level, option)
    except OSError:
        return 0
