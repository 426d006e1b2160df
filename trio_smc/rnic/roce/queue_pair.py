"""Protection domains, memory regions and queue pairs of a RoCE port, as pyverbs makes them.

Theory of operation.  An adapter reads what it sends from registered memory after the post has
returned.  So each queue pair owns one registered piece of memory, in which a request's bytes lie
until the request is done:

===================================  ============================================================
receive slots, 64 bytes each         one per posted receive; reused when its completion was polled
                                     (SMC-R version 2 wants longer ones, of which there are fewer)
send slots, 64 bytes each            one per request of the send queue, by its number
send ring, 1 MiB                     what `post_write` was given, in order
long slot                            a message too long for a slot, of which there is one at a time
===================================  ============================================================

`PostedSends` keeps the books of the send queue: which slots and which bytes of the ring are still
in use.  Requests are done in the order of their posting, and an adapter tells of signalled ones
only; so now and then one is signalled that the caller did not want to hear of:
`PostedSends.must_signal` says when, `PostedSends.complete` whose it was.

A receive's wr_id is its slot plus `_RECEIVE`, a send's is its number: error completions name
neither opcode nor length, so this is what tells the two apart.  Work requests are made once,
changed and posted again (`pyverbs`).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol

from trio_smc.rnic.memory import Memory
from trio_smc.rnic.roce.pyverbs import Closable, Context, Cq, Gid, Mr, Qp, SendWr, Verbs, Wc
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    MemoryRegion,
    ProtectionDomain,
    QpState,
    QueueFull,
    QueuePair,
    RnicError,
    WcOpcode,
)

__all__ = [
    "RECEIVES",
    "Domain",
    "PostedSends",
    "Region",
    "RoceQueuePair",
]


RECEIVES: Final = 256
"""Receives of a queue pair at most."""
_LONG_RECEIVES: Final = 64  # of version 2's size: they fill a quarter of a megabyte
_SLOT: Final = 64
_RING_SIZE: Final = 1 << 20
_RECEIVE: Final = 1 << 62
_SIGNALED_PARTS: Final = 4
"""At the latest after this part of the slots or of the bytes a request is signalled."""
_INLINE: Final = 64
"""Bytes that are asked for to be sent inline: LLC and CDC messages have 44.  The adapter then need
not fetch them from memory after it was told of them."""


class Port(Protocol):
    """The port, for what was made from it."""

    port: int
    mtu: int
    send_depth: int

    def gid_towards(self, peer: bytes) -> Gid:
        """The entry of the GID table to use towards this peer.  Raises RnicError."""

    def address_known(self, gid: bytes) -> bool:
        """See `Rnic.address_known`."""

    def releasing(self, what: str) -> AbstractContextManager[None]:
        """Around giving something back, which a device that has failed refuses."""


class Region(MemoryRegion):
    """Memory that an adapter's peers write into."""

    def __init__(self, pd: Domain, memory: Memory) -> None:
        lib = pd.lib
        with lib.refusals("ibv_reg_mr"):
            self._mr: Mr | None = lib.mr(pd.pd, memory.address, memory.size, remote_write=True)
        self._pd = pd
        memory.pinned = True  # else peers would write to pages that it has no more
        self._memory = memory  # pinned pages stay writable for peers: outlives the region
        self.rkey: int = self._mr.rkey
        self.address: int = memory.address
        self.length: int = memory.size
        pd.regions.add(self)

    def close(self) -> None:
        if self._mr is None:
            return
        mr, self._mr = self._mr, None
        self._pd.regions.discard(self)
        with self._pd.rnic.releasing("ibv_dereg_mr"):
            mr.close()


class Domain(ProtectionDomain):
    """A protection domain; made by `VerbsRnic.alloc_pd`."""

    def __init__(
        self,
        rnic: Port,
        context: Context,
        lib: Verbs,
        on_close: Callable[[Domain], None],
    ) -> None:
        self.rnic = rnic
        self._on_close = on_close
        self.lib = lib
        with lib.refusals("ibv_alloc_pd"):
            self.pd: Closable = lib.pd(context)
        self.regions: set[Region] = set()
        self.pairs: set[RoceQueuePair] = set()
        self.closed: bool = False

    def register(self, memory: Memory) -> MemoryRegion:
        if self.closed:
            raise RnicError(errno.EBADF, "the protection domain is closed")
        if memory.fd < 0:
            raise RnicError(errno.EFAULT, "the memory is closed")
        return Region(self, memory)

    def close(self) -> None:
        if self.closed:
            return
        # pyverbs would close them too, and their next call would then crash.
        if self.regions or self.pairs:
            raise RnicError(errno.EBUSY, "regions or queue pairs of the domain are still open")
        self.closed = True
        self._on_close(self)
        with self.rnic.releasing("ibv_dealloc_pd"):
            self.pd.close()


