"""Chooses the contents of a machine's diagram, and writes it as DOT and Mermaid.

A diagram omits ignored events; the tables (``pages``) list them. To keep a diagram readable, the
edges between two states share one arrow, and internal edges are listed inside their state. An event
that leads from each state to the same target is drawn once, from a node ``any state``. An arrow and
its text have the colour of the target. All forms are text and depend on the table only, so that
they can be compared.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from trio_smc.states.engine import Edge, Table


ANY = "any state"
START = "start"
_WIDTH = 34  # characters of a line of actions
# At least as many colours as any machine has states, so that each target has its own.
_COLOURS = (
    "#1f5aa6", "#a6401f", "#2b7a3d", "#7a3d91", "#946200", "#0f7a7a", "#a61f5a", "#4d4d4d",
    "#5f7a00", "#2d2d8a", "#8a5a44",
)  # fmt: skip
_GROUND = "#ffffffb8"  # of the text of an arrow; arrows below it shine through
_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, slots=True)
class Label:
    """The text of edges with the same actions: ``event [guards]`` of each edge, lines of actions.

    ``[else]`` replaces the guards of an unguarded edge that follows guarded ones.
    """

    heads: tuple[str, ...]
    actions: tuple[str, ...]

    def __str__(self) -> str:
        return " / ".join(filter(None, (", ".join(self.heads), " ".join(self.actions))))


@dataclass(frozen=True, slots=True)
class Picture:
    """The nodes with the labels of their internal edges, and the arrows with their labels."""

    name: str
    initial: str
    final: frozenset[str]
    inside: dict[str, tuple[Label, ...]]  # every state
    arrows: dict[tuple[str, str], tuple[Label, ...]]


def picture(table: Table) -> Picture:
    """Choose the contents of the diagram of ``table``."""
    inside: dict[str, list[Label]] = {state: [] for state in table.states}
    arrows: dict[tuple[str, str], list[Label]] = {}
    everywhere = _everywhere(table)
    for event, target in everywhere.items():
        # If the actions differ from state to state, only the tables list them.
        done = {edge.actions for (_, e), row in table.edges.items() for edge in row
                if e == event and not edge.ignored}  # fmt: skip
        actions = _wrapped(done.pop()) if len(done) == 1 else ()
        arrows.setdefault((ANY, target), []).append(Label((event,), actions))
    for (state, event), row in table.edges.items():
        for edge in row:
            if edge.ignored or event in everywhere:
                continue
            where = inside[state] if edge.internal else arrows.setdefault((state, edge.target), [])
            where.append(_label(event, edge, edge is row[0]))
    return Picture(
        name=table.name,
        initial=table.initial,
        final=table.final,
        inside={state: _merged(labels) for state, labels in inside.items()},
        arrows={ends: _merged(labels) for ends, labels in arrows.items()},
    )


def _everywhere(table: Table) -> dict[str, str]:
    """Events that lead from each non-final state to the same target, under all guards."""
    found = {}
    alive = [state for state in table.states if state not in table.final]
    for event in table.events:
        targets = {
            None if edge.internal else edge.target
            for state in alive
            for edge in table.edges.get((state, event), ())
        }
        complete = all((state, event) in table.edges for state in alive)
        if complete and len(alive) > 3 and len(targets) == 1 and None not in targets:
            found[event] = str(targets.pop())
    return found


def _label(event: str, edge: Edge, first: bool) -> Label:
    names = " ".join(map(str, edge.guards)) or ("" if first else "else")
    guards = f" [{names}]" if names else ""
    return Label((event + guards,), _wrapped(edge.actions))


def _wrapped(actions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(textwrap.wrap(" ".join(actions), _WIDTH, break_long_words=False))


def _merged(labels: list[Label]) -> tuple[Label, ...]:
    """Join the events that have the same actions between the same states."""
    heads: dict[tuple[str, ...], tuple[str, ...]] = {}
    for label in labels:
        heads[label.actions] = heads.get(label.actions, ()) + label.heads
    return tuple(Label(group, actions) for actions, group in heads.items())


# --- DOT and SVG -----------------------------------------------------------------------------


def _dot_lines(labels: tuple[Label, ...]) -> str:
    """Labels as graphviz's HTML-like text, left-aligned, actions smaller."""
    out: list[str] = []
    for label in labels:
        out.extend(f'{escape(head)}<BR ALIGN="LEFT"/>' for head in label.heads)
        out.extend(
            f'<FONT POINT-SIZE="10" COLOR="gray40">{escape(line)}</FONT><BR ALIGN="LEFT"/>'
            for line in label.actions
        )
    return "".join(out)


