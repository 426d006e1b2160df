"""`trio-smc ss`: list the connections of running processes."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final, Literal, get_args

from trio_smc._base.printable import printable
from trio_smc.control.protocol import STATES
from trio_smc.tools.client import SilentProcesses, Snapshot, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    add_users,
    complete_words,
    directories,
    exclude,
    tcp_port,
)
from trio_smc.tools.output import (
    address,
    address_order,
    agreed,
    fallback_codes,
    gid,
    hexadecimal,
    mode_cell,
    network,
    plain,
    port_of,
    print_json,
    print_unused,
    show,
    size,
    table,
    user_name,
)
from trio_smc.tools.tables import Marked

NAME = "ss"
SUMMARY = "list connections: SMC-R or TCP, their state, and the reason for TCP"
EMPTY: Final[list[Any]] = []
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

The rows of a process are sorted: listeners first, then by local address and port, then by peer.

-v prints more about each connection: the network interface of its address, and the TCP ports of
both ends; for SMC-R the stack, the cursors of RFC 7609, 4.3, in bytes since the start of the
connection and as wrap:count, the flags of CDC messages (A.4; B: a sender waits for the window, D:
sending done, C: closed, A: abnormal close), the directions that are shut down (R: nothing more
arrives, W: nothing more is sent), the RNIC, its port (of a RoCE device; SMC-R does not transmit
that of the peer), the GIDs of both ends, the VLAN and the PNET table's interfaces of the link, the
version (for version 2 also the release, the UEID and the route), and counters.  For TCP: the
diagnosis words of both sides (RFC 7609, A.2.4), and a remedy.  With --json, -v adds the link groups
of each process and its network interfaces.
"""
EPILOG = """
Examples:
  trio-smc ss                  everything
  trio-smc ss --tcp            only TCP connections, with reasons
  trio-smc ss --port 7000 --state ACTIVE
  trio-smc ss --pid 4242 -v    one process, with cursors
  trio-smc ss --json           for scripts; docs/cli.md describes the fields

Exit codes: 0; 1 if a process did not answer; 2 if no process uses trio_smc, or for bad input.
"""

COLUMNS: Final = ("PID", "STATE", "MODE", ">RECV-Q", ">SEND-Q", "LOCAL", "PEER", "GROUP", "USER",
                  "PROGRAM", "FALLBACK")  # fmt: skip
Detail = Literal[
    "interface", "port", "stack", "sent", "received", "tx cursor", "rx cursor", "CDC", "flags",
    "link", "network", "version", "counters", "why TCP", "remedy",
]  # fmt: skip
"""The labels of the lines of -v."""
DETAILS: Final = get_args(Detail)
_LABEL: Final = max(map(len, DETAILS))
_LISTENING: Final = "listening"
_PROCESS: Final = ("pid", "stack", "release", "uptime", "uid", "program")
_MORE_PARTS: Final = ("link_groups", "interfaces")
"""The parts of the data that -v needs besides the connections; with --json it prints them."""
_MAX_PROGRAM: Final = 30
"""Characters of a program in the table.  Chosen."""
_COUNTERS = ("writes", "cdcs_sent", "cdcs_received", "coalesced", "window_stalls")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_process(parser)
    add_users(parser)
    add_json(parser)
    verbose = parser.add_argument(
        "-v", "--verbose", action="store_true",
        help="more about each connection",
    )  # fmt: skip
    parser.add_argument("--port", type=tcp_port, metavar="PORT",
                        help="only connections and listeners with this port")  # fmt: skip
    state = parser.add_argument(
        "--state", action="append", type=str.upper, metavar="STATE",
        help="only this state; can be repeated",
    )  # fmt: skip
    complete_words(state, STATES)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smc", dest="mode", action="store_const", const="smc-r",
                      help="only connections over SMC-R")  # fmt: skip
    mode.add_argument("--tcp", dest="mode", action="store_const", const="tcp",
                      help="only connections that stay on TCP")  # fmt: skip
    listening = mode.add_argument(
        "--listening", dest="mode", action="store_const",
        const=_LISTENING, help="only listeners",
    )  # fmt: skip
    exclude(parser, listening, verbose, why="-v describes connections")
    exclude(parser, listening, state, why="all listeners have the state LISTEN")


