"""Another task closes a socket while a handshake or a claim waits for it.

The kernel reuses the descriptor number for another file at once.  A timer, an answer or an event of
a link that is meant for the closed socket must not reach that file.  Each test repeats its case,
because the order of tasks in one pass of Trio's scheduler is random.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from tests.rendezvous.discovery.world import serving
from tests.reused_numbers import Victim, reusing
from tests.timing import PATIENCE
from trio_smc._base.timers import Timers
from trio_smc.rendezvous.handshake import run_negotiation
from trio_smc.rnic.spinner import Spinner
from trio_smc.states.engine import Machine
from trio_smc.states.tables import CLC_CLIENT

REPEATS = 60
"""One order in six is the dangerous one.  60 random orders miss it once in 50,000 runs."""
LATE = 1000.0
"""Timeout in seconds, which never passes; the test fires the timer itself."""


class Negotiation:
    """A negotiation that waits for the peer; see `rendezvous.negotiation.Negotiation`."""

    outcome: object = None
    has_final_message = False
    state = "PROPOSED"
    awaits_clc = True
    machine = Machine(CLC_CLIENT, cast(Any, None))
    outgoing: ClassVar[list[bytes]] = []

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None

    def tcp_lost(self, error: OSError | None = None) -> None:
        self.outcome = error

    def timed_out(self) -> None:
        raise AssertionError("a time-out of a socket that is closed")

    def sent(self) -> None:
        raise AssertionError("an answer was sent to a socket that is closed")


class Clock:
    """Timers that the test fires."""

    def __init__(self) -> None:
        self.time = 0.0
        self.timers = Timers(lambda: self.time, lambda: None)

    def expire(self) -> None:
        self.time += 2 * LATE
        self.timers.run_due()


async def handshake(negotiation: Negotiation, sock: trio.socket.SocketType, clock: Clock) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await run_negotiation(cast(Any, negotiation), sock, LATE, clock.timers, Spinner(0.0, bool))


def start_both(nursery: trio.Nursery, victim: Victim, late: Callable[[], object]) -> None:
    """In the pass of the scheduler in which the waiting task notices its closed socket, start
    ``victim`` and call ``late``."""

    async def call() -> None:
        late()

    nursery.start_soon(victim.run)
    nursery.start_soon(call)


@pytest.mark.parametrize("news", ["link", "timer"])
async def test_a_change_in_a_handshake_wakes_no_other_task(news: str) -> None:
    with trio.fail_after(PATIENCE):
        for _ in range(REPEATS):
            ours, theirs = socket.socketpair()
            sock, clock, negotiation = trio.socket.from_stdlib_socket(ours), Clock(), Negotiation()
            with theirs:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handshake, negotiation, sock, clock)
                    await wait_all_tasks_blocked()
                    number = sock.fileno()
                    sock.close()
                    with reusing(number) as pair:
                        victim = Victim(*pair)
                        late = clock.expire if news == "timer" else negotiation.changed
                        start_both(nursery, victim, late)
                        await wait_all_tasks_blocked()
                        pair[1].send(b"x")
                        await wait_all_tasks_blocked()
                        assert victim.data == [b"x"]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        return listening.accept()[0], theirs


async def test_an_answer_goes_to_no_other_socket() -> None:
    """The peer makes room for the rest of an answer at the moment when the socket is closed."""
    with trio.fail_after(PATIENCE):
        for _ in range(REPEATS):
            ours, theirs = tcp_pair()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            theirs.setblocking(False)
            sock, clock, negotiation = trio.socket.from_stdlib_socket(ours), Clock(), Negotiation()
            negotiation.outgoing = [bytes(1 << 20)]  # type: ignore[misc]
            with theirs:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handshake, negotiation, sock, clock)
                    await wait_all_tasks_blocked()
                    number = sock.fileno()
                    while True:  # make room, so that the handshake runs in the next pass
                        try:
                            theirs.recv(1 << 20)
                        except BlockingIOError:
                            break
                    alarm, bell = socket.socketpair()
                    with alarm, bell:
                        bell.send(b"!")
                        await trio.lowlevel.wait_readable(alarm)  # wakes this task as well
                        sock.close()
                        with reusing(number) as pair:
                            await wait_all_tasks_blocked()
                            with pytest.raises(BlockingIOError):
                                pair[1].recv(1)


async def test_a_claim_that_times_out_reaches_no_other_task(runtime_directory: Path) -> None:
    """The timer of the negotiation fires in the pass in which the connection is closed."""
    private, clock = runtime_directory / "smc", Clock()
    with trio.fail_after(PATIENCE):
        async with serving(private) as server:
            answerer = server.publication.answerer
            server.publication.answerer = answerer._replace(timers=clock.timers)
            for _ in range(REPEATS):
                ours, theirs = socket.socketpair()
                sock = trio.socket.from_stdlib_socket(ours)
                with theirs:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_wait_for_the_client, server.publication, sock)
                        await wait_all_tasks_blocked()
                        number = sock.fileno()
                        sock.close()
                        with reusing(number) as pair:
                            victim = Victim(*pair)
                            start_both(nursery, victim, clock.expire)
                            await wait_all_tasks_blocked()
                            pair[1].send(b"x")
                            await wait_all_tasks_blocked()
                            assert victim.data == [b"x"]
            answerer.names.close()


async def _wait_for_the_client(publication: Any, sock: trio.socket.SocketType) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await publication.wait(sock, LATE)
