"""RNICs in plain memory: no descriptors, no threads, and the test delivers every message.

All RNICs of one `Fabric` reach each other, unless a test cuts the path between two.  A posted
request waits in its queue pair, in order, until the test calls `Fabric.deliver` or
`PlainQueuePair.execute`; before, the test may read, change or lose the request, or break the link.
Requests of different queue pairs have no order but the test's.  Tests of link groups use
`Fabric.held` to find objects that were not freed.
"""

from __future__ import annotations

import errno
import mmap
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Literal, NamedTuple

from trio_smc.rnic.memory import Memory
from trio_smc.rnic.verbs import (
    RECEIVE_SIZE,
    Completion,
    DeliveryUnknown,
    MemoryRegion,
    ProtectionDomain,
    QpState,
    QueueFull,
    QueuePair,
    Rnic,
    RnicError,
    RnicEvent,
    WcOpcode,
    WcStatus,
)

__all__ = ["Fabric", "Fate", "MemoryRnic", "PlainMemory", "PlainQueuePair", "Work"]

# A write takes one request or two; far more than a test posts without delivering.
DEPTH = 128


class PlainMemory(Memory):
    """Memory without a descriptor."""

    pinned = True

    def __init__(self, size: int, fabric: Fabric) -> None:
        self.size = size
        self.fd = -1
        # The kernel allocates pages only when they are written.
        self._bytes = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._bytes)
        self._slices = []
        self._fabric = fabric
        fabric.held["memory"] += 1

    def zero(self, start: int, length: int) -> None:
        end = start + length
        first, last = (
            -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
            end // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if first < last:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)
            self.view[start:first] = bytes(first - start)
            start = last
        self.view[start:end] = bytes(end - start)

    def close(self) -> None:
        if self.size:
            self.size = 0
            for piece in self._slices:
                piece.release()
            self._slices.clear()
            self.view.release()
            self._bytes.close()
            self._fabric.held["memory"] -= 1


class Fate(Enum):
    """The result of a request."""

    DONE = auto()
    LOST = auto()
    """The request does not arrive, and the sender's queue pair fails."""
    UNACKNOWLEDGED = auto()
    """The request is done, but its acknowledgement is lost: the sender's queue pair fails."""
    UNPLACED = auto()
    """The peer's RNIC acknowledges this and all later requests without placing their data, because
    the RNIC is about to fail (RFC 7609, 4.6)."""


class Work(NamedTuple):
    """One posted request that was not delivered yet."""

    serial: int
    wr_id: int
    signaled: bool
    message: bytes | None
    pieces: tuple[memoryview, ...] = ()
    address: int = 0
    rkey: int = 0


class Fabric:
    """The wire between RNICs.

    Attributes:
      held: number of open objects of each kind.
      announces_end: True if the peer of a queue pair that ends fails at once; False if the peer
        notices the end when its next request fails, as on a real wire.
      tamper: called with each SEND before its delivery; returns the messages to deliver instead
        (the sender's completion has no error), or None to let the request fail.
      cut: pairs of GIDs whose requests do not reach each other, although their ports are active.
      at_once: True if `QueuePair.deliver` may deliver; False if it always refuses.
      direct: results of `Rnic.is_direct` by GID; True for all others.
      looks: by GID, the number of calls of `Rnic.address_known` that return False before True.
      doubt: called by each queue pair that delivers at once; returns None for a normal delivery.
        Otherwise the other end ends during the delivery, and the result is True if the message
        has arrived.
    """

    def __init__(self, *, announces_end: bool = True) -> None:
        self.held = {"memory": 0, "pd": 0, "region": 0, "qp": 0}
        self.announces_end = announces_end
        self.tamper: Callable[[PlainQueuePair, bytes], list[bytes] | None] | None = None
        self.cut: set[frozenset[bytes]] = set()
        self.at_once = False
        self.looks: dict[bytes, int] = {}
        self.direct: dict[bytes, bool | None] = {}
        self.doubt: Callable[[PlainQueuePair], bool | None] = lambda qp: None
        self.busy: dict[PlainQueuePair, None] = {}
        self.rnics: dict[bytes, MemoryRnic] = {}
        self.numbers = 1

    def number(self) -> int:
        """Return a new number for a queue pair, an RKey or an address."""
        self.numbers += 1
        return self.numbers

    def deliver(self, count: int | None = None) -> int:
        """Execute up to ``count`` posted requests (all by default), oldest first.

        Returns:
          The number of executed requests.
        """
        done = 0
        while self.busy and (count is None or done < count):
            min(self.busy, key=PlainQueuePair.oldest).execute()
            done += 1
        return done

    def lose(self) -> None:
        """Lose all posted requests; neither side is notified."""
        for qp in self.busy:
            qp.work.clear()
        self.busy.clear()


class _Region(MemoryRegion):
    def __init__(self, domain: _Domain, memory: Memory) -> None:
        fabric = domain.rnic.fabric
        self.rkey = fabric.number() << 8
        self.address = fabric.number() << 32
        self.length = memory.size
        self.memory = memory
        self._domain = domain
        domain.regions[self.rkey] = self
        fabric.held["region"] += 1

    def close(self) -> None:
        if self._domain.regions.pop(self.rkey, None) is not None:
            self._domain.rnic.fabric.held["region"] -= 1


class _Domain(ProtectionDomain):
    def __init__(self, rnic: MemoryRnic) -> None:
        self.rnic = rnic
        self.regions: dict[int, _Region] = {}
        self.closed = False
        rnic.fabric.held["pd"] += 1

    def register(self, memory: Memory) -> _Region:
        if self.closed:
            raise RnicError(errno.EBADF, "the protection domain is closed")
        return _Region(self, memory)

    def close(self) -> None:
        if not self.closed:
            assert not self.regions, "regions must be closed before their domain"
            self.closed = True
            self.rnic.fabric.held["pd"] -= 1


class PlainQueuePair(QueuePair):
    """A queue pair; `log` lists the states that it has had."""

    def __init__(self, rnic: MemoryRnic, domain: _Domain, receive_size: int) -> None:
        self.rnic = rnic
        self.receive_size = receive_size
        self.receive_depth = DEPTH
        self.domain = domain
        self.qp_num = rnic.fabric.number()
        self.state = QpState.RESET
        self.log = ["RESET"]
        self.remote: tuple[bytes, int] | None = None
        self.receives = 0
        self.mtu = 0
        self.psns: tuple[int, int] = (-1, -1)
        self.work: deque[Work] = deque()
        self.places = True
        self._closed = False
        rnic.qps[self.qp_num] = self
        rnic.fabric.held["qp"] += 1

    def _to(self, old: QpState, new: QpState) -> None:
        if self.state is not old or self._closed:
            raise RnicError(errno.EINVAL, f"a queue pair in {self.state}, not in {old}")
        self.state = new
        self.log.append(new.value)

    def to_init(self) -> None:
        self._to(QpState.RESET, QpState.INIT)

    def to_rtr(self, *, gid: bytes, qp_num: int, psn: int, mtu: int) -> None:
        if len(gid) != 16 or not 0 < qp_num < 1 << 24 or not 1 <= mtu <= 5:
            raise RnicError(errno.EINVAL, "not a valid GID, queue pair number or MTU")
        if gid not in self.rnic.fabric.rnics:
            raise RnicError(errno.EHOSTUNREACH, "no such RNIC")
        if self.rnic.fabric.looks.get(gid):
            raise RnicError(errno.EHOSTUNREACH, "the address is not known yet")
        self._to(QpState.INIT, QpState.RTR)
        self.remote = (gid, qp_num)
        self.psns = (-1, psn)
        self.mtu = mtu

    def to_rts(self, *, psn: int) -> None:
        self._to(QpState.RTR, QpState.RTS)
        self.psns = (psn, self.psns[1])

    def to_err(self) -> None:
        self.fail(notices=self.rnic.fabric.announces_end)

    def fail(self, *, notices: bool) -> None:
        """Enter ERR from any state.

        Args:
          notices: True if the other end enters ERR, too.
        """
        if self.state is QpState.ERR:
            return
        self.state = QpState.ERR
        self.log.append("ERR")
        for work in self.work:
            self._complete(work, WcStatus.WR_FLUSH_ERR)
        self.work.clear()
        self.rnic.fabric.busy.pop(self, None)
        if self.receives:
            status = int(WcStatus.WR_FLUSH_ERR)
            self.rnic.done.append(Completion(self.qp_num, int(WcOpcode.RECV), status, 0, None))
        peer = self.peer() if notices else None
        if peer is not None:
            peer.fail(notices=False)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.to_err()
            del self.rnic.qps[self.qp_num]
            self.rnic.done = [each for each in self.rnic.done if each.qp_num != self.qp_num]
            self.rnic.fabric.held["qp"] -= 1

    def post_receive(self, count: int) -> None:
        if self.state is QpState.RESET or self._closed:
            raise RnicError(errno.EINVAL, "no receives in this state")
        self.receives += count
        assert self.receives <= self.receive_depth

    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        self._post(Work(self.rnic.fabric.number(), wr_id, signaled, bytes(data)))

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
        pieces = (data,) if more is None else (data, more)
        serial = self.rnic.fabric.number()
        self._post(Work(serial, wr_id, signaled, None, pieces, address, rkey))

    def deliver(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        peer = self.peer()
        if (
            not self.rnic.fabric.at_once
            or self.work
            or self.state is not QpState.RTS
            or peer is None
            or not (peer.places and peer.receives and self.reaches(peer))
        ):
            return False
        arrives = self.rnic.fabric.doubt(self)
        if data is not None:
            write = Work(0, 0, False, None, (memoryview(data),), address, rkey)
            assert self._write(peer, write) is WcStatus.SUCCESS
        work = Work(0, 0, True, message)
        if arrives is not False:
            assert self._send(peer, work) is WcStatus.SUCCESS
        if arrives is not None:
            peer.fail(notices=False)
            self._complete(work, WcStatus.RETRY_EXC_ERR)
            self.fail(notices=False)
            raise DeliveryUnknown
        return True

    def write_capacity(self) -> int:
        return 1 << 62

    def _post(self, work: Work) -> None:
        if self._closed:
            raise RnicError(errno.EINVAL, "the queue pair is closed")
        if self.state is QpState.ERR:
            self._complete(work, WcStatus.WR_FLUSH_ERR)
            return
        if self.state is not QpState.RTS:
            raise RnicError(errno.EINVAL, f"no sends in {self.state}")
        if len(self.work) >= self.rnic.send_depth:
            raise QueueFull
        self.work.append(work)
        self.rnic.fabric.busy[self] = None

    def _complete(self, work: Work, status: WcStatus) -> None:
        if work.signaled or status:
            opcode = WcOpcode.RDMA_WRITE if work.message is None else WcOpcode.SEND
            completion = Completion(self.qp_num, int(opcode), int(status), work.wr_id, None)
            self.rnic.done.append(completion)

    def peer(self) -> PlainQueuePair | None:
        """Return the other end if it is connected to this one."""
        if self.remote is None:
            return None
        rnic = self.rnic.fabric.rnics.get(self.remote[0])
        peer = rnic.qps.get(self.remote[1]) if rnic is not None else None
        if peer is None or peer.remote != (self.rnic.gid, self.qp_num):
            return None
        return peer

    def oldest(self) -> int:
        """Return the serial number of the oldest request."""
        return self.work[0].serial

    def execute(self, fate: Fate = Fate.DONE) -> None:
        """Execute the oldest request, if there is one."""
        if not self.work:
            return
        work = self.work.popleft()
        if not self.work:
            del self.rnic.fabric.busy[self]
        peer = self.peer()
        status = WcStatus.RETRY_EXC_ERR
        if peer is not None and self.reaches(peer) and fate is not Fate.LOST:
            if fate is Fate.UNPLACED:
                peer.places = False
            status = WcStatus.SUCCESS
            if peer.places:
                status = self._write(peer, work) if work.message is None else self._send(peer, work)
            if fate is Fate.UNACKNOWLEDGED:
                status = WcStatus.RETRY_EXC_ERR
        self._complete(work, status)
        if status:
            self.to_err()

    def reaches(self, peer: PlainQueuePair) -> bool:
        ports = self.rnic.port_active and peer.rnic.port_active
        path = frozenset((self.rnic.gid, peer.rnic.gid)) not in self.rnic.fabric.cut
        ready = peer.state in (QpState.RTR, QpState.RTS)
        return ports and path and ready and peer.psns[1] == self.psns[0]

    def _send(self, peer: PlainQueuePair, work: Work) -> WcStatus:
        assert work.message is not None
        messages: list[bytes] | None = [work.message]
        if self.rnic.fabric.tamper is not None:
            messages = self.rnic.fabric.tamper(self, work.message)
        if messages is None:
            return WcStatus.RETRY_EXC_ERR
        for message in messages:
            if not peer.receives:
                return WcStatus.RNR_RETRY_EXC_ERR
            peer.receives -= 1
            if len(message) > peer.receive_size:
                peer.fail(notices=False)
                return WcStatus.REM_INV_REQ_ERR
            peer.rnic.done.append(Completion(peer.qp_num, int(WcOpcode.RECV), 0, 0, bytes(message)))
        return WcStatus.SUCCESS

    def _write(self, peer: PlainQueuePair, work: Work) -> WcStatus:
        region = peer.domain.regions.get(work.rkey)
        size = sum(map(len, work.pieces))
        if region is not None:
            start = work.address - region.address
            if start >= 0 and start + size <= region.length:
                for piece in work.pieces:
                    region.memory.view[start : start + len(piece)] = piece
                    start += len(piece)
                return WcStatus.SUCCESS
        peer.rnic.access_errors += 1
        peer.to_err()
        return WcStatus.REM_ACCESS_ERR


class MemoryRnic(Rnic):
    """An RNIC port of a fabric.

    Args:
      fabric: the fabric that connects it to other RNICs.
      kind: its `Rnic.kind`; with "roce", RMBs have few elements.
      most_qps: the most queue pairs that can be open at a time; None for any number.
      routable: True if it serves SMC-R version 2.
    """

    copies_on_post = False

    def __init__(
        self,
        fabric: Fabric,
        *,
        kind: Literal["software", "roce"] = "roce",
        most_qps: int | None = None,
        name: str = "memory0",
        routable: bool = False,
    ) -> None:
        self.fabric = fabric
        self.kind = kind
        self.name = name
        self.most_qps = most_qps
        number = fabric.number()
        self.gid = b"\xfd" + number.to_bytes(15, "big")
        self.routable = routable
        if routable:
            self.gid = bytes(10) + b"\xff\xff" + (0x0A000000 | number).to_bytes(4, "big")
        self.mac = b"\x02" + number.to_bytes(5, "big")
        self.mtu = 5
        self.port_active = False
        self.on_event = None
        self.send_depth = DEPTH
        self.qps: dict[int, PlainQueuePair] = {}
        self.done: list[Completion] = []
        self.no_memory = False
        """True if `alloc_memory` fails."""
        self.access_errors = 0
        """Number of writes of peers outside of registered memory."""

    def open(self, directory: Path) -> None:
        self.fabric.rnics[self.gid] = self
        self.port_active = True

    def close(self) -> None:
        self.fabric.rnics.pop(self.gid, None)
        self.port_active = False

    def port_down(self, *, fatal: bool = False) -> None:
        """Take the port down: all requests from and to this RNIC fail from now on.

        Args:
          fatal: True if the whole device fails, with its queue pairs; otherwise idle queue pairs
            do not notice.
        """
        if self.port_active:
            self.port_active = False
            self._notify(RnicEvent.FATAL if fatal else RnicEvent.PORT_DOWN)
            for qp in list(self.qps.values()) if fatal else ():
                qp.fail(notices=False)

    def port_up(self) -> None:
        """Bring the port up; queue pairs that did not fail work again."""
        if not self.port_active:
            self.port_active = True
            self._notify(RnicEvent.PORT_UP)

    def _notify(self, event: RnicEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def alloc_memory(self, size: int) -> Memory:
        if self.no_memory:
            raise OSError(errno.ENOMEM, "no memory")
        return PlainMemory(size, self.fabric)

    def alloc_pd(self) -> ProtectionDomain:
        return _Domain(self)

    def address_known(self, gid: bytes) -> bool:
        left = self.fabric.looks.get(gid, 0)
        self.fabric.looks[gid] = max(0, left - 1)
        return left == 0

    def is_direct(self, gid: bytes) -> bool | None:
        return self.fabric.direct.get(gid, True)

    def create_qp(self, pd: ProtectionDomain, receive_size: int = RECEIVE_SIZE) -> QueuePair:
        assert isinstance(pd, _Domain)
        if self.most_qps is not None and len(self.qps) >= self.most_qps:
            raise RnicError(errno.ENOMEM, "no more queue pairs")
        return PlainQueuePair(self, pd, receive_size)

    def poll(self) -> list[Completion]:
        taken, self.done = self.done, []
        return taken

    def arm(self) -> bool:
        return not self.done

    def wait_fd(self) -> int:
        return -1

    def service(self) -> None:
        pass
