"""Wrong and unusual arguments, and calls in the wrong state: answered as over TCP.

Each row is one call, made over TCP on sockets of Trio, and over SMC-R.  Compared are the result
with its type, or the exception's type, number and text, whether it is raised by the call itself or
by its `await`, and what is left to read at both ends.  Most rows are made by code: each method of a
socket, each argument of it, each odd value, in each state of the socket.
"""

from __future__ import annotations

import os
import re
import socket as stdlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.sockets.test_as_over_tcp import HOST, LINGER_0, Ends, connected, unconnected
from tests.timing import PATIENCE

_QUIET: Final = 0.002
"""Seconds without a runnable task after which a call counts as waiting."""
_FOR_EVER: Final = 0.2
"""Seconds after which a call counts as waiting although it has not stopped to try."""
_LOOKUP: Final = 1.0
"""Seconds that a thread may take to look a name up."""
Call = Callable[[Any], Any]
"""Makes the call of a row at a socket or a stream."""


# --- values --------------------------------------------------------------------------------------


class Index:
    """No integer, but usable as one."""

    def __index__(self) -> int:
        return 3


class WrongIndex:
    """Fails when it is used as an integer."""

    def __index__(self) -> int:
        raise RuntimeError("no index")


class Subclass(int):
    """An integer of another class."""


class Number:
    """Usable by `int`, but not as an index."""

    def __int__(self) -> int:
        return 3


def _released() -> memoryview:
    view = memoryview(bytearray(3))
    view.release()
    return view


VALUES: Final[dict[str, Callable[[], Any]]] = {
    "None": lambda: None,
    "text": lambda: "x",
    "empty-text": lambda: "",
    "bytes": lambda: b"x",
    "no-bytes": lambda: b"",
    "bytearray": lambda: bytearray(b"xyz"),
    "read-only-view": lambda: memoryview(b"xyz"),
    "strided-view": lambda: memoryview(bytearray(b"xyzxyz"))[::2],
    "view-of-integers": lambda: memoryview(bytearray(8)).cast("I"),
    "released-view": _released,
    "fraction": lambda: 1.5,
    "zero": lambda: 0,
    "one": lambda: 1,
    "minus-one": lambda: -1,
    "99": lambda: 99,
    "C-int-too-large": lambda: 2**31,
    "huge": lambda: 2**62,
    "too-huge": lambda: 2**64,
    "true": lambda: True,
    "index": Index,
    "wrong-index": WrongIndex,
    "subclass": lambda: Subclass(3),
    "number": Number,
    "object": lambda: int,
    "list": list,
    "list-of-text": lambda: ["x"],
    "list-of-bytes": lambda: [b"xy", b"z"],
    "list-of-bytearrays": lambda: [bytearray(2), bytearray(1)],
    "tuple": lambda: (HOST,),
    "tuple-of-text": lambda: (HOST, "x"),
    "port-too-large": lambda: (HOST, 70000),
    "port-negative": lambda: (HOST, -1),
    "port-text": lambda: (HOST, "80x"),
    "port-fraction": lambda: (HOST, 1.5),
    "port-None": lambda: (HOST, None),
    "host-None": lambda: (None, 1),
    "host-bytes": lambda: (HOST.encode(), 1),
    "host-number": lambda: (1, 1),
    "three": lambda: (HOST, 1, 2),
    "list-address": lambda: [HOST, 1],
    "refused": lambda: (HOST, 1),
    "ancillary": lambda: [(1, 2, b"x")],
    "short-ancillary": lambda: [(1, 2)],
    "wrong-ancillary": lambda: [("x", 2, b"x")],
}


