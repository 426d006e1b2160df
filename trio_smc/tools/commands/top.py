"""`trio-smc top`: watch the busiest connections, live."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from trio_smc.tools.client import SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    add_users,
    directories,
    positive_count,
    positive_seconds,
)
from trio_smc.tools.output import (
    Screen,
    address,
    is_terminal,
    print_json,
    show,
    size,
    table,
    terminal_size,
)
from trio_smc.tools.tables import Marked, Table, wrap

NAME = "top"
SUMMARY = "watch the busiest connections, live"
EMPTY: Final[dict[str, Any]] = {
    "seconds": 0.0, "stacks": 0, "smc-r": 0, "tcp": 0, "fallbacks": 0, "failovers": 0,
    "connections": [],
}  # fmt: skip
DESCRIPTION = """
Show the busiest SMC-R connections of this user's processes, and refresh the table every --interval
seconds until Ctrl-C.  Rates are averages over the last interval.  If the output is not a terminal,
each table is printed below the last one.  With --json each refresh is one document.

Columns:
  WRITES  RDMA writes
  STALLS  how often a sender found the peer's window closed
The other columns are those of `trio-smc ss`.

The first line has the number of TCP connections, but the table does not list them.
`trio-smc stats` shows the sum of their bytes.
"""
EPILOG = """
Examples:
  trio-smc top
  trio-smc top --interval 0.5 --lines 40
  trio-smc top --count 1 --json    the rates of the next two seconds, for scripts

Exit codes: 0 (also after Ctrl-C); 1 if a process did not answer; 2 if no process uses trio_smc, or
for bad input.
"""

_PARTS = ("statistics", "connections")
_SHOWN = ("local", "peer", "state", "send_queue", "receive_queue")
_RATES = ("bytes_sent", "bytes_received", "writes", "window_stalls")
# The columns by importance: if the terminal is too narrow, the last ones are omitted.
_HEADS = ("PID", "LOCAL", "PEER", ">SENT", ">RECEIVED", ">WRITES", ">STALLS", ">SEND-Q",
          ">RECV-Q", "STATE")  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_users(parser)
    add_json(parser)
    parser.add_argument("--interval", type=positive_seconds, default=2.0, metavar="SECONDS",
                        help="seconds between two refreshes; default: 2")  # fmt: skip
    parser.add_argument("--lines", type=positive_count, default=20, metavar="N",
                        help="largest number of connections in the table; default: 20")  # fmt: skip
    parser.add_argument("--count", type=positive_count, metavar="N",
                        help="number of refreshes; default: until Ctrl-C")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show a frame (totals and table) every --interval seconds, --count times or until Ctrl-C."""
    live = not options.json and is_terminal()
    # A line on stderr would damage the screen.  So each frame names the processes that do not
    # answer, and the lines on stderr come at the end.
    silent = SilentProcesses(quiet=live)
    with contextlib.suppress(KeyboardInterrupt):
        if live:
            _live(options, silent)
        else:
            for last, before in _samples(options, silent):
                if options.json:
                    print_json(last.report(before, options.lines))
                else:
                    show(*last.since(before, options.lines), "")
    silent.report()
    return silent.exit_code


def _live(options: argparse.Namespace, silent: SilentProcesses) -> None:
    first = _Sample.take(options, silent)
    with Screen() as screen:
        screen.show(*_frame(first, first, options.lines, silent))
        for last, before in _samples(options, silent, first):
            screen.show(*_frame(last, before, options.lines, silent))


def _frame(last: _Sample, before: _Sample, lines: int, silent: SilentProcesses) -> list[Any]:
    """One frame for the screen."""
    names = [Marked(text, "error") for text in silent.last.values()]
    return [*names, *last.since(before, lines)]


def _samples(
    options: argparse.Namespace, silent: SilentProcesses, first: _Sample | None = None
) -> Iterator[tuple[_Sample, _Sample]]:
    """Yield each new sample together with the one before, --count times."""
    last = first or _Sample.take(options, silent)
    frames = 0
    while frames != options.count:
        time.sleep(options.interval)
        last, before = _Sample.take(options, silent), last
        yield last, before
        frames += 1


