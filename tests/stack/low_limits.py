"""A server or a client with a low limit of descriptors, or with many listeners.

    python -m tests.stack.low_limits tcp|smc|required server|client|listeners

prints a JSON object: by limit the outcome of connections to an echo server, where the other end has
no low limit; or the outcome of many listeners.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import trio

import trio_smc
from tests.peers import echo

HOST: Final = "127.0.0.1"
LIMITS: Final = range(10, 65)
CONNECTIONS: Final = 2
LIMIT: Final = 256
LISTENERS: Final = 40
FILES: Final = 40
_PATIENCE: Final = 1.0
_REQUEST: Final = bytes(60_000)


def _limit(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def _open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


async def request(port: int) -> str:
    """Connect, and send a request; the outcome."""
    try:
        async with await trio.open_tcp_stream(HOST, port) as stream:
            left = len(_REQUEST)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, _REQUEST)
                while left:
                    data = await stream.receive_some()
                    if not data:
                        return "end"
                    left -= len(data)
        return "ok"
    except OSError as error:
        cause = error.__cause__
        cause = cause.exceptions[0] if isinstance(cause, ExceptionGroup) else error
        return errno.errorcode.get(getattr(cause, "errno", None) or 0, repr(cause))


async def request_all(port: int) -> list[str]:
    found: list[str] = []

    async def one() -> None:
        found.append(await request(port))

    with trio.move_on_after(_PATIENCE) as late:
        async with trio.open_nursery() as nursery:
            for _ in range(CONNECTIONS):
                nursery.start_soon(one)
    if late.cancelled_caught:
        found.append("late")
    return sorted(found)


async def serve(report: Callable[[object], None]) -> None:
    async with trio.open_nursery() as nursery:
        try:
            [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host=HOST))
        except OSError as error:
            report(errno.errorcode[error.errno or 0])
            nursery.cancel_scope.cancel()
            return
        report(listener.socket.getsockname()[1])


def _child(transport: str, limit: int | None, main: Callable[..., Any], *args: Any) -> Any:
    """Run ``main(report, *args)`` in a child process; its first report, and its process number."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        os.close(quiet)
        try:
            if limit is not None:
                _limit(limit)
            if transport != "tcp":
                trio_smc.enable(
                    trio_smc.Config(require_smc=transport == "required", learn_short=False)
                )

            def report(found: object) -> None:
                os.write(writer, json.dumps(found).encode() + b"\n")

            trio.run(main, report, *args)
        except OSError as error:
            os.write(writer, json.dumps(errno.errorcode[error.errno or 0]).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as lines:
        return json.loads(lines.readline() or "null"), child


async def client(report: Callable[[object], None], port: int) -> None:
    report(await request_all(port))


def outcomes(transport: str, side: str) -> dict[int, object]:
    found: dict[int, object] = {}
    for limit in LIMITS:
        port, server = _child(transport, limit if side == "server" else None, serve)
        if isinstance(port, int):
            limited = limit if side == "client" else None
            found[limit], other = _child(transport, limited, client, port)
            os.waitpid(other, 0)
            os.kill(server, signal.SIGINT)
        else:
            found[limit] = port
        os.waitpid(server, 0)
    return found


async def many_listeners(report: Callable[[object], None]) -> None:
    """Open many listeners, connect to the first and the last one, and open files."""
    found: dict[str, object] = {}

    async def mode(listener: trio.socket.SocketType) -> str:
        """The server's mode, or its reason for TCP; or the client's error."""
        modes: list[str] = []

        async def accept() -> None:
            accepted: Any = (await listener.accept())[0]
            with accepted:
                fallback = accepted.stream.fallback
                modes.append(fallback.reason if fallback else accepted.stream.mode)
            nursery.cancel_scope.cancel()

        with trio.socket.socket() as sock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                try:
                    await sock.connect(listener.getsockname())
                    await trio.sleep_forever()
                except OSError as error:
                    modes.append(str(error))
                    nursery.cancel_scope.cancel()
        return modes[0]

    first = trio.socket.socket()
    await first.bind((HOST, 0))
    first.listen()
    found["first"] = await mode(first)
    await trio.sleep(0.1)
    found["descriptors-before"] = _open_count()
    listeners = []
    for _ in range(LISTENERS):
        sock = trio.socket.socket()
        await sock.bind((HOST, 0))
        sock.listen()
        listeners.append(sock)
    found["listeners"] = len(listeners)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
    found["files"] = len(files)
    found["last"] = await mode(listeners[-1])
    for each in files:
        os.close(each)
    for sock in listeners:
        sock.close()
    await trio.sleep(0.3)
    found["descriptors-after-close"] = _open_count()
    report(found)


def main(transport: str, side: str) -> None:
    found: object
    if side == "listeners":
        found, child = _child(transport, LIMIT, many_listeners)
        os.waitpid(child, 0)
    else:
        found = outcomes(transport, side)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
