"""`connect` and `accept` under `enable`: if TCP connects at once, SMC-R does not wait either."""

from __future__ import annotations

import os
import socket as stdlib_socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

import trio_smc
from tests.peers import echo
from tests.timing import PATIENCE
from trio_smc import FallbackReason
from trio_smc.connecting import dial
from trio_smc.rendezvous.discovery.announcing import Announcer
from trio_smc.sockets.drop_in import DropInSocket

HOST = "127.0.0.1"
TCP = stdlib_socket.IPPROTO_TCP
FASTOPEN_CONNECT = 30  # linux/tcp.h; Python 3.11 has no name for it
SHARED = stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1
LATE_PORT = stdlib_socket.IPPROTO_IP, 24, 1  # IP_BIND_ADDRESS_NO_PORT; Python 3.11 has no name
DEVICE = stdlib_socket.SOL_SOCKET, stdlib_socket.SO_BINDTODEVICE, b"lo"
LATE = 2.0
"""Time limit of a `connect`, in seconds."""


@pytest.fixture(params=[True, False], ids=["required", "wanted"])
async def required(request: pytest.FixtureRequest) -> AsyncIterator[bool]:
    """Enable SMC-R for the run.  True if SMC-R is required."""
    trio_smc.enable(trio_smc.Config(require_smc=request.param, receive_buffer=16 * 1024))
    try:
        yield request.param
    finally:
        trio_smc.disable()


async def listen(
    host: str = HOST,
    backlog: int = 16,
    family: int = stdlib_socket.AF_INET,
    *,
    dual_stack: bool = False,
) -> trio.socket.SocketType:
    sock = trio.socket.socket(family)
    if dual_stack and family == stdlib_socket.AF_INET6:
        sock.setsockopt(stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY, 0)
    await sock.bind((host, 0))
    sock.listen(backlog)
    return sock


def family_of(address: str) -> int:
    return stdlib_socket.AF_INET6 if ":" in address else stdlib_socket.AF_INET


async def check_pair(client: trio.socket.SocketType, server: trio.socket.SocketType) -> None:
    """Check that both ends use SMC-R, and that bytes arrive."""
    for end in (client, server):
        assert isinstance(end, DropInSocket)
        assert end.stream is not None
        assert end.stream.mode is trio_smc.Mode.SMC_R, end.stream.fallback
    await client.send(b"ping")
    assert await server.recv(4) == b"ping"
    client.close()
    server.close()


async def connect_and_accept(
    client: trio.socket.SocketType, listener: trio.socket.SocketType, address: object = None
) -> trio.socket.SocketType:
    accepted: list[trio.socket.SocketType] = []

    async def accept() -> None:
        accepted.append((await listener.accept())[0])

    with trio.fail_after(LATE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await client.connect(address or listener.getsockname())
    return accepted[0]


@pytest.mark.parametrize("before", [True, False], ids=["before-listen", "after-listen"])
async def test_a_listener_that_waits_for_data(required: bool, before: bool) -> None:
    """With TCP_DEFER_ACCEPT, `connect` returns at once, and `accept` when data has arrived."""
    listener = trio.socket.socket()
    await listener.bind((HOST, 0))
    if not before:
        listener.listen()
    listener.setsockopt(TCP, stdlib_socket.TCP_DEFER_ACCEPT, 10)
    if before:
        listener.listen()
    with stdlib_socket.create_server((HOST, 0)) as reference:
        reference.setsockopt(TCP, stdlib_socket.TCP_DEFER_ACCEPT, 10)
        over_tcp = reference.getsockopt(TCP, stdlib_socket.TCP_DEFER_ACCEPT)
    accepted: list[trio.socket.SocketType] = []

    async def accept() -> None:
        accepted.append((await listener.accept())[0])

    with listener, trio.socket.socket() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            with trio.fail_after(LATE):
                await client.connect(listener.getsockname())
            assert listener.getsockopt(TCP, stdlib_socket.TCP_DEFER_ACCEPT) == over_tcp
            await trio.sleep(0.1)
            assert not accepted
            await client.send(b"hello")
        assert await accepted[0].recv(5) == b"hello"
        await check_pair(client, accepted[0])


async def test_a_deferred_connection_that_ends_without_data(required: bool) -> None:
    """As over TCP, `accept` returns such a connection."""
    listener = await listen()
    listener.setsockopt(TCP, stdlib_socket.TCP_DEFER_ACCEPT, 10)
    with listener, trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with trio.socket.socket() as client:
                    await client.connect(listener.getsockname())

            nursery.start_soon(call)
            server, _ = await listener.accept()
            with server:
                assert await server.recv(1) == b""


async def test_tcp_fast_open_sockets_use_smc_r(required: bool) -> None:
    """If the client has a cookie of the server, the SYN of such a socket leaves with the first
    data."""
    listener = await listen()
    listener.setsockopt(TCP, stdlib_socket.TCP_FASTOPEN, 5)
    with listener:
        for _ in range(3):
            client = trio.socket.socket()
            client.setsockopt(TCP, FASTOPEN_CONNECT, 1)
            await check_pair(client, await connect_and_accept(client, listener))


async def test_a_copy_that_accepts(required: bool) -> None:
    """The original socket never accepts a connection in place of the copy."""
    listener = await listen()
    with listener, listener.dup() as copy:
        for _ in range(8):
            client = trio.socket.socket()
            server = await connect_and_accept(client, copy, listener.getsockname())
            await check_pair(client, server)


async def test_a_thread_that_accepts(required: bool) -> None:
    """A blocking accept(2) on a copy of the descriptor gets each connection, over TCP."""
    listener = await listen()
    plain = stdlib_socket.socket(fileno=os.dup(listener.fileno()))
    plain.setblocking(True)

    def accept_and_echo() -> None:
        accepted, _ = plain.accept()
        with accepted:
            while data := accepted.recv(10):
                accepted.sendall(data)

    with listener, plain, trio.fail_after(PATIENCE):
        for _ in range(2 if required else 4):  # each takes a second if SMC-R is required
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, accept_and_echo)
                with trio.socket.socket() as client:
                    began = trio.current_time()
                    try:
                        await client.connect(listener.getsockname())
                    except trio_smc.SmcUnavailable as error:
                        assert required
                        reason = error.fallback.reason
                        assert reason is trio_smc.FallbackReason.PEER_NOT_CAPABLE
                        continue
                    finally:
                        assert trio.current_time() - began < LATE
                    await client.send(b"ping")
                    assert await client.recv(4) == b"ping"


