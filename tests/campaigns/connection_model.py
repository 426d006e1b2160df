"""Two connection machines joined by ordered channels, under random schedules.

    python -m tests.campaigns.connection_model --cases N --seed S

Each side has an application, an RMBE of a few bytes, a queue of posted CDCs that the peer sees
in order, the same CDCs waiting for their completions, and a TCP connection on which only a
reset matters. Every step a random one of the things that could happen next happens. Kinds of
schedules:

- ``wild``: both applications write, read, half-close, close and abort at will, and in the end
  each has closed or aborted. Then both machines must reach CLOSED without any timer.
- ``polite``: no side aborts, and a side that closes has read to the end of stream (or never had a
  writer). Then every byte arrives, no PeerConnAbort and no reset is ever sent.
- ``early``: as wild, but the server learns the client's RMBE late (3.5.2.4), with CDCs
  overtaking the Confirm. An abort that meets a server without anywhere to answer may need the
  client's abort timer.
- ``faults``: as wild, with timers that fire at will, lost links and RMBE conflicts.

Always: no CDC after PeerConnectionClosed or in CLOSED, at most one PeerConnAbort of each side,
no data into an RMBE that its owner has freed in agreement, no event the table refuses.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.campaigns._connection_side import Broken, Side, Step
from tests.campaigns._options import parse
from trio_smc.states.engine import Table
from trio_smc.states.tables import CONNECTION

KINDS = ("wild", "polite", "early", "faults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign: cases by kind, those in which a timer fired, pairs never seen.

    ``untaken`` are pairs of state and event that would act but never occurred.
    """

    cases: int
    kinds: dict[str, int]
    timers: dict[str, int]
    untaken: list[str]


class Schedule:
    """One random run of two sides."""

    def __init__(
        self, kind: str, rng: random.Random, note: Callable[[str], None], table: Table
    ) -> None:
        self.kind = kind
        self.rng = rng
        self.client, self.server = Side("client", table, note), Side("server", table, note)
        self.sides = (self.client, self.server)
        self.client.peer, self.server.peer = self.server, self.client
        self.confirm_coming = kind == "early"

    def run(self) -> None:
        """Run to the end; ``Broken`` when a promise fails."""
        if self.confirm_coming:
            # Subsequent contact: established at the client, the Confirm is still on its way.
            self.server.peer_rmbe_known = False
            self.establish(self.client)
        if self.kind == "polite":
            self.run_polite()
        else:
            self.run_wild()
        for side in self.sides:
            if side.state != "CLOSED":
                raise Broken(f"{side.name} ends in {side.state}, peer in {side.peer.state}")
        if self.kind == "early" and self.server.fired:
            raise Broken("the server needed a timer")

    # --- wild, early, faults ---

    def run_wild(self) -> None:
        for _ in range(self.rng.randrange(60)):
            self.step(self.application())
        for side in self.rng.sample(self.sides, 2):
            for _ in range(self.rng.randrange(4)):
                self.step([])
            if not side.done:
                (side.abort if side.failed or self.rng.random() < 0.2 else side.close)()
        self.settle()

    def step(self, steps: list[Step]) -> None:
        for side in self.sides:
            steps += side.network()
            if not side.established and not side.done:
                steps.append(partial(self.establish, side))
            if self.kind == "faults" and self.rng.random() < 0.05:
                steps += side.timers()
        if self.kind == "faults" and self.rng.random() < 0.02:
            steps.append(self.lose_links)
            steps.append(lambda: self.rng.choice(self.sides).raise_("rmbe_conflict"))
        if steps:
            self.rng.choice(steps)()

    def establish(self, side: Side) -> None:
        side.established = True
        if side is self.server and self.confirm_coming:
            self.confirm_coming = False
            side.peer_rmbe_known = True
            if "A" in side.seen:
                side.raise_("peer_abort")  # again: before Confirm it was ignored
        side.raise_("established")

    def application(self) -> list[Step]:
        steps: list[Step] = []
        for side in self.sides:
            if side.done:
                continue
            if self.rng.random() < 0.03:
                steps.append(side.close)
            if self.rng.random() < 0.01:
                steps.append(side.abort)
            if not side.open or side.failed:
                continue
            if not side.ended:
                steps.append(side.write)
                if self.rng.random() < 0.1:
                    steps.append(side.end)
            if side.unread:
                steps += [side.take, side.take]
        return steps

    def lose_links(self) -> None:
        for side in self.sides:
            side.links_up = False
            side.arriving.clear()
        for side in self.rng.sample(self.sides, 2):
            side.completing.clear()  # flushed with errors
            side.raise_("links_lost")

    def settle(self) -> None:
        """Let everything arrive; timers fire only where the kind allows it and all is quiet."""
        while any(side.state != "CLOSED" for side in self.sides) or self.in_flight():
            steps = [step for side in self.sides for step in side.network()]
            if not steps and self.kind in {"early", "faults"}:
                steps = [step for side in self.sides for step in side.timers()]
            if not steps:
                return
            self.rng.choice(steps)()

    def in_flight(self) -> bool:
        return any(side.arriving or side.completing for side in self.sides)

    # --- polite ---

    def run_polite(self) -> None:
        both = self.rng.random() < 0.5
        writers = self.sides if both else (self.rng.choice(self.sides),)
        plans = {side: self.rng.randrange(12) for side in writers}
        # A side that never receives may close without a half close before it.
        direct = not both and self.rng.random() < 0.5
        while True:
            steps = [step for side in self.sides for step in side.network()]
            for side in self.sides:
                if not side.established:
                    steps.append(partial(self.establish, side))
                elif side.open and not side.done:
                    steps += self.polite_steps(side, plans.get(side), direct)
            if not steps:
                break
            self.rng.choice(steps)()
        for side in self.sides:
            if not side.peer.read == side.written == plans.get(side, 0):
                raise Broken(f"{side.peer.name} read {side.peer.read} bytes of {plans}")
            if side.aborts or side.failed or side.tcp_reset_sent:
                raise Broken(f"{side.name} did not end in peace")

    def polite_steps(self, side: Side, plan: int | None, direct: bool) -> list[Step]:
        """The possible steps of a side that writes ``plan`` bytes; None: it only reads."""
        steps: list[Step] = [side.take] if side.unread else []
        if plan is not None and side.written < plan:
            return [*steps, side.write]
        if side.end_of_stream or (plan is not None and direct):
            return [*steps, side.close]
        if plan is not None and not side.ended:
            return [*steps, side.end]
        return steps


