"""A program that never closes its streams, as `python -m tests.e2e.careless HOW SMC PORT COUNT`.

It connects COUNT times, sends `SENT` on each connection and ends by HOW: it returns, raises, is
interrupted, forgets its streams, waits for a command, or leaves at once; "closes" is not careless.
SMC: "ours" for `trio_smc.open_stream`, or "enabled" for `trio.open_tcp_stream` under `enable()`.

At the end it prints when its run was over, and `waited`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import trio

import trio_smc

SENT = b"x" * 100_000
HOST = "127.0.0.1"
HELLO = b"+"
"""The first bytes of a server in the case "unread"."""


def waited() -> float:
    """Seconds for which this thread was runnable while others had the processor."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


async def main(how: str, smc: str, port: int, count: int) -> Any:
    """Connect, send, and end without closing."""
    dial: Any = trio_smc.open_stream if smc == "ours" else trio.open_tcp_stream
    streams = []
    for _ in range(count):
        streams.append(await dial(HOST, port))
        await streams[-1].send_all(SENT)
    match how:
        case "returns":
            return streams
        case "exit":
            raise SystemExit(3)
        case "error":
            raise RuntimeError("careless")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()
        case "forgets":
            streams.clear()
            gc.collect()
            await trio.sleep(0.3)  # the task goes on with something else
        case "waits" | "closes":
            sys.stdout.write("\n")
            sys.stdout.flush()
            await trio.to_thread.run_sync(sys.stdin.read)
            sys.stdout.write(f"{waited()} ")
            if how == "closes":
                for stream in streams:
                    stream.close()
            return streams
        case "_exit":
            os._exit(0)
    return None


if __name__ == "__main__":
    way, mode, *numbers = sys.argv[1:]
    if mode == "enabled":
        trio_smc.enable(trio_smc.Config(learn_short=False))
    try:
        port_number, connections = map(int, numbers)
        trio.run(main, way, mode, port_number, connections)
    finally:
        sys.stdout.write(
            f"{time.monotonic()} {waited()}\n"
        )  # the run is over; the interpreter is not
