"""A plain Trio program that does what `socket_speed.c` does, with the same protocol.

    python3 -m tests.lab.stream_speed serve PORT
    python3 -m tests.lab.stream_speed ask ADDRESS PORT TRIPS MEBIBYTES CONNECTIONS

The server prints "ready" and ends when a client says so.  The client prints one JSON object: the
median of a round trip of 64 bytes in µs, MiB/s of writes of 64 KiB and of 1 MiB, and connections
with one request per second.
"""

from __future__ import annotations

import functools
import json
import statistics
import struct
import sys
import time

import trio

SMALL = b"r" * 64
BUFFER = 256 << 10
WARM_UP = 40
_HEAD = struct.Struct("!cQ")
"""The kind of a connection, and the number of bytes that follow."""
_ECHO, _SINK, _QUIT = b"e", b"s", b"q"


async def _receive_exactly(stream: trio.SocketStream, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        data = await stream.receive_some(count - len(got))
        if not data:
            raise EOFError(f"the connection has ended after {len(got)} bytes")
        got += data
    return bytes(got)


async def _serve(port: int) -> None:
    async with trio.open_nursery() as nursery:

        async def handle(stream: trio.SocketStream) -> None:
            kind, count = _HEAD.unpack(await _receive_exactly(stream, _HEAD.size))
            while count and kind == _ECHO:
                await stream.send_all(await _receive_exactly(stream, len(SMALL)))
                count -= len(SMALL)
            while count:
                data = await stream.receive_some(BUFFER)
                if not data:
                    raise EOFError(f"the connection has ended, {count} bytes are missing")
                count -= len(data)
            if kind == _SINK:
                await stream.send_all(kind)
            await stream.aclose()
            if kind == _QUIT:
                nursery.cancel_scope.cancel()

        await nursery.start(functools.partial(trio.serve_tcp, handle, port))
        sys.stdout.write("ready\n")
        sys.stdout.flush()


async def _start(address: str, port: int, kind: bytes, count: int) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(address, port)
    await stream.send_all(_HEAD.pack(kind, count))
    return stream


async def _round_trip(address: str, port: int, trips: int) -> float:
    """The median, in seconds."""
    took = []
    count = (WARM_UP + trips) * len(SMALL)
    async with await _start(address, port, _ECHO, count) as stream:
        for _ in range(WARM_UP + trips):
            began = time.perf_counter()
            await stream.send_all(SMALL)
            await _receive_exactly(stream, len(SMALL))
            took.append(time.perf_counter() - began)
    return statistics.median(took[WARM_UP:])


async def _stream(address: str, port: int, piece: bytes, mebibytes: int) -> float:
    """MiB/s until the server has everything."""
    count = mebibytes << 20
    async with await _start(address, port, _SINK, count) as stream:
        began = time.perf_counter()
        for _ in range(count // len(piece)):
            await stream.send_all(piece)
        await _receive_exactly(stream, 1)
        return mebibytes / (time.perf_counter() - began)


async def _connections(address: str, port: int, count: int) -> float:
    """Connections per second, one after the other."""
    began = time.perf_counter()
    for _ in range(count):
        async with await _start(address, port, _ECHO, len(SMALL)) as stream:
            await stream.send_all(SMALL)
            await _receive_exactly(stream, len(SMALL))
    return count / (time.perf_counter() - began)


async def _run_client(address: str, port: int, trips: int, mebibytes: int, count: int) -> None:
    figures = {
        "round trip": await _round_trip(address, port, trips) * 1e6,
        "64 KiB writes": await _stream(address, port, bytes(64 << 10), mebibytes),
        "1 MiB writes": await _stream(address, port, bytes(1 << 20), mebibytes),
        "connections": await _connections(address, port, count),
    }
    await (await _start(address, port, _QUIT, 0)).aclose()
    sys.stdout.write(json.dumps(figures) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["serve", port]:
            trio.run(_serve, int(port))
        case ["ask", address, port, trips, mebibytes, count]:
            trio.run(_run_client, address, int(port), int(trips), int(mebibytes), int(count))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
