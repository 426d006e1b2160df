"""The RNICs of a stack: which one serves a connection, which are taken out.

A link group uses RNICs of one kind only.  An RNIC that an operator has drained stays open but
carries nothing until it is undrained; one whose port is down carries nothing until it is up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from trio_smc._base.reasons import FallbackReason
from trio_smc._rnic_life import RnicChange, RnicLife
from trio_smc.rendezvous import pnet
from trio_smc.rendezvous.pnet import PnetTable
from trio_smc.rendezvous.prefixes import Prefix, is_same_host, local_prefix, plain_address
from trio_smc.rnic.roce import VerbsRnic
from trio_smc.rnic.verbs import Rnic

if TYPE_CHECKING:
    from trio_smc._base.config import Config
    from trio_smc.rendezvous.discovery import Discovery
    from trio_smc.rnic.pump import Pump

__all__ = ["StackRnics", "pnet_table"]


def _address_of(rnic: VerbsRnic) -> str:
    """The IP address that its GID was made from."""
    return plain_address(str(ipaddress.IPv6Address(rnic.gid)))


def pnet_table(setting: PnetTable | Path | str) -> PnetTable:
    """What `Config.pnet` says.  Raises ValueError: a file cannot be read, or a line is wrong."""
    return setting if isinstance(setting, tuple) else pnet.read_table(Path(setting))


class StackRnics(RnicLife):
    """Opens, chooses and closes the RNICs of one stack."""

    def __init__(
        self, config: Config, discovery: Discovery, pump: Pump,
        on_change: Callable[[Rnic, RnicChange], None],
    ) -> None:  # fmt: skip
        super().__init__(config, discovery, pump, on_change)
        self._table: PnetTable = ()
        self._networks: WeakKeyDictionary[VerbsRnic, tuple[pnet.Interface, Prefix | None]] = (
            WeakKeyDictionary()
        )

    def open(self) -> None:
        """Open what the configuration names.

        Raises:
          RnicError: an RNIC that was asked for by name cannot be opened; none is open then.
          ValueError: the PNET table cannot be read.
        """
        self._table = pnet_table(self._config.pnet)
        self.open_rnics()

    @property
    def table(self) -> PnetTable:
        """The PNET table in use."""
        return self._table

    # --- choice ----------------------------------------------------------------------------

    def usable(self, kind: str) -> list[Rnic]:
        """RNICs of this kind that may carry links now, the preferred one first."""
        return [rnic for rnic in self.opened if rnic.kind == kind and self._is_usable(rnic)]

    def _is_usable(self, rnic: Rnic) -> bool:
        return rnic.port_active and not self.is_drained(rnic)

    def serving(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RNIC for a connection between two addresses, or why there is none."""
        if is_same_host(local, remote):
            for rnic in self.opened:  # not all that there are: this is for each connection
                if rnic.kind == "software" and self._is_usable(rnic):
                    return rnic
            if any(rnic.kind == "software" for rnic in self.opened):
                return FallbackReason.RNIC_DOWN
            if not self._table:
                return self._none
        return self._serving_port(local, remote)

    def _serving_port(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RoCE port on the network of the connection (`rendezvous.pnet`)."""
        ports = {rnic.name: rnic for rnic in self._ports()}
        if not ports:
            return FallbackReason.NO_RNIC
        known = pnet.interfaces()
        route = known.get(pnet.route_interface(local, remote) or 0)
        if route is None:
            return FallbackReason.NO_RNIC
        chosen = pnet.choose_gids(
            route,
            gids=[
                pnet.PortGid(name, gid.number, gid.kind, gid.ifindex, gid.value)
                for name, rnic in ports.items()
                for gid in ([rnic.gid_entry] if rnic.gid_is_fixed else rnic.gid_table())
            ],
            interfaces=known,
            table=self._table,
            address=local,
            network=local_prefix(local),
        )
        for gid in chosen:
            port = ports[gid.port]
            if self._is_usable(port):
                rnic = self._with_gid(port, gid)
                if rnic is not None:
                    return rnic
        return FallbackReason.RNIC_DOWN if chosen else FallbackReason.NO_RNIC

    def _ports(self) -> list[VerbsRnic]:
        return [
            rnic
            for rnic in self.opened
            if isinstance(rnic, VerbsRnic) and rnic not in self._port_of
        ]

    def _with_gid(self, port: VerbsRnic, gid: pnet.PortGid) -> Rnic | None:
        """The RNIC that uses this GID of a port, opened now if need be; None: it cannot be."""
        wanted = (gid.kind, gid.interface, gid.value)
        for rnic in self.opened:
            if (
                isinstance(rnic, VerbsRnic)
                and self._port_of.get(rnic, port) is port
                and (rnic.device, rnic.port) == (port.device, port.port)
                and rnic.gid_entry[1:] == wanted
            ):
                return rnic if self._is_usable(rnic) else None
        other = port.with_gid(gid.number)
        try:
            other.open(self._directory)
        except OSError as error:
            self._complain(other, error)
            return None
        self._port_of[other] = port
        self.adopt(other)
        return other

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs that may carry links of a group whose first link is on ``rnic``.

        Those of the same kind on the same network, itself included: software RNICs are all on
        one; RoCE ports are when their GIDs are of one subnet and VLAN, or the PNET table gives
        them to one interface.  Two RNICs on one port are no redundancy: never both.
        """
        usable = self.usable(rnic.kind)
        if not isinstance(rnic, VerbsRnic):
            return usable
        found: list[Rnic] = []
        taken: set[tuple[str, int]] = set()
        for other in sorted(usable, key=lambda each: each is not rnic):
            if (
                isinstance(other, VerbsRnic)
                and (other.device, other.port) not in taken
                and self.share_network(rnic, other)
            ):
                taken.add((other.device, other.port))
                found.append(other)
        return found

    def share_network(self, one: Rnic, other: Rnic) -> bool:
        """Whether connections served by either may be in one link group (RFC 7609, 2.2)."""
        if one is other or one.kind != other.kind:
            return one is other
        if not isinstance(one, VerbsRnic) or not isinstance(other, VerbsRnic):
            return True
        first, second = self._network_of(one), self._network_of(other)
        if first is None or second is None or one.gid_entry.kind != other.gid_entry.kind:
            return False
        return pnet.same_network(
            first[0],
            second[0],
            networks=(first[1], second[1]),
            ports=(self._port_of.get(one, one).name, self._port_of.get(other, other).name),
            table=self._table,
        )

    def _network_of(self, rnic: VerbsRnic) -> tuple[pnet.Interface, Prefix | None] | None:
        """Its interface and the subnet that it is in there; of one that has gone, as they were:
        a link group whose first RNIC it was keeps to its network."""
        interface = pnet.interfaces().get(rnic.gid_entry.ifindex) if rnic in self.opened else None
        if interface is not None:
            self._networks[rnic] = (interface, local_prefix(_address_of(rnic)))
        return self._networks.get(rnic)

    # --- changes ---------------------------------------------------------------------------

    def named(self, name: str) -> Rnic:
        """The RNIC of this name.  Raises ValueError when there is none."""
        for rnic in self.opened:
            if rnic.name == name:
                return rnic
        raise ValueError(f"the stack has no RNIC {name!r}")

    def drain(self, rnic: Rnic) -> None:
        """Take it out: nothing new goes over it, and `on_change` is told.  Idempotent."""
        if rnic not in self._drained:
            self._drained.add(rnic)
            for each in self.on_port(rnic):
                self.on_change(each, RnicChange.DRAINED)

    def undrain(self, rnic: Rnic) -> None:
        """Put it back.  Idempotent."""
        if rnic in self._drained:
            self._drained.discard(rnic)
            for each in self.on_port(rnic):
                if self._is_usable(each):
                    self.on_change(each, RnicChange.AVAILABLE)

    def on_port(self, rnic: Rnic) -> list[Rnic]:
        """It, and what was opened for further GIDs of it."""
        return [rnic, *(each for each, port in self._port_of.items() if port is rnic)]
