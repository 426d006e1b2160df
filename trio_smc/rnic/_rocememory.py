"""Memory that a RoCE adapter reads and writes: how it is made, and what peers may touch of it.

An adapter pins the pages of what is registered, and knows nothing of what becomes of the
process's view of them.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from .memory import Memory
from .verbs import MemoryRegion, ProtectionDomain, RnicError

if TYPE_CHECKING:
    from . import _pyverbs
    from ._rocepair import RoceQueuePair
    from .roce import VerbsRnic

__all__ = ["Domain", "PinnedMemory", "Region"]


class PinnedMemory(Memory):
    """Memory whose pages an adapter may have pinned."""

    def zero(self, start: int, length: int) -> None:
        """Zero a range in place.

        Pages given back to the system would be replaced by new ones at the next access, while
        the adapter went on writing into the old ones.
        """
        end = start + length
        while start < end:
            piece = min(end - start, 1 << 16)
            self.view[start : start + piece] = bytes(piece)
            start += piece


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
        with self._pd.rnic.releasing("ibv_dereg_mr"):
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
        with self.rnic.releasing("ibv_dealloc_pd"):
            self.pd.close()
