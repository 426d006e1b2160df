"""RoCE adapters and the kernel's soft-RoCE through pyverbs.

Theory of operation.  One completion queue on one completion channel serves all queue pairs of an
RNIC: with pyverbs 44 a channel of two queues cannot be read safely.  The channel's descriptor and
that of the asynchronous events sit in one epoll instance, which is what `wait_fd` gives:
level-triggered, so that it stays readable until `service` has taken the event.

Verbs have no way to look whether something has completed without taking it, so `arm` keeps what
it finds for the next `poll`.

Everything closes exactly once and in the order queue pair, region, domain, completion queue,
channel, device: a call on a closed object of pyverbs crashes the process.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from pathlib import Path
from typing import Final, Literal

from . import _pyverbs
from ._rocepair import PinnedMemory, RoceQueuePair
from .memory import Memory
from .verbs import (
    Completion,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
    Rnic,
    RnicError,
    RnicEvent,
)

__all__ = ["VerbsRnic", "active_ports"]

_DEVICES: Final = Path("/sys/class/infiniband")
_ACTIVE: Final = "4:"  # IBV_PORT_ACTIVE and its name
_BATCH: Final = 16
_CQ_SIZE: Final = 32767
"""Soft-RoCE's largest: room for all that 63 queue pairs can have posted."""


def active_ports() -> list[VerbsRnic]:
    """An RNIC, not open, for every RoCE port of this host that is active now.

    Asked of sysfs, so that a host without any need not load pyverbs.
    """
    found = []
    for port in sorted(_DEVICES.glob("*/ports/*")):
        with contextlib.suppress(OSError):  # it is just going
            layer = (port / "link_layer").read_text(encoding="ascii").strip()
            state = (port / "state").read_text(encoding="ascii")
            if layer == "Ethernet" and state.startswith(_ACTIVE):
                found.append(VerbsRnic(port.parents[1].name, int(port.name)))
    return found


class Region(MemoryRegion):
    def __init__(self, pd: Domain, memory: PinnedMemory) -> None:
        lib = pd.lib
        with lib.refusals("ibv_reg_mr"):
            self._mr: _pyverbs.Mr | None = lib.mr(
                pd.pd, memory.address, memory.size, remote_write=True
            )
        self._pd = pd
        self._memory = memory  # pinned pages stay writable for peers: outlives the region
        self.rkey = self._mr.rkey
        self.address = memory.address
        self.length = memory.size
        pd.regions.add(self)

    def close(self) -> None:
        if self._mr is None:
            return
        mr, self._mr = self._mr, None
        self._pd.regions.discard(self)
        with self._pd.lib.refusals("ibv_dereg_mr"):
            mr.close()


class Domain(ProtectionDomain):
    def __init__(self, rnic: VerbsRnic, context: _pyverbs.Context, lib: _pyverbs.Verbs) -> None:
        self.rnic = rnic
        self.lib = lib
        with lib.refusals("ibv_alloc_pd"):
            self.pd = lib.pd(context)
        self.regions: set[Region] = set()
        self.pairs: set[RoceQueuePair] = set()
        self.closed = False

    def register(self, memory: Memory) -> MemoryRegion:
        if self.closed:
            raise RnicError(errno.EBADF, "the protection domain is closed")
        if not isinstance(memory, PinnedMemory):
            raise TypeError("only memory from VerbsRnic.alloc_memory can be registered")
        return Region(self, memory)

    def close(self) -> None:
        if self.closed:
            return
        # pyverbs would close them too, and their next call would then crash.
        if self.regions or self.pairs:
            raise RnicError(errno.EBUSY, "regions or queue pairs of the domain are still open")
        self.closed = True
        self.rnic.forget(self)
        with self.lib.refusals("ibv_dealloc_pd"):
            self.pd.close()


