"""RoCE ports that come and go: news from the kernel, and which devices and ports there are.

Two netlink sockets tell the news: that of uevents when a device is made or taken away, that of the
network when an interface goes up or down, on which the port of an RDMA device follows.  What
changed is not read from them but looked up in sysfs afterwards: messages may be lost when there
are many.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

__all__ = [
    "PortWatch",
    "active_ports",
    "is_news",
    "present_devices",
]


_NETLINK_KOBJECT_UEVENT: Final = 15  # <linux/netlink.h>
_KERNEL_UEVENTS: Final = 1  # what udev sends itself is in another group
_RTMGRP_LINK: Final = 1
_LONGEST: Final = 1 << 16
_SYSFS: Final = Path("/sys/class")
_ACTIVE: Final = "4:"  # IBV_PORT_ACTIVE and its name


def is_news(uevent: bytes) -> bool:
    """Whether a uevent, which begins with "ACTION@PATH", is of an RDMA device."""
    return b"/infiniband" in uevent.partition(b"\0")[0]


class PortWatch:
    """What the two sockets say.  Made by `open`."""

    def __init__(self, devices: socket.socket, links: socket.socket) -> None:
        self._devices = devices
        self._links = links

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[PortWatch]:
        """Hear from now on.  Raises OSError where the kernel has no such sockets."""
        with contextlib.ExitStack() as stack:
            found = []
            for family, group in (
                (_NETLINK_KOBJECT_UEVENT, _KERNEL_UEVENTS),
                (socket.NETLINK_ROUTE, _RTMGRP_LINK),
            ):
                sock = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, family)
                stack.enter_context(sock)
                sock.bind((0, group))
                sock.setblocking(False)
                found.append(sock)
            yield cls(*found)

    async def changed(self) -> None:
        """Return when there is news; several at once are one."""
        async with trio.open_nursery() as nursery:
            for sock in (self._devices, self._links):
                nursery.start_soon(self._hear, sock, nursery.cancel_scope)

    async def _hear(self, sock: socket.socket, done: trio.CancelScope) -> None:
        while not self._take(sock):
            await trio.lowlevel.wait_readable(sock)
        done.cancel()

    def _take(self, sock: socket.socket) -> bool:
        """Take all that is there; whether any of it is news."""
        news = False
        while True:
            try:
                message, sender = sock.recvfrom(_LONGEST)
            except BlockingIOError:
                return news
            except OSError:  # ENOBUFS: some were lost
                news = True
                continue
            from_kernel = sender[0] == 0
            news = news or (from_kernel and (sock is self._links or is_news(message)))


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
    for port in _ports(sysfs):
        with contextlib.suppress(OSError):
            layer = (port / "link_layer").read_text(encoding="ascii").strip()
            state = (port / "state").read_text(encoding="ascii")
            device = port.parents[1].name
            if layer == "Ethernet" and state.startswith(_ACTIVE) and device in present:
                found.append((device, int(port.name)))
    return found


def _ports(sysfs: Path) -> list[Path]:
    """The directory of each port; those of a device that is just going may be missing."""
    found: list[Path] = []
    for device in sorted(sysfs.glob("infiniband/*")):
        with contextlib.suppress(OSError):  # `glob` would raise it, and lose all others
            found += sorted((device / "ports").iterdir())
    return found
