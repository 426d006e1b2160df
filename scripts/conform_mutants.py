"""Judge the judge: does `smc-conform` notice each fault of `conform_mutants.toml`?

    python -m scripts.conform_mutants [NAME ...] [--first N] [--jobs N] [--depth first|area|all]
    python -m scripts.conform_mutants --check | --untripped | --page

Each fault is put into a copy of trio_smc, which the suite then judges in both roles: first by the
checks of the area that the list names, then by all checks, until one fails.  A NAME is a part of a
name.  build/conform/mutants.json collects which checks have failed for which fault.

--depth      area: run all checks of the fault's area; all: run all checks.
--check      only compare the list, and docs/conformance/mutants.md, with the tree.
--untripped  show the checks that no fault in build/conform/mutants.json has tripped, with the
             reason that conform_mutants.toml gives for checks like these.
--page       write docs/conformance/mutants.md from build/conform/mutants.json.

The exit code is 1 if a fault was not noticed, if the list does not fit the tree, or if a check that
no fault trips has no reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from scripts.conform import AT_A_TIME, OPTIONS, REPORTS, ROOT, Setup, judge, setups
from smc_conform.catalogue import all_checks

__all__ = ["Mutant", "mutants", "problems"]

LIST = Path(__file__).with_suffix(".toml")
TRIPS = REPORTS / "mutants.json"
PAGE = ROOT / "docs" / "conformance" / "mutants.md"
MOST_SHOWN = 3
"""Checks that the page names for a fault."""
DEPTHS = ("first", "area", "all")
"""Stop at the first check that fails; run all checks of the area; run all checks."""
MOST_REPEATED = 10
"""Failed checks that run once more; if all of these fail again, the others count, too."""
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
    def likely(self) -> list[Setup]:
        """The runs that probably notice it."""
        version = 2 if self.area == "version2" else 1
        return [Setup(role, version=version, areas=(f"{self.area}/*",)) for role in OPTIONS]


def mutants() -> list[Mutant]:
    """The list."""
    return [Mutant(**each) for each in tomllib.loads(LIST.read_text())["mutant"]]


def problems() -> Iterator[str]:
    """Yield the entries that do not fit the tree, and the faults that the page does not have."""
    page = PAGE.read_text()
    names_of_checks = [check.id for check in all_checks()]
    for each in untripped_kinds():
        if not any(fnmatch(name, each.checks) for name in names_of_checks):
            yield f"{each.checks}: no check has such an ID"
    names = set()
    for mutant in mutants():
        count = (ROOT / "trio_smc" / mutant.file).read_text().count(mutant.old)
        if count != 1:
            yield f"{mutant.name}: its text occurs {count} times in {mutant.file}"
        if mutant.name in names:
            yield f"{mutant.name}: listed twice"
        if f"\n| {mutant.name} |" not in page:
            yield f"{mutant.name}: not in {PAGE.name}: run --depth area, and then --page"
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


def tripped(mutant: Mutant, reports: Path, depth: str) -> dict[str, str]:
    """The checks that fail, with the run in which they did.

    The checks of the fault's area run before the others.  A check counts if it fails twice: once
    might be because of other programs on the host.

    Args:
      depth: one of `DEPTHS`: where to stop.
    """
    found: dict[str, str] = {}

    def one(setup: Setup, *more: str) -> None:
        def wrong(*only: str) -> list[str]:
            run = judge(setup, *PACE, *only, *more, tree=tree, reports=reports / setup.role)
            return run.wrong

        first = wrong(*setup.only)
        sample = first[:MOST_REPEATED]
        again = wrong(*(word for name in sample for word in ("--only", name))) if sample else []
        for name in first:
            if name in again or len(again) == MOST_REPEATED:
                found.setdefault(name, f"{setup.role}, version {setup.version}")

    with tree_with(mutant) as tree:
        for setup in (*mutant.likely, *setups()):
            if depth == "all" or (depth == "area" and setup in mutant.likely):
                one(setup)
            elif not found:
                one(setup, "--max-failures", "1")
    return found


class Untripped(NamedTuple):
    """Why no fault of the list trips certain checks.

    Attributes:
      checks: a pattern of IDs.
      reason: why.
    """

    checks: str
    reason: str


def untripped_kinds() -> list[Untripped]:
    """The reasons of the list."""
    listed = tomllib.loads(LIST.read_text()).get("untripped", [])
    return [Untripped(**each) for each in listed]


def trips() -> dict[str, list[str]]:
    """The checks that each fault of the list has tripped, as far as it is known."""
    known = json.loads(TRIPS.read_text()) if TRIPS.exists() else {}
    return {mutant.name: known.get(mutant.name, []) for mutant in mutants()}


def others() -> list[tuple[str, str]]:
    """The checks that no fault has tripped, each with its reason."""
    reasons = untripped_kinds()
    hit = {name for names in trips().values() for name in names}
    return [
        (check.id, next((each.reason for each in reasons if fnmatch(check.id, each.checks)), ""))
        for check in all_checks()
        if check.id not in hit
    ]


def untripped() -> int:
    """Show the checks that no fault has tripped; return the exit code."""
    found = others()
    for name, reason in found:
        print(f"{name:28} {reason or 'NO REASON'}")
    without = sum(not reason for _, reason in found)
    print(f"{len(found)} of {len(all_checks())} checks were not tripped; {without} have no reason")
    return int(bool(without))


def page() -> str:
    """The page about faults and checks."""
    known = trips()
    lines = [
        "# The faults that the suite must notice",
        "",
        f"`make conform-mutants` puts each of these {len(known)} faults into a copy of trio_smc:",
        "the suite must fail. `python -m scripts.conform_mutants --page` writes this page.",
        "",
        "| fault | noticed by |",
        "|---|---|",
    ]
    for fault, checks in known.items():
        shown = ", ".join(f"`{each}`" for each in checks[:MOST_SHOWN]) or "**not noticed**"
        more = f", and {len(checks) - MOST_SHOWN} more" if len(checks) > MOST_SHOWN else ""
        lines.append(f"| {fault} | {shown}{more} |")
    reasons: dict[str, list[str]] = {}
    for name, reason in others():
        reasons.setdefault(reason or "no reason yet", []).append(name)
    lines += ["", "## Checks that none of these faults has tripped", ""]
    lines += ["A fault's run ends with the first failed check, so these may fail for faults, too:"]
    lines += ['`ARGS="--depth all"` finds them. The reasons are those of kinds of checks.', ""]
    lines += ["| why | checks |", "|---|---|"]
    for reason, names in reasons.items():
        lines.append(f"| {' '.join(reason.split())} | {', '.join(f'`{each}`' for each in names)} |")
    return "\n".join(lines) + "\n"


def note(mutant: Mutant, checks: Iterable[str]) -> None:
    """Add the checks that a fault trips to those that are known."""
    known = json.loads(TRIPS.read_text()) if TRIPS.exists() else {}
    known[mutant.name] = sorted({*known.get(mutant.name, ()), *checks})
    TRIPS.parent.mkdir(parents=True, exist_ok=True)
    TRIPS.write_text(json.dumps(known, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with the Nth")
    parser.add_argument("--jobs", type=int, default=AT_A_TIME, metavar="N", help="at a time")
    parser.add_argument("--depth", choices=DEPTHS, default="first", help="which checks run")
    parser.add_argument("--check", action="store_true", help="only compare the list with the tree")
    parser.add_argument("--untripped", action="store_true", help="show the other checks, and why")
    parser.add_argument("--page", action="store_true", help="write the page about them")
    given = parser.parse_args(arguments)
    if given.untripped:
        return untripped()
    if given.page:
        PAGE.write_text(page())
        return 0
    bad = list(problems())
    print(*bad, sep="\n", end="\n" if bad else "")
    if given.check or bad:
        return int(bool(bad))
    chosen = [
        each
        for each in mutants()
        if not given.names or any(name in each.name for name in given.names)
    ]
    missed = []

    def timed(mutant: Mutant) -> tuple[dict[str, str], float]:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="conform-reports-") as directory:
            found = tripped(mutant, Path(directory), given.depth)
        return found, time.monotonic() - begin

    with ThreadPoolExecutor(given.jobs) as pool:
        running = {
            pool.submit(timed, mutant): (number, mutant)
            for number, mutant in list(enumerate(chosen, 1))[given.first - 1 :]
        }
        for done in as_completed(running):
            number, mutant = running[done]
            found, seconds = done.result()
            note(mutant, found)
            by = next((f"{where}: {name}" for name, where in found.items()), "")
            if len(found) > 1:
                by += f" and {len(found) - 1} more"
            if not by:
                missed.append(mutant.name)
            print(
                f"{number:3} of {len(chosen)} {mutant.name:56} {seconds:5.1f} s  "
                f"{by or 'NOT NOTICED'}",
                flush=True,
            )
    tried = len(chosen) - given.first + 1
    print(f"{tried - len(missed)} of {tried} faults noticed")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
