"""The stream contract of Trio, over SMC-R and over TCP."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import gc
import inspect
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import check_half_closeable_stream, wait_all_tasks_blocked

from tests.streams.buffers import ALIGNMENT, SENT
from tests.streams.stream_pairs import (
    SMALL_RING,
    Pairs,
    cancel_when_blocked,
    close_both,
    open_pairs,
    read,
    smc_config,
    tcp_config,
)
from tests.timing import PATIENCE
from trio_smc import Mode, SmcStream

KINDS = {
    "one-stack": (smc_config(), 1),
    "two-stacks": (smc_config(), 2),
    "eye-catcher": (smc_config(rmbe_eye_catcher=True), 1),
    "no-spin": (smc_config(spin=0), 1),
    "strict": (smc_config(checkpoints="strict"), 1),
    "tcp": (tcp_config(), 1),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_trio_accepts_an_smc_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, stacks = KINDS[kind]
    if config.checkpoints == "amortised" and kind != "tcp":
        # Over SMC-R with amortised checkpoints, not every call yields.  All other rules hold.
        monkeypatch.setattr(
            "trio.testing._check_streams.assert_checkpoints", contextlib.nullcontext
        )
    async with open_pairs(config, stacks=stacks) as pairs:
        await check_half_closeable_stream(pairs.make, pairs.clogged)


async def test_a_blocked_stream_stays_blocked() -> None:
    """The stream stays blocked after the kernel has probed TCP's window, as on a slow machine."""
    async with open_pairs(tcp_config()) as pairs:
        pair = await pairs.clogged()
        await trio.sleep(0.5)
        for stream in pair:
            assert await cancel_when_blocked(partial(stream.send_all, b"x"))
        for stream in pair:
            await trio.aclose_forcefully(stream)


@pytest.fixture(params=["one-stack", "two-stacks", "strict", "tcp"])
async def pairs(request: pytest.FixtureRequest) -> AsyncIterator[Pairs]:
    config, stacks = KINDS[request.param]
    async with open_pairs(config, stacks=stacks) as made:
        yield made


@pytest.fixture
async def smc() -> AsyncIterator[Pairs]:
    async with open_pairs(smc_config()) as made:
        yield made


async def send_for_ever(stream: SmcStream) -> None:
    while True:
        await stream.send_all(bytes(SMALL_RING))


# --- arguments ---------------------------------------------------------------------------------


def test_parameters_have_trios_names() -> None:
    for method in ("send_all", "receive_some"):
        assert list(inspect.signature(getattr(SmcStream, method)).parameters) == list(
            inspect.signature(getattr(trio.SocketStream, method)).parameters
        )


async def test_parameters_by_keyword(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(data=b"keyword")
    assert await b.receive_some(max_bytes=4) == b"keyw"
    assert await b.receive_some(max_bytes=None) == b"ord"
    await close_both(pair)


@pytest.mark.parametrize("wrong", [0, -1, -(1 << 70)])
async def test_sizes_out_of_range(pairs: Pairs, wrong: int) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"x")
    with pytest.raises(ValueError, match="max_bytes"):
        await b.receive_some(wrong)
    assert await b.receive_some(1) == b"x"
    await close_both(pair)


@pytest.mark.parametrize("wrong", [1.5, "1", b"1"])
async def test_sizes_of_a_wrong_type(pairs: Pairs, wrong: object) -> None:
    _, b = pair = await pairs.make()
    with pytest.raises(TypeError):
        await b.receive_some(wrong)  # type: ignore[arg-type]
    await close_both(pair)


class _Index:
    def __index__(self) -> int:
        return 3


async def test_receive_some_accepts_sizes_of_every_kind(smc: Pairs) -> None:
    a, b = pair = await smc.make()
    await a.send_all(b"abcdefgh")
    assert await b.receive_some(_Index()) == b"abc"  # type: ignore[arg-type]
    assert await b.receive_some(True) == b"d"
    assert await b.receive_some(1 << 70) == b"efgh"
    await close_both(pair)


