"""Listening TCP sockets that are known before they listen.

`trio.open_tcp_listeners` gives sockets that listen already; the TCP option must be asked for
before (`rendezvous.tcp_option`).
"""

from __future__ import annotations

import contextlib
import errno
import socket as stdlib_socket
import sys
from collections.abc import Callable
from typing import Final

import trio

__all__ = ["open_listening_sockets"]

# The kernel keeps it in 16 bits and may take more for less.
_MAX_BACKLOG: Final = 0xFFFF


async def open_listening_sockets(
    port: int,
    *,
    host: str | bytes | None,
    backlog: int | None,
    prepare: Callable[[trio.socket.SocketType], object],
) -> list[trio.socket.SocketType]:
    """Sockets as those of `trio.open_tcp_listeners`: same arguments, same errors.

    Args:
      prepare: called with each socket before it listens.
    """
    if not isinstance(port, int):
        raise TypeError(f"port must be an int, not {port!r}")
    if backlog is not None and not isinstance(backlog, int):
        raise TypeError(f"backlog must be an int or None, not {backlog!r}")
    waiting = _MAX_BACKLOG if backlog is None else min(backlog, _MAX_BACKLOG)
    found = await trio.socket.getaddrinfo(
        host, port, type=stdlib_socket.SOCK_STREAM, flags=stdlib_socket.AI_PASSIVE
    )
    unsupported: OSError | None = None
    with contextlib.ExitStack() as undo:
        listening = []
        for family, kind, protocol, _, address in found:
            try:
                # The program may have a socket factory, and `enable` is one of ours.
                made = trio.socket.socket(family, kind, protocol)
                sock = getattr(made, "plain", made)  # a socket that may become SMC-R wraps one
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                unsupported = error  # the other family may do
                continue
            undo.callback(sock.close)
            if sys.platform != "win32":
                sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
            if family == stdlib_socket.AF_INET6:
                sock.setsockopt(stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY, 1)
            prepare(sock)
            await sock.bind(address)
            sock.listen(waiting)
            listening.append(sock)
        if unsupported is not None and not listening:
            raise unsupported
        undo.pop_all()
        return listening
