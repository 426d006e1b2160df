"""Two-ended programs, each over TCP and over SMC-R: both ends observe the same.

    python -m tests.campaigns.differential [--programs N] [--seed S] [--batch B]
    python -m tests.campaigns.differential --program '[["tls","tls"], "usual", [[0, [["recv",1]]]]]'

Each program has one connection.  Its steps are tasks of the server's or the client's process that
send, receive, peek, shut down, close, linger and ask questions, by `trio.socket`, SocketStream or
SSLStream; cancellation; and signals, stops and ends of the processes (in every tenth batch).
Compared are the bytes, ends and kinds of exceptions that each operation observed, and the step
after which it returned.  hypothesis draws the programs and shrinks a difference; the output has the
shrunk program, both observations and the command that runs it alone.  A difference that
`_listed_differences` explains is only counted.

50,000 cases are 2,000 programs; ``--programs`` takes their number itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Flaky

from tests.campaigns._listed_differences import LISTED
from tests.campaigns._options import parse
from tests.campaigns._program_runner import Line, Observation, Runner, make_contexts
from tests.campaigns._programs import Program, programs

CASES_PER_PROGRAM: Final = 25
BATCH: Final = 100
"""Programs that hypothesis draws with one seed."""
_SLOW_EVERY: Final = 10
_CONNECTING: Final = 4
_PROCESSES: Final = 9
"""Of so many batches, the ones with programs that connect themselves, and that stop and end
processes."""
SLOW_SHARE: Final = 5
"""Those batches have so many times fewer programs: each of them may take a fifth of a second."""
_UNRELATED: Final = 10
"""Programs of one run of hypothesis.  After so many it begins to draw changed copies of programs
that it has drawn, five of them for each new one, in which most steps are the same."""
_MORE: Final = 12
"""Runs over TCP that look for what SMC-R has shown: Trio runs the tasks of a pass in one of two
orders, so a program whose tasks meet may have two outcomes over both transports."""
_MANY: Final = 60
"""Runs over each transport that look for a difference again, in turn."""
_FEW: Final = 10
"""The first of these runs.  If all of them over SMC-R differ, they are enough."""
_RARE: Final = 3
"""A difference in at most so many of these runs is rare.  Chosen: tasks of both ends that run at
the same time make outcomes of one in sixty."""
_CONFIRMATIONS: Final = 10
Transport = Literal["TCP", "SMC-R"]
Kind = tuple[str, str, str, str]
"""Style, operation, result over TCP, result over SMC-R."""


@dataclass
class Difference(Exception):
    """A program whose ends observed over SMC-R what they do not observe over TCP."""

    program: Program
    tcp: Observation
    smc: Observation
    times: str = ""

    def __post_init__(self) -> None:
        self.kind = kind_of(self.program, self.tcp, self.smc)

    def __str__(self) -> str:
        ours, theirs = set(self.smc), set(self.tcp)
        lines = [str(self.program)]
        for line in sorted(ours | theirs, key=lambda each: (each.at, each)):
            mark = "both " if line in ours & theirs else "TCP  " if line in theirs else "SMC-R"
            lines.append(f"    {mark} {line}")
        data = json.dumps(self.program.as_data())
        lines.append(f"  {self.times} --program '{data}'")
        return "\n".join(lines)


def kind_of(program: Program, tcp: Observation, smc: Observation) -> Kind:
    """The kind of a difference: where the observations differ first, and how."""

    def first(lines: set[Line]) -> Line | None:
        return min(lines, key=lambda each: (each.at, each), default=None)

    missing, added = first(set(tcp) - set(smc)), first(set(smc) - set(tcp))
    line = min((each for each in (missing, added) if each), key=lambda each: (each.at, each))
    same = [
        next((each for each in lines if each[:3] == line[:3] and each not in other), None)
        for lines, other in ((tcp, smc), (smc, tcp))
    ]
    operation = "epilogue"
    if line.step < len(program.steps):
        operation = program.steps[line.step].operations[min(line.position, 2)][0]
    tcp_result, smc_result = ("nothing" if each is None else each.result for each in same)
    return program.styles[line.end], operation, _word(tcp_result), _word(smc_result)


def _reason(program: Program, over_tcp: Counter[Observation], smc: Observation) -> str | None:
    """Why an observation over SMC-R may be: "" if TCP shows it, the name of an entry of `LISTED`
    that explains its difference from one that TCP shows, or None."""
    if smc in over_tcp:
        return ""
    for each in LISTED:
        if any(each.explains(program, tcp, smc) for tcp in over_tcp):
            return each.name
    return None


def _expected(over_tcp: Counter[Observation]) -> float:
    """How many of `_MANY` further runs may show something new.

    Over TCP it would be about the share of runs whose observation no other run has shown (the
    estimate of Good and Turing).  Twice as many, and `_RARE` more, are no difference of SMC-R.
    """
    once = sum(count == 1 for count in over_tcp.values())
    return _RARE + 2 * _MANY * once / over_tcp.total()


def _word(result: str) -> str:
    return result.split(maxsplit=1)[0] if result.startswith(("read ", "peeked ")) else result


@dataclass
class Result:
    """The findings of a campaign.

    Attributes:
      programs: that were drawn; more were run.
      differences: the first one of each kind, shrunk.
      again: how many more there were of each kind.
      hung: ends that did not answer in one run of a program, and did in the next one.
      gone: ends whose process has ended without being told so.
      over_smc: connections over SMC-R that programs have made themselves.
      rare: seen in one run of a program, and in no more of the next ones than `_expected` says;
        printed, and no failure, because processes that wait for a processor may miss a timer.
      listed: how many each entry of `LISTED` explained.
      explained: these differences, by the name of the entry.
      other_order: programs of which TCP has more outcomes than one, and SMC-R had not the first.
      one_sided: of these, the ones of which SMC-R never had the first outcome of TCP.
      wrong_list: entries that are no longer so.
    """

    programs: int = 0
    differences: list[Difference] = field(default_factory=list)
    rare: list[Difference] = field(default_factory=list)
    again: Counter[Kind] = field(default_factory=Counter)
    listed: Counter[str] = field(default_factory=Counter)
    explained: list[tuple[str, Difference]] = field(default_factory=list)
    other_order: int = 0
    one_sided: list[Difference] = field(default_factory=list)
    wrong_list: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    over_smc: int = 0

    @property
    def passed(self) -> bool:
        """True if TCP and SMC-R differ in what is listed, and in nothing else, and no end has
        failed."""
        return not (self.differences or self.wrong_list or self.gone)


class Comparison:
    """Runs programs over both transports.

    Args:
      transports: of the observations that are compared: by default of TCP and SMC-R.

    Attributes:
      tcp, smc: run a program over one of them.
    """

    def __init__(self, transports: tuple[Transport, Transport] = ("TCP", "SMC-R")) -> None:
        contexts = make_contexts()
        self.tcp, self.smc = (Runner(name == "SMC-R", contexts) for name in transports)
        self.result = Result()
        self._known: set[Kind] = set()
        self._compared: set[Program] = set()

    def close(self) -> None:
        """End the processes."""
        self.tcp.close()
        self.smc.close()

    def check(self, program: Program) -> None:
        """Raise Difference for an observation over SMC-R that TCP does not show."""
        tcp, smc = self.tcp.run(program), self.smc.run(program)
        if smc == tcp:
            return
        over_tcp = Counter([tcp])
        for _ in range(_MORE):
            over_tcp[self.tcp.run(program)] += 1
            if smc in over_tcp:
                self._note_other_order(program, tcp, smc)
                return
        over_smc: Counter[Observation] = Counter()
        reasons: dict[Observation, str | None] = {}
        unlisted: list[Observation] = []
        again = 0
        for runs in (_FEW, _MANY):
            while over_smc.total() < runs:
                over_smc[self.smc.run(program)] += 1
                over_tcp[self.tcp.run(program)] += 1
            reasons = {each: _reason(program, over_tcp, each) for each in (smc, *over_smc)}
            unlisted = [each for each, reason in reasons.items() if reason is None]
            again = sum(over_smc[each] for each in unlisted)
            if again == runs:
                break
        difference = Difference(program, tcp, unlisted[0] if unlisted else smc)
        if again > _expected(over_tcp):
            if difference.kind not in self._known:
                raise difference
            self.result.again[difference.kind] += 1
        elif reason := reasons[smc]:
            self.result.listed[reason] += 1
            self.result.explained.append((reason, difference))
        elif reasons[smc] is None:
            difference.times = f"{again} of {_MANY} times:"
            self.result.rare.append(difference)
        else:
            self._note_other_order(program, tcp, smc)

    def _note_other_order(self, program: Program, tcp: Observation, smc: Observation) -> None:
        self.result.other_order += 1
        if all(self.smc.run(program) != tcp for _ in range(_MORE)):
            self.result.one_sided.append(Difference(program, tcp, smc))

    def check_listed(self) -> list[str]:
        """The listed differences whose example shows no difference, or another one."""
        wrong = []
        for each in LISTED:
            program = Program.from_data(each.example)
            tcp, smc = self.tcp.run(program), self.smc.run(program)
            if smc == tcp:
                wrong.append(f"no longer so: {each.name}; remove it here and in docs/programs.md")
            elif not each.explains(program, tcp, smc):
                difference = Difference(program, tcp, smc)
                wrong.append(f"does not explain its example: {each.name}\n{difference}")
        return wrong

    def note(self, difference: Difference) -> None:
        """Confirm a difference and keep it; its kind is only counted from now on."""
        program = difference.program
        tcp = Counter(self.tcp.run(program) for _ in range(_CONFIRMATIONS))
        smc = Counter(self.smc.run(program) for _ in range(_CONFIRMATIONS))
        different = sum(count for seen, count in smc.items() if seen not in tcp)
        difference.times = f"{different} of {_CONFIRMATIONS} times:"
        self._known.add(difference.kind)
        self.result.differences.append(difference)

    def batch(
        self, number: int, seed: int, size: int, *, most: int | None = None, shrink: bool = True
    ) -> None:
        """Draw and compare ``size`` programs, and shrink what differs.

        Args:
          number: of the batch: it chooses the programs, and their kind.
          most: stop after so many differences.
          shrink: the differences; it takes the largest part of the time.
        """
        if number % _SLOW_EVERY in (_CONNECTING, _PROCESSES):
            size = -(-size // SLOW_SHARE)
        left, attempt = size, 0
        while left > 0 and len(self.result.differences) != most:
            left -= self._draw(min(left, _UNRELATED), f"{seed}/{number}/{attempt}", number, shrink)
            attempt += 1

    def _draw(self, size: int, seed: str, number: int, shrink: bool) -> int:
        """Compare programs up to the first that differs; return how many."""
        kind = number % _SLOW_EVERY
        last: list[Difference] = []
        drawn = 0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=size,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(programs(processes=kind == _PROCESSES, connecting=kind == _CONNECTING))
        def compare(program: Program) -> None:
            nonlocal drawn
            if program in self._compared:
                return  # hypothesis begins each run with the shortest one
            drawn += not last
            try:
                self.check(program)
            except Difference as difference:
                last[:] = [difference]
                raise
            self._compared.add(program)

        try:
            compare()
        except Difference as difference:
            self.note(difference)
        except Flaky:
            # Often it was no difference, but a process that waited for a processor.
            try:
                self.check(last[0].program)
            except Difference as difference:
                self.note(difference)
        self.result.programs += drawn
        return max(1, drawn)


def run(cases: int, seed: int, *, only: int | None = None, programs: int | None = None) -> Result:
    """Run programs, and print differences as they are found.

    Args:
      only: run this batch alone.
      programs: their number, instead of one for `CASES_PER_PROGRAM` cases.
    """
    count = programs or max(1, cases // CASES_PER_PROGRAM)
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        comparison = Comparison()
        result = comparison.result
        try:
            result.wrong_list += comparison.check_listed()
            print("".join(f"{each}\n" for each in result.wrong_list), end="", flush=True)
            for number in range(-(-count // BATCH)) if only is None else [only]:
                found = len(result.differences)
                comparison.batch(number, seed, min(count, BATCH))
                for each in result.differences[found:]:
                    print(f"batch {number}: {each}", flush=True)
        finally:
            comparison.close()
            result.hung += comparison.tcp.hung + comparison.smc.hung
            result.gone += comparison.tcp.gone + comparison.smc.gone
            result.over_smc = comparison.smc.over_smc
    return result


def main() -> int:
    """Return the exit code."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--programs", type=int, help="default: a 25th of the cases")
        parser.add_argument("--program", type=json.loads, help="run this one alone")
        parser.add_argument("--explained", action="store_true", help="print these, too")

    options = parse(__doc__, replay="batch", add_options=add_options)
    if options.program is not None:
        return _run_one(Program.from_data(options.program))
    start = time.perf_counter()
    result = run(options.cases, options.seed, only=options.batch, programs=options.programs)
    for each in result.rare:
        print(f"rare: {each}")
    for hung in result.hung:
        print(f"hung once: {hung}")
    for gone in result.gone:
        print(f"an end has failed: {gone}")
    for each in result.one_sided:
        print(f"one outcome of TCP only: {each}")
    for name, each in result.explained if options.explained else ():
        print(f"explained by {name!r}: {each}")
    for kind, times in result.again.most_common():
        print(f"{times} times more: {', '.join(kind)}")
    print(
        f"differential: {result.programs} programs, {len(result.differences)} differences, "
        f"{len(result.rare)} rare, {len(result.hung)} hung once, {len(result.gone)} gone, "
        f"{result.other_order} in another order, {len(result.one_sided)} of them always, "
        f"{result.over_smc} connections of their own over SMC-R, "
        f"listed {dict(result.listed)}, seed {options.seed}, {time.perf_counter() - start:.1f} s"
    )
    return 0 if result.passed else 1


def _run_one(program: Program) -> int:
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        comparison = Comparison()
        try:
            comparison.check(program)
        except Difference as difference:
            comparison.note(difference)
            print(difference)
            return 1
        finally:
            comparison.close()
    print(f"{program}\nthe same over TCP and SMC-R")
    return 0


if __name__ == "__main__":
    sys.exit(main())
