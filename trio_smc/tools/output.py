"""How commands print: tables by rich, JSON by the standard library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from trio_smc.tools.errors import ToolError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["console", "fields", "print_json", "show", "size", "table"]

_PIPED_WIDTH: Final = 1000
"""Columns of output that nobody looks at directly: nothing is cut or wrapped."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP: Final = 1024


def print_json(value: Any) -> None:
    """Print a value as one indented JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=True))


def console() -> Console:
    """Where tables go.  Raises ToolError when rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        raise ToolError("tables need rich: pip install 'trio-smc[cli]', or use --json") from None
    piped = not sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=False, width=_PIPED_WIDTH if piped else None)


def show(*parts: RenderableType) -> None:
    """Print tables and lines of text; piped ones without blanks at the ends of lines."""
    screen = console()
    if screen.is_terminal:
        screen.print(*parts, sep="\n")
        return
    with screen.capture() as captured:
        screen.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table without lines around it, as `ss` prints.

    Args:
      columns: headings; one that begins with ">" is for numbers, aligned to the right.
      rows: cells; None is shown as "-".
      title: a line above it.
    """
    console()  # says what is missing
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, title=Text(title) if title else None,
                 title_justify="left", title_style="bold")  # fmt: skip
    for heading in columns:
        number = heading.startswith(">")
        made.add_column(
            heading.removeprefix(">"),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values below each other, without headings."""
    made = table(("name", "value"), pairs)
    made.show_header = False
    return made


def plain(value: object) -> str:
    """Text of a cell; what could steer a terminal is made visible."""
    if value is None or value == "":
        return "-"
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text
    )


def _visible(character: str) -> str:
    return character if character.isprintable() or character == "\n" else repr(character)[1:-1]


def size(count: float) -> str:
    """Bytes for people: "17 B", "1.5 MiB"."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < _STEP or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    raise AssertionError("the last unit takes everything")
