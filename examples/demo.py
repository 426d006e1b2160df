"""Compare SMC-R with plain TCP: round trips, a file moved from memory to memory, and the processor
time of each.

    make demo        or        python examples/demo.py [--mib N] [--rounds N]

A server process and a client process (demo_peer.py) do the work; this process only starts them,
shows progress and prints the table. Each round uses new processes, with SMC-R and TCP in turn. The
exit code is 0 only if the mode was smc-r every time and every copy had the file's SHA-256. If a
connection stays on TCP, the output says so at once, with the reason. If other programs kept the
processors busy, the output says so: the ratios then mean little.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

PEER = Path(__file__).with_name("demo_peer.py")
README = Path(__file__).resolve().parents[1] / "README.md"
MIB = 1024 * 1024
NAMES = {"smc": "SMC-R", "tcp": "TCP"}
WAYS = {"up": "client to server", "down": "server to client"}
# The rows of README's table that the demo measures, too, with the names of its own results.
PROMISES = {
    "round trips": "makes small requests over open connections",
    "files": "sends and receives files, arrays or other large data",
}
# From this ratio on, SMC-R is faster or slower; ratios in between differ from run to run.
CLEAR = 1.1
# If other programs take more than this share of all processors, the measurement is disturbed.
BUSY = 0.1
Show = Callable[[str, int], None]


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
def server(transport: str) -> Iterator[int]:
    """Run the server process; the value is its port. It ends when its input does."""
    command = [sys.executable, str(PEER), "serve", transport]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        events = next(lines_of(process), None)
        if events is None:
            raise PeerFailed("the server process did not start")
        yield events["port"]


def one_round(transport: str, path: Path, show: Show) -> list[dict[str, Any]]:
    """Move the file both ways once; return the events `mode`, `round trips` and `result`."""
    events: list[dict[str, Any]] = []
    name = NAMES[transport]
    with server(transport) as port:
        command = [sys.executable, str(PEER), "send", transport, str(port), str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as client:
            for event in lines_of(client):
                if event["event"] == "progress":
                    show(f"{name}, {WAYS[event['way']]}", event["bytes"])
                    continue
                events.append({**event, "transport": transport})
                if event["event"] == "mode" and event["mode"] != "smc-r":
                    name = "TCP instead of SMC-R"
                    print(f"NOT SMC-R   the bytes travel over TCP: {event['fallback']}", flush=True)
    return events


def promises(readme: Path = README) -> list[str]:
    """The promises of README's table for the demo's work; empty without a README."""
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError:
        return []
    found = []
    for name, row in PROMISES.items():
        match = re.search(rf"^\| {re.escape(row)} \| ([^|]+?) \|", text, re.MULTILINE)
        if match:
            found.append(f"{name} {match[1]}")
    return found


def conclusion(events: list[dict[str, Any]]) -> str:
    """One sentence about this machine."""
    faster, slower, same = [], [], []
    for name, kind in (("round trips", "round trips"), ("files", "result")):
        took = {
            transport: [
                event["seconds"]
                for event in events
                if (event["event"], event["transport"]) == (kind, transport)
            ]
            for transport in NAMES
        }
        ratio = median(took["tcp"]) / median(took["smc"])
        if ratio >= CLEAR:
            faster.append(f"{ratio:.1f}x as fast for {name}")
        elif ratio <= 1 / CLEAR:
            slower.append(f"slower for {name} ({ratio:.1f}x as fast)")
        else:
            same.append(f"no faster for {name}")
    return f"On this machine SMC-R is {', '.join(faster + same + slower)}."


@contextlib.contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show bars if there is a terminal and rich is installed, otherwise a line per transfer."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        with bars(total) as show:
            yield show
    else:
        yield lambda text, done: print(f"moved       {text}") if done >= total else None


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


def report(events: list[dict[str, Any]], sha256: str, mib: int) -> bool:
    """Print mode, verdict and table; return True if all copies have the file's SHA-256."""
    modes = [event for event in events if event["event"] == "mode"]
    results = [event for event in events if event["event"] == "result"]
    for event in {event["mode"]: event for event in modes}.values():
        print(
            f"mode        {event['mode']}" + (f": {event['fallback']}" if event["fallback"] else "")
        )
    print(f"build       {', '.join(sorted({event['build'] for event in modes}))}")
    same: int = sum(event["sha256"] == sha256 for event in results)
    print(f"SHA-256     {sha256}\n            {same} of {len(results)} copies have it\n")
    first, what = (
        ("SMC-R", "SMC-R is better") if used_smc(events) else ("instead", "(TCP with TCP)")
    )
    print(f"{'':30}{first:>8}{'TCP':>8}         {what}")
    trips = [event for event in events if event["event"] == "round trips"]
    compare("round trip of 64 bytes", "µs", trips, "seconds", 1e6)
    compare("    processor time", "µs", trips, "processor", 1e6)
    for way, text in WAYS.items():
        moved = [event for event in results if event["way"] == way]
        compare(f"file, {text}", "ms", moved, "seconds", 1e3)
        compare("    processor time", "ms", moved, "processor", 1e3)
    print(
        f"\nMedians of the rounds, and the range of their ratios. {mib} MiB go from memory into "
        "the other\nprocess's memory, which exists already. Processor time: of both processes."
    )
    return same == len(results)


def compare(text: str, unit: str, events: list[dict[str, Any]], what: str, factor: float) -> None:
    """Print a line of the table: both values, and how many times less SMC-R took."""
    took = {
        transport: [event[what] * factor for event in events if event["transport"] == transport]
        for transport in NAMES
    }
    each = [tcp / smc for smc, tcp in zip(took["smc"], took["tcp"], strict=True)]
    smc, tcp = (median(took[transport]) for transport in NAMES)
    print(
        f"{text:30}{smc:8.0f}{tcp:8.0f} {unit}"
        f"{tcp / smc:8.2f} times ({min(each):.2f} to {max(each):.2f})"
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
    parser = argparse.ArgumentParser(description="move a file over SMC-R and over TCP")
    parser.add_argument("--mib", type=int, default=256, help="size of the file (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trio-smc-demo-") as directory:
        path = Path(directory) / "file"
        if promised := promises():
            text = "; ".join(promised)
            print(f"README      times as fast as TCP for Trio programs on one host: {text}")
        print(f"file        {arguments.mib} MiB, pseudo-random", flush=True)
        sha256 = make_file(path, arguments.mib)
        events: list[dict[str, Any]] = []
        others = Others()
        with progress(arguments.mib * MIB) as show:
            for number in range(arguments.rounds):
                # Alternate the order, so that neither always finds the machine warmed up.
                for transport in sorted(NAMES, reverse=bool(number % 2)):
                    events += one_round(transport, path, show)
    all_copied, all_smc = report(events, sha256, arguments.mib), used_smc(events)
    if not all_smc:
        print("\nOn this machine SMC-R was not used, so the comparison is TCP with TCP.")
    elif (share := others.share()) > BUSY:
        print(
            f"\nThis machine was too busy to tell: other programs took {share:.0%} of its "
            "processors meanwhile.\nTry again when it has nothing else to do."
        )
    else:
        print(f"\n{conclusion(events)}")
    return 0 if all_copied and all_smc else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PeerFailed as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit(130)
