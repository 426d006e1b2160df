"""`trio-smc drain`: take an RNIC or a link group of running processes out of service.

The stack does the work (`trio_smc.Stack.drain_rnic`, `drain_link_group`).  Only the user of a
process may change its service: each side checks the other's user by SO_PEERCRED.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final, Literal

from trio_smc._base.release import RELEASE
from trio_smc.tools.client import INCOMPLETE, SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    need,
    positive_count,
    positive_seconds,
    private_directory,
)
from trio_smc.tools.output import NoResult, ToolError, plain, print_json, print_line

NAME = "drain"
SUMMARY = "take an RNIC or a link group out of service, without losing data"
EMPTY: Final[list[Any]] = []
DESCRIPTION = """
Take an RNIC out of service in all running processes of this user, or in the process of --pid: open
connections move to links on other RNICs, and then the links of this RNIC are deleted in order
(RFC 7609, 3.5.5.1.3, 4.6).  New connections use other RNICs; without another RNIC they are TCP,
with the reason rnic-down.  Connections whose peer cannot be reached over another RNIC stay until
they end.

With --group take a link group out of service: no new connection uses the group, open ones stay
until they end, and then the group is terminated (3.5.4).  If the process is the client of the
group, new connections with that peer are TCP meanwhile, because the server chooses the group.

The command waits until no link uses the RNIC or the group, for at most --timeout seconds.  After
that it stays drained: trio-smc undrain ends the drain.  Only the user of a process can do this.
"""
EPILOG = """
Examples:
  trio-smc drain mlx5_0                 before the cable is pulled
  trio-smc drain mlx5_0 --pid 4242 --timeout 60
  trio-smc drain --group 3 --pid 4242

Exit codes: 0; 1 if connections still use the RNIC or the group, or a process did not answer; 2 if
no process has the RNIC or the group, or for bad input.
"""

_INTERVAL: Final = 0.2
"""Seconds between two queries while connections leave.  Chosen."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_subject(parser)
    parser.add_argument(
        "--timeout", type=positive_seconds, default=10.0, metavar="SECONDS",
        help="how long to wait for open connections; default: 10",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Drain, wait, and print."""
    return change_service(options, "drain", options.timeout)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name an RNIC or a link group."""
    parser.add_argument("rnic", metavar="RNIC", nargs="?", help="the name, as in `trio-smc rnic`")
    group = parser.add_argument(
        "--group", type=positive_count, metavar="N",
        help="a link group instead, by its number in `trio-smc lg`; needs --pid",
    )  # fmt: skip
    parser.add_argument(
        "--stack",
        metavar="PEERID",
        help="the stack, as in `trio-smc lg`, if the process has several",
    )
    pid = add_process(parser)
    add_json(parser)
    need(parser, group, pid, why="each stack numbers its own link groups")


def change_service(
    options: argparse.Namespace, change: Literal["drain", "undrain"], seconds: float
) -> int:
    """Send the request to each stack, wait for at most so many ``seconds``, and print."""
    if (options.rnic is None) is (options.group is None):
        options.parser.error("name one RNIC, or one link group with --group")
    directory, silent = private_directory(options), SilentProcesses()
    subject: dict[str, Any] = (
        {"rnic": options.rnic} if options.group is None else {"link_group": options.group}
    )
    stack = _stack(directory, options, silent)
    more = subject if stack is None else {**subject, "stack": stack}
    answers = take_snapshots(directory, (change,), options.pid, silent=silent, more=more)
    done = [each for each in answers if each.drain is not None]
    if not done:
        raise NoResult(_nothing(options, answers, change, silent))
    left = _wait(directory, options, done, seconds) if change == "drain" else {}
    _print(options, subject, change, done, left)
    return INCOMPLETE if left else silent.exit_code


def _name(options: argparse.Namespace) -> str:
    return options.rnic if options.group is None else f"link group {options.group}"


def _nothing(
    options: argparse.Namespace, answers: list[Snapshot], change: str, silent: SilentProcesses
) -> str:
    kind = "RNIC " if options.group is None else ""
    name = f"{kind}{plain(_name(options))}"
    text = f"no process {'that answers ' * bool(silent.last)}has {'an ' if kind else ''}{name}"
    if options.pid is not None:
        text = f"process {options.pid} has no {name}"
        if [each.pid for each in answers if each.release != RELEASE]:
            return f"{text}, or is of another release that does not know {change}"
    others = [str(each.pid) for each in answers if each.release != RELEASE]
    if others:
        text += f"; another release, which may not know {change}, runs in {', '.join(others)}"
    return text


def _stack(directory: Path, options: argparse.Namespace, silent: SilentProcesses) -> str | None:
    """The peer ID of the stack to change; None: all that have the RNIC."""
    if options.stack is not None:
        return str(options.stack).lower()
    if options.group is None:
        return None
    found = take_snapshots(directory, ("link_groups",), options.pid, silent=silent)
    having = [
        each.stack
        for each in found
        if any(group["number"] == options.group for group in each.link_groups)
    ]
    if len(having) > 1:
        text = ", ".join(sorted(having))
        raise ToolError(f"several stacks have link group {options.group} (--stack): {text}")
    return having[0] if having else None


def _wait(
    directory: Path, options: argparse.Namespace, done: list[Snapshot], seconds: float
) -> dict[str, int]:
    """Wait until nothing uses the RNIC or the link group.

    Returns the number of connections that still use it, by the peer ID of the stack.
    """
    deadline = time.monotonic() + seconds
    wanted = {each.stack for each in done}
    while True:
        left = {}
        quiet = SilentProcesses(quiet=True)
        for each in take_snapshots(
            directory, ("link_groups",), options.pid, required=False, silent=quiet
        ):
            if each.stack in wanted:
                users = _users(options, each)
                if users is not None:
                    left[each.stack] = users
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_INTERVAL)


def _users(options: argparse.Namespace, snapshot: Snapshot) -> int | None:
    """The connections on the RNIC or in the link group; None if no link uses it any more."""
    links = [
        link
        for group in snapshot.link_groups
        for link in group["links"] or ()
        if link["rnic"] == options.rnic or group["number"] == options.group
    ]
    return sum(link["connections"] or 0 for link in links) if links else None


def _print(
    options: argparse.Namespace, subject: dict[str, Any], change: str, done: list[Snapshot],
    left: dict[str, int],
) -> None:  # fmt: skip
    if options.json:
        print_json([
            {
                "pid": each.pid, "stack": each.stack, "release": each.release, **subject,
                "done": each.stack not in left, "connections": left.get(each.stack, 0),
            }
            for each in done
        ])  # fmt: skip
        return
    for each in done:
        text = f"process {each.pid}: {_name(options)}"
        if change == "undrain":
            print_line(f"{text} is in service")
        elif each.stack not in left:
            print_line(f"{text} is drained: no link uses it")
        else:
            print_line(
                f"{text} takes no new connections; open ones that still use it: {left[each.stack]}"
            )
