"""Connections survive what their RNICs do not: faults on purpose, under traffic that is checked.

    python -m examples.chaos [--seed N] [--seconds S | --faults N] [--rnics 1-4]
                             [--connections N] [--log DIRECTORY] [--json]

Two processes with 2 software RNICs each keep 50 connections busy (chaos_load.py); whenever their
link group is whole, this process lets something go wrong on one side: queue pairs fail, noticed by
both or by one, ports go down and come back, messages, writes and completions are lost, messages
come late, wakeups come twice, a process stands still for a moment.  Each is shown as it happens,
and a table ends it.

One kind, "not-placed", is a message that counts as arrived and did not.  Nobody can repair that:
the one connection it belonged to must be reset (RFC 7609, 4.6.1), and no other.

The exit code is 1 when a byte was lost, doubled or out of order, or when a connection was reset
that should not be, or not reset that should be.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import trio

from examples.chaos_result import HARMLESS, KINDS, Policy, Result

__all__ = ["KINDS", "Chaos", "Policy", "Result"]

# Would last longer than the failover it shall disturb.
NOT_DURING = frozenset({"process-stop", "link-silent"})
# Time-outs are those of a busy machine: who gets no processor for a moment has not failed.
SETTINGS: dict[str, Any] = {
    "receive_buffer": 128 * 1024,
    "test_link_interval": 0.5,
    "test_link_timeout": 3.0,
    "llc_timeout": 5.0,
    "close_timeout": 30.0,
}
# Seconds until a group counts as not whole again, an armed fault as having met nobody, a process
# as hung, and a command as not obeyed.
WHOLE_WITHIN, MEETS_WITHIN, ENDS_WITHIN, OBEYS_WITHIN = 40.0, 1.0, 90.0, 60.0
# Seconds after which an operator would do something.
PATIENCE = 1.0
Show = Callable[[str], None]


class Side:
    """One of the two processes, from here."""

    def __init__(self, role: str, process: trio.Process) -> None:
        self.role = role
        self.process = process
        self.links: dict[str, Any] = {}
        # The links there were when a fault struck here: some of them will go.
        self.hit: list[int] = []
        self.port: int | None = None
        self.ready = False
        self.ended = False
        # Commands that it has obeyed.
        self.done: Counter[str] = Counter()
        self._telling = trio.Lock()

    async def tell(self, do: str, **arguments: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        command = json.dumps({"do": do, **arguments}) + "\n"
        with contextlib.suppress(trio.BrokenResourceError):
            async with self._telling:
                await self.process.stdin.send_all(command.encode())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What it says until it ends."""
        assert self.process.stdout is not None
        buffered = b""
        async for data in self.process.stdout:
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


