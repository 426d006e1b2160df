"""The generated files of docs/states: what they must contain, writing and comparing them.

The text forms are compared exactly, and so are the RFC's figures, which have a layout of their own.
Any other SVG is laid out by graphviz, each version differently, so of it only the set of states,
arrows and lines of text is compared.
"""

from __future__ import annotations

import inspect
import subprocess
from typing import TYPE_CHECKING, Any

from trio_smc.states.chart import flatten
from trio_smc.states.connection import CONNECTION
from trio_smc.states.drawing.figures import FIGURES, figure_svg
from trio_smc.states.drawing.pages import index, page
from trio_smc.states.drawing.picture import dot, mermaid, svg_content, svg_shows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from statemachine import StateChart


class NoGraphviz(Exception):
    """The ``dot`` program, which lays out the SVG files, is not installed."""


def texts(machines: Mapping[str, type[StateChart[Any]]]) -> dict[str, str]:
    """File name to content of everything but the SVG files that graphviz draws."""
    tables = {name: (flatten(chart), _summary(chart)) for name, chart in machines.items()}
    figures = {name: figure.title for name, figure in FIGURES.items()}
    files = {"index.md": index(tables, figures)}
    for name, figure in FIGURES.items():
        files[f"{name}.svg"] = figure_svg(figure, CONNECTION)
    for name, (table, summary) in tables.items():
        files[f"{name}.dot"] = dot(table)
        files[f"{name}.mmd"] = mermaid(table)
        files[f"{name}.md"] = page(name, table, summary)
    return files


def write_texts(machines: Mapping[str, type[StateChart[Any]]], directory: Path) -> None:
    """Write index, tables, DOT and Mermaid into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in texts(machines).items():
        (directory / name).write_text(content, encoding="utf-8")


def write_svgs(machines: Mapping[str, type[StateChart[Any]]], directory: Path) -> None:
    """Write the SVG files; ``NoGraphviz`` when the program ``dot`` is missing.

    A file that already shows what it must is kept, so that another version of graphviz does
    not change every file.
    """
    for name, chart in machines.items():
        table = flatten(chart)
        path = directory / f"{name}.svg"
        if path.exists() and svg_shows(path.read_text(encoding="utf-8")) == svg_content(table):
            continue
        try:
            drawn = subprocess.run(["dot", "-Tsvg"], input=dot(table).encode(), check=True,
                                   stdout=subprocess.PIPE, timeout=60)  # fmt: skip
        except FileNotFoundError as missing:
            raise NoGraphviz from missing
        path.write_bytes(drawn.stdout)


def differences(machines: Mapping[str, type[StateChart[Any]]], directory: Path) -> list[str]:
    """One line for each file in ``directory`` that is missing, stale or not of any machine."""
    expected = texts(machines)
    found = []
    for name, content in expected.items():
        path = directory / name
        if not path.exists():
            found.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != content:
            found.append(f"{name}: differs from the declarations")
    for name, chart in machines.items():
        path = directory / f"{name}.svg"
        if not path.exists():
            found.append(f"{name}.svg: missing")
            continue
        wanted, shown = svg_content(flatten(chart)), svg_shows(path.read_text(encoding="utf-8"))
        if wanted != shown:
            lacks, extra = sorted(wanted - shown), sorted(shown - wanted)
            found.append(f"{name}.svg: lacks {lacks}, shows {extra} too much")
    known = {*expected, *(f"{name}.svg" for name in machines)}
    if directory.is_dir():
        here = sorted(path.name for path in directory.iterdir())
        found += [f"{name}: belongs to no machine" for name in here if name not in known]
    return found


def _summary(chart: type[StateChart[Any]]) -> str:
    """The first paragraph of the chart's docstring, in one line."""
    return " ".join(inspect.cleandoc(chart.__doc__ or "").split("\n\n")[0].split())
