"""`trio-smc stats`: show the counters of stacks."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any, Final

from trio_smc import Agreed, ProtocolError
from trio_smc._base.regular_file import read_regular_file
from trio_smc.capture.output_file import create
from trio_smc.control.protocol import MOST_SECONDS, SIZES
from trio_smc.tools.client import (
    SHAPES,
    Maybe,
    SilentProcesses,
    Snapshot,
    check_untrusted,
    take_snapshots,
)
from trio_smc.tools.commands import (
    add_json,
    add_process,
    add_users,
    directories,
    exclude,
    need,
    positive_count,
    positive_seconds,
    seconds_up_to,
)
from trio_smc.tools.exposition import PARTS, exposition
from trio_smc.tools.output import (
    NoResult,
    ToolError,
    agreed,
    error_text,
    plain,
    print_json,
    print_line,
    print_text,
    show,
    size,
    table,
)
from trio_smc.tools.settings import path_argument
from trio_smc.tools.tables import Table

NAME = "stats"
SUMMARY = "show counters: connections, fallbacks by reason and side, bytes, writes, failovers"
EMPTY: Final[list[Any]] = []
DESCRIPTION = """
Show the counters of this user's running processes, with one column for each stack.  Without
--interval the counters start at zero when the stack is opened; with --interval each column shows
the increase in the last interval.

  up                 the time since the stack was opened
  connections        SMC-R connections opened; below them by the version of SMC-R, for version 2
                     also by release, UEID and route; client and server connections: by the role
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
  trio-smc stats --save before.json               and after a while:
  trio-smc stats --since before.json --sum
  trio-smc stats --prometheus > trio_smc.prom.new && mv trio_smc.prom.new trio_smc.prom
  trio-smc stats --sizes 10                       histograms of the sizes of data

With --json and --interval the command prints one document for each interval.

