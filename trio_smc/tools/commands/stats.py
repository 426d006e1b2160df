"""`trio-smc stats`: show the counters of stacks."""

from __future__ import annotations

import argparse
import time
from typing import Any

from trio_smc import Agreed
from trio_smc.tools.client import SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    positive_count,
    positive_seconds,
    private_directory,
)
from trio_smc.tools.output import agreed, plain, print_json, print_line, show, size, table

NAME = "stats"
SUMMARY = "show counters: connections, fallbacks by reason and side, bytes, writes, failovers"
DESCRIPTION = """
Show the counters of this user's running processes, with one column for each stack.  Without
--interval the counters start at zero when the stack is opened; with --interval each column shows
the increase in the last interval.

  up                 the time since the stack was opened
  connections        SMC-R connections opened; below them by the version of SMC-R, for version 2
                     also by release, UEID and route
  open connections   SMC-R connections that are open now
  bytes              bytes over SMC-R
  tcp bytes          bytes over connections that stay on TCP, as the kernel counts them
  writes             RDMA writes posted
  cdcs               CDC messages (RFC 7609, A.4); stale: dropped because they were old
  coalesced          CDC messages not sent, because a later one included their contents
  window stalls      how often a sender found the peer's window closed
  unknown tokens     CDC messages dropped, because their alert token names no connection
  buffers allocated  receive buffers (RMB elements) assigned to connections; reused: those that an
                     earlier connection had used
  link groups        link groups opened
  failovers          how often a connection moved its sending to another link
  handshakes         handshakes started; failed: those that ended the TCP connection
  refused            connections closed because of require_smc
  fallbacks          connections that stay on TCP; below them by the side that decided and the
                     reason
"""
EPILOG = """
Examples:
  trio-smc stats
  trio-smc stats --pid 4242 --interval 1          until Ctrl-C
  trio-smc stats --interval 10 --count 1 --json   the increase in ten seconds

With --json and --interval the command prints one document for each interval.

Exit codes: 0; 1 if a process did not answer; 2 if no process uses trio_smc, or for bad input.
"""

_GAUGES = ("open_connections",)
_BREAKDOWNS = {
    "connections": ("agreed", Agreed._fields),
    "fallbacks": ("fallbacks", ("origin", "reason")),
}
"""Counters that are also shown in parts: the list with the parts, and the fields that identify a
part."""
_PARTS = tuple(part for part, _ in _BREAKDOWNS.values())


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_json(parser)
    parser.add_argument("--interval", type=positive_seconds, metavar="SECONDS",
                        help="show the increase in each interval of this length")  # fmt: skip
    parser.add_argument("--count", type=positive_count, metavar="N",
                        help="intervals to show; default: until Ctrl-C")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Query the stacks and print, once or at intervals."""
    silent = SilentProcesses()
    counted = _query(options, silent)
    if options.interval is None:
        _print(counted, options.json, "")
        return silent.exit_code
    rounds = 0
    while rounds != options.count:
        time.sleep(options.interval)
        before, counted = counted, _query(options, silent)
        if rounds and not options.json:
            print_line()
        added = {
            key: (snapshot, _difference(counters, before[key][1] if key in before else {}))
            for key, (snapshot, counters) in counted.items()
        }
        _print(added, options.json, time.strftime("%H:%M:%S"))
        rounds += 1
    return silent.exit_code


_Counters = dict[tuple[Any, ...], int | None]
"""Counters; None if the process does not report it.  The key of a counter is ``(name,)``.  The key
of a part also has the values of the fields in `_BREAKDOWNS`: ``("fallbacks", "local",
"no-rnic")``."""
_CountersByStack = dict[tuple[int, str], tuple[Snapshot, _Counters]]
"""By process number and peer ID of the stack."""


def _query(options: argparse.Namespace, silent: SilentProcesses) -> _CountersByStack:
    snapshots = take_snapshots(
        private_directory(options), ("statistics",), options.pid, silent=silent
    )
    return {(each.pid, each.stack): (each, _flatten(each.statistics)) for each in snapshots}


def _flatten(statistics: dict[str, Any]) -> _Counters:
    counters: _Counters = {
        (name,): n
        for name, n in statistics.items()
        if name not in _PARTS and (n is None or isinstance(n, int))
    }
    fallbacks = statistics["fallbacks"]
    counters["fallbacks",] = None if fallbacks is None else sum(f["count"] for f in fallbacks)
    for name, (part, names) in _BREAKDOWNS.items():
        for each in statistics[part] or ():
            counters[name, *(each[key] for key in names)] = each["count"]
    return counters


def _difference(now: _Counters, before: _Counters) -> _Counters:
    return {
        key: value if key[0] in _GAUGES or value is None else value - (before.get(key) or 0)
        for key, value in now.items()
    }


def _print(counted: _CountersByStack, as_json: bool, title: str) -> None:
    if as_json:
        print_json(
            [
                {
                    "pid": snapshot.pid,
                    "stack": snapshot.stack,
                    "release": snapshot.release,
                    "uptime": snapshot.uptime,
                    "counters": {key[0]: n for key, n in counters.items() if len(key) == 1},
                    **{
                        part: _breakdown(snapshot, counters, name)
                        for name, (part, _) in _BREAKDOWNS.items()
                    },
                }
                for snapshot, counters in counted.values()
            ]
        )
        return
    keys = list(dict.fromkeys(key for _, counters in counted.values() for key in counters))
    names = [key[0] for key in keys]
    keys.sort(key=lambda key: (names.index(key[0]), len(key)))
    columns = ["COUNTER", *(f">{name}" for name in _headings(counted))]
    rows: list[list[object]] = [
        ["up", *(_uptime_text(each.uptime) for each, _ in counted.values())]
    ]
    rows += [[_name(key), *(_value(key, *each) for each in counted.values())] for key in keys]
    show(table(columns, rows, title))


def _breakdown(snapshot: Snapshot, counters: _Counters, name: str) -> list[dict[str, Any]] | None:
    """The parts of one counter, in the same shape as in the control socket's answer."""
    part, names = _BREAKDOWNS[name]
    if snapshot.statistics[part] is None:
        return None
    found = [(key, n) for key, n in counters.items() if key[0] == name and len(key) > 1]
    return [{**dict(zip(names, key[1:], strict=True)), "count": n} for key, n in found]


def _name(key: tuple[Any, ...]) -> str:
    match key:
        case [name]:
            return str(name).replace("_", " ")
        case ["fallbacks", origin, reason]:
            return f"  {plain(origin)}: {plain(reason)}"
        case _:
            return f"  version {agreed(*key[1:])}"


def _headings(counted: _CountersByStack) -> list[str]:
    """The heading of each stack: the process, and the peer ID if the process has several stacks."""
    pids = [pid for pid, _ in counted]
    return [
        f"PID {pid}" if pids.count(pid) == 1 else f"PID {pid} {stack}" for pid, stack in counted
    ]


def _value(key: tuple[Any, ...], snapshot: Snapshot, counters: _Counters) -> str:
    is_unknown = len(key) > 1 and snapshot.statistics[_BREAKDOWNS[key[0]][0]] is None
    value = counters.get(key, None if is_unknown else 0)
    return size(value) if "bytes" in key[0] else plain(value)


def _uptime_text(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
