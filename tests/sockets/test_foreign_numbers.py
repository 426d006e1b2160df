"""A program closes the descriptor of a connection by its number, and another file gets the number.
The end of the connection leaves that file, and all other connections, alone."""

from __future__ import annotations

import os
import select
import socket as stdlib
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trio_smc
from tests.timing import PATIENCE

CONFIG = trio_smc.Config(require_smc=True)
pytestmark = pytest.mark.usefixtures("enabled")
UNREAD = b"unread bytes of the program's own file"
_REGISTERED = 0.1
"""Seconds after which the watch of TCP connections has a new one."""


@asynccontextmanager
async def connections() -> AsyncIterator[tuple[Any, Any, Any, Any]]:
    """Two connections of one link group: client, server, client, server."""
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        ends: list[Any] = []
        for _ in range(2):
            client = trio.socket.socket()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.connect, listener.getsockname())
                server, _ = await listener.accept()
            ends += [client, server]
        try:
            yield ends[0], ends[1], ends[2], ends[3]
        finally:
            for each in ends:
                each.close()


@contextmanager
def of_a_file(number: int) -> Iterator[None]:
    with tempfile.TemporaryFile() as file:
        file.write(UNREAD)
        file.seek(0)
        os.dup2(file.fileno(), number)
    yield
    assert os.read(number, 100) == UNREAD


@contextmanager
def of_a_pipe(number: int) -> Iterator[None]:
    reader, writer = os.pipe()
    os.dup2(reader, number)
    os.close(reader)
    os.write(writer, UNREAD)
    yield
    assert os.read(number, 100) == UNREAD
    os.close(writer)


@contextmanager
def of_a_socket(number: int) -> Iterator[None]:
    ours, theirs = stdlib.socketpair()
    os.dup2(ours.fileno(), number)
    ours.close()
    with theirs:
        yield
        theirs.sendall(UNREAD)  # fails if this end has shut down reading
        assert os.read(number, 100) == UNREAD


def _close(peer: Any) -> None:
    peer.close()


def _shut(peer: Any) -> None:
    peer.shutdown(stdlib.SHUT_WR)


def _reset(peer: Any) -> None:
    peer.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


@pytest.mark.parametrize("end", [_close, _shut, _reset], ids=lambda end: end.__name__)
@pytest.mark.parametrize("age", [0, _REGISTERED], ids=["young", "old"])
@pytest.mark.parametrize("other", [of_a_file, of_a_pipe, of_a_socket], ids=lambda it: it.__name__)
def test_the_number_of_another_file_is_left_alone(other: Any, age: float, end: Any) -> None:
    async def main() -> None:
        async with connections() as (client, server, neighbour, neighbours_server):
            number = client.fileno()
            await trio.sleep(age)
            with other(number):
                await trio.sleep(_REGISTERED - age)
                end(server)
                await wait_all_tasks_blocked(0.01)
                client.close()
                await wait_all_tasks_blocked(0.01)
            os.close(number)
            with trio.fail_after(PATIENCE):
                await neighbour.send(b"fine")
                assert await neighbours_server.recv(10) == b"fine"

    trio.run(main)


@pytest.mark.parametrize("end", [_close, _shut, _reset], ids=lambda end: end.__name__)
def test_a_selector_that_looks_later_finds_the_end(end: Any) -> None:
    """Its entry belongs to the open file, and not to the number."""

    async def main() -> None:
        async with connections() as (client, server, _, _):
            with select.epoll() as epoll:
                epoll.register(client.fileno(), select.EPOLLIN)
                assert epoll.poll(0) == []
                end(server)
                await wait_all_tasks_blocked(0.01)
                [(number, events)] = epoll.poll(0)
                assert number == client.fileno()
                assert events & select.EPOLLIN
                epoll.unregister(number)

    trio.run(main)
