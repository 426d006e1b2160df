"""What can be compared: for each transport a pair of `connect` and `serve` and a scope.

A workload sees nothing but this pair, so another transport is one more entry of TRANSPORTS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import trio

import trio_smc

HOST = "127.0.0.1"
Handler = Callable[[Any], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One way to move bytes between two processes.

    connect: opens a stream to a port of this host.
    serve: serves a handler on a free port; its start value is the list of listeners.
    scope: what has to be open around all connections of a process.
    """

    connect: Callable[[int], Awaitable[trio.abc.HalfCloseableStream]]
    serve: Callable[..., Awaitable[object]]
    scope: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext


async def _connect_tcp(port: int) -> trio.abc.HalfCloseableStream:
    return await trio.open_tcp_stream(HOST, port)


async def _serve_tcp(handler: Handler, task_status: trio.TaskStatus[Any]) -> None:
    await trio.serve_tcp(handler, 0, host=HOST, task_status=task_status)


async def _connect_smc(port: int) -> trio.abc.HalfCloseableStream:
    return await trio_smc.open_stream(HOST, port)


async def _serve_smc(handler: Handler, task_status: trio.TaskStatus[Any]) -> None:
    await trio_smc.serve(handler, 0, host=HOST, task_status=task_status)


def _smc(**settings: Any) -> Transport:
    def scope() -> AbstractAsyncContextManager[object]:
        return trio_smc.open_stack(trio_smc.Config(**settings))

    return Transport(connect=_connect_smc, serve=_serve_smc, scope=scope)


BASE = "tcp"
TRANSPORTS = {
    BASE: Transport(connect=_connect_tcp, serve=_serve_tcp),
    "smc-r": _smc(),
    "smc-r-nospin": _smc(spin=0.0),
    "smc-r-amortised": _smc(checkpoints="amortised"),
}
