"""Measure the pause of a stream at a failover: `python -m benchmarks.failover`.

One process sends without end, another receives; each has two RNICs and a core of its own.  Then the
link that carries the stream fails.  The pause is the longest time between two receives around the
failure, minus the median of all.

reported   the RNIC reports that the link failed: the queue pair fails, or its port goes down.
           Default timers.
silent     messages are lost without a report; only TEST LINK detects it (RFC 7609, 4.5.3).
           --interval sets `test_link_interval`.

The exit code is 1 if the stream broke or the link group did not recover both links.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import trio

import trio_smc
from trio_smc import Config, SmcStream, SoftRnic, Stack
from trio_smc.rnic.soft.faults import Fault, FaultPlan

HOST = "127.0.0.1"
CORES = {"server": 1, "client": 0}
REPORTED = ("link-down", "link-down-here", "completion-lost", "port-flap")
_PIECE = bytes(64 * 1024)
_SAMPLE = 20_000
_PATIENCE = 30.0
_USABLE = ("ACTIVE", "TESTING")


class Failed(Exception):
    """The benchmark cannot continue."""


class Endpoint:
    """One of the two processes: its end of the stream, and its commands."""

    def __init__(self, stack: Stack, rnics: tuple[SoftRnic, ...]) -> None:
        self._stack = stack
        self._rnics = rnics
        self._gaps: list[float] = []
        self._longest = 0.0

    async def send(self, stream: SmcStream) -> None:
        """The server's end."""
        with contextlib.suppress(trio.BrokenResourceError):  # the client reports the failure
            while True:
                await stream.send_all(_PIECE)

    async def receive(self, stream: SmcStream) -> None:
        """The client's end."""
        last = time.perf_counter()
        while await stream.receive_some(len(_PIECE)):
            now = time.perf_counter()
            gap, last = now - last, now
            self._longest = max(self._longest, gap)
            if len(self._gaps) < _SAMPLE:
                self._gaps.append(gap)
        raise Failed("the stream ended")

    async def answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        if do == "state":
            groups = self._stack.link_groups
            links = [link for group in groups for link in group.links]
            return {
                "kinds": [group.kind for group in groups],
                "ids": [link.user_id for link in links if link.state in _USABLE],
                "numbers": [link.number for link in links if link.state in _USABLE],
                "coming": any(link.state not in _USABLE for link in links),
            }
        if do == "mark":
            self._longest = 0.0
        elif do == "pause":
            return {"longest": self._longest, "median": statistics.median(self._gaps)}
        elif do == "strike":
            await self.strike(**arguments)
        return {}

    async def strike(self, kind: str) -> None:
        """Make the link fail that carries the stream."""
        rnic = max(self._rnics, key=self._users)
        assert isinstance(rnic.faults, FaultPlan)
        if kind == "port-flap":
            rnic.fail()
            await trio.sleep(0.05)
            rnic.restore()
        else:
            rnic.faults.inject(Fault(kind))

    def _users(self, rnic: SoftRnic) -> int:
        links = [link for group in self._stack.link_groups for link in group.links]
        return sum(link.connections for link in links if link.rnic is rnic)


async def run_endpoint(role: str, port: int, interval: float | None) -> None:
    """Run one process until its input ends."""
    rnics = tuple(SoftRnic(f"{role}-{number}", faults=FaultPlan(number)) for number in range(2))
    timers: dict[str, Any] = {} if interval is None else {
        "test_link_interval": interval, "test_link_timeout": interval / 2,
    }  # fmt: skip
    config = Config(rnics=rnics, require_smc=True, **timers)
    async with trio_smc.open_stack(config) as stack, trio.open_nursery() as nursery:
        one = Endpoint(stack, rnics)
        if role == "server":
            listeners = await nursery.start(partial(stack.serve, one.send, 0, host=HOST))
            write_event(port=listeners[0].socket.getsockname()[1])
        else:
            nursery.start_soon(one.receive, await stack.open_stream(HOST, port))
            write_event(port=0)
        buffered = b""
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            async for data in stdin:
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    write_event(**await one.answer(**json.loads(line)))
        os._exit(0)  # the stream is still busy, and its end is not part of the benchmark