FLAGS: Final = {
    name: getattr(stdlib, name)
    for name in dir(stdlib)
    if name.startswith("MSG_") and name != "MSG_ERRQUEUE"  # docs/programs.md
}
_INTEGERS: Final = (
    "None", "text", "bytes", "fraction", "zero", "one", "minus-one", "99", "C-int-too-large",
    "huge", "too-huge", "true", "index", "wrong-index", "subclass", "number", "object", "list",
)  # fmt: skip
_SIZES: Final = tuple(name for name in _INTEGERS if name != "C-int-too-large")  # 2 GiB each
_BUFFERS: Final = (
    "None", "text", "bytes", "no-bytes", "bytearray", "read-only-view", "strided-view",
    "view-of-integers", "released-view", "one", "object", "list", "list-of-bytes",
)  # fmt: skip
_LISTS: Final = (
    "None", "text", "empty-text", "bytes", "no-bytes", "one", "object", "list", "list-of-text",
    "list-of-bytes", "list-of-bytearrays", "bytearray", "tuple",
)  # fmt: skip
_ADDRESSES: Final = (
    "None", "text", "empty-text", "bytes", "one", "object", "list", "tuple", "tuple-of-text",
    "port-too-large", "port-negative", "port-text", "port-fraction", "port-None", "host-None",
    "host-bytes", "host-number", "three", "list-address", "refused",
)  # fmt: skip
_ANCILLARY: Final = (
    "None",
    "text",
    "one",
    "list",
    "ancillary",
    "short-ancillary",
    "wrong-ancillary",
    "list-of-bytes",
)
_USUAL_MISTAKES: Final = (
    "-None", "-text", "-one", "-minus-one", "-index", "-huge", "-list", "-object", "-refused",
)  # fmt: skip
"""The endings of rows for sockets that are not connected."""
_LOOKUPS: Final = (
    "-tuple-of-text", "-port-text", "-port-None", "-port-fraction", "-host-None", "-host-bytes",
    "-host-number", "-refused",
)  # fmt: skip
_Kind = tuple[str, ...]
_ADDRESS: Final = (HOST, 1)
_OPTION: Final = (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE)

METHODS: Final[dict[str, tuple[tuple[Callable[[], Any], _Kind], ...]]] = {
    "recv": ((lambda: 4, _SIZES), (lambda: 0, _INTEGERS)),
    "recvfrom": ((lambda: 4, _SIZES), (lambda: 0, _INTEGERS)),
    "recv_into": (
        (lambda: bytearray(8), _BUFFERS), (lambda: 4, _INTEGERS), (lambda: 0, _INTEGERS),
    ),
    "recvfrom_into": (
        (lambda: bytearray(8), _BUFFERS), (lambda: 4, _INTEGERS), (lambda: 0, _INTEGERS),
    ),
    "recvmsg": ((lambda: 4, _SIZES), (lambda: 0, _SIZES), (lambda: 0, _INTEGERS)),
    "recvmsg_into": (
        (lambda: [bytearray(4)], _LISTS), (lambda: 0, _SIZES), (lambda: 0, _INTEGERS),
    ),
    "send": ((lambda: b"abc", _BUFFERS), (lambda: 0, _INTEGERS)),
    "sendto": ((lambda: b"abc", _BUFFERS), (lambda: 0, _INTEGERS), (lambda: _ADDRESS, _ADDRESSES)),
    "sendmsg": (
        (lambda: [b"abc"], _LISTS), (list, _ANCILLARY), (lambda: 0, _INTEGERS),
        (lambda: None, _ADDRESSES),
    ),
    "bind": ((lambda: (HOST, 0), _ADDRESSES),),
    "connect": ((lambda: "x", _ADDRESSES),),
    "listen": ((lambda: 4, _INTEGERS),),
    "shutdown": ((lambda: 2, _INTEGERS),),
    "getsockopt": (
        (lambda: _OPTION[0], _INTEGERS), (lambda: _OPTION[1], _INTEGERS), (lambda: 4, _INTEGERS),
    ),
    "setsockopt": (
        (lambda: _OPTION[0], _INTEGERS), (lambda: _OPTION[1], _INTEGERS),
        (lambda: 1, tuple(dict.fromkeys(_INTEGERS + _BUFFERS))), (lambda: None, _INTEGERS),
    ),
    "set_inheritable": ((lambda: False, _INTEGERS),),
    "accept": (), "close": (), "detach": (), "dup": (), "fileno": (), "get_inheritable": (),
    "getpeername": (), "getsockname": (), "is_readable": (), "wait_writable": (),
    "__enter__": (),
    "__exit__": ((lambda: None, ("None",)),) * 3,
}  # fmt: skip
"""The usual value of each argument, and the names of odd ones."""


