"""Connections between trio_smc and the kernel, for the steps of `tests.lab.guest_interop`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio

import trio_smc
from tests.lab.kernel import Kernel
from tests.timing import PATIENCE
from trio_smc import Config, Fallback, FallbackReason, Mode, SmcStream, Stack

__all__ = ["CONFIG", "PIECE", "Both", "Seen", "World", "proposes_smc_d", "until"]

CONFIG = Config(
    discovery="tcp-option", handshake_timeout=20, first_contact_timeout=20, llc_timeout=10,
    test_link_timeout=5, shutdown_timeout=10, learn_short=False,
)  # fmt: skip
PIECE = 256 * 1024
_SMC_D = (1, 3)
"""Values of an offer in SMC Proposal: SMC-D alone, or both."""
_DIAG_MODES = {Mode.SMC_R: "SMCR", Mode.TCP: "TCP"}


class Seen(trio_smc.BaseObserver):
    """An observer that keeps the messages, without data."""

    def __init__(self) -> None:
        self.clc_messages: list[tuple[bool, bytes]] = []
        self.llc_messages: list[tuple[float, bool, bytes]] = []

    def types(self, outgoing: bool, *, replies: bool | None = None) -> set[int]:
        """LLC types that were sent or received; replies: only replies, or only requests."""
        return {
            message[0]
            for _, out, message in self.llc_messages
            if out is outgoing and replies in (None, bool(message[3] & 0x80))
        }

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.clc_messages.append((outgoing, bytes(message)))

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        self.llc_messages.append((trio.current_time() % 1000, outgoing, bytes(message)))


@dataclass
class Both:
    """The two ends of one connection: ours, and the kernel's by number."""

    stream: SmcStream
    number: int
    kernel: Kernel

    async def there(self, function: str, *, patience: float = PATIENCE, **arguments: Any) -> Any:
        """Run a function on the kernel's end."""
        return await self.kernel.call(function, patience=patience, number=self.number, **arguments)

    async def receive(self, count: int | None, patience: float = PATIENCE) -> tuple[int, str]:
        """Receive that many bytes, or all up to the end; returns their number and SHA-256."""
        digest, got = hashlib.sha256(), 0
        with trio.fail_after(patience):
            while count is None or got < count:
                data = await self.stream.receive_some(
                    PIECE if count is None else min(PIECE, count - got)
                )
                if not data:
                    break
                digest.update(data)
                got += len(data)
        return got, digest.hexdigest()

    async def send_file(self, path: Path, count: int, patience: float = PATIENCE) -> None:
        with trio.fail_after(patience), path.open("rb") as file:
            while count:
                piece = file.read(min(PIECE, count))
                await self.stream.send_all(piece)
                count -= len(piece)

    async def confirm(self, mode: Mode = Mode.SMC_R) -> None:
        """Both ends report this mode; smc_diag does so for the kernel.

        smc_diag has no entry for a socket of TCP alone.
        """
        assert self.stream.mode is mode, self.stream.fallback
        info = await self.there("info")
        if mode is Mode.SMC_R:
            assert info is not None
        assert info is None or info["mode"] == _DIAG_MODES[mode], info

    async def end(self) -> None:
        """An orderly end; trio_smc closes first."""
        with trio.fail_after(PATIENCE):
            await self.stream.send_eof()
            assert (await self.there("receive"))[0] == 0
            await self.there("close")
            assert await self.stream.receive_some() == b""
            await self.stream.aclose()


@dataclass
class World:
    """The two ends of the lab.

    Attributes:
      here, there: addresses that our listener and the kernel's have.
      config: for stacks of ours.
      file: bytes to send, those of ``make demo``.
      seen: the messages of the latest stack.
    """

    kernel: Kernel
    here: str
    there: str
    config: Config
    file: Path
    seen: Seen = field(default_factory=Seen)
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(5000))

    def log(self, text: str) -> None:
        sys.stdout.write(f"interop: {text}\n")
        sys.stdout.flush()

    @contextlib.asynccontextmanager
    async def stack(self, **changes: Any) -> AsyncIterator[tuple[Stack, Seen]]:
        seen = self.seen = Seen()
        async with trio_smc.open_stack(replace(self.config, **changes)) as stack:
            stack.add_observer(seen)
            yield stack, seen

    async def to_kernel(
        self, stack: Stack, kind: str = "smc", *, mode: Mode = Mode.SMC_R, **options: Any
    ) -> Both:
        """A connection that trio_smc opens; both ends must report the mode."""
        port = next(self.ports)
        listener = await self.kernel.call("listen", kind=kind, port=port, **options)
        number: list[int] = []

        async def accept() -> None:
            number.append(await self.kernel.call("accept", number=listener))

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                stream = await stack.open_stream(self.there, port)
        await self.kernel.call("close", number=listener)
        both = Both(stream, number[0], self.kernel)
        await both.confirm(mode)
        return both

    async def from_kernel(
        self, stack: Stack, kind: str = "smc", *, mode: Mode = Mode.SMC_R, **options: Any
    ) -> Both:
        """A connection that the kernel opens; both ends must report the mode."""
        port = next(self.ports)
        number: list[int] = []

        async def connect() -> None:
            number.append(
                await self.kernel.call("connect", kind=kind, host=self.here, port=port, **options)
            )

        [listener] = await stack.open_listeners(port, host=self.here)
        with trio.fail_after(PATIENCE):
            async with listener, trio.open_nursery() as nursery:
                nursery.start_soon(connect)
                stream = await listener.accept()
        both = Both(stream, number[0], self.kernel)
        await both.confirm(mode)
        return both

    def both_ways(self) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """Each role of trio_smc, with the function that opens a connection in it."""
        return (("client", self.to_kernel), ("server", self.from_kernel))

    async def fell_back(
        self, both: Both, reason: FallbackReason | None = None
    ) -> tuple[Fallback, dict[str, Any]]:
        """Check that both are TCP and carry bytes; returns the reasons of both."""
        assert both.stream.mode is Mode.TCP
        info = await both.there("info")
        assert info["mode"] == "TCP", info
        fallback = both.stream.fallback
        assert fallback is not None
        assert reason is None or fallback.reason is reason, fallback
        await both.stream.send_all(b"plain")
        assert await both.there("text", count=5) == "plain"
        await both.there("send", text="words")
        assert await both.stream.receive_some() == b"words"
        await both.end()
        return fallback, info


def proposes_smc_d(seen: Seen) -> bool:
    """True if a Proposal of the kernel also offers SMC-D, in version 1 or 2."""
    proposals = [m for out, m in seen.clc_messages if not out and m[4] == 1 and m[7] >> 4 > 1]
    offers = [offer for m in proposals for offer in (m[7] & 3, m[7] >> 2 & 3)]
    return any(offer in _SMC_D for offer in offers)


async def until(condition: Callable[[], Any], text: str, patience: float = PATIENCE) -> None:
    """Check until the condition holds; messages of the peer change its state."""
    with trio.move_on_after(patience):
        while not condition():  # noqa: ASYNC110 - what is looked at has no event
            await trio.sleep(0.02)
        return
    raise AssertionError(f"not within {patience} s: {text}")
