"""What no handshake of these messages can beat: the transport `limit-messages`.

A connection of Trio's own, over which both ends say what two trio_smc processes of one host say
before data may flow (docs/performance.md, "What opening a connection costs"): messages as long,
on the same sockets, in the same order, each awaited awake.  But they are zeros, and nobody looks at
them: no announcement is searched, no message decoded, no state, RMB element or queue pair is there,
and the data goes over TCP afterwards.  What is left of the difference to plain TCP is the system
calls, and that each end needs the other one's word before it can go on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trio_smc.rendezvous.discovery import messages

__all__ = ["connect", "serve"]

_FOUR_TUPLE = messages.four_tuple(("127.0.0.1", 1), ("127.0.0.1", 1))
_NUMBER = messages.packed_number(1)
_ANNOUNCE = bytes(len(messages.announce(_FOUR_TUPLE, _NUMBER)))
_ACCEPTED = bytes(len(messages.accepted(_FOUR_TUPLE, _NUMBER)))
_PROPOSAL = bytes(52)  # RFC 7609, A.2.1
_ACCEPT = _CONFIRM = bytes(68)  # A.2.2, A.2.3
_LOOKS = 4

_channels: dict[int, socket.socket] = {}
"""A client's Unix connections, by the port of the server."""


def _name(port: int) -> str:
    return f"\0trio-smc-benchmark-messages-{port}"


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
    """A TCP connection on which all has been said."""
    channel = _channels.get(port)
    if channel is None:
        channel = _channels[port] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.connect(_name(port))
        channel.setblocking(False)
    channel.send(_ANNOUNCE)
    stream = await trio.open_tcp_stream(host, port)
    number = stream.socket.fileno()
    await _take(channel.fileno(), len(_ACCEPTED))
    os.write(number, _PROPOSAL)
    await _take(number, len(_ACCEPT))
    os.write(number, _CONFIRM)
    return stream


async def serve(
    host: str, handler: Callable[[Any], Awaitable[object]], started: Callable[[int], None]
) -> None:
    """Serve connections of one client process until cancelled; ``started`` gets the port."""
    [listener] = await trio.open_tcp_listeners(0, host=host)
    port = listener.socket.getsockname()[1]
    channels: list[socket.socket] = []

    async def talk(stream: trio.SocketStream) -> None:
        number = stream.socket.fileno()
        if not channels:
            channels.append(waiting.accept()[0])
            channels[0].setblocking(False)
        await _take(channels[0].fileno(), len(_ANNOUNCE))
        channels[0].send(_ACCEPTED)
        await _take(number, len(_PROPOSAL))
        os.write(number, _ACCEPT)
        await _take(number, len(_CONFIRM))
        await handler(stream)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.bind(_name(port))
        waiting.listen()
        started(port)
        await trio.serve_listeners(talk, [listener])