def _boxed(*rows: str, ground: str = "transparent") -> str:
    """Rows of text with a margin, so that they touch neither an arrow nor a border."""
    cells = "".join(f'<TR><TD ALIGN="LEFT" BALIGN="LEFT">{row}</TD></TR>' for row in rows)
    return (
        f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="4" BGCOLOR="{ground}">'
        f"{cells}</TABLE>"
    )


def dot(table: Table) -> str:
    """The machine as a graph for graphviz."""
    drawn = picture(table)
    lines = [
        f'digraph "{drawn.name}" {{',
        '  graph [rankdir=TB, nodesep=0.35, ranksep=0.55, fontname="DejaVu Sans"];',
        '  node [shape=box, style="rounded,filled", fillcolor="#eef3fb", fontname="DejaVu Sans"];',
        '  edge [fontsize=11, fontname="DejaVu Sans", arrowsize=0.7];',
        f'  "{START}" [shape=point, width=0.15, label=""];',
    ]
    for state, labels in drawn.inside.items():
        body = f"<B>{escape(state)}</B>"
        if labels:
            body = _boxed(body, f'<FONT POINT-SIZE="11">{_dot_lines(labels)}</FONT>')
        last = ", peripheries=2" if state in drawn.final else ""
        lines.append(f'  "{state}" [label=<{body}>{last}];')
    if any(source == ANY for source, _ in drawn.arrows):
        lines.append(f'  "{ANY}" [style="rounded,dashed", label=<<I>{ANY}</I>>];')
    lines.append(f'  "{START}" -> "{drawn.initial}";')
    colours = dict(zip(table.states, _COLOURS, strict=False))
    lines += [
        f'  "{source}" -> "{target}" [color="{colours[target]}", fontcolor="{colours[target]}",'
        f" label=<{_boxed(_dot_lines(labels), ground=_GROUND)}>];"
        for (source, target), labels in drawn.arrows.items()
    ]
    return "\n".join([*lines, "}", ""])


def svg_content(table: Table) -> Counter[str]:
    """The required contents of the machine's SVG, each as often as it must be there.

    These are the titles of the machine, of its nodes and of its arrows ``a->b``, and the lines of
    text: the name of each node, and the lines of each label.
    """
    drawn = picture(table)
    labels = [label for group in (*drawn.inside.values(), *drawn.arrows.values())
              for label in group]  # fmt: skip
    named = {*drawn.inside, *(source for source, _ in drawn.arrows)}
    arrows = (f"{START}->{drawn.initial}", *(f"{a}->{b}" for a, b in drawn.arrows))
    titles = Counter((drawn.name, START, *named, *arrows))
    texts = Counter(line for label in labels for line in label.heads + label.actions)
    return titles + texts + Counter(named)


def raise_labels(svg: str) -> str:
    """Move the labels of arrows, with their ground, above all arrows: graphviz draws arrows across.

    Args:
      svg: a file written by graphviz.
    """
    root = ET.fromstring(svg)
    [graph] = root.findall(f"{_SVG}g")
    labels = ET.Element(f"{_SVG}g", {"class": "labels"})
    for arrow in graph.findall(f"{_SVG}g[@class='edge']"):
        for part in list(arrow):
            if part.tag == f"{_SVG}text" or part.get("fill-opacity"):
                arrow.remove(part)
                labels.append(part)
    graph.append(labels)
    ET.register_namespace("", _SVG.strip("{}"))
    return ET.tostring(root, encoding="unicode") + "\n"


def svg_shows(svg: str) -> Counter[str]:
    """The contents of a file written by graphviz, comparable with ``svg_content``.

    Positions and curves are omitted, because they depend on graphviz's version.
    """
    root = ET.fromstring(svg)
    elements = [each for tag in ("title", "text") for each in root.iter(_SVG + tag)]
    shown = (re.sub(r"\s+", " ", each.text or "").strip() for each in elements)
    return Counter(filter(None, shown))


# --- Mermaid ---------------------------------------------------------------------------------


def mermaid(table: Table) -> str:
    """The machine as a Mermaid state diagram."""
    drawn = picture(table)
    lines = ["stateDiagram-v2", "    direction TB", f"    [*] --> {drawn.initial}"]
    names = {ANY: ANY.replace(" ", "_")}
    if any(source == ANY for source, _ in drawn.arrows):
        lines.append(f'    state "{ANY}" as {names[ANY]}')
    for (source, target), labels in drawn.arrows.items():
        text = "<br/>".join(map(str, labels))
        lines.append(f"    {names.get(source, source)} --> {target} : {text}")
    for state, labels in drawn.inside.items():
        lines += [f"    {state} --> {state} : (stays) {label}" for label in labels]
    lines += [f"    {state} --> [*]" for state in table.states if state in drawn.final]
    return "\n".join([*lines, ""])
