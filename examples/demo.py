"""Compare SMC-R with plain TCP: round trips, a stream, a file moved from memory to memory, and the
processor time of each.

    make demo        or        python -m examples.demo [--mib N] [--rounds N]

First two programs of README's table run as they did for that table: unmodified, under `trio-smc
run` and over TCP in turn, on all processors. So README's numbers and those of this machine can be
compared. Then a server process and a client process (demo_peer.py) move a file; this process only
starts them, shows progress and prints the table. Each round of the file uses new processes. The
exit code is 0 only if the mode was smc-r every time and every copy had the file's SHA-256. If a
connection stays on TCP, the output says so at once, with the reason. If other programs kept the
processors busy, the last sentence says so: the ratios then mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machines, unmodified
from benchmarks.processes import Failed
from benchmarks.transports import BASE

PEER = Path(__file__).with_name("demo_peer.py")
README = Path(__file__).resolve().parents[1] / "README.md"
MIB = 1024 * 1024
NAMES = {"smc": "SMC-R", "tcp": "TCP"}
WAYS = {"up": "client to server", "down": "server to client"}
# The programs of README's table that the demo runs, with the names of their results.
PROGRAMS = {"echo": "requests of 64 bytes", "stream-64k": "streams"}
# Seconds of one measurement of a program: those of README's table have the same length.
SECONDS = 0.2
# Units of these results that the table shows in another form, and the factors.
UNITS = {"µs each": ("µs", 1), "s per GiB": ("ms/GiB", 1000)}
# From this ratio on, SMC-R is faster or slower; ratios in between differ from run to run.
CLEAR = 1.1
# If other programs take more than this share of all processors, the measurement is disturbed.
BUSY = 0.1
Show = Callable[[str, int], None]
# Called after each measurement of a program, with its name.
Step = Callable[[str], None]
# For each program and transport the values of each round: time or rate, and processor time.
Values = dict[str, dict[str, list[tuple[float, float]]]]


class PeerFailed(Exception):
    """A server or client process ended with an error, which it has printed."""


def make_file(path: Path, mib: int) -> str:
    """Write `mib` MiB of pseudo-random bytes, the same every time; return their SHA-256."""
    generator = random.Random(7609)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(mib):
            block = generator.randbytes(MIB)
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a peer until it ends; PeerFailed if it ended with an error."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    if process.wait():
        raise PeerFailed(f"a process of the demo ended with exit code {process.returncode}")


@contextlib.contextmanager
def peer(*arguments: str, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run a peer. In a group of its own Ctrl-C does not reach it, and it prints no traceback."""
    command = [sys.executable, str(PEER), *arguments]
    with subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        except KeyboardInterrupt:
            process.terminate()
            raise


@contextlib.contextmanager
def server(transport: str) -> Iterator[int]:
    """Run the server process; the value is its port. It ends when its input does."""
    with peer("serve", transport, stdin=subprocess.PIPE) as process:
        events = next(lines_of(process), None)
        if events is None:
            raise PeerFailed("the server process did not start")
        yield events["port"]


def one_round(transport: str, path: Path, show: Show) -> list[dict[str, Any]]:
    """Move the file both ways once; return the events `mode`, `round trips` and `result`."""
    events: list[dict[str, Any]] = []
    name = NAMES[transport]
    with server(transport) as port, peer("send", transport, str(port), str(path)) as process:
        for event in lines_of(process):
            if event["event"] == "progress":
                show(f"{name}, {WAYS[event['way']]}", event["bytes"])
                continue
            events.append({**event, "transport": transport})
            if event["event"] == "mode" and event["mode"] != "smc-r":
                name = "TCP instead of SMC-R"
                print_tcp(event)
    return events


def print_tcp(event: dict[str, Any]) -> None:
    """Print at once that the bytes do not travel over SMC-R, and why."""
    print(f"NOT SMC-R   the bytes travel over TCP: {event['fallback']}", flush=True)


def mode_of_a_connection() -> dict[str, Any]:
    """Open a connection as the file will, and return the event `mode`."""
    with server("smc") as port, peer("probe", "smc", str(port)) as process:
        [event] = lines_of(process)
    return event


def run_programs(rounds: int) -> Values:
    """Run the programs over SMC-R and over TCP in turn. Failed if a connection is not SMC-R."""
    values: Values = {name: {transport: [] for transport in NAMES} for name in PROGRAMS}
    names = {unmodified.RUN: "smc", BASE: "tcp"}
    with (
        tempfile.TemporaryDirectory(prefix="trio-smc-demo-") as directory,
        steps(rounds * len(PROGRAMS) * len(NAMES)) as done,
    ):
        under = unmodified.WORKLOADS["echo"].under
        pinned = (None, None)  # not pinned
        with unmodified.clients(
            "plain", under, Path(directory), pinned, dict.fromkeys(names)
        ) as workers:
            for name, transport, value in unmodified.in_turn(
                workers, list(PROGRAMS), rounds, SECONDS
            ):
                values[name][names[transport]].append(value)
                done(f"{title(name)}, {NAMES[names[transport]]}")
    return values