def _fitting_table(rows: list[list[object]]) -> list[Table | str]:
    """The table with as many columns as fit on the terminal, and a line that names the others."""
    columns = len(_HEADS)
    while True:
        made = table(_HEADS[:columns], [row[:columns] for row in rows])
        if columns == 1 or not is_terminal() or made.least_width <= terminal_size().columns:
            break
        columns -= 1
    hidden = [head.lstrip(">") for head in _HEADS[columns:]]
    if not hidden:
        return [made]
    needed = table(_HEADS, rows).least_width
    return [made, *_wrapped(f"hidden ({needed} columns needed): {', '.join(hidden)}")]


def _wrapped(text: str) -> list[str]:
    """The lines of a sentence that is wider than the terminal."""
    return wrap(text, terminal_size().columns) if is_terminal() else [text]


def _identity(connection: dict[str, Any]) -> tuple[object, ...]:
    """The alert token of a connection; if it is unknown, the addresses."""
    token = connection["cursors"]["alert_token"]
    if token is not None:
        return (token,)
    return address(connection["local"]), address(connection["peer"])


def _rate(now: int | None, past: int | None, seconds: float) -> float | None:
    return None if now is None else (now - (past or 0)) / seconds


def _per_second(rate: float | None) -> str:
    return f"{'-' if rate is None else format(rate, '.0f')}/s"


@dataclass(slots=True)
class _Sample:
    """The data of all stacks at one time."""

    time: float
    stacks: list[Snapshot]

    @classmethod
    def take(cls, options: argparse.Namespace, silent: SilentProcesses) -> _Sample:
        stacks = take_snapshots(directories(options), _PARTS, options.pid, silent=silent)
        return cls(time.monotonic(), stacks)

    def connections(self) -> dict[tuple[object, ...], tuple[int, dict[str, Any]]]:
        """The process and the data of each SMC-R connection, by process, stack and alert token."""
        return {
            (stack.pid, stack.stack, *_identity(each)): (stack.pid, each)
            for stack in self.stacks
            for each in stack.connections
            if each["cursors"] is not None
        }

    def rates(self, before: _Sample) -> list[dict[str, Any]]:
        """The connections with their rates per second since the sample ``before``, the busiest
        first."""
        seconds = max(self.time - before.time, 1e-9)
        old = before.connections()
        rates = []
        for key, (pid, each) in self.connections().items():
            past = (old[key][1]["statistics"] if key in old else None) or {}
            now = each["statistics"] or {}
            rates.append({
                "pid": pid,
                **{name: each[name] for name in _SHOWN},
                **{name: _rate(now.get(name), past.get(name), seconds) for name in _RATES},
            })  # fmt: skip
        rates.sort(
            key=lambda each: (each["bytes_sent"] or 0) + (each["bytes_received"] or 0), reverse=True
        )
        return rates

    def since(self, before: _Sample, lines: int) -> list[Any]:
        """The frame for people: a line of totals, and a table of the busiest connections."""
        rates = self.rates(before)
        rows: list[list[object]] = [
            [
                each["pid"], address(each["local"]), address(each["peer"]),
                f"{size(each['bytes_sent'])}/s", f"{size(each['bytes_received'])}/s",
                _per_second(each["writes"]), _per_second(each["window_stalls"]),
                each["send_queue"], each["receive_queue"], each["state"],
            ]
            for each in rates[:lines]
        ]  # fmt: skip
        hidden = len(rates) - len(rows)
        more = [f"... and {hidden} more (--lines)"] if hidden else []
        totals = self.totals()
        line = (
            f"{time.strftime('%H:%M:%S')}  stacks: {totals['stacks']}; connections: "
            f"{totals['smc-r']} over SMC-R, {totals['tcp']} over TCP; since the start: "
            f"fallbacks: {totals['fallbacks']}, failovers: {totals['failovers']}"
        )
        return [*_wrapped(line), "", *_fitting_table(rows), *more]

    def report(self, before: _Sample, lines: int) -> dict[str, Any]:
        """The frame for scripts.  Rates are per second, and sizes are in bytes."""
        return {
            "seconds": self.time - before.time,
            **self.totals(),
            "connections": self.rates(before)[:lines],
        }

    def totals(self) -> dict[str, int]:
        """Sums over all stacks: open connections; fallbacks and failovers since the opening."""
        return {
            "stacks": len(self.stacks),
            "smc-r": sum(each.statistics["open_connections"] or 0 for each in self.stacks),
            "tcp": sum(c["mode"] == "tcp" for each in self.stacks for c in each.connections),
            "fallbacks": sum(
                f["count"] for each in self.stacks for f in each.statistics["fallbacks"] or ()
            ),
            "failovers": sum(each.statistics["failovers"] or 0 for each in self.stacks),
        }
