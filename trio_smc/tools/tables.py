"""Tables of text, without lines, as `ss` prints them; standard library only.

A cell is one line of printable text.  On a terminal, columns of sentences are wrapped so that a row
fits, and all other columns keep their width: the terminal wraps a row that is still too long, as in
the output of `ss`, which is easier to read than cells that are broken one by one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal, NamedTuple

from trio_smc._base.printable import printable

__all__ = ["Marked", "Style", "Table", "cell_width", "coloured", "wrap"]

_GAP: Final = 2
"""Blanks between two columns."""
_MIN_SENTENCE_WIDTH: Final = 20
"""The smallest number of terminal columns of a column of sentences.  Chosen."""
_MARKS: Final = (">", "~")
_CODES: Final = {"warning": "33", "error": "31", "heading": "1"}
"""ECMA-48, 8.3.117: yellow, red, bold."""

Style = Literal["", "warning", "error", "heading"]


class Marked(NamedTuple):
    """A value that has a colour on terminals.

    Attributes:
      value: the value.
      style: "warning" for TCP, "error" for what failed.
    """

    value: object
    style: Style


class _Column(NamedTuple):
    name: str
    right: bool
    sentences: bool


@dataclass(slots=True)
class Table:
    """A table.

    Attributes:
      columns: the columns.
      rows: texts and styles.
      title: a line above the table.
      header: False: without headings.
    """

    columns: list[_Column]
    rows: list[list[tuple[str, Style]]] = field(default_factory=list)
    title: str = ""
    header: bool = True

    @classmethod
    def of(
        cls, headings: Sequence[str], rows: Iterable[Sequence[object]], title: str = ""
    ) -> Table:
        """Make a table; `trio_smc.tools.output.table` describes the arguments."""
        columns = []
        for heading in headings:
            mark, name = (heading[0], heading[1:]) if heading[:1] in _MARKS else ("", heading)
            columns.append(_Column(printable(name), mark == ">", mark == "~"))
        return cls(columns, [[_cell(each) for each in row] for row in rows], printable(title))

    @property
    def least_width(self) -> int:
        """The terminal columns that a row needs at least."""
        return sum(self._widths(0)) + _GAP * (len(self.columns) - 1)

    def lines(self, width: int | None = None, *, colour: bool = False) -> Iterator[str]:
        """The lines of the table.

        Args:
          width: terminal columns; None: no sentence is wrapped.
          colour: True if cells and headings have colours.
        """
        widths = self._widths(width)
        if self.title:
            yield coloured(self.title, "heading", colour)
        if self.header:
            heads: list[tuple[str, Style]] = [(each.name, "heading") for each in self.columns]
            yield from self._row_lines(heads, widths, colour)
        for row in self.rows:
            yield from self._row_lines(row, widths, colour)

    def _row_lines(
        self, row: Sequence[tuple[str, Style]], widths: Sequence[int], colour: bool
    ) -> Iterator[str]:
        wrapped = [
            wrap(text, width) if column.sentences else [text]
            for (text, _), width, column in zip(row, widths, self.columns, strict=True)
        ]
        for texts in zip_longest(*wrapped, fillvalue=""):
            line, blanks = "", 0
            for text, (_, style), width, column in zip(
                texts, row, widths, self.columns, strict=True
            ):
                padding = max(0, width - cell_width(text))
                if text:
                    blanks += padding if column.right else 0
                    line += " " * blanks + coloured(text, style, colour)
                    blanks = _GAP + (0 if column.right else padding)
                else:
                    blanks += width + _GAP
            yield line

    def _widths(self, limit: int | None) -> list[int]:
        widths = [
            max([cell_width(column.name) if self.header else 0]
                + [cell_width(row[number][0]) for row in self.rows])
            for number, column in enumerate(self.columns)
        ]  # fmt: skip
        wide = [number for number, column in enumerate(self.columns) if column.sentences]
        if limit is None or not wide:
            return widths
        fixed = sum(width for number, width in enumerate(widths) if number not in wide)
        left = limit - fixed - _GAP * (len(widths) - 1)
        # The narrowest first: what they do not need is for the others.
        for place, number in enumerate(sorted(wide, key=lambda each: widths[each])):
            share = max(left // (len(wide) - place), _MIN_SENTENCE_WIDTH)
            widths[number] = min(widths[number], share)
            left -= widths[number]
        return widths


def _cell(value: object) -> tuple[str, Style]:
    style: Style = ""
    if isinstance(value, Marked):
        value, style = value
    return ("-" if value is None or value == "" else printable(value)), style


def coloured(text: str, style: Style, colour: bool = True) -> str:
    """The text in the colour of a style.  The text itself is `printable`."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colour and style and text.strip() else text


def cell_width(text: str) -> int:
    """The terminal columns of a printable text (UAX 11)."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def wrap(text: str, width: int) -> list[str]:
    """The lines of a sentence; only words that are too long are broken."""
    if cell_width(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        while True:
            space = " " if lines[-1] else ""
            if cell_width(lines[-1] + space + word) <= width:
                lines[-1] += space + word
                break
            if lines[-1]:
                lines.append("")
                continue
            kept = width if word.isascii() else max(1, width // 2)
            lines[-1], word = word[:kept], word[kept:]
            lines.append("")
    return lines
