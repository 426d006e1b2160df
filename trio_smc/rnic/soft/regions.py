"""Protection domains and memory regions of the software RNIC.

Each queue pair of a protection domain shares a *key page* with its peer: slot i holds the RKey of
the region registered there, or 0.  A writer checks the key page before every write, so writes with
a revoked RKey fail at once, without a message.  A writer that checked just before may still be
copying when `SoftMemoryRegion.close` returns.  Therefore a side sends DELETE RKEY first, and closes
the region when the peer has confirmed it (RFC 7609, 3.5.5.2).
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.rnic.memory import PROGRESS_WORDS, Memory, PeerMemory
from trio_smc.rnic.soft.messages import Message, Register, Revoke
from trio_smc.rnic.soft.port import Port
from trio_smc.rnic.soft.ring import KEYS, ReceiveRing
from trio_smc.rnic.verbs import MemoryRegion, ProtectionDomain, RnicError, WcStatus
from trio_smc.rnic.words import Words

__all__ = [
    "MAX_MAPPED",
    "MAX_REGIONS",
    "PeerRegions",
    "SoftMemoryRegion",
    "SoftProtectionDomain",
]


MAX_REGIONS: Final = 256
"""Regions of one protection domain, and so of one peer.  Each RMB is one region, and a link group
has at most 255 RMBs."""
MAX_MAPPED: Final = 1 << 40
"""Bytes of these regions together.  Chosen: a peer has an address space of 128 TiB for them."""

_OK: Final = int(WcStatus.SUCCESS)
_ACCESS: Final = int(WcStatus.REM_ACCESS_ERR)


class Announcer(Protocol):
    """A queue pair, as its protection domain sees it."""

    ring: ReceiveRing

    def announce(self, message: Message, fds: tuple[int, ...]) -> None:
        """Send a message to the peer.  Raises OSError for lack of resources."""


class SoftMemoryRegion(MemoryRegion):
    """Memory that is announced to the peers of a protection domain."""

    def __init__(self, pd: SoftProtectionDomain, memory: Memory, rkey: int, slot: int) -> None:
        self.rkey = rkey
        # Any number works: writes use it only to compute offsets.
        self.address: int = (1 + secrets.randbits(34)) << 12
        self.length: int = memory.size
        self.mapped: int = memory.mapped
        self._memory = memory
        self._pd = pd
        self.slot = slot

    def announcement(self) -> tuple[Register, int]:
        """The message that announces the region to peers, and its descriptor."""
        memory = self._memory
        message = Register(
            rkey=self.rkey,
            slot=self.slot,
            address=self.address,
            length=self.length,
            progress=memory.has_progress,
        )
        return message, memory.fd

    def close(self) -> None:
        self._pd.deregister(self)


class SoftProtectionDomain(ProtectionDomain):
    """Regions, and the queue pairs whose peers may use them."""

    def __init__(self, rnic: Port, on_close: Callable[[SoftProtectionDomain], None]) -> None:
        self._rnic = rnic
        self._on_close = on_close
        self.queue_pairs: set[Announcer] = set()
        self._regions: dict[int, SoftMemoryRegion] = {}
        self._free: list[int] = []  # slots that were used before
        self._closed = False

    @property
    def regions(self) -> list[SoftMemoryRegion]:
        """The registered regions, in the order of registration."""
        return list(self._regions.values())

    def add_queue_pair(self, qp: Announcer) -> None:
        """Add a new queue pair."""
        self.queue_pairs.add(qp)
        for region in self._regions.values():
            qp.ring.keys[region.slot] = region.rkey

    def register(self, memory: Memory) -> SoftMemoryRegion:
        if self._closed:
            raise RnicError(errno.EBADF, "the protection domain is closed")
        if memory.fd < 0:
            raise RnicError(errno.EFAULT, "the memory is closed")
        if len(self._regions) >= MAX_REGIONS:
            raise RnicError(errno.ENOMEM, f"a protection domain holds {MAX_REGIONS} regions")
        if memory.mapped + sum(region.mapped for region in self._regions.values()) > MAX_MAPPED:
            raise RnicError(errno.ENOMEM, f"a protection domain holds {MAX_MAPPED} bytes")
        slot = self._free.pop() if self._free else len(self._regions)
        region = SoftMemoryRegion(self, memory, self._rnic.new_rkey(), slot)
        self._regions[region.rkey] = region
        message, fd = region.announcement()
        announced: list[Announcer] = []
        try:
            for qp in tuple(self.queue_pairs):
                qp.ring.keys[slot] = region.rkey
                qp.announce(message, (fd,))
                announced.append(qp)
        except OSError as problem:
            # Only this registration fails; the queue pairs continue.
            self._remove_region(region, announced)
            text = f"a memory region cannot be announced: {problem}"
            raise RnicError(problem.errno, text) from problem
        return region

    def deregister(self, region: SoftMemoryRegion) -> None:
        """Remove a region and notify the peers; no-op if it was removed already."""
        self._remove_region(region, tuple(self.queue_pairs))

    def _remove_region(self, region: SoftMemoryRegion, announced: Sequence[Announcer]) -> None:
        if self._regions.pop(region.rkey, None) is None:
            return
        self._free.append(region.slot)
        self._rnic.free_rkey(region.rkey)
        for qp in tuple(self.queue_pairs):
            qp.ring.keys[region.slot] = 0
        for qp in announced:
            qp.announce(Revoke(rkey=region.rkey), ())

    def close(self) -> None:
        if self._closed:
            return
        if self._regions or self.queue_pairs:
            raise RnicError(errno.EBUSY, "the protection domain is in use")
        self._closed = True
        self._on_close(self)


class PeerRegions:
    """The regions of one peer that this side may write into.

    Args:
      keys: the peer's key page.
      run_later: calls a function in another thread.
    """

    __slots__ = ("_keys", "_mapped", "_regions", "_run_later")

    def __init__(
        self,
        keys: Words,
        run_later: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self._keys = keys
        self._run_later = run_later
        self._mapped = 0
        # By RKey: view, address, length, slot, memory.
        self._regions: dict[int, tuple[memoryview, int, int, int, PeerMemory]] = {}

    def __contains__(self, rkey: int) -> bool:
        return rkey in self._regions

    def add_untrusted(self, message: Register, fd: int) -> None:
        """Map a region that the peer announced.

        Raises:
          ProtocolError: the region is not valid.
          OSError: this process lacks memory or address space.
        """
        if message.slot >= KEYS or message.rkey == 0 or message.rkey in self._regions:
            raise ProtocolError("a memory region has an invalid slot or RKey")
        if len(self._regions) >= MAX_REGIONS or self._mapped + message.length > MAX_MAPPED:
            raise ProtocolError("the peer announces more memory regions than allowed")
        memory = PeerMemory.map_untrusted(fd, message.length, progress=message.progress)
        self._mapped += memory.mapped
        self._regions[message.rkey] = (
            memory.view, message.address, message.length, message.slot, memory
        )  # fmt: skip

    def discard(self, rkey: int) -> None:
        """Unmap a region; no-op if it is unknown."""
        region = self._regions.pop(rkey, None)
        if region is not None:
            self._mapped -= region[4].mapped
            region[4].close(self._run_later)

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        """The first progress word of an element: the words of a region, and an index.

        Args:
          address: the first byte of the element.
          rkey: the RKey of the element's region.
          size: bytes of the element.

        Returns:
          None: the region is unknown, or has no word for this element.
        """
        region = self._regions.get(rkey)
        if region is None:
            return None
        words = region[4].progress
        index = (address - region[1]) // size
        if words is None or not 0 <= index < PROGRESS_WORDS:
            return None
        return words, index

    def write(
        self, data: bytes | memoryview, more: memoryview | None, address: int, rkey: int
    ) -> int:
        """Copy ``data``, then ``more``, into the peer's memory, or nothing; return a `WcStatus`."""
        region = self._regions.get(rkey)
        if region is None:
            return _ACCESS
        view, base, length, slot, _ = region
        start = address - base
        end = start + len(data)
        whole = end if more is None else end + len(more)
        if start < 0 or whole > length or self._keys[slot] != rkey:
            return _ACCESS
        view[start:end] = data
        if more is not None:
            view[end:whole] = more
        return _OK

    def close(self) -> None:
        """Unmap everything."""
        for rkey in list(self._regions):
            self.discard(rkey)
