"""Same-host discovery: cancellation, and deadlines of both ends that expire at the same time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.rendezvous.discovery.world import (
    Pair,
    Server,
    announce,
    bound,
    deadline_after,
    serving,
    start_smc_r,
)
from tests.timing import PATIENCE
from trio_smc.rendezvous.discovery.same_host import Discovery


class After:
    """Cancels a scope after a number of scheduler passes."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.scope = trio.CancelScope()

    async def count(self) -> None:
        for _ in range(self.passes):
            await trio.lowlevel.cancel_shielded_checkpoint()
        self.scope.cancel()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("passes", range(14))
async def test_cancellation_at_each_wait(side: str, passes: int, private: Path) -> None:
    """A cancelled side ends its TCP connection, so the other side notices this at once."""
    after = After(passes)
    async with serving(private) as server:

        async def call() -> None:
            async with bound() as client:
                with (
                    after.scope if side == "client" else contextlib.nullcontext(),
                    await announce(private, client, server.address) as announcement,
                ):
                    await client.connect(server.address)
                    if await announcement.accepted(deadline_after()) is None:
                        await client.send(b"C")

        async def serve() -> None:
            connection, claim = await server.accept()
            with connection, after.scope if side == "server" else contextlib.nullcontext():
                if claim is not None:
                    await claim.confirm(connection, deadline_after())

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(after.count)
                async with trio.open_nursery() as caller:
                    with trio.CancelScope() as serving_scope:
                        async with trio.open_nursery() as servers:
                            servers.start_soon(serve)
                            caller.start_soon(finish, call, serving_scope, side)
        # After any cancellation, the server serves the next connection.
        await agree_after_older_connections(private, server)


async def finish(call: Callable[[], object], serving_scope: trio.CancelScope, side: str) -> None:
    await call()  # type: ignore[misc]
    if side == "client":
        # The connection may never have been opened.
        serving_scope.cancel()


async def agree_after_older_connections(private: Path, server: Server) -> None:
    async with bound() as client:
        announcement = await announce(private, client, server.address)
        await client.connect(server.address)
        while True:
            connection, claim = await server.accept()
            with connection:
                if connection.getpeername() == client.getsockname():
                    assert claim is not None
                    await start_smc_r(Pair(client, announcement, connection, claim))
                    return


async def test_ends_in_parallel_always_agree(private: Path, rng: random.Random, full: bool) -> None:
    """The ends run in two threads, each with its own Trio, and their deadlines are close together.

    The two results never differ, except that a server which has given up resets the connection.
    """
    rounds = 5000 if full else 400
    outcomes: dict[str, dict[tuple[str, int], object]] = {"server": {}, "client": {}}
    send_address, receive_address = trio.open_memory_channel[tuple[str, int]](1)
    here = trio.lowlevel.current_trio_token()
    patience = [rng.choice((0.0, 50e-6, 200e-6, 1.0, 1.0)) for _ in range(rounds)]
    discovery = Discovery(private)

    async def serve() -> None:
        async with serving(private) as server:
            here.run_sync_soon(send_address.send_nowait, server.address)
            for wait in patience:
                connection, claim = await server.accept()
                with connection:
                    peer = connection.getpeername()[:2]
                    # No claim: the client has withdrawn already.
                    agreed: object = False
                    if claim is not None:
                        try:
                            agreed = await claim.confirm(connection, deadline_after(wait))
                        except TimeoutError:
                            agreed = None
                    if agreed is not None:
                        assert await connection.recv(1) == (b"C" if agreed else b"A")
                    outcomes["server"][peer] = agreed
                    await connection.send(b"!")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, trio.run, serve)
        destination = await receive_address.receive()
        for _ in range(rounds):
            async with bound() as client:
                with await announce(discovery, client, destination) as announcement:
                    await client.connect(destination)
                    wait = rng.choice((0.0, 50e-6, 100e-6, 200e-6, 1.0))
                    went = await announcement.accepted(deadline_after(wait)) is None
                    outcomes["client"][client.getsockname()[:2]] = went
                    await client.send(b"C" if went else b"A")
                    assert await client.recv(1) == b"!"
    for peer, outcome in outcomes["client"].items():
        assert outcomes["server"][peer] in (outcome, None)
    assert set(outcomes["client"].values()) == {True, False}, "one side was always faster"