@pytest.mark.parametrize("required", [True], ids=["required"], indirect=True)
async def test_a_listening_socket_that_no_process_uses_yet(required: bool) -> None:
    """The program wraps the socket later, like a worker that inherits a socket."""
    plain = stdlib_socket.create_server((HOST, 0))
    client = trio.socket.socket()
    accepted: list[trio.socket.SocketType] = []
    with plain, trio.fail_after(LATE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.connect, plain.getsockname())
            await trio.sleep(0.3)  # several checks for a listener
            plain.setblocking(False)
            listener = trio.socket.from_stdlib_socket(plain)
            accepted.append((await listener.accept())[0])
        await check_pair(client, accepted[0])
        listener.close()


async def test_a_program_that_connects_before_it_accepts(required: bool) -> None:
    """A single task connects and then accepts, which works over TCP."""
    listener = await listen()
    with listener:
        for _ in range(3):
            client = trio.socket.socket()
            with trio.fail_after(LATE):
                await client.connect(listener.getsockname())
                server, _ = await listener.accept()
            await check_pair(client, server)


@pytest.mark.parametrize(
    ("address", "host", "family"),
    [
        ("0.0.0.0", HOST, stdlib_socket.AF_INET),
        ("0.0.0.0", "0.0.0.0", stdlib_socket.AF_INET),
        ("::", "::1", stdlib_socket.AF_INET6),
        ("::", "::", stdlib_socket.AF_INET6),
    ],
)
async def test_a_wildcard_address_means_this_host(
    required: bool, address: str, host: str, family: int
) -> None:
    listener = await listen(host, family=family)
    with listener:
        client = trio.socket.socket(family)
        there = address, listener.getsockname()[1]
        await check_pair(client, await connect_and_accept(client, listener, there))
        stream = await trio.open_tcp_stream(*there)
        server, _ = await listener.accept()
        await check_pair(stream.socket, server)


async def test_a_wildcard_address_from_a_bound_socket(required: bool) -> None:
    """The kernel connects the socket to the address to which it is bound."""
    listener = await listen("127.0.0.7")
    with listener:
        client = trio.socket.socket()
        await client.bind(("127.0.0.7", 0))
        there = "0.0.0.0", listener.getsockname()[1]
        await check_pair(client, await connect_and_accept(client, listener, there))


