"""Protection domains, memory regions and queue pairs of a RoCE port, through pyverbs.

Theory of operation.  An adapter reads the bytes to send from registered memory after the post has
returned.  So each queue pair owns one registered memory area.  The bytes of a request stay there
until the request has completed:

===================================  ============================================================
receive slots, 64 bytes each         one per posted receive; reused when its completion was polled
                                     (SMC-R version 2 needs longer ones, so there are fewer)
send slots, 64 bytes each            one per request of the send queue, by its number
send ring, 1 MiB                     the data of `post_write`, in order
long slot                            a message that is too long for a slot; one at a time
===================================  ============================================================

`PostedSends` tracks which slots and which bytes of the ring are still in use.  Requests complete in
the order of posting, but an adapter reports signaled requests only.  So from time to time a
request is signaled although its caller wants no completion (`PostedSends.must_signal`).
`PostedSends.complete` maps a completion to the caller's request.

Error completions contain neither opcode nor length, so the wr_id distinguishes the two queues: it
is the slot plus `_RECEIVE_ID` for a receive, and the number of the request for a send.  Work
requests are created once, changed and posted again (`pyverbs`).
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
"""Largest number of posted receives of a queue pair.  Chosen with `VerbsRnic.send_depth`: 63 queue
pairs then fit into the completion queue of soft-RoCE (docs/rnic.md)."""
_LONG_RECEIVES: Final = 64
"""The same for the receives of version 2, which have 4,152 bytes each.  Chosen: 260 KiB
together."""
_SLOT: Final = 64
"""Bytes of a slot.  Chosen: the smallest power of two that holds a receive of version 1, 48
bytes."""
_RING_SIZE: Final = 1 << 20
"""Bytes of the send ring.  Chosen; no measurement is recorded.  It holds eight of the largest
writes of one connection, 128 KiB each."""
_RECEIVE_ID: Final = 1 << 62
"""Added to the slot in the wr_id of a receive.  Larger than the number of any send."""
_SIGNALED_PARTS: Final = 4
"""The send slots and the ring have this many parts, and each part has at least one signaled
request. So unsignaled requests occupy at most a part of them.  Chosen; no measurement is
recorded."""
_INLINE: Final = 64
"""Requested limit of inline data, in bytes: LLC and CDC messages have 44.  The adapter need not
fetch inline data from memory."""


class Port(Protocol):
    """The parts of `VerbsRnic` that domains, regions and queue pairs use."""

    port: int
    mtu: int
    send_depth: int

    def gid_towards(self, peer: bytes) -> Gid:
        """The entry of the GID table to use towards this peer.  Raises RnicError."""

    def address_known(self, gid: bytes) -> bool:
        """See `Rnic.address_known`."""

    def releasing(self, what: str) -> AbstractContextManager[None]:
        """See `VerbsRnic.releasing`."""


class Region(MemoryRegion):
    """Memory that an adapter's peers write into."""

    def __init__(self, pd: Domain, memory: Memory) -> None:
        lib = pd.lib
        with lib.refusals("ibv_reg_mr"):
            self._mr: Mr | None = lib.mr(pd.pd, memory.address, memory.size, remote_write=True)
        self._pd = pd
        # `Memory.wipe` must not give pages back now: the adapter would still write to the old
        # pages, which no longer belong to the memfd.
        memory.pinned = True
        self._memory = memory  # peers can write to the pinned pages until the region is closed
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
        # pyverbs would close them as well, and their next call would crash.
        if self.regions or self.pairs:
            raise RnicError(errno.EBUSY, "regions or queue pairs of the domain are still open")
        self.closed = True
        self._on_close(self)
        with self.rnic.releasing("ibv_dealloc_pd"):
            self.pd.close()


