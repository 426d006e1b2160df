"""Two processes, 256 MiB each way at once, for rings of 16, 64, 256 KiB and 1 MiB.

    python -m tests.campaigns.transfer --cases N --seed S

Write and read sizes are log-uniform from 1 byte to 1 MiB, with 10,000 further writes below 100
bytes; every byte is compared with what belongs at its position, and both ends' running hashes with
each other. 50,000 cases are the whole; fewer move proportionately less.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass

import trio

from tests.campaigns._options import parse
from tests.e2e.transfer import RINGS, transfer

WHOLE = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a campaign."""

    bytes_each_way: int
    writes: int
    seconds: dict[int, float]
    """By ring."""


def run(cases: int, seed: int) -> Result:
    """Move the bytes; AssertionError when one is wrong."""
    small = max(10, 10_000 * cases // WHOLE)
    total = max(100 * small, (256 << 20) * cases // WHOLE)
    seconds: dict[int, float] = {}
    writes = 0
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        for number, ring in enumerate(RINGS):
            result = trio.run(transfer, ring, total, small, seed + 2 * number)
            seconds[ring] = result["seconds"]
            writes += result["writes"]
    return Result(bytes_each_way=total, writes=writes, seconds=seconds)


def main() -> int:
    """Return the exit code."""
    arguments = parse(__doc__, cases=WHOLE)
    seed = arguments.seed
    start = time.perf_counter()
    result = run(arguments.cases, seed)
    took = ", ".join(f"{ring >> 10} KiB {value:.1f} s" for ring, value in result.seconds.items())
    print(
        f"transfer: {result.bytes_each_way} bytes each way at once over each ring ({took}), "
        f"{result.writes} writes, seed {seed}, {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
