"""Other ways than TCP between processes of one host: the transports of `--comparison`.

Each is written the way its documentation shows: Unix sockets and pipes under an event loop,
`multiprocessing` with a thread for each connection, gRPC and UCX under asyncio.  Some move messages
and not a stream of bytes.  There `send_all` sends one message, `receive_some` returns the rest of
one, and an empty message is the end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final, Self

import trio

from benchmarks.loops import AsyncioLoop, BlockingLoop, run_blocking
from benchmarks.transports import (
    HOST,
    AsyncioStream,
    Handler,
    Started,
    Transport,
)

__all__ = ["COMPARED", "NEEDS", "missing"]


class _Messages:
    """A stream whose transport moves messages; a subclass sends and receives one."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    async def send_all(self, data: bytes) -> None:
        raise NotImplementedError

    async def _receive(self) -> bytes | bytearray | memoryview:
        """Return the next message; empty at the end."""
        raise NotImplementedError

    async def receive_some(self, max_bytes: int) -> memoryview:
        """Return at most ``max_bytes`` of a message, without another copy."""
        rest = self._rest or memoryview(await self._receive())
        self._rest = rest[max_bytes:]
        return rest[:max_bytes]

    async def send_eof(self) -> None:
        await self.send_all(b"")

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


# --- Unix sockets under asyncio --------------------------------------------------------------


async def _connect_asyncio_unix(path: str) -> AsyncioStream:
    return AsyncioStream(*await asyncio.open_unix_connection(path))


async def _serve_asyncio_unix(handler: Handler, started: Started) -> None:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncioStream(reader, writer) as stream:
            await handler(stream)

    # A file, because uvloop does not know the abstract namespace.
    with tempfile.TemporaryDirectory(prefix="trio-smc-benchmark-") as directory:
        path = f"{directory}/socket"
        server = await asyncio.start_unix_server(accepted, path, backlog=1024)
        started(path)
        await server.serve_forever()


# --- pipes -----------------------------------------------------------------------------------


_Pipes = trio.StapledStream[trio.lowlevel.FdStream, trio.lowlevel.FdStream]
"""A pipe for each direction."""
_READY: Final = b"\n"
_NAME_SIZE: Final = 16


async def _serve_pipes(handler: Handler, started: Started) -> None:
    """Serve clients that make two named pipes each and write their name into a third one."""
    directory = Path(tempfile.mkdtemp(prefix="trio-smc-benchmark-"))
    try:
        os.mkfifo(directory / "names")
        # Open for reading and writing: the end of a client is not the end of this pipe.
        names = trio.lowlevel.FdStream(os.open(directory / "names", os.O_RDWR | os.O_NONBLOCK))
        started(str(directory))
        async with names, trio.open_nursery() as nursery:
            while True:
                for name in _names(await names.receive_some(_NAME_SIZE * 256)):
                    nursery.start_soon(_serve_one, directory / name, handler)
    finally:
        shutil.rmtree(directory)


def _names(data: bytes | bytearray) -> list[str]:
    """The names in one read.  Each is written whole, and the size read is a multiple of theirs."""
    return [
        bytes(data[start : start + _NAME_SIZE]).decode().strip()
        for start in range(0, len(data), _NAME_SIZE)
    ]


async def _serve_one(path: Path, handler: Handler) -> None:
    # The client has opened both pipes, so neither call waits or fails.
    here = os.open(f"{path}-up", os.O_RDONLY | os.O_NONBLOCK)
    there = os.open(f"{path}-down", os.O_WRONLY | os.O_NONBLOCK)
    stream = trio.StapledStream(trio.lowlevel.FdStream(there), trio.lowlevel.FdStream(here))
    async with stream:
        await stream.send_all(_READY)
        with contextlib.suppress(trio.BrokenResourceError):
            await handler(stream)


_made = 0


async def _connect_pipes(directory: str) -> _Pipes:
    global _made
    _made += 1
    name = f"{os.getpid()}.{_made}"
    up, down = f"{directory}/{name}-up", f"{directory}/{name}-down"
    os.mkfifo(up)
    os.mkfifo(down)
    # Without a reader of `up` the next open for writing would fail, and without a writer of `down`
    # a read would find the end before the server has opened it.
    keepers = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (up, down)]
    down_fd = os.open(down, os.O_RDONLY | os.O_NONBLOCK)
    up_fd = os.open(up, os.O_WRONLY | os.O_NONBLOCK)
    stream = trio.StapledStream(trio.lowlevel.FdStream(up_fd), trio.lowlevel.FdStream(down_fd))
    names = os.open(f"{directory}/names", os.O_WRONLY)
    os.write(names, name.ljust(_NAME_SIZE).encode())
    os.close(names)
    ready = await stream.receive_some(1)
    for keeper in keepers:
        os.close(keeper)
    os.unlink(up)
    os.unlink(down)
    if ready != _READY:
        raise RuntimeError(f"the server of pipes has answered {ready!r}")
    return stream