class VerbsRnic(Rnic):
    """A port of an RDMA device that runs RoCE (RFC 7609, 2.1).

    Args:
      device: the device's name, as ``rdma link`` shows it ("rxe0").
      port: its port, from 1.
      gid_index: the GID to use; None: a RoCE v2 GID made from a global address, if there is one.
    """

    kind: Literal["software", "roce"] = "roce"
    copies_on_post = True
    send_depth = 256
    receive_depth = 256

    def __init__(self, device: str, port: int = 1, gid_index: int | None = None) -> None:
        self.name = device if port == 1 else f"{device}/{port}"
        self.device = device
        self.port = port
        self._gid_index = gid_index
        self._lib: _pyverbs.Verbs | None = None
        self._pairs: dict[int, RoceQueuePair] = {}
        self._domains: set[Domain] = set()
        self._found: list[Completion] = []

    def open(self, directory: Path) -> None:
        if self._lib is not None:
            raise RnicError(errno.EBUSY, f"{self.name} is open already")
        lib = _pyverbs.load()
        with lib.refusals(f"opening {self.device}"):
            self._context, self._async_fd = lib.context(self.device)
        self._lib = lib
        self._channel: _pyverbs.Channel | None = None
        self._cq: _pyverbs.Cq | None = None
        self._epoll = select.epoll()
        try:
            self._read_port(lib)
            with lib.refusals("ibv_create_comp_channel, ibv_create_cq"):
                self._channel, self._channel_fd = lib.channel(self._context)
                size = min(_CQ_SIZE, self._context.query_device().max_cqe)
                self._cq = lib.cq(self._context, size, self._channel)
            self._cq_size = size
            self._epoll.register(self._channel_fd, select.EPOLLIN)
            self._epoll.register(self._async_fd, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def _read_port(self, lib: _pyverbs.Verbs) -> None:
        with lib.refusals(f"reading port {self.port} of {self.device}"):
            port = self._context.query_port(self.port)
            table = lib.gids(self._context, self.port)
        self.port_active = port.state == lib.port_active
        self.mtu = port.active_mtu
        gid = _choose(table, self._gid_index)
        if gid is None:
            raise RnicError(errno.ENODATA, f"{self.name} has no such GID")
        self._gid = gid
        self.gid = gid.value
        netdev = socket.if_indextoname(gid.ifindex)
        address = Path(f"/sys/class/net/{netdev}/address").read_text(encoding="ascii")
        self.mac = bytes.fromhex(address.strip().replace(":", ""))

    @property
    def gid_entry(self) -> _pyverbs.Gid:
        """The entry of the GID table that this RNIC uses, as it was when it was opened."""
        return self._gid

    @property
    def gid_is_fixed(self) -> bool:
        """Whether the user chose the GID."""
        return self._gid_index is not None

    def gid_table(self) -> list[_pyverbs.Gid]:
        """The port's GIDs now; empty when the device is gone."""
        lib = self._opened()
        try:
            return lib.gids(self._context, self.port)
        except lib.error:
            return []

    def with_gid(self, number: int) -> VerbsRnic:
        """The same port with another GID, not open yet; its name says which."""
        other = VerbsRnic(self.device, self.port, number)
        other.name = f"{self.name}#{number}"
        return other

    def current_gid_index(self) -> int:
        """Where our GID stands now: an address that goes and comes back changes its index."""
        lib = self._opened()
        with lib.refusals("ibv_query_gid_table"):
            for gid in lib.gids(self._context, self.port):
                if gid[1:] == self._gid[1:]:
                    return gid.number
        raise RnicError(errno.ENODATA, f"{self.name} has lost its GID")

    def _opened(self) -> _pyverbs.Verbs:
        if self._lib is None:
            raise RnicError(errno.EBADF, f"{self.name} is not open")
        return self._lib

    def close(self) -> None:
        if self._lib is None:
            return
        for pair in list(self._pairs.values()):
            pair.close()
        for domain in list(self._domains):
            for region in list(domain.regions):
                region.close()
            domain.close()
        lib, self._lib = self._lib, None
        self._found.clear()
        self._epoll.close()
        with lib.refusals(f"closing {self.device}"):
            if self._cq is not None:
                self._cq.close()
            if self._channel is not None:
                self._channel.close()
            self._context.close()

    def alloc_memory(self, size: int) -> Memory:
        return PinnedMemory(size)

    def alloc_pd(self) -> ProtectionDomain:
        lib = self._opened()
        domain = Domain(self, self._context, lib)
        self._domains.add(domain)
        return domain

    def forget(self, domain: Domain) -> None:
        """A domain closes."""
        self._domains.discard(domain)

    def create_qp(self, pd: ProtectionDomain) -> QueuePair:
        self._opened()
        if not isinstance(pd, Domain) or pd.rnic is not self or pd.closed or self._cq is None:
            raise RnicError(errno.EINVAL, f"not an open protection domain of {self.name}")
        each = self.send_depth + self.receive_depth
        if (len(self._pairs) + 1) * each > self._cq_size:
            raise RnicError(errno.ENOMEM, f"{self.name} has no completion queue room left")
        pair = RoceQueuePair(self, pd, self._cq)
        self._pairs[pair.qp_num] = pair
        return pair

    def detach(self, pair: RoceQueuePair) -> None:
        """A queue pair closes: take its completions out, its number may be given again."""
        self._take(self._found)
        del self._pairs[pair.qp_num]
        self._found = [found for found in self._found if found.qp_num != pair.qp_num]

    def poll(self) -> list[Completion]:
        found = self._found
        if found:
            self._found = []
        else:
            found = []
        if self._lib is not None:
            self._take(found)
        return found

    def _take(self, found: list[Completion]) -> None:
        cq, pairs = self._cq, self._pairs
        if cq is None or self._lib is None:
            return
        count = _BATCH
        while count == _BATCH:
            try:
                count, completions = cq.poll(_BATCH)
            except self._lib.error as refused:
                raise self._lib.refusal("ibv_poll_cq", refused) from refused
            for wc in completions:
                pair = pairs.get(wc.qp_num)
                if pair is not None:
                    pair.complete(wc, found)

    def arm(self) -> bool:
        lib = self._opened()
        if self._cq is not None:
            try:
                self._cq.req_notify(0)
            except lib.error as refused:
                raise lib.refusal("ibv_req_notify_cq", refused) from refused
        # What completed before arming raises no event.
        self._take(self._found)
        return not self._found

    def wait_fd(self) -> int:
        self._opened()
        return self._epoll.fileno()

    def service(self) -> None:
        lib = self._opened()
        # Until nothing is readable: a sleeper that waits for edges sees no second event otherwise.
        while ready := self._epoll.poll(0):
            for fd, _ in ready:
                if fd == self._async_fd:
                    self._take_event(lib)
                else:
                    self._take_notification(lib)

    def _take_notification(self, lib: _pyverbs.Verbs) -> None:
        if self._channel is None or self._cq is None:
            return
        try:
            self._channel.get_cq_event(self._cq)
        except lib.error as refused:
            if not lib.would_block(refused):
                raise lib.refusal("ibv_get_cq_event", refused) from refused
        else:
            self._cq.ack_events(1)

    def _take_event(self, lib: _pyverbs.Verbs) -> None:
        with lib.refusals("ibv_get_async_event"):
            event = self._context.get_async_event()
            kind = event.event_type
            event.ack()
        if kind in lib.fatal_events:
            self._tell(RnicEvent.FATAL)
            return
        # The event names neither port nor GID, so the port is asked; it may also be gone.
        before = self.port_active
        try:
            self.port_active = self._context.query_port(self.port).state == lib.port_active
        except lib.error:
            self.port_active = False
            self._tell(RnicEvent.FATAL)
            return
        if self.port_active != before:
            self._tell(RnicEvent.PORT_UP if self.port_active else RnicEvent.PORT_DOWN)

    def _tell(self, event: RnicEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)


def _choose(table: list[_pyverbs.Gid], index: int | None) -> _pyverbs.Gid | None:
    if index is not None:
        return next((gid for gid in table if gid.number == index), None)
    # Global before link-local: it can be routed.  False sorts before True.
    order = sorted(
        table, key=lambda gid: (gid.kind != _pyverbs.ROCE_V2, gid.value[:2] == b"\xfe\x80")
    )
    return order[0] if order else None
