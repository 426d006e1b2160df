"""Runs in each of two guests: one Trio program over TCP, the kernel's AF_SMC, and `trio-smc run`.

``python3 -m tests.lab.guest_speed ROLE PEER CONTROL [profile]``; rxe0 is on eth0.  The client
prints a line for each run, and in the end the medians beside TCP's and the kernel's.  A way that
was not what it is to be measured for is an error: smc_diag tells of the kernel's,
``--require-smc`` of ours.

"profile": instead, once, where the client's time goes during round trips under `trio-smc run`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio

from tests.lab import smc_netlink
from tests.lab.verbs_side import Control
from tests.timing import PATIENCE

ROUNDS = 3
PORT = 7850
PYTHON = "/usr/bin/python3"
PROGRAM = [PYTHON, "-m", "tests.lab.plain_speed"]
SETTINGS = (
    'discovery = "tcp-option"\nhandshake_timeout = 30\nfirst_contact_timeout = 30\n'
    "llc_timeout = 20\ntest_link_timeout = 20\n"
)
OURS = "trio_smc"
WAYS = ("TCP", "AF_SMC", OURS, f"{OURS} woken without its thread")


def command(way: str) -> tuple[list[str], dict[str, str]]:
    """The way to run the program: words before its arguments, and environment."""
    environment = dict(os.environ)
    if way == "AF_SMC":
        environment["LD_PRELOAD"] = os.path.join(os.environ["KERNEL"], "smc_sockets")
    if way in WAYS[:2]:
        return PROGRAM, environment
    settings = Path("/tmp/speed.toml")
    wake = "auto" if way == OURS else "trio"
    settings.write_text(f'{SETTINGS}wake = "{wake}"\n', encoding="utf-8")
    run = [PYTHON, "-m", "trio_smc.tools", "run", "--require-smc", "--config", str(settings), "--"]
    return [*run, *PROGRAM], environment


def kernel_modes() -> set[str]:
    """The modes of the open connections of the kernel's SMC sockets."""
    return {info["mode"] for info in smc_netlink.sockets().values() if info["state"] == 1}


async def serve(way: str, port: int, control: Control) -> None:
    words, environment = command(way)
    async with trio.open_nursery() as nursery:
        serve_it = partial(
            trio.run_process, [*words, "serve", str(port)], env=environment, stdout=subprocess.PIPE
        )
        process: trio.Process = await nursery.start(serve_it)
        assert process.stdout is not None
        assert await process.stdout.receive_some() == b"ready\n"
        await control.swap()


async def run_program(
    way: str, peer: str, port: int, control: Control, *, profiled: bool = False
) -> dict[str, float]:
    words, environment = command(way)
    words = [*words, "ask", peer, str(port), *(["profile"] if profiled else [])]
    modes: set[str] = set()

    async def watch() -> None:
        while True:
            modes.update(kernel_modes())
            await trio.sleep(0.2)

    await control.swap(patience=PATIENCE)
    async with trio.open_nursery() as nursery:
        if way == "AF_SMC":
            nursery.start_soon(watch)
        done = await trio.run_process(words, env=environment, capture_stdout=True)
        nursery.cancel_scope.cancel()
    if way == "AF_SMC":
        assert modes == {"SMCR"}, modes
    *profile, result = done.stdout.decode().splitlines()
    for line in profile:
        log(line)
    figures: dict[str, float] = json.loads(result)
    return figures


def log(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def compare(figures: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Print the medians of each figure, and their ratios; the server prints nothing."""
    for name, by_way in figures.items():
        medians = {way: statistics.median(values) for way, values in by_way.items()}
        spread = ", ".join(
            f"{way} {medians[way]:.0f} ({min(values):.0f}-{max(values):.0f})"
            for way, values in by_way.items()
        )
        ratios = ", ".join(
            f"{medians[OURS] / medians[way]:.2f} of {way}'s" for way in WAYS if way != OURS
        )
        log(f"speed {name}: {spread}; {OURS} {ratios}")


async def main(role: str, peer: str, control_peer: str, profiled: bool) -> None:
    control = await Control.connect(role, control_peer, PATIENCE)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    port = PORT
    for _ in range(1 if profiled else ROUNDS):
        for way in [OURS] if profiled else WAYS:
            port += 1
            with trio.fail_after(PATIENCE):
                if role == "server":
                    await serve(way, port, control)
                    continue
                seen = await run_program(way, peer, port, control, profiled=profiled)
            log(f"{way}: " + ", ".join(f"{name} {value:.0f}" for name, value in seen.items()))
            for name, value in seen.items():
                figures[name][way].append(value)
    if not profiled:
        compare(figures)
    log(f"{role}: ok speed")


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], "profile" in sys.argv[4:])
