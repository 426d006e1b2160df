"""`trio-smc stats`: what stacks have counted."""

from __future__ import annotations

import argparse
import time
from typing import Any

from trio_smc.tools.client import Snapshot, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    positive_count,
    positive_seconds,
    private_directory,
)
from trio_smc.tools.output import print_json, show, size, table

NAME = "stats"
SUMMARY = "show counters: connections, fallbacks by reason and side, bytes, writes, failovers"
DESCRIPTION = """
Show the counters of this user's running processes, one column for each stack, since the stack
was opened, or with --interval what was added in each interval.

  connections        SMC-R connections opened; open connections: those there are now
  fallbacks          connections that stay on TCP, by the side that decided it and the reason
  writes             RDMA writes posted; cdcs: CDC messages (RFC 7609, A.4)
  coalesced          CDC messages spared, because a later one carried the same news
  window stalls      how often a sender found the peer's window closed
  buffers reused     RMB elements given out that had served a connection before, of those
                     allocated
  handshakes failed  handshakes that ended the TCP connection; refused: closed by require_smc
"""
EPILOG = """
Examples:
  trio-smc stats
  trio-smc stats --pid 4242 --interval 1          until Ctrl-C
  trio-smc stats --interval 10 --count 1 --json   what happens in ten seconds

With --json and --interval each interval is a document of its own.

Exit codes: 0, or 2 when no process answers.
"""

_GAUGES = ("open_connections",)
_BY_REASON = "  "
"""What the name of a counter begins with that counts one reason of fallbacks only."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_json(parser)
    parser.add_argument("--interval", type=positive_seconds, metavar="SECONDS",
                        help="show what was added in each interval")  # fmt: skip
    parser.add_argument("--count", type=positive_count, metavar="N",
                        help="intervals to show; default: until Ctrl-C")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Ask, and print, once or in intervals."""
    counted = _ask(options)
    if options.interval is None:
        _print(counted, options.json, "")
        return 0
    rounds = 0
    while rounds != options.count:
        time.sleep(options.interval)
        before, counted = counted, _ask(options)
        if rounds and not options.json:
            print()
        added = {
            key: (snapshot, _difference(flat, before[key][1] if key in before else {}))
            for key, (snapshot, flat) in counted.items()
        }
        _print(added, options.json, time.strftime("%H:%M:%S"))
        rounds += 1
    return 0


_Counted = dict[tuple[int, str], tuple[Snapshot, dict[str, int]]]


def _ask(options: argparse.Namespace) -> _Counted:
    snapshots = take_snapshots(private_directory(options), ("statistics",), options.pid)
    return {(each.pid, each.stack): (each, _flat(each.statistics)) for each in snapshots}


def _flat(statistics: dict[str, Any]) -> dict[str, int]:
    """Counters by their names in words; fallbacks each with side and reason."""
    flat = {
        name.replace("_", " "): value
        for name, value in statistics.items()
        if name != "fallbacks" and isinstance(value, int)
    }
    flat["fallbacks"] = sum(each["count"] for each in statistics["fallbacks"])
    for each in statistics["fallbacks"]:
        flat[f"{_BY_REASON}{each['origin']}: {each['reason']}"] = each["count"]
    return flat


def _difference(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    gauges = [name.replace("_", " ") for name in _GAUGES]
    return {
        name: value if name in gauges else value - before.get(name, 0)
        for name, value in now.items()
    }


def _print(counted: _Counted, as_json: bool, title: str) -> None:
    if as_json:
        print_json(
            [
                {
                    "pid": snapshot.pid,
                    "stack": snapshot.stack,
                    "uptime": snapshot.uptime,
                    "counters": {
                        name.replace(" ", "_"): n
                        for name, n in flat.items()
                        if not name.startswith(_BY_REASON)
                    },
                    "fallbacks": _by_reason(flat),
                }
                for snapshot, flat in counted.values()
            ]
        )
        return
    # Fallbacks come last, and not every stack has the same.
    names = list(dict.fromkeys(name for _, flat in counted.values() for name in flat))
    columns = ["COUNTER", *(f">{name}" for name in _headings(counted))]
    rows: list[list[object]] = [["up", *(_time(each.uptime) for each, _ in counted.values())]]
    rows += [
        [name, *(_value(name, flat.get(name, 0)) for _, flat in counted.values())] for name in names
    ]
    show(table(columns, rows, title))


def _by_reason(flat: dict[str, int]) -> list[dict[str, Any]]:
    """Fallbacks as `StackStatistics.fallbacks` names them."""
    named = []
    for name, count in flat.items():
        if name.startswith(_BY_REASON):
            origin, _, reason = name.strip().partition(": ")
            named.append({"origin": origin, "reason": reason, "count": count})
    return named


def _headings(counted: _Counted) -> list[str]:
    """By process, and by peer ID where a process has several stacks."""
    pids = [pid for pid, _ in counted]
    return [
        f"PID {pid}" if pids.count(pid) == 1 else f"PID {pid} {stack}" for pid, stack in counted
    ]


def _value(name: str, value: int) -> str:
    return size(value) if name.startswith("bytes") else str(value)


def _time(seconds: float) -> str:
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
