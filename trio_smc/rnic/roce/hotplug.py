"""RoCE ports that come and go: news from the kernel, and which devices and ports there are.

Two netlink sockets tell the news: that of uevents when a device is made or taken away, that of the
network when an interface goes up or down, on which the port of an RDMA device follows.  What
changed is not read from them but looked up in sysfs afterwards: messages may be lost when there
are many.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from trio_smc._base.resources import is_lack

__all__ = [
    "PortWatch",
    "active_ports",
    "is_rdma_event",
    "present_devices",
]


_NETLINK_KOBJECT_UEVENT: Final = 15  # <linux/netlink.h>
_KERNEL_UEVENTS: Final = 1  # what udev sends itself is in another group
_RTMGRP_LINK: Final = 1
_MAX_MESSAGE: Final = 1 << 16
_SYSFS: Final = Path("/sys/class")
_ACTIVE: Final = "4:"  # IBV_PORT_ACTIVE and its name


def is_rdma_event(uevent: bytes) -> bool:
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
                nursery.start_soon(self._wait_for_news, sock, nursery.cancel_scope)

    async def _wait_for_news(self, sock: socket.socket, done: trio.CancelScope) -> None:
        while not self._read_news(sock):
            await trio.lowlevel.wait_readable(sock)
        done.cancel()

    def _read_news(self, sock: socket.socket) -> bool:
        """Take all that is there; whether any of it is news."""
        news = False
        while True:
            try:
                message, sender = sock.recvfrom(_MAX_MESSAGE)
            except BlockingIOError:
                return news
            except OSError:  # ENOBUFS: some were lost
                news = True
                continue
            from_kernel = sender[0] == 0
            news = news or (from_kernel and (sock is self._links or is_rdma_event(message)))


def present_devices(sysfs: Path = _SYSFS) -> set[str]:
    """Names of the devices that can be opened now.

    A device that is being deleted while somebody has it open keeps its own entry in sysfs, but
    loses that of its verbs at once.

    Raises OSError: this process lacks descriptors or memory, which says nothing of any device.
    """
    found = set()
    for device in _list(sysfs / "infiniband_verbs"):
        text = _read(device / "ibdev")
        if text is not None:
            found.add(text.strip())
    return found


def active_ports(sysfs: Path = _SYSFS) -> list[tuple[str, int]]:
    """Device and number of every RoCE port of this host that is active now.

    Asked of sysfs, so that a host without any need not load pyverbs.  Raises OSError as
    `present_devices`.
    """
    present = present_devices(sysfs)
    found = []
    for device in _list(sysfs / "infiniband"):
        if device.name not in present:
            continue
        for port in _list(device / "ports"):
            layer, state = _read(port / "link_layer"), _read(port / "state")
            if layer is None or state is None:
                continue
            if layer.strip() == "Ethernet" and state.startswith(_ACTIVE):
                found.append((device.name, int(port.name)))
    return found


def _list(directory: Path) -> list[Path]:
    """Paths in a directory of sysfs; none if it is just going, or was never there.

    Raises OSError: this process lacks descriptors or memory, which says nothing of any device.
    """
    try:
        return sorted(directory / name for name in os.listdir(directory))
    except OSError as error:
        if is_lack(error):
            raise
        return []


def _read(path: Path) -> str | None:
    """A file of sysfs; None if it is just going.  Raises OSError as `_list`."""
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        if is_lack(error):
            raise
        return None