def run_case(
    seed: int, case: int, note: Callable[[str], None], table: Table = CONNECTION
) -> Schedule:
    """Run one schedule over ``table``; ``note`` is told what happens."""
    kind = KINDS[case % len(KINDS)]
    schedule = Schedule(kind, random.Random(f"{seed}/{case}"), note, table)
    schedule.run()
    return schedule


def run(cases: int, seed: int, table: Table = CONNECTION) -> Result:
    """Run ``cases`` schedules; on failure raise ``Broken`` with the trace of the failing one."""
    kinds: Counter[str] = Counter()
    timers: Counter[str] = Counter()
    taken: set[str] = set()

    def note(line: str) -> None:
        if "->" not in line and "posts" not in line:
            taken.add(line.split(" ", 1)[1])

    for case in range(cases):
        try:
            schedule = run_case(seed, case, note, table)
        except Exception as error:
            trace: list[str] = []
            with contextlib.suppress(type(error)):
                run_case(seed, case, trace.append, table)
            text = "\n".join(trace)
            raise Broken(f"case {case} of seed {seed}: {error!r}\n{text}") from error
        kinds[schedule.kind] += 1
        timers[schedule.kind] += any(side.fired for side in schedule.sides)
    pairs = {f"{s} {e}" for (s, e), row in table.edges.items() if not row[-1].ignored}
    return Result(
        cases=cases, kinds=dict(kinds), timers=dict(timers), untaken=sorted(pairs - taken)
    )


def main() -> int:
    """Return the exit code."""
    options = parse(__doc__, cases=20_000, replay="only")
    if options.only is not None:
        run_case(options.seed, options.only, print)
        return 0
    result = run(options.cases, options.seed)
    print(f"seed {options.seed}: {result.cases} schedules {result.kinds}")
    print(f"in which a timer fired: {result.timers}")
    print(f"pairs of state and event that act but never occurred: {result.untaken or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
