"""The server of a benchmark, over any transport.

A connection begins with nine bytes from the client, a letter and a size:
E  echo: the server sends every `size` bytes back
S  stream: the server reads pieces of at most `size` bytes to the end, then answers how many
   bytes it got (8 bytes) and the `processor_time` that its side used for them (8 bytes, ns); the
   client's clock stops at that answer
T  time: the server answers the time at which its handler began (8 bytes, ns of the clock of this
   host)
"""

from __future__ import annotations

import contextlib
import struct
import time

from benchmarks.transports import Stream, processor_time

__all__ = ["COUNT", "MESSAGE", "REQUEST", "TIME", "answer", "exactly"]

REQUEST = struct.Struct("!cQ")
COUNT = struct.Struct("!QQ")
TIME = struct.Struct("!Q")
MESSAGE = 64


async def exactly(stream: Stream, size: int) -> bytes:
    """Receive exactly `size` bytes.  Raises EOFError."""
    data = await stream.receive_some(size)
    if len(data) == size:
        return bytes(data)
    whole = bytearray(data)
    while len(whole) < size:
        data = await stream.receive_some(size - len(whole))
        if not data:
            raise EOFError("the peer closed in the middle of a message")
        whole += data
    return bytes(whole)


async def answer(stream: Stream) -> None:
    """Serve one connection until the client closes it."""
    accepted = time.monotonic_ns()
    with contextlib.suppress(EOFError):
        letter, size = REQUEST.unpack(await exactly(stream, REQUEST.size))
        if letter == b"T":
            await stream.send_all(TIME.pack(accepted))
        elif letter == b"S":
            await _count(stream, size)
        else:
            while True:
                await stream.send_all(await exactly(stream, size))


async def _count(stream: Stream, size: int) -> None:
    total = 0
    used = processor_time()
    while data := await stream.receive_some(size):
        total += len(data)
    await stream.send_all(COUNT.pack(total, processor_time() - used))
