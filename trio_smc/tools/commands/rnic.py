"""`trio-smc rnic`: list the RNICs of running stacks and of a new stack, and all RDMA devices.

The RDMA devices of the machine are read from /sys/class/infiniband.  Reading there needs neither
pyverbs nor privileges, so the list also includes devices that no stack can use.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

import trio_smc
from trio_smc.tools.client import SilentProcesses, take_snapshots
from trio_smc.tools.commands import (
    add_json,
    add_process,
    add_users,
    directories,
    exclude,
    existing_directory,
    private_directory,
    why_no_software_rnic,
)
from trio_smc.tools.output import ToolError, error_text, gid, print_json, show, table
from trio_smc.tools.places import Places
from trio_smc.tools.settings import settings_of

_NONE_SERVES: Final = 1
"""The exit code if no RNIC serves the interface."""
_LOCAL: Final = "it serves connections between processes of this host, through any interface"
_IFF_LOOPBACK: Final = 8
"""linux/if.h."""

NAME = "rnic"
SUMMARY = "list the RNICs of running processes and of a new one, and all RDMA devices"
EMPTY: Final[dict[str, Any]] = {"stacks": []}
DESCRIPTION = """
List the RNICs (RDMA adapters, RFC 7609, 2.1) of running processes, the RNICs that a new process
would use with the settings of the environment, and all RDMA devices of the machine with their
ports, GIDs and network interfaces, even devices that trio_smc cannot use.

A connection can use an RNIC if its route leaves through one of the interfaces in NETDEVS.  These
are the interfaces of the RNIC's GIDs, the VLANs and bonds on top of them, and those that the PNET
table (Config(pnet=...), docs/rnic.md) assigns to the RNIC.  The software RNIC (kind "software")
serves connections between processes of one host.

LINKS is the number of links on the RNIC.  CRIT is the number of links that would be lost with the
RNIC together with their link groups, which have no link on another RNIC.  PCI ID is the PCI address
of a device.

To find out what a new process would use, the command opens a stack of its own for a moment.  If
that stack has no software RNIC, the command prints the reason; otherwise the variant of the
software RNIC: native, x86-64 or socket (docs/rnic.md).
"""
EPILOG = """
Examples:
  trio-smc rnic               works without any running process
  trio-smc rnic --pid 4242    only the RNICs of that process
  trio-smc rnic --json
  trio-smc rnic --interface eth0    which RNICs serve it, and why

