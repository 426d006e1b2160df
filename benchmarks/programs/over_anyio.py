"""A program written against AnyIO, on Trio: an echo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import trio

from benchmarks.programs.common import HOST, READ, Server, main, request_in_turn


async def answer(stream: anyio.abc.SocketStream) -> None:
    """Serve one connection."""
    async with stream:
        async for data in stream:
            await stream.send(data)


async def serve(_: Path, *, task_status: trio.TaskStatus[dict[str, int]]) -> None:
    """Serve until cancelled."""
    listener = await anyio.create_tcp_listener(local_host=HOST)
    task_status.started({"tcp": listener.extra(anyio.abc.SocketAttribute.local_port)})
    await listener.serve(answer)


async def echo(size: int, server: Server, seconds: float) -> tuple[float, float]:
    """Requests of ``size`` bytes."""
    data = bytes(size)
    async with await anyio.connect_tcp(HOST, server.ports["tcp"]) as stream:

        async def make_request() -> None:
            await stream.send(data)
            left = size
            while left:
                left -= len(await stream.receive(READ))

        return await request_in_turn(server, seconds, make_request)


WORKLOADS = {"anyio": partial(echo, 64), "anyio-64k": partial(echo, 64 * 1024)}


def run(function: Any) -> None:
    """Run the function on Trio."""
    anyio.run(function, backend="trio")


if __name__ == "__main__":
    main(serve, WORKLOADS, run)
