"""Calls in the wrong order or by two tasks, and sockets as objects: answered as over TCP.

Each case is a sequence of calls, and runs over TCP on sockets of Trio, and over SMC-R.  Compared
are the outcomes as in `tests.sockets.test_misuse`: types, error numbers and texts.
"""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import socket as stdlib
import warnings
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import anyio.abc
import pytest
import trio
from anyio._backends._trio import SocketStream as AnyioStream
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.ports import reserved_port
from tests.sockets.test_as_over_tcp import HOST, LINGER_0, Ends, connected
from tests.sockets.test_misuse import Comparison, outcome
from tests.timing import PATIENCE

_QUIET: Final = 0.002
_PATIENT: Final = 0.1
"""Seconds without a runnable task, for calls that wait for a thread or for the kernel."""


_CALL: Final = operator.methodcaller("__call__")


class Notes:
    """The outcomes of the calls of a case."""

    def __init__(self, ends: Ends) -> None:
        self.found: list[object] = []
        self.describe = Comparison(ends)

    async def of(self, *calls: Callable[[], Any], quiet: float = _QUIET) -> None:
        """Make the calls, one after the other."""
        for call in calls:
            self.found.append(await outcome(_CALL, call, self.describe, quiet))

    async def of_two(self, first: Callable[[], Any], second: Callable[[], Any]) -> None:
        """Make a call that waits, and another one by another task."""
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with suppress(OSError, trio.TrioInternalError, trio.ClosedResourceError):
                    await first()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked(_QUIET)
            await self.of(second)
            nursery.cancel_scope.cancel()


LIBRARY: Final[Any] = trio
"""Without types: some calls are wrong."""
Case = Callable[[Notes, Ends], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}


def case(function: Case) -> Case:
    """Add a case, named after the function."""
    CASES[function.__name__] = function
    return function


# --- a socket in the wrong state -----------------------------------------------------------------


@case
async def listen_again(note: Notes, ends: Ends) -> None:
    with trio.socket.socket() as sock:
        await note.of(sock.listen, lambda: sock.listen(0), lambda: sock.listen(-1))
        await note.of(
            lambda: sock.bind((HOST, 0)),
            lambda: sock.connect((HOST, 1)),
            lambda: sock.connect(ends.listener.getsockname()),
            sock.getpeername,
            lambda: sock.recv(1),
            lambda: sock.send(b"x"),
            lambda: trio.SocketStream(sock).receive_some(),
            lambda: trio.SocketStream(sock).send_all(b"x"),
            lambda: trio.SocketStream(sock).send_eof(),
            lambda: trio.SocketStream(sock).wait_send_all_might_not_block(),
        )
        await note.of_two(sock.accept, sock.accept)
        await note.of(lambda: sock.shutdown(stdlib.SHUT_RD), sock.accept, sock.listen)
    await note.of(sock.listen, sock.accept)


@case
async def bind_too_late(note: Notes, ends: Ends) -> None:
    for sock in (ends.client, ends.server, ends.listener):
        await note.of(partial(sock.bind, (HOST, 0)), sock.listen)
    ends.client.shutdown(stdlib.SHUT_WR)
    await note.of(lambda: ends.client.bind((HOST, 0)), ends.client.listen)
    ends.client.shutdown(stdlib.SHUT_RD)
    await note.of(lambda: ends.client.bind((HOST, 0)), ends.client.listen)
    with trio.socket.socket() as sock:
        await note.of(
            lambda: sock.bind(ends.listener.getsockname()),
            lambda: sock.bind(("192.0.2.1", 0)),
            lambda: sock.bind((HOST, 0)),
            lambda: sock.bind((HOST, 0)),
        )


@case
async def connect_to_nothing(note: Notes, ends: Ends) -> None:
    with reserved_port() as free, trio.socket.socket() as sock:
        note.describe.name(free, "free")
        for address in ((HOST, free), (HOST, 0), ("0.0.0.0", free), ("255.255.255.255", 1)):
            await note.of(partial(sock.connect, address), quiet=_PATIENT)
    with reserved_port() as free:
        note.describe.name(free, "free")
        await note.of(
            lambda: LIBRARY.open_tcp_stream(HOST, free),
            lambda: LIBRARY.open_tcp_stream(HOST, free, local_address="127.0.0.2"),
            lambda: LIBRARY.open_tcp_stream(HOST, free, happy_eyeballs_delay=None),
            lambda: anyio.connect_tcp(HOST, free),
            quiet=_PATIENT,
        )


