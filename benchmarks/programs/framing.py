"""Messages over a stream: the size in 4 bytes, then the data."""

from __future__ import annotations

from typing import Final

import trio

from benchmarks.programs.common import READ

__all__ = ["Messages"]

_SIZE: Final = 4


class Messages:
    """Messages over a stream; several tasks may send."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._unread = bytearray()
        self._sending = trio.Lock()

    async def send(self, data: bytes | memoryview) -> None:
        """Send a message; a large one without copying it behind its size."""
        header = len(data).to_bytes(_SIZE)
        async with self._sending:
            if len(data) < READ:
                await self._stream.send_all(header + data)
            else:
                await self._stream.send_all(header)
                await self._stream.send_all(data)

    async def receive(self) -> bytes | None:
        """Return the next message, or None at the end of the stream."""
        if not await self._have(_SIZE):
            return None
        size = _SIZE + int.from_bytes(self._unread[:_SIZE])
        if not await self._have(size):
            raise EOFError("the peer closed in the middle of a message")
        message = bytes(self._unread[_SIZE:size])
        del self._unread[:size]
        return message

    async def _have(self, size: int) -> bool:
        while len(self._unread) < size:
            data = await self._stream.receive_some(max(READ, size - len(self._unread)))
            if not data:
                return False
            self._unread += data
        return True
