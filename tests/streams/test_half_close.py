"""The peer half-closes and closes while this side waits to send: the wait ends at once.

The critical waits are those that must end without a change of the connection's state (RFC 7609,
4.8.1, 4A).  `test_waits_end` covers every state and event; these tests use the calls of real
programs.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
import trustme

import trio_smc
from tests.peers import active_links, connect_sockets
from tests.streams.stream_pairs import HOST, SMALL_RING, smc_config
from tests.timing import PATIENCE
from trio_smc import Config, Mode
from trio_smc.rnic.soft.device import SoftRnic

# Seconds; much longer than every test.  A wait without a wakeup would end only after this time.
CLOSE_TIMEOUT = 600
MUCH = 10 * SMALL_RING
ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)

Send = Callable[[Any], Awaitable[object]]
Close = Callable[[Any], Awaitable[object]]


async def _when_it_might_not_block(stream: Any) -> None:
    while True:
        await stream.wait_send_all_might_not_block()
        await stream.send_all(bytes(1000))


async def _in_pieces(stream: Any) -> None:
    while True:
        await stream.send_some(memoryview(bytes(1000)))


async def _one_after_the_other(stream: Any) -> None:
    while True:
        await stream.send_urgent(b"!")


SENDS: dict[str, Send] = {
    "bytes": lambda stream: stream.send_all(bytes(MUCH)),
    "buffer": lambda stream: stream.send_all(bytearray(MUCH)),
    "urgent": lambda stream: stream.send_urgent(bytes(MUCH)),
    "behind urgent": _one_after_the_other,
    "pieces": _in_pieces,
    "might not block": _when_it_might_not_block,
}


async def _cancelled(stream: Any) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await stream.receive_some()
        finally:
            await stream.aclose()


async def _forceful(stream: Any) -> None:
    with trio.move_on_after(0):
        await trio.aclose_forcefully(stream)


async def _read_shut(stream: Any) -> None:
    stream.shut_down_reading()
    stream.close()


CLOSES: dict[str, Close] = {
    "aclose": lambda stream: stream.aclose(),
    "cancelled": _cancelled,
    "forceful": _forceful,
    "read shut": _read_shut,
}


def _config(**changes: object) -> Config:
    return smc_config(close_timeout=CLOSE_TIMEOUT, **changes)


@asynccontextmanager
async def serving(
    handler: Callable[[Any], Awaitable[object]], server: Config, client: Config
) -> AsyncIterator[Any]:
    """Serve with one stack, connect from another one, and return the client's stream."""
    async with (
        trio_smc.open_stack(server) as serving_stack,
        trio_smc.open_stack(client) as stack,
        trio.open_nursery() as nursery,
    ):
        start = partial(serving_stack.serve, host=HOST)
        (listener,) = await nursery.start(start, handler, 0)
        stream = await stack.open_stream(HOST, listener.socket.getsockname()[1])
        assert stream.mode is Mode.SMC_R
        yield stream
        nursery.cancel_scope.cancel()


@pytest.mark.rfc("4.8.1/7")
@pytest.mark.parametrize("checkpoints", ["strict", "amortised"])
@pytest.mark.parametrize("close", CLOSES)
@pytest.mark.parametrize("send", SENDS)
async def test_the_peer_half_closes_reads_once_and_closes(
    send: str, close: str, checkpoints: str
) -> None:
    ended = trio.Event()

    async def handler(stream: Any) -> None:
        async for _ in stream:
            pass
        with pytest.raises(ENDED):
            await SENDS[send](stream)
        ended.set()

    config = _config(checkpoints=checkpoints)
    with trio.fail_after(PATIENCE):
        async with serving(handler, config, config) as stream:
            await stream.send_all(b"x")
            await stream.send_eof()
            await (stream.wait_urgent() if "urgent" in send else stream.receive_some())
            await CLOSES[close](stream)
            await ended.wait()


@pytest.mark.parametrize("send", SENDS)
async def test_the_window_is_closed_before_the_peer_half_closes(send: str) -> None:
    """The server fills the window and waits; then the client half-closes and closes."""
    ended, blocked = trio.Event(), trio.Event()

    async def handler(stream: Any) -> None:
        await stream.send_all(bytes(SMALL_RING))
        blocked.set()
        with pytest.raises(ENDED):
            await SENDS[send](stream)
        ended.set()

    with trio.fail_after(PATIENCE):
        async with serving(handler, _config(), _config()) as stream:
            await blocked.wait()
            await trio.testing.wait_all_tasks_blocked()
            await stream.send_eof()
            await trio.testing.wait_all_tasks_blocked(0.01)
            while stream.is_readable():
                await stream.receive_some(SMALL_RING)
                if stream.statistics().bytes_received >= 2 * SMALL_RING:
                    break
            await stream.aclose()
            await ended.wait()