def run(options: argparse.Namespace) -> int:
    """Query the stacks, and print."""
    silent = SilentProcesses()
    wanted = ("connections", "listeners", *(_MORE_PARTS if options.verbose else ()))
    snapshots = take_snapshots(directories(options), wanted, options.pid, silent=silent)
    states = _states(snapshots)
    for snapshot in snapshots:
        _filter(snapshot, options)
        snapshot.listeners.sort(key=address_order)
        snapshot.connections.sort(key=_order)
    if options.json:
        names = (*_PROCESS, "connections", "listeners", *(_MORE_PARTS if options.verbose else ()))
        print_json([{**_only(each, names), "user": user_name(each.uid)} for each in snapshots])
    else:
        show(_table(snapshots))
    unused = sorted(set(options.state or ()) - states)
    print_unused("state", unused, "connection", sorted(states))
    if options.verbose and not options.json:
        for snapshot, connection in _connections(snapshots):
            show("", *_details(snapshot, connection))
    return silent.exit_code


def _only(snapshot: Snapshot, names: tuple[str, ...]) -> dict[str, Any]:
    everything = dataclasses.asdict(snapshot)
    return {name: everything[name] for name in names}


def _states(snapshots: list[Snapshot]) -> set[str]:
    """The states of all connections and listeners."""
    found = {plain(each["state"]) for snapshot in snapshots for each in snapshot.connections}
    return found | ({"LISTEN"} if any(each.listeners for each in snapshots) else set())


def _filter(snapshot: Snapshot, options: argparse.Namespace) -> None:
    """Remove what --smc, --tcp, --listening, --port and --state exclude."""
    port, states = options.port, options.state

    def is_wanted(state: Any, *ends: Any) -> bool:
        return (port is None or any(end and end[1] == port for end in ends)) and (
            states is None or state in states
        )

    snapshot.connections = [
        each
        for each in snapshot.connections
        if options.mode in (None, each["mode"])
        and is_wanted(each["state"], each["local"], each["peer"])
    ]
    snapshot.listeners = [
        each
        for each in snapshot.listeners
        if options.mode in (None, _LISTENING) and is_wanted("LISTEN", each)
    ]


def _order(connection: dict[str, Any]) -> tuple[object, ...]:
    """The key by which the connections of a process are sorted."""
    return address_order(connection["local"]), address_order(connection["peer"])


def _connections(snapshots: list[Snapshot]) -> list[tuple[Snapshot, dict[str, Any]]]:
    """The connections of each process, sorted.  A process may have several stacks."""
    found = [(snapshot, each) for snapshot in snapshots for each in snapshot.connections]
    return sorted(found, key=lambda each: (each[0].pid, _order(each[1])))


def _table(snapshots: list[Snapshot]) -> Any:
    return table(COLUMNS, list(_rows(snapshots)))


def _rows(snapshots: list[Snapshot]) -> Iterator[list[object]]:
    for pid, group in groupby(snapshots, key=lambda each: each.pid):
        stacks = list(group)
        owner = (user_name(stacks[0].uid), _short(stacks[0].program))
        listeners = [listener for each in stacks for listener in each.listeners]
        for listener in sorted(listeners, key=address_order):
            ends = (address(listener), None, None)
            yield [pid, "LISTEN", None, None, None, *ends, *owner, None]
        for _, each in _connections(stacks):
            yield [
                pid,
                each["state"],
                mode_cell(each["mode"] if each["version"] in (None, 1) else f"{each['mode']} v2"),
                each["receive_queue"],
                each["send_queue"],
                address(each["local"]),
                address(each["peer"]),
                _group_and_link(each),
                *owner,
                _fallback_cell(each["fallback"]),
            ]


def _short(program: str) -> str:
    """The name of a program: that of the script or module if Python runs it."""
    words = program.split()
    if words and os.path.basename(words[0]).startswith("python"):
        while len(words) > 1 and words[1].startswith("-") and words[1] not in ("-m", "-c"):
            del words[1]
        match words[1:]:
            case ["-m", module, *_]:
                return printable(module, _MAX_PROGRAM)
            case ["-c", "from", module, *_] if module.startswith("multiprocessing."):
                return "multiprocessing"  # a worker process
            case ["-c", *_]:
                return f"{words[0]} -c"
            case [script, *_]:
                return printable(os.path.basename(script), _MAX_PROGRAM)
    return printable(" ".join(words[:1]), _MAX_PROGRAM)


def _group_and_link(connection: dict[str, Any]) -> str | None:
    group = connection["link_group"]
    if group is None:
        return None
    link = connection["link"]
    return f"{group}, link {plain(link)}"


def _fallback_cell(fallback: dict[str, Any] | None) -> Marked | None:
    if fallback is None:
        return None
    return Marked(f"{plain(fallback['origin'])}: {plain(fallback['reason'])}", "warning")


