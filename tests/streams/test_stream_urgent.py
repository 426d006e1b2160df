"""Urgent data of streams, over SMC-R and over TCP."""

from __future__ import annotations

import errno
import random
import socket as stdlib_socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

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
from trio_smc import SmcStream

KINDS = {
    "one-stack": (smc_config(), 1),
    "two-stacks": (smc_config(), 2),
    "eye-catcher": (smc_config(rmbe_eye_catcher=True), 1),
    "amortised": (smc_config(checkpoints="amortised"), 1),
    "tcp": (tcp_config(), 1),
}
INLINE = (stdlib_socket.SOL_SOCKET, stdlib_socket.SO_OOBINLINE)


@pytest.fixture(params=KINDS)
async def pairs(request: pytest.FixtureRequest) -> AsyncIterator[Pairs]:
    config, stacks = KINDS[request.param]
    async with open_pairs(config, stacks=stacks) as made:
        yield made


@pytest.fixture
async def smc() -> AsyncIterator[Pairs]:
    async with open_pairs(smc_config()) as made:
        yield made


@pytest.mark.rfc("4.7.5/2")
async def test_an_urgent_byte_beside_the_stream(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_urgent(b"abc!")
    assert await b.wait_urgent() == "present"
    assert await b.receive_urgent() == b"!"
    assert await read(b, 3) == b"abc"
    await a.send_all(b"def")
    assert await read(b, 3) == b"def"
    await close_both(pair)


async def test_both_ends_send_urgent_data_repeatedly(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()

    async def talk(out: SmcStream, into: SmcStream) -> None:
        for i in range(50):
            await out.send_all(b"normal")
            await out.send_urgent(b"data" + bytes([i]))
            assert await read(into, 10) == b"normaldata"
            assert await into.receive_urgent() == bytes([i])

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk, a, b)
            nursery.start_soon(talk, b, a)
    await close_both(pair)


async def test_an_urgent_byte_ends_a_wait(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    seen: list[object] = []

    async def wait() -> None:
        seen.append(await b.wait_urgent())
        seen.append(await b.receive_urgent())

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked(0.01)
            await a.send_all(b"not urgent")
            await wait_all_tasks_blocked(0.01)
            assert seen == []
            await a.send_urgent(b"?")
    assert seen == ["present", b"?"]
    assert await read(b, 10) == b"not urgent"
    await close_both(pair)


async def test_an_inline_urgent_byte_stays_in_the_stream(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    b.setsockopt(*INLINE, 1)
    await a.send_urgent(b"abc!")
    with trio.fail_after(PATIENCE):
        assert await b.wait_urgent() == "present"
        with pytest.raises(OSError, match="stays in the stream") as caught:
            await b.receive_urgent()
        assert caught.value.errno == errno.EINVAL
        assert await read(b, 4) == b"abc!"
        await a.send_all(b"def")
        assert await read(b, 3) == b"def"
    with trio.move_on_after(0.02) as scope:
        await b.wait_urgent()
    assert scope.cancelled_caught
    await close_both(pair)


async def test_inline_by_socket_option(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    assert b.getsockopt(*INLINE) == 0
    b.setsockopt(*INLINE, 1)
    assert b.getsockopt(*INLINE) == 1
    await a.send_urgent(b"abc!")
    assert await b.wait_urgent() == "present"
    assert await read(b, 4) == b"abc!"
    b.setsockopt(*INLINE, 0)
    await a.send_urgent(b"def!")
    assert await b.receive_urgent() == b"!"
    assert await read(b, 3) == b"def"
    await close_both(pair)


@pytest.mark.rfc("4.7.6/2")
async def test_a_closed_window_is_pending_until_it_is_read(smc: Pairs) -> None:
    a, b = pair = await smc.make()
    await a.send_all(bytes(SMALL_RING))
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send_urgent, b"late!")
            assert await b.wait_urgent() == "pending"
            nursery.start_soon(read, b, SMALL_RING + 4)
            assert await b.receive_urgent() == b"!"
    await close_both(pair)


@pytest.mark.rfc("4.7.5/4")
async def test_writes_wait_for_the_acknowledgement(smc: Pairs) -> None:
    a, b = pair = await smc.make()
    await a.send_urgent(b"ab!")
    with trio.move_on_after(0.02) as scope:
        await a.wait_send_all_might_not_block()
    assert scope.cancelled_caught
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send_all, b"cd")
            await wait_all_tasks_blocked(0.01)
            assert await read(b, 2) == b"ab"
            assert await read(b, 2) == b"cd"
    assert await b.receive_urgent() == b"!"
    await close_both(pair)


async def test_a_cancelled_urgent_send_leaves_nothing_urgent(smc: Pairs) -> None:
    a, b = pair = await smc.make()
    await a.send_all(bytes(SMALL_RING - 3))
    assert await cancel_when_blocked(lambda: a.send_urgent(b"abcdef!"))
    assert await read(b, SMALL_RING) == bytes(SMALL_RING - 3) + b"abc"
    await a.send_all(b"x")
    assert await read(b, 1) == b"x"
    with trio.move_on_after(0.02) as scope:
        await b.wait_urgent()
    assert scope.cancelled_caught
    await close_both(pair)


@pytest.mark.parametrize("name", ["wait_urgent", "receive_urgent"])
async def test_a_closed_stream(pairs: Pairs, name: str) -> None:
    """The texts are those of Trio."""
    a, b = await pairs.make()
    call: Callable[[], Awaitable[object]] = getattr(b, name)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError, match="another task closed this fd"):
                    await call()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked(0.01)
            await b.aclose()
        with pytest.raises(trio.ClosedResourceError, match="this socket was already closed"):
            await call()
        await a.aclose()


async def test_a_large_urgent_send_from_a_buffer_that_changes(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    buffer = bytearray(b"\1" * 300_000 + b"!")

    async def send() -> None:
        await a.send_urgent(buffer)
        buffer[:] = bytes(len(buffer))
        buffer.clear()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await read(b, 300_000) == b"\1" * 300_000
        assert await b.receive_urgent() == b"!"
    await close_both(pair)


async def test_send_urgent_checks_its_argument(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    with pytest.raises(ValueError, match="at least one byte"):
        await a.send_urgent(b"")
    with pytest.raises(TypeError):
        await a.send_urgent("text")  # type: ignore[arg-type]
    await a.send_urgent(memoryview(b"a-b-!-")[::2])
    assert await read(b, 2) == b"ab"
    assert await b.receive_urgent() == b"!"
    await close_both(pair)


@pytest.mark.parametrize("shape", SENT)
async def test_data_of_every_shape_and_format(pairs: Pairs, shape: str, rng: random.Random) -> None:
    a, b = pair = await pairs.make()
    data = rng.randbytes(ALIGNMENT)
    with trio.fail_after(PATIENCE):
        await a.send_urgent(SENT[shape](data))
        assert await read(b, ALIGNMENT - 1) == data[:-1]
        assert await b.receive_urgent() == data[-1:]
    await close_both(pair)


async def test_every_call_is_a_checkpoint(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await b.send_urgent(b"!")
    with trio.fail_after(PATIENCE):
        with assert_checkpoints():
            await a.wait_urgent()
        with assert_checkpoints():
            await a.receive_urgent()
    with trio.CancelScope() as scope:
        scope.cancel()
        await a.send_urgent(b"never sent")
    assert scope.cancelled_caught
    await a.send_all(b"x")
    assert await read(b, 1) == b"x"
    await close_both(pair)


WAITS: dict[str, Callable[[SmcStream], Awaitable[object]]] = {
    "wait": lambda stream: stream.wait_urgent(),
    "receive": lambda stream: stream.receive_urgent(),
}


async def raises(error: type[Exception], call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(error):
        await call()


@pytest.mark.parametrize("wait", WAITS)
async def test_one_task_at_a_time(pairs: Pairs, wait: str) -> None:
    a, b = pair = await pairs.make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(WAITS[wait], b)
        await wait_all_tasks_blocked(0.01)
        for other in WAITS.values():
            with pytest.raises(trio.BusyResourceError):
                await other(b)
        await a.send_urgent(b"!")
    await close_both(pair)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_closing_wakes_waiting_tasks(pairs: Pairs, wait: str, how: str) -> None:
    _, b = pair = await pairs.make()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, trio.ClosedResourceError, lambda: WAITS[wait](b))
            await wait_all_tasks_blocked(0.01)
            if how == "aclose":
                await b.aclose()
            else:
                b.abort()
    with pytest.raises(trio.ClosedResourceError):
        await WAITS[wait](b)
    with pytest.raises(trio.ClosedResourceError):
        await b.send_urgent(b"!")
    await close_both(pair)


@pytest.mark.parametrize("wait", WAITS)
async def test_the_peers_end_ends_the_wait(pairs: Pairs, wait: str) -> None:
    a, b = pair = await pairs.make()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, trio.EndOfChannel, lambda: WAITS[wait](b))
            await wait_all_tasks_blocked(0.01)
            await a.send_eof()
        await raises(trio.EndOfChannel, lambda: WAITS[wait](b))
    await b.send_urgent(b"still!")
    assert await a.receive_urgent() == b"!"
    assert await read(a, 5) == b"still"
    await close_both(pair)


@pytest.mark.parametrize("wait", WAITS)
async def test_the_peers_abort_ends_the_wait(pairs: Pairs, wait: str) -> None:
    a, b = pair = await pairs.make()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, trio.BrokenResourceError, lambda: WAITS[wait](b))
            await wait_all_tasks_blocked(0.01)
            a.abort()
        await raises(trio.BrokenResourceError, lambda: WAITS[wait](b))
        with pytest.raises(trio.BrokenResourceError):
            await b.send_urgent(b"!")
    await close_both(pair)


async def test_urgent_data_and_the_end_at_once(pairs: Pairs) -> None:
    a, b = pair = await pairs.make()
    await a.send_urgent(b"last!")
    await a.aclose()
    with trio.fail_after(PATIENCE):
        assert await b.wait_urgent() == "present"
        assert await b.receive_urgent() == b"!"
        assert await read(b, 4) == b"last"
        assert await b.receive_some() == b""
        with pytest.raises(trio.EndOfChannel):
            await b.wait_urgent()
    await close_both(pair)


async def test_after_send_eof_nothing_is_urgent(smc: Pairs) -> None:
    a, _ = pair = await smc.make()
    await a.send_eof()
    with pytest.raises(trio.ClosedResourceError):
        await a.send_urgent(b"!")
    await close_both(pair)


async def test_tcp_sends_one_urgent_byte() -> None:
    """A plain TCP program receives the byte."""
    async with open_pairs(tcp_config()) as pairs:
        a, b = pair = await pairs.make()
        assert isinstance(b.socket, trio.socket.SocketType)
        await a.send_urgent(b"abc!")
        assert await b.wait_urgent() == "present"
        assert await b.socket.recv(1, stdlib_socket.MSG_OOB) == b"!"
        await b.socket.send(b"x", stdlib_socket.MSG_OOB)
        assert await a.receive_urgent() == b"x"
        assert await read(b, 3) == b"abc"
        await close_both(pair)


async def test_tcp_reports_pending_data_only_at_a_call() -> None:
    """A probe of the window brings the announcement, and the kernel wakes no task for it."""
    async with open_pairs(tcp_config()) as pairs:
        a, b = pair = await pairs.make()
        a.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF, 1 << 18)
        a.setsockopt(stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_NOTSENT_LOWAT, 1 << 18)
        await a.send_all(bytes(60_000))  # more than the other end accepts
        await a.send_urgent(b"abc!")
        state = ""
        with trio.fail_after(PATIENCE):
            while not state:
                with trio.move_on_after(0.05):
                    state = await b.wait_urgent()
            assert state == "pending"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, b, 60_003)
                assert await b.receive_urgent() == b"!"
        await close_both(pair)


async def test_tcp_senders_do_not_mix() -> None:
    async with open_pairs(tcp_config()) as pairs:
        a, b = await pairs.clogged()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.send_urgent, b"ab!")
            await wait_all_tasks_blocked(0.01)
            with pytest.raises(trio.BusyResourceError):
                await a.send_all(b"x")
            with pytest.raises(trio.BusyResourceError):
                await a.send_urgent(b"x")
            nursery.cancel_scope.cancel()
        a.abort()
        await close_both((a, b))
