"""`open_listeners` and `serve`: they work like Trio's functions, and no client affects another."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

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
    plain_client,
    proposal,
    read_clc,
    read_to_end,
    wait_until_freed,
)
from tests.peers import check_echo, echo
from tests.timing import PATIENCE
from trio_smc import Config, FallbackReason, Mode, SmcListener, SmcStream, Stack
from trio_smc.wire import clc

# --- like Trio -----------------------------------------------------------------------------------


async def test_listeners_on_all_addresses(stack: Stack) -> None:
    listeners = await stack.open_listeners(0)
    families = {listener.socket.family for listener in listeners}
    assert families == {socket.AF_INET, socket.AF_INET6}
    for listener in listeners:
        assert listener.socket.getsockname()[1] != 0
        await check_serves(stack, listener)
    await close_all(*listeners)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", b"127.0.0.1", "localhost"])
async def test_listeners_on_one_host(host: str | bytes, stack: Stack) -> None:
    listeners = await stack.open_listeners(0, host=host, backlog=7)
    for listener in listeners:
        await check_serves(stack, listener)
    await close_all(*listeners)


async def test_an_ipv6_wildcard_socket_accepts_ipv4(stack: Stack) -> None:
    with trio.socket.socket(socket.AF_INET6) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        await sock.bind(("::", 0))
        sock.listen()
        async with SmcListener(stack.runtime, sock, QUICK) as listener:
            port = sock.getsockname()[1]
            async with await stack.open_stream(HOST, port) as stream:
                assert stream.mode is Mode.SMC_R
                accepted = await listener.accept()
                assert accepted.socket.getpeername()[0] == "::ffff:127.0.0.1"
                await close_all(accepted)


async def test_a_listener_leaves_a_socket_that_has_its_number_alone(stack: Stack) -> None:
    """The program may close its socket by the number, which the kernel then gives to another."""
    deferral = (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
    with socket.create_server((HOST, 0)) as raw, socket.create_server((HOST, 0)) as other:
        raw.setsockopt(*deferral, 10)
        sock = trio.socket.from_stdlib_socket(raw)
        listener = SmcListener(stack.runtime, sock, QUICK, of_program=True)
        assert listener.is_for(sock)
        assert raw.getsockopt(*deferral) == 0
        os.dup2(other.fileno(), raw.fileno(), inheritable=False)
        assert not listener.is_for(sock)
        assert listener in stack.runtime.listeners  # a question has no effect
        other.setsockopt(*deferral, 3)
        with trio.move_on_after(0):
            await listener.accept()
        assert raw.getsockopt(*deferral) == other.getsockopt(*deferral) != 0
        other.setsockopt(*deferral, 0)
        with trio.fail_after(PATIENCE), socket.socket() as client:
            client.setblocking(False)
            client.connect_ex(other.getsockname())
            await trio.lowlevel.wait_writable(client)
            listener.end_if_replaced(sock)
            with pytest.raises(OSError, match="Invalid argument"):
                await listener.accept()
            listener.close()
            accepted, _ = other.accept()
            accepted.close()
        assert raw.getsockopt(*deferral) == 0  # and it is open
        assert listener not in stack.runtime.listeners


async def test_a_port_in_use_is_an_error(stack: Stack, listener: SmcListener) -> None:
    host, port = address_of(listener)
    with pytest.raises(OSError, match="in use") as caught:
        await stack.open_listeners(port, host=host)
    assert caught.value.errno == errno.EADDRINUSE


async def test_open_listeners_checks_its_arguments(stack: Stack) -> None:
    with pytest.raises(TypeError):
        await stack.open_listeners("80")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="directory belongs to the stack"):
        await stack.open_listeners(0, config=Config(directory="/nowhere"))


async def test_serve_handles_smc_r_and_tcp_clients(stack: Stack) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio_smc.serve, echo, 0, host=HOST))
        assert [type(listener) for listener in listeners] == [SmcListener]
        async with await trio_smc.open_stream(*address_of(listeners[0])) as stream:
            assert stream.mode is Mode.SMC_R
            await check_echo(stream)
        async with await plain_client(listeners[0]) as plain:
            await check_echo(plain)
        nursery.cancel_scope.cancel()
    with pytest.raises(trio.ClosedResourceError):
        await listeners[0].accept()


async def test_handlers_in_another_nursery(stack: Stack) -> None:
    handling = trio.Event()

    async def handler(stream: SmcStream) -> None:
        handling.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as handlers, trio.open_nursery() as nursery:
        [listener] = await nursery.start(
            partial(stack.serve, handler, 0, host=HOST, handler_nursery=handlers)
        )
        async with await stack.open_stream(*address_of(listener)):
            await handling.wait()
            assert len(handlers.child_tasks) == 1
            nursery.cancel_scope.cancel()
            handlers.cancel_scope.cancel()


async def test_handlers_have_the_context_of_serve(stack: Stack) -> None:
    name: ContextVar[str] = ContextVar("name")
    names = []

    async def handler(stream: SmcStream) -> None:
        names.append(name.get())

    [listener] = await stack.open_listeners(0, host=HOST)
    async with trio.open_nursery() as nursery:
        token = name.set("server")
        nursery.start_soon(listener.serve, handler, nursery)
        name.reset(token)
        for connect in (stack.open_stream, trio.open_tcp_stream):
            async with await connect(*address_of(listener)) as stream:
                with trio.fail_after(PATIENCE):
                    assert await read_to_end(stream) == b""
        nursery.cancel_scope.cancel()
    assert names == ["server", "server"]


async def test_a_handler_that_fails_ends_the_server(stack: Stack) -> None:
    async def handler(stream: SmcStream) -> None:
        raise LookupError("handler")

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(stack.serve, handler, 0, host=HOST))
            await (await stack.open_stream(*address_of(listener))).aclose()
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.group_contains(LookupError)


@pytest.mark.parametrize("sent", ["nothing", "proposal"])
async def test_closed_while_serving_a_handshake(stack: Stack, sent: str) -> None:
    """Clients in a handshake are reset at once, and no handler runs."""

    async def handler(stream: SmcStream) -> None:
        raise AssertionError("no handshake was completed")

    async with trio.open_nursery() as nursery:
        serve = partial(stack.serve, handler, 0, host=HOST, config=ASSUME)
        with pytest.RaisesGroup(pytest.RaisesGroup(trio.ClosedResourceError)):
            async with trio.open_nursery() as serving:
                [listener] = await serving.start(serve)
                client = await plain_client(listener)
                if sent == "proposal":
                    await client.send_all(proposal().encode())
                    assert isinstance(await read_clc(client), clc.Accept)
                await trio.testing.wait_all_tasks_blocked()
                await listener.aclose()
        with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
        await client.aclose()
        nursery.cancel_scope.cancel()
    await wait_until_freed(stack)


# --- accept --------------------------------------------------------------------------------------


async def test_one_task_at_a_time(stack: Stack, listener: SmcListener) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.accept)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await listener.accept()
        nursery.cancel_scope.cancel()
    await check_serves(stack, listener)


async def test_a_cancelled_accept_loses_nothing(stack: Stack, listener: SmcListener) -> None:
    stream = await stack.open_stream(*address_of(listener))
    with trio.CancelScope() as scope:
        scope.cancel()
        await listener.accept()
    assert scope.cancelled_caught
    await close_all(stream, await listener.accept())


async def test_closed_while_accepting(stack: Stack, listener: SmcListener) -> None:
    async def accept_one() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_one)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()
    await listener.aclose()
    await accept_one()


@pytest.mark.parametrize("parked", [False, True])
async def test_the_program_closes_the_socket(
    parked: bool, stack: Stack, listener: SmcListener
) -> None:
    if parked:
        await trio.testing.wait_all_tasks_blocked()
    listener.socket.close()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    [other] = await stack.open_listeners(0, host=HOST)
    async with other:
        await check_serves(stack, other)


async def test_the_socket_is_shut_down(stack: Stack, listener: SmcListener) -> None:
    """Like `trio.SocketListener.accept`, `accept` raises EINVAL, and the socket stays open."""
    sock = listener.socket
    sock.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        with trio.fail_after(PATIENCE), pytest.raises(OSError, match="Invalid") as raised:
            await listener.accept()
        assert raised.value.errno == errno.EINVAL
    assert sock.fileno() >= 0
    await listener.aclose()
    assert sock.fileno() == -1
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


async def test_closing_resets_unaccepted_streams(stack: Stack, listener: SmcListener) -> None:
    stream = await stack.open_stream(*address_of(listener))
    plain = await plain_client(listener)
    await trio.testing.wait_all_tasks_blocked(0.05)
    await listener.aclose()
    with trio.fail_after(PATIENCE), pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    assert isinstance(await read_to_end(plain), ConnectionResetError)
    await close_all(stream, plain)
    await wait_until_freed(stack)


async def test_closing_resets_handshakes() -> None:
    async with trio_smc.open_stack(ASSUME) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        plain = await plain_client(listener)
        await plain.send_all(proposal().encode())
        assert isinstance(await read_clc(plain), clc.Accept)
        await listener.aclose()
        assert isinstance(await read_to_end(plain), ConnectionResetError)
        await plain.aclose()
        await wait_until_freed(stack)


# --- connections that fail -----------------------------------------------------------------------


HOSTILE = [
    clc.EYE_CATCHER + bytes(100),
    clc.EYE_CATCHER + b"\xff" * 100,
    proposal().encode()[:-1] + b"?",
    proposal().encode() * 2,
    accept().encode(),
    proposal().encode() + accept().encode(),
]


@pytest.mark.parametrize("sent", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_failed_handshake_does_not_disturb_others(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio_smc.open_stack(ASSUME) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        plain = await plain_client(listener)
        await plain.send_all(sent)
        answer = await read_to_end(plain)
        assert isinstance(answer, OSError) or answer[:4] == clc.EYE_CATCHER
        await plain.aclose()
        await check_serves(stack, listener)
        assert stack.statistics().handshakes_failed == 1
        await wait_until_freed(stack)
        await listener.aclose()
    assert not [record for record in caplog.records if record.exc_info]


async def test_random_bytes_do_not_disturb_others(
    rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio_smc.open_stack(ASSUME) as stack, trio.open_nursery() as nursery:
        received: list[bytes] = []

        async def handler(stream: SmcStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                data = await read_to_end(stream)
                received.append(data if isinstance(data, bytes) else b"")

        [listener] = await nursery.start(partial(stack.serve, handler, 0, host=HOST))
        for _ in range(100):
            data = bytearray(proposal().encode())
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            async with await plain_client(listener) as plain:
                with contextlib.suppress(trio.BrokenResourceError):
                    await plain.send_all(data[: rng.randrange(1, len(data) + 1)])
        async with await stack.open_stream(*address_of(listener)) as stream:
            assert stream.mode is Mode.SMC_R
        await wait_until_freed(stack)
        nursery.cancel_scope.cancel()
    for handed in received:
        assert not handed.startswith(clc.EYE_CATCHER), "CLC bytes reached the application"
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_defect_ends_one_connection(
    stack: Stack, listener: SmcListener, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(**options: object) -> None:
        raise LookupError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr("trio_smc.connecting.accept.ServerNegotiation", broken)
        stream = await stack.open_stream(*address_of(listener))
        assert stream.fallback is not None
        assert stream.fallback.reason is FallbackReason.ENDED_IN_HANDSHAKE
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        await stream.aclose()
    assert "LookupError: a defect" in caplog.text
    await check_serves(stack, listener)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let every attempt to open a descriptor fail with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def accept_after_errors(listener: SmcListener) -> tuple[SmcStream, int]:
    """Accept the next stream.  Returns the stream, and the number of errors before it."""
    errors = 0
    with trio.fail_after(PATIENCE):
        while True:
            try:
                return await listener.accept(), errors
            except OSError:
                errors += 1


async def test_accept_raises_without_descriptors(stack: Stack, listener: SmcListener) -> None:
    with socket.socket() as plain:
        with no_descriptors():
            plain.connect(address_of(listener))
            for _ in range(2):
                with trio.fail_after(PATIENCE), pytest.raises(OSError, match="open") as caught:
                    await listener.accept()
                assert caught.value.errno == errno.EMFILE
        with trio.fail_after(PATIENCE):
            await (await accept_after_errors(listener))[0].aclose()
    await check_serves(stack, listener)


async def test_capacity_errors_are_not_queued(
    stack: Stack, listener: SmcListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    accept = socket.socket.accept

    def counted(self: socket.socket) -> tuple[socket.socket, object]:
        nonlocal tries
        tries += 1
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", counted)
    with socket.socket() as plain:
        with no_descriptors(), trio.fail_after(PATIENCE):
            plain.connect(address_of(listener))
            while tries < 3:  # noqa: ASYNC110  # a counter
                await trio.sleep(0.01)
        stream, errors = await accept_after_errors(listener)
        assert errors == 1
        await stream.aclose()


async def test_serve_continues_after_capacity_errors(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(stream: SmcStream) -> None:
        await stream.send_all(b"here")

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(stack.serve, handler, 0, host=HOST))
        with socket.socket() as plain:
            with no_descriptors():
                plain.connect(address_of(listener))
                with trio.fail_after(PATIENCE):
                    while "EMFILE" not in caplog.text:  # noqa: ASYNC110
                        await trio.sleep(0.01)
            plain.setblocking(False)
            with trio.fail_after(PATIENCE):
                await trio.lowlevel.wait_readable(plain)
            assert plain.recv(10) == b"here"
        nursery.cancel_scope.cancel()


@pytest.fixture
def two_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow two streams of a listener to wait for `accept`, and eight handshakes."""
    monkeypatch.setattr("trio_smc.connecting.listener.MOST_WAITING", 2)