Exit codes: 0; 1 if a process did not answer, or if other hosts are reached through --interface and
no RNIC serves it; 2 if the process of --pid did not answer or has no stack, or for bad input.
"""


COLUMNS: Final = ("PID", "NAME", "KIND", "PORT", ">MTU", "GID", "MAC", "NETDEVS", ">LINKS", ">CRIT")
DEVICE_COLUMNS: Final = ("DEVICE", ">PORT", "PCI ID", "STATE", "LAYER", ">INDEX", "GID", "TYPE",
                         "NETDEV", "NETDEVS")  # fmt: skip
INTERFACE_COLUMNS: Final = ("RNIC", "SERVES", "~WHY")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    pid = add_process(parser)
    users = add_users(parser)
    add_json(parser)
    interface = parser.add_argument(
        "--interface", metavar="NAME",
        help="which RNICs serve connections through this network interface, and why",
    )  # fmt: skip
    why = "the answer is about a new process of this user"
    exclude(parser, interface, pid, *users, why=why)


def run(options: argparse.Namespace) -> int:
    """Query the stacks, read the devices, and print."""
    directory = directories(options)
    if options.interface is not None:
        with existing_directory(private_directory(options)) as place:
            return _explain(options, place)
    one_process = options.pid is not None or isinstance(directory, Places)
    silent = SilentProcesses()
    stacks = take_snapshots(directory, ("rnics",), options.pid, required=one_process, silent=silent)
    found: dict[str, Any] = {
        "stacks": [
            {"pid": s.pid, "stack": s.stack, "release": s.release, "rnics": s.rnics} for s in stacks
        ]
    }
    if not one_process:
        assert isinstance(directory, Path)
        with existing_directory(directory) as place:
            config = dataclasses.replace(settings_of(options).config, directory=place)
            found["auto"], found["no_software_rnic"] = trio.run(_automatic, config)
        found["variant"] = trio_smc.SoftRnic.variant
        found["devices"] = [dataclasses.asdict(port) for port in read_ports()]
        found["pyverbs"] = importlib.util.find_spec("pyverbs") is not None
    if options.json:
        print_json(found)
    else:
        _print(found)
    return silent.exit_code


def _explain(options: argparse.Namespace, directory: Path) -> int:
    config = dataclasses.replace(settings_of(options).config, directory=directory)
    found = trio.run(_serving, config, options.interface)
    ports, local = found
    answers = [*ports, *((name, True, _LOCAL) for name in local)]
    if options.json:
        print_json([{"rnic": name, "serves": serves, "why": why} for name, serves, why in answers])
    else:
        if answers:
            rows = [[name, "yes" if serves else "no", why] for name, serves, why in answers]
            show(table(INTERFACE_COLUMNS, rows))
        if not ports:
            show(
                f"No RNIC serves connections to other hosts through {options.interface}: "
                "no line of the PNET table, and no GID of a port."
            )
    is_served = any(serves for _, serves, _ in ports) or (local and _is_loopback(options.interface))
    return 0 if is_served else _NONE_SERVES


def _is_loopback(interface: str) -> bool:
    """True if no other host is reached through the interface."""
    flags = _read(_SYS / "class/net" / interface / "flags")
    return bool(int(flags or "0", 16) & _IFF_LOOPBACK)


async def _serving(
    config: trio_smc.Config, interface: str
) -> tuple[list[tuple[str, bool, str]], list[str]]:
    """The RoCE ports with the reasons, and the names of the software RNICs."""
    config = dataclasses.replace(config, control=False, capture=None, log_events=False)
    try:
        async with trio_smc.open_stack(config) as stack:
            local = [rnic.name for rnic in stack.rnics if rnic.kind == "software"]
            return stack.explain_interface(interface), local
    except ValueError as error:
        raise ToolError(str(error)) from None
    except OSError as error:
        raise ToolError(f"cannot open a stack: {error_text(error)}") from None


async def _automatic(config: trio_smc.Config) -> tuple[list[dict[str, Any]], str | None]:
    """The RNICs of a new stack, as the control socket sends them in "rnics".

    The second value is the reason why the stack has no software RNIC; None if it has one.
    """
    config = dataclasses.replace(config, control=False, capture=None, log_events=False)
    try:
        async with trio_smc.open_stack(config) as stack:
            found = [
                {
                    "name": rnic.name,
                    "kind": rnic.kind,
                    "variant": getattr(rnic, "variant", None),
                    "device": getattr(rnic, "device", None),
                    "port": getattr(rnic, "port", None),
                    "port_active": rnic.port_active,
                    "gid": rnic.gid.hex(),
                    "mac": rnic.mac.hex(),
                    "mtu": 128 << rnic.mtu,
                }
                for rnic in stack.rnics
            ]
    except OSError as error:
        raise ToolError(f"cannot open a stack: {error_text(error)}") from None
    if any(rnic["kind"] == "software" for rnic in found):
        return found, None
    return found, await why_no_software_rnic(config)


def _print(found: dict[str, Any]) -> None:
    ports = {(port.device, port.number): port for port in read_ports()}
    heads = COLUMNS[1:-2]
    if found["stacks"]:
        rows = [
            [stack["pid"], *_rnic(each, ports), each["links"], each["critical"]]
            for stack in found["stacks"]
            for each in stack["rnics"]
        ]
        show(table(COLUMNS, rows, "RNICs of running stacks"))
    if "auto" not in found:
        return
    if found["stacks"]:
        show("")
    show(table(heads, [_rnic(each, ports) for each in found["auto"]], "RNICs of a new process"))
    if found["no_software_rnic"]:
        show(f"No software RNIC: {found['no_software_rnic']}.")
    else:
        show(f"Variant of the software RNIC: {found['variant']}.")
    show("", *_devices(list(ports.values()), found["pyverbs"]))


def _rnic(rnic: dict[str, Any], ports: dict[tuple[str, int], Port]) -> list[object]:
    port = ports.get((rnic["device"], rnic["port"]))
    netdevs = list(port.netdevs) if port else []
    if rnic["kind"] == "software":
        netdevs = ["this host"]
    netdevs += [f"{name} (PNET)" for name in rnic.get("pnet") or ()]
    state = {True: "active", False: "down", None: None}[rnic["port_active"]]
    if rnic.get("drained"):
        state = "drained"
    address = gid(rnic["gid"])
    names = ", ".join(netdevs)
    return [rnic["name"], rnic["kind"], state, rnic["mtu"], address, rnic["mac"], names]


def _devices(ports: list[Port], pyverbs: bool) -> list[Any]:
    if not ports:
        return ["This machine has no RDMA devices (/sys/class/infiniband)."]
    rows: list[list[object]] = []
    for port in ports:
        first: list[object] = [port.device, port.number, port.pci, port.state, port.link_layer]
        netdevs = ", ".join(port.netdevs)
        gids = [[g.index, g.value, g.kind, g.netdev] for g in port.gids] or [[None] * 4]
        for place, each in enumerate(gids):
            blank = place > 0
            rows.append([*([" "] * 5 if blank else first), *each, " " if blank else netdevs])
    lines: list[Any] = [table(DEVICE_COLUMNS, rows, "RDMA devices of this machine")]
    if not pyverbs:
        lines.append("pyverbs is not installed, so no stack of this Python can use these devices.")
    return lines


# --- the RDMA devices of the machine -----------------------------------------------------------


_SYS: Final = Path("/sys")
_PCI: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""Domain, bus, device and function, as sysfs names them."""


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table: its index, value, RoCE type and network interface."""

    index: int
    value: str
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device.

    Attributes:
      device: the name of the device ("rxe0").
      number: the number of the port, from 1.
      state: the kernel's word: "ACTIVE", "DOWN", ...
      link_layer: "Ethernet" for RoCE.
      gids: the entries of the GID table that are in use.
      netdevs: the network interfaces whose routes the port serves: those of its GIDs, and the VLANs
        and bonds on top of them.
      pci: the PCI address of the device; None for a device of software.
    """

    device: str
    number: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]
    netdevs: tuple[str, ...]
    pci: str | None = None


