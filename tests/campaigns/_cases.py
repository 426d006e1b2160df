"""Runs cases one after the other, also after a failure, and prints their summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

__all__ = ["Outcome", "print_outcome", "run_cases"]

_SHOWN = 20


class _Case(Protocol):
    def run(self) -> None: ...


_AnyCase = TypeVar("_AnyCase", bound=_Case)


@dataclass
class Outcome:
    """The result that every campaign of schedules has.

    Fields:
      faults: how often each kind of fault happened.
      failures: one line for each case that broke a rule, with the command that replays it.
    """

    cases: int
    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if no case broke a rule."""
        return not self.failures


def run_cases(
    campaign: str, make: Callable[[int, int], _AnyCase], numbers: Iterable[int], outcome: Outcome
) -> Iterator[_AnyCase]:
    """Run the cases with these numbers, and yield each one at its end, also if it failed.

    Any exception of a case is a failure.

    Args:
      campaign: its module, for the command that replays a failure.
      make: the case with this seed and number.
      outcome: gets failures and seconds.
    """
    start = time.perf_counter()
    for number in numbers:
        case = make(outcome.seed, number)
        try:
            case.run()
        except Exception as error:
            text = str(error) or repr(error)
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            outcome.failures.append(
                f"{kind}{text}\n  replay: python -m tests.campaigns.{campaign}"
                f" --seed {outcome.seed} --case {number}"
            )
        yield case
    outcome.seconds = time.perf_counter() - start


def print_outcome(campaign: str, outcome: Outcome, counted: str, **counters: Counter[str]) -> int:
    """Print the summary, and return the exit code.

    Args:
      counted: what was counted besides schedules, with its unit.
      counters: each gets a line.
    """
    for line in outcome.failures[:_SHOWN]:
        print(line)
    for name, counter in {"faults": outcome.faults, **counters}.items():
        print(f"{name}:", ", ".join(f"{key} {count}" for key, count in sorted(counter.items())))
    print(
        f"{campaign}: {outcome.cases} schedules, {counted}, seed {outcome.seed},"
        f" {outcome.seconds:.1f} s, {len(outcome.failures)} failures"
    )
    return 0 if outcome.passed else 1
