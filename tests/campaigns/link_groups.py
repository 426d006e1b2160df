"""Random schedules of two whole link groups, with everything that can happen to links and RNICs.

    python -m tests.campaigns.link_groups --cases 50000 [--seed N] [--case K]

50,000 cases are the whole, 20,000 schedules in two processes; fewer run proportionately fewer.

A schedule is two stacks with 1-8 RNICs each and 50-400 steps.  A step is small: a few requests of
one queue pair are executed, one side polls its completions, a handshake proceeds, an application
sends, receives, opens or closes.  Each schedule draws some of these faults: requests that are lost,
or whose acknowledgement is lost, or that are acknowledged and not placed;
queue pairs that fail with or without the other side noticing; paths that are cut; addresses that
get no answer; ports that go down and return; RNICs that appear, fail, run out of queue pairs
or memory, are drained and put back; operators that delete links and terminate groups; time that
passes.  Then the schedule runs until nothing changes any more.

These rules hold in every schedule:

1. No call raises, no traceback is logged, and the schedule comes to rest.
2. No application gets a byte that was not sent, or in another order, at any time; no write to an
   unregistered address.
3. Both sides agree on groups, links (numbers, queue pairs, kind), RTokens (each side knows the
   registered ones of the other side, on every link) and connections (on a usable link, into the
   right element), or neither side has them.
4. At the end open connections carry bytes in both directions, or both ends get an error.
5. At the end only resources of groups and connections are open; after both stacks have closed,
   nothing is open.
6. If no link or RNIC had a fault, no connection breaks.
7. If each failed or deleted link left another one, known to both sides, that shared no RNIC with
   it, no connection breaks.
8. If RNICs and paths work again, and time has passed, the groups are as good as the RNICs allow;
   asymmetric is enough where an operator has deleted a link.
9. No side finds a violation of the protocol.

A schedule depends on the seed and its number only: ``--seed N --case K`` replays number K alone,
and prints every LLC message and every change of state.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from tests.campaigns._cases import Outcome, print_outcome, run_cases
from tests.campaigns._link_group_faults import FAULTS, GENTLE, Faults
from tests.campaigns._options import parse
from tests.rendezvous.links.link_group_rules import check_agreement, kind_of
from tests.rendezvous.links.link_group_world import SIZES, GroupWorld, Stream
from tests.rnic.memory_rnic import Fate
from trio_smc.config.config import Config
from trio_smc.rendezvous.links.group import LinkGroup

__all__ = ["FAULTS", "Result", "run"]

WHOLE = 50_000
SCHEDULES = 20_000
PROCESSES = 2
_RETRYING = 330.0
"""Seconds after which a link that was rejected has been offered again (C.8)."""
_SETTLING = 70.0
"""Seconds after which a link that is dead at one end only was tested (30 + 30 + 2)."""
_LOGGER = logging.getLogger("trio_smc.link_group")
_WORKLOAD = {"nudge": 60, "send": 10, "receive": 6, "pass_time": 1, "open": 2, "close": 1}


@dataclass
class Result(Outcome):
    """The result of a campaign.

    Fields:
      endings: results of cases: kinds of groups at the end, and "gone".
      streams: connections that worked at the end, and those that had broken.
    """

    steps: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)


class _Violations(logging.Handler):
    """Notes the warnings of link groups about violations of the protocol."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record, if it is about a violation."""
        if "protocol error" in record.getMessage():
            self.seen.append(record.getMessage())


