"""A plain Trio program without support for SMC: round trips, a stream, and their cost.

    python3 -m tests.lab.plain_speed serve PORT
    python3 -m tests.lab.plain_speed ask HOST PORT [profile]

The server prints "ready", serves one connection of each part and ends.  The client prints one JSON
object: the median of a round trip in µs, MiB/s of a stream, and the processor time that both
machines took for each of them, in µs for a round trip and for a MiB: all of it, as much of the
work is not that of any process.  With "profile" it prints before where its own time went during
the round trips, by cProfile.
"""

from __future__ import annotations

import cProfile
import functools
import json
import os
import pstats
import statistics
import sys
import time

import trio

SMALL = b"r" * 64
ROUND_TRIPS, WARM_UP = 400, 40
PIECE = bytes(64 * 1024)
STREAM = 24 << 20
ECHO, SINK = b"e", b"s"
PROFILED = 40
"""Functions of a profile."""
_BUSY = (0, 1, 2, 5, 6)
"""user, nice, system, irq and softirq of the first line of /proc/stat."""


def busy() -> float:
    """Seconds for which this machine's processors have worked."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:]]
    return sum(ticks[index] for index in _BUSY) / os.sysconf("SC_CLK_TCK")


async def exactly(stream: trio.SocketStream, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        data = await stream.receive_some(count - len(got))
        assert data, f"it ended after {len(got)} bytes"
        got += data
    return bytes(got)


async def serve(port: int) -> None:
    async with trio.open_nursery() as nursery:
        left = [ECHO, SINK]

        async def handle(stream: trio.SocketStream) -> None:
            part = await exactly(stream, 1)
            before = busy()
            if part == ECHO:
                for _ in range(ROUND_TRIPS + WARM_UP):
                    await stream.send_all(await exactly(stream, len(SMALL)))
            else:
                got = 0
                while got < STREAM:
                    data = await stream.receive_some(len(PIECE))
                    assert data, f"it ended after {got} bytes"
                    got += len(data)
            await stream.send_all(json.dumps(busy() - before).encode())
            await stream.aclose()
            left.remove(part)
            if not left:
                nursery.cancel_scope.cancel()

        await nursery.start(functools.partial(trio.serve_tcp, handle, port))
        sys.stdout.write("ready\n")
        sys.stdout.flush()


async def receive_report(stream: trio.SocketStream) -> float:
    """Receive the server's report at the end."""
    text = b""
    while data := await stream.receive_some():
        text += data
    return float(json.loads(text))


async def run_client(host: str, port: int, profile: cProfile.Profile | None) -> dict[str, float]:
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(ECHO)
        before = busy()
        took = []
        if profile is not None:
            profile.enable()
        for _ in range(ROUND_TRIPS + WARM_UP):
            began = time.perf_counter()
            await stream.send_all(SMALL)
            await exactly(stream, len(SMALL))
            took.append(time.perf_counter() - began)
        if profile is not None:
            profile.disable()
        worked = busy() - before + await receive_report(stream)
    async with await trio.open_tcp_stream(host, port) as stream:
        await stream.send_all(SINK)
        before, began = busy(), time.perf_counter()
        for _ in range(STREAM // len(PIECE)):
            await stream.send_all(PIECE)
        there = await receive_report(stream)
        seconds, streamed = time.perf_counter() - began, busy() - before + there
    mebibytes = STREAM >> 20
    return {
        "round trip": statistics.median(took[WARM_UP:]) * 1e6,
        "round trip, processor time": worked * 1e6 / len(took),
        "stream": mebibytes / seconds,
        "stream, processor time": streamed * 1e6 / mebibytes,
    }


def main() -> None:
    match sys.argv[1:]:
        case ["serve", port]:
            trio.run(serve, int(port))
        case ["ask", host, port, *rest]:
            profile = cProfile.Profile() if rest == ["profile"] else None
            figures = trio.run(run_client, host, int(port), profile)
            if profile is not None:
                pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(PROFILED)
            sys.stdout.write(json.dumps(figures) + "\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