@pytest.mark.parametrize("reading", ["wait_urgent", "receive_urgent", "receive_some"])
async def test_no_wait_outlasts_the_end_of_both_directions(reading: str) -> None:
    """Another task calls shutdown(SHUT_RDWR), and the peer never answers."""

    async def handler(stream: Any) -> None:
        await trio.sleep_forever()

    with trio.fail_after(PATIENCE):
        async with serving(handler, _config(), _config()) as stream:
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    if reading == "receive_some":
                        assert await stream.receive_some() == b""
                    else:
                        with pytest.raises(trio.EndOfChannel):
                            await getattr(stream, reading)()

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                stream.shut_down_both()
                stream.shut_down_reading()
            await stream.aclose()


@pytest.mark.parametrize("send", ["bytes", "buffer", "urgent", "might not block"])
async def test_links_fail_while_a_sender_waits(send: str) -> None:
    """The connection moves to another link, which delivers the peer's end (4.6)."""
    rnics = [[SoftRnic(f"{side}{number}") for number in range(2)] for side in "sc"]
    ended = trio.Event()
    kept: list[Any] = []

    async def handler(stream: Any) -> None:
        kept.append(stream)
        async for _ in stream:
            pass
        with pytest.raises(ENDED):
            await SENDS[send](stream)
        ended.set()

    configs = [_config(rnics=tuple(own)) for own in rnics]
    with trio.fail_after(PATIENCE):
        async with serving(handler, *configs) as stream:
            while active_links(stream.link_group) < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await stream.send_all(b"x")
            await stream.send_eof()
            await (stream.wait_urgent() if send == "urgent" else stream.receive_some())
            used = kept[0].link_group.links[0].rnic
            used.fail()
            await _cancelled(stream)
            await ended.wait()


async def test_a_link_group_that_ends_leaves_no_task_waiting() -> None:
    """All RNICs fail, so calls that wait to send, to receive or for urgent data end (4.8.3).

    As over TCP, one of two calls reports the error, and the other reader finds the end.
    """
    rnic = SoftRnic("only")
    ended: dict[str, object] = {}
    all_ended = trio.Event()

    async def call(name: str, wait: Callable[[], Awaitable[object]]) -> None:
        try:
            ended[name] = await wait()
        except trio.BrokenResourceError:
            ended[name] = trio.BrokenResourceError

    async def handler(stream: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "send", lambda: stream.send_all(bytes(MUCH)))
            nursery.start_soon(call, "receive", stream.receive_some)
            nursery.start_soon(call, "urgent", stream.wait_urgent)
        all_ended.set()

    with trio.fail_after(PATIENCE):
        async with serving(handler, _config(rnics=(rnic,)), _config()) as stream:
            await trio.testing.wait_all_tasks_blocked()
            rnic.fail()
            await all_ended.wait()
            assert ended["send"] is ended["urgent"] is trio.BrokenResourceError
            assert ended["receive"] in (b"", trio.BrokenResourceError)
            await trio.aclose_forcefully(stream)


@pytest.fixture
def enabled() -> Iterator[None]:
    trio_smc.enable(_config())
    try:
        yield
    finally:
        trio_smc.disable()


async def _enabled_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    client, server = await connect_sockets()
    smc: Any = server.socket
    assert smc.stream.mode is Mode.SMC_R
    return client, server


async def _send_on_socket(stream: trio.SocketStream) -> None:
    while True:
        await stream.socket.send(bytes(1000))


async def _wait_until_writable(stream: trio.SocketStream) -> None:
    sock: Any = stream.socket
    while True:
        await sock.wait_writable()
        await sock.send(bytes(1000))


@pytest.mark.parametrize(
    "send", [lambda stream: stream.send_all(bytes(MUCH)), _send_on_socket, _wait_until_writable]
)
def test_sockets_of_an_enabled_program_notice_the_end(enabled: None, send: Send) -> None:
    async def serve(server: trio.SocketStream) -> None:
        async for _ in server:
            pass
        with pytest.raises((trio.BrokenResourceError, ConnectionError)):
            await send(server)

    async def main() -> None:
        client, server = await _enabled_pair()
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, server)
                await client.send_all(b"x")
                await client.send_eof()
                await client.receive_some(10)
                await _cancelled(client)
        await trio.aclose_forcefully(server)

    trio.run(main)


async def test_a_tls_stream_notices_the_end() -> None:
    authority = trustme.CA()
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server_context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    ended = trio.Event()

    async def handler(transport: Any) -> None:
        stream = trio.SSLStream(transport, server_context, server_side=True, https_compatible=True)
        async for _ in stream:
            pass
        with pytest.raises(ENDED):
            await stream.send_all(bytes(MUCH))
        ended.set()

    with trio.fail_after(PATIENCE):
        async with serving(handler, _config(), _config()) as transport:
            stream = trio.SSLStream(
                transport, client_context, server_hostname="localhost", https_compatible=True
            )
            await stream.send_all(b"x")
            await transport.send_eof()
            await stream.receive_some()
            await _cancelled(stream)
            await ended.wait()
