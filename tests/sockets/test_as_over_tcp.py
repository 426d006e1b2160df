"""The calls of `trio.socket` over SMC-R and over TCP: the same results, the same errors.

Each case is a sequence of calls at the two ends of a connection.  A test runs each case once over
TCP, on sockets of Trio, and once over SMC-R, and compares the results and exceptions of the calls.
docs/programs.md lists the differences that remain; these cases avoid them.
"""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import operator
import select
import socket as stdlib
import struct
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, Literal, Protocol

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import trio_smc
from tests.ports import reserved_port
from tests.timing import PATIENCE
from trio_smc.sockets.drop_in import DropInSocket

HOST: Final = "127.0.0.1"
Case = Callable[["Ends"], Awaitable[None]]
CASES: Final[dict[str, Case]] = {}


class OpenEnds(Protocol):
    """Makes two ends, and closes them at the end of the block."""

    def __call__(self, *, smc: bool) -> AbstractAsyncContextManager[Ends]: ...


LINGER_0: Final = stdlib.SOL_SOCKET, stdlib.SO_LINGER, struct.pack("ii", 1, 0)
_QUIET: Final = 0.002
"""Seconds without a runnable task after which a call counts as waiting."""


class Ends:
    """The two ends of a connection, and the outcomes of the calls of a case.

    Attributes:
      records: the outcomes, and other observations of the case.
      listener, client, server: the sockets.
    """

    def __init__(self) -> None:
        self.records: list[object] = []
        self.listener: Any = trio.socket.socket()
        self.client: Any = trio.socket.socket()
        self.server: Any = None

    async def connect(self) -> None:
        await self.listener.bind((HOST, 0))
        self.listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.accept_one)
            await self.client.connect(self.listener.getsockname())

    async def accept_one(self) -> None:
        self.server, _ = await self.listener.accept()

    async def record(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Make a call, and record its outcome."""
        self.records.append(await self.outcome(call, *arguments))

    async def outcome(self, call: Callable[..., Any], *arguments: Any) -> object:
        """Make a call.  Returns its result, the kind of its exception, or "waits"."""
        outcomes: list[object] = []

        async def make() -> None:
            try:
                result = call(*arguments)
                if isinstance(result, Awaitable):
                    result = await result
                outcomes.append(result)
            except Exception as error:
                outcomes.append(kind(error))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await wait_all_tasks_blocked(_QUIET)
            nursery.cancel_scope.cancel()
        return outcomes[0] if outcomes else "waits"

    async def record_during(self, waiting: Callable[[], Any], then: Callable[[], Any]) -> None:
        """Record the outcome of a call that waits, before and after a call of ``then``."""
        outcomes: list[object] = []

        async def wait() -> None:
            try:
                outcomes.append(await waiting())
            except Exception as error:
                outcomes.append(kind(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked(_QUIET)
            self.records.append("waits" if not outcomes else outcomes.pop())
            result = then()
            if isinstance(result, Awaitable):
                await result
            await wait_all_tasks_blocked(_QUIET)
            self.records.append(outcomes[0] if outcomes else "still waits")
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Wait until all sent data has arrived."""
        await wait_all_tasks_blocked(_QUIET)

    def close(self) -> None:
        for each in (self.client, self.server, self.listener):
            if each is not None:
                each.close()


def kind(error: BaseException) -> tuple[str, int | None, object]:
    """The class of an exception, its error number, and the kind of its cause.

    The cause of an OSError does not count: over TCP there is none, and over SMC-R it is an error of
    the stream.
    """
    cause = None if isinstance(error, OSError) else error.__cause__
    if cause is error:
        return type(error).__name__, None, "itself"
    return type(error).__name__, getattr(error, "errno", None), cause and kind(cause)


def case(function: Case) -> Case:
    """Add a case, named after the function."""
    CASES[function.__name__.replace("_", "-")] = function
    return function


# --- receiving -----------------------------------------------------------------------------------


async def _nothing(ends: Ends) -> None:
    pass


async def _data(ends: Ends) -> None:
    await ends.client.send(b"0123456789")


async def _end(ends: Ends) -> None:
    ends.client.shutdown(stdlib.SHUT_WR)


async def _data_and_end(ends: Ends) -> None:
    await _data(ends)
    await _end(ends)


async def _shut(ends: Ends) -> None:
    ends.server.shutdown(stdlib.SHUT_RD)


async def _data_and_shut(ends: Ends) -> None:
    await _data(ends)
    await ends.settle()
    await _shut(ends)


async def _shut_and_data(ends: Ends) -> None:
    await _shut(ends)
    await _data(ends)


async def _shut_both(ends: Ends) -> None:
    await _data(ends)
    await ends.settle()
    ends.server.shutdown(stdlib.SHUT_RDWR)


async def _urgent(ends: Ends) -> None:
    await ends.client.send(b"ab")
    await ends.client.send(b"cd!", stdlib.MSG_OOB)


async def _urgent_inline(ends: Ends) -> None:
    ends.server.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_OOBINLINE, 1)
    await _urgent(ends)


async def _closed(ends: Ends) -> None:
    await _data(ends)
    ends.server.close()


STATES: Final = (
    _nothing, _data, _end, _data_and_end, _shut, _data_and_shut, _shut_and_data, _shut_both,
    _urgent, _urgent_inline, _closed,
)  # fmt: skip
FLAGS: Final = {
    "none": 0,
    "PEEK": stdlib.MSG_PEEK,
    "DONTWAIT": stdlib.MSG_DONTWAIT,
    "WAITALL": stdlib.MSG_WAITALL,
    "TRUNC": stdlib.MSG_TRUNC,
    "PEEK-TRUNC": stdlib.MSG_PEEK | stdlib.MSG_TRUNC,
    "PEEK-DONTWAIT": stdlib.MSG_PEEK | stdlib.MSG_DONTWAIT,
    "PEEK-WAITALL": stdlib.MSG_PEEK | stdlib.MSG_WAITALL,
    "OOB": stdlib.MSG_OOB,
    "OOB-PEEK": stdlib.MSG_OOB | stdlib.MSG_PEEK,
    "CMSG_CLOEXEC": stdlib.MSG_CMSG_CLOEXEC,
    "others": stdlib.MSG_NOSIGNAL
    | stdlib.MSG_EOR
    | stdlib.MSG_MORE
    | stdlib.MSG_DONTROUTE
    | stdlib.MSG_CONFIRM,
    "wrong": "x",
}
SIZES: Final = {"3": 3, "0": 0, "all": 100, "-1": -1, "huge": 2**70, "wrong": "x"}


def _hide_discarded(data: bytes, flags: object) -> object:
    """Replace the data of a call with MSG_TRUNC, which is undefined, by its length."""
    return len(data) if isinstance(flags, int) and flags & stdlib.MSG_TRUNC else data


async def _recv(sock: Any, size: Any, flags: Any) -> object:
    return _hide_discarded(await sock.recv(size, flags), flags)


async def _recv_into(sock: Any, size: Any, flags: Any) -> object:
    buffer = bytearray(b"." * 20)
    return await sock.recv_into(buffer, size, flags), bytes(buffer)


async def _recvfrom(sock: Any, size: Any, flags: Any) -> object:
    data, address = await sock.recvfrom(size, flags)
    return _hide_discarded(data, flags), address


