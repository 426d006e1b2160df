"""A process of the benchmark: `python -m benchmarks.worker ROLE TRANSPORT [--core N]`.

Both roles print one JSON object per line and end with their standard input. A server prints its
address. A client reads {"workload", "at", "seconds"} and answers {"error"} or {"values"}: null if
the workload does not apply to the transport. Workload "mode" answers the mode of a new connection.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any

import trio

from benchmarks.answers import answer
from benchmarks.compared import COMPARED
from benchmarks.transports import PROXIED, TRANSPORTS, WAKES, Transport
from benchmarks.workloads import WORKLOADS
from trio_smc.host.heap import HEAP

# Seconds beyond its timed part after which a workload counts as hung.
PATIENCE = 30.0
FREED = 16 << 20
"""Bytes of a block that each process frees first, as one that has run for a while has done.

Until then glibc returns each block of 128 KiB or more to the kernel, and asyncio, which reads into
256 KiB, takes three times as long (mallopt(3), M_MMAP_THRESHOLD).  A stack of trio_smc frees such a
block by itself.
"""


def write_event(**event: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(event), flush=True)


async def serve(transport: Transport) -> None:
    """Serve the workloads until standard input ends."""
    started = partial(transport.serve, answer, lambda at: write_event(at=at))
    async with transport.scope():
        await transport.loop.run_all([partial(_until_end, transport)], aside=started)


async def _until_end(transport: Transport) -> None:
    async for _ in transport.loop.lines():
        pass


async def client(transport: Transport) -> None:
    """Run the commands on standard input, one after the other."""
    async with transport.scope():
        async for line in transport.loop.lines():
            await run_commands(transport, **json.loads(line))


async def run_commands(
    transport: Transport, workload: str, at: int | str, seconds: float = 0.0, **_: object
) -> None:
    """Run one workload once; print its numbers, or the error."""

    async def run() -> None:
        if workload == "mode":
            await write_mode(transport, at)
        elif transport.workloads and workload not in transport.workloads:
            write_event(values=None)
        else:
            write_event(values=await WORKLOADS[workload].run(transport, at, seconds))

    try:
        await transport.loop.within(seconds + PATIENCE, run)
    except (OSError, EOFError, RuntimeError, trio.BrokenResourceError, trio.TooSlowError) as error:
        write_event(error=f"{workload}: {type(error).__name__}: {error}")


async def write_mode(transport: Transport, at: int | str) -> None:
    """Print the mode of a connection; null for a transport that has only one."""
    async with await transport.connect(at) as stream:
        fallback = getattr(stream, "fallback", None)
        write_event(mode=getattr(stream, "mode", None), fallback=fallback and fallback.message)


def main() -> None:
    """Run the role that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("serve", "client"))
    known = TRANSPORTS | WAKES | PROXIED | COMPARED
    parser.add_argument("transport", choices=known)
    parser.add_argument("--core", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    HEAP.raise_for(FREED)
    role = serve if arguments.role == "serve" else client
    transport = known[arguments.transport]
    transport.loop.run(role, transport)


if __name__ == "__main__":
    main()
