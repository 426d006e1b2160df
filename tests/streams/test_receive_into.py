"""`SmcStream.receive_some_into`, over SMC-R and over TCP."""

from __future__ import annotations

import ctypes
import random
from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.peers import open_pair
from tests.streams.buffers import ALIGNMENT, WRITABLE
from tests.streams.stream_pairs import SMALL_RING, Pairs, open_pairs, smc_config, tcp_config
from trio_smc import SmcStream

KINDS = {
    "strict": smc_config(checkpoints="strict"),
    "amortised": smc_config(),
    "eye-catcher": smc_config(rmbe_eye_catcher=True),
    "tcp": tcp_config(),
}


@pytest.fixture(params=KINDS)
async def pairs(request: pytest.FixtureRequest) -> AsyncIterator[Pairs]:
    async with open_pairs(KINDS[request.param]) as made:
        yield made


@pytest.fixture
async def pair(pairs: Pairs) -> AsyncIterator[tuple[SmcStream, SmcStream]]:
    async with open_pair("stack", pairs) as ends:
        yield ends


async def test_the_same_bytes_as_receive_some(
    pair: tuple[SmcStream, SmcStream], rng: random.Random
) -> None:
    a, b = pair
    data = rng.randbytes(5 * SMALL_RING + 1)

    async def send() -> None:
        await a.send_all(data)
        await a.send_eof()

    got = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while True:
            buffer = bytearray(rng.choice((1, 7, 1000, SMALL_RING, 2 * SMALL_RING)))
            if rng.random() < 0.3:
                piece = await b.receive_some(len(buffer))
            else:
                piece = bytes(buffer[: await b.receive_some_into(buffer)])
            if not piece:
                break
            got += piece
    assert got == data
    assert await b.receive_some_into(bytearray(1)) == 0


async def test_only_received_bytes_are_written(pair: tuple[SmcStream, SmcStream]) -> None:
    a, b = pair
    await a.send_all(b"abc")
    buffer = bytearray(b"-" * 10)
    with memoryview(buffer) as view:
        assert await b.receive_some_into(view[2:8]) == 3
    assert buffer == b"--abc-----"
    buffer.append(0)  # fails if a view of the buffer is left


@pytest.mark.parametrize("shape", WRITABLE)
async def test_buffers_of_every_shape_and_format(
    pair: tuple[SmcStream, SmcStream], shape: str, rng: random.Random
) -> None:
    a, b = pair
    data = rng.randbytes(ALIGNMENT)
    buffer = WRITABLE[shape](bytes(ALIGNMENT))
    await a.send_all(data)
    assert await b.receive_some_into(buffer) == ALIGNMENT
    assert memoryview(buffer).tobytes() == data


async def test_unsuitable_buffers_are_refused(pair: tuple[SmcStream, SmcStream]) -> None:
    a, b = pair
    await a.send_all(b"x")
    with pytest.raises(ValueError, match="empty"):
        await b.receive_some_into(bytearray())
    with pytest.raises(ValueError, match="empty"):
        await b.receive_some_into((ctypes.c_int * 0 * 3)())
    with pytest.raises(TypeError, match="read-only"):
        await b.receive_some_into(b"constant")
    with pytest.raises(TypeError):
        await b.receive_some_into(memoryview(bytearray(8))[::2])
    with pytest.raises(TypeError):
        await b.receive_some_into("text")  # type: ignore[arg-type]
    assert await b.receive_some() == b"x"


async def test_a_cancelled_call_takes_nothing(pair: tuple[SmcStream, SmcStream]) -> None:
    a, b = pair
    buffer = bytearray(4)
    with trio.move_on_after(0.01) as scope:
        await b.receive_some_into(buffer)
    assert scope.cancelled_caught
    await a.send_all(b"late")
    with trio.CancelScope() as scope:
        scope.cancel()
        await b.receive_some_into(buffer)
    assert scope.cancelled_caught
    assert await b.receive_some_into(buffer) == 4
    assert buffer == b"late"


async def test_one_task_at_a_time(pair: tuple[SmcStream, SmcStream]) -> None:
    _, b = pair
    async with trio.open_nursery() as nursery:
        nursery.start_soon(b.receive_some_into, bytearray(1))
        await wait_all_tasks_blocked()
        for call in (partial(b.receive_some_into, bytearray(1)), b.receive_some):
            with pytest.raises(trio.BusyResourceError):
                await call()
        nursery.cancel_scope.cancel()


async def test_a_close_ends_and_refuses_calls(pair: tuple[SmcStream, SmcStream]) -> None:
    _, b = pair

    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await b.receive_some_into(bytearray(1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await b.aclose()
    await receive()


async def test_receive_some_into_raises_after_an_abort(pair: tuple[SmcStream, SmcStream]) -> None:
    a, b = pair
    a.abort()
    with pytest.raises(trio.BrokenResourceError):
        await b.receive_some_into(bytearray(1))


@pytest.mark.parametrize("kind", ["strict", "tcp"])
async def test_each_call_is_a_checkpoint(kind: str) -> None:
    async with open_pairs(KINDS[kind]) as pairs:
        a, b = await pairs.make()
        await a.send_all(b"ab")
        with assert_checkpoints():
            assert await b.receive_some_into(bytearray(1)) == 1
        await a.aclose()
        await b.aclose()
