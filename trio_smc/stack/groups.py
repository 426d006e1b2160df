"""The inside of a stack: what its link groups, listeners, streams and negotiations call.

Its background work, and how it ends, are told in `_stack_life`.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import Counter
from operator import add
from typing import TYPE_CHECKING

import trio

from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc._base.statistics import STREAM_COUNTERS
from trio_smc.config.config import Config
from trio_smc.datapath.connection import Connection
from trio_smc.failover.mover import GroupMover
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rnic.spinner import NEVER, Spinner
from trio_smc.rnic.verbs import QueuePair, Rnic
from trio_smc.stack.connection_host import Endpoint
from trio_smc.stack.policy import ShortConnections
from trio_smc.stack.rnics import RnicChange
from trio_smc.stack.runtime import Closable, OpenStream, StackLife
from trio_smc.streams.group_views import LinkGroup as LinkGroupView

if TYPE_CHECKING:
    from trio_smc._base.observer import Observer
    from trio_smc.datapath.rmb import Rmbe
    from trio_smc.rendezvous.links.context import Mover
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.wire import clc

__all__ = [
    "StackCore",
]


LOGGER = logging.getLogger("trio_smc")


class StackCore(StackLife):
    """One SMC-R peer, as the other rooms and the rest of the top level see it.

    Attributes:
      short_connections: whose connections were not worth SMC-R.
      link_gone: tasks that wait for the end of a link.
      peer_id: 8 bytes, new at every start (RFC 7609, 2.2.1).
      observer: told of every message, write and state change while it is not None.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.observer: Observer | None = None
        self.handshakes = Counter[str]()
        self.short_connections = ShortConnections(trio.current_time)
        self.link_gone = trio.lowlevel.ParkingLot()
        self._fallbacks: Counter[tuple[Origin, FallbackReason]] = Counter()
        self._closed_totals = [0] * len(STREAM_COUNTERS)
        self._counts: Counter[str] = Counter()
        self._offering: weakref.WeakSet[trio.socket.SocketType] = weakref.WeakSet()
        opened = self.rnic_set.opened
        mac = opened[0].mac if opened else b"\x02" + secrets.token_bytes(5)
        self.peer_id = secrets.token_bytes(2) + mac

    def view(self, group: LinkGroup) -> LinkGroupView:
        """What users see of a link group."""
        return LinkGroupView(group, self.check_not_forked)

    # --- RNICs -----------------------------------------------------------------------------

    def rnic_for(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RNIC that serves a connection between two addresses, or why none does."""
        if not self._supported:
            return FallbackReason.UNSUPPORTED_PLATFORM
        return self.rnic_set.serving(local, remote)

    def spinner_for(self, rnic: Rnic | FallbackReason) -> Spinner:
        """Who may wait awake: the peer must be on this host, or it takes too long to answer."""
        local = not isinstance(rnic, FallbackReason) and rnic.kind == "software"
        return self.spinner if local else NEVER

    def offer_option(self, config: Config, sock: trio.socket.SocketType) -> None:
        """Let a socket that is going to listen offer SMC-R by the TCP option, where it may.

        Under "auto" that is when there is a RoCE port, so perhaps later.
        """
        if config.discovery == "auto":
            self._offering.add(sock)
        remote = any(rnic.kind == "roce" for rnic in self.rnic_set.opened)
        if config.discovery == "tcp-option" or (config.discovery == "auto" and remote):
            self.tcp_option.offer(sock)

    def _rnic_changed(self, rnic: Rnic, change: RnicChange) -> None:
        """An RNIC came or went: link groups of its kind are told."""
        if change is RnicChange.AVAILABLE and rnic.kind == "roce":
            for sock in list(self._offering):
                if sock.fileno() >= 0:
                    self.tcp_option.offer(sock)
        for group in list(self._groups):
            if group.rnic.kind != rnic.kind:
                continue
            if change is RnicChange.AVAILABLE:
                group.rnic_available(rnic)
            elif change is RnicChange.DRAINED:
                group.rnic_unavailable(rnic)
            else:
                group.rnic_lost(rnic)

    # --- trio_smc.rendezvous.group_host.GroupHost -----------------------------------------

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Send a queue pair's completions to its link."""
        self.pump.register(rnic, qp, link)

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Stop doing so."""
        self.pump.unregister(rnic, qp)
        self.link_gone.unpark_all()

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs that may carry links now beside one on ``rnic``."""
        return self.rnic_set.companions(rnic)

    def new_mover(self, group: LinkGroup) -> Mover:
        """Who moves the connections of a group between its links."""
        return GroupMover(group, self.pump.drain_queue_pair)

    def group_gone(self, group: LinkGroup) -> None:
        """A group has freed everything."""
        self._groups.remove(group)
        self._counts["allocated"] += group.own_rmbs.pool.allocated
        self._counts["reused"] += group.own_rmbs.pool.reused
        self._something_ended.set()

    def count_unknown_token(self) -> None:
        """A CDC message named no connection."""
        self._counts["unknown_tokens"] += 1

    # --- trio_smc.rendezvous.negotiation.NegotiationHost ---------------------------------

    def find_client_group(self, accept: clc.Accept) -> LinkGroup | None:
        """The client-role group with the link that an SMC Accept names (RFC 7609, 3.5.2.2)."""
        for group in self._groups:
            if (
                group.client
                and group.peer_id == accept.peer_id
                and group.usable
                and group.find_link(accept.gid, accept.mac, accept.qp_number) is not None
            ):
                return group
        return None

    def find_server_group(self, peer_id: bytes, rnic: Rnic, size: int) -> LinkGroup | None:
        """A server-role group with this peer, on the network of ``rnic``, that takes a connection
        with an element of ``size`` bytes, or else one that is just forming."""
        forming = None
        for group in self._groups:
            if group.client or group.peer_id != peer_id:
                continue
            if not self.rnic_set.share_network(group.rnic, rnic):
                continue
            if group.takes(size):
                return group
            if group.state == "FORMING":
                forming = group
        return forming

    def new_group(self, *, client: bool, peer_id: bytes, rnic: Rnic) -> LinkGroup:
        """A link group that is about to be formed."""
        group = LinkGroup(
            client=client, peer_id=peer_id, rnic=rnic, config=self.config, timers=self.timers,
            host=self,
        )  # fmt: skip
        self._groups.append(group)
        self._counts["link_groups"] += 1
        return group

    def open_connection(self, group: LinkGroup, rmbe: Rmbe) -> Connection:
        """A connection that owns ``rmbe``, known to its group by its alert token."""
        endpoint = Endpoint(self, group, rmbe)
        connection = endpoint.connection = Connection(
            alert_token=group.new_token(),
            rmbe=rmbe,
            host=endpoint,
            close_timeout=self.config.close_timeout,
        )
        connection.receiver.urgent_inline = self.config.urgent_inline
        group.add_connection(connection.alert_token, connection)
        self._endpoints[connection] = endpoint
        return connection

    # --- connections and listeners ---------------------------------------------------------

    def endpoint_of(self, connection: object) -> Endpoint | None:
        """The endpoint that `open_connection` made for this connection; None once it is CLOSED."""
        return self._endpoints.get(connection)

    def connection_closed(self, endpoint: Endpoint) -> None:
        """A connection is CLOSED and has given everything back."""
        del self._endpoints[endpoint.connection]
        connection = endpoint.connection
        self._closed_totals = [*map(add, self._closed_totals, connection.counters())]
        size = connection.sender.bytes_sent + connection.receiver.bytes_received
        self.short_connections.closed(connection, size)
        self._something_ended.set()

    def handshake(self) -> _Handshake:
        """Around a handshake: counts it, and whether it ended the TCP connection."""
        return _Handshake(self.handshakes)

    def count_mode(self, connection: OpenStream | None, fallback: Fallback | None) -> None:
        """A connection became SMC-R (None) or stays TCP; no connection: it was refused then."""
        if fallback is None:
            self._counts["connections"] += 1
        else:
            self._fallbacks[fallback.origin, fallback.reason] += 1
            LOGGER.debug("plain TCP: %s", fallback.message)
            if connection is not None:
                self._tcp_streams.add(connection)
        if self.observer is not None:
            self.observer.mode(connection, fallback)

    def add_listener(self, listener: Closable) -> None:
        """Close ``listener`` when the stack is left."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Closable) -> None:
        """It was closed."""
        self._listeners.discard(listener)


class _Handshake:
    """See `StackCore.handshake`."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._counts["begun"] += 1

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._counts["failed"] += 1
