"""`SmcStream.receive_view`: a view of the receive ring over SMC-R, or of a copy over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.streams.stream_pairs import Pairs, close_both, open_pairs, smc_config, tcp_config
from tests.timing import PATIENCE
from trio_smc import Mode, SmcStream

RING = 16384
CONFIGS = {
    "amortised": smc_config(receive_buffer=RING),
    "strict": smc_config(receive_buffer=RING, checkpoints="strict"),
    "eye-catcher": smc_config(receive_buffer=RING, rmbe_eye_catcher=True),
    "tcp": tcp_config(),
}


@pytest.fixture(params=CONFIGS)
async def pairs(request: pytest.FixtureRequest) -> AsyncIterator[Pairs]:
    with trio.fail_after(PATIENCE):
        async with open_pairs(CONFIGS[request.param]) as made:
            yield made


@pytest.fixture
async def smc() -> AsyncIterator[Pairs]:
    with trio.fail_after(PATIENCE):
        async with open_pairs(CONFIGS["amortised"], stacks=2) as made:
            yield made


async def wait_until_arrived(stream: SmcStream, count: int) -> None:
    """Wait until ``count`` bytes can be received."""
    seen = 0
    while seen < count:
        view = stream.receive_view()
        async with view as data:
            seen = len(data)
            view.consume(0)
        await trio.lowlevel.checkpoint()


async def test_a_view_of_received_data(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"0123456789")
    await wait_until_arrived(b, 10)
    async with b.receive_view() as view:
        assert isinstance(view, memoryview)
        assert view.readonly
        assert (view.format, view.itemsize, view.contiguous) == ("B", 1, True)
        assert bytes(view) == b"0123456789"
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    await a.send_all(b"next")
    assert await b.receive_some() == b"next"
    await close_both(pair)


async def test_a_view_has_at_most_max_bytes(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"0123456789")
    await wait_until_arrived(b, 10)
    got = []
    for most in (3, 1, 100):
        async with b.receive_view(most) as view:
            got.append(bytes(view))
    assert got == [b"012", b"3", b"456789"]
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="max_bytes"):
            async with b.receive_view(wrong):
                pass
    await close_both(pair)


async def test_consume_leaves_the_other_bytes_unread(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"first\nsec")
    await wait_until_arrived(b, 9)
    view = b.receive_view()
    with pytest.raises(ValueError, match="consume"):
        view.consume(0)
    async with view as data:
        view.consume(1)
        view.consume(bytes(data).rfind(b"\n") + 1)
        for wrong in (-1, 10):
            with pytest.raises(ValueError, match="consume"):
                view.consume(wrong)
    async with b.receive_view() as data:
        assert bytes(data) == b"sec"
    await close_both(pair)


async def test_a_view_at_the_end_of_the_stream_is_empty(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"last")
    await a.send_eof()
    async with b.receive_view() as view:
        assert bytes(view) == b"last"
    for _ in range(2):
        async with b.receive_view() as view:
            assert len(view) == 0
    await b.send_all(b"the other way")
    assert await a.receive_some() == b"the other way"
    await close_both(pair)


async def test_all_bytes_arrive_in_order(pairs: Pairs) -> None:
    """The data is larger than the ring, so the ring wraps many times, and the writer waits for the
    reader."""
    a, b = pair = await pairs.make()
    sent = np.random.default_rng(7609).bytes(20 * RING)
    got = bytearray()

    async def send() -> None:
        for start in range(0, len(sent), 1000):
            await a.send_all(sent[start : start + 1000])
        await a.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        for number in range(len(sent)):
            view = b.receive_view(1 + 997 * number % 5000)
            async with view as data:
                if not data:
                    break
                count = len(data) if number % 3 else (len(data) + 1) // 2
                got += data[:count]
                view.consume(count)
    assert got == sent
    await close_both(pair)


async def test_a_view_waits_for_data_and_can_be_cancelled(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    with trio.move_on_after(0.01) as scope:
        async with b.receive_view():
            pytest.fail("the call did not wait for data")
    assert scope.cancelled_caught
    await a.send_all(b"data")
    await wait_until_arrived(b, 4)
    with trio.CancelScope() as scope:
        scope.cancel()
        async with b.receive_view():
            pytest.fail("the call ignored the cancellation")
    assert scope.cancelled_caught
    assert await b.receive_some() == b"data"
    await close_both(pair)


async def test_no_other_task_receives_during_a_view(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"data")
    async with b.receive_view(2):
        for call in (b.receive_some, lambda: b.receive_some_into(bytearray(1))):
            with pytest.raises(trio.BusyResourceError):
                await call()
        with pytest.raises(trio.BusyResourceError):
            async with b.receive_view():
                pass
        await b.send_all(b"sending is possible")
    assert await b.receive_some() == b"ta"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(b.receive_some)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            async with b.receive_view():
                pass
        await a.send_all(b"!")
    await close_both(pair)


def _array(view: memoryview) -> Any:
    return np.frombuffer(view, np.uint8)


@pytest.mark.parametrize(
    "keep",
    [_array, lambda view: view[1:3], memoryview, lambda view: view.cast("c")],
)
async def test_a_view_must_not_outlive_its_block(pairs: Pairs, keep: Any) -> None:
    """If another view of the data exists, the end of the block fails, and the bytes stay unread."""
    a, b = await pairs.make()
    await a.send_all(b"0123456789")
    await wait_until_arrived(b, 10)
    kept: list[Any] = []
    with pytest.raises(BufferError, match="still exists"):
        async with b.receive_view() as view:
            kept.append(keep(view))
    assert len(kept[0]) in (2, 10)
    assert await b.receive_some(4) == b"0123"
    kept.clear()
    async with b.receive_view() as view:
        assert keep(view) is not None
        assert bytes(view) == b"456789"
    await a.send_all(bytes(2 * RING if b.mode is Mode.TCP else RING // 2))
    assert await b.receive_some()
    await a.aclose()
    await b.aclose()


async def test_an_error_of_the_block_is_not_replaced(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_all(b"0123456789")
    await wait_until_arrived(b, 10)
    with pytest.raises(KeyError):
        async with b.receive_view(3) as view:
            raise KeyError(bytes(view))
    assert await b.receive_some() == b"3456789"
    await a.send_all(b"more")
    await wait_until_arrived(b, 4)

    async def fail() -> None:
        async with b.receive_view() as view:
            kept = _array(view)
            raise KeyError(len(kept))

    with pytest.raises(KeyError):
        await fail()
    assert await b.receive_some() == b"more"
    await close_both(pair)


async def test_a_view_outlives_the_close_of_its_stream(pairs: Pairs) -> None:
    a, b = await pairs.make()
    await a.send_all(b"data")
    async with b.receive_view() as view:
        await b.aclose()
        assert view[0] == ord("d")
    with pytest.raises(trio.ClosedResourceError):
        async with b.receive_view():
            pass
    await a.aclose()


async def test_errors_match_receive_some(smc: Pairs) -> None:
    a, b = await smc.make()
    await a.send_all(b"data")
    await wait_until_arrived(b, 4)
    async with b.receive_view(2) as view:
        a.abort()
        await wait_all_tasks_blocked()
        assert bytes(view) == b"da"
    async with b.receive_view() as view:
        assert bytes(view) == b"ta"
    with pytest.raises(trio.BrokenResourceError):
        async with b.receive_view():
            pass
    async with b.receive_view() as view:
        assert len(view) == 0
    await b.aclose()


async def test_a_ring_is_not_reused_while_a_part_of_it_is_lent(smc: Pairs) -> None:
    """After the end of the connection, no other connection uses the ring, and it is not cleared."""
    a, b = await smc.make()
    data = bytes(range(200))
    await a.send_all(data)
    await wait_until_arrived(b, len(data))
    async with b.receive_view() as view:
        await b.aclose()
        await a.aclose()
        for _ in range(5):
            pair = await smc.make()
            await pair[0].send_all(b"other data" * 30)
            await pair[1].receive_some()
            await close_both(pair)
        assert bytes(view) == data
    # After the block, the element is free again.
    before = [group.rmbs for group in smc.server.link_groups]
    for _ in range(5):
        await close_both(await smc.make())
    assert [group.rmbs for group in smc.server.link_groups] == before


async def test_a_view_outlives_its_stack() -> None:
    """The view stays valid, and the end of the block raises no exception."""
    data = bytes(range(100))

    async def leave_it(exits: contextlib.AsyncExitStack) -> tuple[SmcStream, memoryview]:
        async with trio_smc.open_stack(smc_config()) as stack:
            [listener] = await stack.open_listeners(0, host="127.0.0.1")
            async with listener, await stack.open_stream(*listener.socket.getsockname()) as a:
                b = await listener.accept()
                await a.send_all(data)
                view = await exits.enter_async_context(b.receive_view())
        return b, view

    with trio.fail_after(PATIENCE):
        async with contextlib.AsyncExitStack() as exits:
            with pytest.warns(ResourceWarning, match="was open"):
                b, view = await leave_it(exits)
            assert bytes(view) == data
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        await b.aclose()
