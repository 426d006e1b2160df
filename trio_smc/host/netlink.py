"""Queries of the kernel's network configuration, by netlink (rtnetlink(7)).

A query is one synchronous exchange with the kernel, and pyroute2 needs milliseconds for it.  Each
connection over RoCE needs interfaces, addresses and a route.  So answers are cached until the next
change.  While an `AnswerCache` is open, a netlink socket receives a report of every change of
interfaces, addresses, routes and rules.  The kernel sends the report before the change is finished.
So while the socket is not readable, the cached answers are valid.

On a system without netlink the result of a query is an empty list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

__all__ = [
    "AnswerCache",
    "kernel_ueids",
    "query",
    "query_now",
]


_log = logging.getLogger("trio_smc.netlink")

_ATTEMPTS: Final = 3
"""Attempts of a query whose answer the kernel marks as interrupted by a change.  Chosen."""
_MAX_ANSWERS: Final = 1000
"""Answers in the cache.  Chosen: a bound on memory."""
# The groups of linux/rtnetlink.h whose reports are received: RTNLGRP_LINK, IPV4_IFADDR, IPV4_ROUTE,
# IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE, NEXTHOP.
_GROUPS: Final = sum(1 << group - 1 for group in (1, 5, 7, 8, 9, 11, 19, 32))

_warned = False


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
                    AnswerCache._change_socket = _subscribe()

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
                if len(cls._answers) >= _MAX_ANSWERS:
                    cls._answers.clear()
                cls._answers[key] = answer

    @classmethod
    def on_fork(cls) -> None:
        """In a forked child, close all objects, because the parent reads the shared socket."""
        cls._lock = threading.Lock()
        cls._open.clear()
        cls._end()


def query(
    request: Callable[[Any], Iterable[Any]], read: Callable[[Any], Any], key: Hashable
) -> list[Any]:
    """The answers to a query, from the cache if possible.

    Args:
      request: sends the query by a `pyroute2.IPRoute`, and returns the kernel's messages.
      read: converts one message.
      key: the key of the answer in the cache.
    """
    cached, generation = AnswerCache.get(key)
    if cached is not None:
        return cached
    answer = _query_or_warn(request)
    if answer is None:
        return []
    found = [read(message) for message in answer]
    AnswerCache.put(key, found, generation)
    return found


def _query_or_warn(request: Callable[[Any], Iterable[Any]]) -> list[Any] | None:
    try:
        return query_now(request)
    except OSError as error:
        _warn_once("netlink does not answer: %s", error)
        return None


def query_now(request: Callable[[Any], Iterable[Any]]) -> list[Any] | None:
    """The messages that ``request`` returns, without the cache; None without netlink.

    Raises:
      OSError: the kernel's answer is an error.
    """
    if sys.platform != "linux":
        return None
    # The import takes about 100 ms (python -X importtime), so it is delayed until the first query.
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError
    except (ImportError, OSError) as error:
        _warn_once("no netlink: %s", error)
        return None
    for _ in range(_ATTEMPTS):
        try:
            with IPRoute() as route:
                return list(request(route))
        except NetlinkDumpInterrupted:
            continue
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error
        # RuntimeError: pyroute2 starts an event loop of asyncio, but this thread has one already if
        # Trio is a guest of asyncio.
        except (OSError, RuntimeError) as error:
            _warn_once("netlink does not answer: %s", error)
            return None
    return None


_MAX_UEIDS: Final = 8  # the largest number in a Proposal; Linux stores at most four
_DUMP_UEID: Final = 9  # SMC_NETLINK_DUMP_UEID


def kernel_ueids() -> tuple[bytes, ...] | None:
    """The UEIDs of the kernel, as ``smcr ueid show`` lists them, 32 bytes each.

    None: the kernel has no SMC, or netlink does not work.
    """
    if sys.platform != "linux":
        return None
    try:
        from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST, genlmsg
        from pyroute2.netlink.exceptions import NetlinkError
        from pyroute2.netlink.generic import GenericNetlinkSocket
    except (ImportError, OSError) as error:
        _warn_once("no netlink: %s", error)
        return None

    class Ueid(genlmsg):  # type: ignore[misc]  # pyroute2 has no types
        nla_map = (("SMC_NLA_EID_TABLE_UNSPEC", "none"), ("SMC_NLA_EID_TABLE_ENTRY", "cdata"))

    request = Ueid()
    request["cmd"], request["version"] = _DUMP_UEID, 1
    try:
        with GenericNetlinkSocket() as smc:
            smc.bind("SMC_GEN_NETLINK", Ueid)
            answers = list(
                smc.nlm_request(request, msg_type=smc.prid, msg_flags=NLM_F_REQUEST | NLM_F_DUMP)
            )
    except NetlinkError:
        return None  # the kernel has no such family, because the module smc is not loaded
    except (OSError, RuntimeError) as error:
        _warn_once("netlink does not answer: %s", error)
        return None
    found = [answer.get_attr("SMC_NLA_EID_TABLE_ENTRY") for answer in answers]
    return tuple(each.rstrip(b"\0").ljust(32)[:32] for each in found if each)[:_MAX_UEIDS]


def _subscribe() -> socket.socket:
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
