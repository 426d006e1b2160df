"""`trio-smc ss`: list the connections of running processes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from trio_smc.tools.client import SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import add_json, add_process, private_directory
from trio_smc.tools.output import (
    address,
    agreed,
    fallback_codes,
    hexadecimal,
    mode_cell,
    plain,
    print_json,
    show,
    size,
    table,
)
from trio_smc.tools.tables import Marked

NAME = "ss"
SUMMARY = "list connections: SMC-R or TCP, their state, and the reason for TCP"
DESCRIPTION = """
List the connections of this user's running processes, and the addresses on which they listen.

Columns:
  STATE     over SMC-R the state of RFC 7609, 4.8 (ACTIVE: open; INIT: the handshake is not
            finished; PEERCLOSEWAIT1: closed by this side; ...); over TCP the state of TCP;
            LISTEN: the address of a listening socket
  MODE      smc-r (version 1 of SMC-R), smc-r v2 (version 2), or tcp
  RECV-Q    bytes that have arrived, but that the program has not read
  SEND-Q    bytes sent that the peer has not consumed, as far as this side knows
  GROUP     the link group, numbered as in `trio-smc lg`, and the link within it
  FALLBACK  the reason for tcp: "local: ..." if this side decided, "peer: ..." if the peer did;
            `trio-smc reasons` explains each reason

-v prints more about each connection.  For SMC-R: the version (for version 2 also the release, the
UEID and the route), the cursors of RFC 7609, 4.3, in bytes since the start of the connection, and
counters.  For TCP: the diagnosis words of both sides (RFC 7609, A.2.4), and a remedy.
"""
EPILOG = """
Examples:
  trio-smc ss                  everything
  trio-smc ss --tcp            only TCP connections, with reasons
  trio-smc ss --pid 4242 -v    one process, with cursors
  trio-smc ss --json           for scripts; docs/cli.md describes the fields

Exit codes: 0; 1 if a process did not answer; 2 if no process uses trio_smc, or for bad input.
"""

_COUNTERS = ("writes", "cdcs_sent", "cdcs_received", "coalesced", "window_stalls")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_json(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="more about each connection")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smc", dest="mode", action="store_const", const="smc-r",
                      help="only connections over SMC-R")  # fmt: skip
    mode.add_argument("--tcp", dest="mode", action="store_const", const="tcp",
                      help="only connections that stay on TCP")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Query the stacks, and print."""
    silent = SilentProcesses()
    snapshots = take_snapshots(
        private_directory(options), ("connections", "listeners"), options.pid, silent=silent
    )
    for snapshot in snapshots:
        snapshot.connections = [
            each for each in snapshot.connections if options.mode in (None, each["mode"])
        ]
    if options.json:
        names = ("pid", "stack", "release", "uptime", "program", "connections", "listeners")
        print_json([_only(snapshot, names) for snapshot in snapshots])
    else:
        show(_table(snapshots, options.mode))
        if options.verbose:
            for snapshot in snapshots:
                for connection in snapshot.connections:
                    show("", *_details(snapshot, connection))
    return silent.exit_code


def _only(snapshot: Snapshot, names: tuple[str, ...]) -> dict[str, Any]:
    everything = dataclasses.asdict(snapshot)
    return {name: everything[name] for name in names}


def _table(snapshots: list[Snapshot], mode: str | None) -> Any:
    columns = ("PID", "STATE", "MODE", ">RECV-Q", ">SEND-Q", "LOCAL", "PEER", "GROUP", "FALLBACK")
    return table(columns, list(_rows(snapshots, mode)))


def _rows(snapshots: list[Snapshot], mode: str | None) -> Iterator[list[object]]:
    for snapshot in snapshots:
        if mode is None:
            for listener in snapshot.listeners:
                yield [snapshot.pid, "LISTEN", *(None,) * 3, address(listener), *(None,) * 3]
        for each in snapshot.connections:
            yield [
                snapshot.pid,
                each["state"],
                mode_cell(each["mode"] if each["version"] in (None, 1) else f"{each['mode']} v2"),
                each["receive_queue"],
                each["send_queue"],
                address(each["local"]),
                address(each["peer"]),
                _group_and_link(each),
                Marked(_fallback_text(each["fallback"]), "warning"),
            ]


def _group_and_link(connection: dict[str, Any]) -> str | None:
    group = connection["link_group"]
    if group is None:
        return None
    link = connection["link"]
    return f"{group}, link {plain(link)}"


def _fallback_text(fallback: dict[str, Any] | None) -> str | None:
    if fallback is None:
        return None
    return f"{plain(fallback['origin'])}: {plain(fallback['reason'])}"


def _details(snapshot: Snapshot, connection: dict[str, Any]) -> Iterator[str]:
    ends = f"{address(connection['local'])} → {address(connection['peer'])}"
    yield f"pid {snapshot.pid}  {connection['mode']}  {ends}"
    if connection["cursors"] is not None:
        yield from _cursors(**connection["cursors"])
    if connection["mode"] == "smc-r":
        yield f"  version   {agreed(**connection)}"
        statistics = connection["statistics"] or {}
        count = {name: plain(statistics.get(name)) for name in _COUNTERS}
        yield (
            f"  counters  {count['writes']} RDMA writes, {count['cdcs_sent']} CDC messages sent, "
            f"{count['cdcs_received']} received, {count['coalesced']} omitted, "
            f"{count['window_stalls']} waits for the window"
        )
    fallback = connection["fallback"]
    if fallback is not None:
        yield f"  why TCP   {plain(fallback['message'])} ({fallback_codes(fallback)})"
        yield f"  remedy    {plain(fallback['remedy'])}"


def _cursors(
    *, produced: int | None, delivered: int | None, taken: int | None, window: int | None,
    peer_ring: int | None, received: int | None, consumed: int | None, ring: int | None,
    sequence_sent: int | None, sequence_received: int | None, alert_token: int | None,
    **_: object,
) -> Iterator[str]:  # fmt: skip
    yield (
        f"  sent      {plain(produced)} written, {plain(delivered)} delivered, "
        f"{plain(taken)} consumed by the peer; window {size(window)} of {size(peer_ring)}"
    )
    yield f"  received  {plain(received)} arrived, {plain(consumed)} consumed; ring {size(ring)}"
    token = None if alert_token is None else alert_token & 0xFFFFFFFF
    yield (
        f"  CDC       last completed {plain(sequence_sent)}, "
        f"last received {plain(sequence_received)}, alert token 0x{hexadecimal(token)}"
    )
