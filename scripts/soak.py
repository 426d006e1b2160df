"""Run real processes under faults for hours, and check every byte: `make soak TIME=3600`.

    python -m scripts.soak [--time SECONDS] [--seed N]

Two things run at once.  `examples.chaos` runs two processes whose RNICs fail in every way.  And
four processes (`soak_process`) have conversations in plain, over TLS and over websockets:

server, client: run to the end.  RNICs of the client fail; no conversation between these two may
  break.
killed: has conversations with both, as client and as server, and is killed (SIGKILL) in the middle
  of them; another process takes its place.
stopped: the same, but is stopped (SIGSTOP) in the middle, half of the times for longer than the
  timers of its links, and continues (SIGCONT).

A conversation is complete, by SHA-256 on both sides, or it ends in an error after a prefix of the
data.  An error is allowed only if one of its processes was killed or stopped for long during it (or
an RNIC failed while a link group was new).  If one of them was killed, its end may also be an end
of the stream, as over TCP.  Problems are: a wrong byte, any other clean end in the middle, a
conversation that hangs, a process that ends by itself, a line on standard error, and anything left
at the end.

The memory (resident, with rings), descriptors, memfds, mappings of memfds and threads of the two
processes that run to the end are sampled all the time.  After the first quarter, the least-squares
line through each of them may rise by `LIMITS` until the end: the longer the run, the less per hour
(a run of less than `_JUDGED_FROM` seconds is not judged by this).  The exit code is 1 if there was
a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio
import trustme

from benchmarks import report
from examples import chaos_sides
from examples.chaos import Chaos, Policy
from examples.chaos_sides import Side

__all__ = ["LIMITS", "Soak", "line_through"]

LIMITS = {"memory": 24 << 20, "descriptors": 32, "memfds": 32, "mappings": 64, "threads": 3}
"""How much the line through each may rise in all, after the warm-up; memory in bytes."""
WARM_UP, _JUDGED_FROM = 0.25, 120.0
_SAMPLES = 500
# Only a failed link may be given up, however little processor time a process gets.
SETTINGS = chaos_sides.SETTINGS | {"test_link_timeout": 10.0, "llc_timeout": 10.0}
_LANES, _SCALE = 2, 25
_CHAOS_CONNECTIONS, _CHAOS_SCALE = 6, 25
_STARTS_WITHIN, _ENDS_WITHIN = 60.0, 120.0
_NOTICED_WITHIN = 10.0
"""Seconds after SIGCONT in which a peer may still find an older connection broken."""
_STOPPED_LONG = SETTINGS["test_link_interval"] * 2 + SETTINGS["test_link_timeout"] + 2.0
_STOPPED_SHORT = 0.4

Show = Callable[[str], None]


def line_through(samples: list[tuple[float, float]]) -> float:
    """Return the rise of the least-squares line from the first sample to the last."""
    if len(samples) < 3:
        return 0.0
    times = [when for when, _ in samples]
    slope, _ = statistics.linear_regression(times, [value for _, value in samples])
    return slope * (times[-1] - times[0])


def held_by(pid: int) -> dict[str, int]:
    """Return the resources of a process.  Raises OSError: the process has ended."""
    process = Path(f"/proc/{pid}")
    status = dict(re.findall(r"^(\w+):\s+(\d+)", (process / "status").read_text(), re.MULTILINE))
    targets = []
    for each in os.listdir(process / "fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(process / "fd" / each))
    return {
        "memory": (int(status["RssAnon"]) + int(status["RssShmem"])) << 10,
        "descriptors": len(targets),
        "memfds": sum(target.startswith("/memfd:") for target in targets),
        "mappings": (process / "maps").read_text().count("/memfd:"),
        "threads": int(status["Threads"]),
    }


class Watched(Side):
    """A `soak_process`, as seen by the controller.

    Attributes:
      id: unique among all processes, past ones too.
      errors: the file with its standard error.
      excused: the time until which its older connections may be found broken.
      killed: it was killed, so that its connections may end in the middle.
      begun: conversations reported by it or by another process.
      left: its report about its end.
    """

    def __init__(self, role: str, id: int, process: trio.Process, errors: Path) -> None:
        super().__init__(role, process)
        self.id = id
        self.errors = errors
        self.ports: dict[str, int] = {}
        self.excused = -1.0
        self.killed = False
        self.left: dict[str, int] | None = None


@dataclass(kw_only=True)
class Seen:
    """The results."""

    whole: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    whole_bytes: int = 0
    prefix_bytes: int = 0
    samples: dict[str, list[tuple[float, dict[str, int]]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Soak:
    """Runs the processes.

    Args:
      seconds: length of the run; on a slow machine it waits for the first kill and the first stop.
      show: called with each problem at once.

    Attributes:
      processes: by their number, past ones too.
    """

    def __init__(self, seconds: float, seed: int, show: Show) -> None:
        self.seen = Seen()
        self._seconds = seconds
        self._seed = seed
        self._show = show
        self._start = 0.0
        self.processes: dict[int, Watched] = {}
        self._ids = 0
        self._fault = -100.0
        self._changed = trio.Event()
        policy = Policy(
            seed=seed & 0xFFFF_FFFF, seconds=seconds, connections=_CHAOS_CONNECTIONS,
            scale=_CHAOS_SCALE,
        )  # fmt: skip
        self._chaos = Chaos(policy, lambda _: None)

    async def run(self) -> Seen:
        """Run everything and return the results."""
        with tempfile.TemporaryDirectory(prefix="smc-") as directory:
            self._directory = Path(directory)
            self._settings = SETTINGS | {"directory": directory}
            chaos_sides.SETTINGS["directory"] = directory
            authority = trustme.CA()
            authority.cert_pem.write_to_path(self._directory / "ca.pem")
            certificate = authority.issue_cert("localhost")
            certificate.private_key_and_cert_chain_pem.write_to_path(self._directory / "server.pem")
            self._start = trio.current_time()
            async with trio.open_nursery() as chaos, trio.open_nursery() as processes:
                await self._live(processes, chaos)
        self.judge()
        return self.seen

    def elapsed(self) -> float:
        """Seconds since the start."""
        return trio.current_time() - self._start

    async def _live(self, nursery: trio.Nursery, chaos: trio.Nursery) -> None:
        try:
            server = await self._open("server", nursery)
            client = await self._open("client", nursery, faults=3.0)
            await self._connect(client, server)
            self._start = trio.current_time()
            # Later than the processes: on a slow machine it could delay their start.
            chaos.start_soon(self._chaos.run)
            async with trio.open_nursery() as lives:
                lives.start_soon(self._sample, lives.cancel_scope)
                lives.start_soon(self._kill_again_and_again, nursery, [server, client])
                lives.start_soon(self._stop_again_and_again, nursery, [server, client])
            living = [each for each in self.processes.values() if not each.ended]
            for each in living:
                each.process.send_signal(signal.SIGCONT)
                await each.send_command("stop")
            # Stop none while another process may still begin a conversation with it.
            await self.wait_until(
                lambda: all(each.left is not None or each.ended for each in living), _ENDS_WITHIN
            )
            for each in living:
                await self._end(each)
        finally:
            for each in self.processes.values():
                if each.process.poll() is None:
                    each.process.kill()

    async def _ended(self, each: Watched) -> None:
        await self.wait_until(lambda: each.ended, _ENDS_WITHIN)

    async def _open(self, role: str, nursery: trio.Nursery, faults: float = 0.0) -> Watched:
        self._ids += 1
        number = self._ids  # another process may start meanwhile
        arguments = {
            "name": role, "id": number, "seed": self._seed & 0xFFFF_FFFF, "scale": _SCALE,
            "lanes": _LANES, "directory": str(self._directory), "settings": self._settings,
            "faults": faults,
        }  # fmt: skip
        errors = self._directory / f"{role}-{number}.errors"
        command = [sys.executable, "-W", "error", "-m", "scripts.soak_process"]
        with errors.open("wb") as file:
            process = await trio.lowlevel.open_process(
                [*command, json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        each = self.processes[number] = Watched(role, number, process, errors)
        nursery.start_soon(self._listen, each)
        if (
            not await self.wait_until(lambda: each.ready or each.ended, _STARTS_WITHIN)
            or each.ended
        ):
            raise RuntimeError(f"{role} did not start: {errors.read_text()}")
        return each

    async def _connect(self, one: Watched, other: Watched) -> None:
        await one.send_command("connect", other=other.id, ports=other.ports)

    async def _listen(self, each: Watched) -> None:
        async for event in each.events():
            getattr(self, "on_" + event.pop("event"))(each, **event)
            self.wake_all()
        code = await each.process.wait()
        each.ended = True
        if each.left is None and not each.killed:
            text = each.errors.read_text(errors="replace")
            self._problem(f"{each.role} {each.id} ended by itself, exit code {code}: {text}")
        self.wake_all()

    def wake_all(self) -> None:
        """Let all tasks in `wait_until` check their conditions; several may wait at once."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        with trio.move_on_after(seconds):
            while not condition():
                await self._changed.wait()
        return condition()

    # -- kills and stops -----------------------------------------------------------------

    async def _kill_again_and_again(self, nursery: trio.Nursery, others: list[Watched]) -> None:
        rng = random.Random(f"{self._seed} kill")
        while True:
            killed = await self._join("killed", nursery, others)
            await trio.sleep(0.2 + 3 * rng.random())
            killed.excused, killed.killed = float("inf"), True
            killed.process.kill()
            self.seen.counts["killed"] += 1
            await self._ended(killed)
            for each in others:
                await each.send_command("forget", other=killed.id)
            self.look_at_errors(killed)
            await trio.sleep(rng.random())

    async def _stop_again_and_again(self, nursery: trio.Nursery, others: list[Watched]) -> None:
        rng = random.Random(f"{self._seed} stop")
        stopped = await self._join("stopped", nursery, others)
        while True:
            await trio.sleep(1 + 10 * rng.random())
            long = rng.random() < 0.5
            if long:
                stopped.excused = float("inf")
            stopped.process.send_signal(signal.SIGSTOP)
            self.seen.counts["stopped for long" if long else "stopped for a moment"] += 1
            try:
                await trio.sleep(_STOPPED_LONG if long else _STOPPED_SHORT * rng.random())
            finally:
                stopped.process.send_signal(signal.SIGCONT)
            if long:
                stopped.excused = self.elapsed() + _NOTICED_WITHIN

    async def _join(self, role: str, nursery: trio.Nursery, others: list[Watched]) -> Watched:
        """Start a process that has conversations with all others, and wait for the first ones."""
        each = await self._open(role, nursery)
        for other in others:
            await self._connect(each, other)
        await self._connect(others[-1], each)
        before = sum(self.seen.whole.values())
        await self.wait_until(lambda: sum(self.seen.whole.values()) > before + 5, _STARTS_WITHIN)
        return each

    async def _sample(self, scope: trio.CancelScope) -> None:
        every = max(0.5, self._seconds / _SAMPLES)
        while self.elapsed() < self._seconds or not self._struck():
            chaos = [(f"chaos {side.role}", side) for side in self._chaos.sides.both]
            ours = [(each.role, each) for each in self.processes.values() if each.role != "killed"]
            for name, each in [*chaos, *ours]:
                self._look_at(name, each)
            await trio.sleep(every)
        scope.cancel()

    def _struck(self) -> bool:
        kinds = set(self.seen.counts)
        late = self.elapsed() > self._seconds + _STARTS_WITHIN
        return late or ("killed" in kinds and any(kind.startswith("stopped") for kind in kinds))

    def _look_at(self, name: str, each: Side) -> None:
        with contextlib.suppress(OSError, KeyError):  # the process is just ending
            sample = self.elapsed(), held_by(each.process.pid)
            self.seen.samples.setdefault(name, []).append(sample)

    async def _end(self, each: Watched) -> None:
        """Check what a process has left when its conversations have ended, and let it end."""
        problems = self.seen.problems
        if each.role == "killed":
            return  # the last one: it may have been killed
        if each.left is None or each.left["open_conversations"] or each.left["connections"]:
            problems.append(f"{each.role}: at the end there were left: {each.left}")
        self._look_at(each.role, each)
        assert each.process.stdin is not None
        await each.process.stdin.aclose()
        await self._ended(each)
        if each.process.returncode:
            problems.append(f"{each.role}: exit code {each.process.returncode}")
        self.look_at_errors(each)

    def look_at_errors(self, each: Watched) -> None:
        text = each.errors.read_text(errors="replace")
        if text:
            self._problem(f"{each.role} {each.id} wrote to standard error: {text}")
        each.errors.unlink()

    def _problem(self, text: str) -> None:
        self.seen.problems.append(text)
        self._show(f"{self.elapsed():9.2f} s  PROBLEM {text}")

    # -- events --------------------------------------------------------------------------

    def on_ready(self, each: Watched, ports: dict[str, int]) -> None:
        each.ports = ports
        each.ready = True

    def on_ended(
        self, each: Watched, other: int, transport: str, how: str, bytes: int, activity: str,
        seconds: float, log: list[str],
    ) -> None:  # fmt: skip
        seen = self.seen
        if how == "done":
            seen.whole[transport] += 1
            seen.whole_bytes += bytes
            return
        there = self.processes[other]
        began = self.elapsed() - seconds
        excused = max(each.excused, there.excused) > began
        both = {each.role, there.role}
        if how.startswith("ended early"):
            allowed = each.killed or there.killed
        else:
            allowed = how == "reset" and (excused or self._may_have_lost_links(both, began))
        if allowed:
            seen.cut[transport] += 1
            seen.prefix_bytes += bytes
            seen.counts[
                "cut by a kill or stop" if excused else "cut by an RNIC in a new group"
            ] += 1
            return
        fault = f"the last fault was {self.elapsed() - self._fault:.1f} s ago"
        lines = "\n  ".join([f"{activity}: {how}; {fault}", *log])
        self._problem(f"{each.role} with {there.role} {other}, {transport} {lines}")

    def _may_have_lost_links(self, roles: set[str], began: float) -> bool:
        """True if an RNIC of the client failed while a group with a new process had one link."""
        return "client" in roles and bool(roles & {"killed", "stopped"}) and self._fault > began

    def on_nameless(self, each: Watched, transport: str, why: str) -> None:
        self.seen.counts["cut before the first byte"] += 1
        if not any(
            role.excused > self.elapsed() - _ENDS_WITHIN for role in self.processes.values()
        ):
            self._problem(f"{each.role}, {transport}: cut before its first byte, {why}")

    def on_problem(self, each: Watched, what: str) -> None:
        self._problem(f"{each.role}: {what}")

    def on_refused(self, each: Watched, other: int, why: str) -> None:
        self.seen.counts["refused"] += 1

    def on_fallback(self, each: Watched, other: int, why: str) -> None:
        self.seen.counts["TCP instead"] += 1

    def on_fault(self, each: Watched, kind: str) -> None:
        self.seen.counts["faults of the client's RNICs"] += 1
        self._fault = self.elapsed()

    def on_rests(
        self, each: Watched, open_conversations: int, connections: int, received: int
    ) -> None:
        each.left = {"open_conversations": open_conversations, "connections": connections}

    # -- the end -------------------------------------------------------------------------

    def judge(self) -> None:
        seen = self.seen
        chaos = self._chaos.result
        seen.problems += [f"chaos: {problem}" for problem in chaos.problems]
        seen.notes += [f"chaos: {line}" for line in chaos.recollections()]
        for name, rises in self.rises().items():
            for what, rise in rises.items():
                if rise > LIMITS[what] and self._seconds >= _JUDGED_FROM:
                    seen.problems.append(f"{name}: {what} rose by {rise:.1f}")
        if not all(seen.whole[transport] for transport in ("plain", "tls", "websocket")):
            seen.problems.append(f"not each transport had whole conversations: {seen.whole}")
        if not (seen.counts["killed"] and seen.cut):
            seen.problems.append("nothing was killed in the middle of a transfer")

    def _warm(self, name: str) -> list[tuple[float, dict[str, int]]]:
        # The last sample is taken at rest.
        return [
            (when, held)
            for when, held in self.seen.samples[name]
            if self._seconds * WARM_UP <= when <= self._seconds
        ]

    def rises(self) -> dict[str, dict[str, float]]:
        """Return the rise of each line, for each process."""
        return {
            name: {
                what: line_through([(when, held[what]) for when, held in self._warm(name)])
                for what in LIMITS
            }
            for name in self.seen.samples
        }

    def tables(self) -> list[list[list[str]]]:
        """Return the tables that are printed at the end."""
        seen, chaos = self.seen, self._chaos.result
        counts = [
            *((name, f"{count:,}") for name, count in sorted(seen.counts.items())),
            *((f"whole conversations, {name}", f"{n:,}") for name, n in sorted(seen.whole.items())),
            *((f"conversations cut, {name}", f"{n:,}") for name, n in sorted(seen.cut.items())),
            ("bytes of whole ones, checked", f"{seen.whole_bytes:,}"),
            ("bytes before the cut, checked", f"{seen.prefix_bytes:,}"),
            *((f"chaos: {name}", text) for name, text in chaos.rows()),
            ("problems", str(len(seen.problems))),
        ]
        held = [["after the warm-up: mean, rise", *LIMITS]]
        for name, rises in self.rises().items():
            warm = [sample for _, sample in self._warm(name)]
            if warm:
                means = {what: statistics.fmean(each[what] for each in warm) for what in LIMITS}
                held.append([name, *(_mean_and_rise(what, means, rises) for what in LIMITS)])
        held.append(["allowed", *(_number(what, limit) for what, limit in LIMITS.items())])
        return [[["seen", ""], *map(list, counts)], held]


def _number(what: str, value: float) -> str:
    return f"{value / (1 << 20):.1f} MiB" if what == "memory" else f"{value:.1f}"


def _mean_and_rise(what: str, means: dict[str, float], rises: dict[str, float]) -> str:
    sign = "+" if rises[what] >= 0 else ""
    return f"{_number(what, means[what])} {sign}{_number(what, rises[what])}"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--time", type=float, default=60.0, help="seconds; default %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"soak: {arguments.time:.0f} s, seed {seed}", flush=True)
    began = time.monotonic()
    soak = Soak(arguments.time, seed, partial(print, flush=True))
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        seen = trio.run(soak.run)
    for table in soak.tables():
        print(report.text_of(table, left=1) + "\n")
    for line in (*seen.problems, *seen.notes):
        print(line)
    print(f"soak: {time.monotonic() - began:.0f} s, seed {seed}, {len(seen.problems)} problems")
    return 1 if seen.problems else 0


if __name__ == "__main__":
    sys.exit(main())
