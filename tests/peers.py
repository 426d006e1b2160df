"""Pairs of connected peers, at four levels, and the echo that one of them may run.

| level | two ends | what is between them |
|---|---|---|
| core | connection cores, `Pair` | channels that are queues; the test delivers |
| link | queue pairs, `End` | one RNIC or two |
| stack | streams | this process's stack, or two stacks |
| process | processes, `Peer` | whatever the test asks them to open |
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import trio

import trio_smc
from tests.datapath.datapath_pair import Pair
from tests.e2e.processes import Peer, open_peer
from tests.streams.stream_pairs import HOST, Pairs, read
from tests.timing import PATIENCE
from trio_smc import Mode, SmcStream, Stack
from trio_smc.rnic.verbs import Rnic
from trio_smc.stack.connection_host import Endpoint
from trio_smc.streams.group_views import LinkGroupView

if TYPE_CHECKING:
    from tests.rnic.contract import End

__all__ = [
    "active_links",
    "check_echo",
    "connect_sockets",
    "echo",
    "echo_until_reset",
    "endpoint_of",
    "open_pair",
]


@overload
def open_pair(
    level: Literal["core"],
    size: tuple[int, int] = ...,
    eye_catcher: tuple[bool, bool] = ...,
    *,
    chunks: bool = ...,
    copy_limit: int = ...,
    connect: bool = ...,
    merge: bool = ...,
    progress: bool = ...,
) -> AbstractContextManager[Pair]: ...


@overload
def open_pair(
    level: Literal["link"], rnic: Rnic, other: Rnic | None = ...
) -> AbstractContextManager[tuple[End, End]]: ...


@overload
def open_pair(
    level: Literal["stack"], pairs: Pairs | None = ...
) -> AbstractAsyncContextManager[tuple[SmcStream, SmcStream]]: ...


@overload
def open_pair(
    level: Literal["process"],
    settings: dict[str, object] | None = ...,
    other: dict[str, object] | None = ...,
    *,
    module: str = ...,
) -> AbstractAsyncContextManager[tuple[Peer, Peer]]: ...


def open_pair(level: str, *arguments: Any, **options: Any) -> Any:
    """Connect two ends, and close both at the end of the block.

    Args:
      level: of the table above.
      arguments, options: at level "core": as of `Pair`; "link": the RNIC of the first end and of
        the second, by default the same one; "stack": what makes the streams, by default the
        default stack, which must agree on SMC-R; "process": `Config` fields of the server and of
        the client, by default the server's, and the module that they run.

    Returns:
      A context manager for a `Pair` or for the two ends: client first at level "stack", server
      first at level "process".
    """
    return _LEVELS[level](*arguments, **options)


@contextlib.contextmanager
def _cores(*arguments: Any, **options: Any) -> Iterator[Pair]:
    pair = Pair(*arguments, **options)
    try:
        yield pair
    finally:
        pair.close()


@contextlib.contextmanager
def _queue_pairs(rnic: Rnic, other: Rnic | None = None) -> Iterator[tuple[End, End]]:
    # This module imports pytest, which the processes of tests need not wait for.
    from tests.rnic.contract import connect, make_end

    a, b = make_end(rnic), make_end(other or rnic)
    try:
        connect(a, b)
        yield a, b
    finally:
        a.close()
        b.close()


@contextlib.asynccontextmanager
async def _streams(pairs: Pairs | None = None) -> AsyncIterator[tuple[SmcStream, SmcStream]]:
    if pairs is None:
        [listener] = await trio_smc.open_listeners(0, host=HOST)
        async with listener:
            client = await trio_smc.open_stream(*listener.socket.getsockname()[:2])
            server = await listener.accept()
        assert client.mode is server.mode is Mode.SMC_R, (client.fallback, server.fallback)
    else:
        client, server = await pairs.make()
    async with client, server:
        yield client, server


@contextlib.asynccontextmanager
async def _processes(
    settings: dict[str, object] | None = None,
    other: dict[str, object] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Peer, Peer]]:
    other = settings if other is None else other
    async with open_peer(settings, **options) as server, open_peer(other, **options) as client:
        yield server, client


_LEVELS: Final[dict[str, Callable[..., Any]]] = {
    "core": _cores,
    "link": _queue_pairs,
    "stack": _streams,
    "process": _processes,
}


async def connect_sockets(
    local_address: str | None = None,
) -> tuple[trio.SocketStream, trio.SocketStream]:
    """Connect a client and a server by Trio's own functions, which may be enabled for SMC-R."""
    [listener] = await trio.open_tcp_listeners(0, host=HOST)
    accepted: list[trio.SocketStream] = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with listener:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                client = await trio.open_tcp_stream(
                    *listener.socket.getsockname()[:2], local_address=local_address
                )
    return client, accepted[0]


def active_links(group: LinkGroupView) -> int:
    """How many links carry data: not one that is only being added, and may be refused yet."""
    return sum(link.state == "ACTIVE" for link in group.links)


def endpoint_of(stack: Stack, stream: SmcStream) -> Endpoint:
    """The endpoint of an open stream over SMC-R, among those of its stack."""
    [endpoint] = [
        each
        for each in stack.runtime.groups.endpoints.values()
        if each.sock is not None and each.sock.fileno() == stream.socket.fileno()
    ]
    return endpoint


async def echo(stream: trio.abc.Stream) -> None:
    """Send everything back until the peer ends its direction."""
    async for data in stream:
        await stream.send_all(data)


async def echo_until_reset(stream: trio.abc.Stream) -> None:
    """As `echo`, for peers that may abort the connection."""
    with contextlib.suppress(trio.BrokenResourceError):
        await echo(stream)


async def check_echo(stream: trio.abc.Stream, data: bytes = b"ping") -> None:
    """Check that a peer that runs `echo` sends the data back."""
    with trio.fail_after(PATIENCE):
        await stream.send_all(data)
        assert await read(stream, len(data)) == data
