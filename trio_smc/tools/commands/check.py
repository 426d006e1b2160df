"""`trio-smc check`: connect to a host and port, and explain why SMC-R is used or not."""

from __future__ import annotations

import argparse
import ipaddress
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

import trio_smc
from trio_smc import Config, Fallback, FallbackReason, Mode, Origin, ProtocolError, SmcStream
from trio_smc.control.protocol import DirectoryUnusable, PrivateDirectory
from trio_smc.tools.check_server import serve
from trio_smc.tools.client import SilentProcesses, take_snapshots
from trio_smc.tools.commands import (
    add_directory,
    add_json,
    exclude,
    need,
    positive_count,
    positive_seconds,
    private_directory,
    tcp_port,
    whole_number,
    why_no_software_rnic,
)
from trio_smc.tools.output import (
    ToolError,
    address,
    agreed,
    diagnosis,
    error_text,
    mode_cell,
    plain,
    print_json,
    show,
    table,
)
from trio_smc.tools.processes import explain_container, explain_listener
from trio_smc.tools.settings import add_config, changed, described, settings_of, value_text
from trio_smc.tools.tables import Marked
from trio_smc.wire import clc, llc
from trio_smc.wire.fields import eid_name

NAME = "check"
SUMMARY = "connect to a server, and report if SMC-R is used, or why not"
DESCRIPTION = """
Connect to a server as a program with trio_smc would, show each step, and report if SMC-R is used.
If SMC-R is not used, report the step that failed, the reason, the side that decided, and a remedy.

The command opens a real connection to the server, and closes it without sending data.  If the
server is another process of this user, the command also shows the server's view of the connection.
If the server is on this host and does not speak SMC-R, the command shows what the system reveals
about the server: its user, private directory, network namespace and program.

With --listen PORT the command is a test server instead: it listens, and prints the mode of each
connection, until Ctrl-C.  It discards what clients send.

The settings are those of a program without a Config of its own: --config, --directory and the
environment variables TRIO_SMC_CONFIG and TRIO_SMC_DIRECTORY.  The last lines show each setting that
is not the default, and its origin.

Steps:

  resolve    the addresses of the name
  RNICs      the RNICs that this side can use
  UEIDs      the UEIDs (user-defined enterprise IDs) for SMC-R version 2, if an RNIC supports this
             version: those of --ueid, else those of this host's kernel
  connect    the TCP connection
  discovery  whether this side found out that the server speaks SMC-R, before any CLC message
  CLC        messages on the TCP connection: Proposal, Accept, Confirm, or Decline with a
             diagnosis word (RFC 7609, 3.5)
  LLC        messages on the new link, at the first contact of two peers
  mode       the result
"""
EPILOG = """
Examples:
  trio-smc check localhost 7000
  trio-smc check db.example.net 5432 --discovery assume
  trio-smc check db.example.net 5432 --ueid PLANT-7
  trio-smc check ::1 7000 --json
  trio-smc check --listen 7000              on one host, and on another host:
  trio-smc check server.example.net 7000

--discovery assume sends a Proposal without discovery.  Use this only for servers that speak SMC-R:
any other server receives the Proposal as data.  Over soft-RoCE the Linux kernel supports only
version 2, and declines a client that has no UEID in common with it.

Exit codes:
  0  SMC-R is used; the test server was ended
  1  SMC-R is not used: the connection is TCP, or failed
  2  bad input: the host is unknown, --directory is not a directory, ...
"""

_TIMEOUT: Final = 15.0
"""Seconds for the whole check.  Chosen."""
_NO_SMC_R: Final = 1
"""The exit code if the connection does not use SMC-R."""
_NOT_APPLIED: Final = ("require_smc", "capture", "capture_payload", "log_events")
"""Settings that the check shows and does not apply: they do not change the handshake, and the first
would hide its result."""
RETRY_INTERVAL: Final = 0.1
"""Seconds between two queries of the server's view.  Chosen."""
_MAX_TRIES: Final = 30
"""Queries of the server's view.  Chosen: 3 seconds in all."""
_CLOSE_TIMEOUT: Final = 0.5
"""Seconds that closing the stack may wait for the server.  Chosen."""
_EXPLAINED_BY_LISTENER: Final = (
    FallbackReason.PEER_NOT_CAPABLE,
    FallbackReason.OTHER_USER,
    FallbackReason.PATH_NOT_PROVEN,
    FallbackReason.NO_RNIC,
)
"""Local reasons whose cause may be the listener's process, which is examined then."""

