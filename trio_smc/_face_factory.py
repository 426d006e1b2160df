"""Where `SocketFace`s come from: Trio's socket factory, and sockets of the standard library."""

from __future__ import annotations

import errno
import socket as stdlib_socket
from typing import Final

import trio

from trio_smc._face import FindStack, SocketFace

__all__ = ["FaceFactory"]

# Trio's own, taken before `enable` puts another in its place.
_make_plain: Final = trio.socket.from_stdlib_socket
_TCP: Final = {0, stdlib_socket.IPPROTO_TCP}


def _is_tcp(family: int, kind: int, protocol: int) -> bool:
    """Whether such a socket is one of TCP's."""
    return (
        family in (stdlib_socket.AF_INET, stdlib_socket.AF_INET6)
        and kind & 0xF == stdlib_socket.SOCK_STREAM
        and protocol in _TCP
    )


class FaceFactory(trio.abc.SocketFactory):
    """What `trio.socket.set_custom_socket_factory` takes.

    Args:
      find_stack: which stack new connections and listeners use.
    """

    def __init__(self, find_stack: FindStack) -> None:
        self._find_stack = find_stack

    def socket(
        self, family: int | None = None, type: int | None = None, proto: int | None = None
    ) -> trio.socket.SocketType:
        """A new socket: a face for TCP, Trio's own for anything else."""
        return self.wrap(
            stdlib_socket.socket(
                stdlib_socket.AF_INET if family is None else family,
                stdlib_socket.SOCK_STREAM if type is None else type,
                0 if proto is None else proto,
            )
        )

    def wrap(self, sock: stdlib_socket.socket) -> trio.socket.SocketType:
        """What stands for ``sock`` in Trio: see `trio.socket.from_stdlib_socket`.

        A connected socket stays what it is: its handshake was or is somebody else's.
        """
        plain = _make_plain(sock)
        if not _is_tcp(sock.family, sock.type, sock.proto) or _is_connected(sock):
            return plain
        return SocketFace(plain, self._find_stack)


def _is_connected(sock: stdlib_socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True