class PostedSends:
    """Posted requests that are not known to have completed, oldest first.

    Attributes:
      next_id: the number of the next request.  Numbers start at 0 and never wrap.
      position: offset in the ring at which the next request's bytes start.
      free: free bytes of the ring; they start at `position` and may wrap.
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
        """Raise QueueFull if no slot is free, or fewer than ``length`` bytes of the ring."""
        if len(self._posted) >= self._depth or length > self.free:
            raise QueueFull

    def must_signal(self, length: int) -> bool:
        """True if the next request, of ``length`` bytes, must be signaled."""
        return (
            (self._unsignaled + 1) * _SIGNALED_PARTS >= self._depth
            or (self._unsignaled_bytes + length) * _SIGNALED_PARTS >= self._size
        )  # fmt: skip

    def post(self, wr_id: int, opcode: int, length: int, *, wanted: bool, signaled: bool) -> None:
        """Record the next request as posted.

        Args:
          wr_id: the caller's number.
          opcode: the kind of request; an error completion does not contain it.
          length: bytes of the ring that the request uses.
          wanted: the caller wants a completion if the request succeeds.
          signaled: the adapter reports a completion if the request succeeds.
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
        """True if request ``number`` is not known to have completed."""
        return number >= self._oldest

    def complete(self, number: int) -> tuple[int, int, bool]:
        """Remove request ``number`` and all older ones; returns its (wr_id, opcode, wanted)."""
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
        self._send_slots_start = -(-receives * self._receive_slot // _SLOT) * _SLOT
        self._ring_start = self._send_slots_start + sends * _SLOT
        self._posted = PostedSends(depth=sends, size=_RING_SIZE)
        self._free_slots = list(range(receives - 1, -1, -1))
        self._last_long = -1  # the number of the last long message
        self._memory = Memory(self._ring_start + _RING_SIZE + receive_size, name="trio_smc-qp")
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
            self._receives.append(lib.recv_wr(_RECEIVE_ID + number, slot))
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
        except self._lib.error:  # the adapter's limit of inline data is lower
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
        # Soft-RoCE does not check these.
        if len(gid) != 16 or not 0 < qp_num < 1 << 24 or not 0 <= psn < 1 << 24:
            raise RnicError(errno.EINVAL, "invalid GID, queue pair number or PSN of a peer")
        if not 1 <= mtu <= self._rnic.mtu:
            raise RnicError(
                errno.EINVAL, f"path MTU {mtu} is larger than the port's, {self._rnic.mtu}"
            )
        own = self._rnic.gid_towards(gid)
        # The kernel would wait for the address and stop the whole process.
        if not self._rnic.address_known(gid):
            raise RnicError(errno.EHOSTUNREACH, "the peer's address is not resolved yet")
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
        if self.state is not QpState.RESET:  # in RESET nothing is posted, and the verbs refuse ERR
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
            start = self._send_slots_start + posted.next_id % self._rnic.send_depth * _SLOT
        else:
            if posted.is_outstanding(self._last_long):
                raise QueueFull
            start, self._last_long = self._ring_start + _RING_SIZE, posted.next_id
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
            entry.addr, entry.length = self._base + self._ring_start + start, first
            request.set_wr_rdma(rkey, address)
            self._post(request, wr_id, WcOpcode.RDMA_WRITE, length, flags, signaled)
        else:
            # The data wraps, once per turn of the ring.  A reusable request has one entry only.
            sge = self._lib.sge(self._base + self._ring_start + start, first, self._mr.lkey)
            rest = self._lib.sge(self._base + self._ring_start, length - first, self._mr.lkey)
            request = self._lib.gather_wr([sge, rest], write=True)
            try:
                request.set_wr_rdma(rkey, address)
                self._post(request, wr_id, WcOpcode.RDMA_WRITE, length, flags, signaled)
            finally:
                for each in (request, sge, rest):
                    each.close()

    def _copy(self, start: int, data: memoryview) -> None:
        ring, view = self._ring_start, self._view
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
        """Append to ``found`` the completion that the caller gets for ``wc``, if any."""
        number, status = wc.wr_id, wc.status
        if status:
            self.state = QpState.ERR
        if number >= _RECEIVE_ID:
            slot = number - _RECEIVE_ID
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
