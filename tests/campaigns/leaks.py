"""After 1,000 connections for warm-up, 10,000 more, one after the other, leave nothing.

    python -m tests.campaigns.leaks --cases N --seed S

Counted on both sides of two processes: descriptors, threads, memfd mappings, directory entries,
connections and links; traced Python memory may differ by 64 KiB, resident memory by 2 MiB.
50,000 cases are the whole; fewer open proportionately fewer connections.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass

import trio

from tests.campaigns._options import parse
from tests.e2e.many import check_nothing_left, open_and_close

WHOLE, OF_WHOLE = 50_000, 10_000
"""Cases, and connections of so many cases."""
TRACED = 64 << 10
RESIDENT = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign."""

    connections: int
    traced: tuple[int, int]
    """Growth in bytes, server and client."""
    rss: tuple[int, int]


def run(cases: int, seed: int) -> Result:
    """Open and close; AssertionError when something is left."""
    count = max(100, OF_WHOLE * cases // WHOLE)
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        before, after = trio.run(open_and_close, max(100, count // 10), count, seed)
    check_nothing_left(before, after, traced=TRACED, rss=RESIDENT)
    grown = {
        what: (after[0][what] - before[0][what], after[1][what] - before[1][what])
        for what in ("traced", "rss")
    }
    return Result(connections=count, traced=grown["traced"], rss=grown["rss"])


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__, cases=WHOLE)
    seed = arguments.seed
    start = time.perf_counter()
    result = run(arguments.cases, seed)
    print(
        f"leaks: {result.connections} connections; bytes more on server and client: Python memory "
        f"{result.traced}, resident {result.rss}; seed {seed}, {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
