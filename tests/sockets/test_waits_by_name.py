"""Waits by each name that a program may have for a socket.

A program names a socket by Trio's socket, by the socket of the standard library below it, by
another object with the same descriptor, or by the number of the descriptor.  Each program here runs
with plain Trio and under `enable()`, and observes the same.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.sockets.test_wrapped_sockets import HOST, QUIET, outcome_of
from tests.stack.test_weak import Interrupting, remove
from tests.timing import PATIENCE
from trio_smc.host.tcp import close_past_program
from trio_smc.sockets.drop_in import DropInSocket, find_drop_in
from trio_smc.sockets.exposed import NUMBERS, expose, owners_of

CONFIG: Final = trio_smc.Config(learn_short=False, tcp_option="off")
RAW: Final = "_sock"
"""The attribute of Trio's sockets by which AnyIO passes them on."""
CLIENTS: Final = 3
BUSY: Final = 0.02
"""Seconds; longer than a listener leaves a connection to other processes."""
WATCHED: Final = 0.1
"""Seconds after which the stack watches the TCP connection of an SMC-R connection."""


class Holder(NamedTuple):
    """An object of a program that has the number of a descriptor."""

    number: int

    def fileno(self) -> int:
        return self.number


def raw_of(sock: Any) -> socket.socket:
    return getattr(sock, RAW)  # type: ignore[no-any-return]


def same_descriptor(sock: Any) -> socket.socket:
    """Another object of the standard library for the same descriptor."""
    return socket.socket(fileno=sock.fileno())


NAMES: Final[dict[str, Callable[[Any], Any]]] = {
    "socket": lambda sock: sock,
    "raw": raw_of,
    "number": lambda sock: sock.fileno(),
    "raw-number": lambda sock: raw_of(sock).fileno(),
    "same-descriptor": same_descriptor,
    "holder": lambda sock: Holder(sock.fileno()),
}


@contextmanager
def named(sock: Any, name: Callable[[Any], Any]) -> Iterator[Any]:
    """The object by which a program names a socket."""
    waitable = name(sock)
    try:
        yield waitable
    finally:
        if isinstance(waitable, socket.socket) and waitable is not raw_of(sock):
            waitable.detach()


class Ends(NamedTuple):
    """A socket, and its peer: of Trio, or of the standard library."""

    sock: Any
    peer: Any


async def listening() -> Any:
    sock = trio.socket.socket()
    await sock.bind((HOST, 0))
    sock.listen()
    return sock


def wrapped_listening() -> Any:
    return trio.socket.from_stdlib_socket(socket.create_server((HOST, 0)))


