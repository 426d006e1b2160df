"""`trio-smc run`: start a program whose TCP connections use SMC-R if possible."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from trio_smc.tools import site
from trio_smc.tools.commands import add_directory, check_directory, complete_program
from trio_smc.tools.output import ToolError, print_problem
from trio_smc.tools.settings import add_config, settings_of
from trio_smc.tools.supervisor import supervise

NAME = "run"
SUMMARY = "run an unmodified Trio or AnyIO program over SMC-R"
DESCRIPTION = """
Run PROGRAM, a Python program that uses Trio or AnyIO on Trio.  Its TCP connections use SMC-R if
both ends can, as after a call of `trio_smc.enable()`.  So do those of its Python child processes,
such as the workers of a server.  Nothing else about the program changes.

The Python that runs PROGRAM must have trio_smc installed.  Sockets that a program uses without
Trio stay TCP.  One line on stderr reports the first of these problems: a process of PROGRAM opens
connections with asyncio, the Python of a process has no trio_smc, or PROGRAM ends without having
used Trio.  With --require-smc each problem is an error, and ends PROGRAM.

If the connections with a peer are always short, the next ones use TCP, which takes less processor
time for them.  To turn this off, use --require-smc, or "learn_short = false" in the --config FILE.
A peer that requires SMC-R still gets SMC-R if it is on this host.  If such a peer is on another
host, it refuses the TCP connections: use --require-smc at both ends.

PROGRAM is a child process of this command, which forwards signals to PROGRAM and ends with its exit
code or by the same signal.
"""
EPILOG = """
Examples:
  trio-smc run -- hypercorn -k trio app:app
  trio-smc run --require-smc -- python client.py
  trio-smc run --config smc.toml -- python -m server
  trio-smc run --directory /run/app/smc -- python -m server

Without --config and --directory, PROGRAM uses the environment variables TRIO_SMC_CONFIG and
TRIO_SMC_DIRECTORY.  A directory that is missing is created.  If the directory of --directory cannot
be used, PROGRAM is not started; if another one cannot be used, a line on stderr says why.

The configuration file is TOML with the fields of trio_smc.Config:
  checkpoints = "strict"
  receive_buffer = 4194304
  assume = ["192.0.2.0/24", ["db.example", 5432]]

Exit codes: that of PROGRAM; with --require-smc 1 instead of 0 if a process of PROGRAM cannot use
SMC-R; 2 for bad input; 127 if there is no such program.
"""

_NOT_FOUND: Final = 127
"""The exit code if there is no such program, as that of a shell."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--require-smc", action="store_true", help="let connections fail that would stay on TCP"
    )
    parser.add_argument(
        "--report", action="store_true",
        help="at the end print the numbers and bytes of SMC-R and TCP connections, and the reasons "
        "for TCP",
    )  # fmt: skip
    add_config(parser)
    add_directory(parser)
    program = parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGUMENT…]"
    )
    complete_program(program)


def run(options: argparse.Namespace) -> int:
    """Run the program to its end."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ToolError("no program is given (trio-smc run [OPTIONS] -- PROGRAM)")
    # A wrong setting is an error of this command, before PROGRAM starts.
    problem = check_directory(settings_of(options, require_smc=options.require_smc or None))
    if problem is not None:
        print_problem(f"warning: {problem}")
    try:
        return supervise(
            program,
            _environment(options),
            require=options.require_smc,
            report=options.report,
        )
    except FileNotFoundError:
        raise ToolError(f"cannot start {program[0]}: no such program", _NOT_FOUND) from None
    except OSError as error:
        raise ToolError(f"cannot start {program[0]}: {error.strerror}") from error


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ)
    hook = str(Path(site.__file__).parent)
    existing = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{hook}{os.pathsep}{existing}" if existing else hook
    environment.pop("TRIO_SMC_REQUIRE", None)
    # PROGRAM may change its working directory before it imports Trio.
    if options.config is not None:
        environment["TRIO_SMC_CONFIG"] = str(Path(options.config).absolute())
    if options.directory is not None:
        environment["TRIO_SMC_DIRECTORY"] = str(options.directory)
    if options.require_smc:
        environment["TRIO_SMC_REQUIRE"] = "1"
    return environment