def title(name: str) -> str:
    """The name of a program in README's table."""
    return unmodified.WORKLOADS[name].metrics[0].name


def promises(readme: Path = README) -> dict[str, str]:
    """README's ranges for the programs that the demo runs; empty without a README."""
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {}
    for name in PROGRAMS:
        if match := re.search(rf"^\| {re.escape(title(name))} \| ([^|]+?) \|", text, re.MULTILINE):
            found[name] = match[1]
    return found


def measured_earlier(processor: str) -> dict[str, str]:
    """The ratios of the machine in `benchmarks/machines` that has this processor."""
    found = {}
    for content in machines.load():
        if content["machine"]["processor"] == processor:
            ratios = content.get("programs", {}).get("not pinned", {}).get("ratios", {})
            for name in PROGRAMS:
                if numbers := ratios.get(f"{title(name)} | {unmodified.RUN}"):
                    found[name] = f"{numbers[0]:.2f}"
    return found


def ratios_of(values: Values, name: str) -> list[float]:
    """How many times better SMC-R was, in each round."""
    smaller = unmodified.WORKLOADS[name].metrics[0].smaller_is_better
    both = zip(values[name]["smc"], values[name]["tcp"], strict=True)
    return [tcp / smc if smaller else smc / tcp for (smc, _), (tcp, _) in both]


def print_line(head: str, of: dict[str, str], end: str = "") -> None:
    """Print the ratios of the programs in one line, or nothing if there are none."""
    if of:
        ratios = "; ".join(f"{title(name)}: {of[name]}" for name in of)
        print(f"{head:12}{ratios}{end}", flush=True)


def print_setting(build: str, variant: str) -> None:
    """Print how the programs are run, and what README promises for them.

    Args:
      build: "pure" or "compiled".
      variant: of the software RNIC, as `trio-smc rnic` prints it.
    """
    machine = machines.this_machine()
    processor, number, python = (machine[key] for key in ("processor", "processors", "python"))
    print("programs    of README, under trio-smc run, not pinned: times as fast as over TCP")
    print_line("README", promises(), " (pure build)")
    print_line("earlier", measured_earlier(processor), f" ({processor} in benchmarks/machines)")
    about = f"{processor}, {number} processors, Python {python}"
    print(f"here        {build} build, software RNIC {variant}, {about}", flush=True)


def conclusion(values: Values, events: list[dict[str, Any]], busy: float = 0.0) -> str:
    """One sentence about this machine.

    Args:
      values: of the programs.
      events: of the processes that moved the file.
      busy: the share of the processors that other programs took.
    """
    ratios = {PROGRAMS[name]: median(ratios_of(values, name)) for name in values}
    results = [event for event in events if event["event"] == "result"]
    took = {
        transport: median(event["seconds"] for event in results if event["transport"] == transport)
        for transport in NAMES
    }
    ratios["files"] = took["tcp"] / took["smc"]
    faster, slower, same = [], [], []
    for name, ratio in ratios.items():
        if ratio >= CLEAR:
            faster.append(f"{ratio:.1f}x as fast for {name}")
        elif ratio <= 1 / CLEAR:
            slower.append(f"slower for {name} ({ratio:.1f}x as fast)")
        else:
            same.append(f"no faster for {name}")
    text = f"On this machine SMC-R is {', '.join(faster + same + slower)}"
    if busy > BUSY:
        text += (
            f"; but other programs took {busy:.0%} of its processors meanwhile, so try again when "
            "it has nothing else to do"
        )
    return f"{text}."


@contextlib.contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show bars if there is a terminal and rich is installed, otherwise a line per transfer."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        with bars(total) as show:
            yield show
    else:
        yield lambda text, done: print(f"moved       {text}") if done >= total else None


@contextlib.contextmanager
def steps(total: int) -> Iterator[Step]:
    """Show a bar for so many measurements if there is a terminal and rich is installed, and nothing
    otherwise."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        yield lambda _text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, refresh_per_second=4, transient=True) as display:
        task = display.add_task("the programs start", total=total)
        yield lambda text: display.update(task, description=text, advance=1)


@contextlib.contextmanager
def bars(total: int) -> Iterator[Show]:
    """Show a bar for each kind of transfer."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<26}"), BarColumn(), DownloadColumn(True))
    # Few refreshes: this process shares the processors with the two that are timed.
    with Progress(*columns, refresh_per_second=4, transient=True) as display:
        tasks = {}

        def show(text: str, done: int) -> None:
            if text not in tasks:
                tasks[text] = display.add_task(text, total=total)
            display.update(tasks[text], completed=done)

        yield show


