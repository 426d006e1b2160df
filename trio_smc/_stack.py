"""`Stack`: one instance of SMC-R with its own peer ID, RNICs, link groups and policy.

Theory of operation
-------------------
A stack is what RFC 7609 calls a peer.  Its background work runs in one nursery: the pump with
the RNICs' threads, one task for all timers, one for all TCP connections, and what listeners
need.  Everything else are cores that are called from there or from the user's own tasks, so all
state changes on the Trio thread.

`open_stack` puts that nursery around the user's block.  Calls outside of any `open_stack` share
a default stack, which runs in a system task of the Trio run and is closed when the run's main
task is done.

Leaving a stack (`Stack.shut_down`): listeners are closed; streams still open are aborted with a
ResourceWarning; connections whose streams were closed get `shutdown_timeout` to finish; link
groups are terminated in order; then the nursery is cancelled and the RNICs are closed.
"""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trio_smc._base.config import Config
from trio_smc._base.reasons import Fallback, FallbackReason, Origin
from trio_smc._base.statistics import StackStatistics, StreamStatistics
from trio_smc._endpoint import Endpoint
from trio_smc._tcp_watch import TcpWatch
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.discovery import Discovery
from trio_smc.rendezvous.link_group import LinkGroup
from trio_smc.rendezvous.prefixes import is_same_host
from trio_smc.rendezvous.timers import Timers
from trio_smc.rnic.pump import Pump
from trio_smc.rnic.software import SoftRnic
from trio_smc.rnic.verbs import QueuePair, Rnic, RnicError

if TYPE_CHECKING:
    from trio_smc._base.observer import Observer
    from trio_smc._listener import SmcListener
    from trio_smc.datapath.rmb import Rmbe
    from trio_smc.rendezvous import clc
    from trio_smc.rendezvous.link import Link

__all__ = ["Stack"]

LOGGER = logging.getLogger("trio_smc")


