"""The output of commands: tables, JSON, lines, values as text, and errors.

Commands print text only by this module.  The text may come from another process, so this module
escapes control characters in it (`printable`).  On terminals it colours what is TCP, and errors.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import pwd
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Self, TextIO

from trio_smc._base.printable import printable
from trio_smc._base.reasons import Diagnosis
from trio_smc.tools.tables import Marked, Style, Table, coloured

__all__ = [
    "BAD_INPUT",
    "PROGRAM",
    "NoResult",
    "Screen",
    "ToolError",
    "address",
    "address_order",
    "diagnosis",
    "error_text",
    "fallback_codes",
    "fields",
    "gid",
    "has_colours",
    "hexadecimal",
    "is_terminal",
    "lines_of",
    "mode_cell",
    "name_command",
    "named_problems",
    "network",
    "port_of",
    "print_error",
    "print_json",
    "print_line",
    "print_problem",
    "print_text",
    "print_unused",
    "print_written",
    "show",
    "size",
    "table",
    "terminal_size",
    "user_name",
]

BAD_INPUT: Final = 2
"""The exit code for bad input."""
PROGRAM: Final = "trio-smc"
_name: ContextVar[str] = ContextVar("name", default=PROGRAM)
"""The program and the command that runs, as errors name it: "trio-smc ss"."""


def error_text(error: OSError) -> str:
    """The text of an error of the system, without its number: "Connection refused"."""
    return error.strerror or str(error)


class ToolError(Exception):
    """The command failed: an unknown process, a damaged answer, a wrong argument.

    `cli.main` prints the name of the command ("trio-smc ss: ") and the text on stderr, and exits
    with ``code``.  The text is one line without a full stop.
    """

    def __init__(self, text: str, code: int = BAD_INPUT) -> None:
        super().__init__(text)
        self.code = code

    def line(self, options: argparse.Namespace) -> str:
        """The text, with a remedy if that depends on the options that the command has."""
        return str(self)


class NoResult(ToolError):
    """A query has no result: there is no such process, or none answers.  With ``--json`` the
    command's document without any item is printed, so that a script can read it, too."""


_DUMB: Final = ("dumb", "unknown")
"""Values of TERM without colours and cursor."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT_STEP: Final = 1024


def print_json(value: Any, *, flush: bool = False) -> None:
    """Print a value as one indented JSON document."""
    _write(json.dumps(value, indent=2, ensure_ascii=True), flush=flush)


def print_line(line: object = "", *, flush: bool = False) -> None:
    """Print one line."""
    _write(printable(line, None), flush=flush)


def print_text(text: str) -> None:
    """Print the command's own text as it is, such as its help.  Raises as `print_line`."""
    _write(text, end="")


