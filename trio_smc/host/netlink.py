"""Queries of the kernel's network configuration, by netlink (rtnetlink(7)).

A query is one synchronous exchange with the kernel.  The kernel answers a request before the system
call that sends it returns, so a query never waits.  Numbers and structures are those of
linux/netlink.h, linux/rtnetlink.h and linux/genetlink.h.

Each connection over RoCE needs interfaces, addresses and a route.  So answers are cached until the
next change.  While an `AnswerCache` is open, a netlink socket receives a report of every change of
interfaces, addresses, routes and rules.  The kernel sends the report before the change is finished.
So while the socket is not readable, the cached answers are valid.

On a system without netlink the result of a query is an empty list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

__all__ = [
    "MAX_ANSWERS",
    "AnswerCache",
    "Message",
    "Request",
    "attribute",
    "attributes",
    "kernel_ueids",
    "open_socket",
    "query",
    "query_now",
    "query_or_warn",
    "subscribe",
]


_log = logging.getLogger("trio_smc.netlink")

_ATTEMPTS: Final = 3
"""Attempts of a query whose answer the kernel marks as interrupted by a change.  Chosen."""
MAX_ANSWERS: Final = 1000
"""Answers in the cache.  Chosen: a bound on memory."""
_RECEIVE_SIZE: Final = 1 << 16
"""Bytes of the receive buffer.  Chosen: the kernel's dumps have at most 32 KiB in one datagram."""
# The groups of linux/rtnetlink.h whose reports are received: RTNLGRP_LINK, IPV4_IFADDR, IPV4_ROUTE,
# IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE, NEXTHOP.
_GROUPS: Final = sum(1 << group - 1 for group in (1, 5, 7, 8, 9, 11, 19, 32))

_NETLINK_GENERIC: Final = 16
_NLM_F_REQUEST: Final = 0x1
_NLM_F_DUMP_INTR: Final = 0x10
_NLM_F_DUMP: Final = 0x300
_NLMSG_NOOP: Final = 1
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_ATTRIBUTE: Final = struct.Struct("=HH")  # nlattr: length, type
_TYPE: Final = 0x3FFF  # NLA_TYPE_MASK

_Answer = TypeVar("_Answer")

_warned = False


class Request(NamedTuple):
    """A request to the kernel.

    Fields:
      kind: the type of the message, such as RTM_GETADDR.
      body: the structure of that type, and the attributes (`attribute`).
      head: bytes of the structure before the attributes of the answer.
      dump: request all objects and not a single one.
      protocol: the netlink protocol.
    """

    kind: int
    body: bytes
    head: int
    dump: bool = False
    protocol: int = 0  # NETLINK_ROUTE


class Message(NamedTuple):
    """A message of an answer.

    Fields:
      head: the structure before the attributes.
      attributes: the values of the attributes by type.
    """

    head: bytes
    attributes: dict[int, bytes]


class _DumpInterrupted(Exception):
    """A change during a dump has made the dump inconsistent."""


class AnswerCache:
    """While at least one object is open, `query` caches the kernel's answers for all of them."""

    _lock = threading.Lock()
    _open: Final[set[AnswerCache]] = set()
    _change_socket: socket.socket | None = None
    _answers: Final[dict[Hashable, list[Any]]] = {}
    _generation = 0

    def open(self) -> None:
        """Start caching.  If the kernel cannot report changes, nothing is cached."""
        with self._lock:
            self._open.add(self)
            if AnswerCache._change_socket is None and sys.platform == "linux":
                with contextlib.suppress(OSError):
                    AnswerCache._change_socket = subscribe()

    def close(self) -> None:
        """Stop caching, if no other object is open.  Idempotent."""
        with self._lock:
            self._open.discard(self)
            if not self._open:
                AnswerCache._end()

    @classmethod
    def _end(cls) -> None:
        cls._answers.clear()
        if cls._change_socket is not None:
            cls._change_socket.close()
            cls._change_socket = None

    @classmethod
    def get(cls, key: Hashable) -> tuple[list[Any] | None, int]:
        """The cached answer, or None if there is no valid one; and the number of changes so far."""
        with cls._lock:
            if cls._change_socket is not None and _read_changes(cls._change_socket):
                cls._answers.clear()
                cls._generation += 1
            return cls._answers.get(key), cls._generation

    @classmethod
    def put(cls, key: Hashable, answer: list[Any], generation: int) -> None:
        """Cache an answer, unless there was a change since `get` returned this ``generation``."""
        with cls._lock:
            # Another thread may have read a report since `get`, which increased `_generation`.  A
            # report that was not read yet clears the cache at the next `get`.
            if cls._change_socket is not None and cls._generation == generation:
                if len(cls._answers) >= MAX_ANSWERS:
                    cls._answers.clear()
                cls._answers[key] = answer

    @classmethod
    def on_fork(cls) -> None:
        """In a forked child, close all objects, because the parent reads the shared socket."""
        cls._lock = threading.Lock()
        cls._open.clear()
        cls._end()


def query(request: Request, read: Callable[[Message], _Answer]) -> list[_Answer]:
    """The answer to a query, from the cache if possible.

    Args:
      request: the request.
      read: converts one message; a function of a module, because it is part of the key of the
        cache.
    """
    key = request, read
    cached, generation = AnswerCache.get(key)
    if cached is not None:
        return cached
    answer = query_or_warn(request)
    if answer is None:
        return []
    found = [read(message) for message in answer]
    AnswerCache.put(key, found, generation)
    return found