async def _recvfrom_into(sock: Any, size: Any, flags: Any) -> object:
    buffer = bytearray(b"." * 20)
    return *(await sock.recvfrom_into(buffer, size, flags)), bytes(buffer)


async def _recvmsg(sock: Any, size: Any, flags: Any) -> object:
    data, *rest = await sock.recvmsg(size, 0, flags)
    return _hide_discarded(data, flags), *rest


async def _recvmsg_into(sock: Any, size: Any, flags: Any) -> object:
    buffers = [bytearray(b"." * 2), bytearray(), bytearray(b"." * size)]
    return *(await sock.recvmsg_into(iter(buffers), 0, flags)), buffers


RECEIVERS: Final = (_recv, _recv_into, _recvfrom, _recvfrom_into, _recvmsg, _recvmsg_into)


def _receiving_case(prepare: Any, receive: Any, size: Any, flags: Any) -> Case:
    async def receiving(ends: Ends) -> None:
        await prepare(ends)
        await ends.settle()
        await ends.record(receive, ends.server, size, flags)
        # Read the rest, unless an urgent byte is lost or discarded (docs/programs.md).
        if prepare not in (_urgent, _urgent_inline) or flags == 0:
            await ends.record(ends.server.recv, 100)
        await ends.record(ends.server.is_readable)

    return receiving


for _state, _receiver in itertools.product(STATES, RECEIVERS):
    _few = _receiver in (_recvfrom, _recvfrom_into, _recvmsg_into)
    _combined = [("3", "none"), ("3", "PEEK"), ("3", "OOB"), ("0", "none"), ("all", "OOB")]
    if _state in (_nothing, _data, _end, _closed):
        _combined += [(size, "none") for size in SIZES]
    if not _few:
        _combined += [("3", flags) for flags in FLAGS] + [("0", "OOB")]
    for _size, _flags in dict.fromkeys(_combined):
        CASES[f"{_receiver.__name__[1:]}-{_state.__name__[1:]}-{_size}-{_flags}"] = _receiving_case(
            _state, _receiver, SIZES[_size], FLAGS[_flags]
        )


@case
async def receive_into_a_structure(ends: Ends) -> None:
    class Header(ctypes.Structure):
        _fields_ = (("kind", ctypes.c_uint16), ("length", ctypes.c_uint16))

    await ends.client.send(b"\1\0\2\0rest")
    header = Header()
    await ends.record(ends.server.recv_into, header)
    ends.records.append((header.kind, header.length))
    for buffer in (array.array("I", [0]), b"read-only", memoryview(bytearray(8))[::2], None):
        await ends.record(ends.server.recv_into, buffer)


@case
async def resize_a_buffer_during_a_call(ends: Ends) -> None:
    for method in ("recv_into", "recvfrom_into"):
        for before, after in ((4, 8), (8, 4), (4, 0)):
            buffer = bytearray(before)

            async def change_and_send(buffer: bytearray = buffer, after: int = after) -> None:
                buffer[:] = bytes(after)
                await ends.client.send(b"0123456789")

            async def receive(buffer: bytearray = buffer, method: str = method) -> object:
                return await getattr(ends.server, method)(buffer), bytes(buffer)

            await ends.record_during(receive, change_and_send)
            await ends.record(ends.server.recv, 100)


@case
async def request_more_than_a_buffer_holds_during_a_call(ends: Ends) -> None:
    buffer = bytearray(8)

    async def change_and_send() -> None:
        del buffer[4:]
        await ends.client.send(b"0123456789")

    await ends.record_during(lambda: ends.server.recv_into(buffer, 8), change_and_send)
    await ends.record(ends.server.recv, 100)


@case
async def stop_at_the_mark(ends: Ends) -> None:
    ends.server.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_OOBINLINE, 1)
    await ends.client.send(b"abc!", stdlib.MSG_OOB)
    await ends.settle()
    await ends.record(ends.server.recv, 100, stdlib.MSG_PEEK)
    await ends.record(ends.server.recv, 2)
    await ends.record(ends.server.recv, 100)
    await ends.record(ends.server.recv, 100, stdlib.MSG_PEEK)
    await ends.record(ends.server.recv, 100)
    await ends.client.send(b"later")
    await ends.record(ends.server.recv, 100)


@case
async def wait_for_an_urgent_byte_that_was_taken(ends: Ends) -> None:
    await ends.record(ends.server.recv, 1, stdlib.MSG_OOB)
    await ends.client.send(b"!", stdlib.MSG_OOB)
    await ends.settle()
    for _ in range(2):
        await ends.record(ends.server.recv, 1, stdlib.MSG_OOB)


# --- sending -------------------------------------------------------------------------------------


async def _shut_for_writing(ends: Ends) -> None:
    ends.client.shutdown(stdlib.SHUT_WR)


async def _sender_closed(ends: Ends) -> None:
    ends.client.close()


SENDERS_STATES: Final = (_nothing, _shut_for_writing, _sender_closed)
SEND_FLAGS: Final = {
    "none": 0,
    "MORE": stdlib.MSG_MORE,
    "EOR": stdlib.MSG_EOR,
    "DONTWAIT-NOSIGNAL": stdlib.MSG_DONTWAIT | stdlib.MSG_NOSIGNAL,
    "ZEROCOPY": 0x4000000,
    "of-receiving": stdlib.MSG_PEEK | stdlib.MSG_TRUNC | stdlib.MSG_WAITALL,
    "others": stdlib.MSG_DONTROUTE | stdlib.MSG_CONFIRM,
    "wrong": "x",
}
SENT: Final[dict[str, Callable[[], Any]]] = {
    "bytes": lambda: b"abc",
    "nothing": lambda: b"",
    "bytearray": lambda: bytearray(b"abc"),
    "view": lambda: memoryview(b"abc"),
    "strided-view": lambda: memoryview(b"abcdef")[::2],
    "array": lambda: array.array("I", [1, 2]),
    "structure": lambda: (ctypes.c_uint16 * 2)(1, 2),
    "text": lambda: "abc",
    "None": lambda: None,
}


def _sending_case(prepare: Any, send: Callable[[Any], Any]) -> Case:
    async def sending(ends: Ends) -> None:
        await prepare(ends)
        await ends.record(send, ends.client)
        await ends.settle()
        if prepare is not _sender_closed:
            await ends.record(ends.server.recv, 100, stdlib.MSG_DONTWAIT)

    return sending


