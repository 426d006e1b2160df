"""A program without SMC-R connections pays nothing for SMC-R in each pass of the scheduler."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.streams.stream_pairs import close_both, open_pairs, read, smc_config, tcp_config
from trio_smc import Stack
from trio_smc._base.observer import ObserverGroup
from trio_smc.rnic.pump import _UNUSED
from trio_smc.wire import llc

PATIENCE = 20


async def passes(stack: Stack, count: int) -> int:
    """In how many of so many passes the pump had something to do."""
    pump = stack.runtime.pump
    before = pump.passes
    for _ in range(count):
        await trio.lowlevel.checkpoint()
    return pump.passes - before


@pytest.mark.parametrize("wake", ["trio", "thread"])
async def test_between_connections_it_rests(wake: str) -> None:
    async with open_pairs(smc_config(wake=wake), stacks=2) as pairs:
        for number in range(5):
            with trio.fail_after(PATIENCE):
                client, server = await pairs.make()
                for stack in (pairs.client, pairs.server):
                    assert await passes(stack, 3 * _UNUSED) == 3 * _UNUSED
                await client.send_all(b"ping")
                assert await read(server, 4) == b"ping"
                await server.send_all(b"pong")
                assert await read(client, 4) == b"pong"
                await close_both((client, server))
                for stack in (pairs.client, pairs.server):
                    while stack.statistics().open_connections:
                        await wait_all_tasks_blocked(0.001)
                    await passes(stack, 2 * _UNUSED)
                    assert await passes(stack, _UNUSED) == 0, number
        assert pairs.client.statistics().link_groups == 1  # which was there all the time


async def test_connections_that_are_tcp_do_not_use_it() -> None:
    async with open_pairs(tcp_config(), stacks=2) as pairs:
        client, server = await pairs.make()
        await passes(pairs.client, 2 * _UNUSED)
        await client.send_all(b"ping")
        assert await read(server, 4) == b"ping"
        assert await passes(pairs.client, _UNUSED) == 0
        assert await passes(pairs.server, _UNUSED) == 0
        await close_both((client, server))


class Heard(ObserverGroup):
    """Counts TEST LINK messages, requests and replies, and tells of the tenth."""

    def __init__(self) -> None:
        super().__init__(())
        self.tests: list[bool] = []
        self.enough = trio.Event()

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        if message[0] == llc.TestLink.TYPE:
            self.tests.append(outgoing)
            if len(self.tests) == 10:
                self.enough.set()


async def test_a_link_that_is_tested_at_rest_stays_up() -> None:
    """What travels without connections is sent by timers, and answered by who is roused."""
    async with open_pairs(smc_config(test_link_interval=0.05), stacks=2) as pairs:
        heard = Heard()
        with trio.fail_after(PATIENCE):
            await close_both(await pairs.make())
            pairs.client.add_observer(heard)
            await heard.enough.wait()
            [group] = pairs.client.link_groups
            assert [link.state for link in group.links] == ["ACTIVE"]
            await close_both(await pairs.make())
        assert set(heard.tests) == {True, False}
        assert pairs.client.statistics().link_groups == 1
