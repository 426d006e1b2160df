"""Socket options of SMC-R streams: one table says what each means and who acts on it.

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
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from trio_smc._option_actions import (
    HOLD,
    LEAST_SEND_BUFFER,
    LEAST_TCP_KEEPALIVE,
    Key,
    OptionActions,
    plain,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OPTIONS", "Option", "Owner", "StreamOptions", "render"]

_INT: Final = struct.Struct("i")


class Owner(StrEnum):
    """Who acts on an option of an SMC-R stream."""

    DATA_PATH = "data path"
    KEEPALIVE = "links and TCP"
    CLOSING = "closing"
    NOBODY = "kept"
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


class StreamOptions(OptionActions):
    """The socket options of one SMC-R stream."""

    __slots__ = ()

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
        elif row.owner is Owner.NOBODY:
            self._keep((level, option), plain(value))
        elif row.owner is Owner.CLOSING:
            self._set_tcp(level, option, value, length)
        elif row.write is None:
            raise OSError(errno.ENOPROTOOPT, f"{row.name} can only be read")
        else:
            row.write(self, _integer(value))

    def get(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`.  Raises OSError."""
        row = _BY_KEY.get((level, option))
        if row is not None and row.read is not None:
            return _as_wanted(row.read(self), buffersize)
        kept = self._kept.get((level, option))
        if kept is not None and (row is None or row.owner is Owner.NOBODY or self._tcp_gone):
            return _as_wanted(kept, buffersize)
        if self._tcp_gone:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if buffersize:
            return self._sock.getsockopt(level, option, buffersize)
        return self._sock.getsockopt(level, option)


def _integer(value: int | Buffer | None) -> int:
    """What the kernel reads as an int."""
    kept = plain(value)
    if isinstance(kept, int):
        return kept
    if len(kept) < _INT.size:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return int(_INT.unpack_from(kept)[0])


def _as_wanted(value: int | bytes, buffersize: int) -> int | bytes:
    """As socket.getsockopt returns it: an int, or with a buffer size its bytes."""
    if not buffersize:
        return value if isinstance(value, int) else _INT.unpack(value[:4].ljust(4, b"\0"))[0]
    return (_INT.pack(value) if isinstance(value, int) else value)[:buffersize]


def _error(options: StreamOptions) -> int:
    error = options._core.error
    return 0 if error is None else error.errno or 0


def _kept(level: str, names: str, meaning: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(level=level, name=name, owner=Owner.NOBODY, meaning=meaning)


def _of_tcp(level: str, names: str, meaning: str) -> Iterator[Option]:
    for name in names.split():
        yield Option(level=level, name=name, owner=Owner.TCP, meaning=meaning)


def _time(name: str) -> dict[str, Any]:
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
        "elements of connections accepted later, rounded up to 16 KiB << n and bounded by "
        "net.core.rmem_max; Config.receive_buffer has no such bound.",
        write=StreamOptions.set_receive_buffer, read=StreamOptions.receive_buffer,
    ),
    Option(
        level="SOL_SOCKET", name="SO_SNDBUF", owner=Owner.DATA_PATH,
        meaning=f"The most bytes that are posted and not yet acknowledged by the RNIC, at least "
        f"{LEAST_SEND_BUFFER}: this stream's share of the send ring where the RNIC needs one. "
        "Unset: as many as the peer's RMB element holds. Returned as it was set, not doubled.",
        write=StreamOptions.set_send_buffer, read=StreamOptions.send_buffer,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_NODELAY", owner=Owner.DATA_PATH,
        meaning="On by default: the peer is told of every write at once. Off: of small writes "
        "when what it was told of before has arrived, with a quarter of its RMB element full, or "
        f"after {HOLD} s.",
        write=StreamOptions.set_nodelay, read=StreamOptions.nodelay,
    ),
    Option(
        level="IPPROTO_TCP", name="TCP_CORK", owner=Owner.DATA_PATH,
        meaning="On: the peer is told of small writes together: when it is turned off, with a "
        f"quarter of the peer's RMB element full, at the stream's end, or after {HOLD} s. "
        "Setting TCP_NODELAY tells it now.",
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
        read=_error,
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
        f"connection at least {LEAST_TCP_KEEPALIVE}.",
        **_time("TCP_KEEPIDLE"),
    ),
    Option(
        level="IPPROTO_TCP", owner=Owner.KEEPALIVE,
        meaning="Seconds between unanswered probes of the TCP connection, at least "
        f"{LEAST_TCP_KEEPALIVE} there. An unanswered TEST LINK ends a link after "
        "Config.test_link_timeout.",
        **_time("TCP_KEEPINTVL"),
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
    *_kept(
        "SOL_SOCKET", "SO_RCVLOWAT SO_SNDLOWAT SO_RCVTIMEO SO_SNDTIMEO",
        "No meaning: tasks wait in Trio, not in the kernel.",
    ),
    *_kept(
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
    *_of_tcp(
        "SOL_SOCKET", "SO_PRIORITY SO_MARK SO_BINDTODEVICE",
        "Of the packets of the TCP connection.",
    ),
    *_of_tcp("IPPROTO_IP", "IP_TOS IP_TTL", "Of the packets of the TCP connection."),
    *_of_tcp("IPPROTO_TCP", "TCP_INFO", "What the kernel knows of the TCP connection."),
)  # fmt: skip
"""Every option that has a meaning of its own, or none, on an SMC-R stream."""

_BY_KEY: Final = {row.key: row for row in OPTIONS if row.key is not None}


_HEAD: Final = """\
<!-- Generated by `python -m scripts.socket_options`; edit trio_smc/_options.py instead. -->

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
