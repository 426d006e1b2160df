"""`TcpWatch`: one task that sees how the TCP connections under SMC-R streams end.

After the switch to SMC-R a TCP connection carries no data, but its end matters: a reset is an abort
(RFC 7609, 4.8.2), a FIN alone is no end, and data is a violation. A Trio task for each idle
connection would need more memory than the rest of the connection, so all share one epoll.

The table is indexed by descriptor number, because epoll reports these numbers. The program may have
the socket as well (AnyIO offers it as ``raw_socket``) and may close it at any time. Then the kernel
gives the number to the next file. So each entry keeps its socket, and an entry whose socket no
longer has the number is ignored.

A new connection is registered after `_REGISTER_DELAY`, so a very short connection saves two system
calls on each side. Events before the registration are not lost: epoll reports the state of a newly
registered socket.
"""

from __future__ import annotations

import contextlib
import math
import select
from typing import Final, Literal, Protocol

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.waits import wait_readable
from trio_smc.host.tcp import peer_end, unread_bytes

__all__ = ["TcpWatch", "TcpWatcher"]

_REGISTER_DELAY: Final = 0.05
"""Seconds until new connections are registered. An early reset is noticed that much later. Chosen;
a connection that ends before takes 25 µs less of 765, together with another change."""

_EVENTS_AT_ONCE: Final = 32
"""Events handled in one pass of the scheduler. Chosen; no measurement is recorded."""

_RETRY_DELAY: Final = 0.25
"""Seconds before the next try, if the kernel has no more epoll watches. Chosen."""


class TcpWatcher(Protocol):
    """A connection that is notified of events of its TCP connection."""

    def tcp_reset(self) -> None:
        """The peer has reset the TCP connection."""

    def tcp_data(self) -> None:
        """The peer has sent bytes on the TCP connection."""

    @property
    def owns_number(self) -> bool:
        """False if the program has closed the descriptor, perhaps by its number, which may belong
        to another file now."""


@ki_protected
class TcpWatch:
    """Watches many sockets with one task (`run`)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[trio.socket.SocketType, TcpWatcher]] = {}
        # The numbers that are not registered yet, and the time of their registration.
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

    @staticmethod
    def peer_end(sock: trio.socket.SocketType) -> Literal["none", "fin", "reset"]:
        """How the peer has ended the TCP connection, even if no event has told it yet."""
        return peer_end(sock)

    @staticmethod
    def has_bytes(sock: trio.socket.SocketType) -> bool:
        """True if bytes of the peer are unread on the TCP connection, even if no event has reported
        them yet.  Raises OSError if the socket is closed."""
        return unread_bytes(sock) > 0

    def remove(self, sock: trio.socket.SocketType) -> None:
        """Stop watching; to be called before ``sock`` is closed. Idempotent."""
        number = sock.fileno()
        entry = self._watched.get(number)
        if number < 0:
            self._remove_closed(sock)
        elif entry is not None and entry[0] is sock:
            del self._watched[number]
            if number in self._new:
                self._new.remove(number)
            else:
                with contextlib.suppress(OSError):  # the program has closed the number
                    self._epoll.unregister(number)

    def _remove_closed(self, sock: trio.socket.SocketType) -> None:
        """Remove a socket that the program has closed, which also removed it from the epoll."""
        for number, (watched, _) in self._watched.items():
            if watched is sock:
                del self._watched[number]
                self._new.discard(number)
                return

    def _entry(self, number: int) -> tuple[trio.socket.SocketType, TcpWatcher] | None:
        """The entry of a number; None if its socket no longer has the number."""
        entry = self._watched.get(number)
        return entry if entry is not None and entry[0].fileno() == number else None

    async def run(self) -> None:
        """Serve until cancelled; never raises."""
        while True:
            with trio.CancelScope(deadline=self._register_at) as self._sleep_scope:
                await wait_readable(self._epoll.fileno())
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
            entry = self._entry(number)
            if entry is None or not entry[1].owns_number:
                continue
            try:
                # Edge-triggered: a FIN stays readable for ever.
                self._epoll.register(number, select.EPOLLIN | select.EPOLLET)
            except OSError:  # there are no more epoll watches
                self._new = {number, *new}
                self._register_at = trio.current_time() + _RETRY_DELAY
                return

    def _handle_events(self) -> None:
        # Not in `run`: its variables would keep the last stream and its link group alive.
        for number, events in self._epoll.poll(0, _EVENTS_AT_ONCE):
            entry = self._entry(number)
            if entry is not None and entry[1].owns_number:
                _report_end(*entry, events)

    def abandon(self) -> None:
        """Give up in a forked child, which shares the epoll with its parent."""
        self._watched.clear()
        self._new.clear()
        self._epoll.close()

    def close(self) -> None:
        """Free the epoll, after `run` has ended."""
        self._epoll.close()


def _report_end(sock: trio.socket.SocketType, watcher: TcpWatcher, events: int) -> None:
    if events & select.EPOLLERR:
        watcher.tcp_reset()
    elif unread_bytes(sock):
        watcher.tcp_data()
