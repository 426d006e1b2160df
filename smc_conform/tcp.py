"""The TCP connection of a check: raw CLC messages, and how the implementation ends it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Literal

import trio

from smc_conform.messages import DECLINE, EYE_CATCHER, Message, read
from smc_conform.trace import Trace
from smc_conform.waits import Watched

__all__ = ["Tcp"]

_CLC_HEADER = 8


class Tcp(Watched):
    """One TCP connection.  A task reads it all the time, so its end is noticed at once.

    Attributes:
      sock: the socket.
      buffer: received bytes that no step has taken.
      segments: offsets at which a message is split into TCP segments.
      declined: an SMC Decline was taken.
      end: how the implementation has ended its direction; None while it is open.
    """

    def __init__(
        self, stream: trio.SocketStream, trace: Trace, changed: Callable[[], None]
    ) -> None:
        self.sock = stream.socket
        self.buffer = bytearray()
        self.segments: tuple[int, ...] = ()
        self.declined = False
        self.end: Literal["FIN", "RST"] | None = None
        self._stream = stream
        self._trace = trace
        self._changed = changed

    @property
    def local(self) -> str:
        """The suite's address."""
        return str(self.sock.getsockname()[0])

    @property
    def ended(self) -> str:
        return f"the implementation has ended the TCP connection by {self.end}" if self.end else ""

    async def run(self) -> None:
        """Read until the end."""
        try:
            while True:
                data = await self._stream.receive_some()
                if not data:
                    self.end = "FIN"
                    break
                self.buffer += data
                self._changed()
        except trio.ClosedResourceError:
            return  # by the check itself
        except trio.BrokenResourceError:
            self.end = "RST"
        self._trace.note(f"the implementation ends the TCP connection: {self.end}", arrow="<-")
        self._changed()

    async def send(self, data: bytes) -> None:
        """Send bytes.  An error is ignored: `end` shows it, and the next step will fail."""
        self._trace.clc(self, True, data)
        begin = 0
        with contextlib.suppress(trio.BrokenResourceError):
            for end in (*self.segments, len(data)):
                await self._stream.send_all(data[begin:end])
                begin = end
                if end < len(data):
                    await self._delivered()

    async def _delivered(self) -> None:
        """Wait until the peer's kernel has the data, so that more data is another segment."""
        unsent = bytes(4)
        # The kernel reports no event.
        while fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4)) != unsent:  # noqa: ASYNC110
            await trio.sleep(0.001)

    async def send_eof(self) -> None:
        """Send FIN."""
        self._trace.note("FIN", arrow="->", channel="TCP")
        with contextlib.suppress(trio.BrokenResourceError, OSError):
            await self._stream.send_eof()

    def reset(self) -> None:
        """Send RST."""
        self._trace.note("RST", arrow="->", channel="TCP")
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    @property
    def is_foreign(self) -> bool:
        """True if the buffer does not begin with a CLC message."""
        return not EYE_CATCHER.startswith(self.buffer[: len(EYE_CATCHER)])

    def take_clc(self) -> Message | None:
        """Take a CLC message from the buffer, if it is complete."""
        if len(self.buffer) < _CLC_HEADER or self.is_foreign:
            return None
        length = max(_CLC_HEADER, int.from_bytes(self.buffer[5:7], "big"))
        if len(self.buffer) < length:
            return None
        raw = bytes(self.buffer[:length])
        del self.buffer[:length]
        self._trace.clc(self, False, raw)
        message = read(raw, clc=True)
        self.declined |= message.layout is DECLINE
        return message

    def take(self) -> bytes:
        """Take everything from the buffer."""
        data = bytes(self.buffer)
        self.buffer.clear()
        if data:
            self._trace.clc(self, False, data)
        return data