# --- rows ----------------------------------------------------------------------------------------

Rows = dict[str, Call]

LISTED: Final = re.compile(
    # MSG_ERRQUEUE, which is a bit of -1
    r"recv(from)?-1-minus-one|recv(from)?_into-2-minus-one"
    r"|sendto-1-minus-one"  # MSG_FASTOPEN
    r"|(detach|dup)-(0-arguments|all-named)"
    r"|receive_some-0-(index|wrong-index|huge|too-huge)"
    r"|send_all-0-strided-view"
)
"""Rows with differences of docs/programs.md."""


def _call(method: str, *makers: Callable[[], Any], **named: Callable[[], Any]) -> Call:
    def call(sock: Any) -> object:
        options = {name: make() for name, make in named.items()}
        result = getattr(sock, method)(*(make() for make in makers), **options)
        if method == "detach":
            os.close(result)
        return result >= 0 if method in ("detach", "fileno") else result

    return call


def _always(value: object) -> Callable[[], object]:
    return lambda: value


def _odd_values(methods: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    for method, arguments in methods.items():
        usual = [make for make, _ in arguments]
        for position, (_, names) in enumerate(arguments):
            for name in names:
                made = [*usual[:position], VALUES[name], *usual[position + 1 :]]
                yield f"{method}-{position}-{name}", _call(method, *made)
                # Without the later arguments, which have defaults.
                if position + 1 < len(usual) and name in ("None", "one", "index", "huge"):
                    yield f"{method}-{position}-{name}-only", _call(method, *made[: position + 1])


def _both(first: str, second: str) -> Call:
    async def call(stream: Any) -> object:
        outcomes = []
        for name in (first, second):
            try:
                outcomes.append(await getattr(stream, name)())
            except Exception as error:
                outcomes.append(repr(error))
        return outcomes

    return call


def _wrong_numbers(
    methods: dict[str, Any], kind: type = trio.socket.SocketType
) -> Iterator[tuple[str, Call]]:
    """Too few and too many arguments, and arguments by name."""
    for method, arguments in methods.items():
        usual = [make for make, _ in arguments]
        for count in range(len(usual) + 1):
            yield f"{method}-{count}-arguments", _call(method, *usual[:count])
        yield f"{method}-one-more", _call(method, *usual, lambda: 0)
        yield f"{method}-an-unknown-name", _call(method, *usual, other=lambda: 1)
        code = getattr(kind, method).__code__
        names = code.co_varnames[1 : code.co_argcount]
        for number, (name, make) in enumerate(zip(names, usual, strict=False)):
            yield f"{method}-named-{name}", _call(method, *usual[:number], **{name: make})
        yield f"{method}-all-named", _call(method, **dict(zip(names, usual, strict=False)))


def _without_data(call: Call) -> Call:
    """With MSG_TRUNC, the bytes of the result are undefined."""

    async def receive(sock: Any) -> object:
        result = await call(sock)
        if isinstance(result, bytes):
            return len(result)
        return (len(result[0]), *result[1:]) if isinstance(result, tuple) else result

    return receive


_ERROR_QUEUE: Final = 13  # the bit MSG_ERRQUEUE: docs/programs.md


def _bits() -> Iterator[tuple[str, Call]]:
    """Each bit of the flags, with and without a meaning."""
    for bit in map(_always, (1 << number for number in range(31) if number != _ERROR_QUEUE)):
        for method in ("recv", "send"):
            yield f"{method}-{bit():#x}", _call(method, METHODS[method][0][0], bit)
        for method in ("recvmsg", "sendmsg"):
            usual, second = (make for make, _ in METHODS[method][:2])
            yield f"{method}-{bit():#x}", _call(method, usual, second, bit)


def _flags() -> Iterator[tuple[str, Call]]:
    for name, flag in FLAGS.items():
        for number in (flag, int(flag)):
            kind = type(number).__name__
            for method in ("recv", "recvfrom", "recv_into", "recvfrom_into", "send"):
                usual = METHODS[method][0][0]
                more: tuple[Any, ...] = (lambda: 4,) if method.endswith("into") else ()
                yield f"{method}-{name}-{kind}", _call(method, usual, *more, _always(number))
            for method in ("recvmsg", "recvmsg_into", "sendmsg"):
                usual, second = (make for make, _ in METHODS[method][:2])
                yield f"{method}-{name}-{kind}", _call(method, usual, second, _always(number))


SOCKET_ROWS: Final[Rows] = dict(_odd_values(METHODS))
CALL_ROWS: Final[Rows] = dict(_wrong_numbers(METHODS))
IPV6_ROWS: Final[Rows] = {
    f"{method}-{address!r}": _call(method, *before, _always(address))
    for method, *before in (
        ("bind",), ("connect",), ("sendto", _always(b"abc")),
        ("sendmsg", _always([b"abc"]), _always([]), _always(0)),
    )
    for address in (
        ("::1", 1), ("::1", 1, 0), ("::1", 1, 0, 0), ("::1", 1, 0, 0, 0), ("::1", 1, "x"),
        ("::1", 1, -1), ("::1", 1, 2**21), ("::1", 1, 0, -1), ("::1", 1, 0, 2**32),
        ("::1", 1, 0, 99), ("::1", 70000, 0, 0), ("fe80::1", 1), ("::ffff:127.0.0.1", 1),
    )
}  # fmt: skip
BIT_ROWS: Final[Rows] = {
    name: _without_data(call) if name.endswith("-0x20") else call for name, call in _bits()
}
_ADDRESSED: Final = tuple(
    f"{method}-{METHODS[method].index(argument)}-"
    for method in ("bind", "connect", "sendto", "sendmsg")
    for argument in METHODS[method]
    if argument[1] is _ADDRESSES
)
FLAG_ROWS: Final[Rows] = {
    name: _without_data(call) if name.startswith("recv") and "TRUNC" in name else call
    for name, call in _flags()
}

STREAM_METHODS: Final[dict[str, tuple[tuple[Callable[[], Any], _Kind], ...]]] = {
    "receive_some": ((lambda: 4, _SIZES),),
    "send_all": ((lambda: b"abc", (*_BUFFERS, "list-of-bytearrays")),),
    "setsockopt": METHODS["setsockopt"],
    "getsockopt": METHODS["getsockopt"],
    "send_eof": (), "aclose": (), "wait_send_all_might_not_block": (), "__aenter__": (),
    "__aexit__": ((lambda: None, ("None",)),) * 3,
}  # fmt: skip
LISTENER_METHODS: Final[dict[str, tuple[tuple[Callable[[], Any], _Kind], ...]]] = {
    "accept": (), "aclose": (), "__aenter__": (), "__aexit__": ((lambda: None, ("None",)),) * 3,
}  # fmt: skip
_ENDINGS: Final = ("receive_some", "send_eof", "aclose", "wait_send_all_might_not_block")
STREAM_ROWS: Final[Rows] = dict(_odd_values(STREAM_METHODS))
STREAM_CALL_ROWS: Final[Rows] = {
    **dict(_wrong_numbers(STREAM_METHODS, trio.SocketStream)),
    **{f"{first}-{then}": _both(first, then) for first, then in product(_ENDINGS, repeat=2)},
}
LISTENER_ROWS: Final[Rows] = dict(_wrong_numbers(LISTENER_METHODS, trio.SocketListener))
STATES: Final = ("connected", "closed", "shut", "new", "listening")


@asynccontextmanager
async def place(state: str, *, smc: bool) -> AsyncIterator[tuple[Ends, Any]]:
    """Ends whose client is in this state; the server has sent ten bytes."""
    if state in ("new", "listening"):
        async with unconnected(smc=smc) as ends:
            if state == "listening":
                await ends.client.bind((HOST, 0))
                ends.client.listen()
            yield ends, ends.client
        return
    async with connected(smc=smc) as ends:
        await ends.server.send(b"0123456789")
        await ends.settle()
        if state == "closed":
            ends.client.close()
        elif state == "shut":
            await ends.client.recv(20)
            ends.client.shutdown(stdlib.SHUT_RDWR)
        yield ends, ends.client


@asynccontextmanager
async def stream_place(state: str, *, smc: bool) -> AsyncIterator[tuple[Ends, trio.SocketStream]]:
    """Ends with a stream of the client in this state; the server has sent ten bytes."""
    async with connected(smc=smc) as ends:
        stream = trio.SocketStream(ends.client)
        await ends.server.send(b"0123456789")
        await ends.settle()
        if state == "closed":
            await stream.aclose()
        if state in ("ended", "both-ended"):
            await stream.send_eof()
        if state == "reset":
            ends.server.setsockopt(*LINGER_0)
        if state in ("peer-closed", "both-ended", "reset"):
            ends.server.close()
        await ends.settle()
        yield ends, stream


@asynccontextmanager
async def wrapped_place(state: str, *, smc: bool) -> AsyncIterator[tuple[Ends, Any]]:
    """Ends that the standard library has connected, which stay on TCP, in a state of `place`."""
    async with unconnected(smc=smc) as ends:
        with stdlib.create_server((HOST, 0)) as listener:
            pair = stdlib.create_connection(listener.getsockname()), listener.accept()[0]
        ends.client.close()
        ends.client, ends.server = map(trio.socket.from_stdlib_socket, pair)
        assert not smc or ends.client.stream.mode is trio_smc.Mode.TCP
        await ends.server.send(b"0123456789")
        if state == "closed":
            ends.client.close()
        yield ends, ends.client


class Ipv6Ends(Ends):
    """Ends of IPv6."""

    def __init__(self) -> None:
        super().__init__()
        for sock in (self.listener, self.client):
            sock.close()
        self.listener, self.client = (trio.socket.socket(stdlib.AF_INET6) for _ in range(2))

    async def connect(self) -> None:
        await self.listener.bind(("::1", 0))
        self.listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.accept_one)
            await self.client.connect(self.listener.getsockname())


