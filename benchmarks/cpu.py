"""Processor time of both ends together: `python -m benchmarks.cpu`.

Both ends run in one process and in one Trio loop that never sleeps.  There is no wait, no wakeup
and no second core: only the work for each message remains.  The minimum of many repetitions hardly
depends on the load of the machine, unlike `python -m benchmarks`, so use this to compare two
versions of the code.  It does not measure latency.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from benchmarks.answers import COUNT, MESSAGE, REQUEST, answer
from benchmarks.transports import BASE, TRANSPORTS, Transport

_REPETITIONS = 12
_REQUESTS = 3000
_BYTES = 64 * 1024 * 1024
_MOST_WRITES = 3000

Measure = Callable[[Transport, int], Awaitable[float]]


async def _receive(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    whole = b""
    while len(whole) < size:
        data = await stream.receive_some(size - len(whole))
        if not data:
            raise EOFError("the peer closed too early")
        whole += data
    return whole


async def requests(connections: int, transport: Transport, port: int) -> float:
    """Microseconds for a 64-byte request and its answer, over this many connections at once."""
    streams = [await transport.connect(port) for _ in range(connections)]
    each = _REQUESTS // connections

    async def send_requests(stream: trio.abc.Stream) -> None:
        for _ in range(each):
            await stream.send_all(bytes(MESSAGE))
            await _receive(stream, MESSAGE)

    for stream in streams:
        await stream.send_all(REQUEST.pack(b"E", MESSAGE))
    start = time.process_time()
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(send_requests, stream)
    used = time.process_time() - start
    for stream in streams:
        await stream.aclose()
    return used / (each * connections) * 1e6


async def writes(size: int, transport: Transport, port: int) -> float:
    """Microseconds for one write of ``size`` bytes and for reading them."""
    data = os.urandom(size)
    count = min(_MOST_WRITES, _BYTES // size)
    async with await transport.connect(port) as stream:
        await stream.send_all(REQUEST.pack(b"S", min(size, 64 * 1024)))
        start = time.process_time()
        for _ in range(count):
            await stream.send_all(data)
        await stream.send_eof()
        await _receive(stream, COUNT.size)
        return (time.process_time() - start) / count * 1e6


async def connections(count: int, transport: Transport, port: int) -> float:
    """Microseconds to open a connection in an existing link group, make a request, and close it."""
    start = time.process_time()
    for _ in range(count):
        async with await transport.connect(port) as stream:
            await stream.send_all(REQUEST.pack(b"E", MESSAGE) + bytes(MESSAGE))
            await _receive(stream, MESSAGE)
    return (time.process_time() - start) / count * 1e6


MEASURES: dict[str, Measure] = {
    "64 B request, 1 connection": partial(requests, 1),
    "64 B request, 10 connections": partial(requests, 10),
    "64 B request, 100 connections": partial(requests, 100),
    "4 KiB write": partial(writes, 4 * 1024),
    "64 KiB write": partial(writes, 64 * 1024),
    "1 MiB write": partial(writes, 1024 * 1024),
    "connection with one request": partial(connections, 50),
}


async def serve(transport: Transport, task_status: trio.TaskStatus[int | str]) -> None:
    """Serve the workloads over a transport until cancelled."""
    await transport.serve(answer, task_status.started)


async def measure(name: str, repetitions: int) -> list[float]:
    """The minimum of each of `MEASURES` over one transport."""
    transport = TRANSPORTS[name]
    async with transport.scope(), trio.open_nursery() as nursery:
        port = await nursery.start(serve, transport)
        async with await transport.connect(port) as stream:  # keeps the link group warm
            mode = getattr(stream, "mode", None)
            if mode is not None and not name.startswith(mode):
                raise SystemExit(f"{name}: NOT smc-r but {mode}")
            least = [
                min([await one(transport, port) for _ in range(repetitions)])
                for one in MEASURES.values()
            ]
        nursery.cancel_scope.cancel()
    return least


def main() -> None:
    """Print a table: a line for each measure, a column for each transport."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--transports", default=f"{BASE},smc-r,smc-r-strict")
    parser.add_argument("--repetitions", type=int, default=_REPETITIONS)
    arguments = parser.parse_args()
    names = arguments.transports.split(",")
    columns = [trio.run(measure, name, arguments.repetitions) for name in names]
    print(f"{'processor time of both ends, µs':32}" + "".join(f"{name:>18}" for name in names))
    for row, label in enumerate(MEASURES):
        print(f"{label:32}" + "".join(f"{column[row]:18.1f}" for column in columns))


if __name__ == "__main__":
    main()
