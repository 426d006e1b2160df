"""The two processes of the demo: `demo_peer.py serve smc` and `demo_peer.py send smc PORT FILE`;
with `tcp` in place of `smc` the same over plain Trio TCP. Each prints one JSON object per line.
`demo_peer.py probe smc PORT` opens a connection and prints only its mode.

A client sends requests of nine bytes, a letter and a size, any number of them on one connection:
M  memory: the server makes memory of `size` bytes ready and answers one byte
U  upload: `size` bytes follow; the server answers one byte once all are in its memory
H  hash: the server answers the SHA-256 of what it holds
D  download: the server sends `size` bytes of what it holds
P  processor time: the server answers how much processor time it has used (8 bytes, ns)

U and D are timed, from the request to the last byte (or its acknowledgement), into memory whose
pages exist already. Both transports do the same reads and writes; hashing is never timed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import trio

import trio_smc

REQUEST = struct.Struct("!cQ")
CHUNK = 256 * 1024
NANOSECONDS = struct.Struct("!Q")
REPORT_EVERY = 8 * 1024 * 1024
HOST = "127.0.0.1"
# Seconds after which a transfer counts as hung.
LIMIT = 300


class Held:
    """The memory that a process receives into, made before anything is timed."""

    def __init__(self) -> None:
        self.data = bytearray()

    def room_for(self, size: int) -> memoryview:
        """Return writable memory of `size` bytes whose pages exist already."""
        if len(self.data) != size:
            self.data = bytearray(b"\xff") * size
        return memoryview(self.data)

    async def sha256(self) -> bytes:
        """Return the digest of what is held."""
        return await trio.to_thread.run_sync(lambda: hashlib.sha256(self.data).digest())


async def send(
    stream: trio.abc.SendStream, data: memoryview, progress: Callable[[int], None]
) -> None:
    """Send all of `data` in pieces of CHUNK bytes."""
    for start in range(0, len(data), CHUNK):
        await stream.send_all(data[start : start + CHUNK])
        progress(min(start + CHUNK, len(data)))


async def receive(
    stream: trio.abc.ReceiveStream, into: memoryview, progress: Callable[[int], None]
) -> None:
    """Fill `into`; EOFError if the peer ends before that."""
    # Both receive into place; a Trio stream offers that only on its socket.
    receive_into: Callable[[memoryview], Awaitable[int]]
    if isinstance(stream, trio_smc.SmcStream):
        receive_into = stream.receive_some_into
    else:
        receive_into = cast(trio.SocketStream, stream).socket.recv_into
    have = 0
    while have < len(into):
        got = await receive_into(into[have : have + CHUNK])
        if not got:
            raise EOFError("the peer closed in the middle of a transfer")
        have += got
        progress(have)


def silent(_have: int) -> None:
    """Report no progress."""


async def answer(stream: trio.abc.Stream, held: Held) -> None:
    """Serve one connection until its client closes it."""
    while first := await stream.receive_some(1):
        request = bytearray(REQUEST.size)
        request[:1] = first
        await receive(stream, memoryview(request)[1:], silent)
        letter, size = REQUEST.unpack(request)
        if letter == b"M":
            held.room_for(size)
            await stream.send_all(b"\0")
        elif letter == b"U":
            await receive(stream, held.room_for(size), silent)
            await stream.send_all(b"\0")
        elif letter == b"H":
            await stream.send_all(await held.sha256())
        elif letter == b"D":
            await send(stream, memoryview(held.data)[:size], silent)
        elif letter == b"P":
            await stream.send_all(NANOSECONDS.pack(time.process_time_ns()))
        else:
            raise ValueError(f"unknown request {letter!r}")


async def serve(transport: str) -> None:
    """Serve over "smc" or "tcp" until standard input ends; print the port first."""
    held = Held()
    listen = trio_smc.serve if transport == "smc" else trio.serve_tcp

    async def handler(stream: trio.abc.Stream) -> None:
        # The client's process reports its errors, and a connection of any other program is closed.
        with contextlib.suppress(trio.BrokenResourceError, EOFError, ValueError):
            await answer(stream, held)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(lambda **kw: listen(handler, 0, host=HOST, **kw))
        write_event(event="port", port=listeners[0].socket.getsockname()[1])
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            while await stdin.receive_some():
                pass
        nursery.cancel_scope.cancel()


def write_event(**event: object) -> None:
    """Print an event for the demo's main process: one JSON object per line."""
    print(json.dumps(event), flush=True)


