"""Move a file of 256 MiB over SMC-R and over plain TCP, both ways, and compare.

    make demo        or        python examples/demo.py [--mib N] [--rounds N]

A server process and a client process (demo_peer.py) move the file; this process only starts them,
shows progress and adds up. Every round uses new processes, SMC-R and TCP in turn. The exit code is
0 only when the mode was smc-r every time and every copy had the file's SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

PEER = Path(__file__).with_name("demo_peer.py")
MIB = 1024 * 1024
NAMES = {"smc": "SMC-R", "tcp": "TCP"}
WAYS = {"up": "client to server", "down": "server to client"}
Show = Callable[[str, int], None]


class PeerFailed(Exception):
    """A server or client process ended with an error; it has said which."""


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
    """Yield what a peer says until it ends; PeerFailed when it ended with an error."""
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
        said = next(lines_of(process), None)
        if said is None:
            raise PeerFailed("the server process did not start")
        yield said["port"]


def one_round(transport: str, path: Path, show: Show) -> list[dict[str, Any]]:
    """Move the file both ways once; return the modes and results that the client said."""
    said: list[dict[str, Any]] = []
    with server(transport) as port:
        command = [sys.executable, str(PEER), "send", transport, str(port), str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ) as client:
            for event in lines_of(client):
                if event["event"] == "progress":
                    show(f"{NAMES[transport]}, {WAYS[event['way']]}", event["bytes"])
                else:
                    said.append({**event, "transport": transport})
    return said


@contextlib.contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show bars when there is a terminal and rich is installed, else a line per transfer."""
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
    # Few refreshes: this process shares two cores with those that are timed.
    with Progress(*columns, refresh_per_second=4, transient=True) as display:
        tasks = {}

        def show(text: str, done: int) -> None:
            if text not in tasks:
                tasks[text] = display.add_task(text, total=total)
            display.update(tasks[text], completed=done)

        yield show


def report(said: list[dict[str, Any]], sha256: str, mib: int) -> bool:
    """Print mode, verdict, throughput and ratio; return whether all is as it should be."""
    modes = [event for event in said if event["event"] == "mode"]
    results = [event for event in said if event["event"] == "result"]
    for event in {event["mode"]: event for event in modes}.values():
        print(
            f"mode        {event['mode']}" + (f": {event['fallback']}" if event["fallback"] else "")
        )
    same = sum(event["sha256"] == sha256 for event in results)
    print(f"SHA-256     {sha256}\n            {same} of {len(results)} copies have it")
    for way, text in WAYS.items():
        rates = {
            transport: sorted(
                mib / event["seconds"]
                for event in results
                if (event["transport"], event["way"]) == (transport, way)
            )
            for transport in NAMES
        }
        print(text)
        for transport, name in NAMES.items():
            low, middle, high = rates[transport][0], median(rates[transport]), rates[transport][-1]
            print(f"    {name:<8}{middle:6.0f} MiB/s   ({low:.0f} to {high:.0f})")
        print(f"    SMC-R/TCP {median(rates['smc']) / median(rates['tcp']):.2f}")
    print(
        "Throughput: median (and range) of the rounds, from memory to memory in the other process;"
    )
    print("hashing and disk are outside it for both.")
    return same == len(results) and all(event["mode"] == "smc-r" for event in modes)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="move a file over SMC-R and over TCP")
    parser.add_argument("--mib", type=int, default=256, help="size of the file (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way (default 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trio-smc-demo-") as directory:
        path = Path(directory) / "file"
        print(f"file        {arguments.mib} MiB, pseudo-random", flush=True)
        sha256 = make_file(path, arguments.mib)
        said: list[dict[str, Any]] = []
        with progress(arguments.mib * MIB) as show:
            for number in range(arguments.rounds):
                # In turn, so that neither always runs on a machine the other has warmed up.
                for transport in sorted(NAMES, reverse=bool(number % 2)):
                    said += one_round(transport, path, show)
    return 0 if report(said, sha256, arguments.mib) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PeerFailed as failure:
        sys.exit(str(failure))
