"""Run the seeded campaigns of tests/campaigns, as many at a time as there are cores.

    python -m scripts.campaigns [--cases N] [--seed S] [NAME ...]

Each campaign is a process of its own, `python -m tests.campaigns.NAME --cases N --seed S`; its
output is printed when it ends. The exit code is 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parents[1] / "tests" / "campaigns"
# A campaign of 50,000 handshakes takes minutes; one that takes this many seconds hangs.
LIMIT = 1200.0


def names() -> list[str]:
    """Return the names of all campaigns: the public modules of tests/campaigns."""
    return sorted(path.stem for path in DIRECTORY.glob("*.py") if not path.stem.startswith("_"))


def run_one(name: str, cases: int, seed: int) -> bool:
    """Run one campaign, print its output, and return True if it passed."""
    command = [sys.executable, "-W", "error", "-m", f"tests.campaigns.{name}"]
    command += ["--cases", str(cases), "--seed", str(seed)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
        text, ending = done.stdout.decode(errors="replace").rstrip(), f"exit {done.returncode}"
        passed = done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        text, ending = (expired.stdout or b"").decode(errors="replace"), "hung"
        passed = False
    seconds = time.monotonic() - start
    ending = "passed" if passed else f"FAILED ({ending})"
    # One call, so that the lines of two campaigns that end together do not mix.
    print(f"{text}\n{name}: {ending}, seed {seed}, {seconds:.1f} s", flush=True)
    return passed


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="seeded campaigns of bad input and schedules")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--cases", type=int, default=50_000, help="cases of each campaign")
    parser.add_argument("--seed", type=int, default=None, help="replay; random by default")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names())
    if unknown:
        parser.error(f"no such campaign: {', '.join(sorted(unknown))}")
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    chosen = arguments.names or names()
    print(f"{len(chosen)} campaigns, {arguments.cases} cases each, seed {seed}", flush=True)
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        passed = list(pool.map(lambda name: run_one(name, arguments.cases, seed), chosen))
    failed = [name for name, good in zip(chosen, passed, strict=True) if not good]
    if failed:
        print(f"FAILED: {', '.join(failed)}, seed {seed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
