"""`trio-smc teardown`: undo `trio-smc setup`."""

from __future__ import annotations

import argparse

import trio_smc
from trio_smc.tools.commands.setup import add_pin
from trio_smc.tools.output import ToolError, print_line

__all__ = ["DESCRIPTION", "EPILOG", "NAME", "SUMMARY", "configure", "run"]

NAME = "teardown"
SUMMARY = "undo setup: remove the TCP option (needs root)"
DESCRIPTION = """
Undo `trio-smc setup`: remove the BPF program of the TCP option.  Open connections are not affected.
New connections do not have the option.
"""
EPILOG = """
Examples:
  trio-smc teardown
  trio-smc teardown --pin /sys/fs/bpf/other

Exit codes: 0 if the option is no longer set up; 2 if it could not be removed: one line on stderr
has the reason.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_pin(parser)


def run(options: argparse.Namespace) -> int:
    """Remove the TCP option."""
    try:
        removed = trio_smc.tear_down_tcp_option(pins=options.pin)
    except (OSError, ValueError) as error:
        raise ToolError(getattr(error, "strerror", None) or str(error)) from error
    print_line(f"TCP option {'removed from' if removed else 'was not set up in'} {options.pin}")
    return 0
