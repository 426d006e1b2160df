"""Waiting for a socket with a deadline, which mostly does not come.

With the timers of a stack the wait is ended as if the socket were about to be closed: a cancel
scope for each wait would cost a short-lived connection as much as two system calls.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Final

import trio

from trio_smc._base.timers import Timers
from trio_smc._base.waits import wait_readable
from trio_smc.host.tcp import end_waits

__all__ = ["wait_readable_until"]

_TIMED_OUT: Final = 0.0001
"""Seconds of processor time that the task takes to go on after a time-out."""


async def wait_readable_until(
    sock: trio.socket.SocketType | socket.socket, timers: Timers | None, deadline: float
) -> bool:
    """Wait until a socket is readable; False if the deadline came first, or `end_waits` was called.

    timers: of the stack; None: there are none.
    deadline: by the clock of ``timers``, or by Trio's clock if there are none.

    Raises trio.ClosedResourceError: the socket was closed before the call.
    """
    if sock.fileno() < 0:
        raise trio.ClosedResourceError("the socket is closed")
    if timers is None:
        with trio.move_on_at(deadline):
            try:
                await wait_readable(sock)
            except trio.ClosedResourceError:
                return False
            return True
        return False
    timer = timers.call_at(deadline, partial(_expire, sock, timers))
    try:
        await wait_readable(sock)
    except trio.ClosedResourceError:
        return False
    finally:
        timer.cancel()
    return True


def _expire(sock: trio.socket.SocketType | socket.socket, timers: Timers) -> None:
    timers.charge(_TIMED_OUT)
    end_waits(sock)
