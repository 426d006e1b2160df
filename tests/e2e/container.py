"""The program of `networks.Containers`: a server that sends its name, or a client of servers.

A server answers each connection with its greeting, then with what it got; ``"plain"``: it is none
of trio_smc; ``"onward"``: it is a proxy to there.  A client says what became of each connection, as
JSON.

With a ``"user"`` it is one of the user namespace that was given to it as a descriptor.  That one
may not be able to read this tree, so it is entered when all has been imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - before the user changes
import json
import os
import sys
from typing import Any

import trio

import trio_smc
from tests.e2e.bytes_by_position import Text

CLONE_NEWUSER = 0x10000000  # linux/sched.h
TEXT = Text(1).piece(0, 300_000)


def write_line(line: str) -> None:
    """Write a line to the process that started this one."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def serve_one(stream: trio.abc.HalfCloseableStream, greeting: str) -> None:
    """Send the greeting, and echo the received bytes."""
    # If a client closes without reading, the connection is reset.
    with contextlib.suppress(trio.BrokenResourceError):
        await echo(stream, greeting)


async def echo(stream: trio.abc.HalfCloseableStream, greeting: str) -> None:
    """The same for a client that does not close."""
    async with stream:
        await stream.send_all(greeting.encode() + b"\n")
        got = b""
        while data := await stream.receive_some():
            got += data
        await stream.send_all(got)


async def pass_on(one: trio.SocketStream, other: trio.SocketStream) -> None:
    """Be a proxy."""

    async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            await sink.send_all(data)
        await sink.send_eof()

    async with one, other, trio.open_nursery() as nursery:
        nursery.start_soon(copy, one, other)
        nursery.start_soon(copy, other, one)


async def server(settings: dict[str, Any], config: trio_smc.Config) -> None:
    """Serve until stdin ends."""
    host, port, greeting = settings["host"], settings["port"], settings["greeting"]

    async def handler(stream: Any) -> None:
        if "onward" in settings:
            await pass_on(stream, await trio.open_tcp_stream(*settings["onward"]))
        else:
            await serve_one(stream, greeting)

    async with contextlib.AsyncExitStack() as scopes:
        listeners: list[Any]
        if settings.get("plain"):
            listeners = list(await trio.open_tcp_listeners(port, host=host))
        else:
            stack = await scopes.enter_async_context(trio_smc.open_stack(config))
            listeners = list(await stack.open_listeners(port, host=host))
        nursery = await scopes.enter_async_context(trio.open_nursery())
        nursery.start_soon(trio.serve_listeners, handler, listeners)
        write_line(f"{listeners[0].socket.getsockname()[1]} {os.getpid()}")
        await trio.lowlevel.FdStream(os.dup(0)).receive_some()
        nursery.cancel_scope.cancel()


async def client(settings: dict[str, Any], config: trio_smc.Config) -> None:
    """Connect to each address, and report the results."""
    reported = []
    async with trio_smc.open_stack(config) as stack:
        for host, port in settings["to"]:
            begun = trio.current_time()
            stream = await stack.open_stream(host, port)
            seconds = trio.current_time() - begun
            async with stream:
                await stream.send_all(TEXT)
                await stream.send_eof()
                got = b""
                while data := await stream.receive_some():
                    got += data
                greeting, _, echo = got.partition(b"\n")
                assert echo == TEXT
                reason = stream.fallback.reason if stream.fallback else ""
                reported.append(
                    {
                        "mode": stream.mode,
                        "reason": reason,
                        "greeting": greeting.decode(),
                        "pid": os.getpid(),
                        "user": os.getuid(),
                        "seconds": seconds,
                    }
                )
    write_line(json.dumps(reported))


def become(settings: dict[str, Any]) -> None:
    """Enter the user namespace as its user, with these groups."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Of groups without a number inside one is a member only from before.
    os.setgroups(settings["unknown"])
    if libc.setns(settings["namespace"], CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(settings["namespace"])
    if not settings["unknown"]:
        os.setgroups(settings["groups"])
    os.setgid(settings["user"])
    os.setuid(settings["user"])


def main() -> None:
    """See the module."""
    settings = json.loads(sys.argv[1])
    if "user" in settings:
        become(settings)
    config = trio_smc.Config(
        directory=settings["directory"],
        handshake_timeout=settings.get("handshake_timeout", 10.0),
    )
    trio.run(client if "to" in settings else server, settings, config)


if __name__ == "__main__":
    main()