class Case(Faults):
    """One schedule."""

    def __init__(self, seed: int, case: int, write: Callable[[str], None] | None = None) -> None:
        self.rng = rng = random.Random(f"{seed}/{case}")
        self.steps = int(50 * 8 ** rng.random())
        self.faults: Counter[str] = Counter()
        self.endings: list[str] = []
        self.streams: Counter[str] = Counter()
        # One case in eight has no fault, the others have a few kinds of faults.
        count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
        self.gentle = rng.random() < 0.3
        self.kinds = rng.sample(GENTLE if self.gentle else FAULTS, count)
        self.fault_rate = rng.choice((0.01, 0.03, 0.1)) if self.kinds else 0.0
        self.config = Config(
            link_group_idle=rng.choice((20.0, 600.0)),
            rmbe_eye_catcher=rng.random() < 0.1,
        )
        most = rng.choice((1, 2, 2, 3, 8))
        least = 2 if self.gentle and most > 1 else 1
        self.rnics = (rng.randint(least, most), rng.randint(least, most))
        self.both_ways = rng.random() < 0.15
        self.healed = False
        self._write = write

    def run(self) -> None:
        """Run the schedule; the AssertionError names the broken rule."""
        with _Violations() as violations:
            self._run()
        assert not violations.seen, violations.seen[0]

    def _run(self) -> None:
        rng = self.rng
        with GroupWorld(rng, self.rnics, config=self.config, write=self._write) as world:
            self.world = world
            world.trace(f"{self.rnics} RNICs, {self.steps} steps, {self.kinds}")
            for _ in range(rng.choice((0, 1, 1, 3))):
                self._do_open()
                if rng.random() < 0.7:
                    world.settle()
            kinds, weights = tuple(_WORKLOAD), tuple(_WORKLOAD.values())
            for _ in range(self.steps):
                if self.kinds and rng.random() < self.fault_rate:
                    self.fault(rng.choice(self.kinds))
                else:
                    getattr(self, f"_do_{rng.choices(kinds, weights)[0]}")()
            world.trace("left to settle")
            self._repair()
            self._settle()
            self._use_streams()
            check_agreement(world)
            self._note_ending()
            self._close_streams()

    # --- what applications do ------------------------------------------------------------------

    def _do_nudge(self) -> None:
        self.world.nudge()

    def _do_send(self) -> None:
        stream = self.stream()
        if stream is not None:
            stream.send(self.rng.randrange(2), self.rng.choice((1, 100, 3000, 16000)))

    def _do_receive(self) -> None:
        stream = self.stream()
        if stream is not None:
            stream.receive(self.rng.randrange(2))

    def _do_pass_time(self) -> None:
        """Let a little time pass, or time until the next event; all messages in flight arrive."""
        if self.rng.random() < 0.8:
            self.world.pass_time(self.rng.choice((0.01, 0.1, 1.0)))
        else:
            self.world.pass_time(self.rng.choice((10.0, 31.0, 65.0)))

    def _do_open(self) -> None:
        if len(self.world.streams) < 12:
            reverse = self.both_ways and self.rng.random() < 0.5
            self.world.open(self.rng.choice(SIZES), reverse=reverse)

    def _do_close(self) -> None:
        stream = self.stream()
        if stream is not None and self.rng.random() < 0.5:
            stream.close(self.rng.randrange(2))

    # --- the end ---------------------------------------------------------------------------------

    def _repair(self) -> None:
        """Repair all RNICs and paths, in most cases."""
        world, heals = self.world, self.rng.random() < 0.7
        world.fate = Fate.DONE
        for qp in world.queue_pairs():
            if not qp.places:  # the RNIC of the queue pair was about to fail
                qp.fail(notices=False)
        self.healed = heals
        if heals:
            world.fabric.cut.clear()
            world.fabric.looks.clear()
        for side in world.sides:
            for rnic in side.rnics:
                rnic.most_qps, rnic.no_memory = None, False
                if heals:
                    rnic.port_up()
                    side.stack.rnic_set.undrain(rnic)

    def _settle(self) -> None:
        world = self.world
        world.pass_time(_SETTLING)
        if self.healed and self.rng.random() < 0.1:
            world.pass_time(_RETRYING)
        else:
            self.healed = False
        for _ in range(20):
            groups = [group for side in world.sides for group in side.groups]
            if all(_rests(group) for group in groups):
                break
            world.pass_time(1.0)
        assert all(stream.settled for stream in world.streams), "a rendezvous never ends"

    def _use_streams(self) -> None:
        world = self.world
        streams = [stream for stream in world.streams if stream.both and not any(stream.closed)]
        for stream in streams:
            for place in (0, 1):
                self._drink(stream, place)
                stream.send(place, 500)
        world.settle()
        for stream in streams:
            for place in (0, 1):
                self._drink(stream, place)
        for stream in streams:
            failed = [not stream.alive(place) for place in (0, 1)]
            assert failed in ([False, False], [True, True]), f"broken are {failed}"
            self.streams["broken" if failed[0] else "alive"] += 1
            if not failed[0]:
                missing = [flow.sent - flow.received for flow in stream.flows]
                assert missing == [0, 0], f"missing bytes: {missing}"
            if not self.faults or self.gentle:
                assert not failed[0], f"broken although only {dict(self.faults)} happened"

    def _drink(self, stream: Stream, place: int) -> None:
        for _ in range(1000):
            if not stream.receive(place):
                self.world.settle()
                if not stream.receive(place):
                    return

    def _note_ending(self) -> None:
        world = self.world
        self.endings = [kind_of(group) for group in world.client_groups] or ["gone"]
        if self.healed or not self.faults:
            rnics = [len(side.stack.rnic_set.usable("roce")) for side in world.sides]
            best = ("single", "asymmetric", "symmetric")[sum(count > 1 for count in rnics)]
            fine = {best, "gone"}
            if self.faults["delete_link"] and best == "symmetric":
                # The link that an operator deleted last is not added again before a change, as
                # long as another link is left to fail over to.
                fine.add("asymmetric")
            assert set(self.endings) <= fine, f"{self.endings} with {rnics} RNICs"

    def _close_streams(self) -> None:
        for stream in self.world.streams:
            for place in (0, 1):
                self._drink(stream, place)
                stream.close(place)
        self.world.settle()


