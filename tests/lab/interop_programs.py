"""Steps with the kernel as peer: programs without support for SMC, in C and in Python.

`smc_sockets.c` is preloaded, so that their TCP sockets are of the family AF_SMC or of the protocol
IPPROTO_SMC, as `smc_run` of smc-tools does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from tests.lab.interop_world import World
from tests.timing import PATIENCE
from trio_smc import Mode, SmcStream, Stack

__all__ = ["c_programs", "python_programs"]

WAYS = ("family", "protocol")
SIZE = 1 << 20
PYTHON = "/usr/bin/python3"
FETCH = Path(__file__).with_name("plain_fetch.py")


async def c_programs(world: World) -> None:
    """An echo server and its client, compiled from plain POSIX calls."""
    echo = _compiled("plain_echo")
    for by in WAYS:
        async with world.stack() as (stack, _):
            port = next(world.ports)
            async with _program(world, by, echo, "serve", str(port)) as program:
                stream = await _reach(world, stack, port)
                await _confirm(world, program, stream)
                data = await _head(world)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stream.send_all, data)
                    assert await _exactly(stream, SIZE) == data
                await stream.send_eof()
                assert await stream.receive_some() == b""
                await stream.aclose()
            assert program.status == 0, program.output

            port = next(world.ports)
            [listener] = await stack.open_listeners(port, host=world.here)
            async with (
                listener,
                _program(world, by, echo, "ask", world.here, str(port), str(SIZE)) as program,
            ):
                stream = await listener.accept()
                data = bytes(await stream.receive_some())  # the client waits for the echo
                await _confirm(world, program, stream)
                while data:
                    await stream.send_all(data)
                    data = bytes(await stream.receive_some())
                await stream.aclose()
            assert (program.status, program.output) == (0, f"{SIZE} bytes came back\n"), program
        world.log(f"C programs, SMC by {by}: SMCR by smc_diag, as server and as client")


async def python_programs(world: World) -> None:
    """``python3 -m http.server``, and a client on urllib."""
    name = world.file.name
    for by in WAYS:
        async with world.stack() as (stack, _):
            port = next(world.ports)
            place = str(FETCH.parent)
            words = (PYTHON, "-m", "http.server", str(port), "--directory", place)
            async with _program(world, by, *words, stop=True) as program:
                stream = await _reach(world, stack, port)
                await _confirm(world, program, stream)
                await stream.send_all(f"GET /{FETCH.name} HTTP/1.0\r\n\r\n".encode())
                answer = b""
                while data := await stream.receive_some():
                    answer += data
                await stream.aclose()
                assert answer.partition(b"\r\n\r\n")[2] == FETCH.read_bytes(), answer

            port = next(world.ports)
            [listener] = await stack.open_listeners(port, host=world.here)
            url = f"http://{world.here}:{port}/{name}"
            async with (
                listener,
                _program(world, by, PYTHON, str(FETCH), url) as program,
            ):
                stream = await listener.accept()
                request = b""
                while b"\r\n\r\n" not in request:
                    request += await stream.receive_some()
                assert request.startswith(f"GET /{name} ".encode()), request
                await _confirm(world, program, stream)
                body = await _head(world)
                await stream.send_all(
                    b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                await stream.aclose()
            wanted = hashlib.sha256(body).hexdigest() + "\n"
            assert (program.status, program.output) == (0, wanted), program.output
        world.log(f"Python programs, SMC by {by}: SMCR by smc_diag, as server and as client")


class _Program:
    """A program that runs at the kernel's side."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status: int | None = None
        self.output = ""


@contextlib.asynccontextmanager
async def _program(
    world: World, by: str, *command: str, stop: bool = False
) -> AsyncIterator[_Program]:
    """Start the program; afterwards wait for its end, or stop it."""
    program = _Program(
        await world.kernel.call(
            "program", command=list(command), by=by, library=_compiled("smc_sockets")
        )
    )
    failed = True
    try:
        with trio.fail_after(PATIENCE):
            yield program
        failed = False
    finally:
        with trio.CancelScope(shield=True):
            program.status, program.output = await world.kernel.call(
                "ended", number=program.number, stop=stop or failed
            )
            if failed:
                world.log(f"the program said: {program.output}")


async def _reach(world: World, stack: Stack, port: int) -> SmcStream:
    """Connect as soon as the program listens."""
    while True:
        try:
            return await stack.open_stream(world.there, port)
        except ConnectionRefusedError:
            await trio.sleep(0.1)


async def _confirm(world: World, program: _Program, stream: SmcStream) -> None:
    assert stream.mode is Mode.SMC_R, stream.fallback
    modes: Any = []
    while not modes:  # the program may not have called accept() yet
        modes = await world.kernel.call("modes_of", number=program.number)
    assert modes == ["SMCR"], modes


async def _exactly(stream: SmcStream, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        data = await stream.receive_some()
        assert data, len(got)
        got += data
    return bytes(got)


async def _head(world: World) -> bytes:
    async with await trio.open_file(world.file, "rb") as file:
        return await file.read(SIZE)


def _compiled(name: str) -> str:
    return os.path.join(os.environ["KERNEL"], name)
