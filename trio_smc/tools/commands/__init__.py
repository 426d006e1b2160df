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
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

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
]

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
        type=Path,
        metavar="DIR",
        help="the private directory of Config(directory=...); default: $XDG_RUNTIME_DIR/trio-smc, "
        "else /tmp/trio-smc-UID",
    )


def private_directory(options: argparse.Namespace) -> Path:
    """The directory that ``--directory`` names, or the default."""
    return Config(directory=options.directory).private_directory()


def positive_seconds(text: str) -> float:
    """An argument that is a number of seconds above 0 and at most a day."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def positive_count(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def process_number(text: str) -> int:
    """An argument that is a process number."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a process number")
    return int(text)
