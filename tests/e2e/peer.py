"""One end of an end-to-end test: `python -m tests.e2e.peer [CONFIG]` (see `processes`).

CONFIG is a JSON object of `Config` fields; without it the default stack is used.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import resource
import struct
import sys
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from trio._core._run import GLOBAL_RUN_CONTEXT

import trio_smc
from tests import leaks
from tests.e2e.bytes_by_position import Text, plan_reads, plan_writes
from tests.timing import SLOWER
from trio_smc import Config, SmcStream, Stack

HOST = "127.0.0.1"
HEADER = struct.Struct("!QQQd")
"""The header of a sender for `_collect`: case, bytes, seed, seconds to wait before reading."""
LIMIT = 600
"""Seconds after which any operation counts as hung."""


class Program:
    """The commands of the process: each public method is one."""

    def __init__(self, stack: Stack | None, nursery: trio.Nursery) -> None:
        self._stack = stack
        self._nursery = nursery
        self._open: list[SmcStream] = []
        self._said: dict[str, Any] = {}
        self._ended = trio.Event()
        self._errors: list[str] = []
        self._collected: list[int] = []

    # --- connections -------------------------------------------------------------------------

    async def listen(self, handler: str, host: str = HOST, **settings: Any) -> dict[str, Any]:
        """Serve with one of the handlers below; returns the port."""

        async def handle(stream: SmcStream) -> None:
            try:
                await getattr(self, f"_{handler}")(stream, **settings)
            except (trio.BrokenResourceError, AssertionError, OSError) as error:
                self._errors.append(repr(error))
                self._ended.set()

        listeners = await self._nursery.start(
            lambda **kw: trio_smc.serve(handle, 0, host=host, **kw)
        )
        return {"port": listeners[0].socket.getsockname()[1]}

    async def _echo(self, stream: SmcStream) -> None:
        while data := await stream.receive_some():
            await stream.send_all(data)

    async def echo(
        self, port: int, connections: int, rounds: int = 1, host: str = HOST
    ) -> dict[str, Any]:
        """Open many connections, use all of them at once, hold them (see `close`)."""
        limiter = trio.CapacityLimiter(64)

        async def connect() -> None:
            async with limiter:
                self._open.append(await trio_smc.open_stream(host, port))

        async with trio.open_nursery() as nursery:
            for _ in range(connections):
                nursery.start_soon(connect)
        for _ in range(rounds):
            async with trio.open_nursery() as nursery:
                for number, stream in enumerate(self._open):
                    nursery.start_soon(self._echo_once, stream, number)
        return {"modes": sorted({str(stream.mode) for stream in self._open})}

    async def _echo_once(self, stream: SmcStream, number: int) -> None:
        text = b"%d;" % number * (1 + number % 200)
        await stream.send_all(text)
        back = b""
        while len(back) < len(text):
            piece = await stream.receive_some()
            assert piece
            back += piece
        assert back == text

    async def close(self) -> dict[str, Any]:
        """Close what `echo` holds."""
        async with trio.open_nursery() as nursery:
            for stream in self._open:
                nursery.start_soon(stream.aclose)
        self._open.clear()
        return {}

    async def churn(self, port: int, count: int, seed: int) -> dict[str, Any]:
        """Open, use and close ``count`` connections, one after the other."""
        rng = random.Random(seed)
        for number in range(count):
            async with await trio_smc.open_stream(HOST, port) as stream:
                assert stream.mode == "smc-r"
                for _ in range(rng.randrange(3)):
                    await self._echo_once(stream, number % 1000)
                if rng.random() < 0.5:
                    await stream.send_eof()
                    assert await stream.receive_some() == b""
        return {}

    # --- bytes -------------------------------------------------------------------------------

    async def _exchange(self, stream: SmcStream, **settings: Any) -> None:
        self._said = await self._full_duplex(stream, **settings)
        self._ended.set()

    async def exchange(self, port: int, host: str = HOST, **settings: Any) -> dict[str, Any]:
        """Send and receive at once over a new connection; see `_full_duplex`."""
        async with await trio_smc.open_stream(host, port) as stream:
            return await self._full_duplex(stream, **settings)

    async def exchanged(self) -> dict[str, Any]:
        """The result of the `_exchange` handler."""
        await self._ended.wait()
        self._ended = trio.Event()
        return self._said

    async def _full_duplex(
        self, stream: SmcStream, send_seed: int, receive_seed: int, total: int, small: int
    ) -> dict[str, Any]:
        sent, received = hashlib.sha256(), hashlib.sha256()
        writes = plan_writes(random.Random(send_seed), total, small)
        reads = plan_reads(random.Random(receive_seed + 1))
        start = time.perf_counter()

        async def send() -> None:
            text, position = Text(send_seed), 0
            for size in writes:
                data = text.piece(position, size)
                sent.update(data)
                await stream.send_all(data)
                position += size
            await stream.send_eof()

        async def receive() -> None:
            text, position = Text(receive_seed), 0
            while data := await stream.receive_some(next(reads)):
                assert data == text.piece(position, len(data)), f"wrong bytes at {position}"
                received.update(data)
                position += len(data)
            assert position == total, f"{position} bytes came of {total}"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            nursery.start_soon(receive)
        return {
            "mode": stream.mode,
            "sent": sent.hexdigest(),
            "received": received.hexdigest(),
            "small_writes": sum(size < 100 for size in writes),
            "writes": len(writes),
            "seconds": time.perf_counter() - start,
        }

    # --- endings -----------------------------------------------------------------------------

    async def _collect(self, stream: SmcStream) -> None:
        """Receive the data of a process of `zygote` to the end, as slowly as its header says."""
        header = b""
        while len(header) < HEADER.size and (piece := await stream.receive_some(HEADER.size)):
            header += piece
        case, size, seed, pause = HEADER.unpack(header)
        await trio.sleep(pause)
        text, position = Text(seed), 0
        while data := await stream.receive_some():
            assert data == text.piece(position, len(data)), f"case {case}: wrong at {position}"
            position += len(data)
        assert position == size, f"case {case}: {position} bytes came of {size}"
        assert stream.mode == "smc-r"
        self._collected.append(case)
        self._ended.set()

    async def collect_from(self, port: int) -> dict[str, Any]:
        """Connect, and receive the data of the other end."""
        async with await trio_smc.open_stream(HOST, port) as stream:
            await self._collect(stream)
        return await self.collected(1)

    async def collected(self, count: int) -> dict[str, Any]:
        """The cases that arrived completely; waits for that many, or for an error."""
        while len(self._collected) < count and not self._errors:
            self._ended = trio.Event()
            await self._ended.wait()
        cases, self._collected = self._collected, []
        return {"cases": cases, "errors": self._errors}

    async def hold(self, port: int) -> dict[str, Any]:
        """Open a connection and keep it."""
        self._open.append(await trio_smc.open_stream(HOST, port))
        return {"mode": self._open[-1].mode}

    async def _pour(self, stream: SmcStream) -> None:
        """Send as long as the peer reads."""
        while True:
            await stream.send_all(bytes(10_000))

    async def _sleep(self, stream: SmcStream) -> None:
        await trio.sleep_forever()

    async def _swallow(self, stream: SmcStream) -> None:
        """Read as long as the peer sends."""
        while await stream.receive_some():
            pass

    # --- what the process holds --------------------------------------------------------------

    async def measure(self) -> dict[str, Any]:
        """Descriptors, threads, mappings, files, memory, and the stack's own counts."""
        if self._stack is not None:
            # Closing continues after the end of the streams, and has no event for its end.
            with trio.move_on_after(10 * SLOWER):
                while self._open == [] and self._stack.statistics().open_connections:  # noqa: ASYNC110
                    await trio.sleep(0.01)
        held = leaks.take(_private_directory())
        # Trio forgets deadlines that were not met only by the thousand, 200 KiB of them.
        GLOBAL_RUN_CONTEXT.runner.deadlines._prune()
        gc.collect()
        answer: dict[str, Any] = {
            "descriptors": len(held.descriptors),
            "threads": len(held.threads),
            "mappings": len(held.mappings),
            "files": len(held.files),
            "traced": tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0,
            "rss": _rss(),
        }
        if self._stack is not None:
            answer |= {
                "open_connections": self._stack.statistics().open_connections,
                "groups": len(self._stack.link_groups),
                "links": sum(len(group.links) for group in self._stack.link_groups),
            }
        return answer

    async def errors(self) -> dict[str, Any]:
        """The errors of handlers since the last call."""
        errors, self._errors = self._errors, []
        return {"errors": errors}

    async def trace(self) -> dict[str, Any]:
        """Count Python memory from now on."""
        tracemalloc.start()
        return {}

    async def raise_limit(self) -> dict[str, Any]:
        """As many descriptors as the system lets an ordinary process have."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
        return {}


def _private_directory() -> Path:
    return Path(Config().private_directory())


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    """Yield the input line by line."""
    unread = b""
    async for data in stream:
        *whole, unread = (unread + data).split(b"\n")
        for line in whole:
            yield line


async def answer(program: Program, command: dict[str, Any]) -> dict[str, Any]:
    """Run one command."""
    method: Callable[..., Awaitable[dict[str, Any]]] = getattr(program, command.pop("do"))
    try:
        with trio.fail_after(LIMIT):
            return await method(**command)
    except Exception:
        return {"error": traceback.format_exc()}


async def main(settings: dict[str, Any] | None) -> None:
    """Run commands until the input ends."""
    async with contextlib.AsyncExitStack() as exits:
        stack = None
        if settings is not None:
            stack = await exits.enter_async_context(
                trio_smc.open_stack(Config(**{"learn_short": False, **settings}))
            )
        nursery = await exits.enter_async_context(trio.open_nursery())
        program = Program(stack, nursery)
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            # Nothing is cancelled in here: the generator is run to its end.
            async for line in lines(stdin):
                sys.stdout.write(json.dumps(await answer(program, json.loads(line))) + "\n")
                sys.stdout.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]) if len(sys.argv) > 1 else None)