def query_or_warn(request: Request) -> list[Message] | None:
    try:
        return query_now(request)
    except OSError as error:
        _warn_once("netlink does not answer: %s", error)
        return None


def query_now(request: Request) -> list[Message] | None:
    """The kernel's answer, without the cache; None without netlink.

    Raises:
      OSError: the kernel's answer is an error.
    """
    if sys.platform != "linux":
        return None
    for _ in range(_ATTEMPTS):
        try:
            sock = open_socket(request.protocol)
        except OSError as error:
            _warn_once("no netlink: %s", error)
            return None
        with sock, contextlib.suppress(_DumpInterrupted):
            return list(_exchange(sock, request))
    return None


def open_socket(protocol: int) -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    return socket.socket(socket.AF_NETLINK, kind, protocol)


def _exchange(sock: socket.socket, request: Request) -> Iterator[Message]:
    """Send a request, and yield the messages of the answer."""
    flags = _NLM_F_REQUEST | (_NLM_F_DUMP if request.dump else 0)
    length = _HEADER.size + len(request.body)
    sock.sendto(_HEADER.pack(length, request.kind, flags, 1, 0) + request.body, (0, 0))
    interrupted = False
    while True:
        data, sender = sock.recvfrom(_RECEIVE_SIZE)
        if sender[0] != 0:
            continue  # from another process; the port number of the kernel is 0
        for kind, flags, content in _messages(data):
            interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                (code,) = struct.unpack_from("=i", content) if len(content) >= 4 else (0,)
                if code:
                    raise OSError(-code, os.strerror(-code))
                if interrupted:
                    raise _DumpInterrupted
                return
            if kind != _NLMSG_NOOP:
                yield Message(content[: request.head], attributes(content[request.head :]))
        if not request.dump:
            return


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and content of each message in a datagram of the kernel."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, flags, _, _ = _HEADER.unpack_from(data, at)
        yield kind, flags, data[at + _HEADER.size : at + size]
        at += max(_HEADER.size, size + 3 & ~3)


def attributes(data: bytes) -> dict[int, bytes]:
    """The values of the attributes in ``data`` by type; of equal types, the last one."""
    found = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        found[kind & _TYPE] = data[at + _ATTRIBUTE.size : at + size]
        at += max(_ATTRIBUTE.size, size + 3 & ~3)
    return found


def attribute(kind: int, value: bytes) -> bytes:
    """An attribute of a request."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


_GENERIC_HEAD: Final = struct.Struct("=BBH")  # genlmsghdr: command, version, reserved
_GENL_ID_CTRL: Final = 16
_CTRL_CMD_GETFAMILY: Final = 3
_CTRL_ATTR_FAMILY_ID: Final = 1
_CTRL_ATTR_FAMILY_NAME: Final = 2
_SMC_FAMILY: Final = b"SMC_GEN_NETLINK\0"
_DUMP_UEID: Final = 9  # SMC_NETLINK_DUMP_UEID
_EID_TABLE_ENTRY: Final = 1  # SMC_NLA_EID_TABLE_ENTRY
_MAX_UEIDS: Final = 8  # the largest number in a Proposal; Linux stores at most four


def kernel_ueids() -> tuple[bytes, ...] | None:
    """The UEIDs of the kernel, as ``smcr ueid show`` lists them, 32 bytes each.

    None: the kernel has no SMC, or netlink does not work.
    """
    try:
        families = query_now(
            _generic(
                _GENL_ID_CTRL, _CTRL_CMD_GETFAMILY, attribute(_CTRL_ATTR_FAMILY_NAME, _SMC_FAMILY)
            )
        )
    except OSError:
        return None  # the kernel has no such family, because the module smc is not loaded
    if not families:
        return None
    family = int.from_bytes(families[0].attributes[_CTRL_ATTR_FAMILY_ID], sys.byteorder)
    answers = query_or_warn(_generic(family, _DUMP_UEID, dump=True))
    if answers is None:
        return None
    found = [answer.attributes.get(_EID_TABLE_ENTRY) for answer in answers]
    return tuple(each.rstrip(b"\0").ljust(32)[:32] for each in found if each)[:_MAX_UEIDS]


def _generic(family: int, command: int, data: bytes = b"", *, dump: bool = False) -> Request:
    """A request of generic netlink."""
    body = _GENERIC_HEAD.pack(command, 1, 0) + data
    return Request(family, body, _GENERIC_HEAD.size, dump, _NETLINK_GENERIC)


def subscribe() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE)
    try:
        sock.bind((0, _GROUPS))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _read_changes(changes: socket.socket) -> bool:
    """Read all reports of changes; True if there were any."""
    found = False
    while True:
        try:
            changes.recv(1)  # each report clears the whole cache, so its contents do not matter
        except BlockingIOError:
            return found
        except OSError:  # ENOBUFS: the kernel has dropped reports
            pass
        found = True


def _warn_once(text: str, error: Exception) -> None:
    """Log a problem: the first one as a warning, and later ones as debug messages.

    Otherwise each connection would log the same warning.
    """
    global _warned
    _log.log(logging.DEBUG if _warned else logging.WARNING, text, error)
    _warned = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=AnswerCache.on_fork)
