"""TCP sockets: identity, unread, unsent and carried bytes, urgent data, resets (tcp(7))."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
from typing import Final, Literal

import trio

from trio_smc._base.waits import notify_closing

__all__ = [
    "CLOSE",
    "CLOSE_WAIT",
    "ESTABLISHED",
    "SocketIdentity",
    "backlog",
    "carried_bytes",
    "close_past_program",
    "close_unread",
    "close_with_reset",
    "consume_error",
    "disconnect",
    "end_connection",
    "end_waits",
    "has_news",
    "has_urgent_byte",
    "is_established",
    "is_open",
    "peer_end",
    "queued",
    "resets_on_close",
    "tcp_state",
    "unread_bytes",
    "unsent_bytes",
]


if sys.platform == "linux":  # on other systems every connection is TCP and needs none of this
    import fcntl
    import termios

_SO_COOKIE: Final = 57  # asm-generic/socket.h
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DISCARDED: Final = 4096
_MOST_DISCARDED: Final = 16
"""Reads of this many bytes before a socket is closed.  Chosen: at most two CLC messages of a peer
are unread then."""

_BACKLOG = struct.Struct("=24xII")
"""Of struct tcp_info, for a listening socket: tcpi_unacked, the connections that wait, and
tcpi_sacked, the limit."""
_CARRIED = struct.Struct("=B127xQ8xI52xQQ")
"""Of struct tcp_info (linux/tcp.h, since Linux 4.19): tcpi_state, bytes_received, notsent_bytes,
bytes_sent, bytes_retrans."""
# linux/tcp_states.h
ESTABLISHED: Final = 1
FIN_WAIT2: Final = 5
"""This side's FIN has been acknowledged."""
CLOSE: Final = 7
"""The connection is gone: the peer has reset it, or it was never open."""
CLOSE_WAIT: Final = 8
"""The peer's FIN has arrived."""
_PEER_HAS_ENDED = {6, CLOSE, CLOSE_WAIT, 9, 11}  # and TIME_WAIT, LAST_ACK, CLOSING


class SocketIdentity:
    """Remembers a socket, and recognises it.

    A program may close the descriptor of a socket by its number.  The kernel then gives the number
    to another file, which the owner of the socket must leave alone.

    Raises:
      OSError: the socket is closed.
    """

    __slots__ = ("_cookie",)

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._cookie = _socket_cookie(sock)

    def is_of(self, sock: trio.socket.SocketType) -> bool:
        """True if the descriptor of ``sock`` is open, and belongs to the remembered socket."""
        try:
            return _socket_cookie(sock) == self._cookie
        except OSError:  # closed, or a file that is no socket
            return False


def _socket_cookie(sock: trio.socket.SocketType) -> bytes:
    """The kernel's number of a socket, which no other socket of the system has.

    A system without this number has inodes, which differ between sockets that are open.  If it does
    not tell the inode either, all sockets count as the same.

    Raises:
      OSError: the descriptor is closed.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
    except OSError:
        try:
            return b"inode %d" % os.fstat(sock.fileno()).st_ino
        except OSError as error:
            if error.errno == errno.EBADF:
                raise
            return b""


def close_with_reset(sock: trio.socket.SocketType) -> None:
    """Close a TCP socket so that the peer receives RST."""
    close_past_program(sock, reset=True)


def close_past_program(sock: trio.socket.SocketType, *, reset: bool) -> None:
    """Close the TCP socket of an SMC-R connection, whose stream the program may still use.

    Trio's `close` calls `trio.lowlevel.notify_closing`.  With the function that `enable` installs
    there, the program's calls of the stream would end.

    Args:
      reset: the peer receives RST.
    """
    if reset:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    end_waits(sock)
    if (number := sock.detach()) >= 0:
        socket.close(number)


def end_connection(sock: trio.socket.SocketType, *, reset: bool) -> bool:
    """End a TCP connection by FIN or RST, and leave its descriptor open, which then shows the end.

    Returns:
      False if only closing the socket can send RST.
    """
    if reset and not disconnect(sock):
        return False
    with contextlib.suppress(OSError):  # not connected
        sock.shutdown(socket.SHUT_RDWR)
    return True


def close_unread(sock: trio.socket.SocketType) -> None:
    """Close a TCP socket so that the peer reads the end, although bytes are unread.

    The kernel would reset the connection instead.  No-op if the socket is closed.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the descriptor is -1
        for _ in range(_MOST_DISCARDED):
            if not unread_bytes(sock.fileno()):
                break
            os.read(sock.fileno(), _DISCARDED)
    sock.close()


def consume_error(sock: trio.socket.SocketType) -> None:
    """Consume the error of a connection that the peer has reset: a socket that is read shows the
    end then."""
    with contextlib.suppress(OSError):
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def backlog(sock: trio.socket.SocketType | socket.socket) -> int:
    """How many connections may wait to be accepted; of a listening socket.  Raises OSError."""
    return _listen_queue(sock)[1]


