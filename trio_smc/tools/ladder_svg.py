"""Ladder diagrams as one SVG picture.

The picture contains only rectangles, lines and text, and depends only on the messages, so that two
pictures can be compared as text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from trio_smc._base.printable import printable
from trio_smc.tools.ladder import Ladder, Peer, Row, address_text
from trio_smc.tools.ladder_text import KINDS, details, kind, peer_name, title

__all__ = ["picture"]

# Sizes are in pixels, and all are chosen.  These are x coordinates: of the columns, of the lines of
# client and server, and of the middle.
_WIDTH: Final = 900
_TIME, _CONNECTION, _LINK = 92, 124, 168
_LEFT, _RIGHT = 225, 865
_MIDDLE: Final = (_LEFT + _RIGHT) / 2
_BOX: Final = 330
"""The width of the box with the name of a peer."""
_CHARACTERS: Final = 88
"""The most characters of a line of details: so many fit between the lines of client and server."""
_LINE: Final = 15
"""The height of a line of details."""
_COLOURS: Final = {
    "CLC": "#1f5aa6", "LLC": "#7a3d91", "CDC": "#2b7a3d", "write": "#946200",
    "unreadable": "#b3261e",
}  # fmt: skip
_LEGEND_TEXT: Final = {
    "CLC": "CLC, on the TCP connection", "LLC": "LLC, on a link", "CDC": "CDC, on a link",
    "write": "RDMA write", "unreadable": "unreadable",
}  # fmt: skip
# The background of a link's number.  Each link keeps its colour in the whole picture.
_LINKS: Final = ("#cfe3f7", "#f8d9c4", "#d3ecd2", "#ead3ef", "#f5ebb8", "#cdeeee")
_SANS: Final = "Inter, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
_MONO: Final = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def picture(ladders: Iterable[Ladder], *, start: int, limit: int) -> str:
    """Draw all ladders below each other, and return the SVG document.

    Args:
      ladders: the ladders.
      start: the time shown as 0, in nanoseconds since 1970.
      limit: the largest number of messages in all ladders together.
    """
    parts: list[str] = []
    seen: set[str] = set()
    y = 20.0
    for ladder in ladders:
        drawn, limit = ladder.rows[: max(limit, 0)], limit - len(ladder.rows)
        seen |= {kind(row.event) for row in drawn}
        y = _draw(parts, ladder, drawn, start, y)
    parts += _legend(seen, y)
    height = y + 50
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}" font-family="{_SANS}" font-size="13">'
    )
    return "\n".join(
        (head, "<title>SMC-R ladder diagram</title>", *_definitions(), *parts, "</svg>\n")
    )


def _definitions() -> Iterator[str]:
    yield "<defs>"
    for name, colour in _COLOURS.items():
        yield (
            f'<marker id="{name}" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="9" '
            f'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0,1 L10,5 L0,9 z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'


def _draw(parts: list[str], ladder: Ladder, rows: list[Row], start: int, y: float) -> float:
    top = _heading(parts, ladder, y)
    lifelines = len(parts)
    y = top + 12
    for row in rows:
        y = _row(parts, row, start, y)
    omitted = len(ladder.rows) - len(rows)
    if omitted:
        y += 20
        parts.append(_text(_MIDDLE, y, f"{omitted} more messages", fill="#666666"))
    bottom = y + 14
    parts[lifelines:lifelines] = [
        f'<line x1="{x}" y1="{top:g}" x2="{x}" y2="{bottom:g}" stroke="#9aa0a6" stroke-width="2"/>'
        for x in (_LEFT, _RIGHT)
    ]
    return bottom + 30


def _heading(parts: list[str], ladder: Ladder, y: float) -> float:
    boxes = (("client", ladder.client, _LEFT - 30), ("server", ladder.server, _RIGHT + 15 - _BOX))
    lines = [_names(role, peer) for role, peer, _ in boxes]
    height = 14 + 17 * max(map(len, lines))
    for (_, _, x), names in zip(boxes, lines, strict=True):
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_BOX}" height="{height}" rx="6" fill="#f3f5f7" '
            f'stroke="#9aa0a6"/>'
        )
        for number, name in enumerate(names):
            weight = "bold" if number == 0 else "normal"
            parts.append(_text(x + _BOX / 2, y + 20 + 17 * number, name, weight=weight))
    y += height
    for x, words, anchor in (
        (_TIME, "seconds", "end"), (_CONNECTION, "conn", "middle"), (_LINK, "link", "middle")
    ):  # fmt: skip
        parts.append(_text(x, y - 4, words, anchor=anchor, fill="#666666", size=12))
    return y


def _names(role: str, peer: Peer) -> list[str]:
    return [role, peer_name(peer), *map(address_text, peer.addresses[:4])]


def _row(parts: list[str], row: Row, start: int, y: float) -> float:
    """Draw the title, the arrow and the details of a message; return the y of the next row."""
    what = kind(row.event)
    colour = _COLOURS[what]
    line = y + 24
    seconds = f"{(row.time - start) / 1e9:.6f}"
    parts.append(_text(_TIME, line + 4, seconds, anchor="end", fill="#444444", size=12, mono=True))
    if row.connection is not None:
        parts.append(_text(_CONNECTION, line + 4, str(row.connection.number), size=12))
    if row.link_number is not None:
        fill = _LINKS[row.link_number % len(_LINKS)]
        parts.append(
            f'<rect x="{_LINK - 15}" y="{line - 9:g}" width="30" height="18" rx="9" fill="{fill}"/>'
        )
        parts.append(_text(_LINK, line + 4, str(row.link_number), size=12))
    x1, x2 = (_LEFT + 2, _RIGHT - 3) if row.to_server else (_RIGHT - 2, _LEFT + 3)
    dashes = ' stroke-dasharray="7 4"' if what == "write" else ""
    parts.append(
        f'<line x1="{x1}" y1="{line:g}" x2="{x2}" y2="{line:g}" stroke="{colour}" '
        f'stroke-width="1.6"{dashes} marker-end="url(#{what})"/>'
    )
    parts.append(_text(_MIDDLE, line - 6, title(row), fill=colour, weight="bold"))
    y = line + 3
    lines = [line for detail in details(row) for line in textwrap.wrap(detail, _CHARACTERS)]
    for detail in lines:
        y += _LINE
        parts.append(_text(_MIDDLE, y - 2, detail, fill="#444444", size=11.5, mono=True))
    return y + 4


def _legend(seen: set[str], y: float) -> Iterator[str]:
    x = 30.0
    for each in (each for each in KINDS if each in seen):
        dashes = ' stroke-dasharray="7 4"' if each == "write" else ""
        yield (
            f'<line x1="{x:g}" y1="{y:g}" x2="{x + 34:g}" y2="{y:g}" stroke="{_COLOURS[each]}" '
            f'stroke-width="1.6"{dashes} marker-end="url(#{each})"/>'
        )
        yield _text(x + 42, y + 4, _LEGEND_TEXT[each], anchor="start", fill="#444444", size=12)
        x += 60 + 7.2 * len(_LEGEND_TEXT[each])


def _text(
    x: float, y: float, words: str, *, anchor: str = "middle", fill: str = "#202124",
    weight: str = "normal", size: float = 13, mono: bool = False,
) -> str:  # fmt: skip
    style = f' font-family="{_MONO}"' if mono else ""
    style += f' font-weight="{weight}"' if weight != "normal" else ""
    style += f' font-size="{size:g}"' if size != 13 else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{style}>'
        f"{escape(printable(words))}</text>"
    )
