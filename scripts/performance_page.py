"""Puts the numbers of benchmarks/baseline.json into docs/performance.md, as a table and a plot.

    python -m scripts.performance_page            writes table and plot
    python -m scripts.performance_page --check    exits with 1 when the table would be another

What stands between the lines ``<!-- numbers -->`` and ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import plot
from benchmarks.report import Comparison
from benchmarks.transports import BASE
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "figures" / "performance.svg"
NUMBERS = ROOT / "benchmarks" / "baseline.json"
_PLACE = re.compile(r"(<!-- numbers -->\n).*?(<!-- end -->)", re.DOTALL)


def comparisons(content: dict[str, Any]) -> list[Comparison]:
    """What a file of `benchmarks.report.save` holds; the main one comes first."""
    known = {metric.name: metric for each in WORKLOADS.values() for metric in each.metrics}
    found = []
    for part in (content, content.get("not pinned")):
        if part is None:
            continue
        runs = part.get("runs") or [part["rounds"]]
        metrics = [known[name] for name in runs[0] if name in known]
        found.append(Comparison(metrics=metrics, runs=runs, base=BASE, about=part["about"]))
    return found


def section(comparison: Comparison) -> str:
    """The text with the table of one comparison."""
    about = comparison.about
    pinned = (
        "a core for each process" if about["pinned"] else "processes where the system puts them"
    )
    runs = f"{len(comparison.runs)} runs" if len(comparison.runs) > 1 else "one run"
    how = (
        f"Python {about['python']}, Trio {about['trio']}, {pinned}; {runs} of {about['rounds']} "
        f"interleaved rounds, {about['seconds']} s for each measurement. "
        f"The machine's load before was {about['load_before']}."
    )
    lines = [
        how,
        "",
        "| workload | transport | times better than TCP under Trio | range |",
        "|---|---|---|---|",
        *_rows(comparison),
        "",
    ]
    return "\n".join(lines)


def _rows(comparison: Comparison) -> Iterator[str]:
    for metric in comparison.metrics:
        for name in comparison.transports(metric):
            each = comparison.ratios(metric, name)
            spread = f"{min(each):.2f} to {max(each):.2f}"
            yield f"| {metric.name} | {name} | {median(each):.2f} | {spread} |"


def page(text: str, found: list[Comparison]) -> str:
    """The page with the numbers renewed."""
    numbers = "\n".join(section(comparison) for comparison in found)
    picture = "![times better than TCP](figures/performance.svg)"
    return _PLACE.sub(lambda match: f"{match[1]}\n{picture}\n\n{numbers}\n{match[2]}", text)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="put the measured numbers into the page")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(arguments).check
    found = comparisons(json.loads(NUMBERS.read_text(encoding="utf-8")))
    text = PAGE.read_text(encoding="utf-8")
    new = page(text, found)
    if check:
        if new != text:
            print(f"{PAGE.name} differs: run make performance", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    plot.ratios(PLOT, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
