"""Runs in each of two guests: `smc-conform` in one, the implementation under test in the other.

``python3 -m tests.lab.guest_conform GUEST TARGET ROLE VERSION [OPTION ...]``: GUEST is the role of
the guest (`tests.lab.machine`): the suite runs in "server".  TARGET is "ours" or "kernel", ROLE
that of the target, "server" or "client".  Options go to the suite, which writes its reports into
/lab/keep.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import smc_netlink
from tests.lab.conform_target import DAYTIME, DISCARD, ECHO
from tests.timing import PATIENCE

__all__ = ["PORT", "UEID"]

SUITE, TARGET = "10.9.0.1", "10.9.0.2"
CONTROL = ("10.9.2.1", 7656)
PORT, READ_PORT = 7008, 7010
"""Ports on which the suite listens: for clients that echo, and for those that only read."""
UEID = "TRIO-SMC.LAB"
LANES = 16
"""Concurrent connections of a client under test."""
PLACE = Path("/lab/keep")
PACE = ("--patience", "6", "--timers", "20")
"""For guests without KVM, which answer in a tenth of a second; Linux ends a handshake after six."""
JOBS = {("kernel", "server"): "2", ("kernel", "client"): "1"}
"""Checks at a time, by target and role; others: 6.  Linux has one first contact at a time."""


def suite(kind: str, role: str, version: str, options: Sequence[str]) -> int:
    """Run the suite against the other guest; returns its exit code."""
    PLACE.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "smc_conform"]
    if role == "server":
        words += ["connect", TARGET, str(ECHO), "--daytime", str(DAYTIME)]
        words += ["--discard", str(DISCARD)]
    else:
        words += ["listen", str(PORT), "--host", SUITE, "--discard", str(READ_PORT)]
        words += ["--provides", "parallel"]
    words += [*PACE, "--jobs", JOBS.get((kind, role), "6"), "--version", version]
    words.append("--no-first-contact")  # the lab knows that the target is there, if slow
    words += ["--json", f"{PLACE}/{role}.json", "--keep", f"{PLACE}/{role}"]
    words += ["--html", f"{PLACE}/{role}.html", *options]
    if version == "2":
        words += ["--ueid", UEID]
    with socket.create_server(CONTROL) as listener:
        control = listener.accept()[0]
        with control:
            if role == "server":
                _reach((TARGET, ECHO)).close()
            return subprocess.run(words, check=False).returncode


def target(kind: str, version: str) -> None:
    """Run the implementation until the suite has ended."""
    commands: list[list[str]] = []
    variables = {"CONFORM_RNIC": "rxe0"}
    if version == "2":
        variables["CONFORM_UEID"] = UEID
    if kind == "kernel":
        if version == "2":
            smc_netlink.ueid(UEID)
        ports = (str(PORT), str(LANES), str(READ_PORT))
        commands.append(["-m", "tests.lab.conform_target", TARGET, SUITE, *ports])
    else:
        script = "examples/conform_target.py"
        commands.append([script, "server", str(ECHO), str(DAYTIME), str(DISCARD)])
        commands.append([script, "client", SUITE, str(PORT), str(LANES), str(READ_PORT)])
    processes = [
        subprocess.Popen([sys.executable, *words], env={**os.environ, **variables})
        for words in commands
    ]
    try:
        with _reach(CONTROL) as control:
            control.recv(1)
        if any(each.poll() is not None for each in processes):
            raise SystemExit("the implementation under test has ended")
    finally:
        for each in processes:
            each.kill()


def _reach(address: tuple[str, int]) -> socket.socket:
    """Connect as soon as the other guest listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    """Return the exit code."""
    guest, kind, role, version, *options = sys.argv[1:]
    if guest == "server":
        return suite(kind, role, version, options)
    target(kind, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
