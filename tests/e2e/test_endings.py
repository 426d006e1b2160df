"""Every way a connection can end, from both sides, within a process and across two."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests import leaks
from tests.e2e.processes import Peer, open_peer
from tests.peers import endpoint_of
from tests.ports import reserved_port
from tests.streams.stream_pairs import HOST, SMALL_RING, Pairs, open_pairs, smc_config
from tests.timing import SLOWER
from trio_smc import SmcStream, Stack
from trio_smc.streams.rdma_stream import RdmaStream

PROMPT = 15.0 * SLOWER
"""Seconds after which an error is no longer prompt; it takes milliseconds on an idle machine."""


@pytest.fixture(params=[1, 2], ids=["one-stack", "two-stacks"])
def stacks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=["trio", "thread"])
async def pairs(request: pytest.FixtureRequest, stacks: int) -> AsyncIterator[Pairs]:
    async with open_pairs(smc_config(wake=request.param), stacks=stacks) as made:
        yield made
        # Long before any timer of the connections.
        with trio.fail_after(PROMPT):
            for stack in (made.client, made.server):
                await all_closed(stack)


async def all_closed(stack: Stack) -> None:
    while stack.statistics().open_connections:  # noqa: ASYNC110  # no event to wait for
        await trio.sleep(0.01)


async def read_all(stream: SmcStream) -> bytes:
    data = b""
    while piece := await stream.receive_some():
        data += piece
    return data


async def send_for_ever(stream: SmcStream) -> None:
    while True:
        await stream.send_all(bytes(10_000))


def both_orders(pair: tuple[SmcStream, SmcStream], first: str) -> tuple[SmcStream, SmcStream]:
    return pair if first == "client" else (pair[1], pair[0])


FIRST = pytest.mark.parametrize("first", ["client", "server"])


# --- in order ----------------------------------------------------------------------------------


@FIRST
async def test_half_close_then_close(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.make(), first)
    await a.send_all(b"from a")
    await a.send_eof()
    assert await read_all(b) == b"from a"
    await b.send_all(b"from b")
    await b.aclose()
    assert await read_all(a) == b"from b"
    await a.aclose()


@FIRST
async def test_half_close_on_both_sides(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.make(), first)
    for stream in (a, b):
        await stream.send_all(b"last")
        await stream.send_eof()
    for stream in (a, b):
        assert await read_all(stream) == b"last"
    await a.aclose()
    await b.aclose()


@FIRST
async def test_half_close_at_once_with_full_rings(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.clogged(), first)

    async def finish(stream: SmcStream) -> None:
        await stream.send_all(bytes(3 * SMALL_RING))
        await stream.send_eof()

    async def drain(stream: SmcStream) -> None:
        assert len(await read_all(stream)) == 4 * SMALL_RING

    async with trio.open_nursery() as nursery:
        for stream in (a, b):
            nursery.start_soon(finish, stream)
        for stream in (a, b):
            nursery.start_soon(drain, stream)
    await a.aclose()
    await b.aclose()


async def test_close_at_once_on_both_sides(pairs: Pairs) -> None:
    for _ in range(20):
        a, b = await pairs.make()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.aclose)
            nursery.start_soon(b.aclose)


@FIRST
async def test_data_sent_before_the_close_arrives(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.make(), first)
    await a.send_all(bytes(SMALL_RING))
    await a.aclose()
    assert len(await read_all(b)) == SMALL_RING
    await b.send_all(b"this is not read")
    with pytest.raises(trio.BrokenResourceError):
        await b.send_all(b"this is not read")
    await b.aclose()


# --- resets ------------------------------------------------------------------------------------


@FIRST
@pytest.mark.parametrize("what", ["receive", "send", "wait"])
async def test_abort_reaches_a_parked_peer(pairs: Pairs, first: str, what: str) -> None:
    a, b = both_orders(await (pairs.make() if what == "receive" else pairs.clogged()), first)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "receive": b.receive_some,
        "send": lambda: send_for_ever(b),
        "wait": lambda: wait_and_send(b),
    }
    await expect_broken(calls[what], a.abort)
    await b.aclose()


async def wait_and_send(stream: SmcStream) -> None:
    await stream.wait_send_all_might_not_block()
    await send_for_ever(stream)


async def expect_broken(call: Callable[[], Awaitable[object]], cause: Callable[[], object]) -> None:
    """``call`` is parked, ``cause`` breaks it."""

    async def parked() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await call()

    with trio.fail_after(PROMPT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parked)
            await wait_all_tasks_blocked()
            cause()


async def test_abort_on_both_sides_at_once(pairs: Pairs) -> None:
    for _ in range(20):
        a, b = await pairs.clogged()
        a.abort()
        b.abort()


@FIRST
async def test_close_with_unread_data_resets(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.make(), first)
    await b.send_all(b"unread")
    await wait_all_tasks_blocked()
    await a.aclose()
    with trio.fail_after(PROMPT), pytest.raises(trio.BrokenResourceError):
        await b.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await b.send_all(b"x")
    await b.aclose()


@FIRST
async def test_close_while_the_peer_is_blocked_in_a_send(pairs: Pairs, first: str) -> None:
    a, b = both_orders(await pairs.clogged(), first)

    async def parked() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await send_for_ever(b)

    with trio.fail_after(PROMPT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parked)
            await wait_all_tasks_blocked()
            await a.aclose()
    await b.aclose()


@FIRST
async def test_a_reset_of_tcp_after_the_close_loses_nothing(pairs: Pairs, first: str) -> None:
    """A peer that has closed, and then gives up waiting for our answer."""
    a, b = both_orders(await pairs.make(), first)
    assert isinstance(a, RdmaStream)
    await a.send_all(b"whole")
    endpoint = endpoint_of(pairs.client if first == "client" else pairs.server, a)
    await a.aclose()
    endpoint.connection.on_timer()
    await wait_all_tasks_blocked(0.05)
    assert await read_all(b) == b"whole"
    with pytest.raises(trio.BrokenResourceError):
        await b.send_all(b"x")
    await b.aclose()


# --- a stack is left ---------------------------------------------------------------------------


async def test_a_slow_reader_loses_nothing() -> None:
    """The client's stack gives up waiting for the answer to its close; its data stays."""
    config = smc_config(shutdown_timeout=0.05)
    async with trio_smc.open_stack(config):
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        port = listener.socket.getsockname()[1]
        for _ in range(10):
            async with trio_smc.open_stack(config):
                stream = await trio_smc.open_stream(HOST, port)
                accepted = await listener.accept()
                await stream.send_all(b"1" * SMALL_RING)
                await stream.aclose()
            await trio.sleep(0.02)
            assert await read_all(accepted) == b"1" * SMALL_RING
            await accepted.aclose()


