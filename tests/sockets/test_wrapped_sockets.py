"""Sockets of the standard library that a program wraps, and goes on to use itself.

Trio's socket is a thin object around such a socket: a program may wrap one socket several times,
close it, or use it in the next Trio run.  Each program here runs with plain Trio and under
`enable()`, and observes the same.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.timing import PATIENCE

HOST: Final = "127.0.0.1"
QUIET: Final = 0.005
"""Seconds without a runnable task after which a call counts as waiting."""
DEFER_ACCEPT: Final = (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)
CONFIG: Final = trio_smc.Config(learn_short=False, tcp_option="off")

Program = Callable[[], Any]
PROGRAMS: Final[dict[str, Program]] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def in_one_run(function: Callable[[], Awaitable[Any]]) -> Program:
    async def main() -> Any:
        with trio.fail_after(PATIENCE):
            return await function()

    name: str = getattr(function, "__name__", "")
    PROGRAMS[name] = lambda: trio.run(main)  # looked up when `enable` has replaced it
    return PROGRAMS[name]


async def request(address: Any) -> bytes:
    """A client: send a byte, and return the answer."""
    with trio.socket.socket() as client:
        await client.connect(address)
        await client.send(b"?")
        return bytes(await client.recv(1))


async def answer(listener: Any) -> None:
    """Accept one client, and answer it."""
    sock, _ = await listener.accept()
    with sock:
        await sock.send(await sock.recv(1))


async def serve_one(listener: Any, address: Any) -> bytes:
    """A client and its server."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, listener)
        return await request(address)


async def outcome_of(call: Callable[[], Awaitable[Any]]) -> object:
    """The result of a call, the name of its exception, or "waits"."""
    outcome: object = "waits"
    with trio.move_on_after(PATIENCE) as scope:
        async with trio.open_nursery() as nursery:

            async def make() -> None:
                nonlocal outcome
                try:
                    outcome = await call()
                except Exception as error:
                    outcome = type(error).__name__
                nursery.cancel_scope.cancel()

            nursery.start_soon(make)
            await wait_all_tasks_blocked(QUIET)
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught
    return outcome


@in_one_run
async def a_client_whose_socket_the_program_closes() -> list[object]:
    """The wrapper is collected later."""
    seen: list[object] = []
    with socket.create_server((HOST, 0)) as listening:
        address, listener = listening.getsockname(), trio.socket.from_stdlib_socket(listening)
        for ending in ("close", "detach", "shutdown"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, listener)
                raw = socket.socket()
                wrapped = trio.socket.from_stdlib_socket(raw)
                await wrapped.connect(address)
                await wrapped.send(b"?")
                seen.append(await wrapped.recv(1))
                if ending == "close":
                    raw.close()
                elif ending == "detach":
                    os.close(raw.detach())
                del wrapped
                gc.collect()
                raw.close()
            seen.append(await serve_one(listener, address))  # the run goes on
    return seen


@in_one_run
async def listening_sockets_that_the_program_closes() -> list[object]:
    """Each has the descriptor number of the one before."""
    seen: list[object] = []
    for _ in range(3):
        with socket.create_server((HOST, 0)) as listening:
            listener = trio.socket.from_stdlib_socket(listening)
            seen.append(await serve_one(listener, listening.getsockname()))
    return seen


@in_one_run
async def a_listening_socket_with_the_number_of_another_one() -> list[object]:
    """The program has closed the first by its number; the second keeps its own options."""
    seen: list[object] = []
    for replaced in (False, True):
        with socket.create_server((HOST, 0)) as first, socket.create_server((HOST, 0)) as second:
            first.setsockopt(*DEFER_ACCEPT, 10)
            wrapped = trio.socket.from_stdlib_socket(first)
            seen.append(await serve_one(wrapped, first.getsockname()))
            os.dup2(second.fileno(), first.fileno(), inheritable=False)
            if replaced:
                wrapped = trio.socket.from_stdlib_socket(first)
                seen.append(await serve_one(wrapped, second.getsockname()))
            wrapped.close()
            seen += [first.fileno(), second.getsockopt(*DEFER_ACCEPT)]
            wrapped = trio.socket.from_stdlib_socket(second)
            seen.append(await serve_one(wrapped, second.getsockname()))
    return seen


@in_one_run
async def a_number_that_another_file_has() -> list[object]:
    """The program waits for a socket with the number of a closed listening socket."""
    seen: list[object] = []
    for _ in range(3):
        with socket.create_server((HOST, 0)) as listening:
            await serve_one(trio.socket.from_stdlib_socket(listening), listening.getsockname())
        ours, theirs = map(trio.socket.from_stdlib_socket, socket.socketpair())
        with ours, theirs:
            seen.append(await outcome_of(partial(ours.recv, 1)))
            await theirs.send(b"x")
            seen.append(await outcome_of(partial(ours.recv, 1)))
    return seen


