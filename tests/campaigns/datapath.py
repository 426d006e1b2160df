"""Two connection cores under random schedules: every byte arrives, in order, once.

    python -m tests.campaigns.datapath --cases N --seed S [--case K]

A case draws two rings (a few bytes to 64 KiB, with or without eye catcher), settings (chunks,
copies, merged messages, links with little room) and a weight for each kind of step: a side sends,
receives or peeks at a piece, posted work is delivered or completed, deferred messages are flushed.
Both sides send all the time. Each side half-closes when it has sent all its data, and closes when
it has read the peer's data to the end.

Every third case is a wild one: the applications also close and abort at any time, TCP resets cross
the messages, and sometimes all links are lost.

In half of all cases connections move to other links, because their link fails or is left, on both
sides and several times in a row (RFC 7609, 4.6; `tests.campaigns._moves`). In these cases the
campaign checks every unread byte after each step: a replay must not change an announced byte.

The campaign checks these rules:

- Every byte is right.
- No side writes outside of the granted window (the receiver would reset).
- No side is stuck while the other end reads and the links move.
- Both connections are CLOSED in the end, by FIN (a wild case: by FIN or RST, without a timer).
- No message follows the flags C and A.
- All borrowed memory is given back.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tests.campaigns._moves import Moves, crowd
from tests.campaigns._options import parse
from tests.datapath.datapath_pair import Cdc, FakeChannel, Pair
from trio_smc.datapath.connection import Connection
from trio_smc.wire.cdc import ABNORMAL_CLOSE, CONNECTION_CLOSED

LAST_WORD = ABNORMAL_CLOSE | CONNECTION_CLOSED
_MEMO: dict[int, bytes] = {}
Counts: TypeAlias = tuple[int, int, int, int, int, int]
"""Bytes, CDC messages, wraps, stalls, links failed, links left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign."""

    cases: int
    bytes_moved: int
    messages: int
    wraps: int
    stalls: int
    failures: int
    departures: int


class End:
    """One application: the data that it sends, and the data that it must receive."""

    patient = True
    """True if the application sometimes waits until no part of its buffer is borrowed."""

    def __init__(self, connection: Connection, outgoing: bytes, incoming: bytes) -> None:
        self.connection = connection
        self.outgoing = outgoing
        self.incoming = incoming
        self.sent = 0
        self.received = 0
        self.closed = False
        self.lent: bytearray | None = None

    def send(self, rng: random.Random, largest: int) -> None:
        connection = self.connection
        if self.closed or connection.write_closed:
            return
        if self.lent is not None:
            if connection.sender.borrowed:
                return
            self.lent[:] = bytes(len(self.lent))  # the memory belongs to the application again
            self.lent = None
        if self.sent == len(self.outgoing):
            connection.shutdown_write()
            return
        size = rng.randint(1, largest)
        piece = self.outgoing[self.sent : self.sent + size]
        if rng.random() < 0.5:
            buffer = bytearray(piece)
            self.sent += connection.send(memoryview(buffer))
            if connection.sender.borrowed and self.patient and rng.random() < 0.5:
                self.lent = buffer
            elif connection.sender.borrowed:
                # As a cancelled send_all does. The fake link writes at delivery, from the
                # memory posted, so the buffer itself may not be changed before.
                connection.sender.keep_copies()
        else:
            self.sent += connection.send(memoryview(piece))

    def receive(self, rng: random.Random, largest: int) -> None:
        connection = self.connection
        if self.closed:
            return
        size = rng.randint(1, largest)
        if rng.random() < 0.2:
            seen = connection.receiver.peek(size)
            assert seen == self.incoming[self.received : self.received + len(seen)], "wrong bytes"
        if rng.random() < 0.5:
            got = connection.receiver.receive(size)
        else:
            buffer = bytearray(size)
            got = bytes(buffer[: connection.receiver.receive_into(buffer)])
        assert got == self.incoming[self.received : self.received + len(got)], "wrong bytes"
        self.received += len(got)
        if connection.receiver.at_eof:
            self.at_end()
            if connection.write_closed:
                self.closed = True
                connection.close()

    def at_end(self) -> None:
        assert self.received == len(self.incoming), "the stream ended early"


class WildEnd(End):
    """An application that ends at any time, and tolerates errors."""

    patient = False

    def send(self, rng: random.Random, largest: int) -> None:
        with contextlib.suppress(OSError):
            super().send(rng, largest)

    def receive(self, rng: random.Random, largest: int) -> None:
        with contextlib.suppress(OSError):
            super().receive(rng, largest)

    def at_end(self) -> None:
        assert self.received <= len(self.incoming)

    def end(self, rng: random.Random) -> None:
        """Shut down, close or abort."""
        kind = rng.randrange(4)
        if kind == 0:
            self.connection.shutdown_write()
            return
        self.closed = True
        if kind == 1:
            self.connection.abort()
        else:
            self.connection.close()


def text(rng: random.Random, length: int) -> bytes:
    """Bytes in which a shift by any small distance shows; cheap to make."""
    salt = rng.randrange(16)
    if salt not in _MEMO:
        _MEMO[salt] = random.Random(salt).randbytes(1 << 18)
    return _MEMO[salt][:length]


def _size(rng: random.Random) -> int:
    return int(2 ** rng.uniform(3.2, 16))


def run_case(rng: random.Random) -> Counts:
    """One schedule; AssertionError on failure."""
    sizes = (_size(rng), _size(rng))
    pair = Pair(
        sizes,
        (rng.random() < 0.5, rng.random() < 0.5),
        chunks=rng.random() < 0.7,
        copy_limit=rng.choice([0, 16, 1000, 65536]),
        merge=rng.random() < 0.3,
    )
    try:
        return (_run_wild if rng.randrange(3) == 0 else run_transfers)(pair, rng, sizes)
    finally:
        pair.close()


def _moves(pair: Pair, rng: random.Random) -> Moves | None:
    """Moves to links with little room in some cases; None: the first links are used to the end."""
    for channel in pair.channels:
        crowd(channel, rng)
    return Moves(pair, rng, rng.choice([5, 20, 100])) if rng.random() < 0.5 else None


def _look_at_unread(ends: tuple[End, End]) -> None:
    for end in ends:
        connection = end.connection
        if not end.closed and connection.error is None:
            seen = connection.receiver.peek(1 << 20)
            assert seen == end.incoming[end.received : end.received + len(seen)], "unread changed"


def run_transfers(pair: Pair, rng: random.Random, sizes: tuple[int, int]) -> Counts:
    moves = _moves(pair, rng)
    texts = [
        text(rng, rng.choice([0, 1, rng.randrange(6 * size), rng.randrange(20 * size)]))
        for size in (sizes[1], sizes[0])
    ]
    ends = (End(pair.a, texts[0], texts[1]), End(pair.b, texts[1], texts[0]))
    # Sizes that keep a case at a few hundred steps, mixed with small ones.
    largest = [max(4, len(t) // rng.choice([3, 10, 50])) for t in texts]
    kinds = _kinds(rng)
    steps = 0
    while pair.states() != ("CLOSED", "CLOSED"):
        steps += 1
        if steps % 100 == 0:
            # With any weights each kind of step gets a turn, so that a stand-still is a real one.
            before = _progress(pair, ends)
            pair.settle()
            for side in (0, 1):
                ends[side].send(rng, largest[side])
                ends[side].receive(rng, 1 << 20)
                pair.settle()
            assert _progress(pair, ends) != before, f"stuck in {pair.states()}"
        _step(pair, ends, rng, next(kinds), largest)
        if moves is not None:
            moves.step()
            _look_at_unread(ends)
    pair.settle()
    for end, host in zip(ends, pair.hosts, strict=True):
        assert end.received == len(end.incoming)
        assert end.connection.error is None
        assert host.calls == ["close_tcp", "closed"], host.calls
        assert host.timer is None
        assert end.connection.stale_cdcs == 0 or moves is not None
    moved = sum(map(len, texts))
    wraps = sum(len(t) // (n - 4) for t, n in zip(texts, (sizes[1], sizes[0]), strict=True))
    messages = pair.a.messenger.cdcs_sent + pair.b.messenger.cdcs_sent
    stalls = pair.a.sender.window_stalls + pair.b.sender.window_stalls
    return moved, messages, wraps, stalls, *_counted(moves)


def _counted(moves: Moves | None) -> tuple[int, int]:
    return (0, 0) if moves is None else (moves.failures, moves.departures)


def _run_wild(pair: Pair, rng: random.Random, sizes: tuple[int, int]) -> Counts:
    moves = _moves(pair, rng)
    texts = [text(rng, rng.randrange(1, 20 * size)) for size in (sizes[1], sizes[0])]
    ends = (WildEnd(pair.a, texts[0], texts[1]), WildEnd(pair.b, texts[1], texts[0]))
    largest = [max(4, len(t) // 10) for t in texts]
    kinds = _kinds(rng)
    patience = rng.choice([3, 30, 300])
    resets = [False, False]  # the peer's TCP has got the reset
    while not (ends[0].closed and ends[1].closed):
        _step(pair, ends, rng, next(kinds), largest)
        if moves is not None:
            moves.step()
        side = rng.randrange(2)
        if rng.randrange(patience) == 0:
            ends[side].end(rng)
        if not resets[side] and rng.random() < 0.2 and "reset_tcp" in pair.hosts[side].calls:
            resets[side] = True
            pair.connections[1 - side].tcp_reset()
        if rng.randrange(10 * patience) == 0:
            for end in ends:
                end.connection.links_lost()
            for channel in pair.channels:
                channel.queue.clear()
                channel.uncompleted.clear()
    pair.settle()
    for end, host in zip(ends, pair.hosts, strict=True):
        assert end.connection.state == "CLOSED", f"{pair.states()} after both have ended"
        assert host.calls.count("closed") == 1
        assert sum(call.endswith("_tcp") for call in host.calls) == 1
        assert host.timer is None
    for channel in (*pair.channels, *(moves.old if moves is not None else ())):
        messages = [entry for entry in channel.log if isinstance(entry, Cdc)]
        last = [i for i, entry in enumerate(messages) if entry.endings & LAST_WORD]
        assert last in ([], [len(messages) - 1]), "a message follows C or A"
        assert not last or channel.log[-1] is messages[-1]
    return (
        ends[0].received + ends[1].received,
        pair.a.messenger.cdcs_sent + pair.b.messenger.cdcs_sent,
        0,
        pair.a.sender.window_stalls + pair.b.sender.window_stalls,
        *_counted(moves),
    )


def _kinds(rng: random.Random) -> Iterator[int]:
    """An endless sequence of kinds of steps, some of them rarer than others."""
    weights = [rng.choice([1, 1, 3, 10]) for _ in range(9)]
    while True:
        yield from rng.choices(range(9), weights, k=50)


def _progress(pair: Pair, ends: tuple[End, End]) -> tuple[object, ...]:
    return (
        pair.states(),
        [(end.sent, end.received, end.connection.write_closed) for end in ends],
    )


def _step(
    pair: Pair,
    ends: tuple[End, End],
    rng: random.Random,
    kind: int,
    largest: list[int],
) -> None:
    side = rng.randrange(2)
    channel: FakeChannel = pair.channels[side]
    if kind < 2:
        ends[side].send(rng, largest[side])
    elif kind < 4:
        ends[side].receive(rng, largest[1 - side])
    elif kind == 4:
        ends[side].receive(rng, 4)
    elif kind < 7:
        channel.deliver(rng.randint(1, 4))
    elif kind == 7:
        channel.complete(rng.randint(1, 4))
    else:
        pair.flush()


def run(cases: int, seed: int, only: int | None = None) -> Result:
    """Run ``cases`` cases, or case number ``only`` alone; AssertionError names the case."""
    totals = [0] * 6
    for case in range(cases) if only is None else (only,):
        try:
            for i, value in enumerate(run_case(random.Random(f"{seed}/{case}"))):
                totals[i] += value
        except Exception as exc:
            exc.add_note(f"replay: --seed {seed} --case {case}")
            raise
    return Result(
        cases=cases if only is None else 1,
        bytes_moved=totals[0],
        messages=totals[1],
        wraps=totals[2],
        stalls=totals[3],
        failures=totals[4],
        departures=totals[5],
    )


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__, cases=2000, replay="case")
    seed = arguments.seed
    start = time.perf_counter()
    result = run(arguments.cases, seed, arguments.case)
    seconds = time.perf_counter() - start
    print(
        f"datapath: {result.cases} schedules, {result.bytes_moved} bytes, {result.messages} CDC "
        f"messages, {result.wraps} wraps, {result.stalls} stalls, {result.failures} links failed, "
        f"{result.departures} left in order, seed {seed}, {seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
