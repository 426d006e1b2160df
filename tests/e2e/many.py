"""Very many connections between two processes, and what they leave; for tests and a campaign."""

from __future__ import annotations

from typing import Any

from tests.peers import open_pair

_Both = tuple[dict[str, Any], dict[str, Any]]


async def echo_at_once(connections: int) -> tuple[_Both, _Both]:
    """Hold that many connections and echo over all of them at once.

    Returns what (server, client) held before, and while all were open.
    """
    async with open_pair("process", {}) as (server, client):
        for peer in (server, client):
            await peer.call("raise_limit")
        port = (await server.call("listen", handler="echo"))["port"]
        await client.call("churn", port=port, count=1, seed=0)
        before = await server.call("measure"), await client.call("measure")
        answer = await client.call("echo", port=port, connections=connections, rounds=2)
        assert answer["modes"] == ["smc-r"]
        during = await server.call("measure"), await client.call("measure")
        await client.call("close")
        assert (await server.call("errors"))["errors"] == []
    return before, during


_AT_A_TIME = 5_000
"""Connections that a process is asked for at once: what it is asked may take minutes only."""


async def open_and_close(warm_up: int, count: int, seed: int) -> tuple[_Both, _Both]:
    """Open and close connections one after the other.

    Returns what (server, client) held after the warm-up, and at the end.
    """
    async with open_pair("process", {}) as (server, client):
        for peer in (server, client):
            await peer.call("trace")
        port = (await server.call("listen", handler="echo"))["port"]

        async def churn(connections: int, seed: int) -> None:
            for first in range(0, connections, _AT_A_TIME):
                some = min(_AT_A_TIME, connections - first)
                await client.call("churn", port=port, count=some, seed=seed + first)

        await churn(warm_up, seed)
        before = await server.call("measure"), await client.call("measure")
        await churn(count, seed + 1)
        after = await server.call("measure"), await client.call("measure")
        assert (await server.call("errors"))["errors"] == []
    return before, after


def check_nothing_left(before: _Both, after: _Both, *, traced: int, rss: int) -> None:
    """AssertionError when a process holds more than before; memory may grow by so many bytes."""
    for side, was, now in zip(("server", "client"), before, after, strict=True):
        for what, allowed in {"traced": traced, "rss": rss}.items():
            assert now[what] - was[what] <= allowed, f"{side}: {what} {was[what]} to {now[what]}"
        for what in was.keys() - {"traced", "rss"}:
            assert now[what] == was[what], f"{side}: {what} {was[what]} to {now[what]}"
