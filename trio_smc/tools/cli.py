"""The command `trio-smc`: runs the chosen subcommand, and prints an error as one line.

The subcommand decides the exit code, except 2 for bad input and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final, TextIO

import trio_smc
from trio_smc.tools.commands import Command, check_rules, load
from trio_smc.tools.output import (
    BAD_INPUT,
    PROGRAM,
    NoResult,
    ToolError,
    error_text,
    name_command,
    named_problems,
    print_error,
    print_json,
    print_problem,
    print_text,
)

__all__ = ["main", "parser"]

_INTERRUPTED: Final = 130
"""As a shell reports a program that SIGINT (signal 2) ended: 128 + 2."""
_WIDTH: Final = 90
"""Columns of the usage and of the list of options.  Chosen."""

_DESCRIPTION = """
Show the SMC-R connections of this user's processes, check servers, and run programs over SMC-R.

A running process that uses trio_smc has a control socket in the user's private directory
($XDG_RUNTIME_DIR/trio-smc, or /dev/shm/trio-smc-UID).  These commands query that socket.  Nothing
leaves the machine, and only the user receives answers; root may inspect other users (--user,
--all).

The commands reasons, ladder, run, proxy, setup and teardown query no process.  The command check
also connects to the server that you name.
"""

_EPILOG = """
Exit codes of all commands:
  0    the command succeeded; check: SMC-R is used
  1    a process did not answer, and one line on stderr names it (stats --prometheus ends with 0
       then); check: SMC-R is not used; drain: connections remain; ladder: the capture has no SMC-R;
       rnic --interface: no RNIC serves it; run --require-smc: a process of PROGRAM cannot use SMC-R
  2    bad input, or the command failed, with one line on stderr: no running process has a stack, no
       such process, no answer of the process of --pid, only damaged replies, no such directory,
       output that cannot be written
  127  run: there is no such program; otherwise run ends with the code or the signal of PROGRAM
  130  interrupted by Ctrl-C; capture, top, exporter, proxy and check --listen end with 0 then

`trio-smc COMMAND --help` explains a command, with examples.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
      arguments: the arguments without the name of the program; None: `sys.argv`.
    """
    with named_problems():
        try:
            return _written(_run(arguments))
        except SystemExit as exit_:  # argparse has printed help or an error
            code = exit_.code if isinstance(exit_.code, int) else BAD_INPUT
            raise SystemExit(_written(code)) from None


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options, unknown = parser().parse_known_args(arguments)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        check_rules(options)
        with contextlib.suppress(AttributeError):
            # The output's encoding may lack some characters, such as the arrow of `ss -v`.
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        return _run_command(options)
    except ToolError as error:  # help that cannot be written
        print_problem(error)
        return error.code
    except BrokenPipeError:
        return 0  # the reader of the pipe, such as `head`, has ended
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseExceptionGroup as group:  # of a nursery in the command's Trio run
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        return _INTERRUPTED


def _run_command(options: argparse.Namespace) -> int:
    command: Command = options.command
    name_command(options.parser.prog)
    try:
        return command.run(options)
    except ToolError as error:
        print_problem(error.line(options))
        if isinstance(error, NoResult) and getattr(options, "json", False):
            print_json(command.EMPTY)
        return error.code


def _written(code: int) -> int:
    """The exit code, after the buffered output was written; `BAD_INPUT` if that is impossible.

    Lines on stderr that cannot be written are lost, and do not change the exit code.
    """
    code = _with_output(code)
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except ValueError:
        pass  # stderr is closed
    except OSError:
        _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Drop what is buffered: at its exit the interpreter flushes again, and would fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _with_output(code: int) -> int:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:
        pass  # stdout is closed
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return code
        if code != BAD_INPUT:  # otherwise another line has described an error
            print_problem(f"cannot write the output: {error_text(error)}")
        return BAD_INPUT
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION.strip(),
        epilog=_EPILOG.strip(),
        formatter_class=_Formatter,
    )
    build = "compiled" if trio_smc.__compiled__ else "pure"
    version = f"%(prog)s {trio_smc.__version__} ({build}, {trio_smc.SoftRnic.variant})"
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
    """Prints a wrong argument as one line, without the usage.  Subcommands use this class, too."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print_error(f"{self.prog}: {message} (try {self.prog} --help)")
        sys.exit(BAD_INPUT)

    def _print_message(self, message: str, file: Any = None) -> None:
        # That of argparse ignores that the output cannot be written.
        if message and file is sys.stdout and file is not None:
            print_text(message)
        else:
            super()._print_message(message, file)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of paragraphs, and ignores the width of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_WIDTH)
