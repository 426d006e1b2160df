"""Programs that move files: a sender, receivers that count, write or hash, and a copying proxy.

A connection begins with a letter, which says what its receiver does with the data: c for count, w
for write into a file on tmpfs, h for SHA-256.  A transfer begins with its size in 8 bytes; the
receiver answers a byte when it has all of it.  The sender reads the file anew for each transfer, so
no two writes send the same memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.programs.common import HOST, READ, Ports, Server, main, move, start_helper

__all__ = ["WORKLOADS", "serve"]

_MIB = 1024 * 1024
_BEFORE = 16 * _MIB
_FILE = 256 * _MIB
_SIZE = 8
_MEMORY = Path("/dev/shm")
_MODULE = "benchmarks.programs.files"


# --- receivers -------------------------------------------------------------------------------


@contextlib.contextmanager
def _write() -> Iterator[Callable[[bytes | bytearray], object]]:
    directory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        yield file.write


@contextlib.contextmanager
def _hash() -> Iterator[Callable[[bytes | bytearray], object]]:
    digest = hashlib.sha256()
    yield digest.update
    digest.digest()


@contextlib.contextmanager
def _count() -> Iterator[Callable[[bytes | bytearray], object]]:
    yield len


_USES = {b"c": _count, b"w": _write, b"h": _hash}


async def receive(stream: trio.abc.Stream) -> None:
    """Serve one connection of a sender."""
    use = _USES[bytes(await stream.receive_some(1))]
    while header := await stream.receive_some(_SIZE):
        while len(header) < _SIZE:
            header += await stream.receive_some(_SIZE - len(header))
        left = int.from_bytes(header)
        with use() as accept:
            while left:
                data = await stream.receive_some(min(left, READ))
                if not data:
                    raise EOFError("the sender closed in the middle of a file")
                accept(data)
                left -= len(data)
        await stream.send_all(b"!")


async def serve(directory: Path, *, task_status: trio.TaskStatus[Ports]) -> None:
    """Serve until cancelled: a receiver, and in a process of its own a proxy in front of it."""
    with (directory / "file").open("wb") as file:
        for _ in range(_FILE // _MIB):
            file.write(os.urandom(_MIB))
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, receive, 0, host=HOST))
        ports = {"receiver": listener.socket.getsockname()[1]}
        start = partial(start_helper, _MODULE, directory, ports)
        task_status.started(ports | await nursery.start(start))


async def proxy(ports: Ports, *, task_status: trio.TaskStatus[Ports]) -> None:
    """Copy the bytes of each connection to a connection to the receiver, and back."""

    async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            await sink.send_all(data)
        await sink.send_eof()

    async def handle(client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream(HOST, ports["receiver"])
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(copy, client, server)
            nursery.start_soon(copy, server, client)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, handle, 0, host=HOST))
        task_status.started({"proxy": listener.socket.getsockname()[1]})


# --- the sender ------------------------------------------------------------------------------


async def send_file(port: str, use: bytes, server: Server, _seconds: float) -> tuple[float, float]:
    """Send a file: read a piece, send the piece."""
    async with await trio.open_tcp_stream(HOST, server.ports[port]) as stream:
        await stream.send_all(use)

        async def some(size: int) -> int:
            await stream.send_all(size.to_bytes(_SIZE))
            left = size
            with (server.directory / "file").open("rb", buffering=0) as file:
                while left:
                    data = file.read(min(left, READ))
                    await stream.send_all(data)
                    left -= len(data)
            if await stream.receive_some(1) != b"!":
                raise EOFError("the receiver closed before it had the file")
            return size

        return await move(server, partial(some, _BEFORE), partial(some, _FILE))


WORKLOADS: dict[str, Any] = {
    "file": partial(send_file, "receiver", b"c"),
    "file-write": partial(send_file, "receiver", b"w"),
    "file-hash": partial(send_file, "receiver", b"h"),
    "proxy": partial(send_file, "proxy", b"c"),
}

if __name__ == "__main__":
    main(serve, WORKLOADS, helper=proxy)