def _rests(group: LinkGroup) -> bool:
    return group.exchanges.state == "IDLE" and group.state not in ("FORMING", "TERMINATING")


def run(cases: int, seed: int, *, first: int = 0, step: int = 1) -> Result:
    """Run ``cases`` schedules: number ``first`` and every ``step``-th one after it."""
    result = Result(cases, seed)
    numbers = range(first, first + cases * step, step)
    for case in run_cases("link_groups", Case, numbers, result):
        result.steps += case.steps
        result.faults.update(case.faults)
        result.endings.update(case.endings)
        result.streams.update(case.streams)
    return result


def _run_share(share: int, cases: int, seed: int) -> Result:
    logging.lastResort = None  # links fail here all the time
    return run(-(-(cases - share) // PROCESSES), seed, first=share, step=PROCESSES)


def run_whole(cases: int, seed: int) -> Result:
    """Run ``cases`` schedules in two processes."""
    start = time.perf_counter()
    whole = Result(cases, seed)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        for part in pool.map(
            _run_share, range(PROCESSES), itertools.repeat(cases), itertools.repeat(seed)
        ):
            whole.steps += part.steps
            whole.faults += part.faults
            whole.endings += part.endings
            whole.streams += part.streams
            whole.failures += part.failures
    whole.seconds = time.perf_counter() - start
    return whole


def main() -> int:
    """Return the exit code: 0 when every case kept the rules."""
    arguments = parse(__doc__, cases=WHOLE, replay="case")
    if arguments.case is not None:
        Case(arguments.seed, arguments.case, write=print).run()
        return 0
    result = run_whole(max(100, SCHEDULES * arguments.cases // WHOLE), arguments.seed)
    counters = {"endings": result.endings, "streams": result.streams}
    return print_outcome("link_groups", result, f"{result.steps} steps", **counters)


if __name__ == "__main__":
    sys.exit(main())