_DIRECTORY: Final = (FallbackReason.DIRECTORY_UNUSABLE, FallbackReason.OTHER_USER)
"""Reasons whose cause may be that the private directory cannot be made."""


@dataclass(slots=True)
class Step:
    """One step of the check.

    Attributes:
      name: the name of the step, as in ``--help``.
      verdict: "ok", "no" if SMC-R is not used because of this step, or "info".
      text: the details.
    """

    name: str
    verdict: str
    text: str


@dataclass(slots=True)
class Report:
    """The result of a check."""

    host: str
    port: int
    mode: str | None = None
    variant: str | None = None
    """The variant of this side's software RNIC; None unless the connection uses one."""
    ueids: list[str] = field(default_factory=list)
    """The UEIDs of this side, with which version 2 is offered."""
    steps: list[Step] = field(default_factory=list)
    fallback: dict[str, Any] | None = None
    directory: str | None = None
    """The problem of the private directory; None if there is none."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Name, value and origin of each field of `Config`."""
    server: dict[str, Any] | None = None
    """The server's view of the connection, as in `trio-smc ss --json`, with its process number and
    UEIDs; None unless the server is a process of this user."""
    listener: dict[str, Any] | None = None
    """Why the listener does not use SMC-R (the fields of `processes.Obstacle`); None unless the
    listener is on this host."""

    def add(self, name: str, verdict: str, text: str) -> None:
        """Add a step."""
        self.steps.append(Step(name, verdict, text))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("host", metavar="HOST", type=_host, nargs="?",
                        help="name or address of the server; with --listen the address to listen "
                        "on")  # fmt: skip
    port = parser.add_argument(
        "port", metavar="PORT", type=tcp_port, nargs="?",
        help="TCP port of the server",
    )  # fmt: skip
    listen = parser.add_argument(
        "--listen", metavar="PORT", type=whole_number("TCP port", 0, 65535),
        help="be a test server on this port; 0: a free port",
    )  # fmt: skip
    count = parser.add_argument(
        "--count", type=positive_count, metavar="N",
        help="with --listen: end after N connections",
    )  # fmt: skip
    need(parser, count, listen, why="a test server counts connections")
    exclude(parser, listen, port, why="it has a port of its own; HOST is the address to listen on")
    parser.add_argument("--discovery", choices=("auto", "assume", "tcp-option"),
                        help="how to find out that the server speaks SMC-R, as "
                        "Config(discovery=...); default: auto")  # fmt: skip
    parser.add_argument("--ueid", action="append", metavar="NAME",
                        help="offer SMC-R version 2 with this UEID, as Config(ueids=...); can be "
                        "repeated; default: kernel, the UEIDs of this host's kernel")  # fmt: skip
    parser.add_argument("--timeout", type=positive_seconds, metavar="SECONDS",
                        help="limit for the whole check; default: 15, and none with "
                        "--listen")  # fmt: skip
    add_config(parser)
    add_directory(parser)
    add_json(parser)


def _host(text: str) -> str:
    """A name or an address.  An IPv6 address may be in brackets, as before a port."""
    inner = text.removeprefix("[").removesuffix("]")
    return inner if text == f"[{inner}]" and ":" in inner else text


def run(options: argparse.Namespace) -> int:
    """Connect, and print the result; or serve."""
    if options.listen is None and (options.host is None or options.port is None):
        missing = "PORT" if options.host else "HOST, PORT"
        options.parser.error(f"the following arguments are required: {missing}")
    directory = private_directory(options)  # a stack would create a missing one
    settings = settings_of(
        options,
        discovery=options.discovery,
        ueids=("kernel" if options.ueid == ["kernel"] else tuple(options.ueid))
        if options.ueid
        else None,
    )
    if options.listen is not None:
        serve(
            options.host, options.listen, settings.config,
            as_json=options.json, count=options.count, seconds=options.timeout or math.inf,
        )  # fmt: skip
        return 0
    values = {
        name: getattr(settings.config, name)
        for name, origin in settings.origins.items()
        if origin != "default" and name not in _NOT_APPLIED
    }
    config = Config(
        **{
            **values,
            "directory": directory,
            "discovery": settings.config.discovery,
            "ueids": settings.config.ueids or "kernel",
            "control": False,
            # The server may never close its side, so do not wait for that.
            "shutdown_timeout": _CLOSE_TIMEOUT,
        }
    )
    options.timeout = options.timeout or _TIMEOUT
    report = Report(
        options.host, options.port, settings=described(settings), directory=_problem_of(directory)
    )
    trio.run(_check, report, config, options)
    why = report.fallback
    if report.directory is None and why is not None and why["reason"] in _DIRECTORY:
        report.directory = _problem_of(directory, create=True)
    if options.json:
        print_json(asdict(report))
    else:
        _print(report)
    return 0 if report.mode == Mode.SMC_R else _NO_SMC_R


