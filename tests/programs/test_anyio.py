"""AnyIO programs over SMC-R by `trio_smc.adapters.anyio`: its streams keep AnyIO's contract."""

from __future__ import annotations

import errno
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import trio
import trio.testing
import trustme
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextStream
from anyio.streams.tls import TLSAttribute, TLSListener, TLSStream

import trio_smc
from tests.streams.stream_pairs import cancel_when_blocked
from tests.timing import PATIENCE
from trio_smc.adapters.anyio import SmcByteListener, SmcByteStream, open_listener, open_stream

HOST = "localhost"
BIG = 4 * 2**20


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[SmcByteStream, SmcByteStream]]:
    """Two connected streams, both over SMC-R."""
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    async with listener:
        client = await open_stream(*listener.socket.getsockname())
        server = SmcByteStream(await listener.accept())
    assert client.stream.mode is server.stream.mode is trio_smc.Mode.SMC_R
    async with client, server:
        yield client, server


async def test_send_and_receive() -> None:
    async with pair() as (client, server):
        await client.send(b"hello")
        assert await server.receive(3) == b"hel"
        assert await server.receive() == b"lo"
        with pytest.raises(ValueError, match="max_bytes"):
            await server.receive(0)


async def test_end_of_stream_leaves_the_other_way_open() -> None:
    async with pair() as (client, server):
        await client.send(b"question")
        await client.send_eof()
        await client.send_eof()
        assert [piece async for piece in server] == [b"question"]
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
        await server.send(b"answer")
        assert await client.receive() == b"answer"


async def test_many_bytes_both_ways_at_once() -> None:
    data = bytes(range(256)) * (BIG // 256)

    async def receive(stream: SmcByteStream) -> None:
        assert await BufferedByteReceiveStream(stream).receive_exactly(BIG) == data

    async with pair() as streams, anyio.create_task_group() as group:
        for stream in streams:
            group.start_soon(receive, stream)
            group.start_soon(stream.send, data)


async def test_own_close_is_a_closed_resource() -> None:
    async with pair() as (client, _):
        await client.aclose()
        await client.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await client.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await client.send(b"x")
        with pytest.raises(anyio.ClosedResourceError):
            await client.send_eof()


async def test_own_close_wakes_a_reader() -> None:
    async with pair() as (client, _), anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await client.receive()

        group.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await client.aclose()


async def test_a_peer_that_is_gone_is_a_broken_resource() -> None:
    async with pair() as (client, server):
        server.stream.abort()
        with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(PATIENCE):
            await client.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await client.send(b"x")


async def test_two_readers_are_a_busy_resource() -> None:
    async with pair() as (client, _), anyio.create_task_group() as group:
        group.start_soon(client.receive)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError, match="reading from"):
            await client.receive()
        group.cancel_scope.cancel()


async def test_a_cancelled_send_does_not_close() -> None:
    async with pair() as (client, server):
        assert await cancel_when_blocked(lambda: client.send(bytes(64 * 2**20)))
        assert await server.receive()
        await server.send(b"still there")
        assert await client.receive() == b"still there"
        client.stream.abort()


async def test_attributes() -> None:
    async with pair() as (client, server):
        address = client.extra(SocketAttribute.remote_address)
        assert address == ("127.0.0.1", client.extra(SocketAttribute.remote_port))
        assert server.extra(SocketAttribute.local_address) == address
        assert server.extra(SocketAttribute.remote_port) == client.extra(SocketAttribute.local_port)
        assert client.extra(SocketAttribute.family).name == "AF_INET"
        with pytest.raises(anyio.TypedAttributeLookupError):
            client.extra(SocketAttribute.raw_socket)


async def shout(stream: SmcByteStream | TLSStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send(data.upper())


async def test_listener() -> None:
    """All addresses of a name behind one listener; handlers in the caller's task group."""
    async with anyio.create_task_group() as group:
        listener = await open_listener(0, host=HOST)
        assert all(isinstance(one, SmcByteListener) for one in listener.listeners)
        port = listener.extra(SocketAttribute.local_port)
        group.start_soon(listener.serve, shout, group)
        async with anyio.create_task_group() as clients:
            for _ in range(5):
                clients.start_soon(client_of_shout, port)
        group.cancel_scope.cancel()
    await listener.aclose()


async def client_of_shout(port: int) -> None:
    async with await open_stream(HOST, port) as stream:
        assert stream.stream.mode is trio_smc.Mode.SMC_R
        await TextStream(stream).send("hello")
        await stream.send_eof()
        assert b"".join([data async for data in stream]) == b"HELLO"


async def test_closing_a_listener_ends_serve() -> None:
    (below,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    listener = SmcByteListener(below)
    async with anyio.create_task_group() as group:

        async def serve() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await listener.serve(shout, group)

        group.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()


async def test_a_listener_outlives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    (below,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    real = below.accept
    lacking = [errno.EMFILE, errno.ENOBUFS]

    async def accept() -> trio_smc.SmcStream:
        if lacking:
            raise OSError(lacking.pop(), "lacking")
        return await real()

    monkeypatch.setattr(below, "accept", accept)
    async with SmcByteListener(below) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, shout)
        await client_of_shout_at(*below.socket.getsockname())
        assert not lacking
        group.cancel_scope.cancel()


async def client_of_shout_at(host: str, port: int) -> None:
    async with await open_stream(host, port) as stream:
        await stream.send(b"hello")
        assert await stream.receive() == b"HELLO"


async def test_another_error_of_accept_ends_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    (below,) = await trio_smc.open_listeners(0, host="127.0.0.1")

    async def accept() -> trio_smc.SmcStream:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EBADF, "the listening socket failed")

    monkeypatch.setattr(below, "accept", accept)
    async with SmcByteListener(below) as listener, anyio.create_task_group() as group:
        with pytest.raises(OSError, match="failed"):
            await listener.serve(shout, group)


async def test_tls() -> None:
    """AnyIO's TLS on listener and stream, closed by close_notify."""
    authority = trustme.CA()
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(server_context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    listener = await open_listener(0, host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with anyio.create_task_group() as group:
        group.start_soon(TLSListener(listener, server_context).serve, shout, group)
        transport = await open_stream("127.0.0.1", port)
        assert transport.stream.mode is trio_smc.Mode.SMC_R
        stream = await TLSStream.wrap(transport, hostname=HOST, ssl_context=client_context)
        async with stream:
            await stream.send(b"hello")
            assert await stream.receive() == b"HELLO"
            assert stream.extra(TLSAttribute.tls_version) == "TLSv1.3"
            assert stream.extra(SocketAttribute.remote_port) == port
        group.cancel_scope.cancel()
    await listener.aclose()


async def test_connection_refused() -> None:
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    host, port = listener.socket.getsockname()
    await listener.aclose()
    with pytest.raises(OSError, match=r"[Rr]efused"):
        await open_stream(host, port)
