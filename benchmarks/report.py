"""Ratios of the rounds: pure functions from numbers to a table and to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.workloads import Metric

# metric name -> transport -> one number per round
Numbers = Mapping[str, Mapping[str, Sequence[float]]]


def ratios(metric: Metric, base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return for each round how many times better `other` was than `base` in the same round."""
    pairs = zip(base, other, strict=True)
    return [b / o if metric.smaller_is_better else o / b for b, o in pairs]


def rows(
    metrics: Sequence[Metric], numbers: Numbers, base: str, earlier: Mapping[str, float]
) -> list[list[str]]:
    """Return the table: one row per metric and transport other than `base`.

    earlier: ratios of another run by "metric | transport", for the last column.
    """
    table = [["", "transport", base, "it", "ratio", "min - max", "before"]]
    for metric in metrics:
        by_transport = numbers[metric.name]
        for name in by_transport:
            if name == base:
                continue
            each = ratios(metric, by_transport[base], by_transport[name])
            before = earlier.get(f"{metric.name} | {name}")
            table.append(
                [
                    f"{metric.name} ({metric.unit})",
                    name,
                    _short(median(by_transport[base])),
                    _short(median(by_transport[name])),
                    f"{median(each):.2f}",
                    f"{min(each):.2f} - {max(each):.2f}",
                    f"{before:.2f}" if before is not None else "",
                ]
            )
    return table


def text_of(table: Sequence[Sequence[str]]) -> str:
    """Return the table as aligned lines."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    left = 2
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def save(path: Path, metrics: Sequence[Metric], numbers: Numbers, base: str, about: Any) -> None:
    """Write ratios and every round's numbers as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    medians = {
        f"{metric.name} | {name}": round(median(ratios(metric, values[base], values[name])), 3)
        for metric in metrics
        for values in (numbers[metric.name],)
        for name in values
        if name != base
    }
    content = {"about": about, "ratios": medians, "rounds": numbers}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_ratios(path: Path) -> dict[str, float]:
    """Return the ratios that `save` wrote; empty when there is no such file."""
    if not path.exists():
        return {}
    found: dict[str, float] = json.loads(path.read_text())["ratios"]
    return found


def _short(value: float) -> str:
    thousand = 1000
    return f"{value:.1f}" if value < thousand else f"{value:,.0f}"
