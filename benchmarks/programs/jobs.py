"""A queue of jobs with eight worker processes.

A connection begins with a letter: s submits jobs, w works.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from benchmarks.programs.common import HOST, Ports, Server, main, rate, start_helper
from benchmarks.programs.framing import Messages

__all__ = ["WORKLOADS", "serve"]

_MODULE: Final = "benchmarks.programs.jobs"
_WORKERS: Final = 8
_JOB: Final = bytes(1024)
_IN_QUEUE: Final = 64


class _Queue:
    """Gives jobs to idle workers, and their results to the submitter."""

    def __init__(self) -> None:
        self._add, self._jobs = trio.open_memory_channel[tuple[Messages, bytes]](_IN_QUEUE)

    async def submit(self, submitter: Messages) -> None:
        """Serve one submitter of jobs."""
        while job := await submitter.receive():
            await self._add.send((submitter, job))

    async def work(self, worker: Messages) -> None:
        """Serve one worker: a job, its result, the next job."""
        async for submitter, job in self._jobs:
            await worker.send(job)
            if not (result := await worker.receive()):
                return
            await submitter.send(result)


async def serve(directory: Path, *, task_status: trio.TaskStatus[Ports]) -> None:
    """Serve until cancelled; the workers are helpers."""
    queue = _Queue()
    kinds = {b"s": queue.submit, b"w": queue.work}

    async def handle(stream: trio.SocketStream) -> None:
        await kinds[await stream.receive_some(1)](Messages(stream))

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, handle, 0, host=HOST))
        ports = {"tcp": listener.socket.getsockname()[1]}
        for _ in range(_WORKERS):
            await nursery.start(partial(start_helper, _MODULE, directory, ports))
        task_status.started(ports)


async def work(ports: Ports, *, task_status: trio.TaskStatus[Ports]) -> None:
    """Work for the queue: the result of a job is its SHA-256."""
    async with await trio.open_tcp_stream(HOST, ports["tcp"]) as stream:
        await stream.send_all(b"w")
        messages = Messages(stream)
        task_status.started({})
        while job := await messages.receive():
            await messages.send(hashlib.sha256(job).digest())


async def jobs(server: Server, seconds: float) -> tuple[float, float]:
    """Jobs for the queue: a new one is submitted for each result."""
    stream = await trio.open_tcp_stream(HOST, server.ports["tcp"])
    await stream.send_all(b"s")
    messages = Messages(stream)

    async def some(end: float) -> int:
        done = 0
        for _ in range(_IN_QUEUE):
            await messages.send(_JOB)
        while time.perf_counter() < end:
            await messages.receive()
            await messages.send(_JOB)
            done += 1
        for _ in range(_IN_QUEUE):
            await messages.receive()
        return done + _IN_QUEUE

    async with stream:
        return await rate(server, seconds, some)


WORKLOADS: dict[str, Any] = {"queue": jobs}

if __name__ == "__main__":
    main(serve, WORKLOADS, helper=work)
