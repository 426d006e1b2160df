"""`TcpStream`: a connection over plain TCP, with the reason for TCP, and with urgent data."""

from __future__ import annotations

import contextlib
import errno
import select
import socket as stdlib_socket
from functools import cached_property
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final, Literal

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc._base.waits import notify_closing, wait_readable
from trio_smc.host.tcp import carried_bytes, close_with_reset, unread_bytes
from trio_smc.streams.parking import BROKEN, BUSY_DESCRIPTOR, BUSY_SENDING, CLOSED, Busy
from trio_smc.streams.stream import (
    NO_MORE_URGENT,
    STILL_IN_USE,
    ReceiveView,
    SmcStream,
    UrgentState,
    byte_view,
    checked_size,
    nonempty_byte_view,
    urgent_inline_error,
    writable_byte_view,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Buffer

    from trio_smc.streams.group_views import LinkGroupView


__all__ = [
    "TcpStream",
    "TcpUrgent",
    "as_stream_errors",
]


_VIEW_SIZE: Final = 128 * 1024
"""The most bytes of a view, each of which is copied: as `receive_some` of a stream over SMC-R."""


@ki_protected
class TcpStream(SmcStream):
    """A connection over plain TCP.

    Args:
      sock: the TCP connection, after its handshake.
      fallback: the reason for TCP.
      on_release: called once, before the socket is closed or detached.
      accepted: on a server, the peer's address from ``accept``.
      clc_begun: CLC messages were sent or received on the connection.
    """

    mode = Mode.TCP
    link_group: LinkGroupView | None = None
    socket: trio.socket.SocketType

    def __init__(
        self,
        sock: trio.socket.SocketType,
        fallback: Fallback,
        on_release: Callable[[TcpStream], None],
        *,
        accepted: Any = None,
        clc_begun: bool = False,
    ) -> None:
        self.socket = sock
        self.accepted: Any = accepted
        self.fallback: Fallback | None = fallback
        self._on_release: Callable[[TcpStream], None] | None = on_release
        self.viewing: Busy = Busy(BUSY_DESCRIPTOR)
        # The bytes of CLC messages, which are not counted as data of the application.
        self._handshake_bytes = _bytes_so_far(sock) if clc_begun else (0, 0)
        self._carried = self._handshake_bytes

    @cached_property
    def _stream(self) -> trio.SocketStream:
        # Created at the first use: its constructor sets socket options, and a program may use the
        # socket without this stream.
        return trio.SocketStream(self.socket)

    @cached_property
    def _urgent(self) -> TcpUrgent:
        # Few programs send urgent data, and a short connection is to cost no more than over TCP.
        return TcpUrgent(self.socket)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As `trio.SocketStream.send_all`."""
        if self._urgent.sending.taken:
            raise self._urgent.sending.error()
        if type(data) is bytes:
            await self._stream.send_all(data)
        else:
            # Trio's stream sends the rest of a view as a slice, and would slice by items.
            with byte_view(data) as view:
                await self._stream.send_all(view)

    async def wait_send_all_might_not_block(self) -> None:
        """As `trio.SocketStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As `trio.SocketStream.send_eof`."""
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As `trio.SocketStream.receive_some`."""
        if self.viewing.taken:
            raise self.viewing.error()
        return await self._stream.receive_some(max_bytes)

    async def receive_some_into(self, buffer: Buffer) -> int:
        """As `trio.socket.SocketType.recv_into`, with the errors of a stream."""
        if self.viewing.taken:
            raise self.viewing.error()
        with writable_byte_view(buffer) as view, as_stream_errors(self.socket):
            return await self.socket.recv_into(view)

    def receive_view(self, max_bytes: int | None = None) -> ReceiveView:
        """Lend a view of a copy, which MSG_PEEK makes; see `SmcStream.receive_view`."""
        return _PeekedView(self, _VIEW_SIZE if max_bytes is None else checked_size(max_bytes))

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """Send with MSG_OOB."""
        await self._urgent.send(self._stream, nonempty_byte_view(data))

    async def wait_urgent(self) -> UrgentState:
        """Wait for the exceptional condition of the socket."""
        return await self._urgent.wait()

    async def receive_urgent(self) -> bytes:
        """Receive with MSG_OOB."""
        return await self._urgent.receive()

    async def aclose(self) -> None:
        """As `trio.SocketStream.aclose`."""
        self.release_stream()
        await self._stream.aclose()

    def statistics(self) -> StreamStatistics:
        """The kernel's byte counts."""
        sent, received = self.carried()
        return StreamStatistics(bytes_sent=sent, bytes_received=received)

    def carried(self) -> tuple[int, int]:
        """Bytes sent and received, without the bytes of the CLC handshake."""
        try:  # noqa: SIM105 - each connection comes here, and this takes half the time
            self._carried = carried_bytes(self.socket)
        except OSError:
            pass  # the socket is closed: return the last counts
        (sent, received), (sent_before, received_before) = self._carried, self._handshake_bytes
        return sent - sent_before, received - received_before

    def release_stream(self) -> None:
        """Call before the socket is closed or detached.  Idempotent."""
        if "_urgent" in self.__dict__:  # made by its first use
            self._urgent.wake_waiter()
        if self._on_release is not None:
            on_release, self._on_release = self._on_release, None
            on_release(self)

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """As `trio.SocketStream.setsockopt`."""
        if length is None and value is not None:
            self._stream.setsockopt(level, option, value)
        else:
            # Trio's method rejects every other combination.
            self._stream.setsockopt(level, option, value, length)  # type: ignore[arg-type]

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`."""
        return self._stream.getsockopt(level, option, buffersize)

    def is_readable(self) -> bool:
        """As `trio.socket.SocketType.is_readable`."""
        return self.socket.fileno() < 0 or self.socket.is_readable()

    def close(self) -> None:
        """As close(2)."""
        self.release_stream()
        self.socket.close()

    def abort(self) -> None:
        """Close with a reset (RST)."""
        self.release_stream()
        close_with_reset(self.socket)


def _bytes_so_far(sock: trio.socket.SocketType) -> tuple[int, int]:
    """Bytes sent so far, and bytes received and read from the socket so far."""
    try:
        sent, received = carried_bytes(sock)
        return sent, received - unread_bytes(sock) if received else 0
    except OSError:
        return 0, 0  # the peer has reset the connection


# See `SmcStream`.
trio.SocketStream.register(TcpStream)


_URGENT_NOW: Final = stdlib_socket.MSG_OOB | stdlib_socket.MSG_DONTWAIT
_FAILURE_EVENTS: Final = select.EPOLLERR | select.EPOLLHUP


@ki_protected
class _PeekedView(ReceiveView):
    """A view of bytes that stay in the socket until the end of the block."""

    def __init__(self, stream: TcpStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._view = memoryview(b"")

    async def __aenter__(self) -> memoryview:
        stream = self._stream
        with stream.viewing, as_stream_errors(stream.socket):
            data = await stream.socket.recv(
                min(self._max_bytes, _VIEW_SIZE), stdlib_socket.MSG_PEEK
            )
        stream.viewing.taken = True
        # A `PickleBuffer` tells whether views are left, as in `Receiver.lend`.
        self._piece = memoryview(data)
        self._view = memoryview(PickleBuffer(self._piece))
        return self._begin(self._view)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stream, count = self._stream, self._end()
        stream.viewing.taken = False
        try:
            self._view.release()
            self._piece.release()
        except BufferError:
            if error is None:
                raise BufferError(STILL_IN_USE) from None
            return
        if count and stream.socket.fileno() >= 0:
            # The bytes are there, so this does not wait; MSG_TRUNC discards them (tcp(7)).
            with trio.CancelScope(shield=True), as_stream_errors(stream.socket):
                await stream.socket.recv(count, stdlib_socket.MSG_TRUNC)


@ki_protected
class TcpUrgent:
    """Urgent data of a TCP socket.

    Args:
      sock: the connected socket; its owner closes it.

    Attributes:
      sending: taken while a task sends urgent data.
    """

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self._epoll: select.epoll | None = None
        self.sending = Busy(BUSY_SENDING)
        self._waiting = Busy(BUSY_DESCRIPTOR)

    def wake_waiter(self) -> None:
        """Call before the socket is closed: wakes the waiting task."""
        if self._epoll is not None:
            notify_closing(self._epoll.fileno())

    async def send(self, stream: trio.SocketStream, data: memoryview) -> None:
        """Send ``data``, with the last byte as urgent; ``stream`` belongs to the same socket."""
        with self.sending:
            # Only the last byte with MSG_OOB: otherwise a partial send would make its own last byte
            # urgent.
            await stream.send_all(data[:-1])
            with as_stream_errors(self._sock):
                await self._sock.send(data[-1:], stdlib_socket.MSG_OOB)

    async def wait(self) -> UrgentState:
        """Wait until the kernel has the urgent byte, or its announcement."""
        await trio.lowlevel.checkpoint()
        with self._open_epoll() as epoll:
            while True:
                if self._is_present(epoll):
                    return "present"
                if not self._is_inline() and self._receive_now(stdlib_socket.MSG_PEEK) == "pending":
                    return "pending"
                await self._wait_for_event(epoll)

    async def receive(self) -> bytes:
        """Wait for the urgent byte and receive it."""
        await trio.lowlevel.checkpoint()
        with self._open_epoll() as epoll:
            while True:
                if self._is_inline():
                    raise urgent_inline_error()
                byte = self._receive_now()
                if isinstance(byte, bytes):
                    return byte
                if not self._is_present(epoll):
                    await self._wait_for_event(epoll)

    @contextlib.contextmanager
    def _open_epoll(self) -> Iterator[select.epoll]:
        with self._waiting:
            if self._sock.fileno() < 0:
                raise trio.ClosedResourceError(CLOSED)
            with select.epoll() as self._epoll:
                try:
                    self._epoll.register(self._sock.fileno(), select.EPOLLPRI | select.EPOLLRDHUP)
                    with as_stream_errors(self._sock):
                        yield self._epoll
                finally:
                    self._epoll = None

    @staticmethod
    async def _wait_for_event(epoll: select.epoll) -> None:
        await wait_readable(epoll.fileno())

    @staticmethod
    def _is_present(epoll: select.epoll) -> bool:
        """True if the urgent byte has arrived.  Raises if it can no longer arrive."""
        for _, events in epoll.poll(0):
            if events & select.EPOLLPRI:
                return True
            if events & _FAILURE_EVENTS:
                # Without the error number: reading SO_ERROR would clear it, and the next send or
                # receive must raise the error.
                raise trio.BrokenResourceError("the connection is broken")
            raise trio.EndOfChannel(NO_MORE_URGENT)
        return False

    def _is_inline(self) -> bool:
        return bool(self._sock.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_OOBINLINE))

    def _receive_now(self, flags: int = 0) -> bytes | Literal["pending", "none"]:
        """Receive the byte from the kernel, without waiting."""
        # Trio's recv would wait for data that is not urgent.
        raw = stdlib_socket.socket(fileno=self._sock.fileno())
        try:
            return raw.recv(1, _URGENT_NOW | flags) or "none"
        except BlockingIOError:
            return "pending"
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return "none"
        finally:
            raw.detach()


@contextlib.contextmanager
def as_stream_errors(sock: trio.socket.SocketType) -> Iterator[None]:
    """Turn the errors of a socket into those of a stream, but for EINVAL."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise
        if sock.fileno() < 0 or error.errno == errno.EBADF:
            raise trio.ClosedResourceError(CLOSED) from error
        raise trio.BrokenResourceError(BROKEN.format(error)) from error
