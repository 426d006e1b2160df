"""A simulated host with network interfaces and RoCE ports, for stacks under test."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
import trio

from trio_smc import VerbsRnic
from trio_smc.host import addresses as prefixes
from trio_smc.host import pnet
from trio_smc.host.addresses import Prefix
from trio_smc.host.pnet import Interface, PortGid
from trio_smc.rnic.roce.hotplug import PortWatch
from trio_smc.rnic.roce.pyverbs import Gid
from trio_smc.stack import rnics as _rnic_life
from trio_smc.stack.rnics import StackRnics

__all__ = ["GIDS", "HOST", "NAMED", "V1", "V2", "FakePort", "World", "entry", "gid", "prefix"]

V1, V2 = 1, 2

HOST = {
    each.index: each
    for each in (
        Interface(index=1, name="lo"),
        Interface(index=2, name="eth0"),
        Interface(index=3, name="eth1"),
        Interface(index=4, name="eth0.7", vlan=7, lower=2),
        Interface(index=5, name="eth1.7", vlan=7, lower=3),
        Interface(index=6, name="bond0", bond=True),
        Interface(index=7, name="eth2", master=6),
        Interface(index=8, name="eth3", master=6),
        Interface(index=9, name="bond0.7", vlan=7, lower=6),
    )
}
NAMED = {each.name: each for each in HOST.values()}


def gid(address: str) -> bytes:
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed


def entry(port: str, number: int, interface: str, address: str, kind: int = V2) -> PortGid:
    return PortGid(port, number, kind, NAMED[interface].index, gid(address))


def prefix(network: str) -> Prefix:
    parsed = ipaddress.ip_network(network)
    return Prefix(network=parsed.network_address.packed, length=parsed.prefixlen)


GIDS = [
    entry("rxe0", 0, "eth0", "fe80::1"),
    entry("rxe0", 1, "eth0", "192.0.2.1"),
    entry("rxe0", 2, "eth0", "2001:db8::1"),
    entry("rxe0", 3, "eth0.7", "fe80::1"),
    entry("rxe0", 4, "eth0.7", "198.51.100.1"),
    entry("rxe1", 0, "eth1", "fe80::2"),
    entry("rxe1", 1, "eth1", "203.0.113.1"),
    entry("rxe1", 2, "eth1.7", "fe80::2"),
    entry("rxe2", 0, "eth2", "fe80::3"),
    entry("rxe3", 0, "eth3", "fe80::4"),
]


class FakePort(VerbsRnic):
    """A port with a GID table of its own, without verbs."""

    table: list[Gid]
    opened: list[FakePort]

    def open(self, directory: Path) -> None:
        number = self._gid_index
        self._gid = next(each for each in self.table if number in (None, each.number))
        self.gid, self.mac, self.mtu, self.port_active = self._gid.value, bytes(6), 3, True
        self.opened.append(self)

    def close(self) -> None:
        self.opened.remove(self)

    def gid_table(self) -> list[Gid]:
        return self.table

    def refresh_port(self) -> None:
        pass

    def with_gid(self, number: int) -> Self:
        other = type(self)(self.device, gid_index=number)
        other.table, other.opened = self.table, self.opened
        other.name = f"{self.name}#{number}"
        return other


def fake_port(
    name: str, table: list[Gid], opened: list[FakePort], number: int | None = None
) -> FakePort:
    port = FakePort(name, gid_index=number)
    port.table, port.opened = table, opened
    return port


@dataclass
class World:
    """The ports of `GIDS`: rxe0 on eth0 and eth0.7, rxe1 on eth1 and so on.

    Attributes:
      opened: the open ports.
      route: the interface that all routes leave by.
      devices: names of the present devices.
      active: names of the devices whose port is active.
      change: the event that `PortWatch.changed` waits for.
    """

    opened: list[FakePort] = field(default_factory=list)
    route: str = "eth0"
    devices: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)
    change: trio.Event = field(default_factory=trio.Event)

    def add_devices(self, *names: str) -> None:
        """Add the devices with active ports, without a notification."""
        self.devices.update(names)
        self.active.update(names)

    def remove_devices(self, *names: str) -> None:
        """Remove the devices."""
        self.devices.difference_update(names)
        self.active.difference_update(names)

    @contextmanager
    def watch(self) -> Iterator[Self]:
        """Replaces `PortWatch.open`."""
        yield self

    async def changed(self) -> None:
        """Replaces `PortWatch.changed`."""
        await self.change.wait()
        self.change = trio.Event()

    def port(self, name: str, number: int | None = None) -> FakePort:
        table = [
            Gid(each.number, each.kind, each.interface, each.value)
            for each in GIDS
            if each.port == name
        ]
        return fake_port(name, table, self.opened, number)

    @classmethod
    def made(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Make a world, and let stacks find it instead of the real host."""
        made = cls()
        owned = [
            (2, "192.0.2.1", "192.0.2.0/24"), (4, "198.51.100.1", "198.51.100.0/24"),
            (3, "203.0.113.1", "203.0.113.0/24"),
        ]  # fmt: skip
        addresses = [
            prefixes.OwnAddress(interface=index, address=address, prefix=prefix(network))
            for index, address, network in owned
        ]
        monkeypatch.setattr(_rnic_life, "present_devices", lambda: made.devices)
        monkeypatch.setattr(
            _rnic_life, "active_ports", lambda: [(name, 1) for name in sorted(made.active)]
        )
        monkeypatch.setattr(
            StackRnics, "make_port", staticmethod(lambda name, port: made.port(name))
        )
        monkeypatch.setattr(PortWatch, "open", made.watch)
        monkeypatch.setattr(prefixes, "own_addresses", lambda: addresses)
        monkeypatch.setattr(pnet, "interfaces", lambda: HOST)
        monkeypatch.setattr(pnet, "route_interface", lambda local, remote: NAMED[made.route].index)
        return made