def _detail(label: Detail, text: str) -> str:
    return f"  {label:{_LABEL}} {text}"


def _details(snapshot: Snapshot, connection: dict[str, Any]) -> Iterator[str]:
    ends = f"{address(connection['local'])} → {address(connection['peer'])}"
    yield f"pid {snapshot.pid}  {connection['mode']}  {ends}"
    yield _detail("interface", plain(_interface(snapshot, connection)))
    link = _link_of(snapshot, connection)
    ports = f"TCP {port_of(connection['local'])} → {port_of(connection['peer'])}"
    if connection["mode"] == "smc-r":
        yield _detail("port", f"{ports}; RNIC {plain(link and link['port'])}")
        yield _detail("stack", snapshot.stack)
    else:
        yield _detail("port", ports)
    if connection["cursors"] is not None:
        yield from _cursors(**connection["cursors"])
    if connection["mode"] == "smc-r":
        flags = plain(connection["flags_sent"]), plain(connection["flags_received"])
        yield _detail(
            "flags", f"sent {flags[0]}, received {flags[1]}; shut down {_shutdown(*flags)}"
        )
        if link is not None:
            yield _detail(
                "link", f"{plain(link['rnic'])}, {gid(link['gid'])} → {gid(link['peer_gid'])}"
            )
            yield _detail("network", network(link))
        yield _detail("version", agreed(**connection))
        statistics = connection["statistics"] or {}
        count = {name: plain(statistics.get(name)) for name in _COUNTERS}
        yield _detail(
            "counters",
            f"{count['writes']} RDMA writes, {count['cdcs_sent']} CDC messages sent, "
            f"{count['cdcs_received']} received, {count['coalesced']} omitted, "
            f"{count['window_stalls']} waits for the window",
        )
    fallback = connection["fallback"]
    if fallback is not None:
        yield _detail("why TCP", f"{plain(fallback['message'])} ({fallback_codes(fallback)})")
        yield _detail("remedy", plain(fallback["remedy"]))


def _cursors(
    *, produced: int | None, delivered: int | None, taken: int | None, window: int | None,
    peer_ring: int | None, received: int | None, consumed: int | None, ring: int | None,
    sequence_sent: int | None, sequence_received: int | None, alert_token: int | None,
    **_: object,
) -> Iterator[str]:  # fmt: skip
    yield _detail(
        "sent",
        f"{plain(produced)} written, {plain(delivered)} delivered, "
        f"{plain(taken)} consumed by the peer; window {size(window)} of {size(peer_ring)}",
    )
    yield _detail(
        "received", f"{plain(received)} arrived, {plain(consumed)} consumed; ring {size(ring)}"
    )
    token = None if alert_token is None else alert_token & 0xFFFFFFFF
    if produced is not None and taken is not None and received is not None and consumed is not None:
        sent = f"producer {_pair(produced, peer_ring)}, consumer {_pair(taken, peer_ring)}"
        yield _detail("tx cursor", sent)
        yield _detail(
            "rx cursor", f"producer {_pair(received, ring)}, consumer {_pair(consumed, ring)}"
        )
    yield _detail(
        "CDC",
        f"last completed {plain(sequence_sent)}, "
        f"last received {plain(sequence_received)}, alert token 0x{hexadecimal(token)}",
    )


def _pair(count: int, ring: int | None) -> str:
    """A cursor as wrap:count, as on the wire without an eye catcher (RFC 7609, A.4)."""
    if not ring or ring < 0:
        return plain(None)
    return f"{count // ring & 0xFFFF}:{count % ring}"


def _shutdown(sent: str, received: str) -> str:
    """The directions that are shut down, by the flags of both sides."""
    return ("R" if set(received) & set("DCA") else "") + (
        "W" if set(sent) & set("DCA") else ""
    ) or plain(None)


def _interface(snapshot: Snapshot, connection: dict[str, Any]) -> str | None:
    """The network interface with the local address; None if it is unknown."""
    local = connection["local"]
    if not local:
        return None
    host = str(local[0]).removeprefix("::ffff:").partition("%")[0]
    for each in snapshot.interfaces:
        if host in (each["addresses"] or ()):
            tag = "" if each["vlan"] is None else f", VLAN {each['vlan']}"
            return f"{plain(each['name'])}{tag}"
    return None


def _link_of(snapshot: Snapshot, connection: dict[str, Any]) -> dict[str, Any] | None:
    for group in snapshot.link_groups:
        if group["number"] == connection["link_group"]:
            for link in group["links"] or ():
                if link["number"] == connection["link"]:
                    return dict(link)
    return None
