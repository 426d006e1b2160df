"""How cost grows with connections, rings and links: `python -m benchmarks.growth`.

Two stacks, client and server, run in one process; the measure is the processor time of both ends,
which hardly depends on the load of the machine.  Every number is per connection, request or MiB: if
it stays the same or falls, the cost grows linearly at most.  The memory that Python allocates for
an idle connection (`tracemalloc`, which does not count the rings: they are mapped memory) is that
of both ends, including the server's task that waits for data.

For link groups, each has a client process of its own, all with one server; the connections of
`crowd` come from twenty processes.  They are forked from a process that has imported everything,
because hundreds of separate imports would need memory that is not the subject of the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import trio

import trio_smc
from benchmarks import cpu, plot, report
from benchmarks.answers import MESSAGE, REQUEST, answer
from benchmarks.transports import HOST, Stream, Transport
from trio_smc import Config, Mode, SmcStream, SoftRnic, Stack

_SMALL = 16 * 1024
_REPETITIONS = 5
repetitions = ContextVar("repetitions", default=_REPETITIONS)
_IDLE = 1.0
_SETTLING = 0.2  # seconds until the last connections count as idle
_LINKS_TIMEOUT = 30.0
_CLIENTS_TIMEOUT = 250.0
_CROWD = 20

Row = dict[str, float]


@contextlib.asynccontextmanager
async def stacks(rnics: int = 0, **settings: Any) -> AsyncIterator[tuple[Stack, Transport, Any]]:
    """Yield the client's stack, a transport that connects from it, and the server's address."""

    def config(name: str) -> Config:
        own: dict[str, Any] = {}
        if rnics:
            own["rnics"] = tuple(SoftRnic(f"{name}-{number}") for number in range(rnics))
        return Config(require_smc=True, **own, **settings)

    async def connect(port: int) -> SmcStream:
        return await client.open_stream(HOST, port)

    async with (
        trio_smc.open_stack(config("server")) as server,
        trio_smc.open_stack(config("client")) as client,
        trio.open_nursery() as nursery,
    ):
        listeners = await nursery.start(partial(server.serve, cast(Any, _answer), 0, host=HOST))
        transport = Transport(connect=connect, serve=_nothing)
        yield client, transport, listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _answer(stream: Stream) -> None:
    # If hundreds of processes end at once on a busy machine, some do not close in time.
    with contextlib.suppress(trio.BrokenResourceError):
        await answer(stream)


async def _nothing(*_: object) -> None:
    """Does nothing: the server runs already."""


async def least(measure: Callable[[], Awaitable[float]]) -> float:
    """The minimum of several repetitions."""
    return min([await measure() for _ in range(repetitions.get())])


async def connections(count: int) -> Row:
    """The cost of `count` idle connections, and of a request beside them."""
    async with stacks(receive_buffer=_SMALL) as (_, transport, port):
        first = await transport.connect(port)  # makes the link group
        start = time.process_time()
        streams = [await transport.connect(port) for _ in range(count)]
        opening = time.process_time() - start
        await trio.sleep(_SETTLING)
        start = time.process_time()
        await trio.sleep(_IDLE)
        idle = time.process_time() - start
        request = await least(partial(cpu.requests, 1, transport, port))
        busy = await least(partial(cpu.requests, count, transport, port))
        for stream in (first, *streams):
            await stream.aclose()
    return {
        "opening, µs": opening / count * 1e6,
        "all idle, ‰ of a processor": idle / _IDLE * 1e3,
        "request beside idle ones, µs": request,
        "request, all busy, µs": busy,
    }


async def memory(count: int) -> Row:
    """KiB that Python allocates at both ends for an idle connection."""
    async with stacks(receive_buffer=_SMALL) as (client, _, port):
        first = await client.open_stream(HOST, port)
        gc.collect()
        tracemalloc.start()
        try:
            streams = [await client.open_stream(HOST, port) for _ in range(count)]
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        for stream in (first, *streams):
            await stream.aclose()
    return {"Python objects, both ends, KiB": held / count / 1024}


async def rings(size: int) -> Row:
    """Stream 64 KiB writes through a ring of `size` bytes."""
    async with stacks(receive_buffer=size) as (_, transport, port):
        write = await least(partial(cpu.writes, 64 * 1024, transport, port))
    return {"a MiB in 64 KiB writes, µs": write * 16}


async def links(count: int) -> Row:
    """Requests over a link group whose ends have `count` RNICs each."""
    async with stacks(rnics=count) as (client, transport, port):
        stream = await client.open_stream(HOST, port)
        assert stream.mode is Mode.SMC_R
        assert stream.link_group is not None
        with trio.fail_after(_LINKS_TIMEOUT):
            while len(stream.link_group.links) < count:  # noqa: ASYNC110
                await trio.sleep(0.01)
        request = await least(partial(cpu.requests, 10, transport, port))
        write = await least(partial(cpu.writes, 64 * 1024, transport, port))
        await stream.aclose()
    return {
        "request, 10 connections, µs": request,
        "a MiB in 64 KiB writes, µs": write * 16,
    }


async def groups(count: int) -> Row:
    """The cost of `count` link groups, each with one idle connection of another process."""
    return await _beside_clients(count, 1, "a group")


async def crowd(count: int) -> Row:
    """The cost of `count` idle connections from twenty processes, for the server."""
    return await _beside_clients(_CROWD, count // _CROWD, "one")


async def _beside_clients(processes: int, each: int, what: str) -> Row:
    async with stacks() as (_, transport, port):
        stream = await transport.connect(port)
        before = Held.now()
        async with clients(processes, each, port):
            await trio.sleep(_SETTLING)
            held = Held.now().growth_since(before, processes * each)
            request = await least(partial(cpu.requests, 1, transport, port))
        await stream.aclose()
    return {
        "request beside idle ones, µs": request,
        f"descriptors of {what}": held.descriptors,
        f"memory of {what}, KiB": held.memory,
        f"page tables of {what}, KiB": held.page_tables,
    }


class Held(NamedTuple):
    """Resources of this process: descriptors, and KiB."""

    descriptors: float
    memory: float
    page_tables: float

    @classmethod
    def now(cls) -> Held:
        """Return the current values."""
        gc.collect()
        memory = _kib("/proc/self/smaps_rollup", "Pss")
        page_tables = _kib("/proc/self/status", "VmPTE")
        return cls(len(os.listdir("/proc/self/fd")), memory, page_tables)

    def growth_since(self, before: Held, count: int) -> Held:
        """Return the growth since `before`, divided by `count`."""
        return Held(*((now - then) / count for now, then in zip(self, before, strict=True)))


def _kib(path: str, name: str) -> float:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return float(line.split()[1])
    raise ValueError(f"{path} has no {name}")


@contextlib.asynccontextmanager
async def clients(processes: int, each: int, port: int) -> AsyncIterator[None]:
    """Run client processes whose connections have made a request and are idle since then."""
    argument = ":".join(map(str, (processes, each, port)))
    command = [sys.executable, "-m", "benchmarks.growth", "--clients", argument]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, command, **pipes))
        with trio.fail_after(_CLIENTS_TIMEOUT):
            if await process.stdout.receive_some() != b"!":
                raise SystemExit("a client process ended")
        yield
        await process.stdin.aclose()


def run_clients(processes: int, each: int, port: int) -> None:
    """Fork `processes` clients, one after the other; they end with standard input."""
    children = []
    for _ in range(processes):
        ready, ready_fd = os.pipe()
        child = os.fork()
        if not child:
            trio.run(run_client, each, port, ready_fd)
            os._exit(0)
        children.append(child)
        os.close(ready_fd)
        if not os.read(ready, 1):
            raise SystemExit
        os.close(ready)
    os.write(1, b"!")
    sys.stdin.read()
    for child in children:
        os.waitpid(child, 0)


async def run_client(connections: int, port: int, ready_fd: int) -> None:
    """Run one client process; it writes to `ready_fd` when its requests are answered."""
    async with (
        trio_smc.open_stack(Config(require_smc=True, shutdown_timeout=_CLIENTS_TIMEOUT)) as stack,
        contextlib.AsyncExitStack() as streams,
    ):
        for _ in range(connections):
            stream = await streams.enter_async_context(await stack.open_stream(HOST, port))
            await stream.send_all(REQUEST.pack(b"E", MESSAGE) + bytes(MESSAGE))
            await stream.receive_some(MESSAGE)
        os.write(ready_fd, b".")
        await trio.lowlevel.wait_readable(0)


class Part(NamedTuple):
    """A part of the measurement.

    Fields:
      measure: returns the costs at one of the numbers.
      numbers: these.
      counted: what they count, with the unit.
      title: of the plot.
    """

    measure: Callable[[int], Awaitable[Row]]
    numbers: Sequence[int]
    counted: str
    title: str


_SIZES = tuple(1 << shift for shift in range(14, 23, 2))
PARTS: dict[str, Part] = {
    "connections": Part(
        connections, (1, 10, 100, 1000), "connections", "How cost grows with connections"
    ),
    "memory": Part(memory, (10, 100, 1000), "connections", "Memory of an idle connection"),
    "rings": Part(rings, _SIZES, "size of a ring, bytes", "How cost depends on the ring"),
    "links": Part(links, (1, 2, 3, 4), "links", "How cost grows with links"),
    "groups": Part(groups, (1, 10, 50, 200, 500), "link groups", "Cost of link groups to a server"),
    "crowd": Part(crowd, (100, 1000, 10_000), "connections", "Cost of a crowd to a server"),
}


def show(name: str, rows: dict[int, Row], plots: Path | None) -> None:
    """Print the table of a part, and draw its plot into the directory ``plots``."""
    part = PARTS[name]
    columns = list(next(iter(rows.values())))
    table = [[part.counted, *columns]] + [
        [f"{number:,}", *(report.short(row[column]) for column in columns)]
        for number, row in rows.items()
    ]
    print(report.text_of(table, left=0) + "\n")
    if plots:
        lines = {column: [row[column] for row in rows.values()] for column in columns}
        plot.curves(plots / f"growth-{name}.svg", part.title, part.counted, list(rows), lines)


def main() -> None:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    option = parser.add_argument
    option("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    option(
        "--repetitions",
        type=int,
        default=_REPETITIONS,
        help="the minimum of these is used; default %(default)s",
    )
    option("--most", type=int, default=1 << 30, help="leave larger numbers out")
    option("--json", type=Path, help="write all numbers to this file")
    option("--plots", type=Path, help="draw growth-PART.svg into this directory")
    option(
        "--measured", type=Path, help="show the numbers in this file, of --json; measure nothing"
    )
    option("--clients", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        run_clients(*map(int, arguments.clients.split(":")))
        return
    if arguments.measured:
        measured: dict[str, dict[str, Row]] = json.loads(arguments.measured.read_text())
        for name, rows in measured.items():
            show(name, {int(number): row for number, row in rows.items()}, arguments.plots)
        return
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    repetitions.set(arguments.repetitions)
    found: dict[str, dict[int, Row]] = {}
    for name in arguments.parts.split(","):
        part = PARTS[name]
        places = [number for number in part.numbers if number <= arguments.most]
        found[name] = {number: trio.run(part.measure, number) for number in places}
        show(name, found[name], arguments.plots)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
