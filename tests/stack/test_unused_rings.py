"""A ring without data costs address space and nothing else."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import trio

import trio_smc
from trio_smc import Config, SmcStream

HOST = "127.0.0.1"
COUNT = 60


def page_tables() -> int:
    """Size of this process's page tables in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmPTE:"))


async def _echo_once(stream: SmcStream) -> None:
    await stream.send_all(await stream.receive_some() or b"nothing")


async def test_page_tables_of_unused_rings_cost_nothing() -> None:
    async with (
        trio_smc.open_stack(Config(require_smc=True)) as stack,
        trio.open_nursery() as nursery,
        AsyncExitStack() as streams,
    ):
        listeners = await nursery.start(partial(stack.serve, _echo_once, 0, host=HOST))
        port = listeners[0].socket.getsockname()[1]

        async def connect() -> SmcStream:
            return await streams.enter_async_context(await stack.open_stream(HOST, port))

        first = await connect()
        await first.send_all(b"used")
        assert await first.receive_some() == b"used"
        before = page_tables()
        made = [await connect() for _ in range(COUNT)]
        unused = page_tables() - before
        for stream in made:
            await stream.send_all(b"used")
            assert await stream.receive_some() == b"used"
        used = page_tables() - before
        await streams.aclose()
        nursery.cancel_scope.cancel()
    # A page for each of the two rings, at both ends; the rest is the growing heap.
    assert used >= COUNT * 12
    assert unused <= COUNT
