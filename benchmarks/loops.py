"""The event loop of a workload: Trio's, asyncio's or uvloop's; or threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import trio

Job = Callable[[], Awaitable[object]]


class Loop(Protocol):
    """Runs a program, with the few operations that differ between loops."""

    def run(self, main: Callable[..., Any], *args: object) -> None:
        """Run ``main(*args)`` to its end."""

    async def run_all(self, jobs: list[Job], *, aside: Job | None = None) -> None:
        """Run the jobs at once until all have ended; ``aside`` is then cancelled."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""

    async def within(self, seconds: float, job: Job) -> None:
        """Run the job.  Raises TimeoutError or trio.TooSlowError if it takes longer."""

    def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of standard input; the loop goes on with other tasks."""


class TrioLoop:
    """Trio."""

    def run(self, main: Callable[..., Any], *args: object) -> None:
        trio.run(main, *args)

    async def run_all(self, jobs: list[Job], *, aside: Job | None = None) -> None:
        async with trio.open_nursery() as outer:
            if aside is not None:
                outer.start_soon(aside)
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(job)
            outer.cancel_scope.cancel()

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def within(self, seconds: float, job: Job) -> None:
        with trio.fail_after(seconds):
            await job()

    async def lines(self) -> AsyncIterator[bytes]:
        buffered = b""
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while data := await stdin.receive_some():
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    yield line


class AsyncioLoop:
    """asyncio, or uvloop in its place."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def run(self, main: Callable[..., Any], *args: object) -> None:
        factory = None
        if self._kind == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main(*args))

    async def run_all(self, jobs: list[Job], *, aside: Job | None = None) -> None:
        extra = None if aside is None else asyncio.ensure_future(aside())
        try:
            await asyncio.gather(*(job() for job in jobs))
        finally:
            if extra is not None:
                extra.cancel()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, job: Job) -> None:
        async with asyncio.timeout(seconds):
            await job()

    async def lines(self) -> AsyncIterator[bytes]:
        reader = asyncio.StreamReader()
        with os.fdopen(os.dup(0), "rb", buffering=0) as stdin:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), stdin
            )
            try:
                while line := await reader.readline():
                    yield line
            finally:
                transport.close()


class BlockingLoop:
    """No event loop: each job is a thread, and its calls block.

    A job is a coroutine function like those of the other loops, so the workloads are the same.  It
    never suspends, because the streams of such a transport do not.
    """

    def run(self, main: Callable[..., Any], *args: object) -> None:
        run_blocking(main(*args))

    async def run_all(self, jobs: list[Job], *, aside: Job | None = None) -> None:
        if aside is not None:
            # Never cancelled: this thread ends with the process.
            threading.Thread(target=lambda: run_blocking(aside()), daemon=True).start()
        if len(jobs) == 1:
            await jobs[0]()
            return
        with ThreadPoolExecutor(len(jobs)) as pool:
            for done in [pool.submit(run_blocking, job()) for job in jobs]:
                done.result()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop

    async def within(self, seconds: float, job: Job) -> None:
        """Run the job.  A thread that blocks cannot be cancelled: the process ends."""
        with _ending_after(seconds):
            await job()

    async def lines(self) -> AsyncIterator[bytes]:
        for line in sys.stdin.buffer:
            yield line


@contextlib.contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """Print all stacks and end the process if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_blocking(job: Awaitable[object]) -> None:
    """Run a coroutine that never suspends.

    Raises RuntimeError: it did.
    """
    assert isinstance(job, Coroutine)
    try:
        job.send(None)
    except StopIteration:
        return
    job.close()
    raise RuntimeError("a blocking transport has suspended")
