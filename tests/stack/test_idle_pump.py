"""Without SMC-R connections the pump of a stack is idle: it has no hooks in Trio's scheduler."""

from __future__ import annotations

import pytest
import trio

from tests.streams.stream_pairs import close_both, open_pairs, read, smc_config, tcp_config
from tests.timing import PATIENCE
from trio_smc import BaseObserver, Stack
from trio_smc.rnic.pump import UNHOOKED, UNUSED_PASSES
from trio_smc.wire import llc


async def until_idle(stack: Stack) -> None:
    """Wait until the stack's pump is idle."""
    while stack.runtime.pump.machine.state != "IDLE":
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("wake", ["trio", "thread"])
async def test_the_pump_is_idle_between_connections(wake: str) -> None:
    async with open_pairs(smc_config(wake=wake), stacks=2) as pairs:
        for _ in range(5):
            with trio.fail_after(PATIENCE):
                client, server = await pairs.make()
                for _ in range(3 * UNUSED_PASSES):
                    await trio.lowlevel.checkpoint()
                    for stack in (pairs.client, pairs.server):
                        assert stack.runtime.pump.machine.state not in UNHOOKED
                await client.send_all(b"ping")
                assert await read(server, 4) == b"ping"
                await server.send_all(b"pong")
                assert await read(client, 4) == b"pong"
                await close_both((client, server))
                for stack in (pairs.client, pairs.server):
                    await until_idle(stack)
                    assert not stack.statistics().open_connections
        assert pairs.client.statistics().link_groups == 1  # all connections used one link group


async def test_tcp_connections_leave_the_pump_idle() -> None:
    async with open_pairs(tcp_config(), stacks=2) as pairs:
        with trio.fail_after(PATIENCE):
            client, server = await pairs.make()
            stacks = pairs.client, pairs.server
            for stack in stacks:
                await until_idle(stack)
            passes = [stack.runtime.pump.passes for stack in stacks]
            await client.send_all(b"ping")
            assert await read(server, 4) == b"ping"
            assert [stack.runtime.pump.machine.state for stack in stacks] == ["IDLE"] * 2
            assert [stack.runtime.pump.passes for stack in stacks] == passes
            await close_both((client, server))


class TestLinkCounter(BaseObserver):
    """Records the direction of TEST LINK messages; ``enough`` is set at the tenth."""

    __test__ = False

    def __init__(self) -> None:
        self.tests: list[bool] = []
        self.enough = trio.Event()

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        if message[0] == llc.TestLink.TYPE:
            self.tests.append(outgoing)
            if len(self.tests) == 10:
                self.enough.set()


async def test_a_link_that_is_tested_while_the_pump_is_idle_stays_up() -> None:
    """Timers send TEST LINK, and the doorbell resumes the hooks of the stack that replies."""
    async with open_pairs(smc_config(test_link_interval=0.05), stacks=2) as pairs:
        counter = TestLinkCounter()
        with trio.fail_after(PATIENCE):
            await close_both(await pairs.make())
            pairs.client.add_observer(counter)
            await counter.enough.wait()
            [group] = pairs.client.link_groups
            assert [link.state for link in group.links] == ["ACTIVE"]
            await close_both(await pairs.make())
        assert set(counter.tests) == {True, False}
        assert pairs.client.statistics().link_groups == 1
