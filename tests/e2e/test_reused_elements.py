"""A peer that reuses an RMB element at once takes nothing from the element's previous user.

The CLC message that names the element travels over TCP.  It can overtake the last CDC messages of
the previous user, which then still wait in the software RNIC.
"""

from __future__ import annotations

import logging
import socket
import struct

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, Mode, SmcStream

AT_ONCE = 60
"""More connections than a queue pair has receives: one poll does not return all their messages."""
ROUNDS = 5
RESET = struct.pack("ii", 1, 0)


async def echo(stream: SmcStream) -> None:
    try:
        async for data in stream:
            await stream.send_all(data)
    except trio.BrokenResourceError:
        pass  # the client has reset the connection


async def use(port: int, reset: bool) -> None:
    stream = await trio_smc.open_stream("127.0.0.1", port)
    assert stream.mode is Mode.SMC_R
    await stream.send_all(b"request")
    assert await stream.receive_some() == b"request"
    if reset:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    await stream.aclose()


@pytest.mark.parametrize("reset", [False, True])
async def test_many_connections_that_end_while_others_begin(
    reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ends are in this process, so the client closes before it has polled."""
    with caplog.at_level(logging.WARNING), trio.fail_after(2 * PATIENCE):
        async with trio_smc.open_stack(Config(learn_short=False)), trio.open_nursery() as nursery:
            listeners = await nursery.start(trio_smc.serve, echo, 0)
            port = listeners[0].socket.getsockname()[1]
            for _ in range(ROUNDS):
                async with trio.open_nursery() as clients:
                    for _ in range(AT_ONCE):
                        clients.start_soon(use, port, reset)
            nursery.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records] == []
