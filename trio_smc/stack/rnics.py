"""`StackRnics`: opens and closes the RNICs of a stack, and chooses one for each connection.

Theory of operation
-------------------
With ``Config(rnics="auto")`` a stack uses all active RoCE ports, also ports that become active
later. With a list it uses the RNICs of the list. `StackRnics.follow` sleeps until the kernel
reports a change of devices or interfaces (`rnic.roce.hotplug`), or until a device fails. Then it
compares the devices with the open RNICs. New ports are opened, and link groups may add links on
them. If a device has disappeared, everything on it is freed, because the kernel waits for this
before it removes the device. An RNIC of the list that returns is the same object as before.

Nothing is polled. After a notification the comparison is repeated a few times: a device's node
belongs to root until udev has processed it, and a port becomes active after its interface, on a
busy host seconds later.

Events of an RNIC itself (port down, device failed) go to `StackRnics._event`. In both cases
`on_change` notifies the link groups (`stack.groups.GroupTable.rnic_changed`).

A link group uses RNICs of one kind only. An RNIC that an operator has drained stays open, but has
no links until it is undrained. An RNIC whose port is down has no links until the port is up.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from trio_smc._base.interrupts import ki_protected
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc._base.weak import WeakKeyMapping
from trio_smc.host import pnet
from trio_smc.host.addresses import Prefix, is_same_host, local_prefix, plain_address
from trio_smc.host.free_descriptors import leaves_reserve
from trio_smc.host.netlink import AnswerCache
from trio_smc.host.pnet import PnetTable
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.roce.hotplug import PortWatch, active_ports, present_devices
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic, RnicError, RnicEvent

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Discovery
    from trio_smc.rnic.pump import Pump

__all__ = ["RnicChange", "StackRnics", "check_descriptors"]

LOGGER = logging.getLogger("trio_smc.rnic")

_RETRY_AFTER: Final = (0.3, 1.0, 5.0)
"""Seconds from a notification to the first repetition, and from each to the next. Chosen: udev
needs a fraction of a second for a new node, and on a busy host a port needs seconds to become
active."""

_DESCRIPTORS: Final = 21
"""Descriptors that a stack with a software RNIC opens, without its listeners and connections."""

_INSTANCES_TRIED: Final = 64
"""Random instance numbers that are tried. Chosen: of 65,536 numbers 64 drawn ones are all taken
only if a process reserves numbers on purpose."""


class RnicChange(Enum):
    """A change of an RNIC, for link groups."""

    AVAILABLE = auto()
    """The port came up, or the RNIC was undrained: links may be added on it."""
    DRAINED = auto()
    """An operator drains the RNIC: delete its links orderly, after their connections have moved."""
    LOST = auto()
    """The port went down, or the device failed: the RNIC's links fail."""


def check_descriptors() -> None:
    """Raise OSError (EMFILE) if a stack would leave the program too few free descriptors."""
    if not leaves_reserve(_DESCRIPTORS):
        raise OSError(errno.EMFILE, "too few free descriptors; raise the limit (ulimit -n)")


