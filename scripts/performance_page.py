"""Put the numbers of the baselines in benchmarks/ into docs/performance.md, as tables and plots.

    python -m scripts.performance_page            writes table and plot
    python -m scripts.performance_page --check    exits with 1 if the table is out of date

The text between ``<!-- programs -->`` or ``<!-- numbers -->`` and ``<!-- end -->`` is replaced:
from benchmarks/programs.json, and from benchmarks/baseline.json.  If a baseline was never
measured, its place stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import plot, unmodified
from benchmarks.__main__ import BASELINE, PROGRAMS_BASELINE
from benchmarks.report import Comparison, short
from benchmarks.transports import BASE
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"
_PLACE = r"(<!-- {} -->\n).*?(<!-- end -->)"


def comparisons(content: dict[str, Any], workloads: Mapping[str, Any]) -> list[Comparison]:
    """Load a file of `benchmarks.report.save`; the main comparison comes first."""
    known = {metric.name: metric for each in workloads.values() for metric in each.metrics}
    found = []
    for part in (content, content.get("not pinned"), content.get("pinned")):
        if part is None:
            continue
        runs = part.get("runs") or [part["rounds"]]
        metrics = [known[name] for name in runs[0] if name in known]
        found.append(Comparison(metrics=metrics, runs=runs, base=BASE, about=part["about"]))
    return found


_LEGEND = """\
For an echo the number is the median time of a request, one after the other; with several
connections it is the number of requests answered per second. With pauses there are at least a
hundred requests in each measurement. The JSON is a list of twenty items. In the last two lines each
connection carries one request of 64 bytes; in the very last one `trio-smc run` has learned that the
peer's connections are short, so they are TCP. All others are SMC-R or fail (`--require-smc`).
"processor" compares the processor time of both ends. "compiled" is a compiled build under the same
command, measured in the same rounds and compared with TCP as well.
"""


def how(comparison: Comparison) -> str:
    """Return a sentence about how it was measured."""
    about = comparison.about
    pinned = "a core for each process" if about["pinned"] else "processes not pinned"
    runs = f"{len(comparison.runs)} runs" if len(comparison.runs) > 1 else "one run"
    return (
        f"Python {about['python']}, Trio {about['trio']}, {pinned}; {runs} of {about['rounds']} "
        f"interleaved rounds, {about['seconds']} s for each measurement. "
        f"The machine's load before was {about['load_before']}."
    )


def section(comparison: Comparison) -> str:
    """The text with the table of one comparison of transports."""
    lines = [
        how(comparison),
        "",
        "| workload | transport | times better than TCP under Trio | range |",
        "|---|---|---|---|",
        *_rows(comparison),
        "",
    ]
    return "\n".join(lines)


def programs(comparison: Comparison) -> str:
    """The text with the table of the unmodified programs."""
    heads = [
        "program",
        BASE,
        f"`{unmodified.RUN}`",
        *("times better", "range", "processor", "range"),
    ]
    if _has_compiled(comparison):
        heads += ["compiled", "range"]
    lines = [
        how(comparison),
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *_programs(comparison),
        "",
        _LEGEND,
    ]
    return "\n".join(lines)


def _has_compiled(comparison: Comparison) -> bool:
    return unmodified.COMPILED in comparison.transports(comparison.metrics[0])


def _programs(comparison: Comparison) -> Iterator[str]:
    metrics = comparison.metrics
    for seen, used in zip(metrics[::2], metrics[1::2], strict=True):
        cells = [seen.name]
        both = [median(comparison.values(seen, name)) for name in (BASE, unmodified.RUN)]
        cells += [f"{short(value)} {seen.unit}" for value in both]
        columns = [(seen, unmodified.RUN), (used, unmodified.RUN)]
        if _has_compiled(comparison):
            columns.append((seen, unmodified.COMPILED))
        for metric, name in columns:
            each = comparison.ratios(metric, name)
            cells += [f"**{median(each):.2f}**", f"{min(each):.2f} to {max(each):.2f}"]
        yield f"| {' | '.join(cells)} |"


def _rows(comparison: Comparison) -> Iterator[str]:
    for metric in comparison.metrics:
        for name in comparison.transports(metric):
            each = comparison.ratios(metric, name)
            spread = f"{min(each):.2f} to {max(each):.2f}"
            yield f"| {metric.name} | {name} | {median(each):.2f} | {spread} |"


def page(text: str, place: str, picture: str, sections: list[str]) -> str:
    """Return the page with the numbers at one of its places renewed."""
    new = f"![times better than TCP](figures/{picture})\n\n" + "\n".join(sections)
    return re.sub(
        _PLACE.format(place), lambda found: f"{found[1]}\n{new}\n{found[2]}", text, flags=re.DOTALL
    )


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="put the measured numbers into the page")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(arguments).check
    text = new = PAGE.read_text(encoding="utf-8")
    drawings = []
    for place, numbers, workloads, described, draw, picture in (
        ("programs", PROGRAMS_BASELINE, unmodified.WORKLOADS, programs, plot.programs, "programs"),
        ("numbers", BASELINE, WORKLOADS, section, plot.ratios, "performance"),
    ):
        if numbers.exists():
            found = comparisons(json.loads(numbers.read_text(encoding="utf-8")), workloads)
            new = page(new, place, f"{picture}.svg", [described(each) for each in found])
            drawings.append(partial(draw, FIGURES / f"{picture}.svg", found))
    if check:
        if new != text:
            print(f"{PAGE.name} differs: run make performance", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    for draw_it in drawings:
        draw_it()
    return 0


if __name__ == "__main__":
    sys.exit(main())
