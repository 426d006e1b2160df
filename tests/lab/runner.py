"""What the lab's guests run: one function for each pair of programs.

By hand: ``python -m tests.lab.runner verbs|streams [SEED]``.
"""

from __future__ import annotations

import random
import sys

from tests.lab.machine import Finished, run_pair

__all__ = ["streams", "verbs"]

PYTHON = "/usr/bin/python3"
"""Debian's, for which python3-pyverbs is built."""


def verbs(seed: int) -> Finished:
    """All steps of `tests.lab.guest_verbs`, then those of a dying peer (status 128 + SIGKILL)."""
    program = f"{PYTHON} -m tests.lab.guest_verbs"
    commands = (
        "rxe 0 eth0\n"
        f"{program} $ROLE $PEER4 rxe0 {seed} || exit 1\n"
        f"{program} $ROLE $PEER4 rxe0 {seed} die; rc=$?\n"
        "[ $ROLE = server ] && [ $rc = 137 ] && rc=0\n"
        "exit $rc\n"
    )
    return run_pair("verbs", commands, seconds=200)


def streams() -> Finished:
    """All steps of `tests.lab.guest_streams`."""
    commands = (
        "modules garp mrp 8021q\n"
        "rxe 0 eth0\n"
        f"exec {PYTHON} -m tests.lab.guest_streams $ROLE $PEER4\n"
    )
    return run_pair("streams", commands, seconds=400)


def _main() -> int:
    what, *rest = sys.argv[1:]
    seed = int(rest[0]) if rest else random.SystemRandom().getrandbits(32)
    done = verbs(seed) if what == "verbs" else streams()
    sys.stdout.write(done.output)
    return done.returncode


if __name__ == "__main__":
    sys.exit(_main())
