"""`TcpWatch`: one task that sees how the TCP connections under SMC-R streams end.

After the switch to SMC-R a TCP connection carries nothing, but how it ends matters: a reset is an
abort (RFC 7609, 4.8.2), a FIN is no end by itself, and data is a violation. A Trio task for each
idle connection would cost more memory than the rest of it; all share one epoll here.

The table is by descriptor number, which is what an epoll reports. The program may have got hold of
the socket, too (AnyIO hands it out as ``raw_socket``), and may close it at any time; then the
kernel gives its number to the next file. So each entry keeps the socket, and counts only while
that has the number.

A connection that ends within a moment never gets there, which would cost it two system calls at
each end. What comes before it is registered is found then: an epoll says how a new socket is.
"""

from __future__ import annotations

import math
import select
from typing import Final, Protocol

import trio

from trio_smc.host.tcp import unread_bytes

__all__ = ["TcpWatch", "TcpWatcher"]

_REGISTER_DELAY: Final = 0.05
"""Seconds until new connections are registered: how late an early reset may be noticed."""


_EVENTS_AT_ONCE: Final = 32
"""Connections whose ends are looked at before others have their turn."""


_RETRY_DELAY = 0.25
"""Seconds after which those are tried again for which there were no epoll watches."""


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
        # Of these, who is not registered yet, and when that will be done.
        self._new: set[int] = set()
        self._register_at = math.inf
        self._sleep_scope = trio.CancelScope()  # around the task's sleep

    def add(self, sock: trio.socket.SocketType, watcher: TcpWatcher) -> None:
        """Watch ``sock`` until `remove`."""
        number = sock.fileno()
        self._watched[number] = (sock, watcher)
        self._new.add(number)
        if self._register_at == math.inf:
            self._register_at = self._sleep_scope.deadline = trio.current_time() + _REGISTER_DELAY

    def remove(self, sock: trio.socket.SocketType) -> None:
        """To be called before ``sock`` is closed. Idempotent."""
        number = sock.fileno()
        if number < 0:
            self._remove_closed(sock)
        elif self._entry(number) is not None:
            del self._watched[number]
            if number in self._new:
                self._new.remove(number)
            else:
                self._epoll.unregister(number)

    def _remove_closed(self, sock: trio.socket.SocketType) -> None:
        """The program has closed ``sock``, and with it its place in the epoll."""
        for number, (watched, _) in self._watched.items():
            if watched is sock:
                del self._watched[number]
                self._new.discard(number)
                return

    def _entry(self, number: int) -> tuple[trio.socket.SocketType, TcpWatcher] | None:
        """The entry of a number; None if there is none whose socket still has it."""
        entry = self._watched.get(number)
        return entry if entry is not None and entry[0].fileno() == number else None

    async def run(self) -> None:
        """Serve until cancelled; never raises."""
        while True:
            with trio.CancelScope(deadline=self._register_at) as self._sleep_scope:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
            if self._epoll.closed:
                await trio.sleep_forever()  # in a forked child
            if trio.current_time() >= self._register_at:
                self._register_new()
            self._handle_events()

    def _register_new(self) -> None:
        self._register_at = math.inf
        new, self._new = self._new, set()
        while new:
            number = new.pop()
            if self._entry(number) is None:
                continue
            try:
                # Edge-triggered: a FIN stays readable for ever.
                self._epoll.register(number, select.EPOLLIN | select.EPOLLET)
            except OSError:  # there are too many epoll watches: again in a moment
                self._new = {number, *new}
                self._register_at = trio.current_time() + _RETRY_DELAY
                return

    def _handle_events(self) -> None:
        # Apart from `run`, whose variables would keep the last stream, and its link group, alive.
        for number, events in self._epoll.poll(0, _EVENTS_AT_ONCE):
            entry = self._entry(number)
            if entry is not None:
                _report_end(*entry, events)

    def abandon(self) -> None:
        """This process is a forked child: the set of watched sockets is shared with its parent."""
        self._watched.clear()
        self._new.clear()
        self._epoll.close()

    def close(self) -> None:
        """After `run` has ended."""
        self._epoll.close()


def _report_end(sock: trio.socket.SocketType, watcher: TcpWatcher, events: int) -> None:
    if events & select.EPOLLERR:
        watcher.tcp_reset()
    elif unread_bytes(sock):
        watcher.tcp_data()
