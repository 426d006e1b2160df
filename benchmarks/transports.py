"""The transports: for each its loop, a pair of `connect` and `serve`, and a scope.

A workload uses nothing else, so another transport is one more entry of TRANSPORTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import trio

import trio_smc
from benchmarks import messages
from benchmarks.loops import AsyncioLoop, Loop, TrioLoop

HOST = "127.0.0.1"
Handler = Callable[[Any], Awaitable[object]]
Started = Callable[[int | str], None]


class Stream(Protocol):
    """The part of Trio's stream interface that workloads use."""

    async def send_all(self, data: bytes) -> None: ...
    async def receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview: ...
    async def send_eof(self) -> None: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc_info: object) -> None: ...


_TRIO = TrioLoop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way to move bytes between two processes.

    connect: opens a stream to the address that `serve` reported.
    serve: serves a handler on a free address until it is cancelled; passes the address to its
      second argument.
    scope: a context that must be open around all connections of a process.
    workloads: the workloads that it supports; empty: all.
    """

    connect: Callable[[Any], Awaitable[Any]]
    serve: Callable[[Handler, Started], Awaitable[object]]
    scope: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    loop: Loop = _TRIO
    workloads: frozenset[str] = frozenset()


# --- Trio ------------------------------------------------------------------------------------


async def _serve(serve: Callable[..., Awaitable[Any]], handler: Handler, started: Started) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(serve, handler, 0, host=HOST))
        started(listeners[0].socket.getsockname()[1])


async def _connect_tcp(port: int) -> trio.abc.HalfCloseableStream:
    return await trio.open_tcp_stream(HOST, port)


async def _connect_smc(port: int) -> trio.abc.HalfCloseableStream:
    return await trio_smc.open_stream(HOST, port)


async def _serve_unix(handler: Handler, started: Started) -> None:
    # A name in the abstract namespace leaves no file behind.
    name = f"\0trio-smc-benchmark-{os.getpid()}"
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await sock.bind(name)
    sock.listen(1024)
    started(name)
    await trio.serve_listeners(handler, [trio.SocketListener(sock)])


async def _connect_unix(name: str) -> trio.abc.HalfCloseableStream:
    return await trio.open_unix_socket(name)


def _smc(**settings: Any) -> Transport:
    def scope() -> AbstractAsyncContextManager[object]:
        # Otherwise the connections of "opening", "short-1" and "short-10" would become TCP.
        return trio_smc.open_stack(trio_smc.Config(learn_short=False, **settings))

    return Transport(connect=_connect_smc, serve=partial(_serve, trio_smc.serve), scope=scope)


# --- asyncio ---------------------------------------------------------------------------------


class AsyncioStream:
    """asyncio's reader and writer as one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.receive_some = reader.read

    async def send_all(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_eof(self) -> None:
        self._writer.write_eof()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


async def _connect_asyncio(port: int) -> AsyncioStream:
    return AsyncioStream(*await asyncio.open_connection(HOST, port))


async def _serve_asyncio(handler: Handler, started: Started) -> None:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncioStream(reader, writer) as stream:
            await handler(stream)

    server = await asyncio.start_server(accepted, HOST, 0, backlog=1024)
    started(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _asyncio(kind: str) -> Transport:
    return Transport(connect=_connect_asyncio, serve=_serve_asyncio, loop=AsyncioLoop(kind))


# --- proxies ---------------------------------------------------------------------------------


async def _serve_behind(
    serve: Callable[..., Awaitable[Any]], hops: Sequence[str], handler: Handler, started: Started
) -> None:
    """Serve behind proxies, the nearest first: "smc:tcp" listens for SMC-R and connects by TCP."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(serve, handler, 0, host=HOST))
        port = listeners[0].socket.getsockname()[1]
        for hop in hops:
            listen, target = hop.split(":")
            command = [*_PROXY, f"{listen}:{HOST}:0", f"{target}:{HOST}:{port}"]
            # The proxy prints a line for each connection.
            quiet = partial(trio.run_process, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            process = await nursery.start(quiet, command)
            _proxies.append(~process.pid << 3 | _SCHEDULED)
            port = int((await process.stdout.receive_some()).split()[-1])
        started(port)


_PROXY = (sys.executable, "-u", "-m", "trio_smc.tools", "proxy", "--require-smc")
_SCHEDULED = 2  # CPUCLOCK_SCHED (linux/posix-timers_types.h): with a PID, the clock of its time
_proxies: list[int] = []
"""The processor clocks of the proxies that this process has started."""


def processor_time() -> int:
    """Nanoseconds used by this process and by the proxies in front of it."""
    return time.process_time_ns() + sum(map(time.clock_gettime_ns, _proxies))


def _proxied(
    connect: Callable[[Any], Awaitable[Any]], serve: Callable[..., Awaitable[Any]], *hops: str
) -> Transport:
    # The end that speaks only TCP has a stack of its own, which it does not use.
    scope = trio_smc.open_stack
    return Transport(connect=connect, serve=partial(_serve_behind, serve, hops), scope=scope)


BASE = "tcp"
TRANSPORTS = {
    BASE: Transport(connect=_connect_tcp, serve=partial(_serve, trio.serve_tcp)),
    "unix": Transport(connect=_connect_unix, serve=_serve_unix),
    "asyncio": _asyncio("asyncio"),
    "uvloop": _asyncio("uvloop"),
    "smc-r": _smc(),
    "smc-r-nospin": _smc(spin=0.0),
    "smc-r-strict": _smc(checkpoints="strict"),
    "smc-r-strict-nospin": _smc(checkpoints="strict", spin=0.0),
    "limit-messages": Transport(
        connect=partial(messages.connect, HOST),
        serve=partial(messages.serve, HOST),
        workloads=frozenset({"opening", "short-1", "short-10"}),
    ),
}
WAKES = {f"smc-r-wake-{by}": _smc(wake=by) for by in ("trio", "thread")}
"""The settings of `Config.wake`; the software RNIC's default is the first."""
PROXIED = {
    "smc-r-proxy-tcp": _proxied(_connect_smc, trio.serve_tcp, "smc:tcp"),
    "tcp-proxy-smc-r": _proxied(_connect_tcp, trio_smc.serve, "tcp:smc"),
    "tcp-proxy-smc-r-proxy-tcp": _proxied(_connect_tcp, trio.serve_tcp, "smc:tcp", "tcp:smc"),
}
"""Connections through `trio-smc proxy`, by the hops on the way."""
