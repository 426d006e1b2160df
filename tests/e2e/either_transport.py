"""One end of connections over TCP or over SMC-R, which runs commands.

    python -m tests.e2e.either_transport '{"smc": true}'

The same program runs over both transports: with ``smc`` it calls `trio_smc.enable` first, and
refuses TCP. A connection is used at one of four levels:

| level | what sends and receives |
|---|---|
| socket | a socket of `trio.socket` |
| stream | a `trio.SocketStream` |
| smc | an `SmcStream`; over TCP a `trio.SocketStream` |
| tls | a `trio.SSLStream` over a `trio.SocketStream` |
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import ssl
import sys
from typing import Any, Final

import trio
import trustme
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.e2e.peer import HOST, answer, lines
from tests.timing import PATIENCE
from trio_smc import Config, Mode

RING: Final = 1 << 16
"""Bytes of the receive buffers over SMC-R."""


class Program:
    """The commands of the process."""

    def __init__(self, smc: bool, nursery: trio.Nursery) -> None:
        self._smc = smc
        self._nursery = nursery
        self._listener: Any = None
        self._end: Any = None
        self._level = ""
        self._under_way: trio.Event | None = None
        self._outcome: Any = None

    async def listen(self, level: str) -> dict[str, Any]:
        """Listen for connections of that level; returns the port."""
        self._level = level
        if self._listener is not None:
            await self._listener.aclose()
        if level == "smc" and self._smc:
            [self._listener] = await trio_smc.open_listeners(0, host=HOST)
        else:
            [self._listener] = await trio.open_tcp_listeners(0, host=HOST)
        return {"port": self._listener.socket.getsockname()[1]}

    async def accept(self) -> dict[str, Any]:
        """Take the next connection."""
        await self._take(await self._listener.accept(), server_side=True)
        return {}

    async def connect(self, level: str, port: int) -> dict[str, Any]:
        """Make a connection."""
        self._level = level
        open_stream = trio_smc.open_stream if level == "smc" and self._smc else trio.open_tcp_stream
        await self._take(await open_stream(HOST, port), server_side=False)
        return {}

    async def _take(self, stream: Any, *, server_side: bool) -> None:
        if self._smc:
            smc_stream = stream if self._level == "smc" else stream.socket.stream
            assert smc_stream.mode is Mode.SMC_R
        self._end = stream
        if self._level == "socket":
            self._end = stream.socket
        elif self._level == "tls":
            self._end = trio.SSLStream(
                stream,
                _contexts()[server_side],
                server_hostname=None if server_side else HOST,
                server_side=server_side,
            )
            await self._end.do_handshake()

    async def act(self, op: str, argument: int = 0) -> dict[str, Any]:
        """Run one operation, and wait until its effects at this end are complete."""
        with trio.fail_after(PATIENCE):
            await wait_all_tasks_blocked()
            outcome = await self._try(op, argument)
            await wait_all_tasks_blocked()
        return {"outcome": outcome}

    async def _try(self, op: str, argument: int) -> Any:
        try:
            return await getattr(self, f"_{op}")(argument)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            number = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            return type(error).__name__, type(cause).__name__, errno.errorcode.get(number or 0)

    # --- operations ----------------------------------------------------------------------------

    async def _send(self, size: int) -> Any:
        data = bytes(size)
        if self._level == "socket":
            return await self._end.send(data) == size
        await self._end.send_all(data)
        return None

    async def _receive(self, size: int) -> int:
        if self._level == "socket":
            return len(await self._end.recv(size or RING))
        return len(await self._end.receive_some(size or RING))

    async def _receive_into(self, size: int) -> int:
        buffer = bytearray(size or RING)
        if self._level == "socket":
            return int(await self._end.recv_into(buffer))
        if hasattr(self._end, "receive_some_into"):
            return int(await self._end.receive_some_into(buffer))
        return len(await self._end.receive_some(len(buffer)))

    async def _peek(self, size: int) -> int:
        return len(await self._socket.recv(size or RING, socket.MSG_PEEK))

    async def _iterate(self, _: int) -> int:
        total = 0
        if self._level == "socket":
            while data := await self._end.recv(RING):
                total += len(data)
        else:
            async for data in self._end:
                total += len(data)
        return total

    async def _eof(self, _: int) -> None:
        if self._level == "socket":
            self._end.shutdown(socket.SHUT_WR)
        else:
            await self._end.send_eof()

    async def _wait_writable(self, _: int) -> None:
        if self._level == "socket":
            await self._end.wait_writable() if self._smc else await trio.lowlevel.wait_writable(
                self._end
            )
        else:
            await self._end.wait_send_all_might_not_block()

    async def _so_error(self, _: int) -> int:
        return int(self._end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    async def _is_readable(self, _: int) -> bool:
        return bool(self._socket.is_readable())

    async def _close(self, _: int) -> None:
        if self._level == "socket":
            self._end.close()
        else:
            await self._end.aclose()

    async def _drop(self, _: int) -> None:
        if self._level == "socket":
            self._end.close()
        else:
            await trio.aclose_forcefully(self._end)

    async def _cancelled(self, size: int) -> bool:
        """Send, and cancel the call when it waits."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._try, "send", size)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return nursery.cancel_scope.cancelled_caught

    @property
    def _socket(self) -> Any:
        return self._end if self._level == "socket" else self._end.socket

    # --- operations that wait ------------------------------------------------------------------

    async def start(self, op: str, argument: int = 0) -> dict[str, Any]:
        """Begin an operation, which waits; `finish` returns its outcome."""

        async def run(done: trio.Event) -> None:
            self._outcome = await self._try(op, argument)
            done.set()

        self._under_way = trio.Event()
        self._nursery.start_soon(run, self._under_way)
        await wait_all_tasks_blocked()
        return {"outcome": self._under_way.is_set()}

    async def finish(self) -> dict[str, Any]:
        """The outcome of `start`."""
        assert self._under_way is not None
        with trio.fail_after(PATIENCE):
            await self._under_way.wait()
        return {"outcome": self._outcome}

    async def over(self) -> dict[str, Any]:
        """Close all open resources."""
        with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self._drop(0)
        return {}


@functools.cache
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of the client, which checks no certificate, and of the server."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert(HOST).configure_cert(server)
    return client, server


async def main(smc: bool) -> None:
    """Run commands until the input ends."""
    async with trio.open_nursery() as nursery, trio.lowlevel.FdStream(os.dup(0)) as stdin:
        program = Program(smc, nursery)
        async for line in lines(stdin):
            sys.stdout.write(json.dumps(await answer(program, json.loads(line))) + "\n")  # type: ignore[arg-type]
            sys.stdout.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if settings["smc"]:
        trio_smc.enable(Config(require_smc=True, receive_buffer=RING))
    trio.run(main, settings["smc"])
