"""Echo every connection's bytes: `python examples/echo_server.py [PORT]`."""

from __future__ import annotations

import sys

import trio

import trio_smc


async def echo(stream: trio_smc.SmcStream) -> None:
    """Handle one connection; `serve` closes the stream afterwards."""
    print("connection over", stream.mode, stream.fallback.message if stream.fallback else "")
    async for data in stream:
        await stream.send_all(data)


if __name__ == "__main__":
    trio.run(trio_smc.serve, echo, int(sys.argv[1]) if len(sys.argv) > 1 else 7000)
