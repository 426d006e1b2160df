"""The output of commands: tables (with rich), JSON, lines, values as text, and errors.

Commands print text only by this module.  The text may come from another process, so this module
escapes control characters in it (`printable`), and rich does not interpret it as markup.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from trio_smc._base.printable import printable
from trio_smc._base.reasons import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = [
    "BAD_INPUT",
    "ToolError",
    "address",
    "console",
    "diagnosis",
    "error_text",
    "fallback_codes",
    "fields",
    "gid",
    "hexadecimal",
    "least_width",
    "print_error",
    "print_json",
    "print_line",
    "show",
    "size",
    "table",
]

BAD_INPUT: Final = 2
"""The exit code for bad input."""


def error_text(error: OSError) -> str:
    """The text of an error of the system, without its number: "Connection refused"."""
    return error.strerror or str(error)


class ToolError(Exception):
    """The command failed: an unknown process, a damaged answer, a wrong argument.

    `cli.main` prints "trio-smc: " and the text on stderr, and exits with ``code``.  The text is one
    line without a full stop.
    """

    def __init__(self, text: str, code: int = BAD_INPUT) -> None:
        super().__init__(text)
        self.code = code


_PIPED_WIDTH: Final = 1000
"""Columns of output that is not a terminal.  Chosen: so wide that rich cuts and wraps no row."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT_STEP: Final = 1024
_MARKS: Final = (">", "~")
_MIN_SENTENCE_WIDTH: Final = 20
"""The smallest number of columns of a "~" column.  Chosen."""


def print_json(value: Any) -> None:
    """Print a value as one indented JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=True))


def print_line(line: object = "", *, flush: bool = False) -> None:
    """Print one line."""
    print(printable(line, None), flush=flush)


def print_error(line: object) -> None:
    """Print one line on stderr; if stderr is closed, the line is lost."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(printable(line, None), file=sys.stderr, flush=True)


def console() -> Console:
    """The console for tables.  Raises ToolError if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        raise ToolError("tables need rich: pip install 'trio-smc[cli]', or use --json") from None
    piped = not sys.stdout.isatty()
    return Console(
        highlight=False, markup=False, emoji=False, soft_wrap=False,
        width=_PIPED_WIDTH if piped else None,
    )  # fmt: skip


def show(*parts: RenderableType) -> None:
    """Print tables and lines of text.  In a pipe, rows have no trailing blanks."""
    screen = console()
    from rich.console import ConsoleDimensions

    parts = tuple(printable(part, None) if isinstance(part, str) else part for part in parts)
    if screen.is_terminal:
        # The terminal wraps a row that is too long, as in the output of `ss`.  If rich wrapped the
        # text within each cell, the rows would be harder to read.
        width = max(screen.width, *(least_width(part) for part in parts))
        screen.size = ConsoleDimensions(width, screen.height)
        screen.print(*parts, sep="\n")
        return
    with screen.capture() as captured:
        screen.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def least_width(part: RenderableType) -> int:
    """The number of terminal columns that a table needs; 0 for a line of text, which may wrap."""
    if isinstance(part, str):
        return 0
    screen = console()
    options = screen.options.update(width=_PIPED_WIDTH)
    return screen.measure(part, options=options).minimum


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table without lines, as `ss` prints.

    Args:
      columns: headings.  A heading that begins with ">" is that of numbers, which are aligned to
        the right.  A heading that begins with "~" is that of sentences, which rich may wrap.
      rows: cells; None is shown as "-".
      title: a line above the table.
    """
    console()  # raises ToolError if rich is not installed
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[plain(cell) for cell in row] for row in rows]
    made = Table(box=None, pad_edge=False, title=Text(printable(title)) if title else None,
                 title_justify="left", title_style="bold")  # fmt: skip
    for number, heading in enumerate(columns):
        mark, name = (heading[0], heading[1:]) if heading[:1] in _MARKS else ("", heading)
        name = printable(name)
        widths = (cell_len(row[number]) for row in cells)
        made.add_column(
            Text(name),
            justify="right" if mark == ">" else "left",
            min_width=_MIN_SENTENCE_WIDTH if mark == "~" else max(cell_len(name), *widths, 0),
            overflow="fold",
        )
    for row in cells:
        made.add_row(*map(Text, row))
    return made


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values, without headings."""
    made = table(("name", "~value"), pairs)
    made.show_header = False
    return made


def plain(value: object) -> str:
    """A value as printable text; "-" for None and for empty text."""
    return "-" if value is None or value == "" else printable(value)


def size(count: float | None) -> str:
    """A number of bytes as text: "17 B", "1.5 MiB"; "-" for None."""
    if count is None:
        return plain(count)
    value = float(count)
    for unit in _UNITS:
        if abs(value) < _UNIT_STEP or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= _UNIT_STEP
    raise AssertionError("the last unit has no upper limit")


# --- values of snapshots; another process sent them, so they may have any type ----------------


def address(value: Any) -> str:
    """An address as text: "127.0.0.1:7000", "[::1]:7000"; "-" if there is none."""
    match value:
        case [str() as host, int() as port]:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "-"


def diagnosis(word: Any) -> str:
    """A diagnosis word with number and name: "0x03030000 no-device"."""
    if not isinstance(word, int) or not 0 <= word < 1 << 32:
        return "none"
    try:
        name = Diagnosis(word).name.lower().replace("_", "-")
    except ValueError:
        name = "unknown"
    return f"0x{word:08x} {name}"


def fallback_codes(fallback: dict[str, Any]) -> str:
    """The diagnosis words of both sides: "local 0x03030000 no-device, peer none"."""
    return f"local {diagnosis(fallback.get('code'))}, peer {diagnosis(fallback.get('peer_code'))}"


def hexadecimal(value: int | None, digits: int = 8) -> str:
    """A number as so many hexadecimal digits; "-" for None."""
    return plain(value) if value is None else f"{value:0{digits}x}"


def agreed(
    version: int | None, release: int | None, ueid: str | None, direct: bool | None, **_: object
) -> str:
    """The terms of a link group: "1" for version 1, or "2.1 PLANT-7, direct" for version 2 with
    release 1, the UEID PLANT-7, and no gateway; "-" if they are unknown."""
    if version in (None, 1):
        return plain(version)
    route = {True: "direct", False: "gateway", None: plain(None)}[direct]
    return f"{version}.{plain(release)} {plain(ueid)}, {route}"


def gid(text: Any) -> str:
    """A GID in the form of an IPv6 address."""
    if not isinstance(text, str) or len(text) != 32:
        return "-"
    return ":".join(text[place : place + 4] for place in range(0, 32, 4))
