"""A process that uses the public API of any release of trio_smc, with the release's defaults.

Arguments: the directory with the package, and

- "serve": the process prints a port, echoes what it receives, and has a connection to itself.
- "connect" and a port: the process sends a kilobyte, reads it back, and prints the mode and the
  reason for TCP ("None": there is none).

The process runs until its standard input ends.
"""

from __future__ import annotations

import sys
from typing import Any

import trio

DATA = bytes(range(256)) * 4


def print_line(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def echo(stream: Any) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)


async def talk(stream: Any) -> None:
    await stream.send_all(DATA)
    received = b""
    while len(received) < len(DATA):
        received += await stream.receive_some()
    assert received == DATA
    reason = stream.fallback and stream.fallback.reason.value
    print_line(f"{stream.mode} {reason}")


async def main(trio_smc: Any, kind: str, port: int = 0) -> None:
    async with trio.open_nursery() as nursery:
        if kind == "serve":
            listeners = await nursery.start(
                lambda task_status: trio_smc.serve(
                    echo, 0, host="127.0.0.1", task_status=task_status
                )
            )
            port = listeners[0].socket.getsockname()[1]
            print_line(port)
        async with await trio_smc.open_stream("127.0.0.1", port) as stream:
            await talk(stream)
            async with trio.lowlevel.FdStream(0) as commands:
                await commands.receive_some()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import trio_smc

    assert trio_smc.__file__.startswith(f"{sys.argv[1]}/"), trio_smc.__file__
    trio.run(main, trio_smc, sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0)
