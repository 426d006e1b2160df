"""Show the results of all measured machines in README and on the pages of docs.

    python -m scripts.performance_page            writes tables and plots
    python -m scripts.performance_page --check    exits with 1 if a table is out of date

The text between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced, from the files in
``benchmarks/machines``, and for the comparison from those in ``benchmarks/comparison``:

========== ============================  =================================================
name       file                          text
========== ============================  =================================================
summary    README.md, when-it-helps.md   kinds of programs, ranges over programs and machines
demo       README.md                     the programs that the demo runs, ranges over machines
ranges     when-it-helps.md              each program, ranges over machines
programs   performance.md                each program, a column for each machine
transports performance.md                the plots of the transports, if there are numbers
machines   performance.md                the machines, and how they were measured
comparison comparison.md                 other ways between processes, a table for each machine
========== ============================  =================================================
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import comparison, machines, plot, unmodified
from benchmarks.workloads import WORKLOADS
from examples import demo

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "performance.md"
HELPS: Final = ROOT / "docs" / "when-it-helps.md"
COMPARISON: Final = ROOT / "docs" / "comparison.md"
FIGURES: Final = ROOT / "docs" / "figures"
_PLACE: Final = r"(<!-- {} -->\n).*?(<!-- end -->)"

# Keys of `unmodified.WORKLOADS`.  Each belongs to one kind.
SUMMARY: Final = {
    "sends and receives files, arrays or other large data": [
        "stream-4k", "stream-64k", "stream-1m", "file", "file-write", "file-hash", "proxy",
        "arrays",
    ],
    "makes small requests over open connections": ["echo", "echo-10", "anyio", "anyio-64k",
                                                   "answers", "pickles"],
    "makes a request now and then, 1 or 10 ms apart": ["echo-1ms", "echo-10ms"],
    "exchanges small messages with many processes or clients": ["chat", "queue"],
    "uses TLS": ["tls-echo", "tls-stream"],
    "speaks HTTP or WebSocket through a Python framework": [
        "json", "json-10", "json-50", "http2", "download", "upload", "websocket", "websocket-64k",
    ],
    "opens a connection for each request, and requires SMC-R": ["short"],
    "opens a connection for each request": ["short-learned"],
}  # fmt: skip


def _program_ratios(content: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = (
        content.get("programs", {}).get("not pinned", {}).get("ratios", {})
    )
    return found


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def summary(contents: Sequence[dict[str, Any]]) -> str:
    """The kinds of programs, with the ranges of their medians over all machines."""
    lines = [
        "| a program that | times as fast as over TCP | times less processor time |",
        "|---|---|---|",
    ]
    lines += [f"| {kind} | {_ranges(contents, names)} |" for kind, names in SUMMARY.items()]
    measured = "; ".join(machines.title(content["machine"]) for content in contents)
    lines += ["", f"Measured on: {measured}. A number above 1 means that SMC-R is better."]
    return "\n".join(lines) + "\n"


def promised(contents: Sequence[dict[str, Any]]) -> str:
    """The programs that the demo runs, with the ranges of their times or rates."""
    lines = ["| program | times as fast as over TCP |", "|---|---|"]
    lines += [
        f"| {demo.title(name)} | {_ranges(contents, [name]).partition(' | ')[0]} |"
        for name in demo.PROGRAMS
    ]
    return "\n".join(lines) + "\n"


def ranges(contents: Sequence[dict[str, Any]]) -> str:
    """Each program, with the range of its medians over all machines."""
    lines = [
        "| program | times as fast as over TCP | times less processor time |",
        "|---|---|---|",
    ]
    lines += [
        f"| {workload.metrics[0].name} | {_ranges(contents, [name])} |"
        for name, workload in unmodified.WORKLOADS.items()
    ]
    return "\n".join(lines) + "\n"


def _ranges(contents: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Two cells, for time or rate and for processor time; empty if there are no numbers."""
    cells = []
    for index in range(2):
        metrics = [unmodified.WORKLOADS[name].metrics[index].name for name in names]
        keys = [f"{metric} | {unmodified.RUN}" for metric in metrics]
        found = [
            ratios[key][0]
            for ratios in map(_program_ratios, contents)
            for key in keys
            if key in ratios
        ]
        cells.append(_range(found) if found else "")
    return " | ".join(cells)


