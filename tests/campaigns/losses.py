"""Messages acknowledged and not placed, while links fail: only their connections are reset.

    python -m tests.campaigns.losses --cases 50000 [--seed N] [--case K]

50,000 cases are the whole, 3,000 schedules; fewer run proportionately fewer.

A schedule is two whole stacks with 3-6 RNICs each and up to 14 connections, whose queue pairs fail
again and again: at once, with a request that is lost, or whose acknowledgement is, or that is
acknowledged and not placed (RFC 7609, 4.6.1), or whose delivery is unknown (`DeliveryUnknown`).
Failures do not wait for each other, so validation messages are lost as well, and wait for what lies
behind others.  One link that works for both sides is always left.  In half of the schedules what
need not wait is done at once, without a completion (`QueuePair.deliver`).  An application that
could not send all waits until its connection calls it.  This is the campaign
`failover` without processes, threads and time: it replays.

In every schedule: no application gets a byte that was not sent, or in another order; a connection
of which a message was acknowledged and not placed breaks at both ends, unless it was closed; no
other one does, and it carries bytes both ways in the end.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from tests.campaigns._cases import Outcome, print_outcome, run_cases
from tests.campaigns._options import parse
from tests.rendezvous.links.link_group_world import SIZES, GroupWorld, Stream
from tests.rnic.memory_rnic import Fate, PlainQueuePair
from trio_smc.rnic.verbs import QpState
from trio_smc.wire.cdc import CDC_TYPE, FAILOVER_VALIDATION, decode_untrusted

__all__ = ["KINDS", "Case", "Result", "run"]

WHOLE = 50_000
SCHEDULES = 3_000
_SETTLING = 70.0
_WORKLOAD = {"nudge": 120, "send": 40, "receive": 10, "open": 5, "close": 1, "pass_time": 1}
KINDS = ("fail", "fail_noticed", "lose", "unacknowledged", *["unplaced"] * 3, "doubt")
_FATES = {"lose": Fate.LOST, "unacknowledged": Fate.UNACKNOWLEDGED, "unplaced": Fate.UNPLACED}


@dataclass
class Result(Outcome):
    """The result of a campaign.

    Fields:
      streams: connections that had to break, that may have, and that were to go on.
      moves: how often a connection's sending went to another link.
    """

    moves: int = 0
    streams: Counter[str] = field(default_factory=Counter)


class Case:
    """One schedule."""

    def __init__(self, seed: int, case: int) -> None:
        self.rng = rng = random.Random(f"{seed}/{case}")
        self.steps = int(60 * 8 ** rng.random())
        self.fault_rate = rng.choice((0.02, 0.05, 0.1))
        self.rnics = rng.randint(3, 6)
        self.at_once = rng.random() < 0.5
        self.moves = 0
        self.faults: Counter[str] = Counter()
        self.streams: Counter[str] = Counter()
        # Alert tokens of messages that were acknowledged and not placed.
        self._unplaced: set[int] = set()
        self._doubt = False  # the next message that is done at once

    def run(self) -> None:
        """Run it; AssertionError says which rule was broken."""
        rng = self.rng
        with GroupWorld(rng, (self.rnics, self.rnics)) as world:
            self.world = world
            world.fabric.at_once = self.at_once
            world.fabric.doubt = self._doubts
            for _ in range(4):
                self._do_open()
            world.pass_time(1.0)
            kinds, weights = tuple(_WORKLOAD), tuple(_WORKLOAD.values())
            for _ in range(self.steps):
                if rng.random() < self.fault_rate:
                    self._fault(rng.choice(KINDS))
                elif rng.random() < 0.02:
                    self._look_away(rng.randrange(2))
                else:
                    getattr(self, f"_do_{rng.choices(kinds, weights)[0]}")()
            self._settle()
            self._judge()

    # --- what applications do --------------------------------------------------------------------

    def _do_nudge(self) -> None:
        self.world.nudge()

    def _look_away(self, place: int) -> None:
        """One side does not look for a while, and the other one's links fail in a row."""
        world, rng = self.world, self.rng
        for _ in range(rng.choice((10, 30, 60))):
            pick = rng.random()
            if pick < 0.15:
                self._fault(rng.choice(KINDS))
            elif pick < 0.45 and world.streams:
                rng.choice(world.streams).send(1 - place, rng.choice((1, 100, 3000)))
            elif pick < 0.6:
                world.sides[1 - place].stack.pump.drain()
            else:
                ready = world.deliverable()
                if ready:
                    qp = rng.choice(ready)
                    for _ in range(rng.choice((1, 4, 16))):
                        if qp in world.deliverable():
                            world.execute(qp)

    def _do_send(self) -> None:
        if self.world.streams:
            stream = self.rng.choice(self.world.streams)
            stream.send(self.rng.randrange(2), self.rng.choice((1, 100, 3000, 16000)))

    def _do_receive(self) -> None:
        if self.world.streams:
            self.rng.choice(self.world.streams).receive(self.rng.randrange(2))

    def _do_open(self) -> None:
        if len(self.world.streams) < 14:
            self.world.open(self.rng.choice(SIZES))

    def _do_close(self) -> None:
        if self.rng.random() < 0.3 and self.world.streams:
            self.rng.choice(self.world.streams).close(self.rng.randrange(2))

    def _do_pass_time(self) -> None:
        self.world.pass_time(self.rng.choice((0.01, 0.1, 1.0)))

    # --- what goes wrong -------------------------------------------------------------------------

    def _fault(self, kind: str) -> None:
        world, rng = self.world, self.rng
        if kind == "doubt":
            self._doubt = True
            return
        if kind == "unplaced":
            pairs = [qp for qp in world.deliverable() if _acknowledged(qp)]
        elif kind in _FATES:
            pairs = world.deliverable()
        else:
            pairs = [qp for qp in world.queue_pairs() if qp.state is QpState.RTS]
        pairs = [qp for qp in pairs if self._spares(qp)]
        if not pairs:
            return
        qp = rng.choice(pairs)
        if kind == "unplaced":
            message = decode_untrusted(qp.work[0].message or b"")
            if not message.producer_flags & FAILOVER_VALIDATION:
                self._unplaced.add(message.alert_token)
        if kind in _FATES:
            qp.execute(_FATES[kind])
        if kind not in ("lose", "unacknowledged"):
            qp.fail(notices=kind == "fail_noticed" or (kind == "unplaced" and rng.random() < 0.5))
        self.faults[kind] += 1

    def _doubts(self, qp: PlainQueuePair) -> bool | None:
        """See `Fabric.doubt`."""
        if not self._doubt or not self._spares(qp):
            return None
        self._doubt = False
        self.faults["doubt"] += 1
        return self.rng.random() < 0.5

    def _spares(self, qp: PlainQueuePair) -> bool:
        """True if another link works for both sides."""
        ends = {qp, qp.peer()}
        for side in self.world.sides:
            for group in side.groups:
                for link in group.links.usable():
                    other = link.qp
                    assert isinstance(other, PlainQueuePair)
                    peer = other.peer()
                    if other in ends or peer is None or not self._usable(peer):
                        continue
                    if other.state is peer.state is QpState.RTS and other.reaches(peer):
                        return True
        return False

    def _usable(self, qp: PlainQueuePair) -> bool:
        return any(
            link.qp is qp
            for side in self.world.sides
            for group in side.groups
            for link in group.links.usable()
        )

    # --- the end ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        world = self.world
        self._doubt = False
        for qp in world.queue_pairs():
            if not qp.places:
                qp.fail(notices=False)
        world.pass_time(_SETTLING)
        assert all(stream.settled for stream in world.streams), "a rendezvous never ends"

    def _judge(self) -> None:
        world = self.world
        streams = [stream for stream in world.streams if stream.both]
        for stream in streams:
            stream.check_waits()
            for place in (0, 1):
                self._drink(stream, place)
                stream.send(place, 500)
        world.settle()
        for stream in streams:
            for place in (0, 1):
                self._drink(stream, place)
        for stream in streams:
            connections = stream.call.connections
            self.moves += sum(each.failovers for each in connections)
            lost = any(each.alert_token in self._unplaced for each in connections)
            if any(stream.closed):
                self.streams["closed"] += 1
                continue
            alive = [stream.alive(place) for place in (0, 1)]
            assert alive == [not lost] * 2, f"of its messages one was lost: {lost}, alive: {alive}"
            self.streams["broken" if lost else "alive"] += 1
            missing = [flow.sent - flow.received for flow in stream.flows]
            assert lost or missing == [0, 0], f"missing bytes: {missing}"
        for stream in streams:
            for place in (0, 1):
                stream.close(place)
        world.settle()

    def _drink(self, stream: Stream, place: int) -> None:
        while stream.receive(place):
            self.world.settle()


