"""The subcommands of `trio-smc`, one module each, listed in `MODULES`.

The module of a subcommand has

- ``NAME``: its name on the command line,
- ``SUMMARY``: one line for the list of commands, without a full stop,
- ``DESCRIPTION``: paragraphs for ``--help``; ``EPILOG``: examples and exit codes,
- ``configure(parser)``: adds its arguments,
- ``run(options) -> int``: runs the command, and returns the exit code.  For bad input it raises
  `trio_smc.tools.output.ToolError` (exit code 2).

This module also has the arguments that several commands share.
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
"""Seconds of a day, the largest time that an argument may have.  Chosen."""
_MAX_DIGITS: Final = 20
"""Digits of a whole number.  Chosen: a number of 64 bits has at most 20."""
_SHOWN: Final = 60
"""Characters of a wrong argument in an error.  Chosen."""

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
    """The module of a subcommand."""

    NAME: str
    SUMMARY: str
    DESCRIPTION: str
    EPILOG: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the exit code."""


def load() -> tuple[Command, ...]:
    """The modules of all subcommands, in the order of ``trio-smc --help``."""
    return tuple(cast("Command", import_module(f"{__name__}.{name}")) for name in MODULES)


# --- arguments that several commands share -----------------------------------------------------


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_process(parser: argparse.ArgumentParser) -> None:
    """Add ``--pid`` and ``--directory``, which select the stacks."""
    parser.add_argument(
        "--pid",
        type=process_number,
        metavar="PID",
        help="only this process; default: all processes of this user",
    )
    add_directory(parser)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add ``--directory``."""
    parser.add_argument(
        "--directory",
        type=directory,
        metavar="DIR",
        help="the private directory of Config(directory=...); default: $XDG_RUNTIME_DIR/trio-smc, "
        "else /dev/shm/trio-smc-UID",
    )


def private_directory(options: argparse.Namespace) -> Path:
    """The directory of ``--directory``, or the default."""
    return Config(directory=options.directory).private_directory()


def directory(text: str) -> Path:
    """The argparse type of a private directory (`Config.directory`)."""
    try:
        return Config(directory=text).private_directory()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_seconds(text: str) -> float:
    """The argparse type of a time in seconds, above 0 and at most a day."""
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
    """Make the argparse type of a whole number in decimal digits.

    Args:
      what: the noun for the error message.
      least, most: the smallest and the largest number that are allowed.
    """

    def convert(text: str) -> int:
        # `int` would also accept "+1", "1_000" and digits of other scripts.  For more than 4300
        # digits it would raise an error that does not mention the argument.
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