# --- multiprocessing -------------------------------------------------------------------------

_Pair = Connection


class _ConnectionStream(_Messages):
    """A `multiprocessing.connection.Connection`, with bytes and no pickles."""

    def __init__(self, connection: _Pair) -> None:
        super().__init__()
        self._connection = connection

    async def send_all(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    async def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            return b""

    async def aclose(self) -> None:
        self._connection.close()


async def _connect_connection(name: str) -> _ConnectionStream:
    return _ConnectionStream(Client(name))


async def _serve_threads(
    accept: Callable[[Listener], _Messages], handler: Handler, started: Started
) -> None:
    """Accept connections, and serve each in a thread of its own."""
    name = f"\0trio-smc-benchmark-{os.getpid()}"

    async def serve(stream: _Messages) -> None:
        async with stream:
            with contextlib.suppress(ConnectionError):
                await handler(stream)

    with Listener(name, backlog=1024) as listener:
        started(name)
        while True:
            stream = accept(listener)
            threading.Thread(target=lambda s=stream: run_blocking(serve(s)), daemon=True).start()


_SLOT: Final = 1 << 20
_SLOTS: Final = 4
_FREE: Final = b"f"


class _SharedStream(_Messages):
    """Slots of shared memory for the bytes, and connections that pass the slots to and fro.

    A connection for each direction carries the length of each message one way, and a byte for each
    slot that is free again the other way.
    """

    def __init__(self, memories: list[SharedMemory], connections: list[_Pair]) -> None:
        super().__init__()
        self._memories = memories
        self._out_buffer, self._in_buffer = map(_buffer, memories)
        self._out, self._in = connections
        self._free = _SLOTS
        self._sent = self._received = 0

    async def send_all(self, data: bytes) -> None:
        if len(data) > _SLOT:
            raise ValueError("a message is larger than a slot")
        if not self._free:
            self._out.recv_bytes()
            self._free += 1
        start = self._sent % _SLOTS * _SLOT
        self._out_buffer[start : start + len(data)] = data
        self._sent += 1
        self._free -= 1
        self._out.send_bytes(len(data).to_bytes(8, "little"))

    async def _receive(self) -> bytes:
        try:
            size = int.from_bytes(self._in.recv_bytes(), "little")
        except (EOFError, ConnectionError):
            return b""
        start = self._received % _SLOTS * _SLOT
        data = bytes(self._in_buffer[start : start + size])
        self._received += 1
        with contextlib.suppress(ConnectionError):
            self._in.send_bytes(_FREE)
        return data

    async def aclose(self) -> None:
        self._out.close()
        self._in.close()
        for memory in self._memories:
            memory.close()


def _buffer(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None  # the memory is open
    return memory.buf


def _own(memory: SharedMemory) -> SharedMemory:
    """Keep the resource tracker from removing it: it is removed as soon as both ends map it."""
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    return memory


async def _connect_shared(name: str) -> _SharedStream:
    memories = [_own(SharedMemory(create=True, size=_SLOT * _SLOTS)) for _ in range(2)]
    out, back = Client(name), Client(name)
    out.send_bytes(f"{os.getpid()} {id(out)}".encode())
    back.send_bytes(f"{os.getpid()} {id(out)}".encode())
    out.send_bytes(" ".join(memory.name for memory in memories).encode())
    out.recv_bytes()
    return _SharedStream(memories, [out, back])


_waiting: dict[bytes, _Pair] = {}
"""The first connection of each stream that waits for its second one."""


def _accept_shared(listener: Listener) -> _SharedStream:
    while True:
        connection = listener.accept()
        key = connection.recv_bytes()
        if key not in _waiting:
            _waiting[key] = connection
            continue
        back, out = _waiting.pop(key), connection
        memories = [SharedMemory(name) for name in back.recv_bytes().decode().split()]
        for memory in memories:
            memory.unlink()  # the mappings stay
        back.send_bytes(_FREE)
        return _SharedStream(memories[::-1], [out, back])


# --- gRPC ------------------------------------------------------------------------------------

_METHOD: Final = "/benchmark/Stream"


class _GrpcStream(_Messages):
    """A call with a stream of messages in both directions, which are bytes without protobuf."""

    def __init__(self, call: Any, channel: Any = None) -> None:
        super().__init__()
        self._call = call
        self._channel = channel

    async def send_all(self, data: bytes) -> None:
        from grpc import RpcError

        try:
            await self._call.write(data)
        except (RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError(str(error)) from error

    async def _receive(self) -> bytes:
        from grpc import RpcError
        from grpc.aio import EOF

        try:
            data = await self._call.read()
        except RpcError as error:
            raise ConnectionError(str(error)) from error
        return b"" if data is EOF else data

    async def send_eof(self) -> None:
        await self._call.done_writing()

    async def aclose(self) -> None:
        if self._channel is not None:
            self._call.cancel()
            await self._channel.close()


async def _connect_grpc(port: int) -> _GrpcStream:
    import grpc.aio

    channel = grpc.aio.insecure_channel(f"{HOST}:{port}", options=_OPTIONS)
    return _GrpcStream(channel.stream_stream(_METHOD)(), channel)


async def _serve_grpc(handler: Handler, started: Started) -> None:
    import grpc.aio

    async def serve(_requests: AsyncIterator[bytes], context: Any) -> None:
        with contextlib.suppress(ConnectionError):
            await handler(_GrpcStream(context))

    server = grpc.aio.server(options=_OPTIONS)
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("benchmark", handlers)])
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    started(port)
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)  # otherwise its threads keep the process