def _problem_of(directory: Path, *, create: bool = False) -> str | None:
    """The problem of the private directory, with a remedy; None if it has none.

    create: make a missing directory, as a stack does; otherwise a missing one is no problem.
    """
    try:
        PrivateDirectory.open(directory, create=create).close()
    except FileNotFoundError:
        return None
    except (OSError, DirectoryUnusable) as error:
        return str(error)
    return None


async def _check(report: Report, config: Config, options: argparse.Namespace) -> None:
    with trio.move_on_after(options.timeout) as scope:
        await _resolve(report)
        try:
            async with trio_smc.open_stack(config) as stack:
                await _check_rnics(report, stack)
                _check_ueids(report, stack, requested=bool(options.ueid))
                await _connect(report, stack, config.private_directory())
        except OSError as error:
            raise ToolError(f"cannot open a stack: {error_text(error)}") from None
    if scope.cancelled_caught:
        report.add("time", "no", f"not finished after {options.timeout:g} seconds")


async def _check_rnics(report: Report, stack: trio_smc.Stack) -> None:
    """Add the step "RNICs", with the error if a stack must have a software RNIC and has none."""
    names = [f"{each.name} ({each.kind})" for each in stack.rnics]
    text = ", ".join(names) or "no RNIC can be opened"
    if stack.config.rnics == "auto" and all(each.kind != "software" for each in stack.rnics):
        why = await why_no_software_rnic(stack.config)
        text += f"; no software RNIC: {why}" if why is not None else ""
    report.add("RNICs", "ok" if names else "no", text)


def _check_ueids(report: Report, stack: trio_smc.Stack, *, requested: bool) -> None:
    """Add the step "UEIDs", unless no RNIC supports version 2 and none was requested."""
    has_v2_rnic = any(rnic.routable for rnic in stack.rnics)
    if not requested and not has_v2_rnic:
        return
    report.ueids = list(stack.ueids or ())
    if stack.ueids:
        names = ", ".join(stack.ueids)
        if has_v2_rnic:
            report.add("UEIDs", "ok", names)
        else:
            report.add("UEIDs", "no", f"{names}, but none of these RNICs supports version 2")
    else:
        why = "has no SMC (modprobe smc)" if stack.ueids is None else "has no UEID (smcr ueid add)"
        verdict = "no" if requested else "info"
        report.add(
            "UEIDs",
            verdict,
            f"the kernel {why}, so version 2 is not offered; --ueid NAME offers it",
        )


async def _resolve(report: Report) -> None:
    try:
        found = await trio.socket.getaddrinfo(
            report.host, report.port, type=trio.socket.SOCK_STREAM
        )
    except OSError as error:
        raise ToolError(f"{report.host!r} has no address: {error_text(error)}") from None
    except UnicodeError:
        raise ToolError(f"{report.host!r} has no address: it is not a host name") from None
    names = dict.fromkeys(str(entry[4][0]) for entry in found)
    report.add("resolve", "ok", ", ".join(names))