for _state in SENDERS_STATES:
    for _name, _make in SENT.items():
        for _flags, _number in SEND_FLAGS.items():
            if _flags == "none" or _name in ("bytes", "nothing"):
                # With some flags, only a second send posts the data of the first one.
                async def _send(sock: Any, make: Any = _make, flags: Any = _number) -> object:
                    sent = await sock.send(make(), flags)
                    return sent, await sock.send(b"-")

                CASES[f"send-{_state.__name__[1:]}-{_name}-{_flags}"] = _sending_case(_state, _send)

        async def _send_urgent(sock: Any, make: Any = _make) -> object:
            return await sock.send(make(), stdlib.MSG_OOB)

        CASES[f"send-{_state.__name__[1:]}-{_name}-OOB"] = _sending_case(_state, _send_urgent)
    _addressed: dict[str, tuple[Any, ...]] = {
        "address": (b"abc", (HOST, 1)),
        "flags-and-address": (b"abc", 0, (HOST, 1)),
        "urgent": (b"abc", stdlib.MSG_OOB, (HOST, 1)),
        "None": (b"abc", None),
        "no-address": (b"abc",),
        "nothing": (),
        "too-many": (b"abc", 0, 0, (HOST, 1)),
        "wrong-address": (b"abc", (HOST, 1, 2, 3)),
        "wrong-port": (b"abc", (HOST, 70000)),
        "wrong-flags": (b"abc", "x", (HOST, 1)),
    }
    for _name, _arguments in _addressed.items():

        async def _sendto(sock: Any, arguments: Any = _arguments) -> object:
            return await sock.sendto(*arguments)

        CASES[f"sendto-{_state.__name__[1:]}-{_name}"] = _sending_case(_state, _sendto)
    _messages: dict[str, tuple[Any, ...]] = {
        "buffers": ([b"abc", bytearray(b"def")],),
        "no-buffers": ([],),
        "empty-buffers": ([b"", b""],),
        "rights": ([b"abc"], [(stdlib.SOL_SOCKET, stdlib.SCM_RIGHTS, array.array("i", [0]))]),
        "other-level": ([b"abc"], [(stdlib.IPPROTO_TCP, 1, b"1234")]),
        "unknown": ([b"abc"], [(stdlib.SOL_SOCKET, 999, b"1234")]),
        "wrong-ancillary": ([b"abc"], [(1, 2)]),
        "flags": ([b"abc"], [], stdlib.MSG_MORE),
        "wrong-flags": ([b"abc"], [], "x"),
        "address": ([b"abc"], [], 0, (HOST, 1)),
        "wrong-address": ([b"abc"], [], 0, (HOST, 70000)),
        "one-buffer": (b"abc",),
        "text": (["abc"],),
    }
    for _name, _arguments in _messages.items():

        async def _sendmsg(sock: Any, arguments: Any = _arguments) -> object:
            return await sock.sendmsg(*arguments), await sock.send(b"-")

        CASES[f"sendmsg-{_state.__name__[1:]}-{_name}"] = _sending_case(_state, _sendmsg)


@case
async def more_to_come(ends: Ends) -> None:
    await ends.record(ends.client.send, b"a", stdlib.MSG_MORE)
    await ends.record(ends.client.sendmsg, [b"b"], [], stdlib.MSG_MORE)
    await ends.record(ends.server.is_readable)
    await ends.record(ends.client.send, b"c")
    await ends.settle()
    await ends.record(ends.server.recv, 100)
    for finish in (
        lambda: ends.client.send(b"", stdlib.MSG_MORE),
        lambda: ends.client.shutdown(stdlib.SHUT_WR),
    ):
        await ends.record(ends.client.send, b"d", stdlib.MSG_MORE)
        await ends.record(finish)
    with trio.fail_after(PATIENCE):
        rest = b""
        while piece := await ends.server.recv(100):
            rest += piece
    ends.records.append(rest)


@case
async def more_to_come_and_nothing_comes(ends: Ends) -> None:
    await ends.record(ends.client.send, b"a", stdlib.MSG_MORE)
    with trio.fail_after(PATIENCE):
        ends.records.append(await ends.server.recv(100))


# --- shutting down, closing, waiting -------------------------------------------------------------


async def _fill(sock: Any) -> None:
    """Send until a send waits.  `tests.streams.stream_pairs` explains the options."""
    sock.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_SNDBUF, 1 << 18)
    with trio.CancelScope() as scope:

        async def stop() -> None:
            await wait_all_tasks_blocked(0.05)
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            while True:
                await sock.send(bytes(1 << 16), stdlib.MSG_EOR)
    sock.setsockopt(stdlib.IPPROTO_TCP, stdlib.TCP_NOTSENT_LOWAT, 1)


def _lowlevel(name: str, sock: object) -> Any:
    """Call a function of `trio.lowlevel`, which `enable` may have replaced."""
    return getattr(trio.lowlevel, name)(sock)


ENDINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "close": lambda sock: sock.close(),
    "SHUT_RD": lambda sock: sock.shutdown(stdlib.SHUT_RD),
    "SHUT_WR": lambda sock: sock.shutdown(stdlib.SHUT_WR),
    "SHUT_RDWR": lambda sock: sock.shutdown(stdlib.SHUT_RDWR),
    "notify_closing": lambda sock: _lowlevel("notify_closing", sock),
    "notify_closing-number": lambda sock: _lowlevel("notify_closing", sock.fileno()),
    "notify_closing-and-close": lambda sock: (_lowlevel("notify_closing", sock), sock.close()),
}
WAITS: Final[dict[str, Callable[[Any], Any]]] = {
    "recv": lambda sock: sock.recv(10),
    "recv-PEEK": lambda sock: sock.recv(10, stdlib.MSG_PEEK),
    "recv_into": lambda sock: sock.recv_into(bytearray(10)),
    "recvmsg": lambda sock: sock.recvmsg(10),
    "wait_readable": lambda sock: _lowlevel("wait_readable", sock),
    "wait_readable-number": lambda sock: _lowlevel("wait_readable", sock.fileno()),
    "receive_some": lambda sock: trio.SocketStream(sock).receive_some(10),
}
FULL_WAITS: Final[dict[str, Callable[[Any], Any]]] = {
    "send": lambda sock: sock.send(b"abc"),
    "sendmsg": lambda sock: sock.sendmsg([b"abc"]),
    "wait_writable": operator.methodcaller("wait_writable"),
    "lowlevel.wait_writable": lambda sock: _lowlevel("wait_writable", sock),
    "send_all": lambda sock: trio.SocketStream(sock).send_all(b"abc"),
}


def _ending_case(wait: Any, end: Any, *, full: bool) -> Case:
    async def ending(ends: Ends) -> None:
        if full:
            await _fill(ends.client)
        await ends.record_during(lambda: wait(ends.client), lambda: end(ends.client))
        if not full:
            await ends.record(wait, ends.client)
            await ends.record(ends.client.send, b"x")

    return ending


for _name, _end_it in ENDINGS.items():
    for _wait, _call in WAITS.items():
        CASES[f"{_wait}-during-{_name}"] = _ending_case(_call, _end_it, full=False)
    for _wait, _call in FULL_WAITS.items():
        if _name != "SHUT_RD":  # SHUT_RD has no effect on sending
            CASES[f"{_wait}-during-{_name}"] = _ending_case(_call, _end_it, full=True)


@case
async def close_a_listener_during_accept(ends: Ends) -> None:
    await ends.record_during(ends.listener.accept, ends.listener.close)
    await ends.record(ends.listener.accept)


@case
async def accept_twice(ends: Ends) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.outcome, ends.listener.accept)
        await trio.testing.wait_all_tasks_blocked()
        await ends.record(ends.listener.accept)


