"""`trio-smc capture`: what a running process says and writes, into a file for Wireshark."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
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
from trio_smc.tools.output import ToolError

NAME = "capture"
SUMMARY = "capture a running process's messages for Wireshark"
DESCRIPTION = """
Write every CLC, LLC and CDC message and every RDMA write of a running process into a pcapng file,
until Ctrl-C, until the process's stack is closed, or for --seconds.  Wireshark's SMC dissector
and `trio-smc ladder` read it.

Of each RDMA write the file has address and length, and as much of its data as --payload says.
"""
EPILOG = """
Examples:
  trio-smc capture 4242 -o smc.pcapng
  trio-smc capture 4242 -o - | wireshark -k -i -
  trio-smc capture 4242 -o smc.pcapng --payload 64 --seconds 10

With Wireshark switch its protocol "rpcordma" off (Analyze, Enabled Protocols): it takes SMC-R's
messages for its own.

Exit codes: 0; 2 when the process cannot be captured or the file cannot be written.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("pid", type=process_number, metavar="PID", help="the process")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help='created new with mode 0600, in place of a file of yours; "-" is stdout',
    )
    parser.add_argument(
        "--payload", type=whole_number("number of bytes", 0, MAX_PAYLOAD), default=0, metavar="N",
        help="bytes of each RDMA write to keep, 4096 at most; default 0",
    )  # fmt: skip
    parser.add_argument(
        "--stack",
        metavar="PEERID",
        help="which, of a process with several; without it they are listed",
    )
    parser.add_argument(
        "--seconds", type=positive_seconds, metavar="S", help="how long; default: until Ctrl-C"
    )
    add_directory(parser)


def run(options: argparse.Namespace) -> int:
    """Copy what comes."""
    if options.output == "-" and sys.stdout.isatty():
        # The bytes of other processes could steer the terminal.
        raise ToolError("capture: a capture is no text for a terminal; use -o FILE, or a pipe")
    pieces = stream_capture(
        private_directory(options), options.pid, options.stack, options.payload, options.seconds
    )
    with contextlib.closing(pieces):
        first = next(pieces, None)  # before a file is touched
        if first is None:
            raise ToolError(f"capture: process {options.pid} ended")
        try:
            with _output(options.output) as file:
                file.write(first)
                for piece in pieces:
                    file.write(piece)
        except KeyboardInterrupt:
            return 0  # how captures end
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ToolError(f"capture: {options.output}: {error.strerror}") from error
    return 0


@contextlib.contextmanager
def _output(name: str) -> Iterator[BinaryIO]:
    """Unbuffered: the file can be read while it grows."""
    if name == "-":
        yield os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        return
    with os.fdopen(create(name), "wb", buffering=0) as file:
        yield file
