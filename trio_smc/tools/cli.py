"""The command `trio-smc`: finds and runs the subcommand, and prints an error as one line.

Exit codes: 0, or one that the subcommand's help lists; 2 with one line on stderr for bad input; 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

import trio_smc
from trio_smc.tools.commands import Command, load
from trio_smc.tools.output import BAD_INPUT, ToolError, print_error

__all__ = ["main", "parser"]

PROGRAM: Final = "trio-smc"
_INTERRUPTED: Final = 130
_WIDTH: Final = 90

_DESCRIPTION = """
Show the SMC-R connections of this user's processes, check servers, and run programs over SMC-R.

A running process that uses trio_smc has a control socket in the user's private directory
($XDG_RUNTIME_DIR/trio-smc, or /tmp/trio-smc-UID).  These commands query that socket.  Nothing
leaves the machine, and only the user receives answers.

The commands reasons, ladder, run, proxy, setup and teardown query no process.  The command check
also connects to the server that you name.
"""

_EPILOG = """
Exit codes:
  0    the command succeeded
  1    a process did not answer, and one line on stderr names it; some commands also have other
       reasons, which their help lists
  2    bad input, or the command failed: one line on stderr describes the problem
  130  interrupted by Ctrl-C

`trio-smc COMMAND --help` explains a command, with examples.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
      arguments: the arguments without the program's name; None: those of this process.
    """
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command: Command = options.command
    try:
        with contextlib.suppress(AttributeError):
            # The encoding of a pipe may lack some characters.
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        return command.run(options)
    except ToolError as error:
        print_error(f"{PROGRAM}: {error}")
        return error.code
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended; the interpreter must not write again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION.strip(),
        epilog=_EPILOG.strip(),
        formatter_class=_Formatter,
    )
    build = "compiled" if trio_smc.__compiled__ else "pure"
    version = f"%(prog)s {trio_smc.__version__} ({build})"
    whole.add_argument("--version", action="version", version=version)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in load():
        one = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=textwrap.dedent(command.DESCRIPTION).strip(),
            epilog=textwrap.dedent(command.EPILOG).strip(),
            formatter_class=_Formatter,
        )
        command.configure(one)
        one.set_defaults(command=command, parser=one)
    return whole


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line, like all other bad input.  Subcommands use this class, too."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print_error(f"{self.prog}: {message} (try {self.prog} --help)")
        sys.exit(BAD_INPUT)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps paragraphs as they are, and uses the same width everywhere."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_WIDTH)