class Chaos:
    """Runs the two processes and makes their lives hard."""

    def __init__(self, policy: Policy, show: Show) -> None:
        self.policy = policy
        self.result = Result(seed=policy.seed, rnics=policy.rnics, during=policy.during)
        self._show = show
        self._rng = random.Random(policy.seed)
        self._changed = trio.Event()
        self._struck = 0
        self._disturbing = False
        self._doubtful: dict[int, list[int]] = {}
        self._sides: list[Side] = []
        self._start = 0.0

    async def run(self) -> Result:
        """Do what the policy says."""
        self._start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for role in ("server", "client"):
                await self._open(role, nursery)
            server, client = self._sides
            if await self._until(lambda: server.ready and client.ready, OBEYS_WITHIN):
                await client.tell("connect", port=server.port)
                await self._make_trouble()
            else:
                self.result.problems.append("a process did not start")
            await self._finish()
            for side in self._sides:
                if side.process.poll() is None:
                    side.process.kill()
        self.judge()
        self.result.seconds = trio.current_time() - self._start
        return self.result

    # -- processes -----------------------------------------------------------------------

    async def _open(self, role: str, nursery: trio.Nursery) -> None:
        policy = self.policy
        settings = {
            "role": role, "seed": policy.seed, "rnics": policy.rnics, "scale": policy.scale,
            "connections": policy.connections, "settings": SETTINGS, "log": policy.log,
        }  # fmt: skip
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "examples.chaos_peer", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        side = Side(role, process)
        self._sides.append(side)
        nursery.start_soon(self._listen, side)

    async def _listen(self, side: Side) -> None:
        async for event in side.events():
            getattr(self, "_on_" + event.pop("event"))(side, **event)
            self._changed.set()
            while self._doubtful:
                number, tokens = self._doubtful.popitem()
                for each in self._sides:
                    await each.tell("recall", number=number, tokens=tokens)
        code = await side.process.wait()
        side.ended = True
        if code:
            self.result.problems.append(f"the {side.role}'s process ended with exit code {code}")
        self._changed.set()

    async def _finish(self) -> None:
        server, client = self._sides
        # The server does not know of a conversation before it has heard how it begins.
        for side in (client, server):
            await side.tell("stop")
            if not await self._until(partial(getattr, side, "ended"), ENDS_WITHIN):
                for each in self._sides:
                    await each.tell("moments")
                self.result.problems.append(f"the {side.role}'s process did not end")
                return

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        with trio.move_on_after(seconds):
            while not condition():
                self._changed = trio.Event()
                await self._changed.wait()
        return condition()

    # -- what they say -------------------------------------------------------------------

    def _on_ready(self, side: Side, port: int | None) -> None:
        side.port = port
        side.ready = True

    def _on_links(self, side: Side, **links: Any) -> None:
        side.links = links

    def _on_refused(self, side: Side, number: int, why: str) -> None:
        self.result.refused += 1

    def _on_fallback(self, side: Side, why: str) -> None:
        self.result.fallbacks += 1

    def _on_missed(self, side: Side, kind: str, why: str) -> None:
        self.result.missed += 1

    def _on_done(self, side: Side, what: str) -> None:
        side.done[what] += 1

    def _on_moments(self, side: Side, moments: list[str]) -> None:
        self._say(f"{side.role}: {'; '.join(moments)}")

    def _on_struck(
        self, side: Side, kind: str, rnic: str, links: dict[str, Any], number: int | None = None,
        must: bool = False,
    ) -> None:  # fmt: skip
        side.links = links
        if kind not in HARMLESS:
            self.result.during_failover += self._disturbing and not self._whole()
            side.hit = links["ids"]
        self._struck += 1
        self.result.faults[kind] += 1
        if kind == "not-placed" and number is not None:
            self.result.due[number] = must
        about = "" if number is None else f", connection {number}"
        self._say(f"fault {self._struck}: {kind} on {rnic}{about}")

    def _on_recalled(self, side: Side, number: int, told: list[tuple[float, str]]) -> None:
        if number in self.result.resets and number in self.result.due:
            return  # it is clear by now
        lines = self.result.recalled.setdefault(number, [])
        lines += [(when, f"{side.role}: {text}") for when, text in told]

    def _on_ended(
        self, side: Side, number: int, kind: str, how: str, bytes: int, pause: float, moment: str,
        tokens: list[int],
    ) -> None:  # fmt: skip
        result = self.result
        doubtful = result.due.get(number, False) if how == "done" else number not in result.due
        if doubtful and self.policy.rnics > 1:
            self._doubtful[number] = tokens  # or the other side has not told of the fault yet
        result.bytes += bytes
        if kind == "stream":
            result.longest_pause = max(result.longest_pause, pause)
        if side.role == "client" and how == "done":
            result.conversations[kind] += 1
        if how == "reset":
            result.resets.add(number)
            self._say(f"connection {number} ({kind}) was reset at the {side.role}: {moment}")
        elif how != "done":
            problem = f"connection {number} ({kind}) at the {side.role}: {how}; {moment}"
            result.problems.append(problem)
            self._say(problem)

    def _on_statistics(self, side: Side, bytes: int, failovers: int, connections: int) -> None:
        self.result.failovers += failovers

    def _say(self, text: str) -> None:
        self._show(f"{trio.current_time() - self._start:8.2f} s  {text}")

    # -- trouble -------------------------------------------------------------------------

    def _whole(self) -> bool:
        """Whether both see the same usable links, as good as it gets, and no fault is unnoticed."""
        a, b = (side.links for side in self._sides)
        if not a or not b:
            return False
        kind = "single" if self.policy.rnics == 1 else "symmetric"
        return bool(
            a["groups"] == b["groups"] == 1
            and a["kind"] == b["kind"] == kind
            and a["links"] == b["links"]
            and len(a["links"]) == self.policy.rnics
            and not a["coming"] and not b["coming"]
            and all(side.links["ids"] != side.hit for side in self._sides)
        )  # fmt: skip

    def _goes_on(self) -> bool:
        policy = self.policy
        if any(side.ended for side in self._sides):
            return False
        if policy.faults is not None and self.result.injected >= policy.faults:
            return False
        return policy.seconds is None or trio.current_time() - self._start < policy.seconds

    async def _make_trouble(self) -> None:
        kinds = list(self.policy.kinds)
        while self._goes_on():
            # Also after a fault that did no harm: one that came late may have done some.
            if not await self._until(self._whole, WHOLE_WITHIN):
                self.result.problems.append(f"the link group is not whole: {self._state()}")
                return
            links = len(self._sides[0].links["links"])
            [kind] = self._rng.choices(kinds, list(self.policy.kinds.values()))
            target = self._target()
            begun = trio.current_time()
            if not await self._strike(kind, target) or kind in HARMLESS:
                continue
            if self._is_to_be_disturbed():
                # With two links the other one must not fail too: only what comes in its place.
                await self._disturb(target if links < 3 else None)
            if await self._recovers(kind, target):
                self.result.recoveries.append(trio.current_time() - begun)
            else:
                self.result.problems.append(
                    f"after fault {self._struck} ({kind}) the group is not whole: {self._state()}"
                )
                return

    async def _recovers(self, kind: str, target: tuple[Side, int]) -> bool:
        """Wait until the group is whole again.

        A link that fails while it is being added is tried again only after a while (RFC 7609,
        C.8), or when an RNIC appears: that is done here.
        """
        silent = 2 * SETTINGS["test_link_interval"] + SETTINGS["llc_timeout"]
        if await self._until(self._whole, PATIENCE + silent * (kind == "link-silent")):
            return True
        side, rnic = target
        self.result.replaced += 1
        self._say(f"{side.role}-{rnic} is taken out and put back")
        return await self._obeyed(side, "replace", rnic=rnic) and await self._until(
            self._whole, WHOLE_WITHIN
        )

    async def _obeyed(self, side: Side, do: str, **arguments: Any) -> bool:
        """Tell a side to do something, and wait until it is done."""
        before = side.done[do]
        await side.tell(do, **arguments)
        return await self._until(lambda: side.done[do] > before or side.ended, OBEYS_WITHIN)

    def _target(self) -> tuple[Side, int]:
        return self._rng.choice(self._sides), self._rng.randrange(self.policy.rnics)

    async def _strike(self, kind: str, target: tuple[Side, int]) -> bool:
        """Let something go wrong; False when it met nothing."""
        side, rnic = target
        seconds = round(0.05 * self._rng.random(), 4)
        struck, missed = self._struck, self.result.missed
        if kind == "process-stop":
            await self._stop(side, 4 * seconds)
            return True
        # A process that is slow strikes late: never two faults at once but on purpose.
        await self._obeyed(side, "strike", kind=kind, rnic=rnic, seconds=seconds)
        if not await self._until(
            lambda: self._struck > struck or self.result.missed > missed, MEETS_WITHIN
        ):
            # It may still strike until this is done.
            await self._obeyed(side, "disarm")
            self.result.missed += self._struck == struck
        return self._struck > struck

    async def _stop(self, side: Side, seconds: float) -> None:
        """Stop a process for less than it takes its peer to give the links up."""
        self._on_struck(side, "process-stop", f"the {side.role}", side.links)
        side.process.send_signal(signal.SIGSTOP)
        try:
            await trio.sleep(seconds)
        finally:
            side.process.send_signal(signal.SIGCONT)

    def _is_to_be_disturbed(self) -> bool:
        """Whether fewer failures than one in `Policy.during` came during a failover so far."""
        during, result = self.policy.during, self.result
        return bool(during) and (result.during_failover + 1) * during <= result.injected + 1

    async def _disturb(self, target: tuple[Side, int] | None) -> None:
        """In the middle of the failover, which lasts some tens of milliseconds."""
        kinds = [kind for kind in self.policy.kinds if kind not in HARMLESS | NOT_DURING]
        before = self.result.during_failover
        self._disturbing = True
        while self.result.during_failover == before and not self._whole() and self._goes_on():
            await trio.sleep(0.01 * self._rng.random())
            # It meets nothing while no link is there, or nothing comes over it.
            await self._strike(self._rng.choice(kinds), target or self._target())
        self._disturbing = False

    def _state(self) -> str:
        return "; ".join(f"{side.role} {side.links}" for side in self._sides)

    # -- the end -------------------------------------------------------------------------

    def judge(self) -> None:
        """Add to the problems which connections were reset in vain, or should have been."""
        result = self.result
        if self.policy.rnics == 1:
            return  # with the link all of its connections are lost, as they should be
        for number in sorted(result.resets - set(result.due)):
            result.problems.append(f"connection {number} was reset, and nothing of it was lost")
        for number, must in sorted(result.due.items()):
            if must and number not in result.resets:
                result.problems.append(f"connection {number} went on, and a message of it was lost")