@ki_protected
class StackRnics:
    """Opens, follows, chooses and closes the RNICs of one stack.

    Attributes:
      opened: in the order of the configuration, then in the order of appearance.
      on_change: called on the Trio thread when an RNIC has changed.
      table: the PNET table in use.
    """

    def __init__(
        self, config: Config, discovery: Discovery, pump: Pump,
        on_change: Callable[[Rnic, RnicChange], None],
    ) -> None:  # fmt: skip
        self.opened: list[Rnic] = []
        self.on_change = on_change
        self._config = config
        self._discovery = discovery
        self._pump = pump
        self._drained: set[Rnic] = set()
        self._no_software_rnic = FallbackReason.NO_RNIC
        # RNICs that were opened for further GIDs of a port, with the port's first RNIC.
        self._port_of: dict[Rnic, Rnic] = {}
        # Names of RNICs that could not be opened.
        self._refused: set[str] = set()
        # RNICs of the configuration whose devices have disappeared.
        self._missing: list[VerbsRnic] = []
        self._instance: socket.socket | None = None
        self._abandoned = False
        self._failure = trio.Event()
        self._network = AnswerCache()
        self.table: PnetTable = ()
        self._networks: WeakKeyMapping[VerbsRnic, tuple[pnet.Interface, Prefix | None]] = (
            WeakKeyMapping()
        )

    # --- opening and closing ---------------------------------------------------------------

    @property
    def _automatic(self) -> bool:
        return isinstance(self._config.rnics, str)

    def open(self) -> None:
        """Open the RNICs of the configuration.

        Raises:
          RnicError: an RNIC of the list cannot be opened; then none is open.
          ValueError: the PNET table cannot be read.
        """
        self.table = pnet.table_of(self._config.pnet)
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        rnics: Sequence[Rnic] = (
            (SoftRnic(), *self._initial_ports())
            if isinstance(self._config.rnics, str)
            else self._config.rnics
        )
        for rnic in rnics:
            try:
                if self._automatic and rnic.kind == "software":
                    check_descriptors()
                rnic.open(self._directory)
                self.adopt(rnic)
            except OSError as error:
                if not self._automatic:
                    raise
                if rnic.kind == "software":
                    self._no_software_rnic = self._reason_for(error)
                self._log_unusable(rnic, error)
        self._network.open()

    def _initial_ports(self) -> list[VerbsRnic]:
        try:
            return self._unused_ports()
        except OSError as error:
            if not is_lack(error):
                raise
            # `follow` tries again.
            LOGGER.info("RoCE ports cannot be listed: %s", error)
            return []

    def close(self) -> None:
        """Close all RNICs; no link uses them now."""
        self._network.close()
        if self._instance is not None:
            self._instance.close()
        for rnic in self.opened:
            self._close(rnic)

    def abandon(self) -> None:
        """Give up in a forked child: the RNICs belong to the parent, and no more are opened."""
        self._abandoned = True
        if self._instance is not None:
            self._instance.close()

    def new_peer_id(self) -> bytes:
        """An instance number of two bytes, and the MAC of the first RNIC (RFC 7609, A.2.1).

        Two processes on one RoCE port have the same MAC, and one time in 65536 the same two random
        bytes. So a socket in the abstract namespace reserves each number while the stack exists. A
        software RNIC needs no reservation, because its MAC is random.
        """
        if not self.opened:
            return secrets.token_bytes(2) + b"\x02" + secrets.token_bytes(5)
        first = self.opened[0]
        for _ in range(_INSTANCES_TRIED if first.kind == "roce" else 0):
            number = secrets.token_bytes(2)
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                holder.bind(b"\0trio_smc instance " + (first.mac + number).hex().encode())
            except OSError as error:
                holder.close()
                if error.errno != errno.EADDRINUSE:
                    break  # whether the number is in use cannot be found out
            else:
                self._instance = holder
                return number + first.mac
        return secrets.token_bytes(2) + first.mac

    def adopt(self, rnic: Rnic) -> None:
        """Use an open RNIC.

        Raises:
          OSError: no more descriptors, epoll watches or threads; the RNIC was closed.
        """
        try:
            self._pump.add(rnic)
        except BaseException:
            rnic.close()
            raise
        self._refused.discard(rnic.name)
        self.opened.append(rnic)
        rnic.on_event = partial(self._event, rnic)

    def _close(self, rnic: Rnic) -> None:
        self._pump.remove(rnic)
        rnic.on_event = None
        rnic.close()

    @property
    def _directory(self) -> Path:
        return Path(self._config.private_directory())

    def _log_unusable(self, rnic: Rnic, error: OSError) -> None:
        """Log that an RNIC cannot be opened: as a warning the first time, then for debugging."""
        level = logging.DEBUG if rnic.name in self._refused else logging.WARNING
        self._refused.add(rnic.name)
        LOGGER.log(level, "%s cannot be used: %s", rnic.name, error)

    def _reason_for(self, error: OSError) -> FallbackReason:
        """The fallback reason if the software RNIC cannot be opened."""
        if error.errno == errno.ENOTSUP:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self._discovery.unusable() or FallbackReason.OUT_OF_RESOURCES

    @staticmethod
    def make_port(device: str, port: int) -> VerbsRnic:
        """An RNIC for a port that was found; not opened."""
        return VerbsRnic(device, port)

    # --- devices that appear and disappear --------------------------------------------------

    async def follow(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Follow changes of devices until cancelled; returns at once if none can happen."""
        if not self._automatic and not any(isinstance(each, VerbsRnic) for each in self.opened):
            task_status.started()
            return
        with contextlib.ExitStack() as stack:
            try:
                changed = stack.enter_context(PortWatch.open()).changed
            except OSError as error:
                LOGGER.debug("new RoCE ports will not be noticed: %s", error)
                changed = trio.sleep_forever
            task_status.started()
            await self._follow(changed)

    async def _follow(self, changed: Callable[[], Awaitable[object]]) -> None:
        # Changes before this moment were not reported.
        retries: Sequence[float] = () if self.find_changes() else _RETRY_AFTER
        while True:
            timeout = retries[0] if retries else float("inf")
            kernel_notified = False
            with trio.move_on_after(timeout):
                kernel_notified = await self._wait_for_news(changed)
            retries = retries[1:]
            if self._failure.is_set():
                # A failed device is not opened again until the kernel reports a change.
                self._failure = trio.Event()
                retries = ()
            if kernel_notified:
                retries = _RETRY_AFTER  # even after a failure: a new device may have the name
            if not self.find_changes() and not retries:
                retries = _RETRY_AFTER[-1:]

    async def _wait_for_news(self, changed: Callable[[], Awaitable[object]]) -> bool:
        """Wait for the kernel or for a failed device. True if the kernel reported a change."""
        kernel_notified = False
        async with trio.open_nursery() as nursery:

            @trio.lowlevel.enable_ki_protection
            async def failure() -> None:
                await self._failure.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(failure)
            await changed()
            kernel_notified = True
            nursery.cancel_scope.cancel()
        return kernel_notified

    def find_changes(self) -> bool:
        """Open new ports, and close RNICs whose devices have disappeared.

        Returns False if descriptors or memory are missing for this, so it has to be tried again.
        """
        if self._abandoned:
            return True
        try:
            self._apply_changes()
        except OSError as error:
            if not is_lack(error):
                raise
            LOGGER.info("RoCE ports cannot be listed: %s", error)
            return False
        return True

    def _apply_changes(self) -> None:
        present = present_devices()
        gone = set()
        for rnic in [each for each in self.opened if isinstance(each, VerbsRnic)]:
            if rnic.failed or rnic.device not in present:
                gone.add(rnic.device)
                self._remove_port(rnic)
            else:
                rnic.refresh_port()
        found = [rnic for rnic in self._unused_ports() if rnic.device not in gone]
        for rnic in found:
            self._add_port(rnic)

    def _unused_ports(self) -> list[VerbsRnic]:
        """An RNIC, not opened, for each active port that this stack could use and does not."""
        active = active_ports()
        if not self._automatic:
            return [each for each in self._missing if (each.device, each.port) in active]
        used = {(each.device, each.port) for each in self.opened if isinstance(each, VerbsRnic)}
        return [self.make_port(*each) for each in active if each not in used]

    def _add_port(self, rnic: VerbsRnic) -> None:
        try:
            rnic.open(self._directory)
        except OSError as error:
            self._log_unusable(rnic, error)
            return
        try:
            self.adopt(rnic)
        except OSError as error:
            self._log_unusable(rnic, error)
            return
        LOGGER.info("%s has appeared", rnic.name)
        if rnic in self._missing:
            self._missing.remove(rnic)
        self.on_change(rnic, RnicChange.AVAILABLE)

    def _remove_port(self, rnic: VerbsRnic) -> None:
        """Close an RNIC whose device, with all its links, has disappeared."""
        LOGGER.info("%s has disappeared", rnic.name)
        self.opened.remove(rnic)
        self._drained.discard(rnic)
        self.on_change(rnic, RnicChange.LOST)
        try:
            self._close(rnic)
        except RnicError as error:
            LOGGER.warning("%s cannot be closed: %s", rnic.name, error)
        if self._port_of.pop(rnic, None) is None and not self._automatic:
            self._missing.append(rnic)

    def _event(self, rnic: Rnic, event: RnicEvent) -> None:
        LOGGER.info("%s: %s", rnic.name, event)
        if event is RnicEvent.FATAL:
            # The device is the caller, so `follow` closes the RNIC later.
            self._failure.set()
        elif rnic.port_active is not (event is RnicEvent.PORT_UP):
            return  # outdated: the port has changed again since
        if event is not RnicEvent.PORT_UP:
            self.on_change(rnic, RnicChange.LOST)
        elif not self.is_drained(rnic):
            self.on_change(rnic, RnicChange.AVAILABLE)

    # --- choice ----------------------------------------------------------------------------

    def usable(self, kind: str) -> list[Rnic]:
        """RNICs of this kind that can have links now, the preferred one first."""
        return [rnic for rnic in self.opened if rnic.kind == kind and self.is_usable(rnic)]

    def is_usable(self, rnic: Rnic) -> bool:
        """True if an RNIC can have links now: its port is up, and it is not drained."""
        return rnic.port_active and not self.is_drained(rnic)

    def serving(self, local: str, remote: str, *, near: bool = False) -> Rnic | FallbackReason:
        """The RNIC for a connection between two addresses, or the reason for TCP.

        Args:
          near: the peer is on this host, whatever its address says.
        """
        if near or is_same_host(local, remote):
            for rnic in self.opened:  # `usable` would build a list for each connection
                if rnic.kind == "software" and self.is_usable(rnic):
                    return rnic
            if any(rnic.kind == "software" for rnic in self.opened):
                return FallbackReason.RNIC_DOWN
            if not self.table:
                return self._no_software_rnic
        return self._serving_port(local, remote)

    def _serving_port(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RoCE port on the network of the connection (`host.pnet`)."""
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
            table=self.table,
            address=local,
            network=local_prefix(local),
        )
        for gid in chosen:
            port = ports[gid.port]
            if self.is_usable(port):
                rnic = self._with_gid(port, gid)
                if rnic is not None:
                    return rnic
        return FallbackReason.RNIC_DOWN if chosen else FallbackReason.NO_RNIC

    def explain(self, interface: str) -> list[tuple[str, bool, str]]:
        """The RoCE ports that serve a network interface, as `host.pnet.explain_interface`."""
        gids = [
            pnet.PortGid(rnic.name, gid.number, gid.kind, gid.ifindex, gid.value)
            for rnic in self._ports()
            for gid in ([rnic.gid_entry] if rnic.gid_is_fixed else rnic.gid_table())
        ]
        known = pnet.interfaces()
        return pnet.explain_interface(interface, gids=gids, interfaces=known, table=self.table)

    def _ports(self) -> list[VerbsRnic]:
        return [
            rnic
            for rnic in self.opened
            if isinstance(rnic, VerbsRnic) and rnic not in self._port_of
        ]

    def _with_gid(self, port: VerbsRnic, gid: pnet.PortGid) -> Rnic | None:
        """The RNIC that uses this GID of a port, opened if necessary; None if that fails."""
        wanted = (gid.kind, gid.interface, gid.value)
        for rnic in self.opened:
            if (
                isinstance(rnic, VerbsRnic)
                and self._port_of.get(rnic, port) is port
                and (rnic.device, rnic.port) == (port.device, port.port)
                and rnic.gid_entry[1:] == wanted
            ):
                return rnic if self.is_usable(rnic) else None
        other = port.with_gid(gid.number)
        try:
            other.open(self._directory)
        except OSError as error:
            self._log_unusable(other, error)
            return None
        try:
            self.adopt(other)
        except OSError as error:
            self._log_unusable(other, error)
            return None
        self._port_of[other] = port
        return other

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs for the links of a group whose first link is on ``rnic``, this one included.

        They have the same kind and are on the same network. All software RNICs are on one network.
        RoCE ports are on one network if their GIDs have the same subnet and VLAN, or if the PNET
        table assigns them to one interface. Of two RNICs on one port only one is returned, because
        two would be no redundancy.
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
        """True if connections of both RNICs may be in one link group (RFC 7609, 2.2)."""
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
            table=self.table,
        )

    def _network_of(self, rnic: VerbsRnic) -> tuple[pnet.Interface, Prefix | None] | None:
        """The interface of a port, and its subnet there.

        For a port that has disappeared they are the last known ones, because a link group whose
        first RNIC it was stays on its network.
        """
        interface = pnet.interfaces().get(rnic.gid_entry.ifindex) if rnic in self.opened else None
        if interface is not None:
            self._networks[rnic] = (interface, local_prefix(_address_of(rnic)))
        return self._networks.get(rnic)

    # --- draining --------------------------------------------------------------------------

    def named(self, name: str) -> Rnic:
        """The RNIC with this name. Raises ValueError if there is none."""
        for rnic in self.opened:
            if rnic.name == name:
                return rnic
        raise ValueError(f"the stack has no RNIC {name!r}")

    def drain(self, rnic: Rnic) -> None:
        """Take an RNIC out of service, and notify `on_change`. Idempotent."""
        if rnic not in self._drained:
            self._drained.add(rnic)
            for each in self.on_port(rnic):
                self.on_change(each, RnicChange.DRAINED)

    def undrain(self, rnic: Rnic) -> None:
        """Put an RNIC back into service. Idempotent."""
        if rnic in self._drained:
            self._drained.discard(rnic)
            for each in self.on_port(rnic):
                if self.is_usable(each):
                    self.on_change(each, RnicChange.AVAILABLE)

    def is_drained(self, rnic: Rnic) -> bool:
        """True if an operator has drained the RNIC, or the first RNIC of its port."""
        return rnic in self._drained or self._port_of.get(rnic) in self._drained

    def on_port(self, rnic: Rnic) -> list[Rnic]:
        """The RNIC, and those that were opened for further GIDs of its port."""
        return [rnic, *(each for each, port in self._port_of.items() if port is rnic)]


def _address_of(rnic: VerbsRnic) -> str:
    """The IP address that the RNIC's GID was made from."""
    return plain_address(str(ipaddress.IPv6Address(rnic.gid)))
