"""`trio-smc undrain`: put a drained RNIC or link group of running processes back into service."""

from __future__ import annotations

import argparse
from typing import Any, Final

from trio_smc.tools.commands.drain import add_subject, change_service

NAME = "undrain"
SUMMARY = "put a drained RNIC or link group back into service"
EMPTY: Final[list[Any]] = []
DESCRIPTION = """
Put an RNIC or a link group that `trio-smc drain` has taken out of service back into service, in
all running processes of this user, or in the process of --pid.  Link groups get links on the RNIC
again.
Without a drain the command has no effect.  Only the user of a process can do this.
"""
EPILOG = """
Examples:
  trio-smc undrain mlx5_0
  trio-smc undrain --group 3 --pid 4242

Exit codes: 0; 1 if a process did not answer; 2 if no process has the RNIC or the group, or for bad
input.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_subject(parser)


def run(options: argparse.Namespace) -> int:
    """End the drain, and print."""
    return change_service(options, "undrain", 0)