def read_ports(sys: Path = _SYS) -> list[Port]:
    """All ports of all devices; empty if the kernel has no RDMA.

    Args:
      sys: the mount point of sysfs.
    """
    found: list[Port] = []
    for device in _names(sys / "class/infiniband"):
        ports = sys / "class/infiniband" / device / "ports"
        found += [
            _port(sys, device, ports / number)
            for number in sorted(_names(ports), key=len)
            if number.isdigit()
        ]
    return found


def _port(sys: Path, device: str, path: Path) -> Port:
    gids = tuple(_gids(path))
    netdevs: dict[str, None] = {}
    for each in gids:
        if each.netdev:
            netdevs |= dict.fromkeys((each.netdev, *_uppers(sys, each.netdev)))
    return Port(
        device,
        int(path.name),
        _read(path / "state").partition(": ")[2] or "unknown",
        _read(path / "link_layer") or "unknown",
        gids,
        tuple(netdevs),
        _pci_address(path.parent.parent),
    )


def _pci_address(device: Path) -> str | None:
    """The PCI address of a device; None if it is not on a PCI bus."""
    try:
        name = os.path.basename(os.path.realpath(device / "device", strict=True))
    except OSError:
        return None
    return name if _PCI.fullmatch(name) else None


def _gids(path: Path) -> list[Gid]:
    found = []
    for index in sorted(int(name) for name in _names(path / "gids") if name.isdigit()):
        try:
            value = ipaddress.IPv6Address(_read(path / f"gids/{index}"))
        except ValueError:
            continue
        if int(value):
            kind = _read(path / f"gid_attrs/types/{index}")
            netdev = _read(path / f"gid_attrs/ndevs/{index}")
            mapped = value.ipv4_mapped
            found.append(Gid(index, f"::ffff:{mapped}" if mapped else str(value), kind, netdev))
    return found


def _uppers(sys: Path, netdev: str) -> list[str]:
    """The VLANs and bonds on top of an interface, directly or indirectly."""
    found = []
    for name in _names(sys / "class/net" / netdev):
        if name.startswith("upper_"):
            upper = name.removeprefix("upper_")
            found += [upper, *_uppers(sys, upper)]
    return found


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _read(path: Path) -> str:
    # Unused entries of the GID table cannot be read (EINVAL).
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