@asynccontextmanager
async def connection(client: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Connect a socket of Trio."""
    with await listening() as listener:
        accepted: list[Any] = []

        async def accept() -> None:
            accepted.append((await listener.accept())[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await wait_all_tasks_blocked(QUIET)
            await client.connect(listener.getsockname())
        with client, accepted[0]:
            yield client, accepted[0]


@asynccontextmanager
async def connected() -> AsyncIterator[Ends]:
    async with connection(trio.socket.socket()) as (client, server):
        yield Ends(client, server)


@asynccontextmanager
async def wrapped() -> AsyncIterator[Ends]:
    """A socket of the standard library, wrapped before it is connected."""
    async with connection(trio.socket.from_stdlib_socket(socket.socket())) as (client, server):
        yield Ends(client, server)


@asynccontextmanager
async def accepted() -> AsyncIterator[Ends]:
    async with connection(trio.socket.socket()) as (client, server):
        yield Ends(server, client)


@asynccontextmanager
async def over_tcp() -> AsyncIterator[Ends]:
    """Fallen back: the client of the standard library knows no SMC-R."""
    with await listening() as listener, socket.socket() as client:
        client.setblocking(False)
        async with trio.open_nursery() as nursery:
            found: list[Any] = []

            async def accept() -> None:
                found.append((await listener.accept())[0])

            nursery.start_soon(accept)
            await wait_all_tasks_blocked(QUIET)
            with suppress(BlockingIOError):
                client.connect(listener.getsockname())
            await trio.lowlevel.wait_writable(client)
            client.send(b"hi")
        with found[0] as server:
            assert await server.recv(2) == b"hi"
            yield Ends(server, client)


@asynccontextmanager
async def wrapped_over_tcp() -> AsyncIterator[Ends]:
    """A socket that the program has connected before it wraps it."""
    with socket.create_server((HOST, 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        peer.setblocking(False)
        with peer, trio.socket.from_stdlib_socket(raw) as sock:
            yield Ends(sock, peer)


STATES: Final = {
    each.__name__: each for each in (connected, wrapped, accepted, over_tcp, wrapped_over_tcp)
}
LISTENING: Final = {"listening": listening, "wrapped-listening": wrapped_listening}
TCP: Final = {"over_tcp", "wrapped_over_tcp"}


def is_smc(sock: Any) -> bool:
    stream = sock.stream if isinstance(sock, DropInSocket) else None
    return stream is not None and stream.mode is trio_smc.Mode.SMC_R


async def send(peer: Any, data: bytes) -> None:
    sent = peer.send(data)
    if not isinstance(sent, int):
        await sent


async def receive(peer: Any, size: int) -> None:
    while size:
        if isinstance(peer, socket.socket):
            await trio.lowlevel.wait_readable(peer)
            size -= len(peer.recv(size))
        else:
            size -= len(await peer.recv(size))


async def woken(wait: Callable[[], Awaitable[Any]], by: Callable[[], Awaitable[Any]]) -> object:
    """The outcome of a wait that begins before ``by``."""
    outcome: object = "waits"

    async def make() -> None:
        nonlocal outcome
        try:
            outcome = await wait()
        except Exception as error:
            outcome = type(error).__name__

    with trio.move_on_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await wait_all_tasks_blocked(QUIET)
            assert outcome == "waits"
            await by()
    return outcome


async def fill(sock: Any) -> int:
    """Send until no more fits; returns the number of bytes."""
    total = 0
    while isinstance(sent := await outcome_of(partial(sock.send, bytes(1 << 20))), int):
        total += sent
    assert sent == "waits"
    return total


async def of_connection(ends: Ends, name: Callable[[Any], Any]) -> list[object]:
    sock, peer = ends

    async def end_waits() -> None:
        trio.lowlevel.notify_closing(waitable)

    with named(sock, name) as waitable:
        wait_readable = partial(trio.lowlevel.wait_readable, waitable)
        wait_writable = partial(trio.lowlevel.wait_writable, waitable)
        seen = [await outcome_of(wait_readable), await outcome_of(wait_writable)]
        seen.append(await woken(wait_readable, partial(send, peer, b"x")))
        seen += [await outcome_of(wait_readable), await sock.recv(10)]
        seen += [await woken(each, end_waits) for each in (wait_readable, partial(sock.recv, 1))]
        size = await fill(sock)
        seen.append(await outcome_of(wait_writable))
        seen.append(await woken(wait_writable, end_waits))
        seen.append(await woken(wait_writable, partial(receive, peer, size)))
        sock.shutdown(socket.SHUT_WR)
        peer.close()
        seen.append(await outcome_of(wait_readable))
        seen.append(await sock.recv(1))
    return seen


async def of_listener(sock: Any, name: Callable[[Any], Any], *, accepts: bool) -> list[object]:
    """A server that waits before each call of `accept`, and is busy between two clients."""
    address, served = sock.getsockname(), 0

    async def end_waits() -> None:
        trio.lowlevel.notify_closing(waitable)

    async def request() -> None:
        nonlocal served
        with trio.move_on_after(PATIENCE), trio.socket.socket() as client:
            await client.connect(address)
            await client.send(b"?")
            answer = await client.recv(1)
            served += answer == b"?"

    async def serve() -> None:
        for number in range(CLIENTS):
            if number:
                await trio.sleep(BUSY)
            await trio.lowlevel.wait_readable(waitable)
            with (await sock.accept())[0] as client:
                await client.send(await client.recv(1))

    seen: list[object] = []
    with named(sock, name) as waitable:
        wait_readable = partial(trio.lowlevel.wait_readable, waitable)
        wait_writable = partial(trio.lowlevel.wait_writable, waitable)
        if accepts:  # before the first wait
            async with trio.open_nursery() as nursery:
                nursery.start_soon(request)
                with (await sock.accept())[0] as client:
                    await client.send(await client.recv(1))
        for _ in range(2):
            seen += [await outcome_of(wait_readable), await outcome_of(wait_writable)]
            seen += [await woken(each, end_waits) for each in (wait_readable, sock.accept)]
            with trio.move_on_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve)
                    for _ in range(CLIENTS):
                        nursery.start_soon(request)
                        await trio.sleep(0.01)
            seen.append(served)
    return seen


async def of_new(name: Callable[[Any], Any]) -> list[object]:
    """A socket that is not connected yet, and its connection."""
    seen: list[object] = []
    with (
        await listening() as listener,
        trio.socket.socket() as sock,
        named(sock, name) as waitable,
    ):
        seen.append(await outcome_of(partial(trio.lowlevel.wait_readable, waitable)))
        seen.append(await outcome_of(partial(trio.lowlevel.wait_writable, waitable)))
        trio.lowlevel.notify_closing(waitable)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sock.connect, listener.getsockname())
            server, _ = await listener.accept()
        with server:
            wait_readable = partial(trio.lowlevel.wait_readable, waitable)
            seen.append(await outcome_of(wait_readable))
            seen.append(await woken(wait_readable, partial(server.send, b"x")))
    return seen


def over_both(
    main: Callable[[], Awaitable[Any]],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Run a program with plain Trio and under `enable()`."""

    async def in_time() -> Any:
        with trio.fail_after(4 * PATIENCE):
            return await main()

    reference = trio.run(in_time)
    assert reference
    request.getfixturevalue("enabled")
    assert trio.run(in_time) == reference
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", STATES)
def test_a_connection(
    state: str, name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    over_smc: list[bool] = []

    async def main() -> list[object]:
        async with STATES[state]() as ends:
            over_smc.append(is_smc(ends.sock))
            return await of_connection(ends, NAMES[name])

    over_both(main, request, caplog)
    assert over_smc == [False, state not in TCP]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", LISTENING)
@pytest.mark.parametrize("accepts", [False, True], ids=["new", "accepts"])
def test_a_listening_socket(
    state: str,
    name: str,
    accepts: bool,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> list[object]:
        made = LISTENING[state]()
        with await made if isinstance(made, Awaitable) else made as sock:
            return await of_listener(sock, NAMES[name], accepts=accepts)

    over_both(main, request, caplog)


@pytest.mark.parametrize("name", NAMES)
def test_a_socket_that_is_not_connected_yet(
    name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    over_both(partial(of_new, NAMES[name]), request, caplog)


@pytest.mark.parametrize("state", ["connected", "wrapped", "accepted"])
def test_a_number_that_another_file_has(
    state: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait for the other file does not reach the connection, and does not miss its own data."""

    async def main() -> list[object]:
        async with STATES[state]() as (sock, peer):
            raw, number = raw_of(sock), sock.fileno()
            await trio.sleep(WATCHED)
            kept = os.dup(number)
            ours, theirs = socket.socketpair()
            with ours, theirs:
                os.dup2(ours.fileno(), number, inheritable=False)
                seen: list[object] = []
                for waitable in (number, Holder(number), raw):
                    wait = partial(trio.lowlevel.wait_readable, waitable)
                    seen.append(await outcome_of(wait))
                    seen.append(sock.fileno() == number)  # the program reads it again
                    seen.append(await outcome_of(wait))
                    seen.append(await woken(wait, partial(send, theirs, b"x")))
                    seen.append(ours.recv(10))
                trio.lowlevel.notify_closing(number)
                os.dup2(kept, number, inheritable=False)
            os.close(kept)
            wait = partial(trio.lowlevel.wait_readable, number)
            seen.append(await woken(wait, partial(send, peer, b"x")))
            return seen

    over_both(main, request, caplog)


def test_a_number_of_a_closed_connection(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        for _ in range(2):
            async with connected() as (sock, peer):
                raw, number = raw_of(sock), sock.fileno()
            with trio.move_on_after(PATIENCE):
                while raw.fileno() >= 0:  # noqa: ASYNC110 - with SMC-R TCP may end later
                    await trio.sleep(0.001)
            del sock, peer
            ours, theirs = socket.socketpair()
            with ours, theirs:
                if number not in (ours.fileno(), theirs.fileno()):
                    os.dup2(ours.fileno(), number, inheritable=False)
                    ours = socket.socket(fileno=number)
                for waitable in (ours, ours.fileno()):
                    wait = partial(trio.lowlevel.wait_readable, waitable)
                    seen.append(await outcome_of(wait))
                    seen.append(await woken(wait, partial(send, theirs, b"x")))
                    seen.append(ours.recv(10))
                seen.append(await outcome_of(partial(trio.lowlevel.wait_readable, raw)))
                ours.close()
        return seen

    over_both(main, request, caplog)


def test_a_raw_socket_that_the_program_has_closed(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[object]:
        async with connected() as (sock, _):
            raw = raw_of(sock)
            raw.close()
            trio.lowlevel.notify_closing(raw)
            return [await outcome_of(partial(trio.lowlevel.wait_readable, raw))]

    over_both(main, request, caplog)


@pytest.mark.parametrize("name", ["socket", "raw"])
@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_connection_that_ends_during_a_call(
    how: str, name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """With SMC-R, TCP ends before the program closes its socket.  No call notices that."""

    async def main() -> list[object]:
        seen: list[object] = []
        for call in ("wait", "recv"):
            async with connected() as (sock, peer):
                waitable = NAMES[name](sock)
                wait = partial(trio.lowlevel.wait_readable, waitable)
                sock.shutdown(socket.SHUT_WR)
                if how == "reset":
                    linger = struct.pack("ii", 1, 0)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

                async def close(peer: Any = peer) -> None:
                    peer.close()

                seen.append(await woken(wait if call == "wait" else partial(sock.recv, 1), close))
                await trio.sleep(0.05)
                seen += [await outcome_of(wait), await outcome_of(wait)]
                seen.append(await outcome_of(partial(sock.recv, 1)))
        return seen

    over_both(main, request, caplog)


def test_several_wrappers_of_one_socket(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wrapper, and the socket itself, wait for the connection that one of them has made."""

    async def main() -> list[object]:
        seen: list[object] = []
        raw = socket.socket()
        wrappers = [trio.socket.from_stdlib_socket(raw) for _ in range(3)]
        async with connection(wrappers[1]) as (_, server):
            for place in (None, 0, 1, 2):

                async def wait(place: int | None = place) -> None:
                    await trio.lowlevel.wait_readable(raw if place is None else wrappers[place])

                async def end_waits(place: int | None = place) -> None:
                    trio.lowlevel.notify_closing(raw if place is None else wrappers[place])

                seen.append(await woken(wait, end_waits))
                seen.append(await woken(wait, partial(server.send, b"x")))
                seen.append(await wrappers[1].recv(10))
            del wrappers[2], wrappers[0]
            gc.collect()
            wait_readable = partial(trio.lowlevel.wait_readable, raw)
            seen.append(await woken(wait_readable, partial(server.send, b"x")))
        with socket.create_server((HOST, 0)) as listening_socket:
            first, second = [trio.socket.from_stdlib_socket(listening_socket) for _ in range(2)]
            named: tuple[Callable[[Any], Any], ...] = (
                lambda _: listening_socket,
                lambda _: listening_socket.fileno(),
                lambda _: second,
                lambda _: first,
            )
            for name in named:
                seen += await of_listener(first, name, accepts=True)
        return seen

    over_both(main, request, caplog)


def test_names_keep_no_socket_alive(enabled: None) -> None:
    async def main() -> None:
        with await listening() as listener:
            raw = socket.socket()
            sock = trio.socket.from_stdlib_socket(raw)
            reference, raw_reference, number = weakref.ref(sock), weakref.ref(raw), raw.fileno()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sock.connect, listener.getsockname())
                server, _ = await listener.accept()
            assert is_smc(sock)
            assert find_drop_in(raw) is sock
            assert find_drop_in(number) is sock
            assert number in NUMBERS
            sock.close()
            del sock
            gc.collect()
            assert reference() is None
            assert find_drop_in(raw) is None
            assert find_drop_in(number) is None
            server.close()
            del raw, server
            with trio.fail_after(PATIENCE):
                while raw_reference() is not None:
                    await trio.sleep(0.01)
                    gc.collect()
            assert number not in NUMBERS

    trio.run(main)


def test_a_number_stays_with_the_file_that_has_it() -> None:
    """The program has closed the first socket by its number, and still uses the first wrapper."""
    owners = [frozenset({1}), frozenset({2})]  # of a class with weak references
    with socket.socket() as first, socket.socket() as second:
        number, kept = first.fileno(), os.dup(first.fileno())
        expose(first, owners[0])
        assert [*owners_of(first, number)] == [*owners_of(number, number)] == owners[:1]
        os.dup2(second.fileno(), number)
        assert [*owners_of(first, number)] == [*owners_of(number, number)] == []
        with socket.socket(fileno=number) as replaced:
            expose(replaced, owners[1])
            expose(first, owners[0])
            assert [*owners_of(replaced, number)] == [*owners_of(number, number)] == owners[1:]
            os.dup2(kept, number)
            assert [*owners_of(number, number)] == []
            expose(first, owners[0])
            assert [*owners_of(number, number)] == owners[:1]
            replaced.detach()
        os.close(kept)
    assert [*owners_of(first, -1)] == owners[:1]
    assert [*owners_of(number, number)] == []


def test_an_interrupt_is_raised_while_a_socket_goes_away() -> None:
    owner = frozenset({1})
    with socket.socket() as sock:
        number = sock.fileno()
        expose(sock, owner)
        interrupting = Interrupting(sock)
        assert number in NUMBERS
    sockets = [sock]
    del sock
    with pytest.raises(KeyboardInterrupt):
        remove(sockets)
    assert interrupting() is None
    assert number not in NUMBERS


def test_the_end_of_tcp_ends_no_wait(enabled: None) -> None:
    """Trio's `close` would call the function that `enable` has installed."""

    async def main() -> None:
        async with connected() as (sock, _):
            raw = raw_of(sock)
            found: Any = find_drop_in(raw)
            assert found is sock

            async def close() -> None:
                close_past_program(sock.plain, reset=False)

            outcome: object = "waits"
            with trio.move_on_after(10 * QUIET):
                outcome = await woken(partial(sock.recv, 1), close)
            assert raw.fileno() < 0
            assert outcome != "ClosedResourceError"

    trio.run(main)


ANYIO: Final = """
import sys

if sys.argv[1] == "smc":
    import trio_smc
    trio_smc.enable(trio_smc.Config(learn_short=False, tcp_option="off", require_smc=True))
import anyio
from anyio.abc import SocketAttribute

async def handler(stream):
    async with stream:
        raw = stream.extra(SocketAttribute.raw_socket)
        await anyio.wait_readable(raw)
        await stream.receive()
        await anyio.wait_writable(raw)
        await stream.send(b"answer")
        await stream.receive()

async def main():
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler)
        await anyio.sleep(0.05)
        for name in (lambda raw: raw, lambda raw: raw.fileno()):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                waitable = name(stream.extra(SocketAttribute.raw_socket))
                await stream.send(b"question")
                with anyio.move_on_after(5) as scope:
                    await anyio.wait_readable(waitable)
                    print(await stream.receive())
                print(scope.cancelled_caught)

                async def receive():
                    with anyio.move_on_after(5) as scope:
                        try:
                            print(await stream.receive())
                        except anyio.ClosedResourceError:
                            print("closed")
                    print(scope.cancelled_caught)

                async with anyio.create_task_group() as receivers:
                    receivers.start_soon(receive)
                    await anyio.wait_all_tasks_blocked()
                    await anyio.sleep(0.05)
                    anyio.notify_closing(waitable)
                await stream.send(b"the end")
        group.cancel_scope.cancel()

anyio.run(main, backend="trio")
"""


def test_anyio() -> None:
    """AnyIO imports Trio's functions by name, so the program enables SMC-R before."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", ANYIO, each], stdout=subprocess.PIPE, check=True, text=True
        ).stdout
        for each in ("tcp", "smc")
    ]
    assert outputs[0].splitlines() == ["b'answer'", "False", "closed", "False"] * 2
    assert outputs[1] == outputs[0]
