"""Programs that exchange messages: arrays, pickles, answers of 10 KiB, a chat.

A connection begins with a letter: a for arrays, p for pickles, r for requests, c for the chat.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from benchmarks.programs.common import (
    HOST,
    WARM_UP,
    Ports,
    Server,
    main,
    move,
    rate,
    request_in_turn,
)
from benchmarks.programs.framing import Messages

__all__ = ["WORKLOADS", "serve"]

_MIB: Final = 1024 * 1024
_ITEMS: Final = _MIB // 8  # of an array
_REQUEST: Final = bytes(100)
_ANSWER: Final = bytes(range(256)) * 40  # 10 KiB
_CLIENTS: Final = 20
_TEXT: Final = (
    b"a line of the chat, as long as lines in a chat are: one hundred bytes, or a few less"
)


# --- the server ------------------------------------------------------------------------------


async def _sum_arrays(messages: Messages) -> None:
    """Answer each array with its sum."""
    while data := await messages.receive():
        await messages.send(np.frombuffer(data, dtype=np.float64).sum().tobytes())


async def _load_pickles(messages: Messages) -> None:
    """Answer each list of records with one record."""
    while data := await messages.receive():
        await messages.send(pickle.dumps(pickle.loads(data)[-1]))


async def _answer(messages: Messages) -> None:
    """Answer each request with 10 KiB."""
    while await messages.receive():
        await messages.send(_ANSWER)


class _Chat:
    """Sends each message of a member to all members."""

    def __init__(self) -> None:
        self._members: list[Messages] = []

    async def join(self, member: Messages) -> None:
        """Serve one member."""
        self._members.append(member)
        await member.send(b"joined")
        try:
            while text := await member.receive():
                for each in list(self._members):
                    await each.send(text)
        finally:
            self._members.remove(member)


async def serve(_directory: Path, *, task_status: trio.TaskStatus[Ports]) -> None:
    """Serve until cancelled."""
    chat = _Chat()
    kinds: dict[bytes, Callable[[Messages], Awaitable[None]]] = {
        b"a": _sum_arrays,
        b"p": _load_pickles,
        b"r": _answer,
        b"c": chat.join,
    }

    async def handle(stream: trio.SocketStream) -> None:
        await kinds[await stream.receive_some(1)](Messages(stream))

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, handle, 0, host=HOST))
        task_status.started({"tcp": listener.socket.getsockname()[1]})


# --- the client ------------------------------------------------------------------------------


async def _connect(server: Server, letter: bytes) -> tuple[trio.SocketStream, Messages]:
    stream = await trio.open_tcp_stream(HOST, server.ports["tcp"])
    await stream.send_all(letter)
    return stream, Messages(stream)


async def arrays(server: Server, seconds: float) -> tuple[float, float]:
    """Arrays of 1 MiB, each made anew; the next is made while the server sums the last one."""
    stream, messages = await _connect(server, b"a")
    base = np.random.default_rng(7609).random(_ITEMS)

    async def some(seconds: float) -> int:
        end = time.perf_counter() + seconds
        sent = 0
        while time.perf_counter() < end:
            array = base * sent
            await messages.send(array.data.cast("B"))
            if sent and await messages.receive() is None:
                raise EOFError("the server closed")
            sent += 1
        if await messages.receive() is None:
            raise EOFError("the server closed")
        return sent * _MIB

    async with stream:
        return await move(server, partial(some, WARM_UP), partial(some, seconds))


def _records(size: int) -> list[dict[str, Any]]:
    """Records of about ``size`` bytes together when pickled."""
    drawn = random.Random(size)
    return [
        {"id": n, "name": f"record {n}", "value": drawn.random(), "data": drawn.randbytes(400)}
        for n in range(max(1, size // 460))
    ]


async def pickles(server: Server, seconds: float) -> tuple[float, float]:
    """Pickles of 1 to 100 KiB, each answered by one of a record."""
    stream, messages = await _connect(server, b"p")
    objects = cycle([_records(size * 1024) for size in (1, 3, 10, 30, 100)])

    async def request() -> None:
        await messages.send(pickle.dumps(next(objects)))
        pickle.loads(await messages.receive() or b"")

    async with stream:
        return await request_in_turn(server, seconds, request)


async def requests(server: Server, seconds: float) -> tuple[float, float]:
    """Requests with answers of 10 KiB."""
    stream, messages = await _connect(server, b"r")

    async def request() -> None:
        await messages.send(_REQUEST)
        if await messages.receive() != _ANSWER:
            raise RuntimeError("a wrong answer")

    async with stream:
        return await request_in_turn(server, seconds, request)


async def chat(server: Server, seconds: float) -> tuple[float, float]:
    """Clients of a chat: each writes its next line when it has read its last one."""
    members = [await _connect(server, b"c") for _ in range(_CLIENTS)]
    for _, member in members:
        await member.receive()

    async def some(end: float) -> int:
        written = 0

        async def read(member: Messages, count: int) -> None:
            for _ in range(count):
                if await member.receive() is None:
                    raise EOFError("the server closed")

        async def talk(number: int) -> None:
            nonlocal written
            member, line, got = members[number][1], b"%d: %s" % (number, _TEXT), 0
            while time.perf_counter() < end:
                written += 1
                await member.send(line)
                seen: bytes | None = None
                while seen != line:
                    seen = await member.receive()
                    got += 1
            finished.append((member, got))

        finished: list[tuple[Messages, int]] = []
        async with trio.open_nursery() as nursery:
            for number in range(_CLIENTS):
                nursery.start_soon(talk, number)
        async with trio.open_nursery() as nursery:
            for member, got in finished:
                nursery.start_soon(read, member, written - got)
        return written * _CLIENTS

    result = await rate(server, seconds, some)
    for stream, _ in members:
        await stream.aclose()
    return result


WORKLOADS: dict[str, Any] = {
    "arrays": arrays,
    "pickles": pickles,
    "answers": requests,
    "chat": chat,
}

if __name__ == "__main__":
    main(serve, WORKLOADS)