@asynccontextmanager
async def ipv6_place(state: str, *, smc: bool) -> AsyncIterator[tuple[Ends, Any]]:
    """Ends of IPv6 in a state of `place`."""
    ends = Ipv6Ends()
    try:
        if state == "connected":
            await ends.connect()
            assert not smc or ends.client.stream.mode is trio_smc.Mode.SMC_R
            await ends.server.send(b"0123456789")
        yield ends, ends.client
    finally:
        ends.close()


STREAM_STATES: Final = ("connected", "closed", "ended", "peer-closed", "both-ended", "reset")


@asynccontextmanager
async def listener_place(
    state: str, *, smc: bool
) -> AsyncIterator[tuple[Ends, trio.SocketListener]]:
    """Ends with a listener in this state."""
    async with connected(smc=smc) as ends:
        listener = trio.SocketListener(ends.listener)
        if state == "closed":
            await listener.aclose()
        elif state == "shut":
            ends.listener.shutdown(stdlib.SHUT_RD)
        yield ends, listener


class Comparison:
    """Describes outcomes without the numbers that differ from run to run."""

    def __init__(self, ends: Ends) -> None:
        self._ports: dict[str, str] = {}
        for name in ("listener", "client", "server"):
            sock = getattr(ends, name, None)
            if sock is not None and sock.fileno() >= 0 and (port := sock.getsockname()[1]):
                self._ports.setdefault(str(port), name)

    def name(self, port: int, name: str) -> None:
        """Replace a port by a name from now on."""
        self._ports[str(port)] = name

    def text(self, text: str) -> str:
        """Without ports, descriptors and addresses in memory."""
        text = re.sub(r"\b\d{4,5}\b", lambda found: self._ports.get(found[0], found[0]), text)
        text = re.sub(r"fd=\d+", "fd=N", text)
        text = text.replace("DropInSocket", "_SocketType")  # docs/programs.md
        return re.sub(r"0x[0-9a-f]{6,}", "0xN", text)

    def error(self, error: BaseException | None) -> object:
        """The class, number and text, and the cause of an error that is no OSError."""
        if error is None:
            return None
        cause = None if isinstance(error, OSError) else error.__cause__
        if isinstance(error, BaseExceptionGroup):
            return type(error).__name__, str(error), [*map(self.error, error.exceptions)]
        return (
            type(error).__name__, getattr(error, "errno", None), self.text(str(error)),
            self.error(cause),
        )  # fmt: skip

    def value(self, value: object) -> object:
        """The type and the value."""
        if isinstance(value, (trio.socket.SocketType, stdlib.socket)):
            value.close()
            return "a socket"
        if isinstance(value, (trio.SocketStream, trio.SocketListener)):
            return type(value).__name__
        if isinstance(value, (tuple, list)):
            return type(value).__name__, [*map(self.value, value)]
        return type(value).__name__, self.text(repr(value))


