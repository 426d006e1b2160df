"""An application observes the same end of a connection over SMC-R as over TCP.

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
from tests.timing import PATIENCE

MODULE = "tests.e2e.either_transport"

MUCH = 9_000_000
"""More bytes than the buffers of either transport take."""

ANY_LEVEL = [
    # The peer answers and closes in order; this side sends first, and reads later.
    "b send 5, b close, a send 4, a receive 3, a receive, a receive, a send 1, a so_error",
    "b send 5, b close, a receive 3, a send 4, a send 4, a receive, a receive, a so_error",
    "b send 5, b close, a send 1, a iterate, a send 1",
    "b close, a receive, a send 5, a send 5, a so_error",
    "b close, a send 5, a so_error, a send 5, a receive",
    "b close, a wait_writable, a send 5, a wait_writable, a receive",
    f"b send 5, b close, a send {MUCH}, a send 1, a receive, a receive",
    "b send 5, b close, a send 0, a send 5, a send 0, a receive",
    "b close, a eof, a receive, a so_error, a close",
    "a send 3, b receive, b close, a eof, a receive, a receive",
    # The peer closes with unread data: a reset.
    "a send 5, b send 4, b close, a receive, a receive, a receive, a send 1, a so_error",
    "a send 5, b send 4, b close, a receive 1, a send 1, a receive, a receive, a send 1",
    "a send 5, b send 4, b close, a send 1, a send 1, a receive, a receive",
    "a send 5, b send 4, b close, a so_error, a so_error, a send 1, a receive, a receive",
    "a send 5, b send 4, b close, a eof, a receive, a receive",
    "a send 5, b send 4, b close, a send 0, a receive, a receive",
    "a send 5, b close, a receive, a send 0, a eof, a wait_writable, a send 1",
    "a send 5, b send 4, b close, a receive_into 3, a receive_into, a receive_into, a receive_into",
    "a send 1, b send 5, b close, a iterate",
    "a send 5, b send 5, a close, b close",
    "a send 5, b send 5, a close, b receive, b receive, b send 1",
    "a send 5, b send 5, a drop, b receive, b receive, b receive",
    # Half closes, of either side, before the reset or the close.
    "b send 4, b eof, a send 5, b close, a send 1, a so_error, a receive, a receive, a send 1",
    "b send 4, b eof, a send 5, b close, a so_error, a so_error, a receive, a receive",
    "b send 4, b eof, a send 5, b receive, b close, a send 1, a send 1, a receive, a receive",
    "b eof, a eof, b send 3, a close, b receive, b close",
    "a eof, b send 5, b close, a receive, a receive, a so_error",
    "a eof, b send 5, b close, a receive 2, a so_error, a receive, a send 1",
    "a eof, b receive, b send 5, a close, b receive, b send 1, b send 1, b so_error",
    "b eof, a receive, a send 5, a eof, b close, a receive, a so_error, a so_error",
    # Calls that wait when the end comes.
    "a start receive, b send 1, a finish, a send 1, a start receive, b close, a finish, a receive",
    "a start receive, b close, a finish, a receive, a send 1, a send 1",
    "a send 1, a start iterate, b send 3, b close, a finish, a receive, a send 1",
    "a start receive, a send 1, b receive, b eof, a finish, a send 1, b close, a send 1, a receive",
]

NOT_TLS = [
    f"a start send {MUCH}, b close, a finish, a receive, a send 1",
    f"b send 5, a start send {MUCH}, b close, a finish, a receive, a receive, a send 1",
    f"a start send {MUCH}, b eof, a receive, b close, a finish, a receive, a send 1",
]

DESCRIPTOR = [
    "b send 3, b close, a peek, a send 1, a peek 2, a receive_into, a peek, a is_readable",
    "a send 3, b send 2, b close, a peek, a peek, a receive_into, a peek, a peek, a receive",
    "a send 3, b close, a is_readable, a receive, a is_readable, a receive",
    "b close, a is_readable, a send 1, a is_readable, a send 1, a receive",
    "a eof, b close, a receive, a is_readable",
]

SOCKET = [
    "a eof, b close, a receive, a eof",
    "b close, a eof, a eof",
    "a send 1, b close, a eof, a receive, a eof",
    "a eof, b send 1, b close, a send 1, a receive, a send 1",
]

TLS = [
    "b send 5, b close, a send 4, a receive 3, a receive, a receive, a send 1",
    "b send 5, b drop, a send 4, a receive 3, a receive, a receive, a send 1",
    "a send 5, b send 4, b drop, a receive, a receive, a send 1",
    "a send 5, b send 4, b close, a receive, a receive, a send 1",
    "a send 5, b send 4, b drop, a send 1, a receive, a receive",
    "b drop, a send 4, a send 4, a receive",
    "b drop, a receive, a receive, a close",
    "a send 5, a close, b receive, b receive, b send 3, b send 3",
    "a start receive, b send 1, a finish, a send 1, a start receive, b drop, a finish",
    "a start receive, b close, a finish, a close",
]

PROGRAMS = [
    *((level, program) for program in ANY_LEVEL for level in ("socket", "stream", "smc")),
    *((level, program) for program in NOT_TLS for level in ("stream", "smc")),
    *((level, program) for program in DESCRIPTOR for level in ("socket", "stream")),
    *(("socket", program) for program in SOCKET),
    *(("tls", program) for program in TLS),
]


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
        outcomes: list[Any] = []
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


@pytest.mark.rfc("4.8.1/11", "4.8.2/9", "4.8.2/10", "A.4/19")
async def test_each_end_observes_the_same_as_over_tcp() -> None:
    different = []
    async with open_ends(False) as tcp, open_ends(True) as smc:
        for number, (level, program) in enumerate(PROGRAMS):
            ends = str.maketrans("ab", "ba") if number % 2 else {}  # which one is the client
            program = ", ".join(
                f"{step[0].translate(ends)}{step[1:]}" for step in program.split(", ")
            )
            with trio.fail_after(2 * PATIENCE):
                expected = await tcp.run(level, program)
                observed = await smc.run(level, program)
            different += [
                f"{level}: {program}: {step}: TCP {over_tcp}, SMC-R {over_smc}"
                for (step, over_tcp), (_, over_smc) in zip(expected, observed, strict=True)
                if over_tcp != over_smc
            ]
    assert different == []
