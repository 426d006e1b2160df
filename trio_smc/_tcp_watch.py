"""One sleeper for the TCP connections of all SMC-R streams.

After the switch to SMC-R a TCP connection carries nothing, but how it ends matters: a reset is an
abort (RFC 7609, 4.8.2), a FIN is no end by itself, and data is a violation.  A Trio task for each
idle connection would cost more memory than the rest of it; all share one epoll here.
"""

from __future__ import annotations

import select
from typing import Protocol

import trio

from trio_smc._endpoint import unread_bytes

__all__ = ["TcpWatch", "TcpWatcher"]


class TcpWatcher(Protocol):
    """What is told about its TCP connection."""

    def tcp_reset(self) -> None:
        """It was reset."""

    def tcp_data(self) -> None:
        """The peer sent bytes on it."""


class TcpWatch:
    """Watches many sockets with one task (`run`)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[trio.socket.SocketType, TcpWatcher]] = {}

    def add(self, sock: trio.socket.SocketType, watcher: TcpWatcher) -> None:
        """Watch ``sock`` until `remove`."""
        self._watched[sock.fileno()] = (sock, watcher)
        # Edge-triggered: a FIN stays readable for ever.
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLET)

    def remove(self, sock: trio.socket.SocketType) -> None:
        """Must be called before ``sock`` is closed.  Idempotent."""
        if self._watched.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    async def run(self) -> None:
        """Serve until cancelled; never raises."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            self._look_at_all()

    def _look_at_all(self) -> None:
        # Apart from `run`, whose variables would keep the last stream, and its link group, alive.
        for number, events in self._epoll.poll(0):
            entry = self._watched.get(number)
            if entry is not None:
                _look(*entry, events)

    def close(self) -> None:
        """After `run` has ended."""
        self._epoll.close()


def _look(sock: trio.socket.SocketType, watcher: TcpWatcher, events: int) -> None:
    if events & select.EPOLLERR:
        watcher.tcp_reset()
    elif unread_bytes(sock):
        watcher.tcp_data()