def queued(sock: trio.socket.SocketType | socket.socket) -> int:
    """How many connections wait to be accepted; of a listening socket.  Raises OSError."""
    return _listen_queue(sock)[0]


def _listen_queue(sock: trio.socket.SocketType | socket.socket) -> tuple[int, int]:
    waiting, limit = _BACKLOG.unpack(_tcp_info(sock, _BACKLOG.size))
    return int(waiting), int(limit)


def _tcp_info(sock: trio.socket.SocketType | socket.socket, size: int) -> bytes:
    """The first ``size`` bytes of struct tcp_info.

    Raises OSError, also if the system returns less, as QEMU's emulation of system calls does.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    if len(info) < size:
        raise OSError(errno.ENOTSUP, "TCP_INFO is incomplete")
    return info


def disconnect(sock: trio.socket.SocketType | socket.socket) -> bool:
    """Reset a connection, and leave the socket open, to be connected again (connect(2),
    AF_UNSPEC); False if this cannot be done."""
    try:
        import ctypes  # takes milliseconds, and is seldom needed
    except (ImportError, OSError):  # no descriptor is free, for example
        return False
    connect = ctypes.CDLL(None, use_errno=True).connect
    return bool(sock.fileno() >= 0 and connect(sock.fileno(), bytes(16), 16) == 0)


def end_waits(sock: trio.socket.SocketType | socket.socket) -> None:
    """Make all tasks that wait for a socket raise ClosedResourceError.

    No-op if the socket is closed, because its number may belong to another file by now.
    """
    if sock.fileno() >= 0:
        notify_closing(sock)


def has_news(sock: trio.socket.SocketType | socket.socket) -> bool:
    """True if the peer has sent something over a TCP connection, or the connection is not open."""
    try:
        return not is_established(sock) or unread_bytes(sock.fileno()) > 0
    except OSError:
        return True  # closed


def tcp_state(sock: trio.socket.SocketType | socket.socket) -> int:
    """The state of a TCP connection (linux/tcp_states.h); 0, which is no state, if the system does
    not report it.  Raises OSError if the socket is closed."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError as error:
        if error.errno == errno.EBADF:
            raise
        return 0


def is_established(sock: trio.socket.SocketType | socket.socket) -> bool:
    """True if a TCP connection is open in both directions.  Raises OSError if it is closed.

    If the system does not report the state, a connection counts as open while it has a peer.
    """
    state = tcp_state(sock)
    if state:
        return state == ESTABLISHED
    try:
        sock.getpeername()
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.EINVAL):
            return False
        raise
    return True


def is_open(sock: trio.socket.SocketType | socket.socket) -> bool:
    """As `is_established`, and False for a socket that is closed."""
    try:
        return is_established(sock)
    except OSError:
        return False


def peer_end(sock: trio.socket.SocketType | socket.socket) -> Literal["none", "fin", "reset"]:
    """How the peer has ended a TCP connection.  A connection with unread bytes counts as reset."""
    try:
        state = tcp_state(sock)
        if state not in _PEER_HAS_ENDED:
            return "none"
        return "reset" if state == CLOSE or unread_bytes(sock.fileno()) else "fin"
    except OSError:
        return "reset"  # closed


def has_urgent_byte(sock: trio.socket.SocketType) -> bool:
    """True if an urgent byte has arrived and is unread (tcp(7), POLLPRI)."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLPRI)
    return any(events & select.POLLPRI for _, events in poll.poll(0))


def resets_on_close(sock: trio.socket.SocketType) -> bool:
    """True if closing the TCP socket would reset it: SO_LINGER is set with a time of 0.

    False if the program has closed its descriptor.
    """
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == _RESET_ON_CLOSE
    return False


def unread_bytes(sock: trio.socket.SocketType | int) -> int:
    """Bytes in the receive queue of a TCP socket.  A FIN does not count."""
    return _queue(sock, termios.FIONREAD)


def unsent_bytes(sock: trio.socket.SocketType | socket.socket) -> int:
    """Bytes in the send queue of a TCP socket that the peer has not acknowledged."""
    return _queue(sock, termios.TIOCOUTQ)


def carried_bytes(sock: trio.socket.SocketType) -> tuple[int, int]:
    """Bytes that were written to a TCP socket, and bytes that arrived from the peer.

    (0, 0) if the kernel does not count them.

    Raises:
      OSError: the socket is closed.
    """
    if sys.platform != "linux":
        return 0, 0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CARRIED.size)
    if len(info) < _CARRIED.size:
        return 0, 0
    state, received, not_sent, sent, sent_again = _CARRIED.unpack(info)
    # A FIN has a sequence number, and so the kernel counts it as a received byte.
    received -= received > 0 and state in _PEER_HAS_ENDED
    return sent - sent_again + not_sent, received


def _queue(sock: trio.socket.SocketType | socket.socket | int, request: int) -> int:
    answer = fcntl.ioctl(sock if isinstance(sock, int) else sock.fileno(), request, bytes(4))
    return int.from_bytes(answer, sys.byteorder)
