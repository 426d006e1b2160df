"""Accepted TCP connections before the handshake."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import trio

import trio_smc
from tests.api.api_peers import plain_server
from tests.rendezvous.discovery.world import announce, bound, deadline_after
from tests.timing import PATIENCE
from trio_smc import FallbackReason
from trio_smc.connecting import accept, listener
from trio_smc.host.private_directory import PrivateDirectory
from trio_smc.rendezvous.discovery.announcing import Announcer
from trio_smc.rendezvous.discovery.names import Names
from trio_smc.rendezvous.discovery.same_host import Discovery
from trio_smc.stack.policy import Route, choose_route

HOST = "127.0.0.1"


@pytest.mark.usefixtures("runtime_directory")
async def test_a_client_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No RNIC serves the client's address, but the announcement shows that the client is near."""

    def choose(*args: Any, near: bool, **options: Any) -> Route:
        if not near:
            return Route(FallbackReason.NO_RNIC, HOST)
        return choose_route(*args, near=near, **options)

    monkeypatch.setattr(accept, "choose_route", choose)
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(), trio.open_nursery() as nursery:
            [listener] = await trio_smc.open_listeners(0, host=HOST)

            async def answer() -> None:
                async with await listener.accept() as stream:
                    assert stream.mode == "smc-r"
                    await stream.send_all(await stream.receive_some())

            nursery.start_soon(answer)
            async with await trio_smc.open_stream(*listener.socket.getsockname()) as stream:
                assert stream.mode == "smc-r", stream.fallback
                await stream.send_all(b"x")
                assert await stream.receive_some() == b"x"
            await listener.aclose()


async def test_a_dead_name_does_not_keep_a_client_from_being_assumed(
    monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    """A killed client has left the name.  This client has the same port, and sends CLC without an
    announcement."""
    directory = PrivateDirectory.open(runtime_directory / "trio-smc", create=True)
    monkeypatch.setattr(Names, "find", lambda self, name: [directory])
    config = trio_smc.Config(assume=(HOST,))
    with contextlib.closing(directory), trio.fail_after(PATIENCE):
        async with trio_smc.open_stack(config) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            async with listener, trio.open_nursery() as nursery:

                async def answer() -> None:
                    async with await listener.accept() as stream:
                        assert stream.mode == "smc-r"

                nursery.start_soon(answer)
                async with await stack.open_stream(*listener.socket.getsockname()) as stream:
                    assert stream.mode == "smc-r", stream.fallback


@pytest.mark.usefixtures("runtime_directory")
async def test_no_plain_connection_waits_for_a_place_of_an_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of announcements is reached, but a connection to a plain server needs none."""
    waits: list[bool] = []

    async def wait(self: Announcer, *, required: bool) -> None:
        waits.append(required)

    monkeypatch.setattr(Announcer, "is_full", True)
    monkeypatch.setattr(Announcer, "wait_for_place", wait)
    async with plain_server() as plain, trio_smc.open_stack() as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        async with listener:
            async with await stack.open_stream(*plain.socket.getsockname()):
                assert waits == []
            async with await stack.open_stream(*listener.socket.getsockname()) as stream:
                assert waits == [False]
                assert stream.fallback is not None
                assert stream.fallback.reason is FallbackReason.OUT_OF_RESOURCES


@pytest.mark.parametrize("required", [False, True])
async def test_a_client_is_refused_before_the_listener_is_full(
    required: bool, monkeypatch: pytest.MonkeyPatch, runtime_directory: Path
) -> None:
    """The refused connection is TCP, and is not reset later to make room.  A client that requires
    SMC-R waits instead."""
    monkeypatch.setattr(listener, "MOST_WAITING", 1)  # allows 4 handshakes
    discovery = Discovery(runtime_directory / "trio-smc")
    with trio.fail_after(PATIENCE):
        async with trio_smc.open_stack() as stack, contextlib.AsyncExitStack() as silent:
            silent.callback(discovery.close)
            [served] = await stack.open_listeners(0, host=HOST)
            address = served.socket.getsockname()
            await silent.enter_async_context(served)
            for _ in range(2):
                client = await silent.enter_async_context(bound())
                announcement = silent.enter_context(await announce(discovery, client, address))
                await client.connect(address)
                assert await announcement.accepted(deadline_after()) is None
            config = trio_smc.Config(require_smc=required)
            async with await stack.open_stream(*address, config=config) as stream:
                if required:
                    assert stream.mode == "smc-r"
                else:
                    assert stream.fallback is not None
                    assert stream.fallback.reason is FallbackReason.HANDSHAKE_LIMIT
