"""`StackRnics`: the RNICs of a stack: how they come and go, and which one serves a connection.

Theory of operation
-------------------
With ``Config(rnics="auto")`` a stack uses the RoCE ports that are active, also those that become
so later; with a list it uses what the list names. `StackRnics.follow` sleeps until the kernel
says that devices or interfaces have changed (`rnic.roce.hotplug`), or that a device has failed,
and then looks: ports that came are opened, and link groups may grow onto them; of a device that
has gone everything is given back, because the kernel waits for that before it lets go of a
device. An RNIC that was named comes back as the same object.

Nothing is polled. Only after news is looked again, a few times: a device's node belongs to
root until udev has seen it, and a port follows its interface, on a busy host seconds later.

What an RNIC reports itself (port down, device failed) comes to `StackRnics._event`. Either way
`on_change` tells the link groups (`stack.groups.GroupTable.rnic_changed`).

A link group uses RNICs of one kind only. An RNIC that an operator has drained stays open but
carries nothing until it is undrained; one whose port is down carries nothing until it is up.
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
from weakref import WeakKeyDictionary

import trio

from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc.host import pnet
from trio_smc.host.addresses import Prefix, is_same_host, local_prefix, plain_address
from trio_smc.host.netlink import Remembering
from trio_smc.host.pnet import PnetTable
from trio_smc.rnic.roce.device import VerbsRnic
from trio_smc.rnic.roce.hotplug import PortWatch, active_ports, present_devices
from trio_smc.rnic.soft.device import SoftRnic
from trio_smc.rnic.verbs import Rnic, RnicError, RnicEvent

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.discovery.same_host import Discovery
    from trio_smc.rnic.pump import Pump

__all__ = ["RnicChange", "StackRnics"]

LOGGER = logging.getLogger("trio_smc.rnic")

_RETRY_AFTER: Final = (0.3, 1.0, 5.0)
"""Seconds after news, each after the one before."""

_INSTANCES_TRIED: Final = 64
"""Instance numbers that are tried; so many are in use only where somebody keeps them all."""


class RnicChange(Enum):
    """What happened to an RNIC, as far as link groups care."""

    AVAILABLE = auto()
    """Its port came up, or it was undrained: links may be added on it."""
    DRAINED = auto()
    """An operator takes it out: its links are to be deleted in order."""
    LOST = auto()
    """Its port went down, or the device failed: its links are dead or dying."""


class StackRnics:
    """Opens, follows, chooses and closes the RNICs of one stack.

    Attributes:
      opened: in the order of the configuration, then those that came.
      on_change: called on the Trio thread when an RNIC comes or goes.
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
        # A port's RNICs that were opened for further GIDs, and the one they are of.
        self._port_of: dict[Rnic, Rnic] = {}
        # Names of those that could not be opened.
        self._refused: set[str] = set()
        # Those of the configuration whose devices are gone.
        self._missing: list[VerbsRnic] = []
        self._instance: socket.socket | None = None
        self._abandoned = False
        self._failure = trio.Event()
        self._network = Remembering()
        self.table: PnetTable = ()
        self._networks: WeakKeyDictionary[VerbsRnic, tuple[pnet.Interface, Prefix | None]] = (
            WeakKeyDictionary()
        )

    # --- opening and closing ---------------------------------------------------------------

    @property
    def _automatic(self) -> bool:
        return isinstance(self._config.rnics, str)

    def open(self) -> None:
        """Open what the configuration names.

        Raises:
          RnicError: an RNIC that was asked for by name cannot be opened; none is open then.
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
            # `follow` looks again.
            LOGGER.info("RoCE ports cannot be looked at: %s", error)
            return []

    def close(self) -> None:
        """Close all of them; what used them is gone."""
        self._network.close()
        if self._instance is not None:
            self._instance.close()
        for rnic in self.opened:
            self._close(rnic)

    def abandon(self) -> None:
        """This process is a forked child: the RNICs are its parent's, and no other is opened."""
        self._abandoned = True
        if self._instance is not None:
            self._instance.close()

    def new_peer_id(self) -> bytes:
        """An instance number of two bytes, and the MAC of the first RNIC (RFC 7609, A.2.1).

        Two processes on one RoCE port have that MAC in common, and two random bytes alike in one
        case of 65536. So a socket without a file holds each number as long as the stack is there;
        a software RNIC's MAC is random itself.
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
                    break  # nobody can tell
            else:
                self._instance = holder
                return number + first.mac
        return secrets.token_bytes(2) + first.mac

    def adopt(self, rnic: Rnic) -> None:
        """Use an RNIC that is open.

        Raises OSError: descriptors, epoll watches or threads run out; it is closed then.
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
        """It cannot be opened. Tried again and again, that is no news."""
        level = logging.DEBUG if rnic.name in self._refused else logging.WARNING
        self._refused.add(rnic.name)
        LOGGER.log(level, "%s cannot be used: %s", rnic.name, error)

    def _reason_for(self, error: OSError) -> FallbackReason:
        """What to tell users of a software RNIC that cannot be opened."""
        if error.errno == errno.ENOTSUP:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self._discovery.unusable() or FallbackReason.OUT_OF_RESOURCES

    @staticmethod
    def make_port(device: str, port: int) -> VerbsRnic:
        """An RNIC for a port that was found, not open."""
        return VerbsRnic(device, port)

    # --- what comes and goes ----------------------------------------------------------------

    async def follow(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep to what there is, until cancelled; returns at once where nothing can come."""
        if not self._automatic and not any(isinstance(each, VerbsRnic) for each in self.opened):
            task_status.started()
            return
        with contextlib.ExitStack() as stack:
            try:
                changed = stack.enter_context(PortWatch.open()).changed
            except OSError as error:
                LOGGER.debug("RoCE ports that come later are not seen: %s", error)
                changed = trio.sleep_forever
            task_status.started()
            await self._follow(changed)

    async def _follow(self, changed: Callable[[], Awaitable[object]]) -> None:
        # Nobody has told what changed before this.
        retries: Sequence[float] = () if self.find_changes() else _RETRY_AFTER
        while True:
            timeout = retries[0] if retries else float("inf")
            kernel_notified = False
            with trio.move_on_after(timeout):
                kernel_notified = await self._wait_for_news(changed)
            retries = retries[1:]
            if self._failure.is_set():
                # A device that has failed is not tried again before the kernel tells of it.
                self._failure = trio.Event()
                retries = ()
            if kernel_notified:
                retries = _RETRY_AFTER  # also when a device has failed: another may have its name
            if not self.find_changes() and not retries:
                retries = _RETRY_AFTER[-1:]

    async def _wait_for_news(self, changed: Callable[[], Awaitable[object]]) -> bool:
        """Until the kernel tells something, or a device has failed; whether the kernel told."""
        kernel_notified = False
        async with trio.open_nursery() as nursery:

            async def failure() -> None:
                await self._failure.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(failure)
            await changed()
            kernel_notified = True
            nursery.cancel_scope.cancel()
        return kernel_notified

    def find_changes(self) -> bool:
        """Open what has come and let go of what has gone.

        False: this process lacks descriptors or memory to see that, so look again later.
        """
        if self._abandoned:
            return True
        try:
            self._apply_changes()
        except OSError as error:
            if not is_lack(error):
                raise
            LOGGER.info("RoCE ports cannot be looked at: %s", error)
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
                rnic.look_at_port()
        found = [rnic for rnic in self._unused_ports() if rnic.device not in gone]
        for rnic in found:
            self._add_port(rnic)

    def _unused_ports(self) -> list[VerbsRnic]:
        """An RNIC for each port that is active and that this stack could use, not open."""
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
        LOGGER.info("%s has come", rnic.name)
        if rnic in self._missing:
            self._missing.remove(rnic)
        self.on_change(rnic, RnicChange.AVAILABLE)

    def _remove_port(self, rnic: VerbsRnic) -> None:
        """Its device is gone, and so are its links."""
        LOGGER.info("%s has gone", rnic.name)
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
            # Closed by `follow`, not here: the device is at work.
            self._failure.set()
        elif rnic.port_active is not (event is RnicEvent.PORT_UP):
            return  # old news: the links that are there by now know nothing of it
        if event is not RnicEvent.PORT_UP:
            self.on_change(rnic, RnicChange.LOST)
        elif not self.is_drained(rnic):
            self.on_change(rnic, RnicChange.AVAILABLE)

    # --- choice ----------------------------------------------------------------------------

    def usable(self, kind: str) -> list[Rnic]:
        """RNICs of this kind that may carry links now, the preferred one first."""
        return [rnic for rnic in self.opened if rnic.kind == kind and self._is_usable(rnic)]

    def _is_usable(self, rnic: Rnic) -> bool:
        return rnic.port_active and not self.is_drained(rnic)

    def serving(self, local: str, remote: str, *, near: bool = False) -> Rnic | FallbackReason:
        """The RNIC for a connection between two addresses, or why there is none.

        ``near``: the peer is on this host, whatever its address says.
        """
        if near or is_same_host(local, remote):
            for rnic in self.opened:  # not all that there are: this is for each connection
                if rnic.kind == "software" and self._is_usable(rnic):
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
        """RNICs that may carry links of a group whose first link is on ``rnic``.

        Those of the same kind on the same network, itself included: software RNICs are all on
        one; RoCE ports are when their GIDs are of one subnet and VLAN, or the PNET table gives
        them to one interface. Two RNICs on one port are no redundancy: never both.
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
            table=self.table,
        )

    def _network_of(self, rnic: VerbsRnic) -> tuple[pnet.Interface, Prefix | None] | None:
        """Its interface and the subnet that it is in there; of one that has gone, as they were:
        a link group whose first RNIC it was keeps to its network."""
        interface = pnet.interfaces().get(rnic.gid_entry.ifindex) if rnic in self.opened else None
        if interface is not None:
            self._networks[rnic] = (interface, local_prefix(_address_of(rnic)))
        return self._networks.get(rnic)

    # --- draining --------------------------------------------------------------------------

    def named(self, name: str) -> Rnic:
        """The RNIC of this name. Raises ValueError when there is none."""
        for rnic in self.opened:
            if rnic.name == name:
                return rnic
        raise ValueError(f"the stack has no RNIC {name!r}")

    def drain(self, rnic: Rnic) -> None:
        """Take it out: nothing new goes over it, and `on_change` is told. Idempotent."""
        if rnic not in self._drained:
            self._drained.add(rnic)
            for each in self.on_port(rnic):
                self.on_change(each, RnicChange.DRAINED)

    def undrain(self, rnic: Rnic) -> None:
        """Put it back. Idempotent."""
        if rnic in self._drained:
            self._drained.discard(rnic)
            for each in self.on_port(rnic):
                if self._is_usable(each):
                    self.on_change(each, RnicChange.AVAILABLE)

    def is_drained(self, rnic: Rnic) -> bool:
        """Whether an operator has taken it out, or the port that it is on."""
        return rnic in self._drained or self._port_of.get(rnic) in self._drained

    def on_port(self, rnic: Rnic) -> list[Rnic]:
        """It, and what was opened for further GIDs of it."""
        return [rnic, *(each for each, port in self._port_of.items() if port is rnic)]


def _address_of(rnic: VerbsRnic) -> str:
    """The IP address that its GID was made from."""
    return plain_address(str(ipaddress.IPv6Address(rnic.gid)))