@case
async def shut_down_again(ends: Ends) -> None:
    for flag in (
        stdlib.SHUT_WR,
        stdlib.SHUT_WR,
        stdlib.SHUT_RD,
        stdlib.SHUT_RDWR,
        3,
        -1,
        "x",
        None,
    ):
        await ends.record(ends.client.shutdown, flag)
        ends.records.append(ends.client.did_shutdown_SHUT_WR)
    await ends.record(ends.server.recv, 10)
    ends.server.shutdown(stdlib.SHUT_WR)
    await ends.settle()
    for sock in (ends.client, ends.server):
        await ends.record(sock.shutdown, stdlib.SHUT_WR)
        await ends.record(sock.recv, 10)


@case
async def shut_down_both_with_unread_data(ends: Ends) -> None:
    await ends.client.send(b"unread")
    await ends.settle()
    ends.server.shutdown(stdlib.SHUT_RDWR)
    await ends.record(ends.client.recv, 10)
    await ends.record(ends.server.send, b"x")
    for _ in range(2):
        await ends.record(ends.server.recv, 10)


# Events at a socket that has shut down both directions, and the later results at both ends.
_SHUT_BOTH: Final = {
    "RDWR": (stdlib.SHUT_RDWR,),
    "RD-WR": (stdlib.SHUT_RD, stdlib.SHUT_WR),
    "WR-RD": (stdlib.SHUT_WR, stdlib.SHUT_RD),
}


async def _send_late(ends: Ends) -> None:
    await ends.client.send(b"late")


async def _send_urgent_late(ends: Ends) -> None:
    await ends.client.send(b"late", stdlib.MSG_OOB)


async def _send_late_and_shut(ends: Ends) -> None:
    await _send_late(ends)
    await _end(ends)


async def _send_late_and_close(ends: Ends) -> None:
    await _send_late(ends)
    ends.client.close()


async def _peer_closes(ends: Ends) -> None:
    ends.client.close()


async def _peer_resets(ends: Ends) -> None:
    ends.client.setsockopt(*LINGER_0)
    ends.client.close()


async def _resets(ends: Ends) -> None:
    ends.server.setsockopt(*LINGER_0)
    ends.server.close()


_OPTIONS: Final = (
    *((stdlib.SOL_SOCKET, getattr(stdlib, name)) for name in (
        "SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_REUSEADDR", "SO_REUSEPORT", "SO_ACCEPTCONN",
        "SO_BROADCAST", "SO_KEEPALIVE", "SO_PRIORITY", "SO_MARK", "SO_OOBINLINE", "SO_ERROR",
        "SO_RCVLOWAT", "SO_DONTROUTE",
    )),
    *((stdlib.IPPROTO_TCP, getattr(stdlib, name)) for name in (
        "TCP_CORK", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT",
        "TCP_DEFER_ACCEPT", "TCP_SYNCNT",
    )),
    (stdlib.IPPROTO_IP, stdlib.IP_TOS),
    (stdlib.IPPROTO_IP, stdlib.IP_TTL),
    (stdlib.SOL_SOCKET, 250),  # no option has this number
)  # fmt: skip


@case
async def options_after_a_reset(ends: Ends) -> None:
    ends.server.setsockopt(stdlib.IPPROTO_IP, stdlib.IP_TOS, 0x20)
    await _peer_resets(ends)
    await ends.settle()
    for level, option in _OPTIONS:
        await ends.record(ends.server.getsockopt, level, option)
    await ends.record(ends.server.getsockopt, stdlib.SOL_SOCKET, stdlib.SO_LINGER, 8)
    await ends.record(ends.server.getsockopt, stdlib.IPPROTO_TCP, stdlib.TCP_INFO, 1)
    await ends.record(ends.server.getsockopt, stdlib.SOL_SOCKET, stdlib.SO_TYPE, 2)
    for level, option, value in (
        (stdlib.IPPROTO_TCP, stdlib.TCP_KEEPIDLE, -1),
        (stdlib.IPPROTO_TCP, stdlib.TCP_KEEPCNT, 500),
        (stdlib.IPPROTO_IP, stdlib.IP_TTL, 300),
        (stdlib.IPPROTO_IP, stdlib.IP_TTL, 7),
        (stdlib.SOL_SOCKET, stdlib.SO_LINGER, b"1"),
        (stdlib.SOL_SOCKET, stdlib.SO_TYPE, 1),
        (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1),
        (stdlib.SOL_SOCKET, 250, 1),
    ):
        await ends.record(ends.server.setsockopt, level, option, value)
    for level, option in _OPTIONS:
        await ends.record(ends.server.getsockopt, level, option)


LATE: Final = (
    _nothing, _send_late, _send_urgent_late, _send_late_and_shut, _send_late_and_close,
    _peer_closes, _peer_resets, _resets, _end,
)  # fmt: skip


def _late_case(flags: tuple[int, ...], act: Any, first: int, *, unread: bool) -> Case:
    async def late(ends: Ends) -> None:
        if unread:
            await ends.client.send(b"unread")
            await ends.settle()
        for flag in flags:
            ends.server.shutdown(flag)
        await ends.settle()
        await ends.record(act, ends)
        await ends.settle()
        for sock in (ends.server, ends.client):
            calls = [
                sock.is_readable,
                lambda sock=sock: sock.recv(10),
                lambda sock=sock: sock.send(b"x"),
                lambda sock=sock: sock.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_ERROR),
                lambda sock=sock: sock.shutdown(stdlib.SHUT_WR),
                lambda sock=sock: sock.getpeername()[0],
                lambda sock=sock: sock.getsockname()[0],
            ]
            for call in calls[first:] + calls[:first] + calls:
                await ends.record(call)

    return late


for _number, (_way, _act, _unread) in enumerate(itertools.product(_SHUT_BOTH, LATE, (False, True))):
    for _first in (1, 2, 3 + _number % 2):
        CASES[f"late{_act.__name__}-after-{_way}-unread-{_unread}-{_first}"] = _late_case(
            _SHUT_BOTH[_way], _act, _first, unread=_unread
        )


def _eof_case(*names: str) -> Case:
    async def eof(ends: Ends) -> None:
        stream = trio.SocketStream(ends.client)
        calls = {
            "eof": stream.send_eof,
            "close": stream.aclose,
            "WR": lambda: stream.socket.shutdown(stdlib.SHUT_WR),
            "RDWR": lambda: stream.socket.shutdown(stdlib.SHUT_RDWR),
            "peer": ends.server.close,
            "send": lambda: stream.send_all(b"x"),
        }
        for name in names:
            await ends.record(calls[name])
            await ends.settle()
            ends.records.append(ends.client.did_shutdown_SHUT_WR)

    return eof


for _names in (
    "eof eof close eof eof", "close eof eof", "WR eof close eof", "RDWR eof close eof",
    "eof peer eof close eof", "peer eof eof close eof", "eof send close send eof",
):  # fmt: skip
    CASES["send_eof-" + _names.replace(" ", "-")] = _eof_case(*_names.split())


@case
async def wrap_what_is_no_socket(ends: Ends) -> None:
    for wrong in (1, None, "x", ends.client):
        await ends.record(trio.socket.from_stdlib_socket, wrong)


