"""`trio-smc capture`: write the messages of a running process to a file for Wireshark."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from trio_smc.capture.frames import MAX_PAYLOAD
from trio_smc.capture.output_file import create
from trio_smc.tools.client import stream_capture
from trio_smc.tools.commands import (
    add_directory,
    positive_seconds,
    private_directory,
    process_number,
    whole_number,
)
from trio_smc.tools.output import ToolError, print_written
from trio_smc.tools.settings import path_argument

NAME = "capture"
SUMMARY = "write the SMC-R messages of a running process to a file for Wireshark"
DESCRIPTION = """
Write every CLC, LLC and CDC message and every RDMA write of a running process to a pcapng file,
until Ctrl-C, until the process closes its stack, or for --seconds.  Wireshark's SMC dissector and
`trio-smc ladder` can read the file.

For each RDMA write the file contains the address, the length, and the first --payload bytes of the
data.
"""
EPILOG = """
Examples:
  trio-smc capture 4242 -o smc.pcapng
  trio-smc capture 4242 -o - | wireshark -k -i -
  trio-smc capture 4242 -o smc.pcapng --payload 64 --seconds 10

In Wireshark disable the protocol "rpcordma" (Analyze, Enabled Protocols).  Otherwise Wireshark
decodes the messages of SMC-R as RPC over RDMA.

Exit codes: 0; 2 if the process cannot be captured or the file cannot be written.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("pid", type=process_number, metavar="PID", help="the process")
    parser.add_argument(
        "-o",
        "--output",
        type=path_argument,
        required=True,
        metavar="FILE",
        help='the file to create, with mode 0600; it replaces a file of this user; "-" is stdout',
    )
    parser.add_argument(
        "--payload", type=whole_number("number of bytes", 0, MAX_PAYLOAD), default=0, metavar="N",
        help="bytes of each RDMA write to keep, at most 4096; default: 0",
    )  # fmt: skip
    parser.add_argument(
        "--stack",
        metavar="PEERID",
        help="the stack, as in `trio-smc lg`, if the process has several; without this option an "
        "error lists them",
    )
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        metavar="S",
        help="duration in seconds; default: until Ctrl-C",
    )
    add_directory(parser)


def run(options: argparse.Namespace) -> int:
    """Copy the capture to the output."""
    if options.output == "-" and sys.stdout.isatty():
        # The data may contain control sequences for the terminal.
        raise ToolError("cannot write binary data to a terminal; use -o FILE or a pipe")
    pieces = stream_capture(
        private_directory(options), options.pid, options.stack, options.payload, options.seconds
    )
    with contextlib.closing(pieces):
        first = next(pieces, None)  # an error must come before the file is created
        if first is None:
            raise ToolError(f"process {options.pid} has ended")
        written = 0
        try:
            with _output(options.output) as file:
                for piece in chain((first,), pieces):
                    written += file.write(piece)
        except KeyboardInterrupt:
            pass  # the normal end of a capture
        except BrokenPipeError:
            raise
        except OSError as error:
            text = f"cannot write {options.output}: {error.strerror}"
            raise ToolError(text) from error
    print_written(options.output, written)
    return 0


@contextlib.contextmanager
def _output(name: str) -> Iterator[BinaryIO]:
    """Open the output without a buffer, so that another program can read the file meanwhile."""
    if name == "-":
        yield os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        return
    with os.fdopen(create(name), "wb", buffering=0) as file:
        yield file
