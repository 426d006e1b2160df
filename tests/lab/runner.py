"""Starts the project's own programs in the lab's two guests.

The lab itself is not part of the project.  The environment variable ``TRIO_SMC_LAB`` names its
directory, with ``bin/run-pair.sh [-k KERNEL] [-t SECONDS] COMMANDS``: it boots two guests on one
wire that see the host's files, runs the commands in each with ``ROLE`` ("server", "client"),
``PEER4`` and ``LABG`` set, prefixes what they print with ``[a]`` and ``[b]``, and ends with
status 0 when both did.  ``$LABG/rxe-up.sh`` makes the device rxe0.

By hand: ``python -m tests.lab.runner [SEED]``.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["lab_directory", "run_pair", "streams_commands", "verbs_commands"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_KERNEL = "6.12-v1"


def lab_directory() -> Path | None:
    """Where the lab lies, or None."""
    named = os.environ.get("TRIO_SMC_LAB")
    return Path(named) if named else None


def run_pair(lab: Path, commands: str, *, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run shell commands in both guests, at most ``seconds`` of guest time.

    The guests' python3 is Debian's, with its pyverbs; everything else comes from the packages of
    the interpreter that runs this.
    """
    packages = sysconfig.get_path("purelib")
    head = (
        ". $LABG/rxe-up.sh eth0\n"
        f"export PYTHONPATH={shlex.quote(f'{_REPOSITORY}:{packages}')}\n"
        "export PYTHONDONTWRITEBYTECODE=1\n"
        f"cd {shlex.quote(str(_REPOSITORY))}\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(head + commands)
        file.flush()
        run = lab / "bin" / "run-pair.sh"
        # Without KVM, QEMU 7.2's cmpxchg16b seems to spoil the flags when it fails, and the guest
        # kernel's allocator retries on it: 3 double faults in some 20 transfers of 64 MiB, none
        # in 17 without the instruction.
        environment = {"LAB_CPU": "max,cx16=off", **os.environ}
        return subprocess.run(
            ["nice", str(run), "-k", _KERNEL, "-t", str(seconds), file.name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds + 60,
            check=False,
        )


def verbs_commands(seed: int) -> str:
    """All steps of `tests.lab.guest_verbs`, then those of a dying peer (status 128 + SIGKILL)."""
    program = "/usr/bin/python3 -X faulthandler -m tests.lab.guest_verbs"
    return (
        f"{program} $ROLE $PEER4 rxe0 {seed} || exit 1\n"
        f"{program} $ROLE $PEER4 rxe0 {seed} die; rc=$?\n"
        "[ $ROLE = server ] && [ $rc = 137 ] && rc=0\n"
        "exit $rc\n"
    )


def streams_commands() -> str:
    """All steps of `tests.lab.guest_streams`; VLANs take modules that the lab has."""
    return (
        "lmod garp mrp 8021q\n"
        "exec /usr/bin/python3 -X faulthandler -m tests.lab.guest_streams $ROLE $PEER4\n"
    )


def _main() -> int:
    lab = lab_directory()
    if lab is None:
        sys.stderr.write("TRIO_SMC_LAB does not name the lab's directory\n")
        return 2
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().getrandbits(32)
    done = run_pair(lab, verbs_commands(seed), seconds=150)
    sys.stdout.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(_main())
