"""Which connections may use SMC-R: lists, the handshake limit, and short connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import trio

import trio_smc
from trio_smc import Config, Fallback, FallbackReason, Mode, SmcListener, SmcStream
from trio_smc.connecting import dial
from trio_smc.rendezvous.discovery import names
from trio_smc.rendezvous.discovery.tcp_option import TcpOption
from trio_smc.rnic.verbs import Rnic
from trio_smc.stack.policy import RETRY_AFTER, SHORT_AFTER, SHORT_SIZE, ShortConnections
from trio_smc.stack.runtime import Runtime

pytestmark = pytest.mark.learns_short
HOST = "127.0.0.1"
PEER = ("192.0.2.1", 80)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def listening(config: Config | None = None) -> AsyncIterator[SmcListener]:
    (listener,) = await trio_smc.open_listeners(0, host=HOST, config=config)
    async with listener:
        yield listener


async def connect(listener: SmcListener, config: Config | None = None) -> list[SmcStream]:
    """Open a connection. Returns the client's end and the server's."""
    ends: list[SmcStream] = []

    async def accept() -> None:
        ends.append(await listener.accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        client = await trio_smc.open_stream(HOST, listener.socket.getsockname()[1], config=config)
    return [client, *ends]


async def fallbacks(listener: SmcListener, config: Config | None = None) -> list[Fallback | None]:
    """Open a connection. Returns the fallback of each end, which is None for SMC-R."""
    ends = await connect(listener, config)
    for each in ends:
        each.abort()
    return [each.fallback for each in ends]


@pytest.mark.parametrize(
    ("lists", "permitted"),
    [
        ({}, True),
        ({"deny": ("192.0.2.0/24",)}, False),
        ({"deny": ("198.51.100.0/24",)}, True),
        ({"deny": (80,)}, False),
        ({"deny": (81,)}, True),
        ({"deny": (("192.0.2.1", 80),)}, False),
        ({"allow": ("192.0.2.0/24",)}, True),
        ({"allow": ("198.51.100.0/24",)}, False),
        ({"allow": (80,), "deny": ("192.0.2.1/32",)}, False),
        ({"allow": (81, 80)}, True),
    ],
)
def test_permits_follows_the_lists(
    lists: dict[str, tuple[str | int, ...]], permitted: bool
) -> None:
    assert replace(Config(), **lists).permits(PEER) is permitted  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [0, 65536, True, "nowhere", ("host",), ("host", 0), 1.5, None])
@pytest.mark.parametrize("name", ["allow", "deny"])
def test_bad_list_entries_are_refused(name: str, entry: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        Config(**{name: (entry,)})  # type: ignore[arg-type]


@pytest.mark.rfc("5/3")
async def test_a_client_that_is_not_permitted_uses_tcp() -> None:
    config = Config(deny=("127.0.0.0/8",))
    async with trio_smc.open_stack(), listening() as listener:
        client, server = await fallbacks(listener, config)
    assert client == Fallback.local(FallbackReason.NOT_PERMITTED)
    assert server is not None
    assert server.reason is FallbackReason.PEER_NOT_CAPABLE


@pytest.mark.rfc("5/3")
async def test_a_server_that_is_not_permitted_uses_tcp() -> None:
    config = Config(allow=("192.0.2.0/24",))
    async with trio_smc.open_stack(), listening(config) as listener:
        client, server = await fallbacks(listener)
    assert server == Fallback.local(FallbackReason.NOT_PERMITTED)
    assert client is not None
    assert (client.reason, client.origin) == (FallbackReason.NOT_PERMITTED, trio_smc.Origin.PEER)


async def test_a_server_that_is_not_permitted_declines_a_proposal() -> None:
    """With discovery "assume" the client sends its Proposal without asking, and gets a Decline."""
    config = Config(discovery="assume", deny=(HOST + "/32",))
    async with trio_smc.open_stack(), listening(config) as listener:
        client, server = await fallbacks(listener, Config(discovery="assume"))
    assert server == Fallback.local(FallbackReason.NOT_PERMITTED)
    assert client is not None
    assert client.peer_code == server.code


async def test_handshakes_beyond_the_limit_use_tcp() -> None:
    async with trio_smc.open_stack(), listening(Config(handshake_limit=0)) as listener:
        client, server = await fallbacks(listener)
    assert server == Fallback.local(FallbackReason.HANDSHAKE_LIMIT)
    assert client is not None
    assert (client.reason, client.origin) == (FallbackReason.HANDSHAKE_LIMIT, trio_smc.Origin.PEER)


async def test_one_handshake_at_a_time_is_within_a_limit_of_one() -> None:
    async with trio_smc.open_stack(), listening(Config(handshake_limit=1)) as listener:
        for _ in range(3):
            assert await fallbacks(listener) == [None, None]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List with the local address of each call of `rnic_for`."""
    addresses: list[str] = []
    rnic_for = Runtime.rnic_for

    def recorded(
        runtime: Runtime, local: str, remote: str, *, near: bool = False
    ) -> Rnic | FallbackReason:
        addresses.append(local)
        return rnic_for(runtime, local, remote, near=near)

    monkeypatch.setattr(Runtime, "rnic_for", recorded)
    return addresses


