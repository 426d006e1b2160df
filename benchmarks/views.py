"""Receive arrays and sum them: `python -m benchmarks.views`.

A process sends numbers of 8 bytes in writes of 1 MiB, and another one sums them with numpy: over
TCP, and over SMC-R with `receive_some`, `receive_some_into` and `receive_view`.  Rounds are
interleaved, and each ratio is formed inside a round; above 1 means better than TCP.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import trio

import trio_smc
from benchmarks import report

HOST = "127.0.0.1"
_SIZE = 1 << 20
_MIB = 1 << 20
_ITEM = 8
WAYS = ("tcp", "receive_some", "receive_some_into", "receive_view")


def _send(way: str, there: Connection) -> None:
    """Send the number of bytes that is requested, on each connection."""

    async def handle(stream: trio.abc.Stream) -> None:
        data = np.arange(_SIZE // _ITEM, dtype=np.uint64).tobytes()
        left = int.from_bytes(await stream.receive_some(_ITEM))
        for _ in range(left // _SIZE):
            await stream.send_all(data)
        await stream.send_eof()  # type: ignore[attr-defined]
        await stream.receive_some()

    async def serve() -> None:
        start: Any = trio.serve_tcp if way == "tcp" else trio_smc.serve
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(lambda **more: start(handle, 0, host=HOST, **more))
            there.send(listeners[0].socket.getsockname()[1])
            await trio.to_thread.run_sync(there.recv, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()

    trio.run(serve)


def _sum(data: Any, kept: bytearray) -> int:
    """The sum of all whole numbers; the bytes of the last one stay in ``kept``."""
    total = 0
    start = 0
    if kept:
        start = min(_ITEM - len(kept), len(data))
        kept += data[:start]
        if len(kept) < _ITEM:
            return 0
        total = int.from_bytes(kept, "little")
        kept.clear()
    whole = (len(data) - start) // _ITEM
    total += int(np.frombuffer(data, np.uint64, whole, start).sum())
    kept += data[start + whole * _ITEM :]
    return total


async def _some(stream: Any) -> int:
    total, kept = 0, bytearray()
    while data := await stream.receive_some(_SIZE):
        total += _sum(data, kept)
    return total


async def _into(stream: Any) -> int:
    total, kept = 0, bytearray()
    buffer = bytearray(_SIZE)
    while count := await stream.receive_some_into(buffer):
        total += _sum(memoryview(buffer)[:count], kept)
    return total


async def _view(stream: Any) -> int:
    total, kept = 0, bytearray()
    while True:
        async with stream.receive_view() as view:
            if not view:
                return total
            total += _sum(view, kept)


_RECEIVE: dict[str, Callable[[Any], Awaitable[int]]] = {
    "tcp": _some,
    "receive_some": _some,
    "receive_some_into": _into,
    "receive_view": _view,
}


async def _measure(way: str, port: int, size: int) -> tuple[float, float]:
    """Return MiB per second, and this process's processor time for a GiB."""
    connect = trio.open_tcp_stream if way == "tcp" else trio_smc.open_stream
    stream: Any = await connect(HOST, port)
    async with stream:
        used, start = time.process_time(), time.perf_counter()
        await stream.send_all(size.to_bytes(_ITEM))
        total = await _RECEIVE[way](stream)
        elapsed, used = time.perf_counter() - start, time.process_time() - used
    count = _SIZE // _ITEM
    if total != size // _SIZE * (count * (count - 1) // 2):
        raise RuntimeError("a wrong sum")
    return size / _MIB / elapsed, used / size * (1 << 30)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.views", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="sent in each measurement")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    pipes = {}
    ports = {}
    for way in WAYS:
        here, there = context.Pipe()
        context.Process(target=_send, args=(way, there), daemon=True).start()
        pipes[way], ports[way] = here, here.recv()
    for number in range(arguments.rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            rate, used = trio.run(_measure, way, ports[way], arguments.mib * _MIB)
            rates[way].append(rate)
            times[way].append(used)
    for pipe in pipes.values():
        pipe.send(None)
    table = [["", "MiB/s", "times TCP", "range", "s per GiB, receiver"]]
    for way in WAYS:
        each = [mine / tcp for mine, tcp in zip(rates[way], rates["tcp"], strict=True)]
        table.append(
            [
                way,
                report.short(median(rates[way])),
                f"{median(each):.2f}",
                f"{min(each):.2f} - {max(each):.2f}",
                f"{median(times[way]):.3f}",
            ]
        )
    print(report.text_of(table, left=1))
    print(f"{arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
