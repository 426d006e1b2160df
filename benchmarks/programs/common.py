"""The common parts of these programs: server process, client process, timing.

`python -m benchmarks.programs.NAME serve DIRECTORY` prints its ports and its PIDs, and serves until
its standard input ends.  `... client DIRECTORY SERVER` takes that line as SERVER, prints its PID
when it is ready, reads a JSON object {"workload", "seconds"} per line and answers {"values"} or
{"error"}.  The values are a time or a rate, and the processor time of all processes.  The directory
holds certificates for 127.0.0.1: ca.pem and server.pem.

Some servers need more processes, which they start with `start_helper`: `... helper DIRECTORY PORTS`
runs the function that the program gave to `main`, until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.loops import TrioLoop

__all__ = [
    "HOST",
    "READ",
    "WARM_UP",
    "Server",
    "Workload",
    "client_context",
    "main",
    "move",
    "rate",
    "request_concurrently",
    "request_in_turn",
    "server_context",
    "start_helper",
]

HOST = "127.0.0.1"
READ = 64 * 1024
# Seconds beyond its timed part after which a workload counts as hung.
_PATIENCE = 60.0
WARM_UP = 0.05
_LEAST, _LEAST_WITH_PAUSES = 20, 100
_GIB = 1 << 30
_MIB = 1 << 20

Request = Callable[[], Awaitable[object]]
Move = Callable[[], Awaitable[int]]
Units = Callable[[float], Awaitable[int]]
Ports = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A client's description of its server."""

    ports: Ports
    pids: Sequence[int]
    directory: Path

    def processor_time(self) -> int:
        """Nanoseconds of processor time that this process and those of the server have used."""
        # The clock of another process: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of Linux.
        others = (time.clock_gettime_ns(~pid << 3 | 2) for pid in self.pids)
        return time.process_time_ns() + sum(others)


Workload = Callable[[Server, float], Awaitable[tuple[float, float]]]
Serve = Callable[..., Awaitable[None]]
_helpers: list[int] = []  # PIDs


