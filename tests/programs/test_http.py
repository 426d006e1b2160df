"""hypercorn with a quart-trio application, httpx and httpcore as clients: all of it over SMC-R."""

from __future__ import annotations

import gc
import hashlib
import math
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpcore
import httpx
import hypercorn.config
import pytest
import quart
import quart_trio
import trio
import trustme

import trio_smc
from examples.web import over_tls, serve_app
from tests.timing import PATIENCE
from trio_smc.adapters.httpcore import SmcBackend, SmcNetworkStream
from trio_smc.adapters.httpx import SmcTransport

HOST = "localhost"
BIG = 1_000_000

app = quart_trio.QuartTrio(__name__)


@app.post("/digest")
async def digest() -> dict[str, str]:
    body = await quart.request.get_data(as_text=False)
    assert isinstance(body, bytes)
    return {"sha256": hashlib.sha256(body).hexdigest()}


@app.get("/bytes/<int:size>")
async def some_bytes(size: int) -> quart.Response:
    async def pieces() -> AsyncIterator[bytes]:
        left = size
        while left:
            piece = min(left, 30_000)
            left -= piece
            yield bytes(piece)

    return quart.Response(pieces())


@app.get("/never")
async def never() -> str:
    await trio.sleep(math.inf)
    return ""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)
    return context


@pytest.fixture
def client_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    """Collect hypercorn's and httpcore's connections, which are in cycles: they warn here."""
    yield
    gc.collect()


@dataclass
class Site:
    """A running server, and the modes of the accepted connections."""

    url: str
    port: int
    modes: Counter[str] = field(default_factory=Counter)


class Counting(trio.abc.Listener[trio_smc.SmcStream]):
    """A listener that records the modes of its streams."""

    def __init__(self, listener: trio_smc.SmcListener, modes: Counter[str]) -> None:
        self.listener = listener
        self.modes = modes

    async def accept(self) -> trio_smc.SmcStream:
        stream = await self.listener.accept()
        self.modes[stream.mode] += 1
        return stream

    async def aclose(self) -> None:
        await self.listener.aclose()


