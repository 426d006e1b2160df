"""`GroupTable`: the link groups of one SMC-R peer, and its connections.

This object is the stack, as seen by link groups (`links.group.GroupHost`), negotiations
(`NegotiationHost`) and endpoints (`EndpointOwner`). It finds the group that serves a peer, keeps
the open connections, over SMC-R or TCP, and counts them. It has no task; the tasks are in
`stack.runtime`.

If an RNIC is lost, `stack.rnics` notices, `GroupTable.rnic_changed` notifies the link groups of the
RNIC's kind, each group loses its links on the RNIC (`LinkGroup.rnic_lost`), and the connections of
these links move (`failover`).
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import islice
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from trio_smc._base.journal import Journal
from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc._base.statistics import STREAM_COUNTERS, Agreed, StackStatistics
from trio_smc._base.weak import WeakSet
from trio_smc.datapath.connection import Connection
from trio_smc.failover.mover import GroupMover
from trio_smc.host.netlink import kernel_ueids
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.terms import HOST_SIZE, Offer, Terms
from trio_smc.rnic.verbs import QueuePair, Rnic
from trio_smc.stack.connection_host import Endpoint
from trio_smc.stack.rnics import RnicChange, StackRnics
from trio_smc.wire.fields import eid_name, encode_ueid

if TYPE_CHECKING:
    from trio_smc._base.observer import Observer
    from trio_smc._base.timers import Timers
    from trio_smc.config.config import Config
    from trio_smc.datapath.rmb import Rmbe
    from trio_smc.rendezvous.links.link import Link, Mover
    from trio_smc.rnic.pump import Pump
    from trio_smc.stack.policy import ShortConnections
    from trio_smc.stack.tcp_watch import TcpWatch
    from trio_smc.wire import clc

__all__ = ["GroupTable", "OpenStream"]

LOGGER = logging.getLogger("trio_smc")

_COUNTED_AT_ONCE: Final = 128
"""Connections whose counters are added up at a time. Chosen. When all were added up at once, and
all RMBs were freed at once, the end of 10,000 connections stopped the loop for 134 ms, now for
3."""


class OpenStream(Protocol):
    """A stream, as seen by the code that closes it."""

    @property
    def socket(self) -> Any:
        """The TCP connection."""

    def carried(self) -> tuple[int, int]:
        """Bytes sent and received."""

    def close(self) -> None:
        """Close the stream, as close(2) closes a socket."""


class GroupTable:
    """Link groups and connections of one peer (RFC 7609, 2.1, 2.2).

    Args:
      rnics: opened. The MAC address of the first RNIC is part of the peer ID.
      ended: called when a group or a connection has ended.

    Attributes:
      peer_id: 8 bytes, new at every start (RFC 7609, 2.2.1).
      ueids: offered for SMC-R version 2; None if they come from a kernel without SMC.
      offer: this side's part of an agreement on SMC-R version 2; None: version 1 only.
      observer: notified of every message, write and state change; or None.
      journal: the last events.
      groups: link groups, forming and ending ones included.
      endpoints: by connection, except CLOSED ones.
      tcp_streams: streams over TCP that may be open.
      tcp_watch: watches the TCP connections under SMC-R; while the stack runs.
      handshakes: numbers of handshakes that were "begun", "failed" and "refused".
      link_gone: tasks that wait for the end of a link.
    """

    tcp_watch: TcpWatch

    def __init__(
        self, config: Config, rnics: StackRnics, pump: Pump, timers: Timers,
        short_connections: ShortConnections, ended: Callable[[], None],
    ) -> None:  # fmt: skip
        eids = _eids(config)
        self.ueids: tuple[str, ...] | None = None if eids is None else tuple(map(eid_name, eids))
        self.offer: Offer | None = Offer(eids=eids, host=_host_name()) if eids else None
        self.pump = pump
        pump.unused = True
        self.timers = timers
        self.observer: Observer | None = None
        self.journal: Journal = Journal()
        self.groups: list[LinkGroup] = []
        self.endpoints: dict[object, Endpoint] = {}
        self.tcp_streams: WeakSet[OpenStream] = WeakSet()
        self.handshakes: Counter[str] = Counter[str]()
        self.link_gone: Any = trio.lowlevel.ParkingLot()
        self._config = config
        self._rnics = rnics
        self._short_connections = short_connections
        self._ended = ended
        self._fallbacks: Counter[tuple[Origin, FallbackReason]] = Counter()
        self._agreed: Counter[Agreed] = Counter()
        self._client_connections = 0
        self._closed_totals = [0] * len(STREAM_COUNTERS)
        self._tcp_totals = 0, 0
        self._counts: Counter[str] = Counter()
        self.peer_id: bytes = rnics.new_peer_id()

    # --- RNICs -----------------------------------------------------------------------------

    def rnic_changed(self, rnic: Rnic, change: RnicChange) -> None:
        """Notify the link groups of the RNIC's kind, each in a turn of its own.

        If the RNIC is about to be closed, all are notified at once.
        """
        for group in list(self.groups):
            if group.rnic.kind == rnic.kind:
                if rnic in self._rnics.opened:
                    self.timers.in_turn(partial(_apply_change, group, rnic, change))
                else:
                    _apply_change(group, rnic, change)

    def on_rnics(self, rnics: list[Rnic]) -> list[LinkGroup]:
        """The groups that have a link on one of these RNICs."""
        return [
            group
            for group in self.groups
            if any(link.rnic in rnics for link in group.links.values())
        ]

    def end_unused(self, groups: list[LinkGroup]) -> None:
        """Terminate groups without connections that have no usable RNIC left (3.5.4)."""
        for group in groups:
            if (
                not group.connections
                and not group.own_rmbs.busy
                and group.usable
                and not group.usable_rnics()
            ):
                group.terminate()

    def end_if_unused(self, group: LinkGroup) -> None:
        """Terminate a group that an operator drains, once it has no connections (3.5.4)."""
        if not group.connections and not group.own_rmbs.busy and group.usable:
            group.terminate()

    # --- trio_smc.rendezvous.links.group.GroupHost -------------------------------------------

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Dispatch a queue pair's completions to its link."""
        self.pump.register(rnic, qp, link)

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Undo `register`."""
        self.pump.unregister(rnic, qp)
        self.link_gone.unpark_all()

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs for further links of a group that has a link on ``rnic``."""
        return self._rnics.companions(rnic)

    def new_mover(self, group: LinkGroup) -> Mover:
        """The object that moves the connections of a group between its links."""
        return GroupMover(group, self.pump.drain_queue_pair)

    def group_gone(self, group: LinkGroup) -> None:
        """Remove a group that has freed everything."""
        self.groups.remove(group)
        self._counts["allocated"] += group.own_rmbs.pool.allocated
        self._counts["reused"] += group.own_rmbs.pool.reused
        self._ended()

    def count_unknown_token(self) -> None:
        """Count a CDC message that named no connection."""
        self._counts["unknown_tokens"] += 1

    # --- trio_smc.rendezvous.negotiation.NegotiationHost ---------------------------------

    def find_client_link(self, accept: clc.Accept) -> tuple[LinkGroup, Link] | None:
        """The link that an SMC Accept names, in a client-role group (RFC 7609, 3.5.2.2)."""
        for group in self.groups:
            if (
                group.client
                and group.peer_id == accept.peer_id
                and (group.terms.version > 1) is (accept.v2 is not None)
                and group.usable
            ):
                link = group.find_link(accept.gid, accept.mac, accept.qp_number)
                if link is not None:
                    return group, link
        return None

    def find_server_group(
        self, proposed: tuple[bytes, bytes], terms: Terms, rnic: Rnic, size: int
    ) -> LinkGroup | None:
        """A server-role group with this client, on the network of ``rnic``.

        A group that takes a connection with an element of ``size`` bytes is preferred; otherwise a
        group that is just forming is returned, or None.
        """
        forming = None
        for group in self.groups:
            if group.client or not group.belongs_to(proposed) or not terms.fits(group.terms):
                continue
            if not self._rnics.share_network(group.rnic, rnic):
                continue
            if group.can_take(size):
                return group
            if group.state == "FORMING":
                forming = group
        return forming

    def new_group(
        self, *, client: bool, peer_id: bytes, rnic: Rnic, terms: Terms,
        proposed: tuple[bytes, bytes],
    ) -> LinkGroup:  # fmt: skip
        """Make a link group, in state FORMING."""
        group = LinkGroup(
            client=client, peer_id=peer_id, rnic=rnic, config=self._config, timers=self.timers,
            host=self, terms=terms, proposed=proposed,
        )  # fmt: skip
        self.groups.append(group)
        self._counts["link_groups"] += 1
        return group

    def open_connection(self, group: LinkGroup, rmbe: Rmbe) -> Connection:
        """Make a connection that owns ``rmbe``, with an alert token of its group."""
        self.pump.unused = False
        self.pump.resume_hooks()
        endpoint = Endpoint(self, group, rmbe)
        connection = endpoint.connection = Connection(
            alert_token=group.connections.new_token(),
            rmbe=rmbe,
            host=endpoint,
            close_timeout=self._config.close_timeout,
        )
        connection.in_turn = self.timers.in_turn
        group.add_connection(connection.alert_token, connection)
        self.endpoints[connection] = endpoint
        return connection

    # --- connections -----------------------------------------------------------------------

    def endpoint_of(self, connection: object) -> Endpoint | None:
        """The endpoint that `open_connection` made for this connection; None once it is CLOSED."""
        return self.endpoints.get(connection)

    def connection_closed(self, endpoint: Endpoint) -> None:
        """Remove a connection that is CLOSED and has freed everything."""
        del self.endpoints[endpoint.connection]
        self.pump.unused = not self.endpoints
        connection = endpoint.connection
        if connection.error is not None:
            group = endpoint.group
            what = f"as {'client' if group.client else 'server'} of {group.peer_id.hex()}"
            self.journal.changed("connection", what, None, "CLOSED", str(connection.error))
        self._closed_totals = [*map(add, self._closed_totals, connection.counters())]
        size = connection.sender.bytes_sent + connection.receiver.bytes_received
        self._short_connections.closed(connection, size)
        self._ended()

    def connection_moved(self) -> None:
        """An abandoned connection may have finished its work."""
        self._ended()

    def ended_endpoint(self, connection: Connection, group: LinkGroup) -> Endpoint:
        """Make an endpoint for the stream of a connection that is already CLOSED."""
        endpoint = Endpoint(self, group, connection.rmbe)
        endpoint.connection = connection
        return endpoint

    def handshake(self) -> _Handshake:
        """A context manager that counts a handshake, as failed if it raises."""
        return _Handshake(self.handshakes)

    def count_smc(self, connection: object, group: LinkGroup) -> None:
        """Count a connection that became SMC-R, by its role and the agreement of its link group."""
        self._agreed[group.agreed] += 1
        self._client_connections += group.client
        self.pump.resume_hooks()
        if self.observer is not None:
            self.observer.mode(connection, None)

    def count_tcp(self, connection: OpenStream | None, fallback: Fallback) -> None:
        """Count a connection that stays TCP; None: it was refused, as SMC-R is required."""
        self._fallbacks[fallback.origin, fallback.reason] += 1
        mode = "refused" if connection is None else "tcp"
        self.journal.decided(mode, fallback.origin, fallback.reason)
        if LOGGER.isEnabledFor(logging.DEBUG):  # otherwise the message need not be made
            LOGGER.debug("plain TCP: %s", fallback.message)
        if connection is not None:
            self.tcp_streams.add(connection)
        if self.observer is not None:
            self.observer.mode(connection, fallback)

    def tcp_ended(self, stream: OpenStream) -> None:
        """Remove a stream over TCP that is about to be closed."""
        self.tcp_streams.discard(stream)
        self._tcp_totals = _add_bytes(self._tcp_totals, stream)

    def statistics(self) -> StackStatistics:
        """The counters so far."""
        totals, endpoints = self._closed_totals, iter(self.endpoints.values())
        # In portions: thousands of new tuples would start a full garbage collection.
        while some := [each.connection.counters() for each in islice(endpoints, _COUNTED_AT_ONCE)]:
            totals = [*map(sum, zip(totals, *some, strict=True))]
        pools = [group.own_rmbs.pool for group in self.groups]
        tcp_sent, tcp_received = reduce(_add_bytes, self.tcp_streams, self._tcp_totals)
        return StackStatistics(
            **dict(zip(STREAM_COUNTERS, totals, strict=True)),
            connections=self._agreed.total(),
            client_connections=self._client_connections,
            server_connections=self._agreed.total() - self._client_connections,
            agreed=MappingProxyType(dict(self._agreed)),
            tcp_bytes_sent=tcp_sent,
            tcp_bytes_received=tcp_received,
            open_connections=len(self.endpoints),
            unknown_tokens=self._counts["unknown_tokens"],
            buffers_allocated=self._counts["allocated"] + sum(pool.allocated for pool in pools),
            buffers_reused=self._counts["reused"] + sum(pool.reused for pool in pools),
            link_groups=self._counts["link_groups"],
            handshakes=self.handshakes["begun"],
            handshakes_failed=self.handshakes["failed"],
            refused=self.handshakes["refused"],
            fallbacks=MappingProxyType(dict(self._fallbacks)),
        )

    # --- the end ---------------------------------------------------------------------------

    def close_open(self) -> Iterator[str]:
        """Close the streams that are still open, as close(2) does. Yields a warning for each."""
        for endpoint in list(self.endpoints.values()):
            warning = None if endpoint.closed_by_user else _was_open(endpoint.connection)
            endpoint.forgotten()
            if warning is not None:
                yield warning
        for stream in list(self.tcp_streams):
            if stream.socket.fileno() >= 0:
                warning = _was_open(stream)
                stream.close()
                yield warning

    @property
    def has_unfinished(self) -> bool:
        """True if a connection has to finish something for its peer."""
        return any(endpoint.is_unfinished for endpoint in self.endpoints.values())

    @property
    def has_roce(self) -> bool:
        """True if a link group uses RoCE ports."""
        return any(group.rnic.kind == "roce" for group in self.groups)

    def terminate_all(self) -> Iterator[None]:
        """Terminate all groups orderly (RFC 7609, 3.5.4), one per step."""
        for group in list(self.groups):
            group.terminate()
            yield

    def give_up_all(self) -> Iterator[None]:
        """Stop waiting for the peers of all groups, one per step. Timers end the groups."""
        for group in list(self.groups):
            group.give_up()
            yield

    def lose_links(self) -> None:
        """Free all groups now, without their peers."""
        for group in list(self.groups):
            group.end_now()