def write_event(**event: Any) -> None:
    """Print one JSON object."""
    os.write(1, (json.dumps(event) + "\n").encode())


# --- the process that measures ---------------------------------------------------------------


class Process:
    """One of the two processes, as seen by the process that measures."""

    def __init__(self, role: str, directory: str, port: int, interval: float | None) -> None:
        command = [sys.executable, "-m", "benchmarks.failover", "--role", role]
        command += ["--port", str(port)]
        if interval is not None:
            command += ["--interval", str(interval)]
        self.role = role
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": directory},
        )  # fmt: skip
        with contextlib.suppress(OSError):  # fewer cores than that
            os.sched_setaffinity(self.process.pid, {CORES[role]})

    def line(self) -> Any:
        """Return the next line that the process prints, decoded."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise Failed(f"the {self.role}'s process ended")
        return json.loads(text)

    def call(self, do: str, **arguments: Any) -> Any:
        """Send a command and return its result."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self.line()


@contextlib.contextmanager
def processes(interval: float | None) -> Iterator[tuple[Process, Process]]:
    """Start both processes; the stream runs."""
    with tempfile.TemporaryDirectory(prefix="smc-") as directory, contextlib.ExitStack() as ends:
        port, both = 0, []
        for role in ("server", "client"):
            one = Process(role, directory, port, interval)
            ends.enter_context(one.process)
            ends.callback(one.process.kill)
            port = one.line()["port"]
            both.append(one)
        yield both[0], both[1]


def wait_until_whole(both: tuple[Process, Process], but: list[Any]) -> list[Any]:
    """Wait for a symmetric link group without the links in `but`; return its links."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        states = [one.call("state") for one in both]
        ids = [state["ids"] for state in states]
        if (
            all(state["kinds"] == ["symmetric"] and not state["coming"] for state in states)
            and states[0]["numbers"] == states[1]["numbers"]
            and all(now != old for now, old in zip(ids, but, strict=True))
        ):
            return ids
        time.sleep(0.02)
    raise Failed("the link group is not whole again")


def measure(kinds: tuple[str, ...], rounds: int, seed: int, interval: float | None) -> list[float]:
    """Return the pauses of `rounds` failures, in seconds."""
    rng = random.Random(seed)
    pauses = []
    with processes(interval) as both:
        links: list[Any] = wait_until_whole(both, [[], []])
        for _ in range(rounds):
            time.sleep(0.05 + 0.1 * rng.random())
            both[1].call("mark")
            rng.choice(both).call("strike", kind=rng.choice(kinds))
            links = wait_until_whole(both, links)
            reply = both[1].call("pause")
            pauses.append(reply["longest"] - reply["median"])
    return pauses


def report(name: str, pauses: list[float]) -> dict[str, Any]:
    """Print one line; return its values, in milliseconds."""
    ordered = sorted(pauses)
    numbers = {
        label: round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * part))], 1)
        for label, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
    }
    text = "".join(f"{label} {value:8.1f} ms   " for label, value in numbers.items())
    print(f"{name:<12}{len(pauses):5} failovers   {text}", flush=True)
    return numbers


def main() -> int:
    """Print p50, p99 and the longest of both kinds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover")
    parser.add_argument("--role", choices=tuple(CORES), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=200, help="reported failures (default 200)")
    parser.add_argument("--silent", type=int, default=30, help="silent failures (default 30)")
    parser.add_argument(
        "--interval", type=float, default=None, help="seconds between TEST LINKs (default 0.2)"
    )
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    if arguments.role is not None:
        trio.run(run_endpoint, arguments.role, arguments.port, arguments.interval)
        return 0
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    interval = 0.2 if arguments.interval is None else arguments.interval
    print(f"pauses of a stream that always has data; seed {seed}, TEST LINK every {interval} s")
    try:
        numbers = {
            "reported": report("reported", measure(REPORTED, arguments.rounds, seed, None)),
            "silent": report("silent", measure(("link-silent",), arguments.silent, seed, interval)),
        }
    except Failed as failure:
        print(failure)
        return 1
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"seed": seed, "interval": interval, **numbers}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
