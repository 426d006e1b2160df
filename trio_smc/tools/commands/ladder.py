"""`trio-smc ladder`: draw a capture as a ladder diagram."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from trio_smc._base.regular_file import open_regular_file
from trio_smc.capture.dissection import Seen, dissect
from trio_smc.capture.output_file import create
from trio_smc.capture.pcapng import DamagedCapture, read
from trio_smc.tools import ladder_svg, ladder_text
from trio_smc.tools.commands import add_json, exclude, positive_count
from trio_smc.tools.ladder import Ladder, Peer, address_text, read_ladders
from trio_smc.tools.ladder_text import details, kind, title
from trio_smc.tools.output import ToolError, print_json, print_line, print_problem, print_written
from trio_smc.tools.settings import path_argument

NAME = "ladder"
SUMMARY = "draw a capture as a ladder diagram"
DESCRIPTION = """
Draw the SMC-R messages and RDMA writes in FILE, a pcapng or pcap capture, as a ladder diagram in
the style of RFC 7609's figures: the client's peer on the left, the server's on the right, and one
arrow for each message.

FILE may come from `trio-smc capture`, from trio_smc.Config(capture=...), or from a tool such as
tcpdump, which sees the packets of the kernel's soft-RoCE.  A capture made by a stack of trio_smc
contains the RDMA writes of that stack, but not those of its peer.
"""
EPILOG = """
Columns: seconds since the first message; the TCP connection, numbered from 1 in the order of the
Proposals; the number of the link, which the server chose.

CDC messages: "prod 0:4096" is the producer cursor, after 0 wraps at offset 4096 of the ring; "cons"
is the consumer cursor.  Flags (RFC 7609, A.4):
B writer blocked, P urgent pending, U urgent present, R update requested, F failover validation;
D sending done, C connection closed, A abnormal close.

Examples:
  trio-smc ladder smc.pcapng
  trio-smc ladder smc.pcapng --connection 2 --svg second.svg
  trio-smc capture 4242 -o - --seconds 5 | trio-smc ladder -

Exit codes: 0; 1 if the capture contains no SMC-R; 2 if the capture is damaged, or for bad input.
The part before the damage is drawn, and one line on stderr describes the damage.
"""

_LIMIT: Final = 1000
"""The default of --limit.  Chosen."""
_MAX_MESSAGES: Final = 1_000_000
"""The largest number of messages that are read.  Chosen: a bound on memory."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", type=path_argument, metavar="FILE", help='a pcapng or pcap file; "-" is stdin'
    )
    shape = parser.add_mutually_exclusive_group()
    svg = shape.add_argument(
        "--svg",
        type=path_argument,
        metavar="OUT",
        help='write an SVG picture and print nothing; "-" is stdout',
    )
    json_ = add_json(shape)
    parser.add_argument(
        "--connection",
        type=positive_count,
        metavar="N",
        help="only the TCP connection with this number",
    )
    parser.add_argument(
        "--limit",
        type=positive_count,
        default=_LIMIT,
        metavar="N",
        help=f"the largest number of messages to draw; default: {_LIMIT}",
    )
    width = parser.add_argument(
        "--width", type=positive_count, default=100, metavar="N", help="columns; default: 100"
    )
    exclude(parser, width, svg, json_, why="only text has columns")


def run(options: argparse.Namespace) -> int:
    """Draw the diagram."""
    seen, damage = _read(Path(options.file))
    ladders = read_ladders(seen, options.connection)
    if options.json:
        print_json(_plain(ladders, seen, options.limit))
    elif options.svg is not None and ladders:
        drawn = ladder_svg.picture(ladders, start=seen[0].time, limit=options.limit)
        write(drawn, options.svg)
    elif ladders:
        _print(ladders, seen, options)
    if damage:
        sys.stdout.flush()
        raise ToolError(f"{options.file}: {damage}")
    if not ladders:
        which = "" if options.connection is None else f" of a connection {options.connection}"
        print_problem(f"{options.file} contains no SMC-R{which}")
        return 1
    return 0


def _print(ladders: Sequence[Ladder], seen: list[Seen], options: argparse.Namespace) -> None:
    remaining = options.limit
    for number, ladder in enumerate(ladders):
        if number:
            print_line()
        for line in ladder_text.draw(
            ladder, start=seen[0].time, limit=max(remaining, 0), width=options.width
        ):
            print_line(line)
        remaining -= len(ladder.rows)


def write(drawn: str, name: str) -> None:
    if name == "-":
        print(drawn)
        return
    try:
        with os.fdopen(create(name), "w", encoding="utf-8") as file:
            file.write(drawn)
    except OSError as error:
        raise ToolError(f"cannot write {name}: {error.strerror}") from error
    print_written(name, len(drawn.encode()))


def _plain(ladders: Sequence[Ladder], seen: list[Seen], limit: int) -> list[dict[str, Any]]:
    """The drawn messages as values for JSON."""
    found = []
    for ladder in ladders:
        rows, limit = ladder.rows[:limit], max(limit - len(ladder.rows), 0)
        messages = [
            {
                "seconds": (row.time - seen[0].time) / 1e9,
                "from": "client" if row.to_server else "server",
                "kind": kind(row.event),
                "title": title(row),
                "details": details(row),
                "connection": None if row.connection is None else row.connection.number,
                "link": row.link_number,
            }
            for row in rows
        ]
        sides = {"client": _side(ladder.client), "server": _side(ladder.server)}
        found.append({**sides, "messages": messages})
    return found


def _side(peer: Peer) -> dict[str, Any]:
    return {
        "peer_id": None if peer.peer_id is None else peer.peer_id.hex(),
        "addresses": [address_text(each) for each in peer.addresses],
    }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    # A descriptor of this process, as a shell passes for <(zcat smc.pcapng.gz), may be a pipe.
    is_inherited = path.parent == Path("/dev/fd")
    try:
        file = path.open("rb") if is_inherited else os.fdopen(open_regular_file(path), "rb")
    except ValueError as error:
        raise ToolError(f"{path}: {error}") from error
    with file:
        yield file


def _read(path: Path) -> tuple[list[Seen], str]:
    """Read a capture: its messages, and a description of the damage or ""."""
    seen: list[Seen] = []
    try:
        with _opened(path) as file:
            for each in dissect(read(file)):
                seen.append(each)
                if len(seen) >= _MAX_MESSAGES:
                    return seen, f"only the first {_MAX_MESSAGES} messages are read"
    except DamagedCapture as error:
        return seen, str(error)
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error
    return seen, ""
