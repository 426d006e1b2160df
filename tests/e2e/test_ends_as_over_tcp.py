"""What an application observes of the end of a connection is what TCP would show it.

Each program of the tables has two ends, in two processes. It runs over TCP and over SMC-R, and the
outcomes of all operations must be equal: bytes, ends, exceptions and their causes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.e2e.processes import Peer, open_peer

MODULE = "tests.e2e.either_transport"


class Ends:
    """Two processes of one transport."""

    def __init__(self, here: Peer, there: Peer) -> None:
        self._peers = {"a": here, "b": there}

    async def run(self, level: str, program: str) -> list[Any]:
        """Run a program over a new connection; return the outcomes of its steps."""
        a, b = self._peers["a"], self._peers["b"]
        port = (await b.call("listen", level=level))["port"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: b.call("accept"))
            await a.call("connect", level=level, port=port)
        outcomes = []
        for step in program.split(", "):
            name, *words = step.split()
            peer = self._peers[name]
            outcomes.append((step, (await _step(peer, *words))["outcome"]))
        for peer in (a, b):
            await peer.call("over")
        return outcomes


async def _step(peer: Peer, op: str, *arguments: str) -> dict[str, Any]:
    if op == "finish":
        return await peer.call("finish")
    if op == "start":
        op, *arguments = arguments  # type: ignore[assignment]
        return await peer.call("start", op=op, argument=int(arguments[0]) if arguments else 0)
    return await peer.call("act", op=op, argument=int(arguments[0]) if arguments else 0)


@contextlib.asynccontextmanager
async def open_ends(smc: bool) -> AsyncIterator[Ends]:
    async with (
        open_peer({"smc": smc}, module=MODULE) as a,
        open_peer({"smc": smc}, module=MODULE) as b,
    ):
        yield Ends(a, b)