@pytest.mark.parametrize("discovery", ["auto", "assume"])
async def test_each_side_decides_once(
    lookups: list[str], discovery: Literal["auto", "assume"]
) -> None:
    async with trio_smc.open_stack(Config(discovery=discovery)), listening() as listener:
        assert await fallbacks(listener) == [None, None]
    assert lookups == [HOST, HOST]


async def test_a_client_decides_again_if_the_system_chooses_another_address(
    lookups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TcpOption, "offer", lambda *_: None)
    monkeypatch.setattr(TcpOption, "answer", lambda *_: None)
    monkeypatch.setattr(dial, "source_address", lambda *_: "127.0.0.7")
    async with trio_smc.open_stack(Config(discovery="tcp-option")), listening() as listener:
        assert await fallbacks(listener) == [None, None]
    assert lookups[0] == "127.0.0.7"
    assert lookups[1:] == [HOST, HOST]


def test_short_connections_in_a_row_are_avoided() -> None:
    clock = Clock()
    short = ShortConnections(clock)
    for number in range(SHORT_AFTER):
        assert not short.avoids(PEER)
        short.opened(number, PEER)
        short.closed(number, SHORT_SIZE - 1)
    assert short.avoids(PEER)
    assert not short.avoids(("192.0.2.1", 81))
    clock.now += RETRY_AFTER
    assert not short.avoids(PEER), "one connection may retry SMC-R"
    assert not short.avoids(PEER), "`avoids` changes nothing"
    short.opened("trying", PEER)
    assert short.avoids(PEER), "other connections use TCP until it ends"
    short.closed("trying", SHORT_SIZE)
    assert not short.avoids(PEER), "the retried connection was long"


def test_a_long_connection_resets_the_count() -> None:
    short = ShortConnections(Clock())
    for number in range(3 * SHORT_AFTER):
        short.opened(number, PEER)
        short.closed(number, SHORT_SIZE if number % SHORT_AFTER == 0 else 0)
        assert not short.avoids(PEER)


def test_connections_that_were_not_opened_do_not_count() -> None:
    short = ShortConnections(Clock())
    for number in range(2 * SHORT_AFTER):
        short.closed(number, 0)
    assert not short.avoids(PEER)


async def test_short_connections_become_tcp() -> None:
    config = Config(learn_short=True)
    modes = []
    async with trio_smc.open_stack(config), listening() as listener:
        for _ in range(SHORT_AFTER + 2):
            client, server = await connect(listener)
            await client.send_all(b"short")
            assert await server.receive_some() == b"short"
            for each in (client, server):
                await each.aclose()
            modes.append(client.mode)
            if client.fallback is not None:
                assert client.fallback.reason is FallbackReason.SHORT_CONNECTIONS
    # Both ends count the connection for the same port of the server.
    assert modes.count(Mode.SMC_R) <= SHORT_AFTER
    assert modes[-1] is Mode.TCP


