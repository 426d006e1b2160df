"""`Stack.drain_rnic` and `undrain_rnic`: when a drain ends, and that no data is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

import trio_smc
from tests.api.api_peers import HOST, check_talk, connect
from tests.streams.stream_pairs import cancel_when_blocked
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SmcListener, SoftRnic, Stack


@contextlib.asynccontextmanager
async def stacks(rnics: int) -> AsyncIterator[tuple[Stack, Stack, SmcListener]]:
    """Open a client's stack, a server's stack, and a listener of the server."""

    def config(side: str) -> Config:
        names = [f"{side}{number}" for number in range(rnics)]
        return Config(rnics=tuple(map(SoftRnic, names)), receive_buffer=16384)

    with trio.fail_after(PATIENCE):
        async with (
            trio_smc.open_stack(config("s")) as server,
            trio_smc.open_stack(config("c")) as client,
        ):
            [listener] = await server.open_listeners(0, host=HOST)
            yield client, server, listener


def used(stack: Stack) -> set[str]:
    """Names of the RNICs that have links."""
    return {link.rnic.name for group in stack.link_groups for link in group.links}


async def until_used(stack: Stack, names: set[str]) -> None:
    """Wait until exactly these RNICs have links, and all links are confirmed."""

    def there() -> bool:
        states = {link.state for group in stack.link_groups for link in group.links}
        return used(stack) == names and states == {"ACTIVE"}

    while not there():  # noqa: ASYNC110  # links have no public event
        await trio.sleep(0.001)


@pytest.mark.rfc("2.3/9")
async def test_connections_move_and_continue() -> None:
    async with stacks(2) as (client, _, listener):
        pairs = [await connect(client, listener) for _ in range(4)]
        await until_used(client, {"c0", "c1"})
        await client.drain_rnic("c0")
        assert used(client) == {"c1"}
        await client.drain_rnic("c0")  # a second call has no effect
        for pair in pairs:
            await check_talk(*pair)
        assert client.statistics().failovers == 2
        assert sum(pair[0].statistics().failovers for pair in pairs) == 2
        stream, accepted = await connect(client, listener)
        assert stream.mode is Mode.SMC_R, "the other RNIC did not serve"
        client.undrain_rnic("c0")
        client.undrain_rnic("c0")
        await until_used(client, {"c0", "c1"})
        for pair in (*pairs, (stream, accepted)):
            await check_talk(*pair)
            await pair[0].aclose()
            await pair[1].aclose()


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_a_link_that_returns_gets_its_share_and_no_more(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trio_smc.failover")
    async with stacks(2) as (client, server, listener):
        pairs = [await connect(client, listener) for _ in range(count)]
        await until_used(client, {"c0", "c1"})
        await client.drain_rnic("c1")
        before = [stack.statistics().failovers for stack in (client, server)]
        caplog.clear()
        client.undrain_rnic("c1")
        await until_used(client, {"c0", "c1"})
        # The two sides notice added and deleted links in different orders.
        for stack in (client, server):
            while _uneven(stack):  # noqa: ASYNC110
                await trio.sleep(0.001)
        after = [stack.statistics().failovers for stack in (client, server)]
        moved = [late - early for early, late in zip(before, after, strict=True)]
        assert min(moved) >= count // 2
        assert max(moved) <= count
        for each in (*client.link_groups, *server.link_groups):
            assert sum(link.connections for link in each.links) == count
        messages = [record.getMessage() for record in caplog.records]
        assert sum("continues on link" in line for line in messages) == sum(moved)
        for pair in pairs:
            await check_talk(*pair)
            await pair[0].aclose()
            await pair[1].aclose()


def _uneven(stack: Stack) -> bool:
    loads = [link.connections for group in stack.link_groups for link in group.links]
    return max(loads) - min(loads) > 1


async def test_the_last_rnic_waits_for_its_connections() -> None:
    async with stacks(1) as (client, _, listener), trio.open_nursery() as nursery:
        stream, accepted = await connect(client, listener)
        drained = trio.Event()

        async def drain() -> None:
            await client.drain_rnic("c0")
            drained.set()

        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        await check_talk(stream, accepted)
        other, plain = await connect(client, listener)
        assert other.fallback is not None
        assert other.fallback.reason is FallbackReason.RNIC_DOWN
        assert not drained.is_set()
        await stream.aclose()
        await accepted.aclose()
        await drained.wait()
        assert client.link_groups == ()
        client.undrain_rnic("c0")
        again, there = await connect(client, listener)
        assert again.mode is Mode.SMC_R
        for each in (other, plain, again, there):
            await each.aclose()


@pytest.mark.parametrize("side", ["c0", "s0"])
async def test_an_unused_group_on_the_last_rnic_ends(side: str) -> None:
    async with stacks(1) as (client, server, listener):
        stream, accepted = await connect(client, listener)
        await stream.aclose()
        await accepted.aclose()
        await (client if side == "c0" else server).drain_rnic(side)
        assert used(client if side == "c0" else server) == set()


async def test_undrain_ends_the_wait() -> None:
    async with stacks(1) as (client, _, listener), trio.open_nursery() as nursery:
        stream, accepted = await connect(client, listener)
        nursery.start_soon(client.drain_rnic, "c0")
        nursery.start_soon(client.drain_rnic, "c0")
        await trio.testing.wait_all_tasks_blocked()
        client.undrain_rnic("c0")
        await trio.testing.wait_all_tasks_blocked()
        assert not nursery.child_tasks
        await check_talk(stream, accepted)
        await stream.aclose()
        await accepted.aclose()


async def test_an_rnic_stays_drained_if_the_call_is_cancelled() -> None:
    async with stacks(1) as (client, _, listener):
        stream, accepted = await connect(client, listener)
        assert await cancel_when_blocked(lambda: client.drain_rnic("c0"))
        other, plain = await connect(client, listener)
        assert other.mode is Mode.TCP
        for each in (stream, accepted, other, plain):
            await each.aclose()


async def test_wrong_names_and_closed_stacks() -> None:
    async with stacks(1) as (client, _, _):
        with pytest.raises(ValueError, match="no RNIC 'x'"):
            await client.drain_rnic("x")
        with pytest.raises(ValueError, match="no RNIC 'x'"):
            client.undrain_rnic("x")
        await client.drain_rnic("c0")  # the RNIC has no link
    with pytest.raises(trio.ClosedResourceError):
        await client.drain_rnic("c0")
    with pytest.raises(trio.ClosedResourceError):
        client.undrain_rnic("c0")


async def test_leaving_the_stack_ends_a_drain() -> None:
    async with trio.open_nursery() as nursery, stacks(1) as (client, _, listener):
        stream, accepted = await connect(client, listener)

        async def drain() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await client.drain_rnic("c0")

        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        stream.abort()
        accepted.abort()
