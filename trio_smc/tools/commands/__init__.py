"""The subcommands of `trio-smc`: one module each, named in `MODULES`.

A module of a subcommand has

- ``NAME``: what the user types,
- ``SUMMARY``: one line for the list of commands, without a full stop,
- ``DESCRIPTION``: paragraphs for its own ``--help``; ``EPILOG``: examples and exit codes,
- ``configure(parser)``: adds its arguments,
- ``run(options) -> int``: does the work; returns the exit code (0 unless the command says
  otherwise) and raises `trio_smc.tools.output.ToolError` for bad input (exit code 2).

`trio_smc.tools.options` has the arguments that several commands share, `trio_smc.tools.output`
prints tables and JSON.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Protocol, cast

__all__ = ["MODULES", "Command", "load"]

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
