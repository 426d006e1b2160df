"""Compare SMC-R with plain Trio TCP and others: `python -m benchmarks`.

For each transport there are a server process and a client process, on a core each if there are two.
Rounds are interleaved: in each round every workload runs over one transport right after the other,
in alternating order, and a ratio is formed inside the round, so that a disturbance of the machine
affects both. A ratio above 1 means better than the base (shorter round trips, more bytes or
requests per second). The table has its median and its range: over the rounds, or with --runs over
the medians of separate runs, each with processes of its own.

With --programs it compares unmodified programs instead, over TCP and under `trio-smc run`, without
pinning them to cores: see `benchmarks.unmodified`.

With --comparison it compares SMC-R with other ways between processes of one host: Unix sockets,
pipes, multiprocessing, gRPC, UCX.  The processes are not pinned, because some have several threads,
and those of a transport are stopped while others are measured, because some poll all the time.

With --proxy it compares the cost of a connection through one or two `trio-smc proxy` with TCP
without a proxy. The processes are not pinned, because there are more of them than cores.

"limit" is not a real transport: it wakes a process and copies bytes, and nothing else. Neither are
"limit-steps", which copies bytes and lets Trio's scheduler take a step for each call, "limit-ring",
which copies bytes through a ring from one processor to another, without Trio, and "limit-messages",
which opens TCP connections and exchanges as many bytes on them as a handshake.

A slow result is not an error. The exit code is 1 if a workload failed or a connection did not have
the mode of its transport.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import comparison as others
from benchmarks import limits, machines, plot, progress, report, unmodified
from benchmarks.compared import NEEDS, missing
from benchmarks.processes import Failed, Worker
from benchmarks.transports import BASE, PROXIED, TRANSPORTS, WAKES
from benchmarks.workloads import WORKLOADS

CLIENT_CORE, SERVER_CORE = 0, 1


@contextlib.contextmanager
def pairs(names: list[str], pin: bool) -> Iterator[dict[str, Pair]]:
    """Start server and client of each transport."""
    here, there = (CLIENT_CORE, SERVER_CORE) if pin else (None, None)
    with contextlib.ExitStack() as stack:
        found: dict[str, Pair] = {}
        for name in names:
            if name in limits.NAMES:
                worker = Worker("benchmarks.limits", *limits.NAMES[name], core=here)
                client = stack.enter_context(worker)
                found[name] = Pair(client)
                continue
            server = stack.enter_context(Worker("benchmarks.worker", "serve", name, core=there))
            client = stack.enter_context(Worker("benchmarks.worker", "client", name, core=here))
            found[name] = Pair(client, server, server.answer()["at"])
        yield found


@dataclass(frozen=True, slots=True)
class Pair:
    """The client of a transport, and its server with the address; a limit has only a client."""

    client: Worker
    server: Worker | None = None
    at: Any = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let the processes run only in such blocks: some poll even if they have nothing to do."""
        with contextlib.ExitStack() as stack:
            for process in filter(None, (self.server, self.client)):
                stack.enter_context(process.resting())
            yield


def check_modes(clients: dict[str, Pair]) -> bool:
    """Print each transport whose mode is not the one in its name; return True if there is none."""
    right = True
    for name, pair in clients.items():
        if name in limits.NAMES:
            continue
        reply = pair.client.call(workload="mode", at=pair.at)
        mode = reply["mode"]
        if mode is not None and not name.startswith(mode):
            right = False
            print(f"{name}: NOT smc-r but {mode}: {reply['fallback']}")
    return right


