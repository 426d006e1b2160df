"""`trio-smc top`: the busiest connections, live."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from trio_smc.tools.client import Snapshot, take_snapshots
from trio_smc.tools.options import (
    add_process,
    positive_count,
    positive_seconds,
    private_directory,
)
from trio_smc.tools.output import console, least_width, show, size, table
from trio_smc.tools.words import address

NAME = "top"
SUMMARY = "watch the busiest connections, live"
DESCRIPTION = """
Watch stacks and their busiest SMC-R connections, refreshed every --interval seconds, until
Ctrl-C.  Rates are per second over the last interval.  When the output is not a terminal each
refresh is printed below the last one.

TCP connections are counted, not measured: their bytes are the kernel's affair.
"""
EPILOG = """
Examples:
  trio-smc top
  trio-smc top --interval 0.5 --lines 40
  trio-smc top --count 1 | cat

Exit codes: 0 (also after Ctrl-C), or 2 when no process answers.
"""

_PARTS = ("statistics", "connections")
# The last ones are left out where the terminal is narrow.
_HEADS = ("PID", "LOCAL", "PEER", ">SENT", ">RECEIVED", ">WRITES", ">STALLS", ">SEND-Q",
          ">RECV-Q", "STATE")  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    parser.add_argument("--interval", type=positive_seconds, default=2.0, metavar="SECONDS",
                        help="between two refreshes; default: 2")  # fmt: skip
    parser.add_argument("--lines", type=positive_count, default=20, metavar="N",
                        help="connections to show; default: 20")  # fmt: skip
    parser.add_argument("--count", type=positive_count, metavar="N",
                        help="refreshes; default: until Ctrl-C")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show one frame after the other."""
    screen = console()
    last = _Sample.take(options)
    frames = 0
    try:
        if not screen.is_terminal:
            while frames != options.count:
                time.sleep(options.interval)
                last, before = _Sample.take(options), last
                show(*last.since(before, options.lines), "")
                frames += 1
            return 0
        from rich.console import Group
        from rich.live import Live

        with Live(console=screen, screen=True, auto_refresh=False) as live:
            live.update(Group(*last.since(last, options.lines)), refresh=True)
            while frames != options.count:
                time.sleep(options.interval)
                last, before = _Sample.take(options), last
                live.update(Group(*last.since(before, options.lines)), refresh=True)
                frames += 1
    except KeyboardInterrupt:
        pass
    return 0


def _fitting(rows: list[list[object]]) -> Any:
    """The table without as many of its last columns as the terminal has no room for."""
    columns = len(_HEADS)
    while True:
        made = table(_HEADS[:columns], [row[:columns] for row in rows])
        if columns == 1 or least_width(made) <= console().width:
            return made
        columns -= 1


@dataclass(slots=True)
class _Sample:
    """What all stacks said at one time."""

    time: float
    stacks: list[Snapshot]

    @classmethod
    def take(cls, options: argparse.Namespace) -> _Sample:
        stacks = take_snapshots(private_directory(options), _PARTS, options.pid)
        return cls(time.monotonic(), stacks)

    def connections(self) -> dict[tuple[object, ...], tuple[int, dict[str, Any]]]:
        """SMC-R connections by what tells them apart."""
        return {
            (stack.pid, stack.stack, each["cursors"]["alert_token"]): (stack.pid, each)
            for stack in self.stacks
            for each in stack.connections
            if each["cursors"] is not None
        }

    def since(self, before: _Sample, lines: int) -> list[Any]:
        """The frame: totals, and connections by the bytes they moved."""
        seconds = max(self.time - before.time, 1e-9)
        old = before.connections()
        rows = []
        for key, (pid, each) in self.connections().items():
            past = old[key][1]["statistics"] if key in old else {}
            now = each["statistics"]
            sent, received, writes, stalls = (
                (now[name] - past.get(name, 0)) / seconds
                for name in ("bytes_sent", "bytes_received", "writes", "window_stalls")
            )
            rows.append((sent + received, [
                pid, address(each["local"]), address(each["peer"]),
                f"{size(sent)}/s", f"{size(received)}/s", f"{writes:.0f}/s", f"{stalls:.0f}/s",
                each["send_queue"], each["receive_queue"], each["state"],
            ]))  # fmt: skip
        rows.sort(key=lambda row: row[0], reverse=True)
        shown = [row for _, row in rows[:lines]]
        hidden = len(rows) - len(shown)
        more = [f"... and {hidden} more (--lines)"] if hidden else []
        return [self._totals(), "", _fitting(shown), *more]

    def _totals(self) -> str:
        smc = sum(each.statistics["open_connections"] for each in self.stacks)
        tcp = sum(c["mode"] == "tcp" for each in self.stacks for c in each.connections)
        fallen = sum(f["count"] for each in self.stacks for f in each.statistics["fallbacks"])
        failovers = sum(each.statistics["failovers"] for each in self.stacks)
        return (
            f"{time.strftime('%H:%M:%S')}  stacks: {len(self.stacks)}; connections: {smc} over "
            f"SMC-R, {tcp} over TCP; since the start: {fallen} fallbacks, {failovers} failovers"
        )