@pytest.mark.parametrize("shape", SENT)
async def test_data_of_every_shape_and_format(pairs: Pairs, shape: str, rng: random.Random) -> None:
    """All data arrives, even if the buffers of the connection hold only a part."""
    a, b = pair = await pairs.make()
    for size in (ALIGNMENT, 20_000 * ALIGNMENT):
        data = rng.randbytes(size)
        got = bytearray()
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send_all, SENT[shape](data))
                while len(got) < size:
                    got += await b.receive_some()
        assert got == data
    await close_both(pair)


@pytest.mark.parametrize(
    "empty",
    [
        array.array("I"),
        memoryview(b"").cast("d"),
        (ctypes.c_int * 0 * 3)(),
        memoryview(b"ab")[2::2],
    ],
    ids=["array", "doubles", "two dimensions", "strided"],
)
async def test_empty_data_of_every_shape(pairs: Pairs, empty: object) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(empty)  # type: ignore[arg-type]
    await a.send_all(b"y")
    assert await b.receive_some() == b"y"
    await close_both(pair)


@pytest.mark.parametrize("shape", ["array of doubles", "two dimensions of integers", "records"])
async def test_data_in_c_order_is_not_copied(pairs: Pairs, shape: str) -> None:
    size = 1 << 24
    size -= size % ALIGNMENT
    a, b = pair = await pairs.make()
    buffer, place = SENT[shape](bytes(size)), bytearray(1 << 16)
    left = size
    tracemalloc.start()
    try:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.send_all, buffer)
                while left:
                    left -= await b.receive_some_into(place)
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()
    await close_both(pair)


@pytest.mark.parametrize("wrong", ["text", None, 7, [1, 2]])
async def test_data_of_a_wrong_type(pairs: Pairs, wrong: object) -> None:
    a, b = pair = await pairs.make()
    with pytest.raises(TypeError):
        await a.send_all(wrong)  # type: ignore[arg-type]
    await a.send_all(b"fine")
    assert await read(b, 4) == b"fine"
    await close_both(pair)


