"""Compare SMC-R with plain Trio TCP: `python -m benchmarks`.

For every transport there are a server process and a client process, on a core each when there are
two. Rounds are interleaved: in each round every workload runs over one transport right after the
other, in alternating order, and a ratio is formed inside the round, so that what disturbs the
machine disturbs both. A ratio above 1 means better than the base (shorter round trips, more bytes
or requests per second); printed are its median over the rounds and its range.

Nothing here fails because of a time. The exit code is 1 when a workload failed or a connection was
not in the mode that its transport stands for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio

from benchmarks import report
from benchmarks.transports import BASE, TRANSPORTS
from benchmarks.workloads import WORKLOADS

BASELINE = Path(__file__).with_name("baseline.json")
CLIENT_CORE, SERVER_CORE = 0, 1


class Failed(Exception):
    """A worker process failed; the text says at what."""


class Worker:
    """One process of benchmarks.worker, ended by closing its input."""

    def __init__(self, role: str, transport: str, core: int | None) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", role, transport]
        if core is not None:
            command += ["--core", str(core)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.__exit__(kind, error, traceback)

    def ask(self, **command: Any) -> Any:
        """Send a command; return the answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return the next line that the process says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed("a worker process ended; its error is above")
        said = json.loads(line)
        if "error" in said:
            raise Failed(said["error"])
        return said


@contextlib.contextmanager
def pairs(names: list[str], pin: bool) -> Iterator[dict[str, tuple[Worker, int]]]:
    """Start server and client of each transport; yield the clients with their servers' ports."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name in names:
            server = stack.enter_context(Worker("serve", name, SERVER_CORE if pin else None))
            client = stack.enter_context(Worker("client", name, CLIENT_CORE if pin else None))
            found[name] = client, server.answer()["port"]
        yield found


def check_modes(clients: dict[str, tuple[Worker, int]]) -> bool:
    """Print each transport's mode; return whether each is what its name says."""
    right = True
    for name, (client, port) in clients.items():
        said = client.ask(workload="mode", port=port)
        mode = said["mode"]
        if mode is not None and not name.startswith(mode):
            right = False
            print(f"{name}: NOT smc-r but {mode}: {said['fallback']}")
    return right


def measure(
    names: list[str], workloads: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], bool]:
    """Run all rounds; return the numbers and whether every mode was right."""
    numbers: dict[str, dict[str, list[float]]] = {
        metric.name: {name: [] for name in names}
        for workload in workloads
        for metric in WORKLOADS[workload].metrics
    }
    with pairs(names, arguments.pin) as clients:
        right = check_modes(clients)
        for number in range(arguments.rounds):
            for workload in workloads:
                for name in names if number % 2 == 0 else reversed(names):
                    client, port = clients[name]
                    said = client.ask(workload=workload, port=port, seconds=arguments.seconds)
                    for metric, value in zip(
                        WORKLOADS[workload].metrics, said["values"], strict=True
                    ):
                        numbers[metric.name][name].append(value)
            if sys.stderr.isatty():
                print(f"round {number + 1} of {arguments.rounds}", end="\r", file=sys.stderr)
    return numbers, right


def parse() -> argparse.Namespace:
    """Return the command line's settings, with those of --short filled in."""
    two_cores = len(os.sched_getaffinity(0)) > 1
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="compare SMC-R with plain Trio TCP"
    )
    option = parser.add_argument
    option("--short", action="store_true", help="3 rounds of 0.2 s, for CI")
    option("--rounds", type=int, help="default 9")
    option("--seconds", type=float, help="of each measurement; default 0.7")
    option("--transports", default=f"{BASE},smc-r", help="of " + ", ".join(TRANSPORTS))
    option("--workloads", default=",".join(WORKLOADS), help="default: all")
    option(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=two_cores,
        help="client on core 0, server on core 1; default when there are two cores",
    )
    option("--json", type=Path, help="write ratios and all numbers to this file")
    option("--baseline", type=Path, default=BASELINE, help="ratios to print beside these")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (3 if arguments.short else 9)
    arguments.seconds = arguments.seconds or (0.2 if arguments.short else 0.7)
    arguments.transports = arguments.transports.split(",")
    arguments.workloads = arguments.workloads.split(",")
    for given, known in ((arguments.transports, TRANSPORTS), (arguments.workloads, WORKLOADS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if BASE not in arguments.transports:
        parser.error(f"--transports needs {BASE}, which ratios are relative to")
    return arguments


def main() -> int:
    """Return the exit code."""
    arguments = parse()
    start = time.monotonic()
    # What else the machine was doing: above 0.5 the absolute numbers say little.
    load = round(os.getloadavg()[0], 2)
    try:
        numbers, right = measure(arguments.transports, arguments.workloads, arguments)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    metrics = [metric for name in arguments.workloads for metric in WORKLOADS[name].metrics]
    about = {
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "pinned": arguments.pin,
        "load_before": load,
        "python": platform.python_version(),
        "trio": trio.__version__,
    }
    earlier = report.load_ratios(arguments.baseline)
    print(report.text_of(report.rows(metrics, numbers, BASE, earlier)))
    print(
        f"ratio above 1: better than {BASE}. {arguments.rounds} interleaved rounds of "
        f"{arguments.seconds} s, {'pinned' if arguments.pin else 'not pinned'}, "
        f"load before {load}, {time.monotonic() - start:.0f} s in all"
    )
    if arguments.json:
        report.save(arguments.json, metrics, numbers, BASE, about)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