def _acknowledged(qp: PlainQueuePair) -> bool:
    """True if the next request is a CDC message that the peer's RNIC would acknowledge."""
    message, peer = qp.work[0].message, qp.peer()
    is_cdc = message is not None and message[0] == CDC_TYPE
    return is_cdc and peer is not None and peer.places and qp.reaches(peer)


def run(cases: int, seed: int, *, first: int = 0, step: int = 1) -> Result:
    """Run ``cases`` schedules: number ``first`` and every ``step``-th one after it."""
    result = Result(cases, seed)
    numbers = range(first, first + cases * step, step)
    for case in run_cases("losses", Case, numbers, result):
        result.moves += case.moves
        result.faults.update(case.faults)
        result.streams.update(case.streams)
    return result


def main() -> int:
    """Return the exit code: 0 when every case kept the rules."""
    arguments = parse(__doc__, cases=WHOLE, replay="case")
    if arguments.case is not None:
        logging.basicConfig(level=logging.INFO)
        Case(arguments.seed, arguments.case).run()
        return 0
    logging.disable(logging.WARNING)  # links fail here all the time
    result = run(max(50, SCHEDULES * arguments.cases // WHOLE), arguments.seed)
    return print_outcome("losses", result, f"{result.moves} moves", streams=result.streams)


if __name__ == "__main__":
    sys.exit(main())
