"""TCP sockets: what is unread, and how to end one by a reset."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

__all__ = [
    "close_with_reset",
    "unread_bytes",
]


if sys.platform == "linux":  # elsewhere every connection is TCP, and nobody asks
    import fcntl
    import termios

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def close_with_reset(sock: trio.socket.SocketType) -> None:
    """Close a TCP socket so that the peer gets RST."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    sock.close()


def unread_bytes(sock: trio.socket.SocketType) -> int:
    """Bytes in the receive queue of a TCP socket; a FIN is none."""
    answer = fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", answer)[0])