@case
async def connect_again(note: Notes, ends: Ends) -> None:
    name = ends.listener.getsockname()
    for sock in (ends.client, ends.client, ends.server):
        await note.of(
            partial(sock.connect, (HOST, 1)),
            partial(sock.connect, name),
            partial(sock.connect, ("::1", 1)),
            sock.accept,
        )


@case
async def use_a_new_socket(note: Notes, ends: Ends) -> None:
    for number in range(14):
        with trio.socket.socket() as sock:
            stream = trio.SocketStream(sock)
            calls: tuple[Callable[[], Any], ...] = (
                stream.receive_some, partial(stream.send_all, b"x"), partial(stream.send_all, b""),
                stream.send_eof, stream.wait_send_all_might_not_block, sock.wait_writable,
                sock.is_readable, partial(LIBRARY.lowlevel.wait_readable, sock), sock.accept,
                partial(sock.shutdown, 0), partial(sock.shutdown, 1), partial(sock.shutdown, 2),
                partial(trio.SocketListener, sock),
                partial(LIBRARY.serve_listeners, _ignore, [sock]),
            )  # fmt: skip
            await note.of(calls[number], calls[number], stream.aclose, stream.aclose)


async def _ignore(_: object) -> None:
    pass


@case
async def use_a_closed_socket(note: Notes, ends: Ends) -> None:
    stream = trio.SocketStream(ends.client)
    await stream.aclose()
    await note.of(
        lambda: trio.lowlevel.notify_closing(ends.client),
        lambda: trio.SocketListener(ends.client),
        lambda: AnyioStream(ends.client).receive(),
        lambda: AnyioStream(ends.client).send(b"x"),
        lambda: AnyioStream(ends.client).send_eof(),
    )


# --- two tasks -----------------------------------------------------------------------------------


def _calls_that_wait(ends: Ends, *, receiving: bool) -> dict[str, Callable[[], Any]]:
    sock, stream = ends.client, trio.SocketStream(ends.client)
    if receiving:
        return {
            "recv": lambda: sock.recv(1),
            "recv_into": lambda: sock.recv_into(bytearray(1)),
            "recvfrom": lambda: sock.recvfrom(1),
            "recvmsg": lambda: sock.recvmsg(1),
            "peek": lambda: sock.recv(1, stdlib.MSG_PEEK),
            "wait_readable": lambda: LIBRARY.lowlevel.wait_readable(sock),
            "receive_some": stream.receive_some,
        }
    return {
        "send": lambda: sock.send(b"x"),
        "sendmsg": lambda: sock.sendmsg([b"x"]),
        "sendto": lambda: sock.sendto(b"x", (HOST, 1)),
        "send_all": lambda: stream.send_all(b"x"),
        "send_nothing": lambda: stream.send_all(b""),
        "wait_writable": sock.wait_writable,
        "lowlevel": lambda: LIBRARY.lowlevel.wait_writable(sock),
        "might_not_block": stream.wait_send_all_might_not_block,
        "send_eof": stream.send_eof,
    }


def _two_tasks(first: str, second: str, *, receiving: bool) -> Case:
    async def run(note: Notes, ends: Ends) -> None:
        if not receiving:
            await _fill(ends.client)
        calls = _calls_that_wait(ends, receiving=receiving)
        await note.of_two(calls[first], calls[second])

    return run


async def _fill(sock: Any) -> None:
    """Send until a send waits."""
    sock.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_SNDBUF, 1 << 16)
    with trio.CancelScope() as scope:

        async def stop() -> None:
            await wait_all_tasks_blocked(0.02)
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            while True:
                await sock.send(bytes(1 << 16))