def measure(
    names: list[str], workloads: list[str], arguments: argparse.Namespace, pin: bool
) -> tuple[report.Numbers, bool]:
    """Run all rounds once; return the numbers, and True if every mode was right."""
    numbers: dict[str, dict[str, list[float]]] = {
        metric.name: {} for workload in workloads for metric in WORKLOADS[workload].metrics
    }
    other_core = SERVER_CORE if pin else None
    with pairs(names, pin) as clients:
        right = check_modes(clients)
        if arguments.comparison:
            for pair in clients.values():
                with pair.alone():
                    pass
        for number in range(arguments.rounds):
            progress.show(f"round {number + 1} of {arguments.rounds}")
            for workload in workloads:
                for name in names if number % 2 == 0 else reversed(names):
                    pair = clients[name]
                    with pair.alone() if arguments.comparison else contextlib.nullcontext():
                        reply = pair.client.call(
                            workload=workload,
                            at=pair.at,
                            seconds=arguments.seconds,
                            other_core=other_core,
                        )
                    values = reply["values"]
                    if values is None:
                        continue
                    for metric, value in zip(WORKLOADS[workload].metrics, values, strict=True):
                        numbers[metric.name].setdefault(name, []).append(value)
    # The table has the order of the first round.
    return {
        metric: {name: values[name] for name in names if name in values}
        for metric, values in numbers.items()
    }, right


def _parser() -> argparse.ArgumentParser:
    known = [*TRANSPORTS, *limits.NAMES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="compare SMC-R with plain Trio TCP and others"
    )
    option = parser.add_argument
    option("--programs", action="store_true", help="unmodified programs under trio-smc run")
    option("--compiled", type=Path, metavar="TREE", help="programs: also with that copy's build")
    option("--comparison", action="store_true", help="Unix sockets, pipes, multiprocessing, gRPC")
    option("--proxy", action="store_true", help="the cost of trio-smc proxy")
    option("--short", action="store_true", help=f"3 rounds of 0.2 s, {BASE} and smc-r, for CI")
    option("--runs", type=int, help="separate runs, each with new processes; default 1; programs 5")
    option("--rounds", type=int, help="of each run; default 9; programs 3")
    option("--seconds", type=float, help="of each measurement; default 0.7; others 0.2")
    option("--transports", help="default: all of " + ", ".join(known))
    option("--workloads", help="default: all")
    option(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="client on core 0, server on core 1; default when there are two cores; programs: no",
    )
    option("--both", action="store_true", help="run everything pinned and not pinned")
    option("--json", type=Path, help="write ratios and all numbers to this file")
    option("--plot", type=Path, help="draw the ratios into this file (.svg or .png)")
    option("--machine", action="store_true", help="write the file of this machine")
    option(
        "--baseline",
        type=Path,
        help="a file of --json with ratios to print beside these; default: those of the machine "
        "with the same processor",
    )
    return parser


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.programs + arguments.proxy + arguments.comparison > 1:
        parser.error("--programs, --proxy and --comparison are separate benchmarks")
    if arguments.programs and arguments.transports is not None:
        parser.error("--programs are compared over tcp and under trio-smc run")
    if arguments.compiled is not None and not arguments.programs:
        parser.error("--compiled is for --programs")
    if arguments.machine and arguments.proxy:
        parser.error("--machine is for transports, programs and the comparison")
    if arguments.baseline is not None:
        try:
            arguments.earlier = report.load_ratios(arguments.baseline)
        except (OSError, ValueError) as problem:
            parser.error(f"--baseline {arguments.baseline}: {problem}")


def parse() -> argparse.Namespace:
    """Return the command line's settings, with those of --short filled in."""
    two_cores = len(os.sched_getaffinity(0)) > 1
    known = [*TRANSPORTS, *limits.NAMES]
    parser = _parser()
    arguments = parser.parse_args()
    short, programs = arguments.short, arguments.programs
    _check(parser, arguments)
    arguments.runs = arguments.runs or (5 if programs and not short else 1)
    arguments.rounds = arguments.rounds or (3 if programs or short else 9)
    brief = programs or short or arguments.comparison
    arguments.seconds = arguments.seconds or (0.2 if brief else 0.7)
    if arguments.pin is None:
        arguments.pin = two_cores and not (programs or arguments.proxy or arguments.comparison)
    if arguments.proxy:
        known = [BASE, *PROXIED]
        arguments.transports = arguments.transports or ",".join(known)
    elif arguments.comparison:
        known = [*others.TRANSPORTS]
        arguments.transports = arguments.transports or ",".join(installed(known))
        arguments.workloads = arguments.workloads or ",".join(others.USED)
    elif arguments.transports is None:
        arguments.transports = f"{BASE},smc-r" if short or programs else ",".join(installed(known))
    arguments.transports = arguments.transports.split(",")
    arguments.table = unmodified.WORKLOADS if programs else WORKLOADS
    arguments.workloads = (arguments.workloads or ",".join(arguments.table)).split(",")
    if not (arguments.proxy or arguments.comparison):
        known += WAKES
    given_of = (arguments.transports, known), (arguments.workloads, [*arguments.table])
    for given, all_of in given_of:
        if unknown := set(given) - set(all_of):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(all_of)}")
    if BASE not in arguments.transports:
        parser.error(f"--transports needs {BASE}, which ratios are relative to")
    return arguments