def server_context(directory: Path) -> ssl.SSLContext:
    """TLS for a server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "server.pem")
    return context


def client_context(directory: Path) -> ssl.SSLContext:
    """TLS for a client that trusts only this server."""
    return ssl.create_default_context(cafile=directory / "ca.pem")


# --- timing ----------------------------------------------------------------------------------


async def _request_until(end: float, request: Request, least: int, pause: float) -> list[int]:
    """Make requests until `perf_counter` shows ``end``; return their times in nanoseconds."""
    clock = time.perf_counter_ns
    times: list[int] = []
    while len(times) < least or time.perf_counter() < end:
        if pause:
            await trio.sleep(pause)
        before = clock()
        await request()
        times.append(clock() - before)
    return times


async def request_in_turn(
    server: Server, seconds: float, request: Request, *, pause: float = 0.0, warm_up: int = _LEAST
) -> tuple[float, float]:
    """Make one request after the other, with a pause before each.

    Returns the median time of a request, and the processor time of one, in microseconds.
    """
    await _request_until(time.perf_counter() + WARM_UP, request, warm_up, 0.0)
    used = server.processor_time()
    least = _LEAST_WITH_PAUSES if pause else _LEAST
    times = await _request_until(time.perf_counter() + seconds, request, least, pause)
    used = server.processor_time() - used
    return statistics.median(times) / 1e3, used / len(times) / 1e3


async def request_concurrently(
    server: Server, seconds: float, requests: Sequence[Request]
) -> tuple[float, float]:
    """Make requests on many connections at once.

    Returns requests per second, and the processor time of one in microseconds.
    """

    async def together(seconds: float) -> tuple[int, float]:
        done = 0
        start = time.perf_counter()

        async def each(request: Request) -> None:
            nonlocal done
            times = await _request_until(start + seconds, request, 1, 0.0)
            done += len(times)

        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(each, request)
        return done, time.perf_counter() - start

    await together(WARM_UP)
    used = server.processor_time()
    done, elapsed = await together(seconds)
    return done / elapsed, (server.processor_time() - used) / done / 1e3


async def move(server: Server, warm_up: Move, some: Move) -> tuple[float, float]:
    """Move data; a first part is not timed.

    `warm_up` and `some` return when the other end has all of it; they return the number of bytes.

    Returns MiB per second, and the seconds of processor time for a GiB.
    """
    await warm_up()
    used = server.processor_time()
    start = time.perf_counter()
    size = await some()
    elapsed = time.perf_counter() - start
    return size / elapsed / _MIB, (server.processor_time() - used) / 1e9 / size * _GIB


async def rate(server: Server, seconds: float, some: Units) -> tuple[float, float]:
    """Return how many units there are per second, and the processor time of one in µs.

    ``some(end)`` does units until `perf_counter` shows ``end``, and returns their number.
    """
    await some(time.perf_counter() + WARM_UP)
    used, start = server.processor_time(), time.perf_counter()
    done = await some(start + seconds)
    elapsed = time.perf_counter() - start
    return done / elapsed, (server.processor_time() - used) / done / 1e3


# --- processes -------------------------------------------------------------------------------


def _write_event(**event: Any) -> None:
    print(json.dumps(event), flush=True)


async def start_helper(
    module: str, directory: Path, ports: Ports, *, task_status: trio.TaskStatus[Ports]
) -> None:
    """Run a helper of this server, until cancelled; started with the ports that the helper prints.

    Its core is not fixed, even if the server's is.
    """
    command = [sys.executable, "-m", module, "helper", str(directory), json.dumps(ports)]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _helpers.append(process.pid)
        line = b""
        while not line.endswith(b"\n"):
            data = await process.stdout.receive_some()
            if not data:
                raise EOFError("a helper ended before it was ready")
            line += data
        task_status.started(json.loads(line))
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()  # the helper ends with its standard input
            await process.wait()
            await process.stdout.aclose()


async def _until_input_ends() -> None:
    async for _ in TrioLoop().lines():
        pass


async def _serve(serve: Serve, directory: Path) -> None:
    async with trio.open_nursery() as nursery:
        ports = await nursery.start(serve, directory)
        _write_event(ports=ports, pids=[os.getpid(), *_helpers])
        await _until_input_ends()
        nursery.cancel_scope.cancel()


async def _help(helper: Callable[..., Awaitable[None]], ports: Ports) -> None:
    async with trio.open_nursery() as nursery:
        print(json.dumps(await nursery.start(helper, ports)), flush=True)
        await _until_input_ends()
        nursery.cancel_scope.cancel()


async def _client(workloads: Mapping[str, Workload], server: Server) -> None:
    _write_event(pid=os.getpid())
    async for line in TrioLoop().lines():
        command = json.loads(line)
        name, seconds = command["workload"], command["seconds"]
        try:
            with trio.fail_after(seconds + _PATIENCE):
                _write_event(values=await workloads[name](server, seconds))
        except Exception as error:
            _write_event(error=f"{name}: {type(error).__name__}: {error}")


def main(
    serve: Serve,
    workloads: Mapping[str, Workload],
    run: Callable[..., Any] = trio.run,
    helper: Callable[..., Awaitable[None]] | None = None,
) -> None:
    """Run the role that the command line names.

    ``helper``: called with the server's ports in a helper; starts with the helper's own.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("serve", "client", "helper"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("server", nargs="?", help="the line that the server printed")
    parser.add_argument("--core", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    if arguments.role == "serve":
        run(partial(_serve, serve, arguments.directory))
    elif arguments.role == "helper":
        assert helper is not None
        run(partial(_help, helper, json.loads(arguments.server)))
    else:
        server = Server(**json.loads(arguments.server), directory=arguments.directory)
        run(partial(_client, workloads, server))
