"""Files that get the descriptor number of one that was closed, as the kernel gives it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import trio

__all__ = ["Victim", "reusing"]

_MOST = 200


@contextmanager
def reusing(number: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected pair of sockets, of which the first has this number."""
    with ExitStack() as exits:
        for _ in range(_MOST):
            pair = socket.socketpair()
            for sock in pair:
                exits.enter_context(sock)
                sock.setblocking(False)
            numbers = [sock.fileno() for sock in pair]
            if number in numbers:
                yield pair if numbers[0] == number else (pair[1], pair[0])
                return
        raise AssertionError(f"descriptor {number} is still open")


class Victim:
    """A task that waits for its own socket, which has nothing to do with the one before it."""

    def __init__(self, sock: socket.socket, peer: socket.socket) -> None:
        self.sock = sock
        self.peer = peer
        self.data: list[bytes] = []

    async def run(self) -> None:
        """Receive one byte; any error of another's doing is raised."""
        await trio.lowlevel.wait_readable(self.sock)
        self.data.append(self.sock.recv(10))
        self.peer.close()