@asynccontextmanager
async def site(context: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[Site]:
    """Serve the application, with TLS if there is a context for it."""
    config = hypercorn.config.Config()
    for name, value in settings.items():
        setattr(config, name, value)
    listeners = await trio_smc.open_listeners(0, host=HOST)
    port = listeners[0].socket.getsockname()[1]
    # "localhost" has one address or two; the client uses the first one that answers.
    stop = trio.Event()
    running = Site(f"http{'s' if context else ''}://{HOST}:{port}", port)
    counting: Any = [Counting(listener, running.modes) for listener in listeners]
    try:
        async with trio.open_nursery() as nursery:
            below = over_tls(counting, context) if context else counting
            await nursery.start(serve_app, app, below, stop.wait, config)
            yield running
            stop.set()
    finally:
        for listener in listeners:
            await listener.aclose()
    assert set(running.modes) == {trio_smc.Mode.SMC_R}


def stream_of(response: httpx.Response) -> trio_smc.SmcStream:
    stream = response.extensions["network_stream"].get_extra_info("smc_stream")
    assert isinstance(stream, trio_smc.SmcStream)
    return stream


async def use(client: httpx.AsyncClient, url: str, body: bytes) -> httpx.Response:
    """Upload and download large bodies; return the last response."""
    answer = await client.post(f"{url}/digest", content=body)
    assert answer.json() == {"sha256": hashlib.sha256(body).hexdigest()}
    answer = await client.get(f"{url}/bytes/{BIG}")
    assert answer.content == bytes(BIG)
    assert stream_of(answer).mode is trio_smc.Mode.SMC_R
    return answer


async def test_http1(rng: random.Random) -> None:
    async with site() as server, httpx.AsyncClient(transport=SmcTransport()) as client:
        for _ in range(3):
            answer = await use(client, server.url, rng.randbytes(BIG))
            assert answer.http_version == "HTTP/1.1"
        # The connection is kept alive: one carried all requests.
        assert server.modes == {trio_smc.Mode.SMC_R: 1}


async def test_http1_over_tls(
    rng: random.Random, server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    transport = SmcTransport(ssl_context=client_context)
    async with site(server_context) as server, httpx.AsyncClient(transport=transport) as client:
        answer = await use(client, server.url, rng.randbytes(BIG))
        assert answer.http_version == "HTTP/1.1"


async def test_http2_over_tls(
    rng: random.Random, server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """Twenty requests share one connection, their bodies interleaved."""
    transport = SmcTransport(ssl_context=client_context, http2=True)
    async with site(server_context) as server, httpx.AsyncClient(transport=transport) as client:
        answer = await use(client, server.url, rng.randbytes(BIG))
        assert answer.http_version == "HTTP/2"
        async with trio.open_nursery() as nursery:
            for size in range(20):
                nursery.start_soon(use, client, server.url, rng.randbytes(size * 5000))
        assert server.modes == {trio_smc.Mode.SMC_R: 1}


async def test_many_connections(rng: random.Random) -> None:
    limits = httpx.Limits(max_connections=20, max_keepalive_connections=20)
    transport = SmcTransport(limits=limits)
    async with site() as server, httpx.AsyncClient(transport=transport) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(use, client, server.url, rng.randbytes(100_000))
        assert 1 < server.modes[trio_smc.Mode.SMC_R] <= 20


async def test_an_idle_connection_that_the_server_closed_is_not_used_again() -> None:
    """The pool checks if an idle connection is readable, which its TCP socket does not show."""
    modes: Counter[str] = Counter()

    async def answer_once(stream: trio_smc.SmcStream) -> None:
        modes[stream.mode] += 1
        request = bytearray()
        while not request.endswith(b"\r\n\r\n"):
            request += await stream.receive_some()
        # The response does not announce the close.
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with trio.open_nursery() as nursery:
        serve = partial(trio_smc.serve, answer_once, 0, host="127.0.0.1")
        listeners: list[trio_smc.SmcListener] = await nursery.start(serve)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/"
        async with httpx.AsyncClient(transport=SmcTransport()) as client:
            for number in range(1, 4):
                answer = await client.get(url)
                assert answer.content == b"ok"
                assert modes == {trio_smc.Mode.SMC_R: number}
                with trio.fail_after(PATIENCE):
                    while not stream_of(answer).is_readable():
                        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_timeout_and_the_next_request() -> None:
    async with site() as server, httpx.AsyncClient(transport=SmcTransport()) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get(f"{server.url}/never", timeout=httpx.Timeout(30, read=0.05))
        answer = await client.get(f"{server.url}/bytes/10")
        assert answer.content == bytes(10)


async def test_a_response_that_is_not_read_to_its_end() -> None:
    async with site() as server, httpx.AsyncClient(transport=SmcTransport()) as client:
        async with client.stream("GET", f"{server.url}/bytes/{50 * BIG}") as answer:
            assert answer.status_code == 200
            given_up = stream_of(answer)
        with pytest.raises(trio.ClosedResourceError):
            await given_up.receive_some()
        answer = await client.get(f"{server.url}/bytes/10")
        assert answer.content == bytes(10)


async def test_connection_refused() -> None:
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    async with httpx.AsyncClient(transport=SmcTransport()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/")


async def test_an_unknown_certificate(server_context: ssl.SSLContext) -> None:
    transport = SmcTransport(ssl_context=ssl.create_default_context())
    async with site(server_context) as server, httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{server.url}/bytes/10")


async def test_a_server_without_smc_is_served_over_tcp() -> None:
    """The same client works with a plain TCP server, and has the reason for TCP."""
    config = hypercorn.config.Config()
    stop = trio.Event()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_app, app, listeners, stop.wait, config)
        async with httpx.AsyncClient(transport=SmcTransport()) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/bytes/10")
            stream = stream_of(answer)
            assert stream.mode is trio_smc.Mode.TCP
            assert stream.fallback is not None
            assert stream.fallback.reason is trio_smc.FallbackReason.PEER_NOT_CAPABLE
        stop.set()
    for listener in listeners:
        await listener.aclose()


async def test_httpcore_by_itself(
    server_context: ssl.SSLContext, client_context: ssl.SSLContext
) -> None:
    """The requirements of httpcore's own tests for a network stream."""
    async with (
        site(server_context) as server,
        httpcore.AsyncConnectionPool(
            ssl_context=client_context, network_backend=SmcBackend()
        ) as pool,
        pool.stream("GET", f"{server.url}/bytes/{BIG}") as response,
    ):
        assert response.status == 200
        stream = response.extensions["network_stream"]
        assert isinstance(stream, SmcNetworkStream)
        assert stream.transport.mode is trio_smc.Mode.SMC_R
        assert stream.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert stream.get_extra_info("server_addr")[1] == server.port
        assert stream.get_extra_info("client_addr")[1] != server.port
        assert stream.get_extra_info("socket") is stream.transport.socket
        assert stream.get_extra_info("is_readable") in (True, False)
        assert stream.get_extra_info("unknown") is None
        content = b"".join([piece async for piece in response.aiter_stream()])
        assert content == bytes(BIG)


async def test_httpcore_socket_options() -> None:
    """Socket options go to the stream: over SMC-R the TCP connection carries no data."""
    async with site() as server:
        stream = await SmcBackend().connect_tcp(
            HOST,
            server.port,
            timeout=30,
            socket_options=[
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 7)),
            ],
        )
        smc = stream.transport
        assert smc.mode is trio_smc.Mode.SMC_R
        assert smc.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        linger = smc.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
        assert linger == struct.pack("ii", 1, 7)
        await stream.aclose()


async def test_httpcore_socket_options_that_are_refused() -> None:
    """The connection ends with the attempt: an open one would warn when it is collected."""
    async with site() as server:
        with pytest.raises(httpcore.ConnectError):
            await SmcBackend().connect_tcp(
                HOST, server.port, socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, b"")]
            )


async def test_httpcore_unix_sockets_are_refused() -> None:
    with pytest.raises(httpcore.UnsupportedProtocol):
        await SmcBackend().connect_unix_socket("/nowhere")