async def test_empty_data_wakes_no_reader(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    for empty in (b"", bytearray(), memoryview(b"")):
        await a.send_all(empty)
    with trio.move_on_after(0.05) as scope:
        await b.receive_some(1)
    assert scope.cancelled_caught
    await a.send_all(b"y")
    assert await b.receive_some(1) == b"y"
    await close_both(pair)


async def test_received_data_is_bytes(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"x")
    data = await b.receive_some()
    assert type(data) in (bytes, bytearray)
    await close_both(pair)


# --- buffers that change -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3000, SMALL_RING, 5 * SMALL_RING, 1 << 20])
async def test_a_buffer_may_change_after_send_all(pairs: Pairs, size: int) -> None:
    a, b = pair = await pairs.make()
    buffer = bytearray(b"\x01" * size)

    async def send() -> None:
        await a.send_all(buffer)
        buffer[:] = b"\x02" * size
        # Fails if a view of the buffer is left.
        buffer.clear()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert await read(b, size) == b"\x01" * size
    await close_both(pair)


async def aclose_in_background(a: SmcStream, b: SmcStream) -> None:
    """Close one end while the other reads.  The reader receives only ones, and then the end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.aclose)
        while data := await b.receive_some():
            assert not data.strip(b"\x01")


async def test_a_buffer_may_change_after_a_cancelled_send(pairs: Pairs) -> None:
    await check_cancelled_send(pairs, 1 << 20)


async def test_a_large_buffer_may_change_after_a_cancelled_send() -> None:
    # The stream does not copy pieces of this size; it borrows them while send_all runs.
    async with open_pairs(smc_config(receive_buffer=1 << 20), stacks=2) as pairs:
        await check_cancelled_send(pairs, 3 << 20)


async def check_cancelled_send(pairs: Pairs, size: int) -> None:
    a, b = await pairs.make()
    buffer = bytearray(b"\x01" * size)
    assert await cancel_when_blocked(lambda: a.send_all(buffer))
    buffer[:] = b"\x02" * len(buffer)
    buffer.clear()
    await aclose_in_background(a, b)
    await b.aclose()


# --- one task at a time ------------------------------------------------------------------------


def _senders(stream: SmcStream) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "send_all": lambda: stream.send_all(b"x"),
        "empty send_all": lambda: stream.send_all(b""),
        "wait": stream.wait_send_all_might_not_block,
        "send_eof": stream.send_eof,
    }


@pytest.mark.parametrize("first", ["send_all", "wait"])
@pytest.mark.parametrize("second", ["send_all", "empty send_all", "wait", "send_eof"])
async def test_a_second_sender_is_refused(pairs: Pairs, first: str, second: str) -> None:
    a, b = pair = await pairs.clogged()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_senders(a)[first])
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await _senders(a)[second]()
        # The first call continues.
        await b.receive_some(SMALL_RING)
        if pairs.mode is Mode.TCP:
            nursery.cancel_scope.cancel()
    await close_both(pair)


async def test_a_second_receiver_is_refused(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    got: list[bytes | bytearray] = []

    async def receive() -> None:
        got.append(await b.receive_some())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await b.receive_some()
        await a.send_all(b"for the first")
    assert got == [b"for the first"]
    await close_both(pair)


async def test_a_send_during_a_half_close_is_refused(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    refused: list[str] = []

    async def call(name: str) -> None:
        try:
            await _senders(a)[name]()
        except trio.BusyResourceError:
            refused.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "send_eof")
        nursery.start_soon(call, "send_all")
    # One call is refused, unless a send without a yield ends before the half close begins.
    assert len(refused) == 1 or (not refused and pairs.client.config.checkpoints == "amortised")
    assert await b.receive_some() == (b"" if refused == ["send_all"] else b"x")
    await close_both(pair)


async def test_two_tasks_may_send_and_receive_at_once(pairs: Pairs) -> None:
    pair = await pairs.make()
    async with trio.open_nursery() as nursery:
        for stream in pair:
            nursery.start_soon(read, stream, 200_000)
            nursery.start_soon(stream.send_all, bytes(200_000))
    await close_both(pair)


# --- closing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["aclose", "abort", "aclose cancelled"])
async def test_every_call_fails_after_a_close(pairs: Pairs, how: str) -> None:
    a, b = await pairs.make()
    await end(a, how)
    for _ in range(2):
        for call in _senders(a).values():
            with pytest.raises(trio.ClosedResourceError):
                await call()
        with pytest.raises(trio.ClosedResourceError):
            await a.receive_some()
    await a.aclose()
    a.abort()
    await b.aclose()


async def end(stream: SmcStream, how: str) -> None:
    if how == "abort":
        stream.abort()
    elif how == "aclose":
        await stream.aclose()
    else:
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("how", ["aclose", "abort", "aclose cancelled"])
@pytest.mark.parametrize("call", ["send_all", "wait", "receive_some"])
async def test_a_parked_call_wakes_when_another_task_closes(
    pairs: Pairs, how: str, call: str
) -> None:
    a, b = await pairs.clogged()
    if call == "receive_some":
        await read_until_blocked(a)
    calls = {**_senders(a), "receive_some": a.receive_some}

    async def parked() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await calls[call]()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parked)
            await wait_all_tasks_blocked()
            await end(a, how)
    await trio.aclose_forcefully(b)


async def read_until_blocked(stream: SmcStream) -> None:
    async def read_for_ever() -> None:
        while True:
            await stream.receive_some()

    assert await cancel_when_blocked(read_for_ever)


async def test_a_cancelled_close_still_ends_the_stream(pairs: Pairs) -> None:
    a, b = await pairs.make()
    await a.send_all(b"last words")
    with trio.CancelScope() as scope:
        scope.cancel()
        await a.aclose()
    assert scope.cancelled_caught
    assert await read(b, 10) == b"last words"
    assert await b.receive_some() == b""
    await b.aclose()


async def test_receive_some_returns_the_end_again(pairs: Pairs) -> None:
    a, b = await pairs.make()
    await a.send_all(b"x")
    await a.aclose()
    assert await b.receive_some() == b"x"
    for _ in range(3):
        assert await b.receive_some() == b""
    await b.aclose()


@pytest.mark.rfc("A.4/16")
async def test_half_close_keeps_the_other_direction(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"question")
    await a.send_eof()
    await a.send_eof()
    for call in ("send_all", "empty send_all"):
        with pytest.raises(trio.ClosedResourceError):
            await _senders(a)[call]()
    assert await read(b, 8) == b"question"
    assert await b.receive_some() == b""
    answer = bytes(3 * SMALL_RING)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(b.send_all, answer)
        assert await read(a, len(answer)) == answer
    await b.send_eof()
    assert await a.receive_some() == b""
    await close_both(pair)


# --- the peer's end ----------------------------------------------------------------------------


async def test_a_broken_stream_stays_broken(pairs: Pairs) -> None:
    a, b = await pairs.make()
    await b.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await send_for_ever(a)
    for _ in range(3):
        with pytest.raises(trio.BrokenResourceError):
            await a.send_all(b"x")
    await a.aclose()


async def test_a_reset_is_broken_with_its_reason(smc: Pairs) -> None:
    a, b = await smc.make()
    b.abort()
    await wait_all_tasks_blocked()
    for call, number in (
        (lambda: read(a, 1), errno.ECONNRESET),
        (lambda: a.send_all(b"x"), errno.EPIPE),
        (lambda: a.send_all(b"x"), errno.EPIPE),
    ):
        with pytest.raises(trio.BrokenResourceError) as caught:
            await call()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == number
    assert await a.receive_some() == b"", "the error was reported twice"
    await a.send_all(b"")
    await a.wait_send_all_might_not_block()
    await a.aclose()


@pytest.mark.parametrize("call", ["send_all", "wait", "receive_some"])
async def test_a_parked_call_ends_with_the_peer(pairs: Pairs, call: str) -> None:
    a, b = await pairs.clogged()
    if call == "receive_some":
        await read_until_blocked(a)
    calls = {**_senders(a), "receive_some": a.receive_some}

    async def parked() -> None:
        # A wait to send may also end without an error; then the next call raises it.
        may = contextlib.suppress(trio.BrokenResourceError)
        with may if call == "wait" else pytest.raises(trio.BrokenResourceError):
            await calls[call]()
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever(a)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parked)
            await wait_all_tasks_blocked()
            b.abort()
    await a.aclose()


# --- cancellation ------------------------------------------------------------------------------


async def test_a_cancelled_call_does_nothing(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await b.send_all(b"kept")
    with trio.CancelScope() as scope:
        scope.cancel()
        await a.send_all(b"never sent")
    assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        await a.receive_some()
    assert scope.cancelled_caught
    assert await a.receive_some() == b"kept"
    await a.send_all(b"sent")
    assert await b.receive_some() == b"sent"
    await close_both(pair)


async def test_a_cancelled_receive_loses_nothing(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    for number in range(50):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(b.receive_some, 1)
                await wait_all_tasks_blocked()
                scope.cancel()
        await a.send_all(bytes([number]))
        assert await b.receive_some() == bytes([number])
    await close_both(pair)


async def test_a_loop_of_calls_lets_others_run(pairs: Pairs) -> None:
    """Other tasks run even if no call has to wait, with every kind of checkpoint."""
    a, b = pair = await pairs.make()
    await b.send_all(bytes(2000))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for call in (lambda: a.send_all(b"x"), lambda: a.receive_some(1)):
            before = turns
            for _ in range(1000):
                await call()
            assert turns - before >= 10
        nursery.cancel_scope.cancel()
    assert await read(b, 1000) == b"x" * 1000
    assert len(await read(a, 1000)) == 1000
    await close_both(pair)


# --- forgotten streams -------------------------------------------------------------------------


async def test_a_forgotten_stream_warns_and_loses_nothing(pairs: Pairs) -> None:
    made, b = await pairs.make()
    await made.send_all(b"x")
    dropped = [made]
    del made
    with pytest.warns(ResourceWarning):
        _drop(dropped)
    with trio.fail_after(PATIENCE):
        assert await read(b, 1) == b"x"
        assert await b.receive_some() == b""
    await b.aclose()


async def test_a_forgotten_stream_with_unread_data_is_reset(pairs: Pairs) -> None:
    made, b = await pairs.make()
    await made.send_all(b"x")
    await b.send_all(b"unread")
    await wait_all_tasks_blocked()
    dropped = [made]
    del made
    with pytest.warns(ResourceWarning):
        _drop(dropped)
    with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
        await read(b, 2)
    await b.aclose()


def _drop(streams: list[SmcStream]) -> None:
    streams.clear()
    gc.collect()
