"""The RoCE ports of this host, as sysfs has them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

__all__ = ["active_ports", "present_devices"]

_SYSFS: Final = Path("/sys/class")
_ACTIVE: Final = "4:"  # IBV_PORT_ACTIVE and its name


def present_devices(sysfs: Path = _SYSFS) -> set[str]:
    """Names of the devices that can be opened now.

    A device that is being deleted while somebody has it open keeps its own entry in sysfs, but
    loses that of its verbs at once.
    """
    found = set()
    for entry in sysfs.glob("infiniband_verbs/*/ibdev"):
        with contextlib.suppress(OSError):  # it is just going
            found.add(entry.read_text(encoding="ascii").strip())
    return found


def active_ports(sysfs: Path = _SYSFS) -> list[tuple[str, int]]:
    """Device and number of every RoCE port of this host that is active now.

    Asked of sysfs, so that a host without any need not load pyverbs.
    """
    present = present_devices(sysfs)
    found = []
    for port in sorted(sysfs.glob("infiniband/*/ports/*")):
        with contextlib.suppress(OSError):
            layer = (port / "link_layer").read_text(encoding="ascii").strip()
            state = (port / "state").read_text(encoding="ascii")
            device = port.parents[1].name
            if layer == "Ethernet" and state.startswith(_ACTIVE) and device in present:
                found.append((device, int(port.name)))
    return found
