"""`open_stream`: its results and errors, and that it frees everything."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import trio_smc
from tests.api.api_peers import (
    ASSUME,
    HOST,
    QUICK,
    accept,
    address_of,
    check_serves,
    check_talk,
    close_all,
    connect,
    open_to,
    plain_server,
    read_clc,
    read_exactly,
    read_to_end,
    wait_until_freed,
)
from tests.peers import check_echo, echo_until_reset
from tests.ports import reserved_port
from tests.streams.stream_pairs import cancel_when_blocked
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SmcListener, SmcUnavailable, Stack
from trio_smc.connecting import connect as _connect
from trio_smc.connecting import dial as _dial
from trio_smc.wire import clc


class Resolver(trio.abc.HostnameResolver):
    """Resolves every name to the same addresses, in this order, or raises an error."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.queried: list[bytes | None] = []

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def]
        self.queried.append(host)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port, 0, 0) if ":" in address else (address, port),
            )
            for address in self.addresses
        ]

    async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def]
        raise NotImplementedError


# --- TCP -----------------------------------------------------------------------------------------


async def test_no_listener(stack: Stack) -> None:
    with reserved_port() as port, pytest.raises(ConnectionRefusedError) as caught:
        await stack.open_stream(HOST, port)
    assert caught.value.errno == errno.ECONNREFUSED
    assert caught.value.strerror == f"cannot connect to {HOST}:{port}: connection refused"


async def test_no_listener_on_an_ipv6_address(stack: Stack) -> None:
    with reserved_port() as port, pytest.raises(ConnectionRefusedError) as caught:
        await stack.open_stream("::1", port)
    assert caught.value.strerror == f"cannot connect to [::1]:{port}: connection refused"


async def test_no_listener_on_several_addresses(stack: Stack) -> None:
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    with (
        reserved_port() as port,
        pytest.raises(OSError, match=f"cannot connect to several:{port}: connection ref") as caught,
    ):
        await stack.open_stream("several", port)
    assert caught.value.errno == errno.ECONNREFUSED
    assert isinstance(caught.value.__cause__, ExceptionGroup)


async def test_unknown_name(stack: Stack) -> None:
    trio.socket.set_custom_hostname_resolver(Resolver())
    with pytest.raises(socket.gaierror) as caught:
        await stack.open_stream("nowhere", 80)
    assert caught.value.errno == socket.EAI_NONAME


async def test_open_stream_accepts_a_host_as_bytes(stack: Stack, listener: SmcListener) -> None:
    _, port = address_of(listener)
    async with await stack.open_stream(b"127.0.0.1", port) as stream:
        assert stream.mode is Mode.SMC_R
        await close_all(await listener.accept())


async def test_open_stream_checks_its_arguments(stack: Stack) -> None:
    with pytest.raises(ValueError, match="host"):
        await stack.open_stream(None, 80)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="port"):
        await stack.open_stream(HOST, "80")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spin belongs to the stack"):
        await stack.open_stream(HOST, 80, config=Config(spin=0.0))


async def test_local_address(stack: Stack, listener: SmcListener) -> None:
    _, port = address_of(listener)
    async with await stack.open_stream(HOST, port, local_address="127.0.0.9") as stream:
        assert stream.mode is Mode.SMC_R
        assert stream.socket.getsockname()[0] == "127.0.0.9"
        other = await listener.accept()
        assert other.socket.getpeername()[0] == "127.0.0.9"
        await close_all(other)


async def test_local_address_to_a_plain_server(stack: Stack) -> None:
    async with (
        plain_server() as server,
        await stack.open_stream(*address_of(server), local_address="127.0.0.9") as stream,
    ):
        assert stream.mode is Mode.TCP
        assert stream.socket.getsockname()[0] == "127.0.0.9"


@pytest.mark.parametrize("local", ["192.0.2.1", "::1", "no address at all"])
async def test_unusable_local_address(local: str, stack: Stack, listener: SmcListener) -> None:
    with pytest.raises(OSError, match=local):
        await stack.open_stream(*address_of(listener), local_address=local)


@contextlib.asynccontextmanager
async def silent_server(host: str, port: int) -> AsyncIterator[None]:
    """A server with a full backlog, so that clients wait."""
    with trio.socket.socket() as sock, contextlib.ExitStack() as callers:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind((host, port))
        sock.listen(0)
        for _ in range(3):
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((host, port))
        yield