@case
async def use_a_closed_socket(ends: Ends) -> None:
    client = ends.client
    client.close()
    for call in (
        client.close, client.fileno, client.getsockname, client.getpeername, client.is_readable,
        client.get_inheritable, client.detach, client.dup, client.wait_writable,
        lambda: client.set_inheritable(True), lambda: client.shutdown(stdlib.SHUT_WR),
        lambda: client.getsockopt(stdlib.SOL_SOCKET, stdlib.SO_ERROR),
        lambda: client.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1),
        lambda: client.bind((HOST, 0)), lambda: client.listen(1), client.accept,
        lambda: client.connect(ends.listener.getsockname()),
        lambda: _lowlevel("wait_readable", client),
        lambda: client.send(b"x"), lambda: client.sendto(b"x", (HOST, 1)),
        lambda: client.sendmsg([b"x"]), lambda: client.recv(0),
    ):  # fmt: skip
        await ends.record(call)


@case
async def use_a_connected_socket_as_a_new_one(ends: Ends) -> None:
    client = ends.client
    for call in (
        lambda: client.bind((HOST, 0)), lambda: client.bind("x"), lambda: client.listen(1),
        lambda: client.listen("x"), client.accept,
        lambda: ends.server.connect(ends.listener.getsockname()), lambda: client.connect("x"),
        lambda: ends.server.send(b"x", stdlib.MSG_FASTOPEN),
        client.get_inheritable, lambda: client.set_inheritable(True), client.get_inheritable,
    ):  # fmt: skip
        await ends.record(call)


@case
async def use_names_and_kinds(ends: Ends) -> None:
    for sock in (ends.client, ends.server, ends.listener):
        ends.records.append((sock.family, sock.type, sock.proto, sock.did_shutdown_SHUT_WR))
        ends.records.append(isinstance(sock.fileno(), int) and sock.fileno() >= 0)
    ends.records.append(ends.client.getsockname() == ends.server.getpeername())
    ends.records.append(ends.server.getsockname() == ends.client.getpeername())
    with ends.client as same:
        ends.records.append(same is ends.client)
    ends.records.append(ends.client.fileno())


@case
async def use_options(ends: Ends) -> None:
    client = ends.client
    second = struct.pack("ll", 1, 0)
    for level, option, value in (
        (stdlib.SOL_SOCKET, stdlib.SO_RCVTIMEO, second),
        (stdlib.SOL_SOCKET, stdlib.SO_SNDTIMEO, second),
        (stdlib.SOL_SOCKET, stdlib.SO_OOBINLINE, 1),
        (stdlib.SOL_SOCKET, stdlib.SO_LINGER, struct.pack("ii", 1, 5)),
        (stdlib.IPPROTO_TCP, stdlib.TCP_NODELAY, 1),
    ):
        await ends.record(client.setsockopt, level, option, value)
        await ends.record(client.getsockopt, level, option, 16)
    readings: tuple[tuple[Any, ...], ...] = (
        (stdlib.SOL_SOCKET, stdlib.SO_ERROR), (stdlib.SOL_SOCKET, stdlib.SO_ERROR, 4),
        (stdlib.SOL_SOCKET, stdlib.SO_TYPE), (stdlib.SOL_SOCKET, stdlib.SO_ACCEPTCONN),
        ("x", 1), (1, 99999), (1,), (),
    )  # fmt: skip
    for reading in readings:
        await ends.record(client.getsockopt, *reading)
    writings: tuple[tuple[Any, ...], ...] = (
        (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE), (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, None),
        (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, 1, 4),
        (stdlib.SOL_SOCKET, stdlib.SO_KEEPALIVE, None, 4),
        (stdlib.SOL_SOCKET, 99999, 1),
    )  # fmt: skip
    for writing in writings:
        await ends.record(client.setsockopt, *writing)
    await ends.record_during(
        lambda: client.recv(10), lambda: ends.server.send(b"later than a second")
    )


@case
async def use_two_tasks(ends: Ends) -> None:
    """A second call is an error only if both calls have to wait."""
    client, server = ends.client, ends.server

    async def second() -> None:
        await ends.record(server.recv, 1)
        await client.send(b"ab")
        await ends.settle()
        await ends.record(server.recv, 1)

    await ends.record_during(lambda: server.recv(1), second)
    outcomes: list[object] = []

    async def repeat(call: Callable[[], Any]) -> None:
        for _ in range(50):
            outcome = await call()
            outcomes.append(outcome)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(repeat, lambda: client.send(b"x"))
    await ends.settle()
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(repeat, lambda: server.recv(1))
    ends.records.append(outcomes)


@case
async def change_a_buffer_that_waits_to_be_sent(ends: Ends) -> None:
    await _fill(ends.client)
    data = bytearray(b"abc")

    async def change_and_read() -> None:
        data.extend(b"def")
        while True:
            with trio.CancelScope() as scope:

                async def stop(scope: trio.CancelScope = scope) -> None:
                    await wait_all_tasks_blocked(0.02)
                    scope.cancel()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(stop)
                    await ends.server.recv(2**20)
                    nursery.cancel_scope.cancel()
            if scope.cancelled_caught or scope.cancel_called:
                return

    await ends.record_during(lambda: ends.client.send(data), change_and_read)


# --- SO_LINGER with 0 s --------------------------------------------------------------------------


async def _close_socket(sock: Any) -> None:
    sock.close()


async def _close_stream(sock: Any) -> None:
    await trio.SocketStream(sock).aclose()


async def _close_forcefully(sock: Any) -> None:
    await trio.aclose_forcefully(trio.SocketStream(sock))


async def _leave_block(sock: Any) -> None:
    with sock:
        pass


async def _cancelled_close(sock: Any) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.SocketStream(sock).aclose()


for _close in (_close_socket, _close_stream, _close_forcefully, _leave_block, _cancelled_close):
    for _through in ("the-socket", "a-stream"):

        async def _reset(ends: Ends, close: Any = _close, through: str = _through) -> None:
            sock = ends.client if through == "the-socket" else trio.SocketStream(ends.client)
            sock.setsockopt(*LINGER_0)
            await close(ends.client)
            await ends.settle()
            await ends.record(ends.server.recv, 10)

        CASES[f"linger-0-by{_close.__name__.replace('_', '-')}-set-by-{_through}"] = _reset


_SHUTDOWNS: Final = {
    "nothing": (),
    "writing": (stdlib.SHUT_WR,),
    "both": (stdlib.SHUT_RDWR,),
    "one-after-the-other": (stdlib.SHUT_WR, stdlib.SHUT_RD),
}
for _name, _directions in _SHUTDOWNS.items():

    async def _collect(ends: Ends, shut: tuple[int, ...] = _directions) -> None:
        for how in shut:
            ends.client.shutdown(how)
        ends.client.setsockopt(*LINGER_0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            ends.client = None
            gc.collect()
        await ends.settle()
        for _ in range(2):
            await ends.record(ends.server.send, b"x")
            await ends.settle()
        await ends.record(ends.server.recv, 10)

    CASES[f"linger-0-collected-after-shutting-{_name}"] = _collect


@case
async def inherit_linger_0(ends: Ends) -> None:
    ends.listener.setsockopt(*LINGER_0)
    client = trio.socket.socket()
    async with trio.open_nursery() as nursery:
        accepted: list[Any] = []

        async def accept() -> None:
            accepted.append((await ends.listener.accept())[0])

        nursery.start_soon(accept)
        await client.connect(ends.listener.getsockname())
    accepted[0].close()
    await ends.settle()
    with client:
        await ends.record(client.recv, 10)


# --- a task closes the socket while the failed call of another one lets tasks run ----------------

for _number in range(4):  # both tasks wake in the same pass, in either order
    for _how in (stdlib.SHUT_WR, stdlib.SHUT_RDWR):

        async def _fail_and_close(ends: Ends, how: int = _how) -> None:
            ends.client.shutdown(how)

            async def send() -> None:
                nursery.start_soon(close)
                try:
                    await ends.client.send(b"x")
                except Exception as error:
                    ends.records.append(kind(error))

            async def close() -> None:
                ends.client.close()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)

        CASES[f"closing-beside-a-failed-send-{_how}-{_number}"] = _fail_and_close