_HARMLESS: Final = {"TypeError", "ValueError", "OverflowError", "BufferError", "MemoryError"}
"""Errors of calls that did nothing."""


async def outcome(
    call: Call, sock: Any, describe: Comparison, quiet: float = _QUIET
) -> tuple[str, object]:
    """Make a call.  Returns where it ended, and a description of its result or error."""
    found: list[tuple[str, object]] = []

    async def make() -> None:
        at = "called"
        try:
            result = call(sock)
            if isinstance(result, Awaitable):
                at = "awaited"
                result = await result
            found.append((at, describe.value(result)))
        except Exception as error:
            found.append((at, describe.error(error)))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make)
        # Trio repeats a call for ever if the kernel has nothing for it on a readable socket.
        with trio.move_on_after(max(_FOR_EVER, 2 * quiet)):
            await wait_all_tasks_blocked(quiet)
        nursery.cancel_scope.cancel()
    return found[0] if found else ("awaited", "waits")


async def _left(ends: Ends, describe: Comparison) -> object:
    """The data that is left to read at both ends."""
    left: dict[str, object] = {}

    async def read(name: str) -> None:
        left[name] = await outcome(lambda sock: sock.recv(100), getattr(ends, name), describe)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "client")
        nursery.start_soon(read, "server")
    return sorted(left.items())


