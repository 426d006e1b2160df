"""Figures 22 and 23 of RFC 7609 as SVG, with the RFC's layout and the events of the engine's table.

Each figure is one table of coordinates of its boxes and arrows. An arrow stands for a paragraph of
4.8.1 or 4.8.2 between two states. Its events are those of the edges between these states that cite
the paragraph. An arrow without such an edge is an error, so a figure cannot differ from the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_smc.states.engine import Edge, Table

__all__ = [
    "FIGURES",
    "Arrow",
    "Box",
    "Figure",
    "figure_svg",
]


ANY = "any state"

Point = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """The box of a state, or of ``ANY``: upper left corner, size, and lines of text."""

    left: int
    top: int
    width: int
    height: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arrow:
    """One paragraph of the RFC between states.

    ``ends``: pairs of source and target states; ``path``: its corners, the tip last; ``at``: the
    start of its text; ``left``: the text ends there instead. ``dashed``: the RFC has this path in
    the text, but not in the drawing.
    """

    paragraph: str
    ends: tuple[tuple[str, str], ...]
    path: tuple[Point, ...]
    at: Point
    left: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: size, boxes by state, arrows, and texts outside of boxes."""

    title: str
    section: str
    width: int
    height: int
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...]
    words: tuple[tuple[int, int, str], ...]


_CLOSED = ("CLOSED", "(INIT until 2)")
_NORMAL = Figure(
    title="Figure 22: SMC-R connection states",
    section="4.8.1",
    width=1000,
    height=640,
    boxes={
        "CLOSED": Box(390, 50, 220, 60, _CLOSED),
        "APPFINCLOSEWAIT": Box(60, 200, 190, 60, ("AppFinCloseWait",)),
        "ACTIVE": Box(390, 200, 220, 60, ("ACTIVE",)),
        "PEERFINCLOSEWAIT": Box(750, 200, 190, 60, ("PeerFinCloseWait",)),
        "PEERCLOSEWAIT1": Box(270, 370, 180, 60, ("PeerCloseWait1",)),
        "APPCLOSEWAIT1": Box(550, 370, 180, 60, ("AppCloseWait1",)),
        "PEERCLOSEWAIT2": Box(270, 530, 180, 60, ("PeerCloseWait2",)),
        "APPCLOSEWAIT2": Box(550, 530, 180, 60, ("AppCloseWait2",)),
    },
    arrows=(
        Arrow("2", (("INIT", "ACTIVE"),), ((500, 110), (500, 200)), (510, 150)),
        Arrow("3A", (("ACTIVE", "PEERCLOSEWAIT1"),), ((430, 260), (430, 370)), (420, 300), True),
        Arrow("4A", (("ACTIVE", "APPCLOSEWAIT1"),), ((570, 260), (570, 370)), (580, 300)),
        Arrow("3B", (("PEERCLOSEWAIT1", "PEERCLOSEWAIT2"),), ((360, 430), (360, 530)), (370, 475)),
        Arrow("4B", (("APPCLOSEWAIT1", "APPCLOSEWAIT2"),), ((640, 430), (640, 530)), (650, 475)),
        Arrow(
            "3C",
            (("PEERCLOSEWAIT1", "APPFINCLOSEWAIT"), ("PEERCLOSEWAIT2", "APPFINCLOSEWAIT")),
            ((270, 560), (155, 560), (155, 260)),
            (145, 450), True,
        ),
        Arrow("3C", (("PEERCLOSEWAIT1", "APPFINCLOSEWAIT"),), ((270, 400), (155, 400)), (0, 0)),
        Arrow("3D", (("APPFINCLOSEWAIT", "CLOSED"),), ((155, 200), (155, 95), (390, 95)),
              (145, 130), True),
        Arrow(
            "3C",
            (("PEERCLOSEWAIT1", "CLOSED"), ("PEERCLOSEWAIT2", "CLOSED")),
            ((270, 575), (25, 575), (25, 65), (390, 65)),
            (35, 55), False, True,
        ),
        Arrow("3C", (("PEERCLOSEWAIT1", "CLOSED"),), ((270, 415), (25, 415)), (0, 0), dashed=True),
        Arrow(
            "4C",
            (("APPCLOSEWAIT1", "PEERFINCLOSEWAIT"), ("APPCLOSEWAIT2", "PEERFINCLOSEWAIT")),
            ((730, 560), (845, 560), (845, 260)),
            (855, 450),
        ),
        Arrow("4C", (("APPCLOSEWAIT1", "PEERFINCLOSEWAIT"),), ((730, 400), (845, 400)), (0, 0)),
        Arrow("4D", (("PEERFINCLOSEWAIT", "CLOSED"),), ((845, 200), (845, 95), (610, 95)),
              (855, 130)),
        Arrow(
            "4C",
            (("APPCLOSEWAIT1", "CLOSED"), ("APPCLOSEWAIT2", "CLOSED")),
            ((730, 575), (975, 575), (975, 65), (610, 65)),
            (965, 55), True, True,
        ),
        Arrow("4C", (("APPCLOSEWAIT1", "CLOSED"),), ((730, 415), (975, 415)), (0, 0), dashed=True),
    ),
    words=((500, 42, "1"), (285, 300, "Active Close"), (720, 300, "Passive Close")),
)  # fmt: skip

