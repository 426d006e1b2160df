"""Trio's TLS over SMC-R: the stream contract, large transfers in both directions, and endings."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
import trustme

import trio_smc
from tests.timing import PATIENCE

HOST = "localhost"
SmcTls = trio.SSLStream[trio_smc.SmcStream]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)
    return context


@pytest.fixture(params=["TLSv1.2", "TLSv1.3"])
def client_context(authority: trustme.CA, request: pytest.FixtureRequest) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if request.param == "TLSv1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@asynccontextmanager
async def tls_pair(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> AsyncIterator[tuple[SmcTls, SmcTls]]:
    """A connected pair by SSLListener, both ends over SMC-R."""
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    async with trio.SSLListener(listener, server_context) as tls_listener:
        transport = await trio_smc.open_stream(*listener.socket.getsockname())
        client = trio.SSLStream(transport, client_context, server_hostname=HOST)
        server = await tls_listener.accept()
    assert client.transport_stream.mode is trio_smc.Mode.SMC_R
    assert server.transport_stream.mode is trio_smc.Mode.SMC_R
    try:
        yield client, server
    finally:
        await trio.aclose_forcefully(client)
        await trio.aclose_forcefully(server)


@pytest.mark.rfc("5/4")
async def test_contract_of_a_two_way_stream(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    """`trio.testing.check_two_way_stream`, as Trio runs it over its own SSLStream."""

    async def maker() -> tuple[SmcTls, SmcTls]:
        (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
        async with trio.SSLListener(listener, server_context, https_compatible=True) as accepting:
            transport = await trio_smc.open_stream(*listener.socket.getsockname())
            assert transport.mode is trio_smc.Mode.SMC_R
            client = trio.SSLStream(
                transport, client_context, server_hostname=HOST, https_compatible=True
            )
            server = await accepting.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.do_handshake)
            nursery.start_soon(server.do_handshake)
        return client, server

    await trio.testing.check_two_way_stream(maker, None)


@pytest.mark.rfc("5/4")
async def test_many_bytes_both_ways_at_once(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    data = bytes(range(256)) * 16384

    async def send(stream: SmcTls) -> None:
        for start in range(0, len(data), 100_000):
            await stream.send_all(data[start : start + 100_000])

    async def receive(stream: SmcTls) -> None:
        have = bytearray()
        while len(have) < len(data):
            have += await stream.receive_some()
        assert have == data

    async with tls_pair(client_context, server_context) as pair:
        async with trio.open_nursery() as nursery:
            for stream in pair:
                nursery.start_soon(send, stream)
                nursery.start_soon(receive, stream)
        for stream in pair:
            assert stream.transport_stream.statistics().bytes_received > len(data)


async def test_orderly_end(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    """close_notify both ways, then the SMC-R connection closes in order."""
    async with tls_pair(client_context, server_context) as (client, server):

        async def serve() -> None:
            assert await server.receive_some() == b"last words"
            assert await server.receive_some() == b""
            await server.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await client.send_all(b"last words")
            await client.aclose()


async def test_truncation_is_noticed(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    """The transport ends in order but without close_notify: an attack, for TLS."""
    client_context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # set by Python before 3.11.4
    async with tls_pair(client_context, server_context) as (client, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.do_handshake)
            nursery.start_soon(server.do_handshake)
        await server.transport_stream.send_eof()
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()


async def test_transport_stream_goes_on_after_unwrap(
    client_context: ssl.SSLContext, server_context: ssl.SSLContext
) -> None:
    async with tls_pair(client_context, server_context) as (client, server):

        async def serve() -> None:
            assert await server.receive_some() == b"secret"
            assert await server.receive_some() == b""
            plain, trailing = await server.unwrap()
            assert isinstance(plain, trio_smc.SmcStream)
            have = bytearray(trailing)
            while len(have) < len(b"in the clear"):
                have += await plain.receive_some()
            assert have == b"in the clear"
            await plain.aclose()

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                await client.send_all(b"secret")
                plain, trailing = await client.unwrap()
                assert not trailing
                await plain.send_all(b"in the clear")
                assert await plain.receive_some() == b""
                await plain.aclose()
