"""WebSockets over SMC-R, by trio-websocket: `python -m examples.websocket`."""

from __future__ import annotations

from pathlib import Path

import trio
from trio_websocket import (
    ConnectionClosed,
    WebSocketRequest,
    WebSocketServer,
    wrap_client_stream,
)

import trio_smc
from examples import both_ends


async def echo(request: WebSocketRequest) -> None:
    """Send every message back."""
    try:
        connection = await request.accept()
        # A client that is gone already has no address, so only the path is printed.
        print("server: a client opened", request.path)
        while True:
            await connection.send_message(await connection.get_message())
    except ConnectionClosed:
        pass


async def serve(port: int, directory: Path) -> None:
    """Serve until interrupted."""
    async with trio_smc.open_stack() as stack:
        listeners = await trio_smc.open_listeners(port, host=both_ends.HOST)
        both_ends.print_address(listeners[0], directory)
        try:
            # trio-websocket's annotations accept only Trio's listeners.
            await WebSocketServer(echo, listeners).run()  # type: ignore[arg-type]
        finally:
            print("server: connections over smc-r:", stack.statistics().connections)


async def connect(port: int, _: Path) -> None:
    """Send a message and print what comes back."""
    stream = await trio_smc.open_stream(both_ends.HOST, port)
    async with trio.open_nursery() as nursery:
        host = f"{both_ends.HOST}:{port}"
        # trio-websocket's annotations accept only Trio's streams.
        connection = await wrap_client_stream(nursery, stream, host, "/example")  # type: ignore[arg-type]
        async with connection:
            await connection.send_message("hello over a websocket")
            print(await connection.get_message())
            print(both_ends.describe("client", stream))


if __name__ == "__main__":
    both_ends.main("websocket", serve, connect)