# --- the descriptor ------------------------------------------------------------------------------


async def _answer_and_close(ends: Ends) -> None:
    await ends.server.send(b"answer")
    ends.server.close()


async def _close_with_unread_data(ends: Ends) -> None:
    await ends.client.send(b"unread")
    await ends.settle()
    ends.server.close()


async def _close_with_linger_0(ends: Ends) -> None:
    ends.server.setsockopt(*LINGER_0)
    ends.server.close()


async def _end_sending(ends: Ends) -> None:
    ends.server.shutdown(stdlib.SHUT_WR)


async def _shut_both_on_both_sides(ends: Ends) -> None:
    for each in (ends.server, ends.client):
        each.shutdown(stdlib.SHUT_RDWR)


async def _reset_after_the_end(ends: Ends) -> None:
    ends.server.close()
    for _ in range(2):
        await ends.outcome(ends.client.send, b"x")
        await ends.settle()


_ENDINGS: Final = (
    _nothing, _answer_and_close, _close_with_unread_data, _close_with_linger_0, _end_sending,
    _shut_both_on_both_sides, _reset_after_the_end,
)  # fmt: skip


def _is_readable(number: int) -> bool:
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


for _end in _ENDINGS:

    async def _keep_number(ends: Ends, end: Case = _end) -> None:
        number = ends.client.fileno()
        await end(ends)
        await ends.settle()
        with tempfile.TemporaryFile() as file:  # a program opens files meanwhile
            ends.records.append(file.fileno() == number)
            ends.records.append(ends.client.fileno() == number)
        await ends.record(_is_readable, number)
        ends.client.close()
        ends.records.append(ends.client.fileno())

    CASES["descriptor" + _end.__name__.replace("_", "-")] = _keep_number


# --- connecting ----------------------------------------------------------------------------------


async def _accept_and_close(ends: Ends) -> None:
    server, _ = await ends.listener.accept()
    server.close()


async def _connect_again(ends: Ends, sock: Any) -> object:
    """After a failed connect, connect to a listener whose task accepts."""
    async with trio.open_nursery() as nursery:
        # Without this task, the connect would wait for another process (docs/programs.md).
        nursery.start_soon(_accept_and_close, ends)
        outcomes = [await ends.outcome(sock.connect, ends.listener.getsockname()) for _ in range(2)]
        nursery.cancel_scope.cancel()
    return outcomes


@case
async def connect_after_a_refusal(ends: Ends) -> None:
    with reserved_port() as free, trio.socket.socket() as sock:
        await ends.record(sock.connect, (HOST, free))
        ends.records.append(sock.fileno() >= 0)
        ends.records.append(await _connect_again(ends, sock))
        ends.records.append(sock.getpeername() == ends.listener.getsockname())


@case
async def connect_from_a_bound_port_after_a_refusal(ends: Ends) -> None:
    with stdlib.create_server(("127.0.0.2", 0)) as free:
        chosen = free.getsockname()
    for local in (("127.0.0.2", 0), chosen):
        with reserved_port() as refusing, trio.socket.socket() as sock:
            await sock.bind(local)
            await ends.record(sock.connect, (HOST, refusing))
            outcome = await _connect_again(ends, sock)
            ends.records.append((outcome, sock.getsockname()[0], sock.getsockname() == chosen))


@case
async def connect_again_after_a_connect(ends: Ends) -> None:
    name = ends.listener.getsockname()
    for sock in (ends.client, ends.client, ends.client, ends.server):
        await ends.record(sock.connect, "x")
        await ends.record(sock.connect, name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_accept_and_close, ends)
        with trio.socket.socket() as sock:
            await sock.connect(name)
            sock.shutdown(stdlib.SHUT_WR)
            await ends.record(sock.connect, name)
        nursery.cancel_scope.cancel()


@case
async def connect_again_after_an_end_and_a_shutdown(ends: Ends) -> None:
    """The shutdown fails, but ends the call of `connect`."""
    name = ends.listener.getsockname()
    for how in (stdlib.SHUT_RD, stdlib.SHUT_WR, stdlib.SHUT_RDWR):
        for times in (1, 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_accept_and_close, ends)
                with trio.socket.socket() as sock:
                    await sock.connect(name)
                    await ends.settle()
                    await sock.send(b"!")  # the closed peer answers with a reset
                    await ends.settle()
                    for _ in range(times):
                        await ends.record(sock.shutdown, how)
                        await ends.record(sock.connect, name)
                nursery.cancel_scope.cancel()


@case
async def connect_to_what_is_no_address(ends: Ends) -> None:
    with trio.socket.socket() as sock:
        for address in ("x", (HOST,), (HOST, 1, 2), (HOST, -1), (HOST, 70000), None):
            await ends.record(sock.connect, address)
        for call in (sock.getpeername, lambda: sock.recv(1), lambda: sock.send(b"x"), sock.accept):
            await ends.record(call)


@case
async def close_while_connecting(ends: Ends) -> None:
    full = stdlib.create_server((HOST, 0), backlog=0)
    with full, stdlib.create_connection(full.getsockname()), trio.socket.socket() as sock:
        await ends.record_during(lambda: sock.connect(full.getsockname()), sock.close)


# --- the comparison ------------------------------------------------------------------------------


@asynccontextmanager
async def connected(*, smc: bool) -> AsyncIterator[Ends]:
    ends = Ends()
    try:
        with trio.fail_after(PATIENCE):
            await ends.connect()
        for sock in (ends.client, ends.server):
            assert isinstance(sock, DropInSocket) is smc
            assert not smc or (sock.stream is not None and sock.stream.mode is trio_smc.Mode.SMC_R)
        yield ends
    finally:
        ends.close()


@asynccontextmanager
async def unconnected(*, smc: bool) -> AsyncIterator[Ends]:
    ends = Ends()
    try:
        assert isinstance(ends.client, DropInSocket) is smc
        yield ends
    finally:
        ends.close()


async def _observe(
    cases: dict[str, Case], *, smc: bool, open_ends: OpenEnds
) -> dict[str, list[object]]:
    observed: dict[str, list[object]] = {}
    for name, case in cases.items():
        async with open_ends(smc=smc) as ends:
            try:
                with trio.fail_after(PATIENCE):
                    await case(ends)
            except Exception as error:
                ends.records.append(repr(error))
            observed[name] = ends.records
    return observed


# --- calls that fail, and calls of two tasks -----------------------------------------------------