for _first in ("recv", "receive_some", "wait_readable"):
    for _second in ("recv", "recv_into", "recvfrom", "recvmsg", "peek", "wait_readable",
                    "receive_some"):  # fmt: skip
        CASES[f"{_first}-and-{_second}"] = _two_tasks(_first, _second, receiving=True)
for _first in ("send", "send_all", "wait_writable", "might_not_block"):
    for _second in ("send", "sendmsg", "sendto", "send_all", "send_nothing", "wait_writable",
                    "lowlevel", "might_not_block", "send_eof"):  # fmt: skip
        CASES[f"{_first}-and-{_second}"] = _two_tasks(_first, _second, receiving=False)


@case
async def two_tasks_of_anyio(note: Notes, ends: Ends) -> None:
    stream = AnyioStream(ends.client)
    await note.of_two(stream.receive, stream.receive)


@case
async def two_tasks_of_a_listener(note: Notes, ends: Ends) -> None:
    listener = trio.SocketListener(ends.listener)
    await note.of_two(listener.accept, listener.accept)
    await note.of_two(listener.accept, ends.listener.accept)


# --- a socket as an object -----------------------------------------------------------------------


@case
async def use_sockets_as_objects(note: Notes, ends: Ends) -> None:
    for sock in (ends.client, ends.server, ends.listener):
        await note.of(
            partial(isinstance, sock, trio.socket.SocketType),
            partial({sock, ends.client}.__contains__, sock),
            partial(operator.eq, sock, sock),
            partial(operator.eq, sock, ends.client),
            partial(operator.is_, weakref.ref(sock)(), sock),
            partial(bool, sock),
            partial(pickle.dumps, sock),
            partial(copy.deepcopy, sock),
            partial(operator.attrgetter("family"), copy.copy(sock)),
            partial(pickle.dumps, trio.SocketStream(sock)),
            partial(len, sock),
            partial(operator.attrgetter("family", "type", "proto"), sock),
        )


@case
async def use_a_copy(note: Notes, ends: Ends) -> None:
    same = copy.copy(ends.client)
    await note.of(partial(same.send, b"x"), partial(ends.server.recv, 10), same.getpeername)
    same.close()
    await note.of(ends.client.fileno, partial(ends.client.recv, 1), partial(ends.server.recv, 1))


@case
async def use_attributes(note: Notes, ends: Ends) -> None:
    names = {name for name in dir(stdlib.socket) if not name.startswith("__")}
    names |= {name for name in dir(trio.socket.SocketType) if not name.startswith("__")}
    for name in sorted(name for name in names if not name.startswith("_")):

        def read(name: str = name) -> object:
            value = getattr(ends.client, name)
            return "a method" if callable(value) else value

        def write(name: str = name) -> object:
            setattr(ends.server, name, getattr(ends.server, name))
            return None

        await note.of(read)
        if name in ("family", "type", "proto", "did_shutdown_SHUT_WR"):
            await note.of(write)
            await note.of(partial(setattr, ends.client, name, 1))
            await note.of(partial(delattr, ends.client, name))


@case
async def leave_a_block(note: Notes, ends: Ends) -> None:
    with ends.client as same:
        await note.of(lambda: same is ends.client)
    await note.of(ends.client.__enter__, ends.client.fileno, lambda: ends.client.recv(1))
    with pytest.raises(ZeroDivisionError), ends.server:
        raise ZeroDivisionError
    await note.of(ends.server.fileno)


@case
async def drop_a_socket(note: Notes, ends: Ends) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends.client = None
        gc.collect()
    note.found.append([each.category.__name__ for each in caught])
    await note.of(lambda: ends.server.recv(1))


# --- AnyIO ---------------------------------------------------------------------------------------


_ATTRIBUTES: Final = ("family", "local_address", "local_port", "remote_address", "remote_port")


def _read_attributes(close: Callable[[Ends], Any]) -> Case:
    async def run(note: Notes, ends: Ends) -> None:
        stream = AnyioStream(ends.client)
        close(ends)
        await ends.settle()
        for name in _ATTRIBUTES:
            if name.startswith("remote") and close is _end_both:
                continue  # docs/programs.md
            attribute = getattr(anyio.abc.SocketAttribute, name)
            await note.of(partial(stream.extra, attribute))
            await note.of(partial(stream.extra, attribute, None))

    return run


