"""`TcpStream`: a connection that stays plain TCP, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trio_smc._base.reasons import Fallback, Mode
from trio_smc._base.statistics import StreamStatistics
from trio_smc._stream import SmcStream, some_bytes, writable
from trio_smc._tcp import close_with_reset
from trio_smc._urgent import TcpUrgent, UrgentState, as_stream_errors

if TYPE_CHECKING:
    from typing_extensions import Buffer


__all__ = ["TcpStream"]


class TcpStream(SmcStream):
    """Plain TCP, and why."""

    mode = Mode.TCP
    link_group = None
    socket: trio.socket.SocketType

    def __init__(
        self, sock: trio.socket.SocketType, fallback: Fallback, *, urgent_inline: bool = False
    ) -> None:
        self.socket = sock
        self.fallback = fallback
        self._stream = trio.SocketStream(sock)
        self._urgent = TcpUrgent(sock, urgent_inline)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As `trio.SocketStream.send_all`."""
        if self._urgent.sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As `trio.SocketStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """As `trio.SocketStream.send_eof`."""
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """As `trio.SocketStream.receive_some`."""
        return await self._stream.receive_some(max_bytes)

    async def receive_some_into(self, buffer: Buffer) -> int:
        """As `trio.socket.SocketType.recv_into`, with a stream's errors."""
        with writable(buffer) as view, as_stream_errors(self.socket):
            return await self.socket.recv_into(view)

    async def send_urgent(self, data: bytes | bytearray | memoryview) -> None:
        """By MSG_OOB."""
        await self._urgent.send(self._stream, some_bytes(data))

    async def wait_urgent(self) -> UrgentState:
        """Wait for the exceptional condition of the socket."""
        return await self._urgent.wait()

    async def receive_urgent(self) -> bytes:
        """By MSG_OOB."""
        return await self._urgent.receive()

    async def aclose(self) -> None:
        """As `trio.SocketStream.aclose`."""
        self._urgent.closing()
        await self._stream.aclose()

    def statistics(self) -> StreamStatistics:
        """All zero."""
        return StreamStatistics()

    def setsockopt(
        self, level: int, option: int, value: int | Buffer | None, length: int | None = None
    ) -> None:
        """As `trio.SocketStream.setsockopt`."""
        if length is None and value is not None:
            self._stream.setsockopt(level, option, value)
        else:
            # It knows what is wrong with the rest of the combinations.
            self._stream.setsockopt(level, option, value, length)  # type: ignore[arg-type]

    def getsockopt(self, level: int, option: int, buffersize: int = 0) -> int | bytes:
        """As `trio.SocketStream.getsockopt`."""
        return self._stream.getsockopt(level, option, buffersize)

    def is_readable(self) -> bool:
        """As `trio.socket.SocketType.is_readable`."""
        return self.socket.fileno() < 0 or self.socket.is_readable()

    def abort(self) -> None:
        """Close with RST."""
        self._urgent.closing()
        close_with_reset(self.socket)


# See `SmcStream`.
trio.SocketStream.register(TcpStream)