@in_one_run
async def one_listening_socket_wrapped_for_each_client() -> list[object]:
    seen: list[object] = []
    with socket.create_server((HOST, 0)) as listening:
        for keep in (False, True):
            kept = []
            for _ in range(4):
                wrapped = trio.socket.from_stdlib_socket(listening)
                seen.append(await serve_one(wrapped, listening.getsockname()))
                if keep:
                    kept.append(wrapped)
                del wrapped
                gc.collect()
        seen.append(listening.fileno() >= 0)
    return seen


@in_one_run
async def two_wrappers_that_accept() -> list[object]:
    with socket.create_server((HOST, 0)) as listening:
        wrappers = [trio.socket.from_stdlib_socket(listening) for _ in range(2)]
        seen: list[object] = []

        async def accept(wrapper: Any) -> None:
            seen.append(await outcome_of(wrapper.accept))

        async with trio.open_nursery() as nursery:
            for wrapper in wrappers:
                nursery.start_soon(accept, wrapper)
        seen.append(await serve_one(wrappers[0], listening.getsockname()))
        return [*sorted(map(str, seen))]


@program
def one_listening_socket_in_three_runs() -> list[object]:
    seen: list[object] = []
    with socket.create_server((HOST, 0)) as listening:
        for _ in range(3):
            wrapped = partial(trio.socket.from_stdlib_socket, listening)

            async def main(wrap: Callable[[], Any] = wrapped) -> bytes:
                with trio.fail_after(PATIENCE):
                    return await serve_one(wrap(), listening.getsockname())

            seen += [trio.run(main), listening.fileno() >= 0]
    return seen


@program
def one_listener_of_trio_in_three_runs() -> list[object]:
    kept: list[Any] = []

    async def main(last: bool) -> bytes:
        with trio.fail_after(PATIENCE):
            if not kept:
                kept.append(trio.socket.socket())
                await kept[0].bind((HOST, 0))
                kept[0].listen()
            answered = await serve_one(kept[0], kept[0].getsockname())
        if last:
            kept[0].close()
        return answered

    return [trio.run(main, last) for last in (False, False, True)]


@in_one_run
async def waiting_for_a_listener() -> list[object]:
    """`wait_readable` before and after calls of `accept`, with the socket and its number."""
    seen: list[object] = []
    with trio.socket.socket() as listener:
        await listener.bind((HOST, 0))
        listener.listen()
        for _ in range(2):
            for waitable in (listener, listener.fileno()):
                wait = partial(trio.lowlevel.wait_readable, waitable)
                seen.append(await outcome_of(wait))
                async with trio.open_nursery() as nursery:

                    async def server(wait: Callable[[], Awaitable[None]] = wait) -> None:
                        await wait()
                        await answer(listener)

                    nursery.start_soon(server)
                    seen.append(await request(listener.getsockname()))
    return seen


@in_one_run
async def ending_the_waits_of_a_listener() -> list[object]:
    """`notify_closing` ends calls that wait, and the listener can be used again."""
    seen: list[object] = []
    with trio.socket.socket() as listener:
        await listener.bind((HOST, 0))
        listener.listen()
        for call in (listener.accept, partial(trio.lowlevel.wait_readable, listener)):

            async def make(call: Callable[[], Awaitable[Any]] = call) -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await call()
                seen.append("ended")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(make)
                await wait_all_tasks_blocked(QUIET)
                trio.lowlevel.notify_closing(listener)
            seen.append(await serve_one(listener, listener.getsockname()))
    return seen


@in_one_run
async def a_listener_that_is_detached() -> list[object]:
    seen: list[object] = []
    for accepts in (False, True):
        listener = trio.socket.socket()
        await listener.bind((HOST, 0))
        listener.listen()
        address = listener.getsockname()
        if accepts:
            seen.append(await serve_one(listener, address))
        with socket.socket(fileno=listener.detach()) as raw:
            seen += [listener.fileno(), raw.getsockname() == address]
            seen.append(await serve_one(trio.socket.from_stdlib_socket(raw), address))
    return seen


@pytest.mark.filterwarnings("ignore:unclosed stream:ResourceWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_observes_the_same_as_with_trio(
    name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    reference = PROGRAMS[name]()
    assert reference
    request.getfixturevalue("enabled")
    assert PROGRAMS[name]() == reference
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