def _nothing(ends: Ends) -> None:
    pass


def _close_server(ends: Ends) -> None:
    ends.server.close()


def _close_client(ends: Ends) -> None:
    ends.client.close()


def _close_both(ends: Ends) -> None:
    ends.server.close()
    ends.client.close()


def _end_both(ends: Ends) -> None:
    ends.client.shutdown(stdlib.SHUT_WR)
    ends.server.close()


def _reset(ends: Ends) -> None:
    ends.server.setsockopt(*LINGER_0)
    ends.server.close()


def _shut_both(ends: Ends) -> None:
    ends.client.shutdown(stdlib.SHUT_RDWR)


for _close in (
    _nothing, _close_server, _close_client, _close_both, _end_both, _reset, _shut_both,
):  # fmt: skip
    CASES[f"attributes{_close.__name__}"] = _read_attributes(_close)


# --- functions that `enable` replaces ------------------------------------------------------------


@case
async def call_replaced_functions(note: Notes, ends: Ends) -> None:
    odd: tuple[Any, ...] = (None, "x", -1, 1.5, [], object, 2**40, 12345)
    for value in odd:
        await note.of(
            # In this order: after a wait for -1, Trio breaks down at `notify_closing`.
            partial(LIBRARY.lowlevel.notify_closing, value),
            partial(LIBRARY.lowlevel.wait_readable, value),
            partial(LIBRARY.socket.from_stdlib_socket, value),
            partial(LIBRARY.socket.fromfd, value, stdlib.AF_INET, stdlib.SOCK_STREAM),
            partial(LIBRARY.SocketStream, value),
            partial(LIBRARY.SocketListener, value),
            partial(LIBRARY.socket.socket, fileno=value or -1),
        )
        if value not in (-1, 12345):
            await note.of(partial(LIBRARY.socket.socket, value))
            await note.of(partial(LIBRARY.socket.socket, stdlib.AF_INET, value))
        await note.of(partial(LIBRARY.socket.socket, stdlib.AF_INET, 1, value))
        if value is not None:
            await note.of(partial(LIBRARY.open_tcp_stream, value, 1), quiet=_PATIENT)
        await note.of(partial(LIBRARY.open_tcp_stream, HOST, value), quiet=_PATIENT)
    await note.of(
        partial(LIBRARY.serve_listeners, _ignore, []),
        partial(LIBRARY.serve_listeners, _ignore, None),
        partial(LIBRARY.serve_listeners, _ignore, [None]),
        partial(LIBRARY.serve_listeners, _ignore, ends.listener),
        partial(LIBRARY.serve_listeners, None, [LIBRARY.SocketListener(ends.listener)]),
        partial(LIBRARY.SocketListener, ends.client),
        LIBRARY.SocketStream(ends.listener).receive_some,
        partial(LIBRARY.socket.from_stdlib_socket, ends.client),
        LIBRARY.open_tcp_stream,
        LIBRARY.serve_listeners,
    )


# --- the comparison ------------------------------------------------------------------------------


async def observe(*, smc: bool) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for name, run in CASES.items():
        async with connected(smc=smc) as ends:
            note = Notes(ends)
            with trio.fail_after(PATIENCE):
                await run(note, ends)
            found[name] = note.found
            if ends.client is None:
                ends.client = trio.socket.socket()
    return found


def test_misuse_in_sequence() -> None:
    over_tcp = trio.run(lambda: observe(smc=False))
    trio_smc.enable(trio_smc.Config(require_smc=True))
    try:
        over_smc = trio.run(lambda: observe(smc=True))
    finally:
        trio_smc.disable()
    assert all(over_tcp.values()), "a case has recorded no outcome, so it cannot fail"
    different = [
        f"{name}-{number}:\n  TCP   {one}\n  SMC-R {other}"
        for name in CASES
        for number, (one, other) in enumerate(zip(over_tcp[name], over_smc[name], strict=True))
        if one != other
    ]
    assert not different, f"{len(different)} differ:\n" + "\n".join(different)
