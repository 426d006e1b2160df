"""trio-websocket on both ends, on listeners and streams of trio_smc.

Its own test suite runs over SMC-R too: tests/programs/test_suites.py.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trustme
from trio_websocket import (
    ConnectionClosed,
    Endpoint,
    WebSocketConnection,
    WebSocketRequest,
    WebSocketServer,
    wrap_client_stream,
)

import trio_smc

HOST = "localhost"
MESSAGE_SIZE = 2**20


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=["ws", "wss"])
def contexts(
    authority: trustme.CA, request: pytest.FixtureRequest
) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """TLS settings for server and client, or None."""
    if request.param == "ws":
        return None
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


Contexts = tuple[ssl.SSLContext, ssl.SSLContext] | None


async def echo(request: WebSocketRequest) -> None:
    connection = await request.accept()
    try:
        while True:
            await connection.send_message(await connection.get_message())
    except ConnectionClosed:
        pass


@asynccontextmanager
async def serving(contexts: Contexts) -> AsyncIterator[tuple[WebSocketServer, int]]:
    """A server, and its port."""
    async with trio_smc.open_stack(trio_smc.Config(require_smc=True)):
        listeners = await trio_smc.open_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        below: Any = [
            trio.SSLListener(listener, contexts[0], https_compatible=True) if contexts else listener
            for listener in listeners
        ]
        async with trio.open_nursery() as nursery:
            server = WebSocketServer(echo, below)
            await nursery.start(server.run)
            yield server, port
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(port: int, contexts: Contexts) -> AsyncIterator[WebSocketConnection]:
    """A client of that server."""
    smc = await trio_smc.open_stream("127.0.0.1", port)
    assert smc.mode is trio_smc.Mode.SMC_R
    stream: Any = smc
    if contexts:
        stream = trio.SSLStream(smc, contexts[1], server_hostname=HOST, https_compatible=True)
    async with (
        trio.open_nursery() as nursery,
        await wrap_client_stream(nursery, stream, HOST, "/chat") as connection,
    ):
        yield connection


async def test_messages_both_ways(contexts: Contexts, rng: random.Random) -> None:
    """The server requires SMC-R, so both ends have it."""
    async with serving(contexts) as (_, port), connected(port, contexts) as connection:
        for size in (0, 1, 125, 126, 65535, 65536, MESSAGE_SIZE):
            message = rng.randbytes(size)
            await connection.send_message(message)
            assert await connection.get_message() == message
        await connection.send_message("text")
        assert await connection.get_message() == "text"
        await connection.ping()


async def test_it_knows_the_addresses(contexts: Contexts) -> None:
    """Names and ports come from `.socket`, under TLS too."""
    async with serving(contexts) as (server, port):
        assert server.port == port
        here = str(Endpoint("127.0.0.1", port, bool(contexts)))
        assert [str(endpoint) for endpoint in server.listeners] == [here]
        async with connected(port, contexts) as connection:
            assert str(connection.remote) == here
            assert isinstance(connection.local, Endpoint)


async def test_many_clients_at_once(contexts: Contexts, rng: random.Random) -> None:
    async def talk(port: int, messages: list[bytes]) -> None:
        async with connected(port, contexts) as connection:
            for message in messages:
                await connection.send_message(message)
                assert await connection.get_message() == message

    async with serving(contexts) as (_, port), trio.open_nursery() as nursery:
        for _ in range(20):
            messages = [rng.randbytes(rng.randrange(10_000)) for _ in range(20)]
            nursery.start_soon(talk, port, messages)


async def test_the_closing_handshake(contexts: Contexts) -> None:
    async with serving(contexts) as (_, port), connected(port, contexts) as connection:
        await connection.aclose(1000, "done")
        assert connection.closed is not None
        assert (connection.closed.code, connection.closed.reason) == (1000, "done")
        with pytest.raises(ConnectionClosed):
            await connection.get_message()