Exit codes: 0; 1 if a process did not answer, but with --prometheus 0, because the metrics count
it; 2 if no process uses trio_smc, or for bad input.
"""

_size_seconds = seconds_up_to(MOST_SECONDS)
MOST_COLUMNS: Final = 4
"""Stacks that are columns by default; more are rows.  Chosen."""
SIZE_COLUMNS: Final = (">SIZE", ">SENT", ">RECEIVED")
_SUM: Final = "all"
_MAIN: Final = (
    "connections", "client_connections", "server_connections", "open_connections", "bytes_sent",
    "bytes_received", "tcp_bytes_sent", "tcp_bytes_received", "writes", "window_stalls",
    "failovers", "fallbacks",
)  # fmt: skip
"""The counters of --rows."""
_SAVED_VERSION: Final = 1
_MOST_SAVED: Final = 1 << 24
"""Bytes of a file of --save.  Chosen."""
_GAUGES = ("open_connections",)
_BREAKDOWNS = {
    "connections": ("agreed", Agreed._fields),
    "fallbacks": ("fallbacks", ("origin", "reason")),
}
"""Counters that are also shown in parts: the list with the parts, and the fields that identify a
part."""
_PARTS = tuple(part for part, _ in _BREAKDOWNS.values())
_SAVED_SHAPE: Final = {
    "pid": int,
    "stack": str,
    "counters": dict,
    **{part: Maybe(SHAPES["statistics"][part]) for part in _PARTS},
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    users = add_users(parser)
    json_ = add_json(parser)
    interval = parser.add_argument(
        "--interval", type=positive_seconds, metavar="SECONDS",
        help="show the increase in each interval of this length",
    )  # fmt: skip
    count = parser.add_argument(
        "--count", type=positive_count, metavar="N",
        help="intervals to show; default: until Ctrl-C",
    )  # fmt: skip
    layout = parser.add_mutually_exclusive_group()
    sum_ = layout.add_argument(
        "--sum", dest="layout", action="store_const", const="sum",
        help="only the sum over all stacks",
    )  # fmt: skip
    rows = layout.add_argument(
        "--rows", dest="layout", action="store_const", const="rows",
        help="stacks as rows, with the main counters, and their sum; default for "
        "more than four stacks",
    )  # fmt: skip
    prometheus = layout.add_argument(
        "--prometheus", dest="layout", action="store_const", const="prometheus",
        help="print the metrics of trio-smc exporter once, for the textfile "
        "collector of node_exporter",
    )  # fmt: skip
    save = parser.add_argument(
        "--save", type=path_argument, metavar="FILE",
        help="write the counters to a file for --since, with mode "
        "0600",
    )  # fmt: skip
    since = parser.add_argument(
        "--since", type=path_argument, metavar="FILE",
        help="show the increase since the counters in this file",
    )  # fmt: skip
    sizes = parser.add_argument(
        "--sizes", type=_size_seconds, metavar="SECONDS",
        help="count for so many seconds, at most 60, how large the pieces of data "
        "are that are sent and received",
    )  # fmt: skip
    need(parser, count, interval, why="it counts intervals")
    exclude(parser, since, interval, why="--since compares two moments")
    exclude(parser, save, interval, why="--save writes the counters of one moment")
    exclude(parser, rows, json_, why="JSON has all counters of each stack")
    others = (interval, save, since)
    exclude(parser, prometheus, json_, *others, why="it prints all metrics once, as text")
    exclude(
        parser, sizes, *others, sum_, rows, prometheus, why="it prints one sum over all processes"
    )
    exclude(parser, sizes, *users, why="only the user of a process may let it count sizes")


def run(options: argparse.Namespace) -> int:
    """Query the stacks and print, once or at intervals."""
    silent = SilentProcesses()
    if options.sizes is not None:
        return _show_sizes(options, silent)
    if options.layout == "prometheus":
        snapshots = take_snapshots(
            directories(options), PARTS, options.pid, required=False, silent=silent
        )
        print_text(exposition(snapshots, silent=len(silent.last)))
        return 0  # the metrics count the processes that did not answer
    saved = None if options.since is None else _load(options.since)
    counted = _query(options, silent)
    if options.save is not None:
        _save(options.save, counted)
    if options.interval is None:
        _print(counted if saved is None else _since(counted, saved), options, "")
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
        _print(added, options, time.strftime("%H:%M:%S"))
        rounds += 1
    return silent.exit_code


_Counters = dict[tuple[Any, ...], int | None]
"""Counters; None if the process does not report it.  The key of a counter is ``(name,)``.  The key
of a part also has the values of the fields in `_BREAKDOWNS`: ``("fallbacks", "local",
"no-rnic")``."""
_CountersByStack = dict[tuple[int, str], tuple[Snapshot, _Counters]]
"""By process number and peer ID of the stack."""


def _query(options: argparse.Namespace, silent: SilentProcesses) -> _CountersByStack:
    snapshots = take_snapshots(directories(options), ("statistics",), options.pid, silent=silent)
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


def _documents(counted: _CountersByStack) -> list[dict[str, Any]]:
    return [
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


def _print(counted: _CountersByStack, options: argparse.Namespace, title: str) -> None:
    if options.layout == "sum":
        counted = _summed(counted)
    if options.json:
        print_json(_documents(counted))
        return
    if options.layout == "rows" or (options.layout is None and len(counted) > MOST_COLUMNS):
        show(_as_rows(counted, title))
        return
    keys = list(dict.fromkeys(key for _, counters in counted.values() for key in counters))
    names = [key[0] for key in keys]
    keys.sort(key=lambda key: (names.index(key[0]), len(key)))
    columns = ["COUNTER", *(f">{name}" for name in _headings(counted))]
    rows: list[list[object]] = [
        ["up", *(_uptime_text(each.uptime) for each, _ in counted.values())]
    ]
    rows += [
        [counter_name(key), *(_value(key, *each) for each in counted.values())] for key in keys
    ]
    show(table(columns, rows, title))


def _as_rows(counted: _CountersByStack, title: str) -> Table:
    """A row for each stack, with the main counters, and one for their sum."""
    columns = ("PID", ">UP", *(f">{name.replace('_', ' ').upper()}" for name in _MAIN))
    everything = [*counted.values(), *_summed(counted).values()]
    rows = [
        [
            snapshot.pid or _SUM, _uptime_text(snapshot.uptime),
            *(_value((name,), snapshot, counters) for name in _MAIN),
        ]
        for snapshot, counters in everything
    ]  # fmt: skip
    return table(columns, rows, title)


def _summed(counted: _CountersByStack) -> _CountersByStack:
    """The sum over all stacks, as one stack without a number.  A sum is unknown if a stack of an
    older release does not have the counter."""
    total: _Counters = {}
    statistics: dict[str, Any] = {part: [] for part in _PARTS}
    for _, counters in counted.values():
        for key, value in counters.items():
            before = total.get(key, 0)
            total[key] = None if value is None or before is None else before + value
    uptimes = [each.uptime for each, _ in counted.values() if each.uptime is not None]
    whole = Snapshot(0, uptime=max(uptimes, default=None), statistics=statistics)
    return {(0, ""): (whole, total)}


# --- differences against a file ------------------------------------------------------------------


def _save(path: str, counted: _CountersByStack) -> None:
    try:
        with os.fdopen(create(path), "w", encoding="ascii") as file:
            json.dump({"version": _SAVED_VERSION, "stacks": _documents(counted)}, file)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error_text(error)}") from None


def _load(path: str) -> dict[tuple[int, str], _Counters]:
    """The counters in a file of ``--save``, which may be another user's work.

    Raises:
      ToolError: the file cannot be read, or is none of ``--save``.
    """
    stacks: Any
    try:
        saved = json.loads(read_regular_file(path, _MOST_SAVED))
        if not isinstance(saved, dict) or saved.get("version") != _SAVED_VERSION:
            raise ProtocolError("not a file of stats --save")
        stacks = saved.get("stacks")
        check_untrusted(stacks, [_SAVED_SHAPE], "stacks")
        found = {}
        for each in stacks:
            counters = each["counters"]
            if counters is None or each["pid"] is None:
                raise ProtocolError("a stack has no counters or no process")
            check_untrusted(list(counters.values()), [Maybe(int)], "counters")
            statistics = {**counters, **{part: each[part] for part in _PARTS}}
            found[each["pid"], each["stack"]] = _flatten(statistics)
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error_text(error)}") from None
    except (ProtocolError, RecursionError, ValueError) as error:
        raise ToolError(f"{path} is not a file of stats --save: {error}") from None
    return found


def _since(counted: _CountersByStack, saved: dict[tuple[int, str], _Counters]) -> _CountersByStack:
    """The increase since the saved counters.  A stack that is new has all of its counters."""
    return {
        key: (snapshot, _difference(counters, saved.get(key, {})))
        for key, (snapshot, counters) in counted.items()
    }


# --- sizes ---------------------------------------------------------------------------------------


def _show_sizes(options: argparse.Namespace, silent: SilentProcesses) -> int:
    snapshots = take_snapshots(
        directories(options), (SIZES,), options.pid, silent=silent, seconds=options.sizes,
        more={"seconds": options.sizes},
    )  # fmt: skip
    snapshots = [each for each in snapshots if each.sizes is not None]
    if not snapshots:
        raise NoResult("no process has counted sizes; other releases may not know --sizes")
    if options.json:
        print_json([{"pid": s.pid, "stack": s.stack, **(s.sizes or {})} for s in snapshots])
        return silent.exit_code
    totals: dict[int, list[int]] = {}
    for each in snapshots:
        histograms: dict[str, Any] = each.sizes or {}
        for place, name in enumerate(("sent", "received")):
            for one in histograms.get(name) or ():
                totals.setdefault(one["limit"] or 0, [0, 0])[place] += one["count"]
    rows = [[f"up to {size(limit)}", *totals[limit]] for limit in sorted(totals)]
    title = f"sizes in {options.sizes:g} seconds, {len(snapshots)} stacks"
    show(table(SIZE_COLUMNS, rows, title))
    return silent.exit_code


def _breakdown(snapshot: Snapshot, counters: _Counters, name: str) -> list[dict[str, Any]] | None:
    """The parts of one counter, in the same shape as in the control socket's answer."""
    part, names = _BREAKDOWNS[name]
    if snapshot.statistics[part] is None:
        return None
    found = [(key, n) for key, n in counters.items() if key[0] == name and len(key) > 1]
    return [{**dict(zip(names, key[1:], strict=True)), "count": n} for key, n in found]


def counter_name(key: tuple[Any, ...]) -> str:
    """The name of a counter in the tables, by its key in `_Counters`."""
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
    if pids == [0]:
        return [_SUM]
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