@pytest.mark.parametrize("options", [[], [SHARED], [LATE_PORT], [DEVICE]])
@pytest.mark.parametrize(
    ("wildcard", "address", "host"),
    [
        ("0.0.0.0", HOST, HOST),
        ("0.0.0.0", "127.0.0.9", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0", HOST),
        ("::", "::1", "::1"),
        ("::", "::", "::"),
        ("::", "::ffff:127.0.0.1", "::"),
        ("::ffff:0.0.0.0", "::ffff:127.0.0.1", "::"),
        ("::ffff:0.0.0.0", "::", "::"),
    ],
)
async def test_a_socket_that_is_bound_to_a_wildcard_address(
    required: bool,
    wildcard: str,
    address: str,
    host: str,
    options: list[tuple[int, int, int | bytes]],
) -> None:
    """The kernel chooses the address as for a socket that is not bound, and keeps the port."""
    listener = await listen(host, family=family_of(host), dual_stack=True)
    with listener:
        there = address, listener.getsockname()[1]
        port = 0
        for _ in range(2 if SHARED in options else 1):
            client = trio.socket.socket(family_of(wildcard))
            for option in options:
                client.setsockopt(*option)
            if client.family == stdlib_socket.AF_INET6:
                client.setsockopt(stdlib_socket.IPPROTO_IPV6, stdlib_socket.IPV6_V6ONLY, 0)
            await client.bind((wildcard, port))
            port = client.getsockname()[1]
            server = await connect_and_accept(client, listener, there)
            assert port in (0, client.getsockname()[1])
            await check_pair(client, server)


async def test_a_source_that_is_not_the_expected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel chooses another source address, only this connection is TCP, and at once."""
    trio_smc.enable(trio_smc.Config(receive_buffer=16 * 1024))
    try:
        with await listen() as listener:
            monkeypatch.setattr(dial, "source_address", lambda *_: "127.0.0.5")
            client = trio.socket.socket()
            await client.bind(("0.0.0.0", 0))
            server = await connect_and_accept(client, listener)
            for end, reason in (
                (client, FallbackReason.OUT_OF_RESOURCES),
                (server, FallbackReason.PEER_NOT_CAPABLE),
            ):
                assert isinstance(end, DropInSocket)
                assert end.stream is not None
                assert end.stream.fallback is not None
                assert end.stream.fallback.reason is reason
                end.close()
            monkeypatch.undo()
            client = trio.socket.socket()
            await check_pair(client, await connect_and_accept(client, listener))
    finally:
        trio_smc.disable()


@pytest.mark.parametrize("address", ["0.0.0.0", HOST])
async def test_a_local_address_of_a_stream(required: bool, address: str) -> None:
    with await listen() as listener:
        port = listener.getsockname()[1]
        stream = await trio.open_tcp_stream(HOST, port, local_address=address)
        server, _ = await listener.accept()
        await check_pair(stream.socket, server)


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "as-asked"])
async def test_a_full_backlog(
    required: bool, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections succeed, even those whose last ACK the kernel has dropped."""
    if not raised:
        monkeypatch.setattr("trio_smc.connecting.listener.LEAST_BACKLOG", 0)
    made: list[str] = []

    async def call(address: tuple[str, int]) -> None:
        stream = await trio.open_tcp_stream(*address)
        async with stream:
            await stream.send_all(b"x")
            made.append((await stream.receive_some(1)).decode())

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host=HOST, backlog=10)
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as callers:
                for _ in range(60):
                    callers.start_soon(call, listener.socket.getsockname())
        nursery.cancel_scope.cancel()
    assert made == ["x"] * 60


async def test_the_wait_of_one_process_is_no_wait_of_another(required: bool) -> None:
    """A connection to a listener that does not accept delays no connection to another listener."""
    silent, listener = await listen(), await listen()
    with silent, listener:
        queued = stdlib_socket.create_connection(silent.getsockname())
        client = trio.socket.socket()
        longest = Announcer(Path("/nowhere")).patience_for((HOST, 1))
        began = trio.current_time()
        await check_pair(client, await connect_and_accept(client, listener))
        assert trio.current_time() - began < longest
        queued.close()


async def test_a_connect_that_is_cancelled_while_its_socket_is_closed(required: bool) -> None:
    listener = await listen()
    errors: list[str] = []

    async def connect(client: trio.socket.SocketType) -> None:
        try:
            await client.connect(listener.getsockname())
        except BaseException as error:
            errors.append(type(error).__name__)
            raise

    for _ in range(3):
        async with trio.open_nursery() as nursery:
            client = trio.socket.socket()
            nursery.start_soon(connect, client)
            await trio.sleep(0.01)  # the handshake waits, because the server does not accept
            nursery.cancel_scope.cancel()
            client.close()
    assert errors == ["Cancelled"] * 3
    listener.close()
