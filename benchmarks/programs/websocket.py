"""A program with trio-websocket: an echo."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import trio
from trio_websocket import (
    ConnectionClosed,
    WebSocketRequest,
    open_websocket,
    serve_websocket,
)

from benchmarks.programs.common import HOST, Server, main, request_in_turn


async def answer(request: WebSocketRequest) -> None:
    """Serve one connection."""
    connection = await request.accept()
    try:
        while True:
            await connection.send_message(await connection.get_message())
    except ConnectionClosed:
        pass


async def serve(_: Path, *, task_status: trio.TaskStatus[dict[str, int]]) -> None:
    """Serve until cancelled."""
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_websocket, answer, HOST, 0, None))
        task_status.started({"tcp": server.port})


async def echo(size: int, server: Server, seconds: float) -> tuple[float, float]:
    """Messages of ``size`` bytes."""
    data = bytes(size)
    port = server.ports["tcp"]
    async with open_websocket(HOST, port, "/", use_ssl=False) as connection:

        async def make_request() -> None:
            await connection.send_message(data)
            if len(await connection.get_message()) != size:
                raise RuntimeError("the answer has another length")

        return await request_in_turn(server, seconds, make_request)


WORKLOADS = {"websocket": partial(echo, 64), "websocket-64k": partial(echo, 64 * 1024)}

if __name__ == "__main__":
    main(serve, WORKLOADS)
