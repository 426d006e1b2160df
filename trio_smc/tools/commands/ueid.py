"""`trio-smc ueid`: list the UEIDs of SMC-R version 2 that are configured, and those in use."""

from __future__ import annotations

import argparse
from typing import Any, Final

import trio

import trio_smc
from trio_smc import Config
from trio_smc.tools.client import SilentProcesses, take_snapshots
from trio_smc.tools.commands import add_json, add_process, add_users, directories
from trio_smc.tools.output import ToolError, error_text, print_json, show, table
from trio_smc.tools.settings import add_config, settings_of

NAME = "ueid"
SUMMARY = "list the UEIDs for SMC-R version 2: configured, of the kernel, of running processes"
EMPTY: Final[dict[str, Any]] = {"settings": None, "kernel": None, "stacks": []}
DESCRIPTION = """
List the UEIDs (user-defined enterprise IDs): two hosts use SMC-R version 2 only if they have one in
common.  The list has those of the settings (Config(ueids=...)) with their origin, those that
`smcr ueid add` has given to the kernel of this host, and those that running processes of this user
offer.
"""
EPILOG = """
Examples:
  trio-smc ueid
  trio-smc ueid --json

To offer one: Config(ueids=("PLANT-7",)), or ueids = ["PLANT-7"] in the file of TRIO_SMC_CONFIG.
Config(ueids="kernel") offers those of the kernel.

Exit codes: 0; 1 if a process did not answer; 2 for bad input.
"""


COLUMNS: Final = ("SOURCE", "UEIDS")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_config(parser)
    add_process(parser)
    add_users(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Query the settings, the kernel and the stacks, and print."""
    directory, settings, silent = (
        directories(options),
        settings_of(options),
        SilentProcesses(),
    )
    configured = settings.config.ueids
    kernel = trio.run(_of_kernel)
    stacks = take_snapshots(
        directory, (), options.pid, required=options.pid is not None, silent=silent
    )
    found: dict[str, Any] = {
        "settings": {
            "ueids": configured if isinstance(configured, str) else list(configured),
            "origin": settings.origins["ueids"],
        },
        "kernel": kernel,
        "stacks": [{"pid": each.pid, "stack": each.stack, "ueids": each.ueids} for each in stacks],
    }
    if options.json:
        print_json(found)
        return silent.exit_code
    named = [configured] if isinstance(configured, str) else list(configured)
    rows: list[list[object]] = [
        [f"settings ({settings.origins['ueids']})", ", ".join(named) or "none: version 1 only"],
        ["kernel", "no SMC (modprobe smc)" if kernel is None else ", ".join(kernel) or "none"],
    ]
    rows += [
        [f"process {each.pid}", None if each.ueids is None else ", ".join(each.ueids) or "none"]
        for each in stacks
    ]
    show(table(COLUMNS, rows))
    return silent.exit_code


async def _of_kernel() -> list[str] | None:
    """The UEIDs of the kernel; None if it has no SMC."""
    config = Config(rnics=(), ueids="kernel", control=False, discovery="tcp-option")
    try:
        async with trio_smc.open_stack(config) as stack:
            return None if stack.ueids is None else list(stack.ueids)
    except OSError as error:
        raise ToolError(f"cannot open a stack: {error_text(error)}") from None
