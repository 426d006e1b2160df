"""Ratios of the rounds: pure functions from numbers to a table and to a file."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import trio

from benchmarks.workloads import Metric

# metric name -> transport -> one number per round
Numbers = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The numbers of one or several runs.

    base: the transport that ratios are relative to.
    about: how and where it was measured.
    """

    metrics: Sequence[Metric]
    runs: Sequence[Numbers]
    base: str
    about: Mapping[str, Any]

    def transports(self, metric: Metric) -> list[str]:
        """The transports with numbers, without the base."""
        return [name for name in self.runs[0][metric.name] if name != self.base]

    def values(self, metric: Metric, transport: str) -> list[float]:
        """All numbers of all runs."""
        return [value for numbers in self.runs for value in numbers[metric.name][transport]]

    def ratios(self, metric: Metric, transport: str) -> list[float]:
        """How many times better than the base: a median for each run, of one run each round."""
        each = [
            ratios(metric, numbers[metric.name][self.base], numbers[metric.name][transport])
            for numbers in self.runs
        ]
        return each[0] if len(each) == 1 else [median(run) for run in each]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A ratio of another comparison, and the range of its runs."""

    ratio: float
    least: float
    most: float


def circumstances(
    *, runs: int, rounds: int, seconds: float, pinned: bool, load: float
) -> dict[str, Any]:
    """How and where numbers were measured, for `Comparison`; called after the last run.

    load: the average number of runnable processes in the minute before the first run.  The one
      after the last run, "load_after", counts the benchmark itself.
    """
    return {
        "runs": runs,
        "rounds": rounds,
        "seconds": seconds,
        "pinned": pinned,
        "load_before": load,
        "load_after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "trio": trio.__version__,
    }


def ratios(metric: Metric, base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return for each round how many times better `other` was than `base` in the same round."""
    pairs = zip(base, other, strict=True)
    return [_times(b, o) if metric.smaller_is_better else _times(o, b) for b, o in pairs]


def _times(more: float, less: float) -> float:
    """How many times ``less`` goes into ``more``; 0 if ``less`` was too small to be measured."""
    if less:
        return more / less
    return math.inf if more else 1.0


def rows(comparison: Comparison, earlier: Mapping[str, Earlier]) -> list[list[str]]:
    """Return the table: one row per metric and transport other than the base.

    earlier: ratios of another run by "metric | transport", for the last column.  A star marks a row
      in which all new ratios are worse than all earlier ones.
    """
    below = worse(comparison, earlier)
    table = [["", "transport", comparison.base, "it", "ratio", "min - max", "before"]]
    for metric in comparison.metrics:
        for name in comparison.transports(metric):
            each = comparison.ratios(metric, name)
            key = f"{metric.name} | {name}"
            before = earlier.get(key)
            star = "*" if key in below else ""
            table.append(
                [
                    f"{metric.name} ({metric.unit})",
                    name,
                    short(median(comparison.values(metric, comparison.base))),
                    short(median(comparison.values(metric, name))),
                    f"{median(each):.2f}",
                    f"{min(each):.2f} - {max(each):.2f}",
                    f"{before.ratio:.2f}{star}" if before is not None else "",
                ]
            )
    return table


def worse(comparison: Comparison, earlier: Mapping[str, Earlier]) -> list[str]:
    """Return the rows whose best ratio is below the worst earlier one: "metric | transport"."""
    return [
        key
        for metric in comparison.metrics
        for name in comparison.transports(metric)
        if (key := f"{metric.name} | {name}") in earlier
        and max(comparison.ratios(metric, name)) < earlier[key].least
    ]


def text_of(table: Sequence[Sequence[str]], left: int = 2) -> str:
    """Return the table as aligned lines; the first ``left`` columns to the left."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def save(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write ratios and every round's numbers as JSON; the first comparison is the main one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    main, *others = [_content(comparison) for comparison in comparisons]
    other = {"pinned" if each["about"]["pinned"] else "not pinned": each for each in others}
    content = {**main, **other}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _content(comparison: Comparison) -> dict[str, Any]:
    each = {
        f"{metric.name} | {name}": comparison.ratios(metric, name)
        for metric in comparison.metrics
        for name in comparison.transports(metric)
    }
    return {
        "about": comparison.about,
        "ratios": {name: round(median(values), 3) for name, values in each.items()},
        "spread": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in each.items()
        },
        "runs": [
            {
                metric: {name: [_brief(each) for each in values] for name, values in row.items()}
                for metric, row in run.items()
            }
            for run in comparison.runs
        ],
    }


def _brief(value: float) -> float:
    """Round to five digits: two rounds never agree in more than two."""
    return float(f"{value:.5g}")


def load_ratios(path: Path) -> dict[str, Earlier]:
    """Return the ratios that `save` wrote; empty if there is no such file.

    Raises:
      OSError, ValueError: the file cannot be read, or `save` did not write it.
    """
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    found, spread = [
        saved.get(n) if isinstance(saved, dict) else None for n in ("ratios", "spread")
    ]
    if not isinstance(found, dict) or not all(isinstance(v, int | float) for v in found.values()):
        raise ValueError("it has no ratios")
    if not isinstance(spread, dict) or set(spread) != set(found):
        raise ValueError("it has no ranges")
    return {
        name: Earlier(ratio=ratio, least=spread[name][0], most=spread[name][1])
        for name, ratio in found.items()
    }


def short(value: float) -> str:
    """Format a number for the table."""
    thousand, ten = 1000, 10
    if value >= thousand:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= ten else f"{value:.3f}"
