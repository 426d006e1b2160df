"""A CDC message that arrives before the task of the handshake has woken up."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import trio

from tests.api.api_peers import ASSUME, address_of, plain_client, plain_server
from tests.timing import PATIENCE
from trio_smc import SmcStream, Stack, open_stack
from trio_smc.connecting import accept, connect
from trio_smc.datapath.connection import Connection

pytestmark = pytest.mark.pure  # compiled classes have no such subclasses


def make_dishonest(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all further connections of ``stack`` by dishonest ones."""

    class DishonestConnection(Connection):
        """A connection that announces bytes far behind the peer's element as soon as it may
        send."""

        __slots__ = ()

        def established(self) -> None:
            super().established()
            self.messenger.peer_first += 1 << 30
            self.messenger.request_cdc()

    open_connection = stack.runtime.groups.open_connection

    def open_dishonest(*arguments: Any) -> Connection:
        connection = open_connection(*arguments)
        connection.__class__ = DishonestConnection
        return connection

    monkeypatch.setattr(stack.runtime.groups, "open_connection", open_dishonest)


def wake_late(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the task of a handshake wake only after its connection has ended.

    module: the module that calls `run_negotiation`.
    """
    run = module.run_negotiation

    async def run_and_wait(*arguments: Any) -> Any:
        outcome = await run(*arguments)
        while outcome.connection.state != "CLOSED":  # noqa: ASYNC110 - a state has no event
            await trio.sleep(0.001)
        return outcome

    monkeypatch.setattr(module, "run_negotiation", run_and_wait)


async def carry(source: trio.SocketStream, sink: trio.SocketStream) -> type[BaseException] | None:
    """Copy all bytes; returns the error that ended the source's connection."""
    try:
        async for data in source:
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        return type(error.__cause__) if error.__cause__ else None
    return None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("honest", ["server", "client"])
async def test_a_bad_cursor_right_behind_the_rendezvous_ends_tcp_at_once(
    honest: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The honest side's TCP connection is reset, although the dishonest side's stays open.

    late: the dishonest side has answered the abort before the task of the handshake wakes up.
    """
    async with (
        open_stack(ASSUME) as ours,
        open_stack(ASSUME) as theirs,
        plain_server() as between,
        trio.open_nursery() as nursery,
    ):
        server, client = (ours, theirs) if honest == "server" else (theirs, ours)
        make_dishonest(theirs, monkeypatch)
        if late:
            wake_late(accept if honest == "server" else connect, monkeypatch)
        [listener] = await server.open_listeners(0, host="127.0.0.1")

        async def use(stream: SmcStream) -> None:
            async with stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.receive_some()

        async def use_client() -> None:
            with contextlib.suppress(OSError):
                await use(await client.open_stream(*address_of(between)))

        nursery.start_soon(trio.serve_listeners, use, [listener])
        nursery.start_soon(use_client)
        with trio.fail_after(PATIENCE / 4):
            near = await between.accept()
            far = await plain_client(listener)
            source, sink = (far, near) if honest == "server" else (near, far)
            nursery.start_soon(carry, sink, source)
            assert await carry(source, sink) is ConnectionResetError
        async with near, far:
            with trio.fail_after(PATIENCE):
                while ours.connections:  # noqa: ASYNC110 - a list has no event
                    await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