class PostedSends:
    """Requests posted and not known to be done, oldest first.

    Attributes:
      next_id: the number of the next request; numbers count from 0 for ever.
      position: where in the ring the next request's bytes start.
      free: bytes of the ring that are free; they start at `position` and may wrap.
    """

    __slots__ = (
        "_depth", "_oldest", "_posted", "_size", "_unsignaled", "_unsignaled_bytes", "free",
        "next_id", "position",
    )  # fmt: skip

    def __init__(self, *, depth: int, size: int) -> None:
        self._depth = depth
        self._size = size
        self._posted: deque[tuple[int, int, bool, int]] = deque()
        self._oldest = 0
        self._unsignaled = 0
        self._unsignaled_bytes = 0
        self.next_id: int = 0
        self.position: int = 0
        self.free: int = size

    def check(self, length: int) -> None:
        """Raise QueueFull when there is no slot or no room for ``length`` bytes."""
        if len(self._posted) >= self._depth or length > self.free:
            raise QueueFull

    def must_signal(self, length: int) -> bool:
        """Whether the next request, of ``length`` bytes, has to be signalled."""
        return (
            (self._unsignaled + 1) * _SIGNALED_PARTS >= self._depth
            or (self._unsignaled_bytes + length) * _SIGNALED_PARTS >= self._size
        )  # fmt: skip

    def post(self, wr_id: int, opcode: int, length: int, *, wanted: bool, signaled: bool) -> None:
        """Note the next request as posted.

        Args:
          wr_id: the caller's own number.
          opcode: what it is; an error completion does not tell.
          length: bytes of the ring that it uses.
          wanted: the caller wants to hear of its success.
          signaled: the adapter tells of its success.
        """
        self._posted.append((wr_id, opcode, wanted, length))
        self.next_id += 1
        self.free -= length
        self.position = (self.position + length) % self._size
        if signaled:
            self._unsignaled = self._unsignaled_bytes = 0
        else:
            self._unsignaled += 1
            self._unsignaled_bytes += length

    def is_outstanding(self, number: int) -> bool:
        """Whether request ``number`` is not known to be done."""
        return number >= self._oldest

    def complete(self, number: int) -> tuple[int, int, bool]:
        """Request ``number`` completed, and with it all before it: (wr_id, opcode, wanted)."""
        while True:
            wr_id, opcode, wanted, length = self._posted.popleft()
            self._oldest += 1
            self.free += length
            if self._oldest > number:
                return wr_id, opcode, wanted


