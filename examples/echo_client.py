"""Send a line to the echo server: `python examples/echo_client.py [PORT] [HOST]`."""

from __future__ import annotations

import sys

import trio

import trio_smc


async def main(port: int, host: str) -> None:
    """Connect, say hello, print what comes back and how it travelled."""
    async with await trio_smc.open_stream(host, port) as stream:
        await stream.send_all(b"hello over " + stream.mode.encode())
        await stream.send_eof()
        answer = b"".join([data async for data in stream])
        print(answer.decode(), "-", stream.fallback.message if stream.fallback else "no fallback")


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 7000
    trio.run(main, port, sys.argv[2] if len(sys.argv) > 2 else "localhost")
