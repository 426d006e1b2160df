"""Urgent data of streams: over SMC-R by the connection core, over TCP by the kernel.

Trio has no wait for the exceptional condition that a socket with urgent data is in.  An epoll of
its own has: the urgent byte of the socket makes the epoll readable, and that can be waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket as stdlib_socket
from typing import TYPE_CHECKING, Final, Literal

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_smc.datapath.connection import Connection

__all__ = ["URGENT", "RdmaUrgent", "TcpUrgent", "UrgentState", "as_stream_errors"]

UrgentState = Literal["pending", "present"]

URGENT: Final = "on_urgent"
"""The core's waiter."""
_OVER: Final = "no urgent data will come: the peer has ended its side"
_LOOK: Final = stdlib_socket.MSG_OOB | stdlib_socket.MSG_DONTWAIT
_FAILED: Final = select.EPOLLERR | select.EPOLLHUP


class RdmaUrgent:
    """The receiving methods of `RdmaStream`, whose attributes these are."""

    _core: Connection
    _closed: bool
    _urgent_busy = False

    async def wait_urgent(self) -> UrgentState:
        """Wait for urgent data (RFC 7609, 4.7.5, 4.7.6)."""
        with self._alone():
            await trio.lowlevel.checkpoint()
            while not self._closed:
                match self._core.urgent:
                    case "pending":
                        return "pending"
                    case "present":
                        return "present"
                if self._core.urgent_over:
                    self._take_urgent()
                    raise trio.EndOfChannel(_OVER)
                await self._park(URGENT)
            raise trio.ClosedResourceError("the stream was closed")

    async def receive_urgent(self) -> bytes:
        """Receive the urgent byte."""
        with self._alone():
            await trio.lowlevel.checkpoint()
            while not self._closed:
                if self._core.urgent_inline:
                    raise _inline()
                byte = self._take_urgent()
                if byte is not None:
                    return bytes((byte,))
                if self._core.urgent_over:
                    raise trio.EndOfChannel(_OVER)
                await self._park(URGENT)
            raise trio.ClosedResourceError("the stream was closed")

    def _take_urgent(self) -> int | None:
        try:
            return self._core.receive_urgent()
        except OSError as error:
            raise self._translated(error) from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._urgent_busy:
            raise trio.BusyResourceError("another task waits for urgent data on this stream")
        self._urgent_busy = True
        try:
            yield
        finally:
            self._urgent_busy = False

    async def _park(self, waiter: str) -> bool:
        raise NotImplementedError

    def _translated(self, error: OSError) -> Exception:
        raise NotImplementedError


class TcpUrgent:
    """Urgent data of a TCP socket.

    Args:
      sock: the connected socket; stays its owner's.
      inline: leave the urgent byte in the stream (SO_OOBINLINE).
    """

    def __init__(self, sock: trio.socket.SocketType, inline: bool) -> None:
        self._sock = sock
        self._epoll: select.epoll | None = None
        self._sending = False
        if inline:
            with contextlib.suppress(OSError):  # the peer is gone: whoever reads will know
                sock.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_OOBINLINE, 1)

    @property
    def sending(self) -> bool:
        """Whether an urgent byte waits to be sent."""
        return self._sending

    def closing(self) -> None:
        """Call before the socket is closed: wakes whoever waits."""
        if self._epoll is not None:
            trio.lowlevel.notify_closing(self._epoll.fileno())

    async def send(self, stream: trio.SocketStream, data: memoryview) -> None:
        """Send ``data``, its last byte as urgent; ``stream`` is that of the socket."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            # One byte alone: of a partial send each part would end in an urgent byte.
            await stream.send_all(data[:-1])
            with as_stream_errors(self._sock):
                await self._sock.send(data[-1:], stdlib_socket.MSG_OOB)
        finally:
            self._sending = False

    async def wait(self) -> UrgentState:
        """Wait until the kernel has the urgent byte, or knows that one is coming."""
        await trio.lowlevel.checkpoint()
        with self._watching() as epoll:
            while True:
                if self._present(epoll):
                    return "present"
                if not self._inline() and self._receive(stdlib_socket.MSG_PEEK) == "pending":
                    return "pending"
                await self._sleep(epoll)

    async def receive(self) -> bytes:
        """Receive the urgent byte, waiting for it."""
        await trio.lowlevel.checkpoint()
        with self._watching() as epoll:
            while True:
                if self._inline():
                    raise _inline()
                found = self._receive()
                if isinstance(found, bytes):
                    return found
                if not self._present(epoll):
                    await self._sleep(epoll)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[select.epoll]:
        if self._epoll is not None:
            raise trio.BusyResourceError("another task waits for urgent data on this stream")
        if self._sock.fileno() < 0:
            raise trio.ClosedResourceError("the stream was closed")
        with select.epoll() as self._epoll:
            try:
                self._epoll.register(self._sock.fileno(), select.EPOLLPRI | select.EPOLLRDHUP)
                with as_stream_errors(self._sock):
                    yield self._epoll
            finally:
                self._epoll = None

    @staticmethod
    async def _sleep(epoll: select.epoll) -> None:
        await trio.lowlevel.wait_readable(epoll.fileno())

    @staticmethod
    def _present(epoll: select.epoll) -> bool:
        """Whether the byte is there; raises when it can never be."""
        for _, events in epoll.poll(0):
            if events & select.EPOLLPRI:
                return True
            if events & _FAILED:
                # Not asked what: the one who reads or writes has to learn it.
                raise trio.BrokenResourceError("the connection is broken")
            raise trio.EndOfChannel(_OVER)
        return False

    def _inline(self) -> bool:
        return bool(self._sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_OOBINLINE))

    def _receive(self, flags: int = 0) -> bytes | Literal["pending", "none"]:
        """Ask the kernel for the byte."""
        # Trio's recv would wait for data that is not urgent.
        raw = stdlib_socket.socket(fileno=self._sock.fileno())
        try:
            return raw.recv(1, _LOOK | flags) or "none"
        except BlockingIOError:
            return "pending"
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return "none"
        finally:
            raw.detach()


def _inline() -> OSError:
    return OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: urgent data stays in the stream")


@contextlib.contextmanager
def as_stream_errors(sock: trio.socket.SocketType) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise
        if sock.fileno() < 0 or error.errno == errno.EBADF:
            raise trio.ClosedResourceError("the stream was closed") from error
        raise trio.BrokenResourceError(f"the connection is broken: {error}") from error
