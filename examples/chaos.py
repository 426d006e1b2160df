"""Inject RNIC faults under traffic, and check every byte.

    python -m examples.chaos [--seed N] [--seconds S | --faults N] [--rnics 1-4]
                             [--connections N] [--log DIRECTORY] [--json]

Two processes with 2 software RNICs each keep 50 connections busy (chaos_load.py). Whenever their
link group has both of its links, this process injects one fault on one side (chaos_trouble.py): a
queue pair fails, noticed by both sides or by one; a port goes down and comes back; a message, a
write or a completion is lost; a message arrives late; a wakeup arrives twice; a process is stopped
for a moment. Each fault is printed as it happens. A table at the end has the totals.

A fault of kind "not-placed" is a message that is acknowledged but was not delivered. Failover
cannot repair it: its connection, and no other, must be reset (RFC 7609, 4.6.1).

The exit code is 1 if a byte was lost, doubled or out of order, if a connection was reset without
need, or if a connection was not reset that had to be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile

import trio

from examples.chaos_result import KINDS, Policy, Result
from examples.chaos_sides import SETTINGS, Show, Sides
from examples.chaos_trouble import Trouble

__all__ = ["KINDS", "Chaos", "Policy", "Result"]


class Chaos:
    """Runs the two processes and injects faults into them."""

    def __init__(self, policy: Policy, show: Show) -> None:
        self.policy = policy
        self.result = Result(seed=policy.seed, rnics=policy.rnics, during=policy.during)
        self.sides = Sides(policy, self.result, show)

    async def run(self) -> Result:
        """Run until the limits of the policy are reached."""
        async with trio.open_nursery() as nursery:
            if await self.sides.open(nursery):
                await Trouble(self.policy, self.result, self.sides).make()
            else:
                self.result.problems.append("a process did not start")
            await self.sides.finish()
            self.sides.kill()
        self.judge()
        self.result.seconds = self.sides.elapsed()
        return self.result

    def judge(self) -> None:
        """Add a problem for each connection that was reset without need, or wrongly not reset."""
        result = self.result
        if self.policy.rnics == 1:
            return  # without another link all connections are lost, as they should be
        for number in sorted(result.resets - set(result.due)):
            result.problems.append(f"connection {number} was reset, and nothing of it was lost")
        for number, must in sorted(result.due.items()):
            if must and number not in result.resets:
                result.problems.append(f"connection {number} went on, and a message of it was lost")


def _print(text: str) -> None:
    print(text, flush=True)


def _silent(_: str) -> None:
    pass


def _show_table(rows: list[tuple[str, str]]) -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    for name, text in rows:
        print(f"{name:<24}{text}")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.chaos", description="faults of RNICs under traffic"
    )
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--seconds", type=float, default=None, help="default 20 without --faults")
    parser.add_argument("--faults", type=int, default=None, help="stop after this many failures")
    parser.add_argument("--rnics", type=int, default=2, choices=range(1, 5), help="of each side")
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--log", metavar="DIRECTORY", help="where both processes write logs")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    seconds = arguments.seconds
    if seconds is None and arguments.faults is None:
        seconds = 20.0
    policy = Policy(
        seed=seed, seconds=seconds, faults=arguments.faults, rnics=arguments.rnics,
        connections=arguments.connections, log=arguments.log,
    )  # fmt: skip
    show: Show = _silent if arguments.json else _print
    show(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        SETTINGS["directory"] = directory
        result = trio.run(Chaos(policy, show).run)
    if arguments.json:
        print(json.dumps({**dict(result.rows()), "seed": seed, "problems": result.problems}))
    else:
        _show_table(result.rows())
        for line in result.recollections():
            print(line)
        for problem in result.problems:
            print(problem)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
