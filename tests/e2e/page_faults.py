"""Count the page faults of a process that receives messages: `python -m tests.e2e.page_faults`.

A peer process sends messages of a size, each preceded by this program's answer to the last one.
Prints, as JSON, the mode of the connection and the page faults for each message, after a warm-up.
"""

from __future__ import annotations

import json
import resource
import sys
from functools import partial

import trio

import trio_smc

WARM_UP, COUNTED = 30, 100


async def send_messages(stream: trio.abc.Stream, size: int) -> None:
    """Send a message for each byte of the peer."""
    message = bytes(size)
    async with stream:
        while await stream.receive_some(1):
            await stream.send_all(message)


async def receive_message(stream: trio.abc.Stream, size: int) -> int:
    """Collect a message like a program with a buffer of its own."""
    await stream.send_all(b".")
    unread = bytearray()
    while len(unread) < size:
        unread += await stream.receive_some(size - len(unread))
    message = bytes(unread[:size])
    del unread[:size]
    return len(message)


async def serve(size: int) -> None:
    """Print the port, and serve until standard input ends."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            partial(trio_smc.serve, partial(send_messages, size=size), 0, host="127.0.0.1")
        )
        sys.stdout.write(f"{listeners[0].socket.getsockname()[1]}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def count(port: int, size: int) -> dict[str, object]:
    """Receive messages; the process's page faults for each one."""
    async with await trio_smc.open_stream("127.0.0.1", port) as stream:
        for _ in range(WARM_UP):
            await receive_message(stream, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(COUNTED):
            await receive_message(stream, size)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return {"mode": stream.mode, "faults": faults / COUNTED}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        trio.run(serve, int(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps(trio.run(count, int(sys.argv[1]), int(sys.argv[2]))))