async def test_leaving_a_stack_whose_warnings_are_errors() -> None:
    with trio.fail_after(PROMPT), pytest.raises(ResourceWarning):
        await _leave_with_an_open_stream()


async def _leave_with_an_open_stream() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with open_pairs(smc_config()) as pairs:
            streams = await pairs.make()
    del streams


# --- the peer process is killed ----------------------------------------------------------------


@contextlib.asynccontextmanager
async def surviving() -> AsyncIterator[Stack]:
    """A stack in this process that holds no more resources at the end than at the beginning.

    The next process that reads the directory removes the files that killed processes have left.
    """
    async with trio_smc.open_stack(smc_config()) as stack:
        before = leaks.take()
        yield stack
        with trio.fail_after(PROMPT):
            await all_closed(stack)
            while stack.link_groups:  # noqa: ASYNC110  # no event to wait for
                await trio.sleep(0.01)
        await wait_all_tasks_blocked()
        gc.collect()
        with trio.move_on_after(PROMPT):
            while leaks.leaked(before, leaks.take()):  # noqa: ASYNC110  # large memory is unmapped
                await trio.sleep(0.01)
        assert leaks.leaked(before, leaks.take()) == []
    async with trio_smc.open_stack(smc_config()):
        pass


async def send_until_broken(stream: SmcStream) -> None:
    with pytest.raises(trio.BrokenResourceError):
        await send_for_ever(stream)


# The calls of the victim, and of this side until it observes the end: the kernel closes the socket
# of a killed process, so a reader gets all data and the end of the stream, as over TCP.
WHILE: dict[str, tuple[str, Callable[[SmcStream], Awaitable[object]]]] = {
    "it sends": ("pour", read_all),
    "it receives": ("swallow", send_until_broken),
    "idle": ("echo", read_all),
    "it does not read": ("sleep", send_until_broken),
}


@pytest.mark.parametrize("while_", WHILE)
@pytest.mark.parametrize("connections", [1, 20])
async def test_a_killed_server(while_: str, connections: int) -> None:
    handler, use = WHILE[while_]
    async with open_peer({}) as victim, surviving():
        port = (await victim.call("listen", handler=handler))["port"]
        streams = [await trio_smc.open_stream(HOST, port) for _ in range(connections)]
        await kill_while(victim, streams, use)
        await victim.process.wait()
        with contextlib.ExitStack() as exits:
            # If a connection of another process has drawn the port, no server can get it either.
            with contextlib.suppress(OSError):
                exits.enter_context(reserved_port(port))
            with pytest.raises(OSError, match="refused"):
                await trio_smc.open_stream(HOST, port)
            # A stack that has not searched for this listener yet finds its name, and removes it.
            async with trio_smc.open_stack(smc_config()) as fresh:
                with pytest.raises(OSError, match="refused"):
                    await fresh.open_stream(HOST, port)


async def kill_while(
    victim: Peer, streams: list[SmcStream], use: Callable[[SmcStream], Awaitable[object]]
) -> None:
    async def user(stream: SmcStream) -> None:
        assert stream.mode == "smc-r"
        await use(stream)
        # After the peer's end the first send succeeds: TCP has no answer of the peer yet.
        await send_until_broken(stream)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(user, stream)
        await trio.sleep(0.05)  # so that much data is in flight
        victim.process.kill()
        nursery.cancel_scope.deadline = trio.current_time() + PROMPT
    assert not nursery.cancel_scope.cancelled_caught, "a call waited too long"


@pytest.mark.parametrize("while_", ["idle", "it does not read"])
async def test_a_killed_client(while_: str) -> None:
    async with surviving():
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        port = listener.socket.getsockname()[1]
        for _ in range(2):
            # The second is served by a link group of its own.
            async with open_peer({}) as victim:
                assert await victim.call("hold", port=port) == {"mode": "smc-r"}
                await kill_while(victim, [await listener.accept()], WHILE[while_][1])
        await listener.aclose()
