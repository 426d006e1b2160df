"""The workloads, generic over a transport: what the client does and what the server answers.

A connection begins with nine bytes from the client, a letter and a size:
E  echo: the server sends every `size` bytes back
S  stream: the server reads pieces of at most `size` bytes to the end, then answers how many
   bytes it got (8 bytes); the client's clock stops at that answer

Each client function returns plain numbers for one round; connecting and warming up are not timed.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from benchmarks.transports import Transport

REQUEST = struct.Struct("!cQ")
COUNT = struct.Struct("!Q")
MESSAGE = 64
WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a workload measures."""

    name: str
    unit: str
    smaller_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is run, and the metrics in the order of the numbers that `run` returns."""

    metrics: tuple[Metric, ...]
    run: Callable[[Transport, int, float], Awaitable[tuple[float, ...]]]


async def _exactly(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = await stream.receive_some(size)
    if len(data) == size:
        return bytes(data)
    whole = bytearray(data)
    while len(whole) < size:
        data = await stream.receive_some(size - len(whole))
        if not data:
            raise EOFError("the peer closed in the middle of a message")
        whole += data
    return bytes(whole)


async def answer(stream: trio.abc.Stream) -> None:
    """Serve one connection until the client closes it."""
    with contextlib.suppress(EOFError):
        letter, size = REQUEST.unpack(await _exactly(stream, REQUEST.size))
        if letter == b"S":
            await _count(stream, size)
        else:
            while True:
                await stream.send_all(await _exactly(stream, size))


async def _count(stream: trio.abc.Stream, size: int) -> None:
    total = 0
    while data := await stream.receive_some(size):
        total += len(data)
    await stream.send_all(COUNT.pack(total))


async def _open_echo(transport: Transport, port: int) -> trio.abc.HalfCloseableStream:
    stream = await transport.connect(port)
    await stream.send_all(REQUEST.pack(b"E", MESSAGE))
    return stream


async def round_trips(transport: Transport, port: int, seconds: float) -> tuple[float, ...]:
    """Return the 50th and 99th percentile of 64-byte round trips, in microseconds."""
    message = bytes(MESSAGE)
    clock = time.perf_counter_ns
    times: list[int] = []
    async with await _open_echo(transport, port) as stream:
        for _ in range(WARM_UP):
            await stream.send_all(message)
            await _exactly(stream, MESSAGE)
        end = clock() + int(seconds * 1e9)
        before = clock()
        while before < end:
            await stream.send_all(message)
            await _exactly(stream, MESSAGE)
            after = clock()
            times.append(after - before)
            before = after
    times.sort()
    return times[len(times) // 2] / 1e3, times[len(times) * 99 // 100] / 1e3


async def streaming(
    size: int, transport: Transport, port: int, seconds: float
) -> tuple[float, ...]:
    """Return MiB/s of sending `size`-byte writes for `seconds`, until the server has them all."""
    data = bytes(size)
    await _stream_for(transport, port, data, min(0.1, seconds))
    return (await _stream_for(transport, port, data, seconds),)


async def _stream_for(transport: Transport, port: int, data: bytes, seconds: float) -> float:
    async with await transport.connect(port) as stream:
        await stream.send_all(REQUEST.pack(b"S", len(data)))
        sent = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            await stream.send_all(data)
            sent += len(data)
        await stream.send_eof()
        got = COUNT.unpack(await _exactly(stream, COUNT.size))[0]
        elapsed = time.perf_counter() - start
    if got != sent:
        raise RuntimeError(f"{sent} bytes sent, {got} arrived")
    return sent / elapsed / (1024 * 1024)


async def requests(
    connections: int, transport: Transport, port: int, seconds: float
) -> tuple[float, ...]:
    """Return 64-byte requests answered per second, over so many connections at once."""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for _ in range(connections):
            stream = await _open_echo(transport, port)
            streams.append(await stack.enter_async_context(stream))
        await _ask_for(streams, min(0.1, seconds))
        return (await _ask_for(streams, seconds),)


async def _ask_for(streams: list[trio.abc.HalfCloseableStream], seconds: float) -> float:
    message = bytes(MESSAGE)
    done = 0
    start = time.perf_counter()

    async def ask(stream: trio.abc.HalfCloseableStream) -> None:
        nonlocal done
        while time.perf_counter() < start + seconds:
            await stream.send_all(message)
            await _exactly(stream, MESSAGE)
            done += 1

    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(ask, stream)
    return done / (time.perf_counter() - start)


def _streaming(name: str, size: int) -> Workload:
    return Workload(
        metrics=(Metric(name=f"streaming, {name} writes", unit="MiB/s"),),
        run=partial(streaming, size),
    )


def _requests(connections: int) -> Workload:
    plural = "connection" if connections == 1 else "connections"
    return Workload(
        metrics=(Metric(name=f"64 B requests, {connections} {plural}", unit="1/s"),),
        run=partial(requests, connections),
    )


WORKLOADS = {
    "rtt": Workload(
        metrics=(
            Metric(name="64 B round trip, p50", unit="µs", smaller_is_better=True),
            Metric(name="64 B round trip, p99", unit="µs", smaller_is_better=True),
        ),
        run=round_trips,
    ),
    "stream-4k": _streaming("4 KiB", 4 * 1024),
    "stream-64k": _streaming("64 KiB", 64 * 1024),
    "stream-1m": _streaming("1 MiB", 1024 * 1024),
    "requests-1": _requests(1),
    "requests-10": _requests(10),
    "requests-100": _requests(100),
}
