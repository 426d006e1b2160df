"""Echo every connection's bytes: `python examples/echo_server.py [PORT]`."""

from __future__ import annotations

import sys

import trio

import trio_smc


async def echo(stream: trio_smc.SmcStream) -> None:
    """Handle one connection; `serve` closes the stream afterwards."""
    print("connection over", stream.mode, stream.fallback.message if stream.fallback else "")
    try:
        async for data in stream:
            await stream.send_all(data)
    except trio.BrokenResourceError:  # otherwise `serve` would pass it on, and the server would end
        print("a client was gone before it had its answer")


async def main(port: int) -> None:
    """Serve until interrupted; port 0 takes a free one."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio_smc.serve, echo, port)
        print("listening on port", listeners[0].socket.getsockname()[1])


if __name__ == "__main__":
    try:
        trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 7000)
    except* KeyboardInterrupt:
        print("stopped")