@pytest.mark.usefixtures("two_may_wait")
async def test_silent_clients_do_not_delay_others() -> None:
    """Twice as many clients are silent as may wait for `accept`; the listener serves others at
    once."""
    config = Config(receive_buffer=16384, discovery="assume")
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        silent = [await plain_client(listener) for _ in range(4)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(config.handshake_timeout / 2):
            await check_serves(stack, listener)
        await close_all(*silent, listener)


@pytest.mark.usefixtures("two_may_wait")
@pytest.mark.parametrize("first", [b"", clc.EYE_CATCHER])
async def test_the_oldest_silent_client_gives_way(first: bytes) -> None:
    """The first bytes of an incomplete message count as silence."""
    config = Config(receive_buffer=16384, discovery="assume")
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        silent = []
        for _ in range(8):
            silent.append(await plain_client(listener))
            if first:
                await silent[-1].send_all(first)
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(config.handshake_timeout / 2):
            await check_serves(stack, listener)
            with pytest.raises(trio.BrokenResourceError):
                await silent[0].receive_some()
        with trio.move_on_after(0.1) as waiting:
            await silent[-1].receive_some()
        assert waiting.cancelled_caught
        await close_all(*silent, listener)


@pytest.mark.usefixtures("two_may_wait")
async def test_an_address_with_many_handshakes_does_not_displace_others() -> None:
    config = Config(receive_buffer=16384, discovery="assume")
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        alone = await trio.open_tcp_stream(*address_of(listener), local_address="127.0.0.2")
        await trio.testing.wait_all_tasks_blocked(0.05)
        many = [await plain_client(listener) for _ in range(10)]
        with trio.fail_after(config.handshake_timeout / 2):
            for each in many[:3]:
                with pytest.raises(trio.BrokenResourceError):
                    await each.receive_some()
        with trio.move_on_after(0.1) as waiting:
            await alone.receive_some()
        assert waiting.cancelled_caught, "the only handshake of its address was displaced"
        await close_all(alone, *many, listener)


@pytest.mark.parametrize(("limit", "waiting"), [(None, 2), (0, 2), (3, 3)])
@pytest.mark.usefixtures("two_may_wait")
async def test_streams_that_are_not_accepted_are_bounded(
    stack: Stack, limit: int | None, waiting: int
) -> None:
    """A handshake limit above the usual bound raises that bound."""
    config = Config(handshake_limit=limit)
    [listener] = await stack.open_listeners(0, host=HOST, config=config)
    clients = [await plain_client(listener) for _ in range(5)]
    await trio.testing.wait_all_tasks_blocked(0.05)
    fallbacks = ("local", FallbackReason.PEER_NOT_CAPABLE)
    assert stack.statistics().fallbacks == {fallbacks: waiting}
    with trio.fail_after(PATIENCE):
        streams = [await listener.accept() for _ in range(5)]
    # Connections that arrive together may be accepted in any order.
    accepted = {stream.socket.getpeername(): stream for stream in streams}
    for client in clients:
        await check_talk(client, accepted[client.socket.getsockname()])
    await close_all(*clients, *streams, listener)


@pytest.mark.usefixtures("two_may_wait")
async def test_a_full_listener_is_closed_as_it_gets_room(stack: Stack) -> None:
    [listener] = await stack.open_listeners(0, host=HOST)
    clients = [await plain_client(listener) for _ in range(3)]
    await trio.testing.wait_all_tasks_blocked(0.05)
    stream = await listener.accept()
    listener.close()  # the task that accepts has not run yet
    await trio.testing.wait_all_tasks_blocked()
    assert stack.runtime.running
    await close_all(*clients, stream)


async def test_a_listener_that_requires_smc_r_refuses_tcp(caplog: pytest.LogCaptureFixture) -> None:
    async with trio_smc.open_stack(Config(receive_buffer=16384, require_smc=True)) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with await plain_client(listener) as plain:
            assert await read_to_end(plain) == b""
        await check_serves(stack, listener)
        statistics = stack.statistics()
        assert statistics.refused == 1
        assert statistics.fallbacks == {("local", "peer-not-capable"): 1}
        assert "SMC-R is required: the peer did not announce SMC-R" in caplog.text
        await listener.aclose()
