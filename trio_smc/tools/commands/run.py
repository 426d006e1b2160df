"""`trio-smc run`: start a program whose TCP connections use SMC-R if possible."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path
from typing import Final

from trio_smc import load_config
from trio_smc._base.regular_file import read_regular_file
from trio_smc.tools import site
from trio_smc.tools.output import ToolError
from trio_smc.tools.supervisor import supervise

NAME = "run"
SUMMARY = "run an unmodified Trio or AnyIO program over SMC-R"
DESCRIPTION = """
Run PROGRAM, a Python program that uses Trio or AnyIO on Trio, so that its TCP connections use
SMC-R if both ends can, as with `trio_smc.enable()`.  This includes its Python child processes,
such as a server's workers.  Nothing else about the program changes.

The Python that runs PROGRAM must have trio_smc installed.  Sockets that a program uses without
Trio stay TCP.  If a process of PROGRAM opens connections with asyncio or has a Python without
trio_smc, or if PROGRAM ends without having used Trio, one line on stderr reports it.  With
--require-smc this is an error, and ends PROGRAM.

Peers whose connections are always short get TCP (learn_short of trio_smc.Config), unless
--require-smc or FILE turns this off, or the peer requires SMC-R and is on this host.  A peer on
another host that requires SMC-R refuses TCP: use --require-smc at both ends, or
learn_short = false.

PROGRAM is a child process of this command, which forwards signals and ends as PROGRAM does.
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

Exit codes: those of PROGRAM; with --require-smc 1 instead of 0 if a process of it cannot use
SMC-R; 2 for bad input, 127 if there is no such program.
"""

_NOT_FOUND: Final = 127
_MAX_FILE: Final = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--require-smc", action="store_true", help="connections that would be TCP fail"
    )
    parser.add_argument(
        "--report", action="store_true",
        help="at the end print the numbers of SMC-R and TCP connections, reasons, and bytes",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="settings in a TOML file")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGUMENT…]")


def run(options: argparse.Namespace) -> int:
    """Run the program to its end."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ToolError("run: no program is given (trio-smc run [OPTIONS] -- PROGRAM)")
    try:
        return supervise(
            program,
            _environment(options),
            require=options.require_smc,
            report=options.report,
        )
    except FileNotFoundError:
        raise ToolError(f"run: cannot start {program[0]}: no such program", _NOT_FOUND) from None
    except OSError as error:
        raise ToolError(f"run: cannot start {program[0]}: {error.strerror}") from error


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ)
    hook = str(Path(site.__file__).parent)
    existing = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{hook}{os.pathsep}{existing}" if existing else hook
    for name in ("CONFIG", "LEARN", "REQUIRE"):
        environment.pop(f"TRIO_SMC_{name}", None)
    learn = not options.require_smc
    if options.config is not None:
        try:
            config = load_config(options.config)
            sets_learn_short = "learn_short" in _settings(options.config)
        except ValueError as error:
            raise ToolError(str(error)) from error
        path = Path(options.config).absolute()
        environment["TRIO_SMC_CONFIG"] = str(path)
        learn = learn and not config.require_smc and not sets_learn_short
    if options.require_smc:
        environment["TRIO_SMC_REQUIRE"] = "1"
    if learn:
        environment["TRIO_SMC_LEARN"] = "1"
    return environment


def _settings(path: str) -> dict[str, object]:
    """The keys and values of a TOML file that `load_config` accepts."""
    try:
        return tomllib.loads(read_regular_file(path, _MAX_FILE).decode())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
