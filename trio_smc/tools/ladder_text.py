"""A ladder diagram as text, in the manner of RFC 7609's figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trio_smc.tools.ladder_labels import details, peer_name, title
from trio_smc.tools.ladder_model import Ladder, Peer, Row, address_text

__all__ = ["draw"]

_MARGIN = 20
"""Columns of time, connection and link."""
_LEAST = 60
"""Columns between the two sides, however narrow the page."""


def draw(ladder: Ladder, *, start: int, limit: int, width: int = 100) -> Iterator[str]:
    """The lines of one ladder.

    Args:
      start: nanoseconds since 1970 from which times are counted.
      limit: how many messages to draw.
      width: columns.
    """
    inside = max(_LEAST, width - _MARGIN - 4)
    yield from _heading(ladder, inside)
    for row in ladder.rows[:limit]:
        yield from _row(row, start, inside)
    left = len(ladder.rows) - limit
    if left > 0:
        yield " " * (_MARGIN + 1) + f"... {left} more messages (--limit {len(ladder.rows)})"


def _heading(ladder: Ladder, inside: int) -> Iterator[str]:
    blank, half = " " * _MARGIN, inside // 2
    left, right = _names(ladder.client, half), _names(ladder.server, half)
    height = max(len(left), len(right))
    for one, other in zip(left + [""] * height, right + [""] * height, strict=False):
        if one or other:
            yield f"{blank}{one:<{inside + 2 - half}}{other:>{half}}".rstrip()
    yield f"{'seconds':>9} {'conn':>4} {'link':>4} client{'server':>{inside - 4}}"


def _names(peer: Peer, width: int) -> list[str]:
    known = ", ".join(address_text(each) for each in peer.addresses)
    return [peer_name(peer), *textwrap.wrap(known, width)]


def _clipped(words: str, width: int) -> str:
    return words if len(words) <= width else words[: width - 3] + "..."


def _row(row: Row, start: int, inside: int) -> Iterator[str]:
    conn = "" if row.connection is None else str(row.connection.number)
    link = "" if row.link_number is None else str(row.link_number)
    margin = f"{(row.time - start) / 1e9:9.6f} {conn:>4} {link:>4} "
    text = f" {_clipped(title(row), inside - 6)} "
    if row.to_server:
        arrow = text.center(inside - 1, "-") + ">"
    else:
        arrow = "<" + text.center(inside - 1, "-")
    yield f"{margin}|{arrow}|"
    for detail in details(row):
        for line in textwrap.wrap(detail, inside - 4):
            yield f"{' ' * _MARGIN}|{line.center(inside)}|"