# Channels of a process share connections unless they are told not to.
_OPTIONS: Final = [("grpc.use_local_subchannel_pool", 1)]


# --- UCX -------------------------------------------------------------------------------------


class _UcxStream(_Messages):
    """An endpoint of UCXX, with active messages: the receiver need not know their length."""

    def __init__(self, endpoint: Any) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def send_all(self, data: bytes) -> None:
        from ucxx.exceptions import UCXError

        try:
            await self._endpoint.am_send(data or _END)
        except UCXError as error:
            raise ConnectionError(str(error)) from error

    async def _receive(self) -> memoryview:
        from ucxx.exceptions import UCXError

        try:
            data = memoryview(await self._endpoint.am_recv())
        except UCXError:
            return memoryview(b"")
        return data[len(_END) :] if bytes(data[:2]) == _END else data

    async def aclose(self) -> None:
        await self._endpoint.close()


_END: Final = b"\0"
"""A message that stands for an empty one, which UCXX does not send."""


def _ucxx() -> Any:
    # The library would warn on standard output about variables that it has set itself.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    # By default a thread polls for the event loop; with two processors a round trip then takes
    # 2 ms.  In this mode the event loop waits for the library's descriptor.
    os.environ.setdefault("UCXPY_PROGRESS_MODE", "blocking")
    import ucxx

    return ucxx


async def _connect_ucx(port: int) -> _UcxStream:
    return _UcxStream(await _ucxx().create_endpoint(HOST, port))


async def _serve_ucx(handler: Handler, started: Started) -> None:
    async def accepted(endpoint: Any) -> None:
        async with _UcxStream(endpoint) as stream:
            with contextlib.suppress(ConnectionError):
                await handler(stream)

    listener = _ucxx().create_listener(accepted)
    started(listener.port)
    await asyncio.Event().wait()


def _asyncio_unix(kind: str) -> Transport:
    return Transport(
        connect=_connect_asyncio_unix, serve=_serve_asyncio_unix, loop=AsyncioLoop(kind)
    )


COMPARED: Final = {
    "asyncio-unix": _asyncio_unix("asyncio"),
    "uvloop-unix": _asyncio_unix("uvloop"),
    "pipes": Transport(connect=_connect_pipes, serve=_serve_pipes),
    "multiprocessing": Transport(
        connect=_connect_connection,
        serve=partial(_serve_threads, lambda listener: _ConnectionStream(listener.accept())),
        loop=BlockingLoop(),
    ),
    "shared-memory": Transport(
        connect=_connect_shared, serve=partial(_serve_threads, _accept_shared), loop=BlockingLoop()
    ),
    "grpc": Transport(connect=_connect_grpc, serve=_serve_grpc, loop=AsyncioLoop("asyncio")),
    "ucx": Transport(connect=_connect_ucx, serve=_serve_ucx, loop=AsyncioLoop("asyncio")),
}
NEEDS: Final = {"uvloop": "uvloop", "uvloop-unix": "uvloop", "grpc": "grpc", "ucx": "ucxx"}
"""The module without which a transport cannot run."""


def missing(name: str) -> bool:
    """True if the transport needs a module that is not installed."""
    return name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None