async def observe(rows: Rows, state: str, open_place: Any, *, smc: bool) -> dict[str, object]:
    """Make the calls of all rows, each on new sockets if the call before had an effect."""
    observed: dict[str, object] = {}
    left = list(rows)
    while left:
        with trio.fail_after(PATIENCE):
            async with open_place(state, smc=smc) as (here, subject):
                describe = Comparison(here)
                while left:
                    name = left.pop(0)
                    # A thread looks the name of a host or port up.
                    quiet = _LOOKUP if name.endswith(_LOOKUPS) else _QUIET
                    at, what = await outcome(rows[name], subject, describe, quiet)
                    if isinstance(what, tuple) and what[0] in _HARMLESS:
                        observed[name] = at, what
                        continue
                    rest: object = None
                    if state not in ("new", "listening", "closed", "open"):
                        await here.settle()
                        rest = await _left(here, describe)
                    observed[name] = at, what, rest
                    break
    return observed


def _same(over_tcp: Any, over_smc: Any) -> bool:
    return bool(over_tcp == over_smc)


def _same_but_texts_of_signatures(over_tcp: Any, over_smc: Any) -> bool:
    """True if both are equal, or both are a TypeError."""
    both = over_tcp, over_smc
    return over_tcp == over_smc or all(what[1][0] == "TypeError" for what in both)


