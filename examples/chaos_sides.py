"""The two processes of `chaos.py` as seen by their controller: commands and events."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import trio

from examples.chaos_result import HARMLESS, Policy, Result

__all__ = ["SETTINGS", "Show", "Side", "Sides"]

# The machine may be busy: a process that is not scheduled for a moment has not failed.
SETTINGS: dict[str, Any] = {
    "receive_buffer": 128 * 1024,
    "test_link_interval": 0.5,
    "test_link_timeout": 3.0,
    "llc_timeout": 5.0,
    "close_timeout": 30.0,
}
# Seconds until a process counts as hung, and a command as lost.
ENDS_WITHIN, OBEYS_WITHIN = 90.0, 60.0
Show = Callable[[str], None]


class Side:
    """One of the two processes, as seen by the controller."""

    def __init__(self, role: str, process: trio.Process) -> None:
        self.role = role
        self.process = process
        self.links: dict[str, Any] = {}
        # Links that a fault has struck here: they will fail, even if they still look usable.
        self.hit: set[int] = set()
        self.port: int | None = None
        self.ready = False
        self.ended = False
        # Commands that this process has completed.
        self.done: Counter[str] = Counter()
        self._sending = trio.Lock()

    async def send_command(self, do: str, **arguments: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        command = json.dumps({"do": do, **arguments}) + "\n"
        with contextlib.suppress(trio.BrokenResourceError):
            async with self._sending:
                await self.process.stdin.send_all(command.encode())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of this process until it ends."""
        assert self.process.stdout is not None
        buffered = b""
        async for data in self.process.stdout:
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