async def _connect(report: Report, stack: trio_smc.Stack, directory: Path) -> None:
    messages = _Messages(report)
    stack.add_observer(messages)
    try:
        stream = await stack.open_stream(report.host, report.port)
    except OSError as error:
        step = "handshake" if messages.seen else "connect"
        report.add(step, "no", error_text(error))
        return
    async with stream:
        ours, theirs = _ends(stream)
        ends = f"{address(list(ours[:2]))} → {address(list(theirs[:2]))}"
        # This step belongs before the steps of the messages.
        report.steps.insert(messages.first, Step("connect", "ok", ends))
        report.mode = stream.mode.value
        if not messages.seen:
            text = "no CLC message was sent" if stream.fallback else "done"
            report.steps.insert(messages.first + 1, Step("discovery", "no", text))
        else:
            text = "the server speaks SMC-R" if stack.config.discovery == "auto" else "assumed"
            report.steps.insert(messages.first + 1, Step("discovery", "ok", text))
        _conclude(report, stream, messages.offered_v2)
        report.server = await _server_view(ours, theirs, directory)
        here, there = _normalized(ours), _normalized(theirs)
        why = stream.fallback
        needs_listener = (
            why is not None and why.origin is Origin.LOCAL and why.reason in _EXPLAINED_BY_LISTENER
        )
        if needs_listener and report.server is None and here and there:
            # At the timeout the thread is abandoned, because another process can make reading its
            # files in /proc slow.
            explain = (
                partial(explain_listener, *there, directory, here)
                if here[0] == there[0] or ipaddress.ip_address(there[0]).is_loopback
                else partial(explain_container, *there, directory)
            )
            found = await trio.to_thread.run_sync(explain, abandon_on_cancel=True)
            report.listener = asdict(found) if found is not None else None


def _ends(stream: SmcStream) -> tuple[Any, Any]:
    """The addresses of this side and of the server; the latter is () if the server has reset the
    TCP connection, and the kernel has forgotten the address."""
    try:
        theirs = stream.socket.getpeername()
    except OSError:
        theirs = ()
    return stream.socket.getsockname(), theirs


def _conclude(report: Report, stream: SmcStream, offered_v2: bool) -> None:
    if stream.fallback is None:
        assert stream.link_group is not None
        group = stream.link_group
        links = ", ".join(f"{link.number} on {link.rnic.name}" for link in group.links)
        if any(isinstance(link.rnic, trio_smc.SoftRnic) for link in group.links):
            report.variant = trio_smc.SoftRnic.variant
        version = ""
        if group.version > 1:
            what = agreed(group.version, group.release, group.ueid, group.direct)
            version = f"version {what}, "
        elif offered_v2:
            version = "version 1 (the server accepts none of the UEIDs), "
        elif report.ueids:
            version = "version 1 (version 2 was not offered), "
        report.add("mode", "ok", f"smc-r, {version}{group.kind} link group, link {links}")
        return
    report.add("mode", "no", "tcp")
    report.fallback = stream.fallback.as_dict()


