"""The subcommands of `trio-smc`: one module each, named in `MODULES`.

A module of a subcommand has

- ``NAME``: what the user types,
- ``SUMMARY``: one line for the list of commands, without a full stop,
- ``DESCRIPTION``: paragraphs for its own ``--help``; ``EPILOG``: examples and exit codes,
- ``configure(parser)``: adds its arguments,
- ``run(options) -> int``: does the work; returns the exit code (0 unless the command says
  otherwise) and raises `trio_smc.tools.output.ToolError` for bad input (exit code 2).

Arguments that several commands share are here, too; `trio_smc.tools.output` prints tables and JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from trio_smc import Config

__all__ = [
    "MODULES",
    "Command",
    "add_directory",
    "add_json",
    "add_process",
    "load",
    "positive_count",
    "positive_seconds",
    "private_directory",
    "process_number",
    "tcp_port",
    "whole_number",
]

_DAY: Final = 86400
_MAX_DIGITS: Final = 20
_SHOWN: Final = 60  # characters of a wrong argument

MODULES = (
    "ss",
    "lg",
    "rnic",
    "stats",
    "check",
    "top",
    "reasons",
    "capture",
    "ladder",
    "run",
    "proxy",
    "setup",
    "teardown",
)


class Command(Protocol):
    """What a module of a subcommand has."""

    NAME: str
    SUMMARY: str
    DESCRIPTION: str
    EPILOG: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Do the work; return the exit code."""


def load() -> tuple[Command, ...]:
    """The modules of all subcommands, in the order of the list that users see."""
    return tuple(cast("Command", import_module(f"{__name__}.{name}")) for name in MODULES)


# --- arguments that several commands share -----------------------------------------------------


def add_json(parser: argparse._ActionsContainer) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON and no table")


def add_process(parser: argparse.ArgumentParser) -> None:
    """``--pid`` and ``--directory``: whose stacks to ask."""
    parser.add_argument(
        "--pid",
        type=process_number,
        metavar="PID",
        help="only this process; default: all that answer",
    )
    add_directory(parser)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """``--directory``."""
    parser.add_argument(
        "--directory",
        type=directory,
        metavar="DIR",
        help="the private directory of Config(directory=...); default: $XDG_RUNTIME_DIR/trio-smc, "
        "else /tmp/trio-smc-UID",
    )


def private_directory(options: argparse.Namespace) -> Path:
    """The directory that ``--directory`` names, or the default."""
    return Config(directory=options.directory).private_directory()


def directory(text: str) -> Path:
    """An argument that `Config.directory` takes."""
    try:
        return Config(directory=text).private_directory()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_seconds(text: str) -> float:
    """An argument that is a number of seconds above 0 and at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= _DAY:
        raise argparse.ArgumentTypeError(
            f"{text[:_SHOWN]!r} is not a number of seconds above 0 and at most {_DAY}"
        )
    return value


def whole_number(what: str, least: int, most: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers of this range, in decimal digits.

    Args:
      what: what they are, for the message.
    """

    def convert(text: str) -> int:
        # Python converts no more than some thousand digits, and says so in its own words.
        digits = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not digits or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is not a {what} from {least} to {most}"
            )
        return int(text)

    return convert


positive_count = whole_number("whole number", 1, 10**9)
process_number = whole_number("process number", 1, (1 << 31) - 1)
tcp_port = whole_number("TCP port", 1, 65535)