def installed(names: list[str]) -> list[str]:
    """Return the transports that can run here; print those that cannot."""
    for name in filter(missing, names):
        print(f"{name} is left out: {NEEDS[name]} is not installed", file=sys.stderr)
    return [name for name in names if not missing(name)]


def kind_of(arguments: argparse.Namespace) -> machines.Kind:
    """The kind of measurement, as `benchmarks.machines` names it."""
    return "programs" if arguments.programs else "transports"


def compare(arguments: argparse.Namespace, pin: bool) -> tuple[report.Comparison, bool]:
    """Run all measurements, pinned or not, and print the table.  Raises Failed."""
    start = time.monotonic()
    load = progress.load_before()
    runs: list[report.Numbers] = []
    right = True
    for number in range(1, arguments.runs + 1):
        if arguments.runs > 1:
            progress.show(f"run {number} of {arguments.runs}")
        if arguments.programs:
            cores = (CLIENT_CORE, SERVER_CORE) if pin else (None, None)
            transports = {BASE: None, unmodified.RUN: None}
            if arguments.compiled is not None:
                transports[unmodified.COMPILED] = arguments.compiled
            settings = arguments.rounds, arguments.seconds, cores, transports
            runs.append(unmodified.measure(arguments.workloads, *settings))
            continue
        numbers, good = measure(arguments.transports, arguments.workloads, arguments, pin)
        runs.append(numbers)
        right = right and good
    progress.clear()
    table = arguments.table
    comparison = report.Comparison(
        metrics=[metric for name in arguments.workloads for metric in table[name].metrics],
        runs=runs,
        base=BASE,
        about=report.circumstances(
            runs=arguments.runs,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
            pinned=pin,
            load=load,
        ),
    )
    before: Mapping[str, report.Earlier]
    if arguments.comparison and arguments.baseline is None:
        before, note = {}, "the numbers of measured machines: docs/comparison.md"
    elif arguments.baseline is None:
        before, note = machines.earlier(kind_of(arguments), pinned=pin)
    else:
        before, note = arguments.earlier, f"before: {arguments.baseline}"
    print(report.text_of(report.rows(comparison, before)))
    print(
        f"columns: what was measured (unit); transport; medians of {BASE} and of this transport; "
        "how many times\nbetter the transport is, the median and the range of the rounds; before: "
        "the same ratio in earlier runs,\nwith * if every round is worse than all of those"
    )
    print(note)
    print(
        f"ratio above 1: better than {BASE}. {arguments.runs} x {arguments.rounds} interleaved "
        f"rounds of {arguments.seconds} s, {'pinned' if pin else 'not pinned'}, "
        f"load before {load}, {time.monotonic() - start:.0f} s in all"
    )
    if worse := report.worse(comparison, before):
        print("worse in every round than in all earlier runs: " + "; ".join(worse))
    return comparison, right


def main() -> int:
    """Return the exit code."""
    arguments = parse()
    right = True
    comparisons = []
    try:
        main_one = not arguments.programs
        for pin in (main_one, not main_one) if arguments.both else (arguments.pin,):
            comparison, good = compare(arguments, pin)
            comparisons.append(comparison)
            right = right and good
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    if arguments.json:
        report.save(arguments.json, comparisons)
    if arguments.machine and arguments.comparison:
        print(others.save(comparisons[0]))
    elif arguments.machine:
        print(machines.save(kind_of(arguments), comparisons))
    if arguments.plot:
        (plot.programs if arguments.programs else plot.ratios)(arguments.plot, comparisons)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