class RoceQueuePair(QueuePair):
    """A reliably connected queue pair; made by `VerbsRnic.create_qp`."""

    def __init__(
        self, rnic: Port, pd: Domain, cq: Cq, detach: Callable[[RoceQueuePair], None],
        receive_size: int = RECEIVE_SIZE,
    ) -> None:  # fmt: skip
        self._detach = detach
        self._rnic, self._pd, self._lib = rnic, pd, pd.lib
        sends = rnic.send_depth
        self.receive_depth = receives = RECEIVES if receive_size <= _SLOT else _LONG_RECEIVES
        self._receive_size = receive_size
        self._receive_slot = max(_SLOT, receive_size)
        self._send_slots = -(-receives * self._receive_slot // _SLOT) * _SLOT
        self._ring = self._send_slots + sends * _SLOT
        self._posted = PostedSends(depth=sends, size=_RING_SIZE)
        self._free_slots = list(range(receives - 1, -1, -1))
        self._long = -1  # the number of the last long message
        self._memory = Memory(self._ring + _RING_SIZE + receive_size, name="trio_smc-qp")
        self._view, self._base = self._memory.view, self._memory.address
        try:
            self._make(cq)
        except BaseException:
            self._memory.close()
            raise
        self.qp_num: int = self._qp.qp_num
        self.state: QpState = QpState.RESET
        self._closed = False
        pd.pairs.add(self)

    def _make(self, cq: Cq) -> None:
        lib = self._lib
        with lib.refusals("ibv_reg_mr"):
            self._mr = lib.mr(self._pd.pd, self._base, self._memory.size, remote_write=False)
        try:
            with lib.refusals("ibv_create_qp"):
                self._qp, self._inline_limit = self._create(cq)
        except BaseException:
            self._mr.close()
            raise
        lkey = self._mr.lkey
        slot = lib.sge(self._base, self._receive_size, lkey)
        self._receives = []
        for number in range(self.receive_depth):
            slot.addr = self._base + number * self._receive_slot
            self._receives.append(lib.recv_wr(_RECEIVE + number, slot))
        slot.close()
        self._send = lib.reusable(lkey, write=False)
        self._write = lib.reusable(lkey, write=True)
        self._signaled, self._solicited, self._inline = lib.signaled, lib.solicited, lib.inline

    def _create(self, cq: Cq) -> tuple[Qp, int]:
        make = partial(
            self._lib.qp, self._pd.pd, cq, send_depth=self._rnic.send_depth,
            receive_depth=self.receive_depth,
        )  # fmt: skip
        try:
            return make(inline=_INLINE)
        except self._lib.error:  # the adapter cannot send so much inline
            return make(inline=0)

    def _require_state(self, *states: QpState) -> None:
        if self._closed:
            raise RnicError(errno.EBADF, "the queue pair is closed")
        if self.state not in states:
            raise RnicError(errno.EINVAL, f"the queue pair is in state {self.state}")

    def to_init(self) -> None:
        self._require_state(QpState.RESET)
        with self._lib.refusals("ibv_modify_qp to INIT"):
            self._lib.modify_to_init(self._qp, self._rnic.port)
        self.state = QpState.INIT

    def to_rtr(self, *, gid: bytes, qp_num: int, psn: int, mtu: int) -> None:
        self._require_state(QpState.INIT)
        # Soft-RoCE accepts all of these.
        if len(gid) != 16 or not 0 < qp_num < 1 << 24 or not 0 <= psn < 1 << 24:
            raise RnicError(errno.EINVAL, "not a peer's GID, queue pair number and PSN")
        if not 1 <= mtu <= self._rnic.mtu:
            raise RnicError(errno.EINVAL, f"path MTU {mtu} is beyond the port's {self._rnic.mtu}")
        own = self._rnic.gid_towards(gid)
        # The kernel would wait for it, and with it this whole process.
        if not self._rnic.address_known(gid):
            raise RnicError(errno.EHOSTUNREACH, "nobody has answered for the peer's address")
        with self._lib.refusals("ibv_modify_qp to RTR"):
            self._lib.modify_to_rtr(
                self._qp, port=self._rnic.port, gid_index=own.number,
                gid=gid, qp_num=qp_num, psn=psn, mtu=mtu,
            )  # fmt: skip
        self.state = QpState.RTR

    def to_rts(self, *, psn: int) -> None:
        self._require_state(QpState.RTR)
        if not 0 <= psn < 1 << 24:
            raise RnicError(errno.EINVAL, f"{psn} is not a PSN")
        with self._lib.refusals("ibv_modify_qp to RTS"):
            self._lib.modify_to_rts(self._qp, psn=psn)
        self.state = QpState.RTS

    def to_err(self) -> None:
        if self._closed:
            return
        if self.state is not QpState.RESET:  # nothing is posted there, and verbs refuse it
            with self._rnic.releasing("ibv_modify_qp to ERR"):
                self._lib.modify_to_err(self._qp)
        self.state = QpState.ERR

    def post_receive(self, count: int) -> None:
        self._require_state(QpState.INIT, QpState.RTR, QpState.RTS, QpState.ERR)
        if count > len(self._free_slots):
            raise QueueFull
        try:
            for _ in range(count):
                self._qp.post_recv(self._receives[self._free_slots[-1]])
                self._free_slots.pop()
        except self._lib.error as refused:
            raise self._lib.refusal("ibv_post_recv", refused) from refused

    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        if len(data) > self._receive_size:
            raise RnicError(errno.EMSGSIZE, f"a message has at most {self._receive_size} bytes")
        if self.state is not QpState.RTS:
            self._require_state(QpState.ERR)
        posted = self._posted
        posted.check(0)
        if len(data) <= _SLOT:
            start = self._send_slots + posted.next_id % self._rnic.send_depth * _SLOT
        else:
            if posted.is_outstanding(self._long):
                raise QueueFull
            start, self._long = self._ring + _RING_SIZE, posted.next_id
        self._view[start : start + len(data)] = data
        request, sge, _ = self._send
        sge.addr, sge.length = self._base + start, len(data)
        flags = self._solicited
        if len(data) <= self._inline_limit:
            flags |= self._inline
        self._post(request, wr_id, WcOpcode.SEND, 0, flags, signaled)

    def post_write(
        self,
        wr_id: int,
        data: memoryview,
        more: memoryview | None,
        address: int,
        rkey: int,
        *,
        signaled: bool = False,
    ) -> None:
        if self.state is not QpState.RTS:
            self._require_state(QpState.ERR)
        posted = self._posted
        length = len(data) + (len(more) if more is not None else 0)
        posted.check(length)
        start = posted.position
        self._copy(start, data)
        if more is not None:
            self._copy((start + len(data)) % _RING_SIZE, more)
        first = min(length, _RING_SIZE - start)
        flags = self._inline if length <= self._inline_limit else 0
        if first == length:
            request, entry, _ = self._write
            entry.addr, entry.length = self._base + self._ring + start, first
            request.set_wr_rdma(rkey, address)
            self._post(request, wr_id, WcOpcode.RDMA_WRITE, length, flags, signaled)
        else:
            # Once per turn of the ring; a reusable request has one entry only.
            sge = self._lib.sge(self._base + self._ring + start, first, self._mr.lkey)
            rest = self._lib.sge(self._base + self._ring, length - first, self._mr.lkey)
            request = self._lib.gather_wr([sge, rest], write=True)
            try:
                request.set_wr_rdma(rkey, address)
                self._post(request, wr_id, WcOpcode.RDMA_WRITE, length, flags, signaled)
            finally:
                for each in (request, sge, rest):
                    each.close()

    def _copy(self, start: int, data: memoryview) -> None:
        ring, view = self._ring, self._view
        first = min(len(data), _RING_SIZE - start)
        view[ring + start : ring + start + first] = data[:first]
        if first < len(data):
            view[ring : ring + len(data) - first] = data[first:]

    def _post(
        self,
        request: SendWr,
        wr_id: int,
        opcode: int,
        length: int,
        flags: int,
        wanted: bool,
    ) -> None:
        posted = self._posted
        signaled = wanted or posted.must_signal(length)
        request.wr_id = posted.next_id
        request.send_flags = flags | self._signaled if signaled else flags
        try:
            self._qp.post_send(request)
        except self._lib.error as refused:
            raise self._lib.refusal("ibv_post_send", refused) from refused
        posted.post(wr_id, opcode, length, wanted=wanted, signaled=signaled)

    def write_capacity(self) -> int:
        return self._posted.free

    def complete(self, wc: Wc, found: list[Completion]) -> None:
        """Turn a work completion of this queue pair into what the interface gives, if anything."""
        number, status = wc.wr_id, wc.status
        if status:
            self.state = QpState.ERR
        if number >= _RECEIVE:
            slot = number - _RECEIVE
            self._free_slots.append(slot)
            start = slot * self._receive_slot
            data = None if status else bytes(self._view[start : start + wc.byte_len])
            found.append(Completion(self.qp_num, WcOpcode.RECV, status, 0, data))
            return
        wr_id, opcode, wanted = self._posted.complete(number)
        if wanted or status:
            found.append(Completion(self.qp_num, opcode, status, wr_id, None))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.state = QpState.ERR
        self._detach(self)
        self._pd.pairs.discard(self)
        with self._rnic.releasing("ibv_destroy_qp"):
            self._qp.close()
        for request in self._receives:
            request.close()
        for reusable in (self._send, self._write):
            reusable.owner.close()
        with self._rnic.releasing("ibv_dereg_mr"):
            self._mr.close()
        self._memory.close()
