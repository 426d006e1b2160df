"""`trio-smc lg`: list link groups, their links and RMBs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

from trio_smc.tools.client import SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import add_json, add_process, add_users, directories
from trio_smc.tools.output import (
    agreed,
    gid,
    hexadecimal,
    plain,
    print_json,
    print_unused,
    show,
    size,
    table,
)
from trio_smc.tools.tables import Table

NAME = "lg"
SUMMARY = "list link groups, their links, and their receive buffers (RMBs)"
EMPTY: Final[list[Any]] = []
DESCRIPTION = """
List the link groups of this user's running processes (RFC 7609, 2.2).  The connections to one peer
share a link group, and each of them sends on one of its links.

Columns:
  STACK       the peer ID of this side, which distinguishes the stacks of a process
  GROUP       the number of the link group within its stack, as in `trio-smc ss`
  ROLE        client or server: the role of this process in the first connection of the group
  PEER ID     the peer's ID, as in its CLC messages (RFC 7609, 2.2.1)
  VERSION     the version of SMC-R; for version 2 also the release, the common UEID, and the route
              between the RNICs of the two sides: "direct", or "gateway" if it crosses a router
  KIND        single: one link; asymmetric: two links that share the RNIC of one side (ASYML: of
              this side, ASYMP: of the peer); symmetric: two links without a common RNIC, so that
              the group survives the loss of any RNIC
  STATE       the state of the group, such as FORMING before the first link is confirmed; "drained"
              if `trio-smc drain` takes the group out of service
  LINK        the number of the link, which the server chose; LINK STATE: ACTIVE if it is usable
  USERS       the number of connections that send on the link
  USER ID     the link user IDs of this side and of the peer (A.3.1), as in the peer's tools
  RMBS        elements of the receive buffers (RMBs): in use, all, and the size of one

PID, STACK and GROUP together identify a link group.  -v adds a table with the network interface,
the VLAN, the interfaces in the PNET table, and the GIDs of both ends of each link.
"""
EPILOG = """
Examples:
  trio-smc lg
  trio-smc lg --pid 4242 --json
  trio-smc lg -v --device mlx5_0

Exit codes: 0; 1 if a process did not answer; 2 if no process uses trio_smc, or for bad input.
"""


COLUMNS: Final = ("PID", "STACK", ">GROUP", "ROLE", "PEER ID", "VERSION", "KIND", "STATE", ">LINK",
                  "LINK STATE", "RNIC", ">USERS", "USER ID", "RMBS")  # fmt: skip
MORE_COLUMNS: Final = ("PID", "STACK", ">GROUP", ">LINK", "RNIC", "NETDEV", ">VLAN", "PNET", "GID",
                       "PEER GID")  # fmt: skip
"""Those of the table of -v."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_users(parser)
    add_json(parser)
    parser.add_argument(
        "--device", metavar="NAME",
        help="only groups with a link on this RNIC, RDMA device or network interface",
    )  # fmt: skip
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also the GIDs and the network of each link"
    )


def run(options: argparse.Namespace) -> int:
    """Query the stacks, and print."""
    silent = SilentProcesses()
    snapshots = take_snapshots(directories(options), ("link_groups",), options.pid, silent=silent)
    if options.device is not None:
        devices = {name for each in snapshots for group in each.link_groups for name in _on(group)}
        if options.device not in devices:
            print_unused("device", [options.device], "link group", sorted(devices))
        for each in snapshots:
            each.link_groups = [group for group in each.link_groups if options.device in _on(group)]
    if options.json:
        print_json(
            [
                {"pid": s.pid, "stack": s.stack, "release": s.release, "link_groups": s.link_groups}
                for s in snapshots
            ]
        )
        return silent.exit_code
    rows = [
        row
        for snapshot in snapshots
        for group in snapshot.link_groups
        for row in _rows(snapshot, group)
    ]
    show(table(COLUMNS, rows))
    if options.verbose:
        show("", _networks(snapshots))
    return silent.exit_code


def _on(group: dict[str, Any]) -> set[str]:
    """The names of the RNICs, RDMA devices and network interfaces of the links of a group."""
    found: set[str] = set()
    for link in group["links"] or ():
        names = (link["netdev"], link["rnic"], str(link["rnic"]).partition("/")[0])
        found.update(plain(each) for each in (*names, *(link["pnet"] or ())) if each is not None)
    return found


def _networks(snapshots: Iterable[Snapshot]) -> Table:
    rows = [
        [
            snapshot.pid, snapshot.stack, group["number"], link["number"], link["rnic"],
            link["netdev"], link["vlan"], ", ".join(link["pnet"] or ()), gid(link["gid"]),
            gid(link["peer_gid"]),
        ]
        for snapshot in snapshots
        for group in snapshot.link_groups
        for link in group["links"] or ()
    ]  # fmt: skip
    return table(MORE_COLUMNS, rows)


def _rows(snapshot: Snapshot, group: dict[str, Any]) -> list[list[object]]:
    """The rows of one group: links and RMB sizes side by side.

    The columns of the group are filled in the first row only.
    """
    names = [
        *(group["number"], group["role"], group["peer_id"]),
        *(agreed(**group), _kind(group), _state(group)),
    ]
    links = [_link(link) for link in group["links"] or ()]
    if group["links"] is None:
        links = [[None] * 5]
    rmbs = _rmbs(group["rmbs"] or ())
    return [
        [
            *([snapshot.pid, snapshot.stack, *names] if not number else [" "] * 8),
            *(links[number] if number < len(links) else [" "] * 5),
            rmbs[number] if number < len(rmbs) else " " if number else None,
        ]
        for number in range(max(len(links), len(rmbs), 1))
    ]


def _kind(group: dict[str, Any]) -> str:
    """The kind; for an asymmetric group the side with one RNIC, as smcr names it."""
    side = {"local": " (ASYML)", "peer": " (ASYMP)"}.get(group["asymmetric_side"] or "", "")
    return f"{plain(group['kind'])}{side}"


def _state(group: dict[str, Any]) -> str:
    """The state; "SINGLE, drained" if an operator takes the group out of service."""
    return f"{plain(group['state'])}{', drained' if group['drained'] else ''}"


def _link(link: dict[str, Any]) -> list[object]:
    users = f"{hexadecimal(link['user_id'])} {hexadecimal(link['peer_user_id'])}"
    return [link["number"], link["state"], link["rnic"], link["connections"], users]


def _rmbs(rmbs: Iterable[dict[str, Any]]) -> list[str]:
    """The elements of all RMBs as text, one item for each element size."""
    sizes: dict[int | None, list[int | None]] = {}
    for rmb in rmbs:
        total = sizes.setdefault(rmb["element_size"], [0, 0])
        for place, name in enumerate(("in_use", "elements")):
            before, more = total[place], rmb[name]
            total[place] = None if before is None or more is None else before + more
    ordered = sorted(sizes.items(), key=lambda each: each[0] or 0)
    return [f"{plain(used)} of {plain(all_)} × {size(each)}" for each, (used, all_) in ordered]
