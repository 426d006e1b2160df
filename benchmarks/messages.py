"""The transport `limit-messages`: a lower limit for each handshake of these messages.

A connection of Trio's own, over which both ends exchange what two trio_smc processes of one host
exchange before data may flow (docs/performance.md, "What opening a connection costs"): messages as
long, on the same kinds of sockets, in the same order, each awaited awake.  But the messages are
zeros, and are not decoded; there is no state, RMB element or queue pair, and the data goes over TCP
afterwards.  The rest of the difference to plain TCP is the system calls, and that each end needs
the other end's message before it can go on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trio_smc.rendezvous.discovery import messages

__all__ = ["connect", "serve"]

_ACCEPTED = bytes(len(messages.accepted(bytes(messages.TOKEN_SIZE), 0)))
_PROPOSAL = bytes(52)  # RFC 7609, A.2.1
_ACCEPT = _CONFIRM = bytes(68)  # A.2.2, A.2.3
_LOOKS = 4


def _name(server: int, client: int) -> str:
    """The name of the socket that stands for a connection between two ports."""
    return f"\0trio-smc-benchmark-messages-{server}-{client}"


async def _take(number: int, size: int) -> None:
    """Read a message, awake."""
    while True:
        for _ in range(_LOOKS):
            try:
                got = os.read(number, size)
            except BlockingIOError:
                continue
            if not got:
                raise EOFError("the other end has gone")
            size -= len(got)
            if not size:
                return
        # Several connections at a time: their messages need others' turns.
        await trio.lowlevel.checkpoint()


async def connect(host: str, port: int) -> trio.abc.HalfCloseableStream:
    """A TCP connection on which all messages were exchanged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as answers:
        sock = trio.socket.socket()
        await sock.bind((host, 0))
        answers.bind(_name(port, sock.getsockname()[1]))
        await sock.connect((host, port))
        number = sock.fileno()
        await _take(answers.fileno(), len(_ACCEPTED))
    os.write(number, _PROPOSAL)
    await _take(number, len(_ACCEPT))
    os.write(number, _CONFIRM)
    return trio.SocketStream(sock)


async def serve(
    host: str, handler: Callable[[Any], Awaitable[object]], started: Callable[[int], None]
) -> None:
    """Serve connections until cancelled; ``started`` gets the port."""
    [listener] = await trio.open_tcp_listeners(0, host=host)
    port = listener.socket.getsockname()[1]

    async def talk(stream: trio.SocketStream) -> None:
        number = stream.socket.fileno()
        sender.sendto(_ACCEPTED, _name(port, stream.socket.getpeername()[1]))
        await _take(number, len(_PROPOSAL))
        os.write(number, _ACCEPT)
        await _take(number, len(_CONFIRM))
        await handler(stream)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        started(port)
        await trio.serve_listeners(talk, [listener])
