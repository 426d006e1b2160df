"""Long runs that end with numbers: `python -m scripts.endurance PART`.

    python -m scripts.endurance hostile [--count 10000000] [--seed N] [--first-piece K]
    python -m scripts.endurance churn   [--count 100000] [--seed N]
    python -m scripts.endurance killed  [--count 10000]

hostile: hostile inputs; 1 in 100 is a live handshake of two stacks with damage on its way
  (`tests.campaigns.handshakes`), the rest are bytes for every decoder
  (`tests.campaigns.decoders`).  They run in pieces, each a process of its own, one for each core.
  The seed of a piece follows from the first seed and its number; ``--first-piece`` continues an
  earlier run.
churn: connections opened, used and closed one after the other between two processes, after a tenth
  of that number for warm-up; then nothing may be left (`tests.campaigns.leaks`).
killed: connections open at once, each with a reader; then the process of the clients is killed
  (`tests.e2e.sudden_end`).

Each prints its numbers; the exit code is 1 if there was a failure, or a limit was passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import report
from tests.campaigns import leaks

__all__ = ["hostile", "pieces"]

HANDSHAKES_IN = 100
"""One input in this many is a live handshake."""
_SIZES = {"handshakes": 5_000, "decoders": 100_000}
_PIECE_TAKES, _KILLED_TAKES = 3600.0, 1800.0
"""Seconds after which a part counts as hung."""
SPARE_DESCRIPTORS = 256
MOST_MEMORY, MOST_PROCESSOR, MOST_PAUSE = 50 << 10, 0.5e-3, 0.02
"""Limits for each killed connection: bytes and seconds; and seconds of one turn of the loop."""


def pieces(count: int, seed: int) -> list[tuple[str, int, int]]:
    """Return campaign, cases and seed of each piece."""
    shares = {"handshakes": count // HANDSHAKES_IN}
    shares["decoders"] = count - shares["handshakes"]
    found = []
    for name, share in shares.items():
        for first in range(0, share, _SIZES[name]):
            cases = min(_SIZES[name], share - first)
            found.append((name, cases, random.Random(f"{seed} {name} {first}").getrandbits(32)))
    # Mix both kinds from the beginning, so that a run that is cut short has done both.
    random.Random(seed).shuffle(found)
    return found


def _run_piece(number: int, piece: tuple[str, int, int]) -> bool:
    name, cases, seed = piece
    command = [sys.executable, "-W", "error", "-m", f"tests.campaigns.{name}"]
    done = subprocess.run(
        [*command, "--cases", str(cases), "--seed", str(seed)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=_PIECE_TAKES, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    # One call, so that the lines of two pieces that end together do not mix.
    line = done.stdout if done.returncode else (lines or ["it said nothing"])[-1]
    print(f"piece {number}: {line}", flush=True)
    return done.returncode == 0


def hostile(count: int, seed: int, first_piece: int) -> bool:
    """Run the pieces from ``first_piece`` on; return True if none found a failure."""
    todo = list(enumerate(pieces(count, seed)))[first_piece:]
    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        passed = list(pool.map(lambda each: _run_piece(*each), todo))
    table = [["hostile inputs", "cases", "pieces"]]
    for name in _SIZES:
        of_it = [cases for _, (campaign, cases, _) in todo if campaign == name]
        table.append([name, f"{sum(of_it):,}", str(len(of_it))])
    print(report.text_of(table, left=1))
    print(f"{passed.count(False)} pieces failed, seed {seed}, {time.monotonic() - begun:.0f} s")
    return all(passed)


def churn(count: int, seed: int) -> bool:
    """Open and close connections; return True if nothing was left."""
    begun = time.monotonic()
    try:
        result = leaks.run(count * leaks.WHOLE // leaks.OF_WHOLE, seed)
    except AssertionError as error:
        print(f"left after {count:,} connections, seed {seed}: {error}")
        return False
    table = [
        ["opened and closed", "server", "client"],
        [f"{result.connections:,} connections: Python memory", *_kib(result.traced)],
        ["resident memory", *_kib(result.rss)],
        ["descriptors, threads, mappings, files", "+0", "+0"],
    ]
    print(report.text_of(table, left=1))
    print(f"seed {seed}, {time.monotonic() - begun:.0f} s")
    return True


def _kib(grown: tuple[int, int]) -> list[str]:
    return [f"{each / 1024:+.1f} KiB" for each in grown]


def killed(count: int) -> bool:
    """Kill a process with many connections; return True if the cost was within the limits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < count + SPARE_DESCRIPTORS:
        needed = count + SPARE_DESCRIPTORS
        print(f"{count:,} connections need RLIMIT_NOFILE {needed:,}, it is {hard:,}")
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-m", "tests.e2e.sudden_end", "killed", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_KILLED_TAKES, check=True)
    cost = json.loads(done.stdout)
    limits = {
        "memory": MOST_MEMORY * count, "processor": MOST_PROCESSOR * count, "work": MOST_PAUSE
    }  # fmt: skip
    table = [
        [f"{count:,} open, their client killed", "", "allowed"],
        ["peak of memory above", *_mib(cost["memory"], limits["memory"])],
        ["processor time, s", f"{cost['processor']:.2f}", f"{limits['processor']:.2f}"],
        ["longest turn of the loop, processor time, ms", *_ms(cost["work"], MOST_PAUSE)],
        ["longest turn of the loop, ms", *_ms(cost["pause"]), ""],
        ["until all were closed, s", f"{cost['seconds']:.2f}", ""],
        ["descriptors while open", f"{cost['open']:.0f}", ""],
        ["descriptors after", f"{cost['left']:.0f}", ""],
    ]  # fmt: skip
    print(report.text_of(table, left=1))
    return all(cost[what] <= most for what, most in limits.items())


def _mib(*sizes: float) -> list[str]:
    return [f"{each / (1 << 20):.1f} MiB" for each in sizes]


def _ms(*times: float) -> list[str]:
    return [f"{each * 1e3:.1f}" for each in times]


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.endurance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("part", choices=("hostile", "churn", "killed"))
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--first-piece", type=int, default=0, help="hostile: where to continue")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"{arguments.part}: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = str(Path(directory))
        if arguments.part == "hostile":
            passed = hostile(arguments.count or 10_000_000, seed, arguments.first_piece)
        elif arguments.part == "churn":
            passed = churn(arguments.count or 100_000, seed)
        else:
            passed = killed(arguments.count or 10_000)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
