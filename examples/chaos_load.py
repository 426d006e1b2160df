"""The traffic of `chaos.py`: conversations in which both sides know every byte in advance.

Each connection carries one conversation. Its first 16 bytes are a seed, a number and a scale, from
which both sides derive the rest. In each direction the value of a byte follows from its position.
After the last byte come the SHA-256 of all bytes and the end of the stream. A byte that is lost,
doubled, swapped or from another connection is therefore detected, with its position.

Kinds: "stream" sends both ways at the same time, in writes of 1 byte to 256 KiB. "request" sends
requests and answers in turn. "urgent" sends requests whose last byte is urgent. In "half-close" one
side sends and ends its direction, then the other does. "abort" is like "stream", but the client
aborts somewhere in the middle.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import trio

from trio_smc import SmcStream

__all__ = ["KINDS", "Conversation", "EndedEarly", "Wrong"]

HEADER = struct.Struct("!QII")
KINDS = ("stream", "request", "urgent", "half-close", "abort")
_WEIGHTS = (5, 5, 2, 4, 1)
_BLOCK = 1_000_003  # a prime, so that bytes at a distance of a power of two differ
_NOISE = memoryview(random.Random(7609).randbytes(_BLOCK) * 2)
_LARGEST = 256 * 1024
_DIGEST = hashlib.sha256().digest_size


class Wrong(Exception):
    """A byte differs from the expected one."""


class EndedEarly(Wrong):
    """The stream ended in the middle, without an error.

    As over TCP, that is the end of a peer whose process was killed.
    """


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return int(least * (most / least) ** rng.random())


def _text(start: int, position: int, size: int) -> memoryview:
    offset = (start + position) % _BLOCK
    return _NOISE[offset : offset + size]


@dataclass(kw_only=True)
class Conversation:
    """One side of a conversation, and its progress.

    Attributes:
      seed: determines everything.
      number: the number of the conversation; `scale`: its size, in percent of the usual one.
      sent_all: this side has sent its last byte. The peer does not always notice the loss of a
        later message.
      pause: longest time between two pieces of a "stream", seconds.
      received: bytes received.
      activity: the current step, for a report about a conversation that hangs.
    """

    stream: SmcStream
    seed: int
    number: int
    scale: int = 100
    client: bool = True
    sent_all: bool = False
    aborted: bool = False
    pause: float = 0.0
    received: int = 0
    activity: str = "begins"
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        plan = self._rng("kind")
        [self.kind] = plan.choices(KINDS, _WEIGHTS)
        self._out = self._in = 0
        self._out_hash, self._in_hash = hashlib.sha256(), hashlib.sha256()
        starts = plan.randrange(_BLOCK), plan.randrange(_BLOCK)
        self._out_start, self._in_start = starts if self.client else starts[::-1]

    @classmethod
    async def accept(cls, stream: SmcStream) -> Conversation:
        """Read the header that the client sends, and return the server's side."""
        header = b""
        while len(header) < HEADER.size:
            data = await stream.receive_some(HEADER.size - len(header))
            if not data:
                raise EndedEarly("the stream ended in the header")
            header += data
        seed, number, scale = HEADER.unpack(header)
        return cls(stream=stream, seed=seed, number=number, scale=scale, client=False)

    async def run(self) -> None:
        """Run the conversation and close the stream.

        Raises, alone or in exception groups:
          Wrong: a byte differs from the expected one.
          EndedEarly: the stream ended in the middle.
          trio.BrokenResourceError: the connection was reset.  If one task sends and another one
            receives, one of them gets this error, and the other one may find the end of the stream.
        """
        if self.client:
            await self.stream.send_all(HEADER.pack(self.seed, self.number, self.scale))
        if self.kind == "half-close":
            await self._in_turn()
        elif self.kind in ("stream", "abort"):
            await self._at_once()
        else:
            await self._requests()
        if not self.aborted:
            self.activity = "closes"
            await self.stream.aclose()

    # -- kinds ---------------------------------------------------------------------------

    async def _at_once(self) -> None:
        totals = [self._amount("a"), self._amount("b")]
        to_send, to_receive = totals if self.client else totals[::-1]
        aborts = self.kind == "abort"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_everything, to_send)
            if aborts and self.client:
                await self._receive_piece(to_receive // 2)
                self.aborted = True
                nursery.cancel_scope.cancel()
            await self._receive_everything(to_receive)
        if self.aborted:
            self.stream.abort()

    async def _in_turn(self) -> None:
        first, second = self._amount("a"), self._amount("b")
        if self.client:
            await self._send_everything(first)
            await self._receive_everything(second)
        else:
            await self._receive_everything(first)
            await self._send_everything(second)

    async def _requests(self) -> None:
        plan = self._rng("requests")
        urgent = self.kind == "urgent"
        for _ in range(max(1, _log_uniform(plan, 1, 300) * self.scale // 100)):
            request, answer = (_log_uniform(plan, 1, 30_000) for _ in range(2))
            if self.client:
                await self._send_piece(request, urgent=urgent)
                await self._receive_piece(answer)
            else:
                await (self._receive_urgent if urgent else self._receive_piece)(request)
                await self._send_piece(answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_everything, 0)
            await self._receive_everything(0)

    # -- sending and receiving -----------------------------------------------------------

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {self.number} {what}")

    def _amount(self, direction: str) -> int:
        return max(1, _log_uniform(self._rng(direction), 1000, 4_000_000) * self.scale // 100)

    def _sizes(self, total: int) -> Iterator[int]:
        rng = self._rng(f"writes {self.client}")
        while total:
            size = min(total, _log_uniform(rng, 1, _LARGEST))
            yield size
            total -= size

    async def _send_piece(self, size: int, *, urgent: bool = False) -> None:
        data = _text(self._out_start, self._out, size)
        self._out += size
        self._out_hash.update(data)
        self.activity = f"sends up to {self._out}"
        await (self.stream.send_urgent if urgent else self.stream.send_all)(data)

    async def _send_everything(self, total: int) -> None:
        for size in self._sizes(total):
            await self._send_piece(size)
            if size % 4 == 0:
                await trio.sleep(size % 64 / 5000)
        self.sent_all = True
        await self.stream.send_all(self._out_hash.digest())
        await self.stream.send_eof()

    async def _receive(self, most: int) -> bytes:
        self.activity = f"waits for byte {self._in}"
        data = bytes(await self.stream.receive_some(most))
        if len(data) > most:
            raise Wrong(f"{len(data)} bytes where {most} were asked for")
        self.received += len(data)
        return data

    def _check(self, data: bytes) -> None:
        expected = _text(self._in_start, self._in, len(data))
        if data != expected:
            at = next(index for index, byte in enumerate(data) if byte != expected[index])
            raise Wrong(f"a wrong byte at position {self._in + at}")
        self._in += len(data)
        self._in_hash.update(data)

    async def _receive_piece(self, size: int) -> None:
        while size:
            start = trio.current_time()
            data = await self._receive(min(size, _LARGEST))
            if not data:
                raise EndedEarly(f"the stream ended at position {self._in}, {size} bytes too early")
            self.pause = max(self.pause, trio.current_time() - start)
            self._check(data)
            size -= len(data)

    async def _receive_urgent(self, size: int) -> None:
        self.activity = f"waits for the urgent byte {self._in + size - 1}"
        try:
            last = await self.stream.receive_urgent()
        except trio.EndOfChannel as end:
            raise EndedEarly(f"the stream ended at position {self._in}: {end}") from end
        await self._receive_piece(size - 1)
        self._check(last)
        self.received += 1

    async def _receive_everything(self, total: int) -> None:
        await self._receive_piece(total)
        digest = b""
        while len(digest) < _DIGEST and (data := await self._receive(_DIGEST - len(digest))):
            digest += data
        if len(digest) < _DIGEST:
            raise EndedEarly(f"the stream ended after {len(digest)} bytes of the SHA-256")
        if digest != self._in_hash.digest():
            raise Wrong(f"another SHA-256 after {self._in} bytes")
        if await self._receive(1):
            raise Wrong("more bytes than were sent")
