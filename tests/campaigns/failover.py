"""Thousands of failures of RNICs under mixed traffic: nothing is lost, nobody is reset in vain.

    python -m tests.campaigns.failover --cases N --seed S [--rnics 2]

Two processes keep 50 connections busy (`examples.chaos_load`: streams both ways, requests and
answers, urgent data, half closes, aborts, and always new connections).  Whenever their link group
is whole, a fault comes; one in five in the middle of a failover.  Every byte is checked for its
position and every direction by its SHA-256.  The connections that met a message acknowledged but
not placed, and only those, are reset.

A seed replays the faults and what every connection says; when each meets which is up to the
scheduler.  50,000 cases are 2,000 failures, the long version 50,000 (`--long`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import trio

from examples.chaos import Chaos, Policy, Result
from tests.campaigns._options import parse

CASES_PER_FAILURE = 25
LONG = 50_000
# Less is said by each, so that connections come and go all the time.
SCALE = 30


def run(
    cases: int, seed: int, *, rnics: int = 2, failures: int | None = None, log: str | None = None
) -> Result:
    """Let things go wrong; `Result.problems` says what must not happen and did."""
    lines: list[str] = []
    policy = Policy(
        seed=seed,
        faults=max(20, cases // CASES_PER_FAILURE) if failures is None else failures,
        rnics=rnics,
        scale=SCALE,
        log=log,
    )
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        result = trio.run(Chaos(policy, lines.append).run)
    if result.problems:
        # What led there; the rest is of no interest.
        print("\n".join(lines[-60:]))
    return result


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rnics", type=int, default=2, help="of each process (default 2)")
    parser.add_argument("--log", metavar="DIRECTORY", help="where both processes write logs")
    parser.add_argument("--long", action="store_true", help=f"{LONG} failures")


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__, add_options=_add_options)
    print(f"failover: seed {arguments.seed}", flush=True)
    result = run(
        arguments.cases,
        arguments.seed,
        rnics=arguments.rnics,
        failures=LONG if arguments.long else None,
        log=arguments.log,
    )
    for name, text in result.rows():
        print(f"  {name:<24}{text}")
    for problem in result.problems:
        print(f"  {problem}")
    print(f"failover: {result.injected} failures in {result.seconds:.1f} s, seed {result.seed}")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