_ABNORMAL = Figure(
    title="Figure 23: SMC-R abnormal connection termination",
    section="4.8.2",
    width=860,
    height=480,
    boxes={
        "CLOSED": Box(320, 50, 220, 60, ("CLOSED",)),
        ANY: Box(295, 180, 270, 100, ("Any state", "(before setting", "PeerConnectionClosed",
                                      "in the peer's RMBE)")),
        "PEERABORTWAIT": Box(200, 380, 180, 60, ("PeerAbortWait",)),
        "PROCESSABORT": Box(480, 380, 180, 60, ("Process Abort",)),
    },
    arrows=(
        Arrow("1A", ((ANY, "PEERABORTWAIT"),), ((350, 280), (350, 380)), (340, 310), True),
        Arrow("2A", ((ANY, "PROCESSABORT"),), ((510, 280), (510, 380)), (520, 310)),
        Arrow("1B", (("PEERABORTWAIT", "CLOSED"),),
              ((200, 410), (120, 410), (120, 80), (320, 80)), (110, 230), True),
        Arrow("2B", (("PROCESSABORT", "CLOSED"),),
              ((660, 410), (740, 410), (740, 80), (540, 80)), (750, 230)),
    ),
    words=((285, 365, "Active Abort"), (580, 365, "Passive Abort")),
)  # fmt: skip

FIGURES: dict[str, Figure] = {"figure22": _NORMAL, "figure23": _ABNORMAL}
"""File name to figure."""

_STYLE = (
    "text { font: 14px 'DejaVu Sans', sans-serif; } .small { font-size: 11px; fill: #555; } "
    "rect { fill: #eef3fb; stroke: #333; } path { fill: none; stroke: #333; stroke-width: 1.3; } "
    ".dashed { stroke-dasharray: 5 4; }"
)
_TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" style="fill: #333; stroke: none"/></marker>'
)


def figure_svg(figure: Figure, table: Table) -> str:
    """The figure as an SVG file.

    Raises:
      ValueError: ``table`` has no edge for one of the arrows.
    """
    size = f'width="{figure.width}" height="{figure.height}"'
    view = f'viewBox="0 0 {figure.width} {figure.height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view}>',
        "<!-- Generated by `python -m scripts.states`; edit the declarations instead. -->",
        f"<title>{escape(figure.title)} (RFC 7609, {figure.section})</title>",
        f"<style>{_STYLE}</style>",
        f"<defs>{_TIP}</defs>",
        f'<rect {size} style="fill: #fff; stroke: none"/>',
        _text(figure.width // 2, 22, figure.title, "middle"),
    ]
    for name, box in figure.boxes.items():
        lines += _box(name, box)
    for arrow in figure.arrows:
        lines += _arrow(arrow, figure.section, table)
    lines += [_text(x, y, word, "middle") for x, y, word in figure.words]
    return "\n".join([*lines, "</svg>", ""])


def arrow_edges(arrow: Arrow, section: str, table: Table) -> list[tuple[str, Edge]]:
    """The edges of an arrow, each with its event.

    Raises:
      ValueError: there is no edge between one of its pairs of states.
    """
    cited = re.compile(re.escape(section) + r" \((?:[^()]*\W)?" + arrow.paragraph + r"\b")
    found: list[tuple[str, Edge]] = []
    for source, target in arrow.ends:
        here = [
            (event, edge)
            for (state, event), row in table.edges.items()
            for edge in row
            if source in (state, ANY) and edge.target == target != state
            and cited.search(edge.source)
        ]  # fmt: skip
        if not here:
            raise ValueError(f"{arrow.paragraph}: no edge leads from {source} to {target}")
        found += here
    return found


def _box(name: str, box: Box) -> list[str]:
    middle = box.left + box.width // 2
    top = box.top + box.height // 2 + 5 - 8 * (len(box.lines) - 1)
    first, *rest = box.lines
    place = f'x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}"'
    return [
        f'<g id="{escape(name)}"><rect {place}/>',
        _text(middle, top, first, "middle"),
        *(_text(middle, top + 17 * i, line, "middle", "small") for i, line in enumerate(rest, 1)),
        "</g>",
    ]


def _arrow(arrow: Arrow, section: str, table: Table) -> list[str]:
    edges = arrow_edges(arrow, section, table)
    path = " L ".join(f"{x} {y}" for x, y in arrow.path)
    dashed = ' class="dashed"' if arrow.dashed else ""
    ends = ", ".join(f"{source} to {target}" for source, target in arrow.ends)
    lines = [
        f"<g><title>{escape(f'{arrow.paragraph}: {ends}')}</title>",
        f'<path d="M {path}" marker-end="url(#tip)"{dashed}/>',
    ]
    if arrow.at != (0, 0):
        x, y = arrow.at
        anchor = "end" if arrow.left else "start"
        if arrow.dashed:  # no room below
            lines.append(_text(x, y, f"{arrow.paragraph}, both applications closed", anchor))
        else:
            lines.append(_text(x, y, arrow.paragraph, anchor))
            words = _once(event for event, _ in edges)
            lines += [
                _text(x, y + 15 * i, word, anchor, "small") for i, word in enumerate(words, 1)
            ]
    return [*lines, "</g>"]


def _once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _text(x: int, y: int, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