def _print(text: str) -> None:
    print(text, flush=True)


def _silent(_: str) -> None:
    pass


def _show_table(rows: list[tuple[str, str]]) -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    for name, text in rows:
        print(f"{name:<24}{text}")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.chaos", description="faults of RNICs under traffic"
    )
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--seconds", type=float, default=None, help="default 20 without --faults")
    parser.add_argument("--faults", type=int, default=None, help="stop after so many failures")
    parser.add_argument("--rnics", type=int, default=2, choices=range(1, 5), help="of each side")
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--log", metavar="DIRECTORY", help="where both processes write logs")
    parser.add_argument("--json", action="store_true", help="only the result, as JSON")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    seconds = arguments.seconds
    if seconds is None and arguments.faults is None:
        seconds = 20.0
    policy = Policy(
        seed=seed, seconds=seconds, faults=arguments.faults, rnics=arguments.rnics,
        connections=arguments.connections, log=arguments.log,
    )  # fmt: skip
    show: Show = _silent if arguments.json else _print
    show(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="smc-") as directory:
        SETTINGS["directory"] = directory
        result = trio.run(Chaos(policy, show).run)
    if arguments.json:
        print(json.dumps({**dict(result.rows()), "seed": seed, "problems": result.problems}))
    else:
        _show_table(result.rows())
        for line in result.recollections():
            print(line)
        for problem in result.problems:
            print(problem)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