def _write(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Print text on stdout.

    Raises:
      ToolError: the output cannot be written, for example because the disk is full.
      BrokenPipeError: the reader of the pipe has ended.
    """
    try:
        print(text, end=end, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ToolError(f"cannot write the output: {error_text(error)}") from None


def print_error(line: object) -> None:
    """Print one line on stderr; if stderr is closed, the line is lost."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            text = coloured(printable(line, None), "error", has_colours(sys.stderr))
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def named_problems() -> Iterator[None]:
    """Within the block `print_problem` names the program, and after `name_command` the command."""
    token = _name.set(PROGRAM)
    try:
        yield
    finally:
        _name.reset(token)


def name_command(name: str) -> None:
    """From now on `print_problem` names this command: "trio-smc ss"."""
    _name.set(name)


def print_problem(text: object) -> None:
    """Print one line on stderr that begins with the name of the command, as argparse's errors."""
    print_error(f"{_name.get()}: {text}")


def print_written(file: str, nbytes: int) -> None:
    """Print on stderr that a file is complete; stdout ("-") is not named."""
    if file != "-" and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            line = printable(f"{_name.get()}: written: {file}, {size(nbytes)}", None)
            print(line, file=sys.stderr, flush=True)


def print_unused(option: str, values: Iterable[str], what: str, known: Iterable[str]) -> None:
    """Print on stderr that an option's values select nothing, and which values would.

    Args:
      option: the name of the option, without dashes.
      values: its values that select nothing; without any, nothing is printed.
      what: what the values would select, such as "connection".
      known: the values that select something.
    """
    names = ", ".join(map(plain, values))
    if names:
        choice = ", ".join(known) or "none"
        print_problem(f"--{option} {names} selects no {what}; the choices are: {choice}")


def is_terminal() -> bool:
    """True if stdout is a terminal on which the cursor can be moved."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    return bool(os.environ.get("FORCE_COLOR")) or os.environ.get("TERM") not in _DUMB


def terminal_size() -> os.terminal_size:
    """Columns and lines of the terminal, or of COLUMNS and LINES."""
    return shutil.get_terminal_size()


def has_colours(stream: TextIO | None) -> bool:
    """True if text on this stream has colours: on a terminal, unless NO_COLOR is set
    (no-color.org)."""
    if stream is None or os.environ.get("NO_COLOR"):
        return False
    try:
        return stream.isatty() and os.environ.get("TERM") not in _DUMB
    except ValueError:
        return False  # the stream is closed


def show(*parts: Table | str) -> None:
    """Print tables and lines of text.  Rows have no trailing blanks."""
    width = terminal_size().columns if is_terminal() else None
    for line in lines_of(*parts, width=width, colour=has_colours(sys.stdout)):
        _write(line)


def lines_of(*parts: Table | str, width: int | None = None, colour: bool = False) -> Iterator[str]:
    """The lines of tables and lines of text.

    Args:
      parts: tables, and texts from which control characters are removed.
      width: columns of the terminal; None: no line is wrapped.
      colour: True if they have colours.
    """
    for part in parts:
        if isinstance(part, Table):
            for line in part.lines(width, colour=colour):
                yield line.rstrip()
        else:
            yield printable(part, None).rstrip()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table without lines, as `ss` prints.

    Args:
      columns: headings.  A heading that begins with ">" is that of numbers, which are aligned to
        the right.  A heading that begins with "~" is that of sentences, which may be wrapped.
      rows: cells; None is shown as "-"; a `Marked` cell has a colour.
      title: a line above the table.
    """
    return Table.of(columns, rows, title)


class Screen:
    """The alternative screen of a terminal, for frames that replace each other."""

    def __enter__(self) -> Self:
        self._put("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        self._put("\x1b[?25h\x1b[?1049l")

    def show(self, *parts: Table | str | Marked) -> None:
        """Replace the frame.  Lines that do not fit are cut."""
        size, colour = terminal_size(), has_colours(sys.stdout)
        shown: list[str] = []
        for part in parts:
            text = str(part.value) if isinstance(part, Marked) else part
            style: Style = part.style if isinstance(part, Marked) else ""
            shown += [
                coloured(line[: size.columns], style, colour)
                for line in lines_of(text, width=size.columns)
            ]
        self._put("\x1b[2J\x1b[H" + "\n".join(shown[: size.lines]))

    def _put(self, text: str) -> None:
        _write(text, end="", flush=True)


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values, without headings."""
    made = table(("name", "~value"), pairs)
    made.header = False
    return made


def plain(value: object) -> str:
    """A value as printable text; "-" for None and for empty text."""
    return "-" if value is None or value == "" else printable(value)


def mode_cell(value: object) -> object:
    """The mode of a connection as a cell: TCP has a colour."""
    return Marked(value, "warning") if value in ("tcp", "refused") else value


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


def address_order(value: Any) -> tuple[int, int, str, int]:
    """The key by which addresses are sorted: IPv4, IPv6, others, and the ports as numbers."""
    match value:
        case [str() as host, int() as port]:
            try:
                known = ipaddress.ip_address(host.partition("%")[0])
            except ValueError:
                return 7, 0, host, port
            mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
            return (mapped or known).version, int(mapped or known), host, port
    return 8, 0, "", 0


def port_of(value: Any) -> str:
    """The port of an address as text; "-" if there is none."""
    match value:
        case [_, int() as port]:
            return str(port)
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


def user_name(uid: int | None) -> str | None:
    """The name of a user, or the number if it has no name."""
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, OSError):
        return str(uid)


def network(link: dict[str, Any]) -> str:
    """The network of a link or RNIC: "netdev eth0, VLAN 7, PNET eth1"."""
    nets = ", ".join(plain(each) for each in link["pnet"] or ()) or plain(None)
    return f"netdev {plain(link['netdev'])}, VLAN {plain(link['vlan'])}, PNET {nets}"


def gid(text: Any) -> str:
    """A GID in the form of an IPv6 address."""
    if not isinstance(text, str) or len(text) != 32:
        return "-"
    return ":".join(text[place : place + 4] for place in range(0, 32, 4))