async def test_happy_eyeballs(stack: Stack, listener: SmcListener) -> None:
    _, port = address_of(listener)
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.2", "127.0.0.3", HOST))
    async with silent_server("127.0.0.2", port), silent_server("127.0.0.3", port):
        with trio.fail_after(PATIENCE):
            stream = await stack.open_stream("three", port, happy_eyeballs_delay=0.01)
        assert stream.mode is Mode.SMC_R
        assert stream.socket.getpeername() == (HOST, port)
        await close_all(stream, await listener.accept())
    # The leak check of each test proves that the other sockets are closed.


async def test_happy_eyeballs_continue_at_once_after_a_failure(
    stack: Stack, listener: SmcListener
) -> None:
    _, port = address_of(listener)
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.2", HOST))
    with trio.fail_after(PATIENCE):
        stream = await stack.open_stream("two", port, happy_eyeballs_delay=1000)
    await close_all(stream, await listener.accept())


async def test_cancelled_while_all_attempts_wait(stack: Stack) -> None:
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.2", "127.0.0.3"))
    with reserved_port() as port:
        async with (
            silent_server("127.0.0.2", port),
            silent_server("127.0.0.3", port),
        ):
            assert await cancel_when_blocked(
                partial(stack.open_stream, "two", port, happy_eyeballs_delay=0.001)
            )


# --- cancellation --------------------------------------------------------------------------------


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope after a number of task steps."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.step = step
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.step -= 1
        if self.step == 0:
            self.scope.cancel()


async def cancel_at(step: int, stack: Stack, listener: SmcListener) -> bool:
    """Cancel `open_stream` at this step.  False if the call had already returned."""
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(step, scope)
        trio.lowlevel.add_instrument(instrument)
        try:
            stream = await stack.open_stream(*address_of(listener))
            await stream.aclose()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.step <= 0


async def check_serves_echo(stack: Stack, listener: SmcListener) -> None:
    """Check that the listener still accepts SMC-R connections."""
    async with await stack.open_stream(*address_of(listener)) as stream:
        assert stream.mode is Mode.SMC_R
        await check_echo(stream)


@pytest.mark.parametrize("contact", ["first", "subsequent"])
async def test_cancelled_at_every_step(contact: str, caplog: pytest.LogCaptureFixture) -> None:
    """At each place where the client may wait, both sides free everything and continue."""
    step = 1
    async with trio_smc.open_stack(QUICK) as server, trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(server.serve, echo_until_reset, 0, host=HOST))
        while True:
            async with trio_smc.open_stack(QUICK) as client:
                if contact == "subsequent":
                    await check_serves_echo(client, listener)
                cancelled = await cancel_at(step, client, listener)
                await check_serves_echo(client, listener)
                counters = client.statistics()
                failed = counters.handshakes - counters.connections
                assert counters.handshakes_failed == failed, f"step {step}"
            await wait_until_freed(server)
            if not cancelled:
                break
            step += 1
        nursery.cancel_scope.cancel()
    assert step > 4
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_stack_is_left_during_the_call() -> None:
    async def promise_much(stream: trio.SocketStream) -> None:
        await read_clc(stream)
        left.set()
        assert isinstance(await read_to_end(stream), ConnectionResetError)

    left = trio.Event()
    async with plain_server() as server, trio.open_nursery() as nursery:

        async def open_stream(stack: Stack) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await stack.open_stream(*address_of(server), config=ASSUME)

        async def serve() -> None:
            async with await server.accept() as stream:
                await promise_much(stream)

        nursery.start_soon(serve)
        async with trio_smc.open_stack(QUICK) as stack:
            nursery.start_soon(open_stream, stack)
            await left.wait()


# --- handshakes that fail ------------------------------------------------------------------------


async def test_garbage_is_an_error() -> None:
    async def peer(stream: trio.SocketStream) -> None:
        assert isinstance(await read_clc(stream), clc.Proposal)
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert isinstance(await read_to_end(stream), ConnectionResetError)

    outcome = await open_to(peer)
    assert isinstance(outcome.error, ConnectionResetError)
    assert outcome.error.errno == errno.ECONNRESET
    assert isinstance(outcome.error.__cause__, trio_smc.ProtocolError)


async def test_a_message_out_of_turn_is_an_error() -> None:
    async def peer(stream: trio.SocketStream) -> None:
        again = await read_clc(stream)
        await stream.send_all(again.encode())
        assert isinstance(await read_to_end(stream), ConnectionResetError)

    outcome = await open_to(peer)
    assert isinstance(outcome.error, ConnectionResetError)


async def test_a_silent_peer_is_a_timeout() -> None:
    async def peer(stream: trio.SocketStream) -> None:
        await read_clc(stream)
        assert isinstance(await read_to_end(stream), ConnectionResetError)

    outcome = await open_to(peer, Config(discovery="assume", handshake_timeout=0.05))
    assert isinstance(outcome.error, TimeoutError)
    assert outcome.error.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("sent", [b"", clc.EYE_CATCHER, accept().encode()[:-1]])
