"""Options that an accepted TCP connection has from its listening socket, before it is a stream's.

So has a connecting one whose socket was made, and its options set, by somebody else.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    import trio

    from trio_smc._base.config import Config

__all__ = ["SNDBUF_LOCKED", "Inherited", "inherited", "receive_buffer_for"]

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


def inherited(sock: trio.socket.SocketType) -> Inherited:
    """What somebody set on ``sock``, or on the listening socket that it comes from."""
    return Inherited(
        _get(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        _get(sock, socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None)),
        _get(sock, socket.SOL_SOCKET, _SO_BUF_LOCK) if sys.platform == "linux" else 0,
    )


def receive_buffer_for(
    sock: trio.socket.SocketType,
    found: Inherited,
    config: Config,
    kind: Literal["software", "roce"],
) -> int:
    """Bytes of the RMBE for an accepted TCP connection.

    SO_RCVBUF of the listening socket, when somebody set it (the accepted socket inherits that),
    rounded up to 16 KiB << n; else ``config.receive_buffer``.
    """
    if found.locks & _RCVBUF_LOCKED:
        asked = max(1, sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2)
        config = replace(config, receive_buffer=asked)
    return config.receive_buffer_for(kind)


def _get(sock: trio.socket.SocketType, level: int, option: int | None) -> int:
    try:
        return 0 if option is None else sock.getsockopt(level, option)
    except OSError:
        return 0