class Stack:
    """One SMC-R peer; made by `open_stack`.

    Attributes:
      config: the stack's configuration.
      peer_id: 8 bytes, new at every start (RFC 7609, 2.2.1).
      observer: told of every message, write and state change while it is not None.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.observer: Observer | None = None
        self.pump = Pump(spin=config.spin)
        self.timers = Timers(trio.current_time, self._timer_is_earlier)
        self.tcp_watch = TcpWatch()
        self.discovery = Discovery(config.private_directory())
        self.handshakes = Counter[str]()
        self.closing = False
        self._scope = trio.CancelScope(shield=True)
        self.nursery: trio.Nursery
        self._rnics: list[Rnic] = []
        self._groups: list[LinkGroup] = []
        self._endpoints: dict[object, Endpoint] = {}
        self._listeners: set[SmcListener] = set()
        self._fallbacks: Counter[tuple[Origin, FallbackReason]] = Counter()
        self._closed_totals: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._timers_changed = trio.Event()
        self._something_ended = trio.Event()
        self._pid = os.getpid()
        self._open_rnics()
        mac = self._rnics[0].mac if self._rnics else b"\x02" + secrets.token_bytes(5)
        self.peer_id = secrets.token_bytes(2) + mac

    # --- what users see ----------------------------------------------------------------------

    @property
    def rnics(self) -> tuple[Rnic, ...]:
        """The RNICs of the stack."""
        return tuple(self._rnics)

    @property
    def link_groups(self) -> tuple[LinkGroup, ...]:
        """Link groups, forming ones included."""
        return tuple(self._groups)

    def statistics(self) -> StackStatistics:
        """The counters so far; a frozen value."""
        totals = Counter(self._closed_totals)
        for endpoint in self._endpoints.values():
            _add_statistics(totals, endpoint.connection.statistics())
        pools = [group.own_rmbs.pool for group in self._groups]
        return StackStatistics(
            **{name: totals[name] for name in _STREAM_COUNTERS},
            connections=self._counts["connections"],
            open_connections=len(self._endpoints),
            unknown_tokens=self._counts["unknown_tokens"],
            buffers_allocated=self._counts["allocated"] + sum(pool.allocated for pool in pools),
            buffers_reused=self._counts["reused"] + sum(pool.reused for pool in pools),
            link_groups=self._counts["link_groups"],
            handshakes=self.handshakes["begun"],
            handshakes_failed=self.handshakes["failed"],
            refused=self.handshakes["refused"],
            fallbacks=dict(self._fallbacks),
        )

    # --- running ---------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks until `shut_down`; nothing is left afterwards.

        Shielded: what closed streams still owe goes out although the user was cancelled.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    await nursery.start(self.pump.run)
                    nursery.start_soon(self._run_timers)
                    nursery.start_soon(self.tcp_watch.run)
                    task_status.started()
        finally:
            self.closing = True
            for group in list(self._groups):
                group.machine.send("links_lost")
            for rnic in self._rnics:
                self.pump.remove(rnic)
                rnic.close()
            self.tcp_watch.close()

    async def shut_down(self) -> None:
        """Finish in order, ``shutdown_timeout`` at most for each of two steps; ends `run`."""
        with trio.CancelScope(shield=True):
            await self._finish()
        self._scope.cancel()

    async def _finish(self) -> None:
        self.closing = True
        for listener in list(self._listeners):
            listener.close()
        self._abort_open_streams()
        with trio.move_on_after(self.config.shutdown_timeout):
            while any(not endpoint.abandoned for endpoint in self._endpoints.values()):
                await self._wait_for_an_ending()
        for group in list(self._groups):
            group.terminate()
        with trio.move_on_after(self.config.shutdown_timeout):
            while self._groups:
                await self._wait_for_an_ending()

    def check_usable(self) -> None:
        """Raise ClosedResourceError on a closed stack and RuntimeError in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError("trio_smc cannot be used in a forked child; start a new process")
        if self.closing:
            raise trio.ClosedResourceError("the stack is closed")

    def _abort_open_streams(self) -> None:
        for endpoint in list(self._endpoints.values()):
            if not endpoint.closed_by_user:
                warnings.warn(
                    f"{endpoint.connection!r} was open when its stack was closed",
                    ResourceWarning,
                    stacklevel=2,
                )
                endpoint.connection.abort()
                endpoint.abandoned = True

    async def _wait_for_an_ending(self) -> None:
        self._something_ended = trio.Event()
        await self._something_ended.wait()

    async def _run_timers(self) -> None:
        while True:
            self._timers_changed = trio.Event()
            with trio.move_on_at(self.timers.next_deadline()):
                await self._timers_changed.wait()
            self.timers.run_due()

    def _timer_is_earlier(self) -> None:
        self._timers_changed.set()

    # --- RNICs -----------------------------------------------------------------------------

    def rnic_for(self, local: str, remote: str) -> Rnic | FallbackReason:
        """The RNIC that serves a connection between two addresses, or why none does."""
        software = is_same_host(local, remote)
        down = False
        for rnic in self._rnics:
            if (rnic.kind == "software") is software and software:
                if rnic.port_active:
                    return rnic
                down = True
        return FallbackReason.RNIC_DOWN if down else FallbackReason.NO_RNIC

    def _open_rnics(self) -> None:
        automatic = self.config.rnics == "auto"
        rnics = (SoftRnic(),) if isinstance(self.config.rnics, str) else self.config.rnics
        directory = Path(self.config.private_directory())
        for rnic in rnics:
            try:
                rnic.open(directory)
            except RnicError as error:
                if not automatic:
                    for opened in self._rnics:
                        opened.close()
                    raise
                LOGGER.warning("%s cannot be used: %s", rnic.name, error)
                continue
            self._rnics.append(rnic)
            self.pump.add(rnic)

    # --- trio_smc.rendezvous.link_group.GroupHost -----------------------------------------

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Send a queue pair's completions to its link."""
        self.pump.register(rnic, qp, link)

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Stop doing so."""
        self.pump.unregister(rnic, qp)

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

    def find_server_group(self, peer_id: bytes, rnic: Rnic) -> LinkGroup | None:
        """A server-role group with this peer on RNICs of this kind; a usable one first."""
        forming = None
        for group in self._groups:
            if group.client or group.peer_id != peer_id or group.rnic.kind != rnic.kind:
                continue
            if group.usable:
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
            flush_later=self.pump.flush_later if self.config.checkpoints == "amortised" else None,
        )
        group.add_connection(connection.alert_token, connection)
        self._endpoints[connection] = endpoint
        return connection

    # --- connections and listeners ---------------------------------------------------------

    def endpoint_of(self, connection: object) -> Endpoint:
        """The endpoint that `open_connection` made for this connection."""
        return self._endpoints[connection]

    def connection_closed(self, endpoint: Endpoint) -> None:
        """A connection is CLOSED and has given everything back."""
        del self._endpoints[endpoint.connection]
        _add_statistics(self._closed_totals, endpoint.connection.statistics())
        self._something_ended.set()

    def count_mode(self, connection: object, fallback: Fallback | None) -> None:
        """A connection became SMC-R (None) or stays TCP."""
        if fallback is None:
            self._counts["connections"] += 1
        else:
            self._fallbacks[fallback.origin, fallback.reason] += 1
            LOGGER.debug("plain TCP: %s", fallback.message)
        if self.observer is not None:
            self.observer.mode(connection, fallback)

    def add_listener(self, listener: SmcListener) -> None:
        """Close ``listener`` when the stack is left."""
        self._listeners.add(listener)

    def remove_listener(self, listener: SmcListener) -> None:
        """It was closed."""
        self._listeners.discard(listener)


_STREAM_COUNTERS = tuple(field.name for field in fields(StreamStatistics))


def _add_statistics(totals: Counter[str], statistics: StreamStatistics) -> None:
    for name in _STREAM_COUNTERS:
        totals[name] += getattr(statistics, name)