class _Messages(trio_smc.BaseObserver):
    """Adds a step for each message of the handshake.

    Attributes:
      first: the index of the first step that this observer adds.
      seen: True if a CLC message was sent or received.
      offered_v2: True if a Proposal of version 2 was sent.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.first = len(report.steps)
        self.seen = self.offered_v2 = False
        self._finished = False

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        self.seen = True
        try:
            decoded = clc.decode_untrusted(message)
        except ProtocolError as error:
            self._add("CLC", "no", outgoing, f"an unreadable message: {error}")
            return
        if outgoing and isinstance(decoded, clc.Proposal) and decoded.v2 is not None:
            self.offered_v2 = True
        if isinstance(decoded, clc.Decline):
            text = f"Decline, diagnosis {diagnosis(decoded.diagnosis)}"
            self._add("CLC", "no", outgoing, text)
        else:
            self._add("CLC", "ok", outgoing, type(decoded).__name__ + _version_2_text(decoded))

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        if self._finished:
            return  # later LLC messages are not part of the handshake
        try:
            framing = llc.V2 if message[0] in llc.V2.types else llc.V1
            name = type(framing.decode_untrusted(message)).__name__
        except ProtocolError as error:
            name = f"an unreadable message: {error}"
        self._add("LLC", "ok", outgoing, name)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        self._finished = True

    def _add(self, name: str, verdict: str, outgoing: bool, text: str) -> None:
        self._report.add(name, verdict, f"{'sent' if outgoing else 'received'} {text}")


def _version_2_text(message: clc.Proposal | clc.Accept | clc.Confirm) -> str:
    """The contents of a message that concern version 2."""
    if isinstance(message, clc.Proposal):
        if message.v2 is None:
            return ""
        versions = "versions 1 and 2" if message.offers_smc_r else "version 2"
        names = ", ".join(map(eid_name, message.v2.eids))
        return f", {versions}, release {message.v2.release}, UEIDs {names}"
    if message.v2 is None:
        return ""
    name, first = eid_name(message.v2.eid), message.v2.first
    if first is None:
        return f", version 2, UEID {name}"
    route = "direct" if first.direct else "through a gateway"
    return f", version 2.{first.release}, UEID {name}, {route}"


# --- the other side --------------------------------------------------------------------------


async def _server_view(
    our_address: Any, their_address: Any, directory: Path
) -> dict[str, Any] | None:
    """The server's view of the connection; None unless the server is a process of this user on this
    host."""
    ours, theirs = _normalized(our_address), _normalized(their_address)
    silent = SilentProcesses(quiet=True)
    for _ in range(_MAX_TRIES):
        query = partial(_query, directory, silent)
        try:
            snapshots = await trio.to_thread.run_sync(query, abandon_on_cancel=True)
        except ToolError:
            return None
        for snapshot in snapshots:
            for each in snapshot.connections:
                if _normalized(each["local"]) == theirs and _normalized(each["peer"]) == ours:
                    return {"pid": snapshot.pid, "ueids": snapshot.ueids, **each}
        ports = [listener[1] for snapshot in snapshots for listener in snapshot.listeners]
        if theirs is None or theirs[1] not in ports:
            silent.report()  # the server may be one of the processes that did not answer
            return None
        # The server's handshake may end a moment later than this side's.
        await trio.sleep(RETRY_INTERVAL)
    return None


def _query(directory: Path, silent: SilentProcesses) -> list[Any]:
    return take_snapshots(directory, ("connections", "listeners"), required=False, silent=silent)


def _normalized(socket_address: Any) -> tuple[str, int] | None:
    """Address and port of a socket, in canonical form; None if the address is no IP address."""
    if not socket_address:
        return None
    try:
        found = ipaddress.ip_address(socket_address[0])
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found), socket_address[1]


# --- output ----------------------------------------------------------------------------------


def _print(report: Report) -> None:
    rows: list[list[object]] = [
        [
            step.name,
            Marked(step.verdict, "error") if step.verdict == "no" else step.verdict,
            mode_cell(step.text) if step.name == "mode" else step.text,
        ]
        for step in report.steps
    ]
    parts: list[Any] = [table(("STEP", "", "~"), rows), ""]
    fallback, server = report.fallback, report.server
    if report.mode == Mode.SMC_R:
        parts.append("SMC-R is used.")
        if report.variant is not None:
            parts.append(f"  variant    {report.variant}, of this side's software RNIC")
    elif report.mode is None:
        parts.append("No connection was established.")
    if fallback is not None:
        side = "this side" if fallback["origin"] == "local" else "the server"
        parts += [
            f"SMC-R is not used: {fallback['message']}.",
            f"  reason     {fallback['reason']}, decided by {side}",
            f"  this side  {diagnosis(fallback['code'])}",
            f"  server     {diagnosis(fallback['peer_code'])}",
        ]
        if report.directory is not None:
            parts.append(f"  directory  {report.directory}")
        if fallback["reason"] == FallbackReason.NO_COMMON_UEID:
            parts.append(_ueids(report))
        listener = report.listener
        if listener is not None:
            parts.append(f"  listener   {listener['text']}")
        parts.append(f"  remedy     {(listener or fallback)['remedy']}")
    if server is not None:
        parts += ["", f"The server, process {server['pid']}, reports: {server['mode']}."]
        why = server["fallback"]
        if why is not None:
            side = "the server" if why["origin"] == "local" else "this side"
            parts += [
                f"  {plain(why['message'])} ({plain(why['reason'])}, decided by {side})",
                f"  remedy     {plain(why['remedy'])}",
            ]
    shown = [
        [each["name"], value_text(each["value"]), each["origin"]]
        for each in changed(report.settings)
    ]
    parts += ["", table(("SETTING", "~VALUE", "ORIGIN"), shown)]
    show(*parts)


def _ueids(report: Report) -> str:
    """The UEIDs of both sides.  A Decline does not include the server's, so they may be unknown."""
    theirs = "unknown" if report.server is None else _joined(report.server["ueids"])
    return f"  UEIDs      this side's: {_joined(report.ueids)}; the server's: {theirs}"


def _joined(ueids: list[str] | None) -> str:
    if ueids is None:
        return "unknown"
    return ", ".join(ueids) or "none"
