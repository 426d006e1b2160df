"""Bytes that a program writes to the descriptor of a socket, past trio_smc, are never lost in
silence: the reader gets an error, and no end of the stream (docs/programs.md)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE

CONFIG = trio_smc.Config(require_smc=True)
HEADER = b"header"
BODY = b"body of the answer"


async def _write(number: int) -> None:
    os.write(number, BODY)


async def _sendfile(number: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(BODY)
        file.flush()
        os.sendfile(number, file.fileno(), 0, len(BODY))


async def _child(number: int) -> None:
    await trio.run_process(["echo", BODY.decode()], stdin=subprocess.DEVNULL, stdout=number)


WAYS = {way.__name__.strip("_"): way for way in (_write, _sendfile, _child)}


async def _end(sock: Any) -> None:
    sock.close()


async def _shut(sock: Any) -> None:
    sock.shutdown(trio.socket.SHUT_WR)


async def _leave(sock: Any) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.SocketStream(sock).aclose()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("end", [_end, _shut, _leave], ids=lambda end: end.__name__.strip("_"))
@pytest.mark.parametrize("lasts", [0, 0.1], ids=["young", "old"])
@pytest.mark.parametrize("way", WAYS)
def test_the_reader_gets_an_error(way: str, lasts: float, end: Callable[[Any], Any]) -> None:
    async def answer(listener: trio.SocketListener) -> None:
        async with listener, await listener.accept() as stream:
            await stream.receive_some(1)
            await trio.sleep(lasts)
            await stream.send_all(HEADER)
            await WAYS[way](stream.socket.fileno())
            await end(stream.socket)
            await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(answer, listener)
            async with await trio.open_tcp_stream(*listener.socket.getsockname()) as client:
                await client.send_all(b"?")
                with pytest.raises(trio.BrokenResourceError) as caught:
                    await _read_to_the_end(client)
                assert isinstance(caught.value.__cause__, ConnectionResetError)
            nursery.cancel_scope.cancel()

    trio.run(main)


async def _read_to_the_end(stream: trio.abc.ReceiveStream) -> None:
    with trio.fail_after(PATIENCE):
        while data := await stream.receive_some():
            assert HEADER.startswith(data)


def test_a_stream_of_the_api_does_the_same() -> None:
    async def handler(stream: trio_smc.SmcStream) -> None:
        async with stream:
            await stream.receive_some(1)
            await stream.send_all(HEADER)
            os.write(stream.socket.fileno(), BODY)

    async def main() -> None:
        async with trio_smc.open_stack(CONFIG), trio.open_nursery() as nursery:
            [listener] = await nursery.start(
                lambda **kw: trio_smc.serve(handler, 0, host="127.0.0.1", **kw)
            )
            address = listener.socket.getsockname()
            async with await trio_smc.open_stream(*address) as client:
                assert client.mode == "smc-r"
                await client.send_all(b"?")
                with pytest.raises(trio.BrokenResourceError):
                    await _read_to_the_end(client)
            nursery.cancel_scope.cancel()

    trio.run(main)
