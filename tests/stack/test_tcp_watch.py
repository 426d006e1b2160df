"""`TcpWatch` alone: it notifies watchers, and keeps none alive after its removal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.peers import connect_sockets
from tests.reused_numbers import reusing
from tests.timing import PATIENCE
from trio_smc.stack.tcp_watch import TcpWatch


class Watcher:
    """Records its notifications."""

    owns_number = True

    def __init__(self) -> None:
        self.data = trio.Event()
        self.reset = trio.Event()

    def tcp_data(self) -> None:
        self.data.set()

    def tcp_reset(self) -> None:
        self.reset.set()


@asynccontextmanager
async def _watch() -> AsyncIterator[TcpWatch]:
    watch = TcpWatch()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        yield watch
        nursery.cancel_scope.cancel()
    watch.close()


async def test_a_notified_and_removed_watcher_is_not_kept_alive() -> None:
    """A watcher would keep its link group alive, including the memory of a dead peer."""
    async with _watch() as watch:
        client, server = await connect_sockets()
        watcher = Watcher()
        watch.add(server.socket, watcher)
        await client.send_all(b"x")
        with trio.fail_after(PATIENCE):
            await watcher.data.wait()
        watch.remove(server.socket)
        await server.aclose()
        await client.aclose()
        # Let the watch sleep again, so that no local variable refers to the watcher.
        await trio.testing.wait_all_tasks_blocked()
        gone = weakref.ref(watcher)
        del watcher
        gc.collect()
        assert gone() is None


async def test_a_reset_notifies_the_watcher() -> None:
    async with _watch() as watch:
        client, server = await connect_sockets()
        watcher = Watcher()
        watch.add(server.socket, watcher)
        client.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await client.aclose()
        with trio.fail_after(PATIENCE):
            await watcher.reset.wait()
        assert not watcher.data.is_set()
        watch.remove(server.socket)
        await server.aclose()


async def test_data_on_a_registered_connection_notifies_the_watcher(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with _watch() as watch:
        client, server = await connect_sockets()
        watcher = Watcher()
        watch.add(server.socket, watcher)
        await trio.sleep(1)  # the clock jumps, so new connections are registered
        await client.send_all(b"x")
        with trio.fail_after(PATIENCE):
            await watcher.data.wait()
        watch.remove(server.socket)
        watch.remove(server.socket)
        await server.aclose()
        await client.aclose()


async def test_a_connection_may_end_before_it_is_registered(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with _watch() as watch:
        gone, stays = await connect_sockets()
        early, watcher = Watcher(), Watcher()
        watch.add(gone.socket, early)
        watch.add(stays.socket, watcher)
        watch.remove(gone.socket)
        await gone.send_all(b"x")
        await gone.aclose()
        with trio.fail_after(PATIENCE):
            await watcher.data.wait()
        assert not early.data.is_set()
        watch.remove(stays.socket)
        await stays.aclose()


@pytest.mark.parametrize("registered", [False, True])
async def test_the_number_of_a_socket_that_the_program_closed_may_be_reused(
    registered: bool, mock_clock: trio.testing.MockClock
) -> None:
    """A program closes the TCP socket of a stream, and its number is reused for another file."""
    async with _watch() as watch:
        client, server = await connect_sockets()
        watcher = Watcher()
        watch.add(server.socket, watcher)
        if registered:
            mock_clock.jump(1.0)
            await trio.testing.wait_all_tasks_blocked()
        number = server.socket.fileno()
        server.socket.close()
        with reusing(number) as (other, peer):
            peer.send(b"for the other")
            mock_clock.jump(1.0)  # new connections are registered
            await trio.testing.wait_all_tasks_blocked()
            assert not watcher.data.is_set()
            assert not watcher.reset.is_set()
            # The watch can watch the new socket with the same number.
            later = Watcher()
            owner = trio.socket.from_stdlib_socket(other)
            watch.add(owner, later)
            watch.remove(server.socket)
            mock_clock.jump(1.0)
            await later.data.wait()
            assert not watcher.data.is_set()
            watch.remove(owner)
        await client.aclose()


async def test_a_socket_that_the_program_closed_is_removed() -> None:
    async with _watch() as watch:
        client, server = await connect_sockets()
        watcher = Watcher()
        watch.add(server.socket, watcher)
        server.socket.close()
        watch.remove(server.socket)
        watch.remove(server.socket)
        gone = weakref.ref(watcher)
        del watcher
        gc.collect()
        assert gone() is None
        await client.aclose()
