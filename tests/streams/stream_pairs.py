"""Connected streams for tests: over SMC-R from one stack or two, and over TCP after a fallback."""

from __future__ import annotations

import contextlib
import socket as stdlib_socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, Mode, SmcListener, SmcStream, Stack
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.streams.tcp_stream import TcpStream

HOST = "127.0.0.1"
SMALL_RING = 16 * 1024
"""The size of the smallest RMB element (RFC 7609, A.2.2)."""


class Pairs:
    """Makes connected streams, client first.

    Attributes:
      client, server: the stacks of the two ends, or twice the same stack.
      listener: the listener of the server.
      ring: capacity of the ring of each end in bytes.  None over TCP.
    """

    def __init__(
        self, client: Stack, server: Stack, listener: SmcListener, ring: int | None
    ) -> None:
        self.client = client
        self.server = server
        self.ring = ring
        self.listener = listener
        self._address = listener.socket.getsockname()
        if ring is None:
            # Accepted sockets inherit the sizes, so little data fills them.
            for name in (stdlib_socket.SO_SNDBUF, stdlib_socket.SO_RCVBUF):
                listener.socket.setsockopt(stdlib_socket.SOL_SOCKET, name, SMALL_RING)

    @property
    def mode(self) -> Mode:
        """The mode of all streams that `make` returns."""
        return Mode.TCP if self.ring is None else Mode.SMC_R

    async def make(self) -> tuple[SmcStream, SmcStream]:
        """Open a connection.  Returns both ends, the client's first."""
        accepted: list[SmcStream] = []

        async def accept() -> None:
            accepted.append(await self.listener.accept())

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                stream = await trio_smc.open_stream(*self._address[:2])
        assert stream.mode == accepted[0].mode == self.mode, (stream.fallback, accepted[0].fallback)
        return stream, accepted[0]

    async def clogged(self) -> tuple[SmcStream, SmcStream]:
        """As `make`, but fill both directions, so that neither end can send before the other
        reads."""
        pair = await self.make()
        for stream in pair:
            if self.ring is None:
                await _fill_tcp(stream)
            else:
                await stream.send_all(bytes(self.ring))
        return pair


async def _fill_tcp(stream: SmcStream) -> None:
    """Fill a TCP connection, so that the stream cannot send until the other end reads.

    The kernel holds more unsent data than the other end accepts, so probes of the window and
    retransmissions after 200 ms make no room.  Without TCP_NOTSENT_LOWAT, the kernel would accept
    more bytes after each probe.  Without MSG_EOR, it would append bytes to the segment that a probe
    has split.
    """
    assert isinstance(stream, TcpStream)
    stream.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF, 1 << 18)

    async def fill() -> None:
        while True:
            await stream.socket.send(bytes(1 << 16), stdlib_socket.MSG_EOR)

    assert await cancel_when_blocked(fill)
    stream.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NOTSENT_LOWAT, 1)


async def cancel_when_blocked(call: Callable[[], Awaitable[object]]) -> bool:
    """Make a call, and cancel it when all tasks wait.  True if the call had not finished.

    On a busy machine, a cancellation after a fixed time could come before the call has started.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()
    return nursery.cancel_scope.cancelled_caught


@contextlib.asynccontextmanager
async def open_pairs(config: Config, *, stacks: int = 1, host: str = HOST) -> AsyncIterator[Pairs]:
    """Open a stack that listens, and connect from the same stack or from another one.

    stacks: 1 for the same stack, 2 for two stacks.
    """
    async with contextlib.AsyncExitStack() as exits:
        # `open_stream` uses the stack that was opened last.
        server = await exits.enter_async_context(trio_smc.open_stack(config))
        [listener] = await trio_smc.open_listeners(0, host=host)
        client = server
        if stacks == 2:
            client = await exits.enter_async_context(trio_smc.open_stack(config))
        ring = config.receive_buffer_for("software") if config.rnics == "auto" else None
        if ring is not None and config.rmbe_eye_catcher:
            ring -= len(EYE_CATCHER)
        yield Pairs(client, server, listener, ring)


def smc_config(**changes: object) -> Config:
    """A configuration with small rings, and with short timeouts for a test that fails."""
    base = Config(receive_buffer=SMALL_RING, close_timeout=2 * PATIENCE, shutdown_timeout=20)
    return replace(base, **changes)  # type: ignore[arg-type]


def tcp_config() -> Config:
    """A configuration without RNICs: every stream is TCP, with a reason."""
    return Config(rnics=())


async def read(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Read exactly ``count`` bytes."""
    data = b""
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        assert piece, f"the stream ended {count - len(data)} bytes early"
        data += piece
    return data


async def close_both(pair: tuple[SmcStream, SmcStream]) -> None:
    """Close one end, then the other."""
    for stream in pair:
        await stream.aclose()
