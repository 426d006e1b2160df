"""`trio-smc run`: start a program whose TCP connections use SMC-R where they can."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from trio_smc import load_config
from trio_smc.tools import site
from trio_smc.tools.errors import ToolError

NAME = "run"
SUMMARY = "run an unmodified Trio or AnyIO program over SMC-R"
DESCRIPTION = """
Run PROGRAM, a Python program that uses Trio or AnyIO on Trio, so that its TCP connections use
SMC-R wherever both ends can, as `trio_smc.enable()` does.  Its Python children get it too, as a
server's worker processes.  Everything else about the program stays as it is.

The Python that runs PROGRAM must have trio_smc installed.  Sockets that a program uses without
Trio stay TCP.
"""
EPILOG = """
Examples:
  trio-smc run -- hypercorn -k trio app:app
  trio-smc run --require-smc -- python client.py
  trio-smc run --config smc.toml -- python -m server

The configuration file is TOML with the fields of trio_smc.Config:
  checkpoints = "strict"
  receive_buffer = 4194304
  assume = ["192.0.2.0/24", ["db.example", 5432]]

Exit codes: those of PROGRAM; 2 for bad input, 127 when there is no such program.
"""

_NOT_FOUND: Final = 127


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--require-smc", action="store_true", help="connections that would be TCP fail"
    )
    parser.add_argument("--config", metavar="FILE", help="settings in a TOML file")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGUMENT…]")


def run(options: argparse.Namespace) -> int:
    """Become the program."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ToolError("run: which program? (trio-smc run [OPTIONS] -- PROGRAM)")
    try:
        os.execvpe(program[0], program, _environment(options))
    except FileNotFoundError:
        raise ToolError(f"run: {program[0]} was not found", _NOT_FOUND) from None
    except OSError as error:
        raise ToolError(f"run: {program[0]}: {error.strerror}") from error


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ)
    ours = str(Path(site.__file__).parent)
    theirs = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ours}{os.pathsep}{theirs}" if theirs else ours
    environment.pop("TRIO_SMC_CONFIG", None)
    environment.pop("TRIO_SMC_REQUIRE", None)
    if options.config is not None:
        try:
            load_config(options.config)
        except ValueError as error:
            raise ToolError(str(error)) from error
        environment["TRIO_SMC_CONFIG"] = str(Path(options.config).absolute())
    if options.require_smc:
        environment["TRIO_SMC_REQUIRE"] = "1"
    return environment
