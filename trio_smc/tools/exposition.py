"""Metrics of running processes in the text format of Prometheus, without another library.

The values come from the control sockets of processes, so they are untrusted: `tools.client` has
checked their types and ranges, label values are escaped, and each process gets a bounded number of
series.  Each series has the label ``pid``, so that a counter disappears with its process and never
falls.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from trio_smc import StackStatistics
from trio_smc._base.release import RELEASE
from trio_smc.tools.client import Snapshot
from trio_smc.tools.metric_help import GAUGES, HELP, PREFIX

__all__ = ["CONTENT_TYPE", "PARTS", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PARTS: Final = ("statistics", "connections", "link_groups", "rnics")
"""The parts of the control protocol that are needed."""
_BREAKDOWNS: Final = ("agreed", "fallbacks")
_MOST_SERIES: Final = 500
"""Series of one process in one metric.  Chosen: honest processes have some dozens."""
_LONGEST_LABEL: Final = 100
"""Characters of the value of a label.  Chosen."""

_Labels = tuple[tuple[str, str], ...]


class _Families:
    """The metrics so far: kind and series by name."""

    def __init__(self) -> None:
        self._series: dict[str, dict[_Labels, float]] = {}
        self._kinds: dict[str, str] = {}

    def declare(self, name: str, kind: str) -> None:
        """Let the metric appear even if it has no series."""
        self._series.setdefault(name, {})
        self._kinds[name] = kind

    def add(self, name: str, kind: str, value: float | None, **labels: object) -> None:
        """Add one series; None: the process does not report it."""
        self.declare(name, kind)
        if value is not None:
            key = tuple((label, _text(each)) for label, each in labels.items())
            self._series[name][key] = value

    def add_counts(self, name: str, kind: str, counts: Counter[_Labels], pid: int) -> None:
        """Add the series of one process, at most `_MOST_SERIES`."""
        self.declare(name, kind)
        for labels, value in sorted(counts.items())[:_MOST_SERIES]:
            self._series[name][("pid", str(pid)), *labels] = value

    def text(self) -> str:
        """The text format."""
        lines = []
        for name in sorted(self._series):
            kind = self._kinds[name]
            full = f"{PREFIX}{name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} {kind}"]
            for labels, value in self._series[name].items():
                pairs = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels)
                lines.append(f"{full}{{{pairs}}} {value!r}" if pairs else f"{full} {value!r}")
        return "\n".join(lines) + "\n"


def exposition(snapshots: Sequence[Snapshot], *, silent: int, failures: int | None = None) -> str:
    """The metrics of all stacks.

    Args:
      snapshots: with `PARTS`.
      silent: the number of processes that did not answer now.
      failures: the sum of these numbers since the exporter was started; None: no exporter.
    """
    families = _Families()
    families.add(
        "build_info", "gauge", 1, version=RELEASE, python=platform.python_version(), pid="exporter"
    )
    families.add("silent_processes", "gauge", silent)
    if failures is not None:
        families.add("scrape_failures", "counter", failures)
    by_pid: dict[int, list[Snapshot]] = {}
    for each in snapshots:
        by_pid.setdefault(each.pid, []).append(each)
    for name in ("stacks", "uptime_seconds", "connections_now", "links_now", "link_groups_now"):
        families.declare(name, "gauge")
    for name in _BREAKDOWNS:
        families.declare("connections_agreed" if name == "agreed" else name, "counter")
    for pid, stacks in by_pid.items():
        _add_process(families, pid, stacks)
    return families.text()


def _add_process(families: _Families, pid: int, stacks: Sequence[Snapshot]) -> None:
    version = stacks[0].release or "before 0.3.0"
    families.add("build_info", "gauge", 1, version=version, python=stacks[0].python or "", pid=pid)
    families.add("stacks", "gauge", len(stacks), pid=pid)
    uptimes = [each.uptime for each in stacks if each.uptime is not None]
    families.add("uptime_seconds", "gauge", max(uptimes, default=None), pid=pid)
    for each in fields(StackStatistics):
        if each.name not in _BREAKDOWNS:
            kind = "gauge" if each.name in GAUGES else "counter"
            known = [s.statistics[each.name] for s in stacks]
            value = None if None in known else sum(known)
            families.add(each.name, kind, value, pid=pid)
    counts: dict[tuple[str, str], Counter[_Labels]] = {}

    def count(name: str, kind: str, number: int | None, /, **labels: object) -> None:
        key = tuple((label, _text(each)) for label, each in labels.items())
        counts.setdefault((name, kind), Counter())[key] += number or 0

    for stack in stacks:
        _count(stack, count)
    for (name, kind), counted in counts.items():
        families.add_counts(name, kind, counted, pid)


def _count(stack: Snapshot, count: Any) -> None:
    statistics = stack.statistics
    for each in statistics["fallbacks"] or ():
        count("fallbacks", "counter", each["count"], origin=each["origin"], reason=each["reason"])
    for each in statistics["agreed"] or ():
        count("connections_agreed", "counter", each["count"], **_terms(each))
    for each in stack.connections:
        count("connections_now", "gauge", 1, mode=each["mode"])
    for group in stack.link_groups:
        count("link_groups_now", "gauge", 1, role=group["role"], kind=group["kind"])
        for link in group["links"] or ():
            count("links_now", "gauge", 1, rnic=link["rnic"], state=link["state"])
        for rmb in group["rmbs"] or ():
            used, elements = rmb["in_use"] or 0, rmb["elements"] or 0
            size = rmb["element_size"]
            count("rmb_elements", "gauge", used, bytes=size, state="in use")
            count("rmb_elements", "gauge", elements - used, bytes=size, state="free")
    for rnic in stack.rnics:
        labels = {"rnic": rnic["name"], "kind": rnic["kind"]}
        count("rnic_port_active", "gauge", int(bool(rnic["port_active"])), **labels)
        count("rnic_drained", "gauge", int(bool(rnic["drained"])), **labels)


def _terms(agreed: Mapping[str, Any]) -> dict[str, object]:
    route = {True: "direct", False: "gateway", None: ""}[agreed["direct"]]
    names = ("version", "release", "ueid")
    return {**{name: agreed[name] for name in names}, "route": route}


def _text(value: object) -> str:
    return "" if value is None else str(value)[:_LONGEST_LABEL]


def _escaped(text: str) -> str:
    """The value of a label: three characters have escapes; others are printable already."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