@pytest.mark.parametrize("learned", [True, False], ids=["server-learned", "server-did-not"])
async def test_both_ends_report_short_connections(learned: bool) -> None:
    """The server may have counted fewer connections, for example as one of several workers."""
    async with trio_smc.open_stack(Config(learn_short=learned)) as server:
        [listener] = await server.open_listeners(0, host=HOST)
        port = listener.socket.getsockname()[1]
        async with listener, trio_smc.open_stack(Config(learn_short=True)) as client:
            for stack in (client, server) if learned else (client,):
                short = stack.runtime.short_connections
                for number in range(SHORT_AFTER):
                    short.opened(number, (HOST, port))
                    short.closed(number, 0)
            for _ in range(3):
                ours = await client.open_stream(HOST, port)
                theirs = await listener.accept()
                assert ours.fallback == Fallback.local(FallbackReason.SHORT_CONNECTIONS)
                assert theirs.fallback == Fallback.local(FallbackReason.SHORT_CONNECTIONS)
                await ours.aclose()
                await theirs.aclose()


async def test_a_mark_of_short_connections_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MARK_HOLDS", 0.0)
    async with trio_smc.open_stack() as server:
        [listener] = await server.open_listeners(0, host=HOST)
        port = listener.socket.getsockname()[1]
        async with listener, trio_smc.open_stack(Config(learn_short=True)) as client:
            short = client.runtime.short_connections
            for number in range(SHORT_AFTER):
                short.opened(number, (HOST, port))
                short.closed(number, 0)
            ours = await client.open_stream(HOST, port)
            theirs = await listener.accept()
            assert theirs.fallback == Fallback.local(FallbackReason.PEER_NOT_CAPABLE)
            await ours.aclose()
            await theirs.aclose()


async def test_a_client_tries_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with trio_smc.open_stack(), listening() as listener:
        port = listener.socket.getsockname()[1]
        async with trio_smc.open_stack(Config(learn_short=True)) as stack:
            short = stack.runtime.short_connections = ShortConnections(clock)
            for number in range(SHORT_AFTER):
                short.opened(number, (HOST, port))
                short.closed(number, 0)
            first, _ = await fallbacks(listener)
            clock.now += RETRY_AFTER
            second = await fallbacks(listener)
    assert first == Fallback.local(FallbackReason.SHORT_CONNECTIONS)
    assert second == [None, None]


async def _echo_once(stream: SmcStream) -> None:
    await stream.send_all(await stream.receive_some() or b"nothing")


@asynccontextmanager
async def _serving(config: Config, port: int = 0) -> AsyncIterator[int]:
    """Run a server with a stack of its own. Yields its port."""
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(stack.serve, _echo_once, port, host=HOST))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def _modes(stack: trio_smc.Stack, port: int, count: int) -> list[Mode]:
    """Open ``count`` short connections. Returns their modes."""
    modes = []
    for _ in range(count):
        async with await stack.open_stream(HOST, port) as stream:
            await stream.send_all(b"short")
            assert await stream.receive_some() == b"short"
            modes.append(stream.mode)
    return modes


@pytest.mark.parametrize("requires", ["client", "server"])
async def test_connections_with_a_peer_that_requires_smc_do_not_count(requires: str) -> None:
    learns, strict = Config(learn_short=True), Config(require_smc=True)
    ends = (learns, strict) if requires == "server" else (strict, learns)
    async with _serving(ends[1]) as port, trio_smc.open_stack(ends[0]) as client:
        assert await _modes(client, port, 40) == [Mode.SMC_R] * 40


async def test_a_client_at_an_avoided_address_may_require_smc() -> None:
    """The server avoids SMC-R with the client's address, unless a client there requires SMC-R."""
    async with (
        _serving(Config(learn_short=True)) as port,
        trio_smc.open_stack() as client,
        trio_smc.open_stack(Config(require_smc=True)) as strict,
    ):
        assert (await _modes(client, port, SHORT_AFTER + 1))[-1] is Mode.TCP
        assert await _modes(strict, port, 3) == [Mode.SMC_R] * 3
        assert await _modes(client, port, 1) == [Mode.TCP]


async def test_a_new_process_at_an_avoided_port_may_require_smc() -> None:
    """The count of short connections ends with the listening process."""
    async with trio_smc.open_stack(Config(learn_short=True)) as client:
        async with _serving(Config()) as port:
            assert (await _modes(client, port, SHORT_AFTER + 1))[-1] is Mode.TCP
        async with _serving(Config(require_smc=True), port) as same:
            assert same == port
            assert await _modes(client, port, 20) == [Mode.SMC_R] * 20
