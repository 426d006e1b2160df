"""The results of `python -m benchmarks --comparison`: a file for each kind of processor.

With ``--machine`` the command writes the file of this machine into ``benchmarks/comparison``;
`make performance` shows all files on docs/comparison.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import machines
from benchmarks.compared import COMPARED
from benchmarks.report import Comparison, short
from benchmarks.transports import BASE
from benchmarks.workloads import WORKLOADS, Metric

__all__ = ["DIRECTORY", "TRANSPORTS", "USED", "load", "save", "table"]

DIRECTORY: Final = Path(__file__).with_name("comparison")
TRANSPORTS: Final = {
    BASE: "TCP, Trio",
    "smc-r": "SMC-R, trio_smc",
    "unix": "Unix socket, Trio",
    "pipes": "two pipes, Trio",
    "asyncio": "TCP, asyncio",
    "asyncio-unix": "Unix socket, asyncio",
    "uvloop": "TCP, uvloop",
    "uvloop-unix": "Unix socket, uvloop",
    "multiprocessing": "`multiprocessing.connection`",
    "shared-memory": "`multiprocessing.shared_memory`",
    "grpc": "gRPC, asyncio",
    "ucx": "UCX, asyncio",
}
"""The rows of the table, in order."""
USED: Final = ("rtt", "requests-10", "stream-64k", "stream-1m", "short-1")
"""The workloads; those that a whole program notices."""
BUSY: Final = 0.5
"""Least load before the benchmark with which its numbers are called rough."""
_PACKAGES: Final = ("trio", "uvloop", "grpcio", "ucxx-cu12")
_COLUMNS: Final = {
    "64 B round trip, p50": "round trip of 64 B",
    "64 B requests, 10 connections": "requests, 10 connections",
    "streaming, 64 KiB writes": "64 KiB writes",
    "streaming, 1 MiB writes": "1 MiB writes",
    "processor time, 64 KiB writes": "processor time, 64 KiB writes",
    "connections with one request, 1 at a time": "connections with one request",
}
"""The metrics of the table, with the heads of their columns."""


def save(comparison: Comparison, directory: Path = DIRECTORY) -> Path:
    """Write the file of this machine; return its path."""
    machine = machines.this_machine()
    medians, ratios = {}, {}
    for metric in comparison.metrics:
        for name in [comparison.base, *comparison.transports(metric)]:
            key = f"{metric.name} | {name}"
            medians[key] = float(f"{median(comparison.values(metric, name)):.4g}")
            each = comparison.ratios(metric, name)
            ratios[key] = [round(value, 3) for value in (median(each), min(each), max(each))]
    content = {
        "machine": machine,
        "about": dict(comparison.about),
        "versions": _versions(),
        "medians": medians,
        "ratios": ratios,
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{machines.plain_name(machine['processor'])}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def load(directory: Path = DIRECTORY) -> list[dict[str, Any]]:
    """The contents of all files, ordered by their names."""
    return machines.load(directory)


def table(contents: Sequence[Mapping[str, Any]]) -> str:
    """A table for each machine, with a sentence about it."""
    return "\n".join(_of_machine(content) for content in contents)


def _of_machine(content: Mapping[str, Any]) -> str:
    metrics = {
        metric.name: metric
        for name in USED
        for metric in WORKLOADS[name].metrics
        if metric.name in _COLUMNS
    }
    lines = [
        _about(content),
        "",
        f"| | {' | '.join(_COLUMNS.values())} |",
        "|---" * (1 + len(_COLUMNS)) + "|",
    ]
    for name, title in TRANSPORTS.items():
        cells = [_cell(content, metrics[column], name) for column in _COLUMNS]
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(content: Mapping[str, Any], metric: Metric, name: str) -> str:
    key = f"{metric.name} | {name}"
    if key not in content["ratios"]:
        return ""
    if name == BASE:
        return f"{short(content['medians'][key])} {metric.unit}"
    middle, least, most = content["ratios"][key]
    return f"**{middle:.2f}** ({least:.2f}–{most:.2f})"


def _about(content: Mapping[str, Any]) -> str:
    machine, about = content["machine"], content["about"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    # The benchmark itself keeps one or two processes busy, so only the load before it counts.
    busy = (
        " Other programs used the processors, too: these numbers are rough."
        if about["load_before"] > BUSY
        else ""
    )
    placed = "pinned to a core each" if about["pinned"] else "not pinned to cores"
    return (
        f"{machine['processor']}, {machine['processors']} processors, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {versions}; {about['runs']} x {about['rounds']} interleaved "
        f"rounds of {about['seconds']} s, {placed}; load {about['load_before']} before and "
        f"{about['load_after']} after.{busy}"
    )


assert set(COMPARED) < set(TRANSPORTS)
