"""`trio-smc setup`: let a group of users use the TCP option; run by root."""

from __future__ import annotations

import argparse

import trio_smc
from trio_smc.tools.output import ToolError, print_line
from trio_smc.tools.settings import path_argument

__all__ = ["DESCRIPTION", "EPILOG", "NAME", "SUMMARY", "configure", "run"]

NAME = "setup"
SUMMARY = "let users announce SMC-R by the TCP option (needs root)"
DESCRIPTION = """
Load the BPF program that adds the TCP option of RFC 7609, 3.1, to new connections of processes that
request the option, and let root and the members of a group request it.  The option announces SMC-R
to peers on other hosts.  The program stays loaded until `trio-smc teardown` or the next boot, so
run this command at boot.  If the program is loaded already, only the group changes.
"""
EPILOG = """
Examples:
  trio-smc setup --group smc                  members of the group "smc", on the whole system
  trio-smc setup --group smc --cgroup /sys/fs/cgroup/system.slice

Exit codes: 0 if the option is set up; 2 if that is not possible: one line on stderr has the reason.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--group",
        metavar="GROUP",
        help="group whose members may request it; default: only root",
    )
    parser.add_argument(
        "--cgroup", metavar="PATH", type=path_argument,
        help="only for processes in this cgroup or below it; default: all processes",
    )  # fmt: skip
    add_pin(parser)


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `setup` and `teardown` share."""
    default = trio_smc.Config().tcp_option
    parser.add_argument(
        "--pin", metavar="PATH", type=path_argument, default=default,
        help=f"directory of the BPF objects, as in the programs' Config(tcp_option=...); "
        f"default: {default}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Set up the TCP option."""
    try:
        made = trio_smc.set_up_tcp_option(
            group=options.group, cgroup=options.cgroup, pins=options.pin
        )
    except (OSError, ValueError) as error:
        raise ToolError(getattr(error, "strerror", None) or str(error)) from error
    users = "root" if options.group is None else f"root and the group {options.group}"
    state = "set up" if made else "was set up already"
    print_line(f"TCP option {state} in {options.pin}, for {users}")
    return 0