def used_smc(events: list[dict[str, Any]]) -> bool:
    """True if the bytes of every round travelled over SMC-R."""
    return all(event["mode"] == "smc-r" for event in events if event["event"] == "mode")


def report(values: Values, events: list[dict[str, Any]], sha256: str, mib: int) -> bool:
    """Print mode, verdict and table; return True if all copies have the file's SHA-256."""
    modes = [event for event in events if event["event"] == "mode"]
    results = [event for event in events if event["event"] == "result"]
    for event in {event["mode"]: event for event in modes}.values():
        print(
            f"mode        {event['mode']}" + (f": {event['fallback']}" if event["fallback"] else "")
        )
    for what in ("build", "variant"):
        print(f"{what:12}{', '.join(sorted({event[what] for event in modes}))}")
    same: int = sum(event["sha256"] == sha256 for event in results)
    print(f"SHA-256     {sha256}\n            {same} of {len(results)} copies have it\n")
    first, what = (
        ("SMC-R", "SMC-R is better") if used_smc(events) else ("instead", "(TCP with TCP)")
    )
    print(f"{'':30}{first:>8}{'TCP':>8}           {what}")
    for name, of in values.items():
        for index, metric in enumerate(unmodified.WORKLOADS[name].metrics):
            took = {way: [value[index] for value in found] for way, found in of.items()}
            text = "    processor time" if index else title(name)
            unit, scale = UNITS.get(metric.unit, (metric.unit, 1))
            compare(text, unit, took, scale, larger=not metric.smaller_is_better)
    for way, text in WAYS.items():
        moved = [event for event in results if event["way"] == way]
        for what, line in (("seconds", f"file, {text}"), ("processor", "    processor time")):
            took = {
                transport: [each[what] for each in moved if each["transport"] == transport]
                for transport in NAMES
            }
            compare(line, "ms", took, 1000)
    print(
        f"\nMedians of the values and of the ratios of all rounds, and the range of the ratios.\n"
        f"{mib} MiB go from memory into the other process's memory, which exists already.\n"
        "Processor time: of both processes."
    )
    return same == len(results)


def compare(
    text: str, unit: str, took: dict[str, list[float]], scale: float, *, larger: bool = False
) -> None:
    """Print a line of the table: both values, and how many times better SMC-R is.

    Args:
      took: the values of both transports.
      scale: the values are multiplied by this number, and then have this unit.
      larger: True if a larger value is better.
    """

    each = [
        smc / tcp if larger else tcp / smc
        for smc, tcp in zip(took["smc"], took["tcp"], strict=True)
    ]
    smc, tcp = (median(took[transport]) for transport in NAMES)
    print(
        f"{text:30}{smc * scale:8.0f}{tcp * scale:8.0f} {unit:7}"
        f"{median(each):5.2f} times ({min(each):.2f} to {max(each):.2f})"
    )


class Others:
    """Measures the share of the processors that other programs take."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds of processor time since the machine started: in total, and taken by others."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        ticks, idle = os.sysconf("SC_CLK_TCK"), sum(fields[3:5])
        ours = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        used = sum(each.ru_utime + each.ru_stime for each in ours)
        return sum(fields) / ticks, (sum(fields) - idle) / ticks - used

    def share(self) -> float:
        """The share of all processors taken by others since this object was made."""
        there_was, taken = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, taken / there_was) if there_was else 0.0


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description="run programs, and move a file, over SMC-R and TCP"
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the file (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default 3)")
    arguments = parser.parse_args()
    others = Others()
    values: Values = {}
    mode = mode_of_a_connection()
    print_setting(mode["build"], mode["variant"])
    if mode["mode"] == "smc-r":
        values = run_programs(arguments.rounds)
        print_line(
            "",
            {
                name: f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                for name in values
                for ratios in [ratios_of(values, name)]
            },
        )
    else:
        print_tcp(mode)
    with tempfile.TemporaryDirectory(prefix="trio-smc-demo-") as directory:
        path = Path(directory) / "file"
        print(f"file        {arguments.mib} MiB, pseudo-random", flush=True)
        sha256 = make_file(path, arguments.mib)
        events: list[dict[str, Any]] = []
        with progress(arguments.mib * MIB) as show:
            for number in range(arguments.rounds):
                # Alternate the order, so that neither always finds the machine warmed up.
                for transport in sorted(NAMES, reverse=bool(number % 2)):
                    events += one_round(transport, path, show)
    all_copied, all_smc = report(values, events, sha256, arguments.mib), used_smc(events)
    if not all_smc:
        print("\nOn this machine SMC-R was not used, so the comparison is TCP with TCP.")
    else:
        print(f"\n{textwrap.fill(conclusion(values, events, others.share()), 90)}")
    return 0 if all_copied and all_smc else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failed, PeerFailed) as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit(130)
