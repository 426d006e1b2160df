"""A port of a RoCE adapter or of the kernel's soft-RoCE, through pyverbs.

Theory of operation.  One completion queue on one completion channel serves all queue pairs of an
RNIC, because pyverbs 44 cannot safely read a channel of two queues.  One epoll instance watches
the channel's descriptor and that of the asynchronous events; `wait_fd` returns the epoll instance.
It is level-triggered, so that it stays readable until `service` has read the event.
`completion_fd` removes the channel's descriptor from it and returns that descriptor.

The verbs have no call that checks for completions without taking them.  So `arm` takes them from
the completion queue and keeps them (`_polled_early`); the next call of `VerbsRnic.poll` returns
them.

A device may fail or be removed at any moment.  Then it refuses every verb.  `service`, or at the
latest `arm`, reports FATAL.  After that, refusals are ignored while objects are closed, and `poll`
returns nothing.

Each object is closed exactly once, in the order queue pair, region, domain, completion queue,
channel, device.  A call on a closed object of pyverbs would crash the process.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, Self

from trio_smc._base.resources import LACK_ERRORS
from trio_smc.rnic.memory import Memory
from trio_smc.rnic.roce import neighbours, pyverbs
from trio_smc.rnic.roce.gids import choose_entry, contains_mac, entry_for_peer, is_ipv4_mapped
from trio_smc.rnic.roce.pyverbs import CompChannel, Context, Cq, Gid, Verbs
from trio_smc.rnic.roce.queue_pair import RECEIVES, Domain, RoceQueuePair
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    ProtectionDomain,
    QueuePair,
    Rnic,
    RnicError,
    RnicEvent,
)

__all__ = ["RESOLVED_FOR", "VerbsRnic"]


_log = logging.getLogger("trio_smc.rnic")

_BATCH: Final = 16
"""Completions that one call of ibv_poll_cq takes at most.  Chosen; no measurement is recorded."""
_CQ_SIZE: Final = 32767
"""The largest completion queue of soft-RoCE.  It has room for all requests that 63 queue pairs can
have posted."""
RESOLVED_FOR: Final = 0.1
"""Seconds for which a resolved address counts as known.  Chosen: the caller checks the address and
connects at once, so this only saves the second query."""


class VerbsRnic(Rnic):
    """A port of an RDMA device that runs RoCE (RFC 7609, 2.1).

    Args:
      device: the device's name, as ``rdma link`` shows it ("rxe0").
      port: its port, from 1.
      gid_index: the GID to use; None: a RoCE v2 GID made from a global address, if there is one.

    Attributes:
      failed: the device was removed or does not answer; set when FATAL is reported, cleared by the
        next `open`.
      gid_is_fixed: the user chose the GID, and with it RoCE v1 or v2.
    """

    kind: Literal["software", "roce"] = "roce"
    copies_on_post = True
    send_depth = 256
    _context: Context

    def __init__(self, device: str, port: int = 1, gid_index: int | None = None) -> None:
        self.name: str = device if port == 1 else f"{device}/{port}"
        self.device = device
        self.port = port
        self._gid_index = gid_index
        self.gid_is_fixed: bool = gid_index is not None
        self._lib: Verbs | None = None
        self.failed: bool = False
        self.port_active: bool = False
        self._resolved_gid, self._resolved_until = b"", 0.0
        self._pairs: dict[int, RoceQueuePair] = {}
        self._domains: set[Domain] = set()
        self._polled_early: list[Completion] = []
        self._refusal = ""

    def open(self, directory: Path) -> None:
        if self._lib is not None:
            raise RnicError(errno.EBUSY, f"{self.name} is open already")
        lib = pyverbs.load()
        with lib.refusals(f"opening {self.device}"):
            self._context, self._async_fd = lib.context(self.device)
        self._lib = lib
        self._refusal = ""
        self.failed = False
        self._channel: CompChannel | None = None
        self._cq: Cq | None = None
        self._epoll = select.epoll()
        try:
            self._read_port(lib)
            with lib.refusals("ibv_create_comp_channel, ibv_create_cq"):
                self._channel, self._channel_fd = lib.channel(self._context)
                size = min(_CQ_SIZE, self._context.query_device().max_cqe)
                self._cq = lib.cq(self._context, size, self._channel)
            self._cq_size = size
            self._watched = {self._channel_fd, self._async_fd}
            for fd in self._watched:
                self._epoll.register(fd, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def _read_port(self, lib: Verbs) -> None:
        with lib.refusals(f"reading port {self.port} of {self.device}"):
            port = self._context.query_port(self.port)
            table = lib.gids(self._context, self.port)
        self.port_active = port.state == lib.port_active
        self.mtu: int = port.active_mtu
        gid = choose_entry(table, self._gid_index)
        if gid is None:
            raise RnicError(errno.ENODATA, f"{self.name} has no such GID")
        self._gid = gid
        self.gid: bytes = gid.value
        self.routable: bool = gid.kind == pyverbs.ROCE_V2 and is_ipv4_mapped(gid.value)
        netdev = socket.if_indextoname(gid.ifindex)
        address = Path(f"/sys/class/net/{netdev}/address").read_text(encoding="ascii")
        self.mac: bytes = bytes.fromhex(address.strip().replace(":", ""))

    def close(self) -> None:
        if self._lib is None:
            return
        for pair in list(self._pairs.values()):
            pair.close()
        for domain in list(self._domains):
            for region in list(domain.regions):
                region.close()
            domain.close()
        opened = (self._cq, self._channel, self._context)
        self._cq = self._channel = None
        self._polled_early.clear()
        self._epoll.close()
        for each in opened:
            if each is not None:
                with self.releasing(f"closing {self.device}"):
                    each.close()
        self._lib = None
        self.port_active = False

    def _opened(self) -> Verbs:
        if self._lib is None:
            raise RnicError(errno.EBADF, f"{self.name} is not open")
        return self._lib

    @contextmanager
    def releasing(self, what: str) -> Iterator[None]:
        """Context of a release of resources: ignores the refusals of a device that has failed."""
        lib = self._opened()
        try:
            yield
        except lib.error as refused:
            if not self.failed:
                raise lib.refusal(what, refused) from refused

    def alloc_memory(self, size: int) -> Memory:
        return Memory(size)

    def alloc_pd(self) -> ProtectionDomain:
        lib = self._opened()
        domain = Domain(self, self._context, lib, self._domains.discard)
        self._domains.add(domain)
        return domain

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> QueuePair:
        self._opened()
        if not isinstance(pd, Domain) or pd.rnic is not self or pd.closed or self._cq is None:
            raise RnicError(errno.EINVAL, f"not an open protection domain of {self.name}")
        if self.failed:
            raise RnicError(errno.EIO, f"{self.name} has failed")
        each = self.send_depth + RECEIVES
        if (len(self._pairs) + 1) * each > self._cq_size:
            raise RnicError(errno.ENOMEM, f"the completion queue of {self.name} is full")
        pair = RoceQueuePair(self, pd, self._cq, self.detach, receive_size)
        self._pairs[pair.qp_num] = pair
        return pair

    def detach(self, pair: RoceQueuePair) -> None:
        """Drop the completions of a queue pair that closes: its number may be used again."""
        self._poll_into(self._polled_early)
        del self._pairs[pair.qp_num]
        self._polled_early = [found for found in self._polled_early if found.qp_num != pair.qp_num]

    def poll(self) -> list[Completion]:
        found = self._polled_early
        if found:
            self._polled_early = []
        else:
            found = []
        if self._lib is not None:
            self._poll_into(found)
        return found

    def _poll_into(self, found: list[Completion]) -> None:
        cq, lib, pairs = self._cq, self._lib, self._pairs
        if cq is None or lib is None or self.failed:
            return
        count = _BATCH
        while count == _BATCH:
            try:
                count, completions = cq.poll(_BATCH)
            except lib.error as refused:
                # `arm` reports the failure: this method may be called from anywhere.
                self._refusal = f"ibv_poll_cq: {refused}"
                return
            for wc in completions:
                pair = pairs.get(wc.qp_num)
                if pair is not None:
                    pair.complete(wc, found)

    def arm(self) -> bool:
        lib = self._opened()
        if self.failed:
            return not self._polled_early
        if self._cq is not None:
            # 0: for each completion, because no rule makes a peer's messages solicited.
            try:
                self._cq.req_notify(0)
            except lib.error as refused:
                self._refusal = f"ibv_req_notify_cq: {refused}"
        # Completions from before `req_notify` cause no event.
        self._poll_into(self._polled_early)
        if self._refusal:
            self._fail(self._refusal)
            return False
        return not self._polled_early

    def wait_fd(self) -> int:
        self._opened()
        return self._epoll.fileno()

    def completion_fd(self) -> int:
        self._opened()
        if self._channel_fd in self._watched and not self.failed:
            self._watched.remove(self._channel_fd)
            self._epoll.unregister(self._channel_fd)
        return self._channel_fd

    def acknowledge(self) -> bool:
        lib = self._opened()
        try:
            self._acknowledge_event(lib)
        except lib.error as refused:
            self._fail(str(refused))
        return not self.failed

    def service(self) -> None:
        lib = self._opened()
        # Until nothing is readable: otherwise the edge-triggered poller would see no further event.
        while not self.failed and (ready := self._epoll.poll(0)):
            for fd, _ in ready:
                try:
                    if fd == self._async_fd:
                        self._read_event(lib)
                    else:
                        self._acknowledge_event(lib)
                except lib.error as refused:
                    self._fail(str(refused))

    def _acknowledge_event(self, lib: Verbs) -> None:
        if self._channel is None or self._cq is None or self.failed:
            return
        try:
            self._channel.get_cq_event(self._cq)
        except lib.error as refused:
            if not lib.would_block(refused):
                raise
        else:
            self._cq.ack_events(1)

    def _read_event(self, lib: Verbs) -> None:
        event = self._context.get_async_event()
        kind = event.event_type
        event.ack()
        if kind in lib.fatal_events:
            self._fail(f"event {kind}")
        else:
            self.refresh_port()  # the event names neither port nor GID

    def refresh_port(self) -> None:
        """Read the port's state and MTU, and report PORT_UP or PORT_DOWN if the state changed."""
        lib = self._opened()
        before = self.port_active
        try:
            port = self._context.query_port(self.port)
        except lib.error as refused:
            if getattr(refused, "error_code", 0) not in LACK_ERRORS:  # the device is gone
                self._fail(str(refused))
            return
        self.mtu = port.active_mtu
        self.port_active = port.state == lib.port_active
        if self.port_active != before:
            self._report(RnicEvent.PORT_UP if self.port_active else RnicEvent.PORT_DOWN)

    def _fail(self, why: str) -> None:
        """Report once that the device has failed."""
        if self.failed:
            return
        for fd in self._watched:
            self._epoll.unregister(fd)
        _log.warning("%s has failed: %s", self.name, why)
        self.failed = True
        self.port_active = False
        self._report(RnicEvent.FATAL)

    def _report(self, event: RnicEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    # -- GIDs and routes to peers ------------------------------------------------------------

    @property
    def gid_entry(self) -> Gid:
        """The entry of the GID table that was chosen when this RNIC was opened."""
        return self._gid

    def gid_table(self) -> list[Gid]:
        """The current GIDs of the port; empty if the device was removed."""
        lib = self._opened()
        try:
            return lib.gids(self._context, self.port)
        except lib.error:
            return []

    def with_gid(self, number: int) -> Self:
        """The same port with another GID, not open yet; the index is a part of its name."""
        other = type(self)(self.device, self.port, number)
        other.gid_is_fixed = self.gid_is_fixed
        other.name = f"{self.name}#{number}"
        return other

    def gid_towards(self, peer: bytes) -> Gid:
        """The entry of our GID with the encapsulation that this peer uses.

        Raises RnicError if the GID was removed from the table.
        """
        lib = self._opened()
        with lib.refusals("ibv_query_gid_table"):
            table = lib.gids(self._context, self.port)
        gid = entry_for_peer(peer, table, self._gid, fixed=self.gid_is_fixed)
        if gid is None:
            raise RnicError(errno.ENODATA, f"{self.name} has lost its GID")
        return gid

    def is_direct(self, gid: bytes) -> bool | None:
        return neighbours.is_direct(gid, self.gid, self._gid.ifindex)

    def address_known(self, gid: bytes) -> bool:
        if self._resolved_gid == gid and time.monotonic() < self._resolved_until:
            return True
        try:
            own = self.gid_towards(gid)
        except RnicError:
            return True  # `to_rtr` will raise the same error
        if not contains_mac(gid, own):
            if not neighbours.is_known(gid, own.value, own.ifindex):
                return False
            self._resolved_gid, self._resolved_until = gid, time.monotonic() + RESOLVED_FOR
        return True
