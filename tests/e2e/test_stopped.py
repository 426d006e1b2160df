"""A peer process that is stopped for a while: nothing is lost, and nothing is read from memory that
its owner has taken back."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest

import trio_smc
from tests.e2e.bytes_by_position import Text
from tests.e2e.peer import HEADER
from tests.e2e.processes import Peer, open_peer
from tests.streams.stream_pairs import HOST, cancel_when_blocked
from trio_smc import Config, SmcStream

SEED = 1
# More messages than receives can be posted: what follows waits in the send queue.
MESSAGES = 1100
SEPARATELY = Config(checkpoints="strict")  # each send has a message of its own


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with open_peer({}) as running:
        yield running


async def connect_and_stop(peer: Peer, size: int) -> SmcStream:
    """A stream to a process that then is stopped; the header is sent."""
    port = (await peer.call("listen", handler="collect"))["port"]
    stream = await trio_smc.open_stream(HOST, port)
    assert stream.mode == "smc-r"
    await stream.send_all(HEADER.pack(7, size, SEED, 0))
    peer.process.send_signal(signal.SIGSTOP)
    return stream


async def test_a_cancelled_send_leaves_its_buffer_alone(peer: Peer) -> None:
    large = 600_000
    async with trio_smc.open_stack(SEPARATELY):
        text = Text(SEED).piece(0, MESSAGES + large)
        stream = await connect_and_stop(peer, len(text))
        for position in range(MESSAGES):
            await stream.send_all(text[position : position + 1])
        buffer = bytearray(text[MESSAGES:])
        assert await cancel_when_blocked(lambda: stream.send_all(buffer))
        buffer[:] = bytes(large)
        buffer.clear()
        peer.process.send_signal(signal.SIGCONT)
        await stream.aclose()
        assert await peer.call("collected", count=1) == {"cases": [7], "errors": []}


async def test_closing_waits_until_the_peer_has_it_all(peer: Peer) -> None:
    async with trio_smc.open_stack(SEPARATELY):
        text = Text(SEED).piece(0, MESSAGES)
        stream = await connect_and_stop(peer, len(text))
        for position in range(MESSAGES):
            await stream.send_all(text[position : position + 1])
        assert await cancel_when_blocked(stream.aclose)
        peer.process.send_signal(signal.SIGCONT)
        assert await peer.call("collected", count=1) == {"cases": [7], "errors": []}