def _apply_change(group: LinkGroup, rnic: Rnic, change: RnicChange) -> None:
    if change is RnicChange.AVAILABLE:
        group.rnic_available(rnic)
    elif change is RnicChange.DRAINED:
        group.rnic_unavailable(rnic)
    else:
        group.rnic_lost(rnic)


def _was_open(stream: object) -> str:
    return f"{stream!r} was open when its stack was closed"


def _add_bytes(totals: tuple[int, int], stream: OpenStream) -> tuple[int, int]:
    """The bytes sent and received, with those of ``stream`` added."""
    sent, received = stream.carried()
    return totals[0] + sent, totals[1] + received


def _eids(config: Config) -> tuple[bytes, ...] | None:
    """`GroupTable.ueids` as EIDs of 32 bytes."""
    if config.ueids != "kernel":
        return tuple(map(encode_ueid, config.ueids))
    eids = kernel_ueids()
    if not eids:
        why = "has no SMC" if eids is None else "has no UEIDs"
        LOGGER.info("the kernel %s: SMC-R version 2 is not offered", why)
    return eids


def _host_name() -> bytes:
    return socket.gethostname().encode("ascii", "replace")[:HOST_SIZE].ljust(HOST_SIZE)


class _Handshake:
    """See `GroupTable.handshake`."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._counts["begun"] += 1

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._counts["failed"] += 1
