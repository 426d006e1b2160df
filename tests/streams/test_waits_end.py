"""No task waits for an event that can no longer happen.

These tests combine every state of a connection that has a stream, every event of the state table
and of the host, and every kind of call that waits.  After the event, a call may continue to wait
only if a new call would wait as well.  There are two checks.  First, waking all tasks explicitly
changes nothing, so no wakeup is missing.  Second, the event that each waiting call needs is still
possible: the stream can send data, the peer may send more, or an answer to the end may arrive.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

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
STRICT: Final = Config(checkpoints="strict")
"""Of all streams: to make and check a Config takes a tenth of the time of these tests."""


class Socket:
    """A closed TCP connection; these tests do not use its options."""

    def fileno(self) -> int:
        return -1

    def getpeername(self) -> object:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


class Endpoint:
    """A minimal `rdma_stream.StreamEndpoint`."""

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
    """A failover in progress (`failover.replay`)."""

    def connection_ended(self) -> None:
        pass


class Streamed(Lone):
    """A stream over a connection; the test acts as the peer."""

    stream: RdmaStream
    read_shut = False

    def make_stream(self) -> None:
        self.endpoint = Endpoint(self)
        made: Any = RdmaStream
        self.stream = made(Owner(), self.endpoint, None, Socket(), STRICT)


# --- ways into the states ------------------------------------------------------------------------

Step = Callable[[Streamed], object]

STEPS: dict[str, Step] = {
    "shutdown_wr": lambda side: side.it.shutdown_write(),
    "shutdown_both": lambda side: side.stream.shut_down_both(),
    "peer_done": lambda side: side.peer(D),
    "peer_closed": lambda side: side.peer(C),
    "abort": lambda side: side.it.abort(),
    "peer_abort": lambda side: side.peer(A),
    "unread": lambda side: side.peer(0, b"unread"),
    "unsent": lambda side: side.it.sender.sendable and side.it.send(memoryview(b"unsent")),
    "sent": lambda side: side.complete(),
    "links_lost": lambda side: side.it.links_lost(),
}
DEPTH = 4
ENDS = (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel, OSError)


def blocked_by_window(side: Streamed) -> None:
    """The peer does not read, and all data has arrived."""
    if side.it.sender.sendable:
        side.it.send(memoryview(bytes(side.it.sender.window)))
    side.complete()


def blocked_in_flight(side: Streamed) -> None:
    """The peer does not read, and no data has arrived."""
    if side.it.sender.sendable:
        side.it.send(memoryview(bytes(side.it.sender.window)))


def blocked_by_link(side: Streamed) -> None:
    """The send queue of the link is full."""
    side.channel.room = 0
    if side.it.sender.sendable:
        assert side.it.send(memoryview(b"x")) == 0


def blocked_by_urgent(side: Streamed) -> None:
    """The peer has not received the last urgent byte (4.7.5, step 3)."""
    if side.it.sender.sendable:
        side.it.send_urgent(memoryview(b"!"))
    side.complete()


def blocked_by_failover(side: Streamed) -> None:
    """A failover writes lost data again (4.6)."""
    if side.it.channel is not None and not side.it.messenger.final_posted:
        side.it.hold(Holder())


BLOCKS = (
    blocked_by_window, blocked_in_flight, blocked_by_link, blocked_by_urgent, blocked_by_failover,
)  # fmt: skip


# --- calls that wait -----------------------------------------------------------------------------


# Calls that wait on one stream at the same time, by the kind of event that each call waits for.
Waits = dict[str, Callable[[RdmaStream], Awaitable[object]]]

CALLS: dict[str, Waits] = {
    "bytes": {
        "writes": lambda stream: stream.send_all(MUCH),
        "reads": RdmaStream.receive_some,
        "urgent": RdmaStream.wait_urgent,
    },
    "buffers": {
        "writes": lambda stream: stream.send_all(bytearray(100_000)),
        "reads": lambda stream: stream.receive_some_into(bytearray(10)),
        "urgent": RdmaStream.receive_urgent,
    },
    "urgent": {
        "writes": lambda stream: stream.send_urgent(MUCH),
        "reads": lambda stream: stream.receive_by(lambda: stream.try_receive(10, peek=True)),
    },
    "some": {
        "writes": lambda stream: stream.send_some(memoryview(b"x")),
        "urgent": RdmaStream.wait_urgent,
    },
    "might not block": {"writes": RdmaStream.wait_send_all_might_not_block},
    "aclose": {"ends": RdmaStream.aclose},
}


def expire(side: Streamed) -> None:
    """The timer expires; the state determines the event."""
    if side.host.timer is not None:
        side.fire()


def shut_down_reading(side: Streamed) -> None:
    side.read_shut = True
    side.stream.shut_down_reading()


def shut_down_both(side: Streamed) -> None:
    with contextlib.suppress(*ENDS):
        side.stream.shut_down_both()


def more_data(side: Streamed) -> None:
    if not side.it.receiver.peer_done:
        side.peer(0, b"data")


EVENTS: dict[str, Step] = {
    "established": lambda side: side.it.established(),
    "shutdown_wr": lambda side: side.it.shutdown_write(),
    "close": lambda side: side.stream.close(),
    "abort": lambda side: side.it.abort(),
    "all_sent": lambda side: side.complete(),
    "peer_done": lambda side: side.peer(D),
    "peer_closed": lambda side: side.peer(C),
    "peer_abort": lambda side: side.peer(A),
    "links_lost": lambda side: side.it.links_lost(),
    "rmbe_conflict": lambda side: side.it.rmbe_conflict(),
    "abort_sent": lambda side: side.complete(),
    "close_timeout": expire,
    "abort_timeout": expire,
    # Events of the host, the stream and other tasks.
    "tcp_reset": lambda side: side.it.tcp_reset(),
    "user_timeout": lambda side: side.it.user_timeout(),
    "disown": lambda side: side.it.disown(),
    "stream aborted": lambda side: side.stream.abort(),
    "shut down both": shut_down_both,
    "shut down reading": shut_down_reading,
    "data": more_data,
}


@contextmanager
def streamed() -> Iterator[Streamed]:
    side = Streamed()
    try:
        side.open()
        side.make_stream()
        yield side
        side.stream.close()
    finally:
        side.memory.close()


def walk(side: Streamed, path: tuple[str, ...]) -> None:
    for step in path:
        STEPS[step](side)


def facts(side: Streamed) -> tuple[object, ...]:
    """All conditions that can influence the result of a call."""
    core = side.it
    return (
        core.state, *(bool(getattr(core, guard)) for guard in CONNECTION.guards),
        core.sender.sendable, core.write_closed, core.receiver.peer_done, core.receiver.purged,
        core.error is None, core.channel is None, side.endpoint.closed_by_user, core.ending,
    )  # fmt: skip


PATHS: list[tuple[str, ...]] = []


async def paths() -> list[tuple[str, ...]]:
    """A shortest path into each combination of facts."""
    if not PATHS:
        PATHS.extend(await find_paths())
    return PATHS


async def find_paths() -> list[tuple[str, ...]]:
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    front: list[tuple[str, ...]] = [()]
    for _ in range(DEPTH + 1):
        new = []
        for path in front:
            with streamed() as side:
                try:
                    walk(side, path)
                except (OSError, ProtocolError, trio.BrokenResourceError):
                    continue
                if found.setdefault(facts(side), path) is path:
                    new.append(path)
        front = [(*path, step) for path in new for step in STEPS]
    return list(found.values())


class Waiting:
    """Starts calls, and records which of them still wait."""

    def __init__(self, side: Streamed, calls: Waits, nursery: trio.Nursery) -> None:
        self.side = side
        self.kinds: set[str] = set()
        for kind, call in calls.items():
            self.kinds.add(kind)
            nursery.start_soon(self._call, kind, call)

    async def _call(self, kind: str, call: Callable[[RdmaStream], Awaitable[object]]) -> None:
        with contextlib.suppress(*ENDS):
            await call(self.side.stream)
        self.kinds.remove(kind)

    def standing(self) -> tuple[object, ...]:
        return sorted(self.kinds), self.side.it.messenger.produced, self.side.it.receiver.consumed

    def check_possible(self, description: str) -> None:
        """Check that the event that each waiting call needs is still possible."""
        core = self.side.it
        receiver, sender = core.receiver, core.sender
        if "writes" in self.kinds:
            assert sender.sendable or (sender.borrowed and core.channel is not None), description
        if "reads" in self.kinds:
            assert not receiver.peer_done, description
            assert receiver.error is None, description
            assert not self.side.read_shut, description
            assert not self.side.endpoint.closed_by_user, description
        if "urgent" in self.kinds:
            assert not receiver.urgent_over, description
        if "ends" in self.kinds:
            assert core.ending, description
            assert self.side.host.timer is not None, description
        assert not self.kinds or core.state != "CLOSED", description


@asynccontextmanager
async def waiting(side: Streamed, calls: Waits) -> AsyncIterator[Waiting]:
    async with trio.open_nursery() as nursery:
        yield Waiting(side, calls, nursery)
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
            with streamed() as side:
                walk(side, path)
                seen.add((side.it.state, event))
                block(side)
                async with waiting(side, CALLS[calls]) as now:
                    await wait_all_tasks_blocked()
                    before = set(now.kinds)
                    happens(side)
                    await wait_all_tasks_blocked()
                    description = f"{path} {event}: {now.kinds} in {side.it.state}"
                    left = now.standing()
                    now.check_possible(description)
                    side.it.wake_all()
                    await wait_all_tasks_blocked()
                    assert now.standing() == left, f"a wakeup is missing: {description}"
                    ended += len(before) - len(now.kinds)
    assert ended > 20, "no call has waited"
    assert seen == {(s, e) for s in CONNECTION.states if s != "INIT" for e in EVENTS}


@pytest.mark.rfc("4.8.1/7")
async def test_no_event_leaves_a_link_waiting_for_a_connection() -> None:
    """The deletion of a link waits until its connections have no data in flight on this link."""
    waited = 0
    for path in await paths():
        for event, happens in EVENTS.items():
            with streamed() as side:
                walk(side, path)
                blocked_in_flight(side)
                left: list[bool] = []
                replay.hold(side.it, lambda left=left: left.append(True))  # type: ignore[misc]
                waited += not left
                happens(side)
                description = f"{path} {event}: in {side.it.state}"
                assert left or side.it.channel is not None, description
                side.complete()
                assert left == [True], description
    assert waited > 20, "no connection has had data in flight"