def _calls_that_fail(sock: Any, stream: trio.SocketStream) -> dict[str, Callable[[], Any]]:
    return {
        "send": lambda: sock.send(b"x"),
        "send-nothing": lambda: sock.send(b""),
        "sendmsg": lambda: sock.sendmsg([b"x"]),
        "send-urgent": lambda: sock.send(b"x", stdlib.MSG_OOB),
        "recv": lambda: sock.recv(1),
        "recv-urgent": lambda: sock.recv(1, stdlib.MSG_OOB),
        "recv_into": lambda: sock.recv_into(bytearray(1)),
        "send_all": lambda: stream.send_all(b"x"),
        "send_all-of-a-view": lambda: stream.send_all(memoryview(bytearray(1))),
        "receive_some": stream.receive_some,
    }


def _close_client(ends: Ends) -> None:
    ends.client.close()


def _shut_writing(ends: Ends) -> None:
    ends.client.shutdown(stdlib.SHUT_WR)


def _be_reset(ends: Ends) -> None:
    ends.server.setsockopt(*LINGER_0)
    ends.server.close()


async def _fails_at_a_checkpoint(call: Callable[[], Any]) -> object:
    """Make a call.  Returns its error, and True if the call was a checkpoint; None if there is no
    error."""
    outcome = None
    is_checkpoint = True
    try:
        with assert_checkpoints():
            try:
                with trio.move_on_after(_QUIET):
                    await call()
            except Exception as error:
                outcome = kind(error)
    except AssertionError:
        is_checkpoint = False
    return outcome and (outcome, is_checkpoint)


@case
async def failing_calls_let_other_tasks_run(ends: Ends) -> None:
    for ending in (_close_client, _shut_writing, _be_reset):
        for name in _calls_that_fail(None, trio.SocketStream(ends.client)):
            again = Ends()
            await again.connect()
            call = _calls_that_fail(again.client, trio.SocketStream(again.client))[name]
            ending(again)
            await again.settle()
            outcomes = [await _fails_at_a_checkpoint(call) for _ in range(3)]
            ends.records.append((ending.__name__, name, outcomes))
            again.close()


def _calls_to_cancel(sock: Any, stream: trio.SocketStream) -> dict[str, Callable[[], Any]]:
    """Calls with valid and invalid arguments."""
    receiving: dict[str, Callable[[], Any]] = {
        f"{name} {size!r}": partial(call, size)
        for name, call in {
            "recv": sock.recv, "recvfrom": sock.recvfrom, "recvmsg": sock.recvmsg,
            "receive_some": stream.receive_some,
        }.items()
        for size in (1, 0, -1, "x", None)
    }  # fmt: skip
    sending: dict[str, Callable[[], Any]] = {
        f"{name} {data!r}": partial(call, data)
        for name, call in {
            "send": sock.send, "sendmsg": sock.sendmsg, "send_all": stream.send_all,
        }.items()
        for data in (b"x", b"", "x", None, [b"x"])
    }  # fmt: skip
    return {
        **receiving,
        **sending,
        "recv of a fraction": lambda: sock.recv(2.5),
        "recv_into too many": lambda: sock.recv_into(bytearray(1), 2),
        "recv_into bytes": lambda: sock.recv_into(b"x"),
        "recvmsg_into": lambda: sock.recvmsg_into([bytearray(1)]),
        "recv with flags": lambda: sock.recv(1, "x"),
        "send with flags": lambda: sock.send(b"x", "x"),
        "sendto": lambda: sock.sendto(b"x", (HOST, 1)),
        "sendto nowhere": lambda: sock.sendto(b"x", "nowhere"),
        "connect": lambda: sock.connect((HOST, 1)),
        "connect nowhere": lambda: sock.connect("nowhere"),
        "bind nowhere": lambda: sock.bind("nowhere"),
        "accept": sock.accept,
        "wait_send_all_might_not_block": stream.wait_send_all_might_not_block,
        "send_eof": stream.send_eof,
        "aclose": stream.aclose,
    }


async def _close_stream_of_client(ends: Ends) -> None:
    await trio.SocketStream(ends.client).aclose()


async def _send_eof_of_client(ends: Ends) -> None:
    await trio.SocketStream(ends.client).send_eof()


def _peer_shuts(ends: Ends) -> None:
    ends.server.shutdown(stdlib.SHUT_WR)


def _nothing_happens(ends: Ends) -> None:
    pass


async def _data_arrives(ends: Ends) -> None:
    await ends.server.send(b"0123456789")


def _cancelled_case(prepare: Callable[[Ends], Any], *, cancelled: bool) -> Case:
    """Each call once, at the client, in a scope that was cancelled before, or not."""

    async def make(ends: Ends) -> None:
        for name in _calls_to_cancel(ends.client, trio.SocketStream(ends.client)):
            again = Ends()
            await again.connect()
            stream = trio.SocketStream(again.client)
            result = prepare(again)
            if isinstance(result, Awaitable):
                await result
            await again.settle()
            call = _calls_to_cancel(again.client, stream)[name]
            outcome: object = "cancelled"
            with trio.CancelScope() as scope:
                if cancelled:
                    scope.cancel()
                    try:
                        outcome = await call()
                    except Exception as error:
                        outcome = kind(error)
                else:
                    outcome = await again.outcome(call)
            ends.records.append((name, outcome, again.client.fileno() < 0))
            again.close()

    return make


for _each, _cancel in itertools.product(
    (
        _nothing_happens,
        _data_arrives,
        _close_stream_of_client,
        _send_eof_of_client,
        _shut_writing,
        _peer_shuts,
        _be_reset,
    ),
    (True, False),
):
    _name = f"{'cancelled' if _cancel else 'odd'}-calls-after{_each.__name__}".replace("_", "-")
    CASES[_name] = _cancelled_case(_each, cancelled=_cancel)


@case
async def call_with_many_buffers(ends: Ends) -> None:
    for count in (1024, 1025):
        await ends.record(ends.client.sendmsg, [b"x"] * count)
        await ends.settle()
        await ends.record(ends.server.recvmsg_into, [bytearray(1) for _ in range(count)])


@case
async def two_tasks_call_accept_of_a_closed_listener(ends: Ends) -> None:
    ends.listener.close()
    outcomes: list[object] = []

    async def accept() -> None:
        outcomes.append(await ends.outcome(ends.listener.accept))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(accept)
    ends.records += outcomes


@case
async def wait_beside_a_call_that_does_not_wait(ends: Ends) -> None:
    """Only two calls that wait exclude each other."""
    stream = trio.SocketStream(ends.client)
    outcomes: list[object] = []

    async def wait() -> None:
        for _ in range(20):
            outcome = await ends.outcome(trio.lowlevel.wait_writable, ends.client)
            outcomes.append(outcome)

    async def send() -> None:
        for _ in range(20):
            await stream.send_all(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(send)
    await stream.send_eof()
    ends.records.append(outcomes)


@case
async def send_after_the_end_beside_another_send_eof(ends: Ends) -> None:
    stream = trio.SocketStream(ends.client)
    await stream.send_eof()
    outcomes: list[object] = []

    async def send() -> None:
        outcomes.append(await ends.outcome(stream.send_all, b"x"))

    for _ in range(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_eof)
            nursery.start_soon(send)
    ends.records.append(outcomes)


# --- tasks that accept, and listeners that are shut down -----------------------------------------


@case
async def five_tasks_accept_three_connections(ends: Ends) -> None:
    """Three tasks get a connection, one task waits, and one task gets an error."""
    outcomes: list[object] = []
    clients = [trio.socket.socket() for _ in range(3)]

    async def accept() -> None:
        try:
            sock, _ = await ends.listener.accept()
        except trio.BusyResourceError:
            outcomes.append("busy")
        except trio.Cancelled:
            outcomes.append("waits")
            raise
        else:
            sock.close()
            outcomes.append("accepted")

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.connect, ends.listener.getsockname())
        await ends.settle()
        for _ in range(5):
            nursery.start_soon(accept)
        while len(outcomes) < 4:
            await trio.testing.wait_all_tasks_blocked(_QUIET)
        await ends.settle()
        nursery.cancel_scope.cancel()
    for client in clients:
        client.close()
    ends.records += sorted(map(str, outcomes))


