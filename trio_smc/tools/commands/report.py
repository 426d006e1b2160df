"""`trio-smc report`: collect what a bug report needs in one file."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any, Final

from trio_smc.capture.output_file import create
from trio_smc.tools.bug_report import PARTS, archive, collect
from trio_smc.tools.client import INCOMPLETE, SilentProcesses, take_snapshots
from trio_smc.tools.commands import add_json, add_process, add_users, directories, private_directory
from trio_smc.tools.commands.rnic import read_ports
from trio_smc.tools.output import (
    ToolError,
    print_json,
    print_line,
    print_problem,
    show,
    size,
    table,
)
from trio_smc.tools.settings import add_config, path_argument, settings_of

NAME = "report"
SUMMARY = "collect what a bug report needs in one file"
EMPTY: Final[list[Any]] = []
DESCRIPTION = """
Collect the versions, the settings and their origins, and from all running processes of this user
the settings, counters, connections, link groups, RNICs, reasons for TCP and last events; also the
kernel and the RDMA devices.  List what was collected, and then write it to FILE, a compressed tar
archive of JSON files with mode 0600.  Without -o only list it.

The report has no data of connections, no command lines, and no environment variables except
TRIO_SMC_CONFIG, TRIO_SMC_DIRECTORY and XDG_RUNTIME_DIR.  It has addresses, peer IDs, UEIDs, names
of interfaces and paths: read it before you publish it.
"""
EPILOG = """
Examples:
  trio-smc report                          list what a report would contain
  trio-smc report -o smc-report.tar.gz
  tar -xzf smc-report.tar.gz               to read it

Exit codes: 0; 1 if a process did not answer, which the report names; 2 if the file cannot be
written, or for bad input.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "-o", "--output", type=path_argument, metavar="FILE",
        help="the file to create, with mode 0600; it replaces a file of this user",
    )  # fmt: skip
    add_config(parser)
    add_process(parser)
    add_users(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Collect, list, and write."""
    own = argparse.Namespace(**{**vars(options), "directory": None}) if options.user else options
    directory = private_directory(own)
    settings = settings_of(options)
    settings = replace(settings, config=replace(settings.config, directory=directory))
    silent = SilentProcesses()
    code, snapshots = 0, []
    try:
        required = options.pid is not None
        snapshots = take_snapshots(
            directories(options), PARTS, options.pid, required=required, silent=silent
        )
        problems = list(silent.last.values())
    except ToolError as error:
        if options.pid is not None:
            raise
        # A directory or a process that cannot be read is a reason to make a report.
        print_problem(error.line(options))
        code, problems = INCOMPLETE, [*silent.last.values(), str(error)]
    code = code or silent.exit_code
    files = collect(settings, snapshots, problems, read_ports())
    rows = [[each.name, size(len(each.data)), each.content] for each in files]
    if options.json:
        print_json(
            [{"file": each.name, "size": len(each.data), "content": each.content} for each in files]
        )
    else:
        show(table(("FILE", ">SIZE", "~CONTENT"), rows))
    if options.output is None:
        return code
    try:
        descriptor = create(options.output)
        with os.fdopen(descriptor, "wb") as file:
            file.write(archive(files))
    except OSError as error:
        text = f"cannot write {options.output}: {error.strerror}"
        raise ToolError(text) from error
    if not options.json:
        print_line(f"written: {options.output}")
    return code
