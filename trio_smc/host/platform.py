"""Finds out if SMC-R works on this operating system.

A sandbox, an emulator or another implementation of Linux's system calls may refuse calls that
SMC-R needs and TCP does not.  A connection that found this out in its handshake could not become a
TCP connection any more.  So the calls are tried once, before anything else, and if one of them is
refused, all connections are TCP.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Final

from trio_smc._base.resources import is_lack
from trio_smc.host.alarm import Alarm

if sys.platform == "linux":
    import fcntl
    import resource
    import termios

__all__ = ["is_supported"]

LOGGER: Final = logging.getLogger("trio_smc")


def is_supported() -> bool:
    """True if SMC-R works on this system.

    Raises:
      OSError: there are too few descriptors, or too little memory, to find out (`is_lack`).
    """
    return sys.platform == "linux" and _refused_call() is None


@functools.cache
def _refused_call() -> str | None:
    """The first call that the system refuses; logged once.  Raises OSError: see `is_supported`."""
    for name, call in _NEEDED.items():
        try:
            call()
        except OSError as error:
            if is_lack(error):
                raise
            LOGGER.warning("no SMC-R: this system refuses %s: %s", name, error)
            return name
    return None


def _yield() -> None:
    os.sched_yield()


def _eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))


def _timer() -> None:
    Alarm().close()


def _epoll() -> None:
    select.epoll().close()


def _poll() -> None:
    select.poll().poll(0)


def _tcp_state() -> None:
    with closing(socket.socket()) as sock:
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)


def _unread_bytes() -> None:
    with closing(socket.socket()) as sock:
        fcntl.ioctl(sock, termios.FIONREAD, bytes(4))


def _credentials() -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there):
        here.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)


def _limit() -> None:
    resource.getrlimit(resource.RLIMIT_NOFILE)


_NEEDED: Final[dict[str, Callable[[], object]]] = {
    "sched_yield(2)": _yield,
    "eventfd(2)": _eventfd,
    "timerfd_create(2)": _timer,
    "epoll_create(2)": _epoll,
    "poll(2)": _poll,
    "getrlimit(2)": _limit,
    "the option SO_PEERCRED": _credentials,
    "the option TCP_INFO": _tcp_state,
    "the request FIONREAD of ioctl(2)": _unread_bytes,
}
"""The calls of links, the pump and handshakes that have no alternative."""
