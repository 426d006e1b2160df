"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from trio_smc import Config

__all__ = [
    "add_directory",
    "add_json",
    "add_process",
    "positive_count",
    "positive_seconds",
    "private_directory",
    "process_number",
]


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
