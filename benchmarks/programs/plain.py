"""A program with Trio's own streams, with and without TLS: echoes, streams, short connections.

A connection begins with a letter: e for echo, s for a stream.  A stream ends with a write whose
last byte is END; the server then answers the number of bytes.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import trio

from benchmarks.programs.common import (
    HOST,
    READ,
    WARM_UP,
    Server,
    client_context,
    main,
    move,
    request_concurrently,
    request_in_turn,
    server_context,
)

MESSAGE = 64
END = b"!"
_COUNT = 8


async def answer(stream: trio.abc.Stream) -> None:
    """Serve one connection until its client ends it, or is gone: the client reports an error."""
    with contextlib.suppress(trio.BrokenResourceError):
        await _answer(stream)


async def _answer(stream: trio.abc.Stream) -> None:
    if await stream.receive_some(1) == b"e":
        async for data in stream:
            await stream.send_all(data)
        return
    total = 0
    while data := await stream.receive_some(READ):
        total += len(data)
        if data.endswith(END):
            await stream.send_all(total.to_bytes(_COUNT))
            total = 0


async def serve(directory: Path, *, task_status: trio.TaskStatus[dict[str, int]]) -> None:
    """Serve until cancelled."""
    async with trio.open_nursery() as nursery:
        [plain] = await nursery.start(partial(trio.serve_tcp, answer, 0, host=HOST))
        ports = {"tcp": plain.socket.getsockname()[1]}
        if (directory / "server.pem").exists():  # the demo needs no certificates
            over_tls = partial(trio.serve_ssl_over_tcp, ssl_context=server_context(directory))
            [tls] = await nursery.start(
                partial(over_tls, answer, 0, host=HOST, https_compatible=True)
            )
            ports["tls"] = tls.transport_listener.socket.getsockname()[1]
        task_status.started(ports)


async def exactly(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    """Receive exactly `size` bytes."""
    whole = b""
    while len(whole) < size:
        data = await stream.receive_some(size - len(whole))
        if not data:
            raise EOFError("the server closed in the middle of an answer")
        whole += data
    return whole


@contextlib.asynccontextmanager
async def connection(server: Server, port: str, letter: bytes) -> AsyncIterator[trio.abc.Stream]:
    """Open a connection, with TLS on the TLS port."""
    stream: trio.abc.Stream
    if port == "tls":
        context: ssl.SSLContext = client_context(server.directory)
        stream = await trio.open_ssl_over_tcp_stream(
            HOST, server.ports[port], ssl_context=context, https_compatible=True
        )
    else:
        stream = await trio.open_tcp_stream(HOST, server.ports[port])
    async with stream:
        await stream.send_all(letter)
        yield stream


async def make_request(stream: trio.abc.Stream) -> None:
    """Make one request."""
    await stream.send_all(bytes(MESSAGE))
    await exactly(stream, MESSAGE)


async def echo(port: str, pause: float, server: Server, seconds: float) -> tuple[float, float]:
    """Requests on one connection."""
    async with connection(server, port, b"e") as stream:
        return await request_in_turn(server, seconds, partial(make_request, stream), pause=pause)


async def echoes(connections: int, server: Server, seconds: float) -> tuple[float, float]:
    """Requests on many connections."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(connection(server, "tcp", b"e"))
            for _ in range(connections)
        ]
        return await request_concurrently(
            server, seconds, [partial(make_request, stream) for stream in streams]
        )


async def stream(port: str, size: int, server: Server, seconds: float) -> tuple[float, float]:
    """Writes of ``size`` bytes."""
    data = os.urandom(size).replace(END, b"?")
    last = data[:-1] + END
    async with connection(server, port, b"s") as stream:

        async def some(seconds: float) -> int:
            sent = size
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                await stream.send_all(data)
                sent += size
            await stream.send_all(last)
            got = int.from_bytes(await exactly(stream, _COUNT))
            if got != sent:
                raise RuntimeError(f"{sent} bytes sent, {got} arrived")
            return sent

        return await move(server, partial(some, WARM_UP), partial(some, seconds))


async def short(warm_up: int, server: Server, seconds: float) -> tuple[float, float]:
    """Connections that carry one request."""

    async def once() -> None:
        async with connection(server, "tcp", b"e") as stream:
            await make_request(stream)

    return await request_in_turn(server, seconds, once, warm_up=warm_up)


WORKLOADS = {
    "echo": partial(echo, "tcp", 0.0),
    "echo-10": partial(echoes, 10),
    "echo-1ms": partial(echo, "tcp", 0.001),
    "echo-10ms": partial(echo, "tcp", 0.01),
    "stream-4k": partial(stream, "tcp", 4 * 1024),
    "stream-64k": partial(stream, "tcp", READ),
    "stream-1m": partial(stream, "tcp", 1024 * 1024),
    "tls-echo": partial(echo, "tls", 0.0),
    "tls-stream": partial(stream, "tls", READ),
    "short": partial(short, 20),
}

if __name__ == "__main__":
    main(serve, WORKLOADS)
