"""Hot-plugging of RoCE ports: notifications of the kernel, and the devices and ports present.

Two netlink sockets receive the notifications.  The uevent socket reports each device that is added
or removed.  The routing socket reports each network interface that goes up or down; the port of
its RDMA device follows.  If there are many messages, some may be lost; so they only say that
something has changed.  The present state is read from sysfs afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.resources import is_lack
from trio_smc._base.waits import wait_readable

__all__ = [
    "PortWatch",
    "active_ports",
    "is_rdma_event",
    "present_devices",
]

LOGGER: Final = logging.getLogger("trio_smc.rnic")

_NETLINK_KOBJECT_UEVENT: Final = 15  # <linux/netlink.h>
_KERNEL_UEVENTS: Final = 1  # udev sends its own messages to another group
_RTMGRP_LINK: Final = 1  # <linux/rtnetlink.h>
_MAX_MESSAGE: Final = 1 << 16  # chosen, bytes: far more than a notification has
_SYSFS: Final = Path("/sys/class")
_ACTIVE: Final = "4:"  # IBV_PORT_ACTIVE and its name


def is_rdma_event(uevent: bytes) -> bool:
    """True if a uevent, which begins with "ACTION@PATH", concerns an RDMA device."""
    return b"/infiniband" in uevent.partition(b"\0")[0]


@ki_protected
class PortWatch:
    """The two netlink sockets; created by `open`."""

    def __init__(self, devices: socket.socket, links: socket.socket) -> None:
        self._devices = devices
        self._links = links

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[PortWatch]:
        """Subscribe to both kinds of notifications.  Raises OSError if the kernel lacks them."""
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
        """Wait until something has changed; several notifications at once count as one."""
        async with trio.open_nursery() as nursery:
            for sock in (self._devices, self._links):
                nursery.start_soon(self._wait_for_news, sock, nursery.cancel_scope)

    async def _wait_for_news(self, sock: socket.socket, done: trio.CancelScope) -> None:
        try:
            while not self._read_news(sock):
                await wait_readable(sock)
        except OSError as error:
            LOGGER.debug("changes of RoCE ports will not be noticed: %s", error)
            await trio.sleep_forever()
        done.cancel()

    def _read_news(self, sock: socket.socket) -> bool:
        """Read all messages in a socket's buffer; True if a port or device may have changed.

        Raises OSError: the socket cannot be read.
        """
        news = False
        while True:
            try:
                message, sender = sock.recvfrom(_MAX_MESSAGE)
            except BlockingIOError:
                return news
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                news = True  # messages were lost
                continue
            from_kernel = sender[0] == 0
            news = news or (from_kernel and (sock is self._links or is_rdma_event(message)))


def present_devices(sysfs: Path = _SYSFS) -> set[str]:
    """Names of the devices that can be opened now.

    If a device is deleted while a process has it open, its own entry stays in sysfs, but the entry
    of its verbs disappears at once.

    Raises OSError: this process lacks descriptors or memory; the devices are unknown then.
    """
    found = set()
    for device in _list(sysfs / "infiniband_verbs"):
        text = _read(device / "ibdev")
        if text is not None:
            found.add(text.strip())
    return found


def active_ports(sysfs: Path = _SYSFS) -> list[tuple[str, int]]:
    """Device name and port number of each active RoCE port of this host.

    Read from sysfs, so that a host without RoCE ports never loads pyverbs.  Raises OSError as
    `present_devices` does.
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
    """The entries of a directory of sysfs; none if there is no such directory (any more).

    Raises OSError: this process lacks descriptors or memory.
    """
    try:
        return sorted(directory / name for name in os.listdir(directory))
    except OSError as error:
        if is_lack(error):
            raise
        return []


def _read(path: Path) -> str | None:
    """The text of a file of sysfs; None if there is no such file.  Raises OSError as `_list`."""
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        if is_lack(error):
            raise
        return None
