"""Many tasks that wait at once: whoever parks last looks for all of them."""

from __future__ import annotations

import trio
import trio.testing

import trio_smc
from tests.api_peers import HOST, PATIENCE, close_all, connect
from trio_smc import Config, SmcStream

CONNECTIONS = 10
ROUNDS = 20


async def echo(stream: SmcStream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


async def ask(stream: SmcStream) -> None:
    for number in range(ROUNDS):
        await stream.send_all(bytes([number]))
        assert await stream.receive_some() == bytes([number])


async def test_requests_of_many_tasks_hardly_need_the_eventfd() -> None:
    """With every task parked only that ends the scheduler's wait (`Pump.wakeups`)."""
    config = Config(receive_buffer=16384, checkpoints="amortised", spin=0)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            pairs = [await connect(stack, listener) for _ in range(CONNECTIONS)]
            async with trio.open_nursery() as servers:
                for _, there in pairs:
                    servers.start_soon(echo, there)
                before = stack.pump.wakeups
                async with trio.open_nursery() as clients:
                    for here, _ in pairs:
                        clients.start_soon(ask, here)
                assert stack.pump.wakeups - before < ROUNDS // 2
                await trio.testing.wait_all_tasks_blocked()
                assert stack.pump.awake == 0
                assert stack.pump.waiting == CONNECTIONS
                with trio.move_on_after(0.01) as scope:
                    await pairs[0][0].receive_some()
                assert scope.cancelled_caught
                assert stack.pump.awake == 0, "who is cancelled was not woken"
                for here, _ in pairs:
                    await here.send_eof()
            await close_all(*(stream for pair in pairs for stream in pair))
            assert stack.pump.awake == stack.pump.waiting == 0
