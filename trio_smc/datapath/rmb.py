"""Remote memory buffers, into which peers write (RFC 7609, 4.1, 4.2, 4.4).

Theory of operation
-------------------
An RMB is one registered piece of memory, divided into up to 255 elements (RMBEs) of equal size;
element i starts at (i - 1) * size. Each element is the receive ring of one connection. The owner
only reads it; the peer writes by RDMA. In the RFC's layout an element starts with an eye catcher of
4 bytes, which the peer must not overwrite, and its ring is 4 bytes shorter.

A pool holds the RMBs of one link group, and so of one peer: an RKey never gives a peer access to
another peer's bytes. An element returns to the pool when its connection is CLOSED. All bytes that
may have been written are zeroed before the element can be taken again (4.4.1).

If a connection ended orderly, the number of bytes written is known. Few bytes are zeroed at once
and in place, so that the next connection finds the pages warm. More bytes are zeroed in steps
(`RmbPool.wipe_some`), so that no caller waits. After any other end the peer may have written
anywhere; then all pages that the memory has are given back to the system. Pages of orderly ends are
given back too once the free elements hold `WARM` bytes, so that memory falls again after a burst of
connections.

An element is created at its first use, because most link groups use few of the 255. If the system
may refuse a page at its first access, all pages of an element are allocated before it is handed out
(`Rmbe.commit`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, overload

from trio_smc.wire.fields import rmbe_size_for

if TYPE_CHECKING:
    from trio_smc.rnic.memory import Memory

__all__ = [
    "EYE_CATCHER",
    "MAX_ELEMENTS",
    "MAX_RMBS",
    "ROCE_RMB_SIZE",
    "WARM",
    "Rmb",
    "RmbPool",
    "Rmbe",
    "rmb_elements",
]

EYE_CATCHER: Final = b"\xd9\xd4\xc2\xc5"
"""First bytes of an element: "RMBE" in EBCDIC.  RFC 7609, 4.2 leaves the value to its owner."""

MAX_ELEMENTS: Final = 255
"""An RMBE index is one byte and starts at 1 (RFC 7609, A.2.2)."""

MAX_RMBS: Final = 255
"""RMBs of one link group."""

WARM: Final = 16 * 1024 * 1024
"""Bytes of pages that the free elements of a pool keep. Chosen; no measurement is recorded."""

_ZEROED_AT_ONCE: Final = 64 * 1024
"""Bytes that `RmbPool.release` zeroes itself. Chosen; no measurement is recorded."""
_STEP: Final = 256 * 1024
"""Bytes that are zeroed in one step. Chosen: a step that gives pages back took 0.3 ms on one
machine, and 0.02 ms on another (`Memory.wipe`, least of 30, Linux 6.18)."""
_WIPE_TIME: Final = 0.0005
"""Seconds after which `RmbPool.wipe_some` begins no further step. Chosen: with the last step it
takes less than a millisecond."""

ROCE_RMB_SIZE = 4 * 1024 * 1024
"""Bytes of an RMB on a RoCE port. Chosen; no measurement is recorded."""


def rmb_elements(element_size: int, kind: Literal["software", "roce"]) -> int:
    """The number of elements of ``element_size`` bytes in a new RMB.

    With a software RNIC a page is allocated at its first write, so an RMB has as many elements as
    an index can name. A RoCE adapter pins the whole RMB: at most 4 MiB, but at least one element.
    """
    if kind == "software":
        return MAX_ELEMENTS
    return max(1, min(MAX_ELEMENTS, ROCE_RMB_SIZE // element_size))


class Rmbe:
    """One element: the receive ring of one connection.

    Raises:
      OSError: as `commit`.

    Attributes:
      rmb: the RMB that contains it.
      index: 1-255, as CLC messages name it.
      size: bytes of the whole element.
      first: offset of the ring's first byte: 4 with an eye catcher, else 0.
      usable: bytes of the ring, size - first.
      offset: start of the element in its RMB, in bytes.
      data: the ring.
      in_use, served: True if a connection uses it now, or has used it ever.
      warm: bytes from its start whose pages the pool has kept.
      committed: True if `commit` has allocated all its pages, and none was given back since.
    """

    __slots__ = ("_eye_catcher", "_to_wipe", "committed", "data", "first", "in_use", "index",
                 "offset", "rmb", "served", "size", "usable", "warm")  # fmt: skip

    def __init__(self, rmb: Rmb, index: int) -> None:
        self.rmb: Rmb = rmb
        self.index: int = index
        self.size: int = rmb.element_size
        self.offset: int = (index - 1) * rmb.element_size
        self.in_use: bool = False
        self.served: bool = False
        self.warm: int = 0
        self.committed: bool = False
        self._to_wipe = range(0)
        self.lay_out()
        self.prepare()

    def commit(self) -> None:
        """Allocate all its pages, if the system might refuse one at its first access.

        Raises:
          OSError: they cannot be allocated (`Memory.commit`).
        """
        if not self.committed:
            self.committed = self.rmb.memory.commit(self.offset, self.size)

    def prepare(self) -> None:
        """Prepare it for a connection: allocate its pages and write the eye catcher.

        Raises:
          OSError: as `commit`.
        """
        if not self.committed:
            self.commit()
        self.rmb.memory.clear_progress(self.index - 1)
        if self.first:
            self._eye_catcher[:] = EYE_CATCHER

    @property
    def written(self) -> int:
        """Bytes that the peer has written into the ring since the connection began, as the peer
        claims; 0 if it has announced all of them, or if the RNIC has no progress words."""
        return self.rmb.memory.written(self.index - 1)

    @property
    def taken(self) -> int:
        """Bytes that the peer has taken out of its own ring since the connection began, as the peer
        claims; `NOT_SHOWN` (more than any number) if it has not shown that."""
        return self.rmb.memory.taken(self.index - 1)

    def lay_out(self) -> None:
        """Divide it into eye catcher and ring, like its RMB; `prepare` writes the eye catcher."""
        memory = self.rmb.memory
        self.first: int = len(EYE_CATCHER) if self.rmb.eye_catcher else 0
        self.usable: int = self.size - self.first
        self.data: memoryview[int] = memory.slice(self.offset + self.first, self.usable)
        self._eye_catcher = memory.slice(self.offset, self.first)

    def check_eye_catcher(self) -> bool:
        """True if the eye catcher is intact, or there is none (4.4.1)."""
        return not self.first or bytes(self._eye_catcher) == EYE_CATCHER

    def clear(self, used: int) -> None:
        """Zero the first ``used`` bytes of the ring and restore the eye catcher (4.4.1)."""
        if used:
            self.rmb.memory.zero(self.offset, min(self.first + used, self.size))
        if self.first:
            self._eye_catcher[:] = EYE_CATCHER

    @property
    def held(self) -> int:
        """Bytes from its start whose pages are certainly allocated, written or not."""
        return self.size if self.committed else self.warm

    def mark_dirty(self, written: int, *, keep: bool) -> None:
        """From now on `wipe` zeroes the first ``written`` bytes of the element.

        Args:
          keep: True to keep its pages.
        """
        wider = max(written, self.held)
        self._to_wipe = range(self.offset, self.offset + (written if keep else wider))
        self.warm = wider if keep else 0
        self.committed = self.committed and keep

    def wipe(self) -> bool:
        """Zero one step, in a fraction of a millisecond; True if it was the last one (4.4.1)."""
        left, memory = self._to_wipe, self.rmb.memory
        if self.warm:
            next_start = min(left.start + _STEP, left.stop)
            memory.zero(left.start, next_start - left.start)
        else:
            next_start = memory.wipe(left.start, left.stop, _STEP)
        self._to_wipe = range(next_start, left.stop)
        return not self._to_wipe


class _Elements(Sequence[Rmbe]):
    """The elements of an RMB by place, index - 1; each is created at its first access.

    Raises:
      OSError: an element cannot be created (`Rmbe`).
    """

    def __init__(self, rmb: Rmb, count: int) -> None:
        self._rmb = rmb
        self._places = range(count)
        self.made: dict[int, Rmbe] = {}

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Rmbe: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Rmbe]: ...

    def __getitem__(self, place: int | slice) -> Rmbe | Sequence[Rmbe]:
        if isinstance(place, slice):
            return [self[each] for each in self._places[place]]
        place = self._places[place]
        element = self.made.get(place)
        if element is None:
            element = self.made[place] = Rmbe(self._rmb, place + 1)
        return element


class Rmb:
    """One registered memory, divided into elements.

    Args:
      memory: zeroed memory of at least ``element_size * count`` bytes.
      element_size: bytes of each element, its eye catcher included.
      count: 1-255 elements.
      eye_catcher: True if the elements have the layout of RFC 7609, 4.2.

    Attributes:
      count: as the parameter.
      elements: a sequence; each element is created at its first access, which raises OSError if its
        pages cannot be allocated (`Rmbe`).
    """

    def __init__(self, memory: Memory, element_size: int, count: int, *, eye_catcher: bool) -> None:
        if not 1 <= count <= MAX_ELEMENTS:
            raise ValueError(f"an RMB has 1 to {MAX_ELEMENTS} elements")
        if element_size <= len(EYE_CATCHER) or element_size * count > memory.size:
            raise ValueError("the elements do not fit into the memory")
        self.memory = memory
        self.element_size = element_size
        self.count: int = count
        self.eye_catcher: bool = eye_catcher
        self._elements = _Elements(self, count)

    @property
    def elements(self) -> Sequence[Rmbe]:
        """See the class."""
        return self._elements

    @property
    def made(self) -> int:
        """The number of elements created."""
        return len(self._elements.made)

    @property
    def in_use(self) -> int:
        """The number of elements that serve a connection."""
        return sum(element.in_use for element in self._elements.made.values())

    def enable_eye_catchers(self) -> None:
        """Change to the RFC's layout; nothing has been written into the elements yet."""
        if not self.eye_catcher:
            self.eye_catcher = True
            for element in self._elements.made.values():
                element.lay_out()
                if element.in_use:
                    element.prepare()  # an element in use has its pages, so this cannot fail