@case
async def an_accept_that_is_cancelled_loses_no_connection(ends: Ends) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ends.listener.accept)
            nursery.cancel_scope.cancel()
    with trio.socket.socket() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.connect, ends.listener.getsockname())
            sock, _ = await ends.listener.accept()
        ends.records.append(sock.getpeername() == client.getsockname())
        sock.close()


async def _listening() -> Any:
    listener = trio.socket.socket()
    await listener.bind((HOST, 0))
    listener.listen()
    return listener


async def _record_a_connection(ends: Ends, listener: Any) -> None:
    accepted: list[Any] = []

    async def accept() -> None:
        accepted.append((await listener.accept())[0])

    with trio.socket.socket() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await wait_all_tasks_blocked()
            await client.connect(listener.getsockname())
        with accepted[0] as server:
            await client.send(b"x")
            await ends.record(server.recv, 10)


for _flag in (stdlib.SHUT_RD, stdlib.SHUT_RDWR):

    async def _shut_down(ends: Ends, flag: int = _flag) -> None:
        with await _listening() as listener:
            await ends.record(listener.shutdown, stdlib.SHUT_WR)
            await _record_a_connection(ends, listener)
            await ends.record_during(listener.accept, lambda: listener.shutdown(flag))
            for call in (listener.accept, listener.accept):
                await ends.record(call)
            for option in (stdlib.SO_ACCEPTCONN, stdlib.SO_ERROR):
                await ends.record(listener.getsockopt, stdlib.SOL_SOCKET, option)
            ends.records.append((listener.fileno() >= 0, listener.getsockname()[0]))
            for _ in range(2):
                listener.listen()
                await _record_a_connection(ends, listener)
                listener.shutdown(flag)
                listener.listen()  # directly after the shutdown
                await _record_a_connection(ends, listener)
                listener.shutdown(flag)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_accept_and_close, ends)
                await ends.record(listener.connect, ends.listener.getsockname())
                nursery.cancel_scope.cancel()
        await ends.record(listener.accept)
        with await _listening() as listener:
            listener.shutdown(flag)
            await ends.record(listener.shutdown, flag)

    CASES[f"shut-down-a-listener-by-{_flag}"] = _shut_down


@case
async def shut_down_a_listener_by_another_descriptor(ends: Ends) -> None:
    with (
        await _listening() as listener,
        stdlib.fromfd(listener.fileno(), stdlib.AF_INET, stdlib.SOCK_STREAM) as other,
    ):
        await ends.record_during(listener.accept, lambda: other.shutdown(stdlib.SHUT_RD))
        await ends.record(listener.accept)
        other.listen()
        await _record_a_connection(ends, listener)


@case
async def shut_down_a_listener_that_serves(ends: Ends) -> None:
    listener = await _listening()
    served = trio.SocketListener(listener)

    async def serve() -> None:
        await trio.serve_listeners(trio.SocketStream.aclose, [served])

    await ends.record_during(serve, lambda: listener.shutdown(stdlib.SHUT_RD))
    ends.records.append(listener.fileno())


_SHUT_FIRST: Final[dict[str, Case]] = {}
"""Cases in which a socket is shut down before the connection, which then stays TCP."""


async def _talk(ends: Ends) -> None:
    client, server = ends.client, ends.server
    await ends.record(client.send, b"ab")
    await ends.record(server.recv, 10)
    await ends.record(server.send, b"cd")
    await ends.settle()
    for sock in (client, client, server):
        await ends.record(sock.recv, 10)
    await ends.record(client.shutdown, stdlib.SHUT_WR)
    await ends.record(server.recv, 10)
    server.close()
    await ends.settle()
    await ends.record(client.recv, 10)
    await ends.record(client.send, b"e")


def _shut_first_case(flags: tuple[int, ...], place: str) -> Case:
    async def run(ends: Ends) -> None:
        sock = ends.listener if place == "listener" else ends.client
        for flag in flags:
            await ends.record(sock.shutdown, flag)
        if place == "after a failed connect":
            for _ in range(2):  # ECONNREFUSED, then ECONNABORTED
                await ends.record(sock.connect, (HOST, 1))
        await ends.connect()
        await _talk(ends)
        if place == "listener":
            ends.listener.shutdown(stdlib.SHUT_RD)  # also ends the effect of the first shutdown
            ends.client.close()
            ends.client = trio.socket.socket()
            ends.listener.listen()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends.accept_one)
                await ends.client.connect(ends.listener.getsockname())
            await _talk(ends)

    return run


for _calls in ((0,), (1,), (2,), (0, 1)):
    for _shut_place in ("client", "listener", "after a failed connect"):
        _SHUT_FIRST[f"{_shut_place} {_calls}"] = _shut_first_case(_calls, _shut_place)


def _group(name: str) -> str:
    """The first word of a case's name.  One test runs all cases of a group."""
    return name.split("-", maxsplit=1)[0]


GROUPS: Final = sorted({_group(name) for name in CASES})


_SEVERAL_CALLS: Final = [
    group
    for group in GROUPS
    if not group.startswith(("recv", "send", "linger", "odd", "cancelled"))
]


@pytest.mark.parametrize(
    ("group", "checkpoints"),
    [(group, "amortised") for group in GROUPS] + [(group, "strict") for group in _SEVERAL_CALLS],
)
def test_calls_have_the_same_results_as_over_tcp(
    group: str, checkpoints: Literal["amortised", "strict"]
) -> None:
    cases = {name: case for name, case in CASES.items() if _group(name) == group}
    _compare(cases, trio_smc.Config(checkpoints=checkpoints, require_smc=True))


def test_sockets_that_are_shut_down_first() -> None:
    _compare(_SHUT_FIRST, trio_smc.Config(), unconnected)


def _compare(
    cases: dict[str, Case], config: trio_smc.Config, open_ends: OpenEnds = connected
) -> None:
    names = list(cases)
    over_tcp = trio.run(lambda: _observe(cases, smc=False, open_ends=open_ends))
    trio_smc.enable(config)
    try:
        over_smc = trio.run(lambda: _observe(cases, smc=True, open_ends=open_ends))
    finally:
        trio_smc.disable()
    assert all(over_tcp.values()), "a case has recorded no outcome, so it cannot fail"
    different = {
        name: (over_tcp[name], over_smc[name]) for name in names if over_tcp[name] != over_smc[name]
    }
    assert not different, "\n".join(
        f"{name}:\n  TCP   {tcp}\n  SMC-R {smc}" for name, (tcp, smc) in different.items()
    )
