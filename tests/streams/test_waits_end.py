"""No task waits for an event that can no longer happen.

These tests combine every state of a connection that has a stream, every event of the state table
and of the host, and every kind of call that waits.  After the event, a call may still wait only if
the same call would wait if it were made now.  There are two checks.  Waking all tasks explicitly
changes nothing, so no wakeup is missing.  And the event that each waiting call needs is still
possible: data can be sent, the peer may send more, or an answer to the end may arrive.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.datapath.test_connection_endings import SIZE, A, C, D, Lone
from trio_smc import Config
from trio_smc._base.errors import ProtocolError
from trio_smc._base.timers import Timers
from trio_smc.failover import replay
from trio_smc.rnic.pump import Pump
from trio_smc.stack.budget import Budget
from trio_smc.states.tables import CONNECTION
from trio_smc.streams.rdma_stream import RdmaStream

MUCH = bytes(3 * SIZE)


class Socket:
    """A closed TCP connection: its options do not matter here."""

    def fileno(self) -> int:
        return -1

    def getpeername(self) -> object:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


class Endpoint:
    """As `rdma_stream.StreamEndpoint`."""

    closed_by_user = lingers = abandoned = False
    group: Any = None

    def __init__(self, lone: Lone) -> None:
        self.connection = lone.it

    def forgotten(self) -> None:
        self.abandoned = True


class Owner:
    def __init__(self) -> None:
        self.pump = Pump(spin=0)
        self.budget = Budget(self.pump)
        self.timers = Timers(trio.current_time, lambda: None)


class Holder:
    """A failover that has not finished (`failover.replay`)."""

    def connection_ended(self) -> None:
        pass


class Streamed(Lone):
    """A stream over a connection; the test acts as the peer."""

    stream: RdmaStream
    read_shut = False

    def make_stream(self) -> None:
        self.endpoint = Endpoint(self)
        made: Any = RdmaStream
        self.stream = made(Owner(), self.endpoint, None, Socket(), Config(checkpoints="strict"))


# --- ways into the states ------------------------------------------------------------------------

Step = Callable[[Streamed], object]

STEPS: dict[str, Step] = {
    "shutdown_wr": lambda it: it.it.shutdown_write(),
    "shutdown_both": lambda it: it.stream.shut_down_both(),
    "peer_done": lambda it: it.peer(D),
    "peer_closed": lambda it: it.peer(C),
    "abort": lambda it: it.it.abort(),
    "peer_abort": lambda it: it.peer(A),
    "unread": lambda it: it.peer(0, b"unread"),
    "unsent": lambda it: it.it.sender.sendable and it.it.send(memoryview(b"unsent")),
    "sent": lambda it: it.complete(),
    "links_lost": lambda it: it.it.links_lost(),
}
DEPTH = 4
ENDS = (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel, OSError)


def blocked_by_window(it: Streamed) -> None:
    """The peer does not read, and all data has arrived."""
    if it.it.sender.sendable:
        it.it.send(memoryview(bytes(it.it.sender.window)))
    it.complete()


def blocked_in_flight(it: Streamed) -> None:
    """The peer does not read, and no data has arrived."""
    if it.it.sender.sendable:
        it.it.send(memoryview(bytes(it.it.sender.window)))


def blocked_by_link(it: Streamed) -> None:
    """The send queue of the link is full."""
    it.channel.room = 0
    if it.it.sender.sendable:
        assert it.it.send(memoryview(b"x")) == 0


def blocked_by_urgent(it: Streamed) -> None:
    """The peer has not received the last urgent byte (4.7.5, step 3)."""
    if it.it.sender.sendable:
        it.it.send_urgent(memoryview(b"!"))
    it.complete()


def blocked_by_failover(it: Streamed) -> None:
    """Lost data is being written again (4.6)."""
    if it.it.channel is not None and not it.it.messenger.final_posted:
        it.it.hold(Holder())


BLOCKS = (
    blocked_by_window, blocked_in_flight, blocked_by_link, blocked_by_urgent, blocked_by_failover,
)  # fmt: skip


# --- calls that wait -----------------------------------------------------------------------------


# Calls that wait on one stream at the same time, by the kind of event that each waits for.
Waits = dict[str, Callable[[RdmaStream], Awaitable[object]]]

CALLS: dict[str, Waits] = {
    "bytes": {
        "writes": lambda it: it.send_all(MUCH),
        "reads": RdmaStream.receive_some,
        "urgent": RdmaStream.wait_urgent,
    },
    "buffers": {
        "writes": lambda it: it.send_all(bytearray(100_000)),
        "reads": lambda it: it.receive_some_into(bytearray(10)),
        "urgent": RdmaStream.receive_urgent,
    },
    "urgent": {
        "writes": lambda it: it.send_urgent(MUCH),
        "reads": lambda it: it.receive_by(lambda: it.try_receive(10, peek=True)),
    },
    "some": {
        "writes": lambda it: it.send_some(memoryview(b"x")),
        "urgent": RdmaStream.wait_urgent,
    },
    "might not block": {"writes": RdmaStream.wait_send_all_might_not_block},
    "aclose": {"ends": RdmaStream.aclose},
}


def expire(it: Streamed) -> None:
    """The timer expires; the state determines the event."""
    if it.host.timer is not None:
        it.fire()


def shut_down_reading(it: Streamed) -> None:
    it.read_shut = True
    it.stream.shut_down_reading()


def shut_down_both(it: Streamed) -> None:
    with contextlib.suppress(*ENDS):
        it.stream.shut_down_both()


def more_data(it: Streamed) -> None:
    if not it.it.receiver.peer_done:
        it.peer(0, b"data")


EVENTS: dict[str, Step] = {
    "established": lambda it: it.it.established(),
    "shutdown_wr": lambda it: it.it.shutdown_write(),
    "close": lambda it: it.stream.close(),
    "abort": lambda it: it.it.abort(),
    "all_sent": lambda it: it.complete(),
    "peer_done": lambda it: it.peer(D),
    "peer_closed": lambda it: it.peer(C),
    "peer_abort": lambda it: it.peer(A),
    "links_lost": lambda it: it.it.links_lost(),
    "rmbe_conflict": lambda it: it.it.rmbe_conflict(),
    "abort_sent": lambda it: it.complete(),
    "close_timeout": expire,
    "abort_timeout": expire,
    # Events of the host, the stream and other tasks.
    "tcp_reset": lambda it: it.it.tcp_reset(),
    "user_timeout": lambda it: it.it.user_timeout(),
    "disown": lambda it: it.it.disown(),
    "stream aborted": lambda it: it.stream.abort(),
    "shut down both": shut_down_both,
    "shut down reading": shut_down_reading,
    "data": more_data,
}


@contextmanager
def streamed() -> Iterator[Streamed]:
    it = Streamed()
    try:
        it.open()
        it.make_stream()
        yield it
        it.stream.close()
    finally:
        it.memory.close()


def walk(it: Streamed, path: tuple[str, ...]) -> None:
    for step in path:
        STEPS[step](it)


def facts(it: Streamed) -> tuple[object, ...]:
    """All conditions that can change the result of a call."""
    core = it.it
    return (
        core.state, *(bool(getattr(core, guard)) for guard in CONNECTION.guards),
        core.sender.sendable, core.write_closed, core.receiver.peer_done, core.receiver.purged,
        core.error is None, core.channel is None, it.endpoint.closed_by_user, core.ending,
    )  # fmt: skip


PATHS: list[tuple[str, ...]] = []


async def paths() -> list[tuple[str, ...]]:
    """One shortest path into each combination of facts."""
    if not PATHS:
        PATHS.extend(await find_paths())
    return PATHS


async def find_paths() -> list[tuple[str, ...]]:
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    front: list[tuple[str, ...]] = [()]
    for _ in range(DEPTH + 1):
        new = []
        for path in front:
            with streamed() as it:
                try:
                    walk(it, path)
                except (OSError, ProtocolError, trio.BrokenResourceError):
                    continue
                if found.setdefault(facts(it), path) is path:
                    new.append(path)
        front = [(*path, step) for path in new for step in STEPS]
    return list(found.values())


class Waiting:
    """The calls that were made, and those of them that still wait."""

    def __init__(self, it: Streamed, calls: Waits, nursery: trio.Nursery) -> None:
        self.it = it
        self.kinds: set[str] = set()
        for kind, call in calls.items():
            self.kinds.add(kind)
            nursery.start_soon(self._call, kind, call)

    async def _call(self, kind: str, call: Callable[[RdmaStream], Awaitable[object]]) -> None:
        with contextlib.suppress(*ENDS):
            await call(self.it.stream)
        self.kinds.remove(kind)

    def standing(self) -> tuple[object, ...]:
        return sorted(self.kinds), self.it.it.messenger.produced, self.it.it.receiver.consumed

    def check_possible(self, description: str) -> None:
        """The event that each call waits for can still come."""
        core = self.it.it
        receiver, sender = core.receiver, core.sender
        if "writes" in self.kinds:
            assert sender.sendable or (sender.borrowed and core.channel is not None), description
        if "reads" in self.kinds:
            assert not receiver.peer_done, description
            assert receiver.error is None, description
            assert not self.it.read_shut, description
            assert not self.it.endpoint.closed_by_user, description
        if "urgent" in self.kinds:
            assert not receiver.urgent_over, description
        if "ends" in self.kinds:
            assert core.ending, description
            assert self.it.host.timer is not None, description
        assert not self.kinds or core.state != "CLOSED", description


@asynccontextmanager
async def waiting(it: Streamed, calls: Waits) -> AsyncIterator[Waiting]:
    async with trio.open_nursery() as nursery:
        yield Waiting(it, calls, nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.rfc("4.8.1/7", "4.8.2/11")
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
async def test_no_event_leaves_a_task_waiting_for_ever(
    calls: str, block: Callable[[Streamed], None]
) -> None:
    seen: set[tuple[str, str]] = set()
    ended = 0
    for path in await paths():
        for event, happens in EVENTS.items():
            with streamed() as it:
                walk(it, path)
                seen.add((it.it.state, event))
                block(it)
                async with waiting(it, CALLS[calls]) as now:
                    await wait_all_tasks_blocked()
                    before = set(now.kinds)
                    happens(it)
                    await wait_all_tasks_blocked()
                    description = f"{path} {event}: {now.kinds} in {it.it.state}"
                    left = now.standing()
                    now.check_possible(description)
                    it.it.wake_all()
                    await wait_all_tasks_blocked()
                    assert now.standing() == left, f"a wakeup is missing: {description}"
                    ended += len(before) - len(now.kinds)
    assert ended > 20, "no call has waited"
    assert seen == {(s, e) for s in CONNECTION.states if s != "INIT" for e in EVENTS}


@pytest.mark.rfc("4.8.1/7")
async def test_no_event_leaves_a_link_waiting_for_a_connection() -> None:
    """The deletion of a link waits until its connections have no data in flight there."""
    waited = 0
    for path in await paths():
        for event, happens in EVENTS.items():
            with streamed() as it:
                walk(it, path)
                blocked_in_flight(it)
                left: list[bool] = []
                replay.hold(it.it, lambda left=left: left.append(True))  # type: ignore[misc]
                waited += not left
                happens(it)
                description = f"{path} {event}: in {it.it.state}"
                assert left or it.it.channel is not None, description
                it.complete()
                assert left == [True], description
    assert waited > 20, "no connection has had data in flight"