async def test_a_peer_that_closes_is_an_error(sent: bytes) -> None:
    async def peer(stream: trio.SocketStream) -> None:
        await read_clc(stream)
        await stream.send_all(sent)

    outcome = await open_to(peer)
    assert isinstance(outcome.error, ConnectionResetError)


async def test_a_defect_is_an_error_too(
    stack: Stack, listener: SmcListener, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(*args: object) -> None:
        raise LookupError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr("trio_smc.connecting.connect.interface_prefixes", broken)
        with pytest.raises(ConnectionResetError) as caught:
            await stack.open_stream(*address_of(listener))
    assert isinstance(caught.value.__cause__, LookupError)
    assert "the SMC-R handshake failed" in caplog.text
    await check_serves(stack, listener)


# --- policy --------------------------------------------------------------------------------------


async def test_a_client_that_requires_smc_r_refuses_tcp() -> None:
    config = Config(require_smc=True)
    async with plain_server() as server, trio_smc.open_stack(config) as stack:

        async def serve() -> None:
            async with await server.accept() as other:
                assert await read_to_end(other) == b""

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            # The client waits only until a process accepts: 2 s are less than its time limits.
            with trio.fail_after(2), pytest.raises(SmcUnavailable) as caught:
                await stack.open_stream(*address_of(server))
        assert caught.value.errno == errno.EPROTONOSUPPORT
        assert caught.value.fallback.reason is FallbackReason.PEER_NOT_CAPABLE
        assert caught.value.fallback.message in str(caught.value)
        assert stack.statistics().fallbacks == {("local", "peer-not-capable"): 1}


async def test_a_call_has_a_config_of_its_own(stack: Stack, listener: SmcListener) -> None:
    config = Config(receive_buffer=100_000, checkpoints="amortised", require_smc=True)
    mine, other = await connect(stack, listener, config)
    mine_too, other_too = await connect(stack, listener)
    client = next(group for group in stack.link_groups if group.role == "client")
    assert [rmb.element_size for rmb in client.rmbs] == [131072, 16384]
    await check_talk(mine, other)
    await check_talk(mine_too, other_too)
    await close_all(mine, other, mine_too, other_too)


async def test_a_plain_server_gets_application_bytes_only(stack: Stack) -> None:
    async with plain_server() as server:
        stream = await stack.open_stream(*address_of(server))
        assert stream.mode is Mode.TCP
        assert stream.fallback is not None
        assert stream.fallback.reason is FallbackReason.PEER_NOT_CAPABLE
        assert stream.link_group is None
        async with stream, await server.accept() as other:
            await stream.send_all(b"x")
            assert await read_exactly(other, 1) == b"x"
            await stream.send_eof()
            assert await read_to_end(other) == b""


async def test_a_server_that_resets_after_the_connect(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was established, so the call returns a broken stream, like over TCP."""
    async with plain_server() as server:
        connect_tcp = _dial.connect_tcp

        async def connect_and_be_reset(*args: Any) -> Any:
            attempt = await connect_tcp(*args)
            stream = await server.accept()
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await stream.aclose()
            return attempt

        monkeypatch.setattr(_connect, "connect_tcp", connect_and_be_reset)
        async with await stack.open_stream(*address_of(server)) as stream:
            assert stream.mode is Mode.TCP
            assert isinstance(await read_to_end(stream), ConnectionResetError)


@pytest.mark.parametrize("contact", ["first", "subsequent"])
@pytest.mark.parametrize("serving", [True, False], ids=["served", "cancelled"])
async def test_a_stream_that_is_aborted_at_once_is_freed(contact: str, serving: bool) -> None:
    """The server may not have read SMC Confirm yet.  It answers the abort (A), or resets TCP."""
    async with trio_smc.open_stack(QUICK) as server, trio.open_nursery() as nursery:
        serve = partial(server.serve, echo_until_reset, 0, host=HOST)
        [listener] = await nursery.start(serve)
        async with trio_smc.open_stack(Config(close_timeout=4 * PATIENCE)) as client:
            streams = [await client.open_stream(*address_of(listener))]
            if contact == "subsequent":
                await check_echo(streams[0])
                streams.append(await client.open_stream(*address_of(listener)))
            assert streams[-1].mode is Mode.SMC_R
            streams[-1].abort()
            if not serving:
                nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                streams[0].abort()
                await wait_until_freed(client)
        nursery.cancel_scope.cancel()
