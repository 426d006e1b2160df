"""Calls of a process that has no free descriptor, over TCP or SMC-R.

    python -m tests.sockets.without_descriptors tcp|smc

prints a JSON object: the outcome of each call. Each call is the first one of its kind in a process
of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

import trio_smc
from tests.lingering import full_table
from tests.timing import PATIENCE
from trio_smc import Config

DATA: Final = b"abc"


async def pair() -> tuple[Any, Any]:
    """The two ends of a connection whose first end has data to read."""
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = trio.socket.socket()
        accepted = []

        async def accept() -> None:
            accepted.append((await listener.accept())[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await client.connect(listener.getsockname())
    await client.send(DATA)
    [server] = accepted
    await trio.lowlevel.wait_readable(server)
    return server, client


async def close(sock: Any, _: Any) -> object:
    sock.close()
    return sock.fileno()


async def close_a_stream(sock: Any, _: Any) -> object:
    await trio.SocketStream(sock).aclose()
    return sock.fileno()


async def close_twice_by_both(sock: Any, peer: Any) -> object:
    for _ in range(2):
        peer.close()
        sock.close()
    return None


async def receive(sock: Any, _: Any) -> object:
    return len(await sock.recv(9))


async def receive_into(sock: Any, _: Any) -> object:
    return await sock.recv_into(bytearray(9))


async def receive_nothing(sock: Any, _: Any) -> object:
    return len(await sock.recv(0))


async def receive_a_message(sock: Any, _: Any) -> object:
    return len((await sock.recvmsg(9))[0])


async def peek(sock: Any, _: Any) -> object:
    return len(await sock.recv(9, socket.MSG_PEEK))


async def send(sock: Any, _: Any) -> object:
    return await sock.send(DATA)


async def send_more(sock: Any, _: Any) -> object:
    return await sock.send(DATA, socket.MSG_MORE)


async def send_a_message(sock: Any, _: Any) -> object:
    return await sock.sendmsg([DATA])


async def send_to(sock: Any, _: Any) -> object:
    return await sock.sendto(DATA, ("127.0.0.1", 1))


async def send_much(sock: Any, peer: Any) -> object:
    async def read() -> None:
        left = 10_000_000
        while left:
            left -= len(await peer.recv(min(left, 1 << 20)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.SocketStream(sock).send_all(bytes(10_000_000))
    return None


async def connect_again(sock: Any, _: Any) -> object:
    await sock.connect(("127.0.0.1", 1))
    return None


async def shut_down(sock: Any, peer: Any) -> object:
    sock.shutdown(socket.SHUT_RDWR)
    return len(await peer.recv(9))


async def read_the_names(sock: Any, _: Any) -> object:
    name, other = sock.getsockname(), sock.getpeername()
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return len(name), len(other), error, sock.fileno() >= 0, sock.get_inheritable()


CALLS: Final[tuple[Callable[[Any, Any], Awaitable[object]], ...]] = (
    close, close_a_stream, close_twice_by_both, receive, receive_into, receive_nothing,
    receive_a_message, peek, send, send_more, send_a_message, send_to, send_much, connect_again,
    shut_down, read_the_names,
)  # fmt: skip


async def outcome(call: Callable[[Any, Any], Awaitable[object]]) -> str:
    """The result of a call without a free descriptor, or its error."""
    sock, peer = await pair()
    with trio.fail_after(PATIENCE), full_table():
        try:
            found = repr(await call(sock, peer))
        except OSError as error:
            found = repr(error)
    sock.close()
    peer.close()
    return found


def main(transport: str) -> None:
    """Run each call in a child process, and print the outcomes."""
    found = {}
    for call in CALLS:
        readable, writable = os.pipe()
        if os.fork() == 0:
            if transport == "smc":
                trio_smc.enable(Config(require_smc=True, receive_buffer=1 << 16))
            os.write(writable, trio.run(outcome, call).encode())
            os._exit(0)
        os.close(writable)
        with open(readable, "rb") as output:
            found[call.__name__] = output.read().decode()
        os.wait()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