class Sides:
    """Starts both processes, reads their events, and stores them in the result.

    Attributes:
      both: the server and the client, once they are started.
      struck: number of faults that have struck.
      disturbing: the next fault is meant for the middle of a failover.
    """

    def __init__(self, policy: Policy, result: Result, show: Show) -> None:
        self.both: list[Side] = []
        self.struck = 0
        self.disturbing = False
        self._policy = policy
        self._result = result
        self._show = show
        self._changed = trio.Event()
        self._doubtful: dict[int, list[int]] = {}
        self._start = 0.0

    # -- processes -----------------------------------------------------------------------

    async def open(self, nursery: trio.Nursery) -> bool:
        """Start both and let them connect; return False if one did not start."""
        self._start = trio.current_time()
        for role in ("server", "client"):
            await self._open(role, nursery)
        server, client = self.both
        if not await self.until(lambda: server.ready and client.ready, OBEYS_WITHIN):
            return False
        await client.send_command("connect", port=server.port)
        return True

    async def _open(self, role: str, nursery: trio.Nursery) -> None:
        policy = self._policy
        settings = {
            "role": role, "seed": policy.seed, "rnics": policy.rnics, "scale": policy.scale,
            "connections": policy.connections, "settings": SETTINGS, "log": policy.log,
        }  # fmt: skip
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "examples.chaos_peer", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        side = Side(role, process)
        self.both.append(side)
        nursery.start_soon(self._listen, side)

    async def _listen(self, side: Side) -> None:
        async for event in side.events():
            getattr(self, "on_" + event.pop("event"))(side, **event)
            self._changed.set()
            while self._doubtful:
                number, tokens = self._doubtful.popitem()
                for each in self.both:
                    await each.send_command("recall", number=number, tokens=tokens)
        code = await side.process.wait()
        side.ended = True
        if code:
            self._result.problems.append(f"the {side.role}'s process ended with exit code {code}")
        self._changed.set()

    async def finish(self) -> None:
        """Let both processes finish their conversations and end."""
        server, client = self.both
        # The server knows a conversation only after its header has arrived.
        for side in (client, server):
            await side.send_command("stop")
            if not await self.until(partial(getattr, side, "ended"), ENDS_WITHIN):
                for each in self.both:
                    await each.send_command("activities")
                self._result.problems.append(f"the {side.role}'s process did not end")
                return

    def kill(self) -> None:
        """Kill the processes that did not end."""
        for side in self.both:
            if side.process.poll() is None:
                side.process.kill()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until events make the condition true; return False after `seconds`."""
        with trio.move_on_after(seconds):
            while not condition():
                self._changed = trio.Event()
                await self._changed.wait()
        return condition()

    async def obeyed(self, side: Side, do: str, **arguments: Any) -> bool:
        """Send a command, and wait until it is completed."""
        before = side.done[do]
        await side.send_command(do, **arguments)
        return await self.until(lambda: side.done[do] > before or side.ended, OBEYS_WITHIN)

    # -- events --------------------------------------------------------------------------

    def on_ready(self, side: Side, port: int | None) -> None:
        side.port = port
        side.ready = True

    def on_links(self, side: Side, **links: Any) -> None:
        side.links = links
        side.hit &= set(links["ids"])

    def on_refused(self, side: Side, number: int, why: str) -> None:
        self._result.refused += 1

    def on_fallback(self, side: Side, why: str) -> None:
        self._result.fallbacks += 1

    def on_missed(self, side: Side, kind: str, why: str) -> None:
        self._result.missed += 1

    def on_done(self, side: Side, what: str) -> None:
        side.done[what] += 1

    def on_activities(self, side: Side, activities: list[str]) -> None:
        self.show_line(f"{side.role}: {'; '.join(activities)}")

    def on_struck(
        self, side: Side, kind: str, rnic: str, links: dict[str, Any],
        hit: Sequence[int] = (), number: int | None = None, must: bool = False,
    ) -> None:  # fmt: skip
        side.links = links
        if kind not in HARMLESS:
            self._result.during_failover += self.disturbing and not self.whole()
            side.hit = (side.hit | set(hit)) & set(links["ids"])
        self.struck += 1
        self._result.faults[kind] += 1
        if kind == "not-placed" and number is not None:
            self._result.due[number] = must
        about = "" if number is None else f", connection {number}"
        self.show_line(f"fault {self.struck}: {kind} on {rnic}{about}")

    def on_recalled(self, side: Side, number: int, records: list[tuple[float, str]]) -> None:
        if number in self._result.resets and number in self._result.due:
            return  # decided in the meantime
        lines = self._result.recalled.setdefault(number, [])
        lines += [(when, f"{side.role}: {text}") for when, text in records]

    def on_ended(
        self, side: Side, number: int, kind: str, how: str, bytes: int, pause: float, activity: str,
        tokens: list[int],
    ) -> None:  # fmt: skip
        result = self._result
        doubtful = result.due.get(number, False) if how == "done" else number not in result.due
        if doubtful and self._policy.rnics > 1:
            self._doubtful[number] = tokens  # or the other side has not reported the fault yet
        result.bytes += bytes
        if kind == "stream":
            result.longest_pause = max(result.longest_pause, pause)
        if side.role == "client" and how == "done":
            result.conversations[kind] += 1
        if how == "reset":
            result.resets.add(number)
            self.show_line(f"connection {number} ({kind}) was reset at the {side.role}: {activity}")
        elif how != "done":
            problem = f"connection {number} ({kind}) at the {side.role}: {how}; {activity}"
            result.problems.append(problem)
            self.show_line(problem)

    def on_statistics(self, side: Side, bytes: int, failovers: int, connections: int) -> None:
        self._result.failovers += failovers

    def elapsed(self) -> float:
        """Seconds since both were started."""
        return trio.current_time() - self._start

    def show_line(self, text: str) -> None:
        """Print a line."""
        self._show(f"{self.elapsed():8.2f} s  {text}")

    def whole(self) -> bool:
        """True if both see the same usable links, as many as possible, and no fault is pending."""
        a, b = (side.links for side in self.both)
        if not a or not b:
            return False
        kind = "single" if self._policy.rnics == 1 else "symmetric"
        return bool(
            a["groups"] == b["groups"] == 1
            and a["kind"] == b["kind"] == kind
            and a["links"] == b["links"]
            and len(a["links"]) == self._policy.rnics
            and not a["coming"] and not b["coming"]
            and not any(side.hit for side in self.both)
        )  # fmt: skip

    def state(self) -> str:
        """Return the links of both sides as text."""
        return "; ".join(f"{side.role} {side.links}" for side in self.both)
