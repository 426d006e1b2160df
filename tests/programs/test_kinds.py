"""The checks of other projects before they use a stream."""

from __future__ import annotations

import subprocess
import sys

import trio

import trio_smc
from tests.peers import open_pair
from tests.timing import PATIENCE


def passes_for(thing: object, kind: type) -> bool:
    """isinstance, for a class that type checkers know to be final."""
    return isinstance(thing, kind)


async def test_streams_and_listeners_pass_for_socket_streams() -> None:
    """trio-websocket and httpcore look for `.socket` only where isinstance says so."""
    async with open_pair("stack") as (client, server):
        assert passes_for(client, trio.SocketStream)
        assert client.socket.getpeername() == server.socket.getsockname()
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    async with listener:
        assert passes_for(listener, trio.SocketListener)
        tcp = await trio.open_tcp_stream(*listener.socket.getsockname())
        fallen_back = await listener.accept()
        async with tcp, fallen_back:
            assert fallen_back.mode is trio_smc.Mode.TCP
            assert passes_for(fallen_back, trio.SocketStream)


async def _until_readable(stream: trio_smc.SmcStream) -> None:
    with trio.fail_after(PATIENCE):
        while not stream.is_readable():
            await trio.lowlevel.checkpoint()


async def test_is_readable_over_smc_r() -> None:
    async with open_pair("stack") as (client, server):
        assert not client.is_readable()
        await server.send_all(b"data")
        await _until_readable(client)
        assert await client.receive_some() == b"data"
        assert not client.is_readable()
        await server.aclose()
        await _until_readable(client)
        assert await client.receive_some() == b""
        assert client.is_readable()
    assert client.is_readable()


async def test_is_readable_reports_a_reset() -> None:
    async with open_pair("stack") as (client, server):
        server.abort()
        await _until_readable(client)


async def test_is_readable_over_tcp() -> None:
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    async with listener, await trio.open_tcp_stream(*listener.socket.getsockname()) as tcp:
        stream = await listener.accept()
        assert stream.mode is trio_smc.Mode.TCP
        assert not stream.is_readable()
        await tcp.send_all(b"data")
        await _until_readable(stream)
        await stream.aclose()
        assert stream.is_readable()


def test_adapters_do_not_import_their_libraries() -> None:
    code = "import sys, trio_smc, trio_smc.adapters; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "trio_smc.adapters" in modules
    assert not modules & {"anyio", "httpcore", "httpx", "hypercorn", "trio_websocket"}
