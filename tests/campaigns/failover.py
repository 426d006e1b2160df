"""Thousands of failures of RNICs under mixed traffic: nothing is lost, no needless reset.

    python -m tests.campaigns.failover --cases N --seed S [--rnics 2]

Two processes keep 50 connections busy (`examples.chaos_load`: streams in both directions, requests
and answers, urgent data, half closes, aborts, and new connections all the time).  Whenever their
link group is complete, a fault is injected; one failure in five happens during a failover.  The
position of every byte and the SHA-256 of every direction are checked.  The connections that lost a
message acknowledged but not placed, and only those, are reset.

Half of the failures meet groups of two links, the others groups of three and of four, unless
`--rnics` is given; some of the last come in rows, and half of those are messages acknowledged and
not placed (`--rows`).  A seed replays the faults and the data of every connection; the scheduler
decides when a fault meets a connection.  So both processes keep the latest messages and log
records, and report them if a connection ends in a wrong way.  50,000 cases are 2,000 failures, the
long version 50,000 (`--long`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import deque

import trio

from examples.chaos import KINDS, Chaos, Policy, Result
from tests.campaigns._options import parse

CASES_PER_FAILURE = 25
LONG = 50_000
# Failures after which a line is printed, and lines of what happened before a problem.
PROGRESS, LAST_LINES = 1000, 60
# RNICs of each process, their share of the failures, and whether those come in rows.
MIXTURE = ((2, 0.5, False), (3, 0.2, False), (4, 0.15, False), (4, 0.15, True))
# Every other failure is a message acknowledged and not placed, so connections wait for lost data.
ROWS = {**KINDS, "not-placed": 120, "process-stop": 0, "link-silent": 0}
# Each connection has less data, so that connections begin and end all the time.
SCALE = 30


def run(
    cases: int, seed: int, *, rnics: int | None = None, rows: bool = False, long: bool = False,
    log: str | None = None,
) -> list[Result]:  # fmt: skip
    """Inject the faults; `Result.problems` lists the violations of the rules.

    Args:
      rnics: of each process; None: the mixture.
      rows: with ``rnics``: failures come in rows.
      log: a directory for the logs, with a subdirectory for each number of RNICs.
    """
    failures = LONG if long else max(20, cases // CASES_PER_FAILURE)
    mixture = MIXTURE if rnics is None else ((rnics, 1.0, rows),)
    return [
        run_one(Policy(
            seed=seed, faults=round(share * failures), rnics=number, scale=SCALE,
            during=1 if in_rows else 5, kinds=ROWS if in_rows else KINDS,
            log=log and f"{log}/{number}-rnics{'-rows' * in_rows}",
        ))
        for number, share, in_rows in mixture
    ]  # fmt: skip


def run_one(policy: Policy) -> Result:
    """All failures with one number of RNICs."""
    # Without a log file only its end is kept.
    lines: deque[str] = deque(maxlen=LAST_LINES if policy.log is None else None)
    reported = 0

    def show(line: str) -> None:
        nonlocal reported
        lines.append(line)
        if chaos.result.injected >= reported + PROGRESS:
            reported += PROGRESS
            print(f"with {policy.rnics} RNICs: {reported} failures so far", flush=True)

    chaos = Chaos(policy, show)
    if policy.log is not None:
        os.makedirs(policy.log, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        result = trio.run(chaos.run)
    if policy.log is not None:
        with open(f"{policy.log}/chaos.log", "w") as file:
            file.write("\n".join(lines))
    if result.problems:
        # The last events before the problem.
        print("\n".join([*list(lines)[-LAST_LINES:], *result.recollections()]))
    return result


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rnics", type=int, default=None, choices=(2, 3, 4), help="of each process (default: all)"
    )
    parser.add_argument(
        "--rows", action="store_true", help="with --rnics: failures come in rows, half of them lose"
    )
    parser.add_argument("--log", metavar="DIRECTORY", help="where logs of all processes go")
    parser.add_argument("--long", action="store_true", help=f"{LONG} failures")


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__, add_options=_add_options)
    print(f"failover: seed {arguments.seed}", flush=True)
    results = run(
        arguments.cases,
        arguments.seed,
        rnics=arguments.rnics,
        rows=arguments.rows,
        long=arguments.long,
        log=arguments.log,
    )
    for result in results:
        print(f"with {result.rnics} RNICs on each side{', in rows' * (result.during == 1)}:")
        for name, text in result.rows():
            print(f"  {name:<24}{text}")
        for problem in result.problems:
            print(f"  {problem}")
    failures = sum(result.injected for result in results)
    disturbing = sum(result.during_failover for result in results)
    problems = sum(len(result.problems) for result in results)
    print(
        f"failover: {failures} failures, {disturbing} of them during a failover, "
        f"{problems} problems in {sum(result.seconds for result in results):.1f} s, "
        f"seed {arguments.seed}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