def programs(contents: Sequence[dict[str, Any]]) -> str:
    """Each program: the median on each machine, with the range of the rounds or runs."""
    measured = [content for content in contents if _program_ratios(content)]
    heads = ["program"]
    for content in measured:
        name = machines.title(content["machine"])
        heads += [f"{name}: times as fast", "processor time"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for workload in unmodified.WORKLOADS.values():
        cells = [workload.metrics[0].name]
        for content in measured:
            ratios = _program_ratios(content)
            cells += [
                _cell(ratios, f"{metric.name} | {unmodified.RUN}") for metric in workload.metrics
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "![times better than TCP](figures/programs.svg)\n\n" + "\n".join(lines) + "\n"


def _cell(ratios: dict[str, list[float]], key: str) -> str:
    if key not in ratios:
        return ""
    middle, least, most = ratios[key]
    return f"**{middle:.2f}** ({least:.2f} to {most:.2f})"


def listed(contents: Sequence[dict[str, Any]]) -> str:
    """The machines."""
    heads = ("processor", "processors", "caches", "kernel", "Python", "software RNIC", "measured")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for content in contents:
        machine = content["machine"]
        caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
        lines.append(
            f"| {machine['processor']} | {machine['processors']} | {caches} | {machine['kernel']} "
            f"| {machine['python']} | {machine.get('variant', 'not recorded')} "
            f"| {'; '.join(_measured(content))} |"
        )
    return "\n".join(lines) + "\n"


def _measured(content: dict[str, Any]) -> Iterator[str]:
    for kind in ("programs", "transports"):
        for placed, part in content.get(kind, {}).items():
            about = part["about"]
            yield (
                f"{kind}, {placed}: {about['runs']} x {about['rounds']} rounds of "
                f"{about['seconds']} s, load before {about['load_before']}"
            )


_TRANSPORTS = """\
Among the transports, `smc-r` is trio_smc with default settings, `-strict` with
`Config(checkpoints="strict")`, `-nospin` with `Config(spin=0)`.

"""
_NO_TRANSPORTS = """\
No machine has a file with numbers of the transports of `make bench` yet. On a machine without other
work `make bench ARGS="--both --machine"` writes them. The
[comparison](comparison.md#measured-side-by-side) has Unix sockets, asyncio and uvloop.

"""


def transports(contents: Sequence[dict[str, Any]]) -> str:
    """The names of the transports, and the plots that `draw` makes, or how to measure them."""
    placed = {place for content in contents for place in content.get("transports", {})}
    return (_TRANSPORTS if placed else _NO_TRANSPORTS) + "".join(
        f"![transports, processes {place}](figures/{_picture(place)})\n" for place in sorted(placed)
    )


def _picture(placed: str) -> str:
    return f"transports-{placed.replace(' ', '-')}.svg"


def _with(text: str, place: str, new: str) -> str:
    pattern = _PLACE.format(place)
    return re.sub(pattern, lambda found: f"{found[1]}\n{new}\n{found[2]}", text, flags=re.DOTALL)


def draw(contents: Sequence[dict[str, Any]]) -> None:
    """Draw the two plots: programs and transports, with a bar for each machine."""
    of_programs = {
        machines.title(content["machine"]): {
            key.removesuffix(f" | {unmodified.RUN}"): values
            for key, values in _program_ratios(content).items()
            if key.endswith(f" | {unmodified.RUN}")
        }
        for content in contents
    }
    names = [workload.metrics[0].name for workload in unmodified.WORKLOADS.values()]
    plot.ranges(
        FIGURES / "programs.svg", "Unmodified programs under trio-smc run", names, of_programs
    )
    for placed in ("pinned", "not pinned"):
        bars: dict[str, dict[str, list[float]]] = {}
        for content in contents:
            ratios = content.get("transports", {}).get(placed, {}).get("ratios", {})
            for key, values in ratios.items():
                metric, _, transport = key.partition(" | ")
                label = f"{transport}, {machines.title(content['machine'])}"
                bars.setdefault(label, {})[metric] = values
        if bars:
            metrics = [each.name for one in WORKLOADS.values() for each in one.metrics]
            plot.ranges(
                FIGURES / _picture(placed), f"Transports, processes {placed}", metrics, bars
            )


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="show the results of the measured machines")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args(arguments).check
    contents = machines.load()
    texts = {
        "summary": summary(contents),
        "demo": promised(contents),
        "ranges": ranges(contents),
        "programs": programs(contents),
        "machines": listed(contents),
        "transports": transports(contents),
        "comparison": comparison.table(comparison.load()),
    }
    different = []
    for path in (README, PAGE, HELPS, COMPARISON):
        text = new = path.read_text(encoding="utf-8")
        for place, content in texts.items():
            new = _with(new, place, content)
        if new != text:
            different.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check:
        for name in different:
            print(f"{name} differs: run make performance", file=sys.stderr)
        return int(bool(different))
    draw(contents)
    return 0


if __name__ == "__main__":
    sys.exit(main())
