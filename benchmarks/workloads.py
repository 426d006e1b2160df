"""The workloads, generic over a transport: the client's actions, and the metrics.

The messages between client and server are in `answers`.  Each client function returns plain numbers
for one round; connecting and warming up are not timed, unless connecting is the subject.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.answers import COUNT, MESSAGE, REQUEST, TIME, exactly
from benchmarks.transports import Stream, Transport

READ = 64 * 1024
WARM_UP = 200
_TICK = 0.001
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that a workload measures."""

    name: str
    unit: str
    smaller_is_better: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A client function, and the metrics in the order of the numbers that it returns."""

    metrics: tuple[Metric, ...]
    run: Callable[[Transport, Any, float], Awaitable[tuple[float, ...]]]


async def _open_echo(transport: Transport, at: Any) -> Stream:
    stream: Stream = await transport.connect(at)
    await stream.send_all(REQUEST.pack(b"E", MESSAGE))
    return stream


def _percentile(times: list[int], percent: int) -> float:
    """A percentile in microseconds; ``times`` are nanoseconds."""
    times.sort()
    return times[len(times) * percent // 100] / 1e3


async def _request_until(stream: Stream, end: int) -> list[int]:
    """Make requests until `perf_counter_ns` shows ``end``; return the times of the round trips."""
    message = bytes(MESSAGE)
    clock = time.perf_counter_ns
    times: list[int] = []
    before = clock()
    while not times or before < end:
        await stream.send_all(message)
        await exactly(stream, MESSAGE)
        after = clock()
        times.append(after - before)
        before = after
    return times


async def round_trips(transport: Transport, at: Any, seconds: float) -> tuple[float, ...]:
    """Return the 50th and 99th percentile of 64-byte round trips, in microseconds."""
    message = bytes(MESSAGE)
    async with await _open_echo(transport, at) as stream:
        for _ in range(WARM_UP):
            await stream.send_all(message)
            await exactly(stream, MESSAGE)
        times = await _request_until(stream, time.perf_counter_ns() + int(seconds * 1e9))
    return _percentile(times, 50), _percentile(times, 99)


async def pausing(pause: float, transport: Transport, at: Any, seconds: float) -> tuple[float, ...]:
    """Return the median of 64-byte round trips, ``pause`` seconds after each other, in µs."""
    times: list[int] = []
    async with await _open_echo(transport, at) as stream:
        end = time.perf_counter_ns() + int(seconds * 1e9)
        while not times or time.perf_counter_ns() < end:
            await transport.loop.sleep(pause)
            times += await _request_until(stream, 0)
    return (_percentile(times, 50),)


async def streaming(size: int, transport: Transport, at: Any, seconds: float) -> tuple[float, ...]:
    """Send `size`-byte writes for `seconds`, and wait until the server has read them all.

    Returns MiB/s, and the seconds of processor time of both ends for a GiB.
    """
    data = os.urandom(size)  # pages of zeros could all be the same physical page
    await _stream_for(transport, at, data, min(0.1, seconds))
    return await _stream_for(transport, at, data, seconds)


async def _stream_for(
    transport: Transport, at: Any, data: bytes, seconds: float
) -> tuple[float, float]:
    async with await transport.connect(at) as stream:
        await stream.send_all(REQUEST.pack(b"S", READ))
        sent = 0
        start = time.perf_counter()
        used = time.process_time_ns()
        while not sent or time.perf_counter() - start < seconds:
            await stream.send_all(data)
            sent += len(data)
        await stream.send_eof()
        got, used_there = COUNT.unpack(await exactly(stream, COUNT.size))
        elapsed = time.perf_counter() - start
        used = time.process_time_ns() - used + used_there
    if got != sent:
        raise RuntimeError(f"{sent} bytes sent, {got} arrived")
    return sent / elapsed / (1024 * 1024), used / 1e9 / sent * _GIB


async def _opened(
    stack: contextlib.AsyncExitStack, transport: Transport, at: Any, connections: int
) -> list[Stream]:
    streams = []
    for _ in range(connections):
        stream = await _open_echo(transport, at)
        streams.append(await stack.enter_async_context(stream))
    return streams


async def requests(
    connections: int, transport: Transport, at: Any, seconds: float
) -> tuple[float, ...]:
    """Return 64-byte requests answered per second, over `connections` connections at once."""
    async with contextlib.AsyncExitStack() as stack:
        streams = await _opened(stack, transport, at, connections)
        await _request_for(transport, streams, min(0.1, seconds))
        return (await _request_for(transport, streams, seconds),)


async def _request_for(transport: Transport, streams: list[Stream], seconds: float) -> float:
    message = bytes(MESSAGE)
    done = 0
    start = time.perf_counter()

    async def send_requests(stream: Stream) -> None:
        nonlocal done
        while not done or time.perf_counter() < start + seconds:
            await stream.send_all(message)
            await exactly(stream, MESSAGE)
            done += 1

    await transport.loop.run_all([partial(send_requests, stream) for stream in streams])
    return done / (time.perf_counter() - start)


async def fairness(
    connections: int, transport: Transport, at: Any, seconds: float
) -> tuple[float, ...]:
    """Run busy connections beside each other, and a task that should run each millisecond.

    Returns the worst p99 of a connection divided by the median of all p99, and the p99 of the
    other task's lateness in microseconds.
    """
    worst: list[float] = []
    late: list[int] = []
    due = 0
    clock = time.perf_counter_ns

    async def tick() -> None:
        nonlocal due
        while True:
            due = clock() + int(_TICK * 1e9)
            await transport.loop.sleep(_TICK)
            late.append(clock() - due)

    async with contextlib.AsyncExitStack() as stack:
        streams = await _opened(stack, transport, at, connections)
        due = clock() + int(_TICK * 1e9)
        end = clock() + int(seconds * 1e9)

        async def send_requests(stream: Stream) -> None:
            worst.append(_percentile(await _request_until(stream, end), 99))

        await transport.loop.run_all(
            [partial(send_requests, stream) for stream in streams], aside=tick
        )
        late.append(max(clock() - due, 1))  # also the last tick, which did not end
    return max(worst) / statistics.median(worst), _percentile(late, 99)


async def opening(transport: Transport, at: Any, seconds: float) -> tuple[float, ...]:
    """Return the median time in microseconds until both ends have a connection: the client has
    opened it, and the server has accepted it and called its handler.  Closing is not timed.

    Another connection stays open all the time, which keeps the link group of SMC-R.
    """
    times: list[int] = []
    clock = time.monotonic_ns
    async with await _open_echo(transport, at):
        end = clock() + int(seconds * 1e9)
        while not times or clock() < end:
            before = clock()
            async with await transport.connect(at) as stream:
                opened = clock()
                await stream.send_all(REQUEST.pack(b"T", 0))
                accepted = TIME.unpack(await exactly(stream, TIME.size))[0]
                times.append(max(opened, accepted) - before)
    return (_percentile(times, 50),)


async def short_lived(
    workers: int, transport: Transport, at: Any, seconds: float
) -> tuple[float, ...]:
    """Return connections per second that carry one 64-byte request, `workers` at a time."""
    done = 0
    request = REQUEST.pack(b"E", MESSAGE) + bytes(MESSAGE)

    async def send_requests() -> None:
        nonlocal done
        while not done or time.perf_counter() < start + seconds:
            async with await transport.connect(at) as stream:
                await stream.send_all(request)
                await exactly(stream, MESSAGE)
            done += 1

    async with await _open_echo(transport, at):
        start = time.perf_counter()
        await transport.loop.run_all([send_requests] * workers)
        return (done / (time.perf_counter() - start),)


def _streaming(name: str, size: int) -> Workload:
    return Workload(
        metrics=(
            Metric(name=f"streaming, {name} writes", unit="MiB/s"),
            Metric(name=f"processor time, {name} writes", unit="s per GiB", smaller_is_better=True),
        ),
        run=partial(streaming, size),
    )


def _requests(connections: int) -> Workload:
    plural = "connection" if connections == 1 else "connections"
    return Workload(
        metrics=(Metric(name=f"64 B requests, {connections} {plural}", unit="1/s"),),
        run=partial(requests, connections),
    )


def _pausing(milliseconds: int) -> Workload:
    name = f"64 B round trip, {milliseconds} ms between"
    return Workload(
        metrics=(Metric(name=name, unit="µs", smaller_is_better=True),),
        run=partial(pausing, milliseconds / 1000),
    )


def _short_lived(workers: int) -> Workload:
    name = f"connections with one request, {workers} at a time"
    return Workload(metrics=(Metric(name=name, unit="1/s"),), run=partial(short_lived, workers))


WORKLOADS = {
    "rtt": Workload(
        metrics=(
            Metric(name="64 B round trip, p50", unit="µs", smaller_is_better=True),
            Metric(name="64 B round trip, p99", unit="µs", smaller_is_better=True),
        ),
        run=round_trips,
    ),
    "rtt-1ms": _pausing(1),
    "rtt-10ms": _pausing(10),
    "stream-4k": _streaming("4 KiB", 4 * 1024),
    "stream-64k": _streaming("64 KiB", 64 * 1024),
    "stream-1m": _streaming("1 MiB", 1024 * 1024),
    "requests-1": _requests(1),
    "requests-10": _requests(10),
    "requests-100": _requests(100),
    "opening": Workload(
        metrics=(
            Metric(name="opening and accepting a connection", unit="µs", smaller_is_better=True),
        ),
        run=opening,
    ),
    "short-1": _short_lived(1),
    "short-10": _short_lived(10),
    "fairness": Workload(
        metrics=(
            Metric(name="100 busy, worst p99 by median", unit="×", smaller_is_better=True),
            Metric(name="100 busy, 1 ms ticker's lateness", unit="µs", smaller_is_better=True),
        ),
        run=partial(fairness, 100),
    ),
}
