"""A client that measures how long each of its first calls stops its other tasks.

Processor time of the Trio thread is measured and not time, because a busy machine stops every
program.  The output is JSON: for each step the largest processor time between two ticks in
milliseconds, and the modules that were imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable

import trio

TICK = 0.001


class Watch:
    """The steps of the client."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.stalls: dict[str, float] = {}
        self.imported: dict[str, list[str]] = {}

    async def tick(self) -> None:
        while True:
            began = time.thread_time()
            await trio.sleep(TICK)
            self.longest = max(self.longest, time.thread_time() - began)

    async def step(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        """Make a first call."""
        await trio.sleep(10 * TICK)
        self.longest, before = 0.0, set(sys.modules)
        await call()
        await trio.sleep(10 * TICK)
        self.stalls[name] = round(1000 * self.longest, 1)
        self.imported[name] = sorted(set(sys.modules) - before)


async def listen() -> None:
    """Open a listener, and close it."""
    for listener in await trio.open_tcp_listeners(0, host="0.0.0.0"):
        await listener.aclose()


async def request(host: str, port: int) -> None:
    """Connect, and receive an answer."""
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(b"x")
        assert await stream.receive_some(1) == b"x"


async def refused() -> None:
    try:
        await trio.open_tcp_stream("127.0.0.1", 1)
    except OSError:
        return
    raise AssertionError("port 1 is open")


async def client(port: int, plain: int, other: str) -> None:
    """Connect to the server, and to a TCP server; ``other``: this host's address."""
    watch = Watch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.tick)
        await watch.step("listen", listen)
        await watch.step("loopback", lambda: request("127.0.0.1", port))
        await watch.step("other address", lambda: request(other, port))
        await watch.step("TCP", lambda: request("127.0.0.1", plain))
        await watch.step("TCP at the other address", lambda: request(other, plain))
        await watch.step("refused", refused)
        nursery.cancel_scope.cancel()
    sys.stdout.write(json.dumps([watch.stalls, watch.imported]))


async def serve() -> None:
    """Echo."""

    async def echo(stream: trio.SocketStream) -> None:
        async for piece in stream:
            await stream.send_all(piece)

    [listener] = await trio.open_tcp_listeners(0, host="0.0.0.0")
    sys.stdout.write(f"{listener.socket.getsockname()[1]}\n")
    sys.stdout.flush()
    await trio.serve_listeners(echo, [listener])


if __name__ == "__main__":
    if sys.argv[1:]:
        trio.run(client, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        trio.run(serve)