def compare(
    rows: Rows,
    state: str,
    same: Callable[[Any, Any], bool] = _same,
    open_place: Any = place,
) -> None:
    """Make all calls over both transports."""
    over_tcp = trio.run(lambda: observe(rows, state, open_place, smc=False))
    trio_smc.enable(trio_smc.Config(require_smc=open_place is not wrapped_place))
    try:
        over_smc = trio.run(lambda: observe(rows, state, open_place, smc=True))
    finally:
        trio_smc.disable()
    assert len(over_tcp) == len(rows)
    different = [
        name
        for name in rows
        if not same(over_tcp[name], over_smc[name]) and not LISTED.fullmatch(name)
    ]
    assert not different, f"{len(different)} of {len(rows)}:\n" + "\n".join(
        f"{name}:\n  TCP   {over_tcp[name]}\n  SMC-R {over_smc[name]}" for name in different
    )


def _usual_mistakes(rows: Rows) -> Rows:
    return {name: call for name, call in rows.items() if name.endswith(_USUAL_MISTAKES)}


def test_each_method_has_rows() -> None:
    methods = {
        name
        for name in dir(trio.socket.SocketType)
        if callable(getattr(trio.socket.SocketType, name)) and not name.startswith("_")
    }
    assert methods == {name for name in METHODS if not name.startswith("_")}


@pytest.mark.timeout(4 * PATIENCE)
def test_odd_arguments_of_connected_sockets() -> None:
    compare(SOCKET_ROWS, "connected")


@pytest.mark.parametrize("state", STATES[1:])
def test_odd_arguments_of_other_sockets(state: str) -> None:
    compare(_usual_mistakes(SOCKET_ROWS), state)


@pytest.mark.parametrize("state", ["connected", "closed"])
def test_odd_arguments_of_sockets_that_stay_on_tcp(state: str) -> None:
    compare(_usual_mistakes(SOCKET_ROWS), state, open_place=wrapped_place)


@pytest.mark.parametrize("state", STATES)
def test_wrong_numbers_of_arguments(state: str) -> None:
    compare(CALL_ROWS, state, _same_but_texts_of_signatures)


@pytest.mark.parametrize("state", STREAM_STATES)
def test_odd_arguments_of_streams(state: str) -> None:
    rows = STREAM_ROWS if state == "connected" else _usual_mistakes(STREAM_ROWS)
    compare(rows, state, open_place=stream_place)


@pytest.mark.parametrize("state", STREAM_STATES)
def test_calls_of_streams(state: str) -> None:
    compare(STREAM_CALL_ROWS, state, _same_but_texts_of_signatures, stream_place)


@pytest.mark.parametrize("state", ["open", "closed", "shut"])
def test_calls_of_listeners(state: str) -> None:
    compare(LISTENER_ROWS, state, _same_but_texts_of_signatures, listener_place)


def test_bits_of_flags() -> None:
    compare(BIT_ROWS, "connected")


@pytest.mark.parametrize("state", ["connected", "new"])
def test_addresses_of_ipv6(state: str) -> None:
    rows = {name: call for name, call in SOCKET_ROWS.items() if name.startswith(_ADDRESSED)}
    compare({**rows, **IPV6_ROWS}, state, open_place=ipv6_place)


@pytest.mark.parametrize("state", ["connected", "shut"])
def test_flags(state: str) -> None:
    rows = {name: call for name, call in FLAG_ROWS.items() if state == "connected" or "int" in name}
    compare(rows, state)