class Reporter:
    """Reports the progress of a transfer every few MiB."""

    def __init__(self, way: str, total: int) -> None:
        self.way = way
        self.total = total
        self.next = REPORT_EVERY

    def __call__(self, have: int) -> None:
        if have >= self.next or have == self.total:
            self.next = have + REPORT_EVERY
            write_event(event="progress", way=self.way, bytes=have)


async def processor_time(stream: trio.abc.Stream) -> int:
    """Nanoseconds of processor time that both ends have used so far."""
    await stream.send_all(REQUEST.pack(b"P", 0))
    there = bytearray(NANOSECONDS.size)
    await receive(stream, memoryview(there), silent)
    return int(NANOSECONDS.unpack(there)[0]) + time.process_time_ns()


async def timed(stream: trio.abc.Stream, move: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Return the seconds that `move` took, and the processor time of both ends."""
    used = await processor_time(stream)
    start = time.perf_counter()
    await move()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "processor": (await processor_time(stream) - used) / 1e9}


async def exchange(stream: trio.abc.Stream, data: memoryview) -> None:
    """Upload, download, and report times and the SHA-256 of each copy, which is not timed."""
    held = Held()
    room = held.room_for(len(data))

    async def upload() -> None:
        await stream.send_all(REQUEST.pack(b"U", len(data)))
        await send(stream, data, Reporter("up", len(data)))
        await receive(stream, memoryview(bytearray(1)), silent)

    async def download() -> None:
        await stream.send_all(REQUEST.pack(b"D", len(data)))
        await receive(stream, room, Reporter("down", len(data)))

    # The server prepares its memory before the timed part.
    await stream.send_all(REQUEST.pack(b"M", len(data)))
    await receive(stream, memoryview(bytearray(1)), silent)
    taken = await timed(stream, upload)
    await stream.send_all(REQUEST.pack(b"H", 0))
    there = bytearray(hashlib.sha256().digest_size)
    await receive(stream, memoryview(there), silent)
    write_event(event="result", way="up", **taken, sha256=there.hex())
    taken = await timed(stream, download)
    write_event(event="result", way="down", **taken, sha256=(await held.sha256()).hex())


async def probe(transport: str, port: int) -> None:
    """Report the mode of a connection; TooSlowError if it hangs."""
    with trio.fail_after(LIMIT):
        await connect_and_exchange(transport, port, None)


async def client(transport: str, port: int, path: Path) -> None:
    """Move the file to the server and back over one connection; TooSlowError if it hangs."""
    data = memoryview(await trio.Path(path).read_bytes())
    with trio.fail_after(LIMIT):
        await connect_and_exchange(transport, port, data)


async def connect_and_exchange(transport: str, port: int, data: memoryview | None) -> None:
    """Open the connection, report its mode, and use it if there is data."""
    if transport == "tcp":
        async with await trio.open_tcp_stream(HOST, port) as tcp:
            if data is not None:
                await exchange(tcp, data)
        return
    async with await trio_smc.open_stream(HOST, port) as smc:
        why = f"{smc.fallback.message}; {smc.fallback.remedy}" if smc.fallback else None
        build = "compiled" if trio_smc.__compiled__ else "pure"
        variant = trio_smc.SoftRnic.variant
        write_event(event="mode", mode=smc.mode, fallback=why, build=build, variant=variant)
        if data is not None:
            await exchange(smc, data)


def main(arguments: list[str]) -> None:
    """Run the role that the command line names."""
    # The demo ends its processes by SIGTERM; like Ctrl-C it lets Trio close what is open.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    match arguments:
        case ["serve", ("smc" | "tcp") as transport]:
            trio.run(serve, transport)
        case ["probe", ("smc" | "tcp") as transport, port]:
            trio.run(probe, transport, int(port))
        case ["send", ("smc" | "tcp") as transport, port, path]:
            trio.run(client, transport, int(port), Path(path))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    code = 0
    try:
        main(sys.argv[1:])
    except* KeyboardInterrupt:  # in a nursery it arrives in a group
        code = 130
    sys.exit(code)
