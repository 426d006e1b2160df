"""The texts of exceptions are those of Trio, because programs compare them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.timing import PATIENCE


async def text_of(call: Callable[[], Awaitable[object]]) -> str:
    try:
        await call()
    except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
        return str(error)
    return "no error"


async def texts(*, smc: bool) -> dict[str, str]:
    """The texts of exceptions of streams, by what has gone wrong."""
    found = {}
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]

    async def pair() -> tuple[trio.SocketStream, trio.SocketStream]:
        here: list[trio.SocketStream] = []

        async def connect() -> None:
            here.append(await trio.open_tcp_stream("127.0.0.1", port))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect)
            there = await listener.accept()
        stream = getattr(here[0].socket, "stream", None)
        assert (stream is not None and stream.mode is trio_smc.Mode.SMC_R) == smc
        return here[0], there

    async def while_closed(call: Callable[[trio.SocketStream], Awaitable[object]]) -> str:
        a, b = await pair()
        text = ""

        async def wait() -> None:
            nonlocal text
            text = await text_of(lambda: call(a))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await a.aclose()
        await b.aclose()
        return text

    async with listener:
        found["receive while closed"] = await while_closed(lambda a: a.receive_some())
        found["socket while closed"] = await while_closed(lambda a: a.socket.recv(1))
        found["send while closed"] = await while_closed(lambda a: a.send_all(bytes(50_000_000)))
        a, b = await pair()
        await a.send_eof()
        found["send after the end"] = await text_of(lambda: a.send_all(b"x"))
        await a.aclose()
        await b.aclose()
        a, b = await pair()
        await a.aclose()
        found["send when closed"] = await text_of(lambda: a.send_all(b"x"))
        found["receive when closed"] = await text_of(a.receive_some)
        found["end when closed"] = await text_of(a.send_eof)
        await b.aclose()
        a, b = await pair()
        b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await b.aclose()
        found["receive after a reset"] = await text_of(a.receive_some)
        found["send after a reset"] = await text_of(lambda: a.send_all(b"x"))
        await a.aclose()
    return found


async def test_texts() -> None:
    with trio.fail_after(PATIENCE):
        expected = await texts(smc=False)
        trio_smc.enable(trio_smc.Config(require_smc=True))
        try:
            assert await texts(smc=True) == expected
        finally:
            trio_smc.disable()
    assert "no error" not in expected.values()
    assert len(set(expected.values())) == 5
