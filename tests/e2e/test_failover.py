"""Two processes with two software RNICs each: links fail, are drained and return under traffic."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import trio

from tests.e2e.processes import Peer
from tests.peers import open_pair

STREAMS = 5


class Sides(NamedTuple):
    """Two processes with busy streams between them."""

    server: Peer
    client: Peer
    port: int

    async def both(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a command on both at once."""
        answers: dict[str, dict[str, Any]] = {}

        async def call(name: str, peer: Peer) -> None:
            answers[name] = await peer.call(command, **arguments)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "server", self.server)
            nursery.start_soon(call, "client", self.client)
        return [answers["server"], answers["client"]]

    async def whole(self) -> None:
        """Wait until the group is symmetric on all four RNICs, with even loads, and busy."""
        await self.server.call("links", rnics=["a", "b"], kind="symmetric", even=True)
        await self.client.call("links", rnics=["c", "d"], kind="symmetric", even=True)
        await self.busy()

    async def busy(self) -> None:
        """Check that every stream continues in both directions without an error."""
        assert await self.both("progress") == [{"errors": []}] * 2

    async def finish(self) -> int:
        """End all streams; both sides must have the same counters. Returns the failovers."""
        there, here = await self.both("finish")
        assert there["errors"] == here["errors"] == [""] * len(here["sent"])
        assert sorted(there["received"]) == sorted(here["sent"])
        assert sorted(here["received"]) == sorted(there["sent"])
        assert min(there["failovers"], here["failovers"]) > 0
        return int(there["failovers"] + here["failovers"])


@contextlib.asynccontextmanager
async def sides(
    server_rnics: tuple[str, ...] = ("a", "b"), client_rnics: tuple[str, ...] = ("c", "d")
) -> AsyncIterator[Sides]:
    settings: list[dict[str, object]] = [{"rnics": server_rnics}, {"rnics": client_rnics}]
    async with open_pair("process", *settings, module="tests.e2e.moving_peer") as (server, client):
        port = (await server.call("listen"))["port"]
        yield Sides(server, client, port)


async def connect(pair: Sides, count: int = STREAMS) -> None:
    answer = await pair.client.call("connect", port=pair.port, count=count)
    assert answer["modes"] == ["smc-r"] * count


@pytest.mark.rfc("2.3/1", "2.3/2", "4.6/1")
async def test_streams_survive_each_rnic_in_turn() -> None:
    async with sides() as pair:
        await connect(pair)
        await pair.whole()
        for peer, name in ((pair.server, "a"), (pair.client, "d"), (pair.server, "b")):
            await peer.call("fail", name=name)
            await pair.busy()
            await peer.call("restore", name=name)
            await pair.whole()
        assert await pair.finish() >= 3 * STREAMS


@pytest.mark.rfc("2.3/9")
async def test_drained_rnics_carry_nothing_and_nothing_is_lost() -> None:
    async with sides() as pair:
        await connect(pair)
        await pair.whole()
        for peer, name in ((pair.server, "b"), (pair.client, "c")):
            assert await peer.call("drain", name=name) == {"left": 0}
            await pair.busy()
            await peer.call("undrain", name=name)
            await pair.whole()
        await pair.finish()


async def test_two_failures_at_once_leave_the_other_pair() -> None:
    """One RNIC on each side; the links between the other two carry on."""
    async with sides() as pair:
        await connect(pair)
        await pair.whole()
        await pair.server.send_command("fail", name="a")
        await pair.client.send_command("fail", name="c")
        await pair.server.answer()
        await pair.client.answer()
        await pair.busy()
        await pair.server.call("restore", name="a")
        await pair.client.call("restore", name="c")
        await pair.whole()
        await pair.finish()


@pytest.mark.rfc("4.8.3/2")
@pytest.mark.parametrize("where", ["server", "client"])
async def test_without_any_link_streams_break_on_both_sides(where: str) -> None:
    async with sides(("a",), ("c",)) as pair:
        await connect(pair, 2)
        await pair.busy()
        peer, name = (pair.server, "a") if where == "server" else (pair.client, "c")
        await peer.call("fail", name=name)
        no_link = (
            "BrokenResourceError from ConnectionResetError(104, 'no link to the peer is left')"
        )
        reset = "BrokenResourceError from ConnectionResetError(104, 'Connection reset by peer')"
        errors = [
            [set(error.split(" / ")) for error in answer["errors"]]
            for answer in await pair.both("finish", end=False)
        ]
        # Either side may be the first to notice, of each connection another one, as they end one by
        # one; the other side may see the end of TCP before that of its link.
        assert sum(no_link in error for each in errors for error in each) >= 2
        for each in errors:
            assert len(each) == 2
            # The error is reported once; a task that sends afterwards gets EPIPE.
            later = "BrokenResourceError from BrokenPipeError(32, 'Broken pipe')"
            assert all({later} != error <= {no_link, reset, later} for error in each)
        answer = await pair.client.call("connect", port=pair.port)
        assert answer["modes"] == ["tcp"]
        assert answer["fallbacks"] == ["RNIC_DOWN"]
        assert await pair.client.call("progress") == {"errors": []}
        await pair.both("finish")
        await peer.call("restore", name=name)
        await connect(pair, 1)
        await pair.busy()