class RmbPool:
    """The RMBs of one link group with their free elements.

    Attributes:
      allocated: elements handed out so far.
      reused: those among them that had served a connection before.
    """

    def __init__(self) -> None:
        self.allocated: int = 0
        self.reused: int = 0
        # For each RMB the released elements, and how many elements were ever handed out.
        self._free: dict[Rmb, list[Rmbe]] = {}
        self._handed_out: dict[Rmb, int] = {}
        self._dirty: deque[Rmbe] = deque()
        self._warm = 0  # sum over the elements that are not in use
        self._closed = False

    @property
    def rmbs(self) -> tuple[Rmb, ...]:
        """All RMBs, oldest first."""
        return tuple(self._free)

    @property
    def has_dirty(self) -> bool:
        """True if released elements wait for `wipe_some`."""
        return bool(self._dirty)

    def add(self, rmb: Rmb) -> None:
        """Put a new RMB into the pool; all its elements are free.

        Raises:
          OverflowError: the pool has 255 already (RFC 7609, 2.1).
          ValueError: its element size is not a size class, so no element would ever be taken.
        """
        if len(self._free) >= MAX_RMBS:
            raise OverflowError(f"a link group has at most {MAX_RMBS} RMBs")
        if rmb.element_size != rmbe_size_for(rmb.element_size):
            raise ValueError(f"{rmb.element_size} is no RMBE size: 16 KiB << n")
        if rmb in self._free:
            raise ValueError("the RMB is in the pool already")
        self._free[rmb] = []
        self._handed_out[rmb] = 0

    def take(self, size: int) -> Rmbe | None:
        """Take a free element, all zero, of the smallest size class that holds ``size`` bytes.

        Returns None if all are in use, or still to be zeroed; then `add` another RMB. The RMB added
        first is preferred, so that later ones can become empty. Of the elements of that RMB the one
        released last is preferred, because its pages are warm: allocated and mapped.

        Raises:
          OSError: the pages of a free element cannot be allocated (`Rmbe.commit`); it stays free.
        """
        size = rmbe_size_for(size)
        rmbe = self._take_free(size) or self._take_dirty(size)
        if rmbe is None:
            return None
        try:
            rmbe.prepare()
        except OSError:
            self._free[rmbe.rmb].append(rmbe)
            raise
        self._warm -= rmbe.warm
        self.allocated += 1
        self.reused += rmbe.served
        rmbe.in_use = rmbe.served = True
        return rmbe

    def _take_free(self, size: int) -> Rmbe | None:
        for rmb, free in self._free.items():
            if rmb.element_size != size:
                continue
            if free:
                return free.pop()
            begun = self._handed_out[rmb]
            if begun < rmb.count:
                rmbe = rmb.elements[begun]
                self._handed_out[rmb] = begun + 1
                return rmbe
        return None

    def _take_dirty(self, size: int) -> Rmbe | None:
        """Take a released element, if a single step zeroes it."""
        rmbe = next((each for each in self._dirty if each.size == size), None)
        if rmbe is None or not rmbe.wipe():
            return None
        self._dirty.remove(rmbe)
        return rmbe

    def has_free(self, size: int) -> bool:
        """True if `take` would find an element of ``size`` bytes, a size class."""
        for rmb, free in self._free.items():
            if rmb.element_size == size and (free or self._handed_out[rmb] < rmb.count):
                return True
        return False

    def release(self, rmbe: Rmbe, used: int | None = None) -> None:
        """Take an element back; its connection is CLOSED and the peer will not write to it.

        If `has_dirty` is true afterwards, call `wipe_some`.

        Args:
          rmbe: an element of this pool that is in use.
          used: bytes from the ring's start that the peer may have written; None: unknown, so all of
            it is zeroed.

        Raises:
          ValueError: the element is not in use, or not of this pool.
        """
        free = self._free.get(rmbe.rmb)
        if free is None or not rmbe.in_use:
            raise ValueError(f"RMBE {rmbe.index} is not in use here")
        rmbe.in_use = False
        if self._closed:
            return
        written = rmbe.size if used is None else min(rmbe.first + used, rmbe.size)
        held = max(rmbe.held, written)
        keep = used is not None and (self._warm + held <= WARM or rmbe.rmb.memory.pinned)
        if used is not None and keep and written <= _ZEROED_AT_ONCE:
            rmbe.clear(used)
            rmbe.warm = held
            free.append(rmbe)
        else:
            rmbe.mark_dirty(written, keep=keep)
            self._dirty.append(rmbe)
        self._warm += rmbe.warm

    def wipe_some(self, clock: Callable[[], float]) -> list[Rmb]:
        """Zero more bytes of released elements, for less than a millisecond.

        Args:
          clock: returns the time in seconds.

        Returns:
          RMBs with an element that has become free.
        """
        end = clock() + _WIPE_TIME
        cleaned = []
        while self._dirty:
            if self._dirty[0].wipe():
                rmbe = self._dirty.popleft()
                self._free[rmbe.rmb].append(rmbe)
                cleaned.append(rmbe.rmb)
            if clock() >= end:
                break
        return cleaned

    def is_empty(self, rmb: Rmb) -> bool:
        """True if no element of an RMB of this pool is in use: DELETE RKEY may name the RMB."""
        return len(self._free[rmb]) == self._handed_out[rmb]

    def remove(self, rmb: Rmb) -> None:
        """Remove an RMB, before its RKey is deleted and its memory closed.

        Raises:
          ValueError: an element is in use, or the RMB is not of this pool.
        """
        free = self._free.get(rmb)
        if free is None or len(free) != self._handed_out[rmb]:
            raise ValueError("the RMB is in use, or not in this pool")
        self._warm -= sum(rmbe.warm for rmbe in free)
        del self._free[rmb], self._handed_out[rmb]

    def close(self) -> None:
        """Zero nothing more, because all memory will be freed."""
        self._closed = True
        self._dirty.clear()
