"""Judge the judge: does `smc-conform` notice each fault of `conform_mutants.toml`?

    python -m scripts.conform_mutants [NAME ...] [--first N] [--full] [--check]

Each fault is put into a copy of trio_smc, which the suite then judges as server and as client,
until a check fails.  The area that the list names comes first.  A NAME is a part of a name.

--full    run every check against every fault, and write into build/conform/mutants.json which
          checks have failed.
--check   only compare the list with the tree.

The exit code is 1 if a fault was not noticed, or if the list does not fit the tree.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts.conform import OPTIONS, REPORTS, ROOT, Setup, judge, setups

__all__ = ["Mutant", "mutants", "problems"]

LIST = Path(__file__).with_suffix(".toml")
PACE = ("--patience", "2.5", "--timers", "6")
"""The target answers within milliseconds, and its time-outs are three seconds at most."""


class Mutant(NamedTuple):
    """One fault.

    Attributes:
      name: what is wrong.
      file: the module, below trio_smc.
      area: of the checks that are tried first; those of "version2" are for version 2.
      old, new: ``new`` takes the place of ``old``.
    """

    name: str
    file: str
    area: str
    old: str
    new: str

    @property
    def setups(self) -> list[Setup]:
        """The runs that may notice it, the most likely ones first."""
        version = 2 if self.area == "version2" else 1
        first = [Setup(role, version=version, areas=(f"{self.area}/*",)) for role in OPTIONS]
        rest = sorted(setups(), key=lambda each: each.version != version)
        return [*first, *rest]


def mutants() -> list[Mutant]:
    """The list."""
    return [Mutant(**each) for each in tomllib.loads(LIST.read_text())["mutant"]]


def problems() -> Iterator[str]:
    """Yield the entries that do not fit the tree."""
    names = set()
    for mutant in mutants():
        count = (ROOT / "trio_smc" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            yield f"{mutant.name}: its text occurs {count} times in {mutant.file}"
        if mutant.name in names:
            yield f"{mutant.name}: listed twice"
        names.add(mutant.name)


@contextmanager
def tree_with(mutant: Mutant) -> Iterator[Path]:
    """A copy of trio_smc with the fault."""
    with tempfile.TemporaryDirectory(prefix="conform-mutant-") as directory:
        tree = Path(directory)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / "trio_smc", tree / "trio_smc", ignore=ignored)
        path = tree / "trio_smc" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        yield tree


def noticed(mutant: Mutant, reports: Path) -> str:
    """The run and the check that noticed the fault; empty: none did."""
    with tree_with(mutant) as tree:
        for setup in mutant.setups:
            run = judge(setup, "--fail-fast", *PACE, *setup.only, tree=tree, reports=reports)
            if run.wrong:
                return f"{setup.role}, version {setup.version}: {run.wrong[0]}"
    return ""


def tripped(mutant: Mutant, reports: Path) -> list[str]:
    """All checks that fail, in any run."""
    found: dict[str, None] = {}
    with tree_with(mutant) as tree:
        for setup in setups():
            run = judge(setup, *PACE, *setup.only, tree=tree, reports=reports)
            found |= dict.fromkeys(run.wrong)
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with the Nth")
    parser.add_argument("--full", action="store_true", help="find all checks that each one trips")
    parser.add_argument("--check", action="store_true", help="only compare the list with the tree")
    given = parser.parse_args(arguments)
    bad = list(problems())
    print(*bad, sep="\n", end="\n" if bad else "")
    if given.check or bad:
        return int(bool(bad))
    chosen = [
        each
        for each in mutants()
        if not given.names or any(name in each.name for name in given.names)
    ]
    missed, trips = [], {}
    with tempfile.TemporaryDirectory(prefix="conform-reports-") as directory:
        for number, mutant in list(enumerate(chosen, 1))[given.first - 1 :]:
            begin = time.monotonic()
            if given.full:
                trips[mutant.name] = tripped(mutant, Path(directory))
                by = ", ".join(trips[mutant.name][:5])
            else:
                by = noticed(mutant, Path(directory))
            if not by:
                missed.append(mutant.name)
            seconds = time.monotonic() - begin
            print(
                f"{number:3} of {len(chosen)} {mutant.name:56} {seconds:5.1f} s  "
                f"{by or 'NOT NOTICED'}",
                flush=True,
            )
    tried = len(chosen) - given.first + 1
    print(f"{tried - len(missed)} of {tried} faults noticed")
    if given.full:
        REPORTS.mkdir(parents=True, exist_ok=True)
        (REPORTS / "mutants.json").write_text(json.dumps(trips, indent=1) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
