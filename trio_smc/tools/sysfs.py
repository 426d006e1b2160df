"""The machine's RDMA devices, as the kernel shows them in /sys/class/infiniband.

Reads files only: neither pyverbs nor any privilege is needed, so this works also where a stack
cannot use the device, which is when somebody wants to know what is there.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Gid", "Port", "read_ports"]

_SYS: Final = Path("/sys")


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
      device: its name ("rxe0").
      number: from 1.
      state: "ACTIVE", "DOWN", ... as the kernel says.
      link_layer: "Ethernet" for RoCE.
      gids: entries in use.
      netdevs: network interfaces whose routes it serves: those of its GIDs, and VLANs and bonds
        on top of them.
    """

    device: str
    number: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]
    netdevs: tuple[str, ...]


def read_ports(sys: Path = _SYS) -> list[Port]:
    """All ports of all devices; none where the kernel has no RDMA.

    Args:
      sys: where sysfs is mounted.
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
    for gid in gids:
        if gid.netdev:
            netdevs |= dict.fromkeys((gid.netdev, *_uppers(sys, gid.netdev)))
    return Port(
        device,
        int(path.name),
        _read(path / "state").partition(": ")[2] or "unknown",
        _read(path / "link_layer") or "unknown",
        gids,
        tuple(netdevs),
    )


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
    """VLANs and bonds on top of an interface, and on top of those."""
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
    # Entries of the GID table that are not in use cannot be read (EINVAL).
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
