"""Remote memory buffers: what peers write into (RFC 7609, 4.1, 4.2, 4.4).

Theory of operation
-------------------
An RMB is one registered piece of memory, divided into up to 255 elements (RMBEs) of equal size;
element i starts at (i - 1) * size. Each element is the receive ring of one connection. The owner
only reads it; the peer writes by RDMA. An element of the RFC's layout starts with an eye
catcher of 4 bytes that nobody may overwrite, and its ring is 4 bytes shorter.

A pool holds the RMBs of one link group, and with it of one peer: what an RKey opens to a peer
never holds another peer's bytes. An element goes back to the pool when its connection is CLOSED,
is zeroed at once as far as it was written (4.4.1), and only then can be taken again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from trio_smc.wire.sizes import rmbe_size_code, rmbe_size_of

if TYPE_CHECKING:
    from trio_smc.rnic.memory import Memory

__all__ = [
    "EYE_CATCHER",
    "MAX_ELEMENTS",
    "MAX_RMBS",
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

_ROCE_RMB_SIZE = 4 * 1024 * 1024


def rmb_elements(element_size: int, kind: Literal["software", "roce"]) -> int:
    """How many elements of ``element_size`` bytes a new RMB gets.

    Software RNICs take no page before it is written, so an RMB has as many elements as an
    index can name. A RoCE adapter pins all of it: at most 4 MiB, but at least one element.
    """
    if kind == "software":
        return MAX_ELEMENTS
    return max(1, min(MAX_ELEMENTS, _ROCE_RMB_SIZE // element_size))


class Rmbe:
    """One element: the receive ring of one connection.

    Attributes:
      rmb: the RMB it is part of.
      index: 1-255, as CLC messages name it.
      size: bytes of the whole element.
      first: offset of the ring's first byte: 4 with an eye catcher, else 0.
      usable: bytes of the ring, size - first.
      offset: where the element starts in its RMB, bytes.
      data: the ring.
      in_use, served: whether a pool has handed it out, now and ever.
    """

    __slots__ = ("_eye_catcher", "data", "first", "in_use", "index", "offset", "rmb", "served",
                 "size", "usable")  # fmt: skip

    def __init__(self, rmb: Rmb, index: int) -> None:
        self.rmb = rmb
        self.index = index
        self.size = rmb.element_size
        self.offset = (index - 1) * rmb.element_size
        self.first = len(EYE_CATCHER) if rmb.eye_catcher else 0
        self.usable = self.size - self.first
        self.data = rmb.memory.slice(self.offset + self.first, self.usable)
        self.in_use = False
        self.served = False
        self._eye_catcher = rmb.memory.slice(self.offset, self.first)
        self._eye_catcher[:] = EYE_CATCHER[: self.first]

    def check_eye_catcher(self) -> bool:
        """Whether nobody overwrote the eye catcher; always true without one (4.4.1)."""
        return not self.first or bytes(self._eye_catcher) == EYE_CATCHER

    def clear(self, used: int) -> None:
        """Zero the first ``used`` bytes of the ring and restore the eye catcher (4.4.1)."""
        if used:
            self.rmb.memory.zero(self.offset, min(self.first + used, self.size))
        self._eye_catcher[:] = EYE_CATCHER[: self.first]


class Rmb:
    """One registered memory, divided into elements.

    Args:
      memory: zeroed memory of at least ``element_size * count`` bytes.
      element_size: bytes of each element, its eye catcher included.
      count: 1-255 elements.
      eye_catcher: whether the elements have the layout of RFC 7609, 4.2.
    """

    def __init__(self, memory: Memory, element_size: int, count: int, *, eye_catcher: bool) -> None:
        if not 1 <= count <= MAX_ELEMENTS:
            raise ValueError(f"an RMB has 1 to {MAX_ELEMENTS} elements")
        if element_size <= len(EYE_CATCHER) or element_size * count > memory.size:
            raise ValueError("the elements do not fit into the memory")
        self.memory = memory
        self.element_size = element_size
        self.eye_catcher = eye_catcher
        self.elements = tuple(Rmbe(self, index) for index in range(1, count + 1))


class RmbPool:
    """The RMBs of one link group, and which of their elements are free.

    Attributes:
      allocated: elements handed out so far.
      reused: those among them that had served a connection before.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reused = 0
        self._free: dict[Rmb, list[Rmbe]] = {}

    @property
    def rmbs(self) -> tuple[Rmb, ...]:
        """All RMBs, oldest first."""
        return tuple(self._free)

    def add(self, rmb: Rmb) -> None:
        """Put a new RMB into the pool; all its elements are free.

        Raises:
          OverflowError: the pool has 255 already (RFC 7609, 2.1).
          ValueError: its element size is no size class, so nobody would ever take one.
        """
        if len(self._free) >= MAX_RMBS:
            raise OverflowError(f"a link group has at most {MAX_RMBS} RMBs")
        if rmb.element_size != rmbe_size_of(rmbe_size_code(rmb.element_size)):
            raise ValueError(f"{rmb.element_size} is no RMBE size: 16 KiB << n")
        if rmb in self._free:
            raise ValueError("the RMB is in the pool already")
        self._free[rmb] = list(reversed(rmb.elements))

    def take(self, size: int) -> Rmbe | None:
        """A free element of the smallest size class that holds ``size`` bytes, all zero.

        None: all are in use; `add` another RMB. The RMB added first is preferred, so that the
        later ones can become empty; within it the element last released, whose pages are warm.
        """
        size = rmbe_size_of(rmbe_size_code(size))
        for rmb, free in self._free.items():
            if free and rmb.element_size == size:
                rmbe = free.pop()
                self.allocated += 1
                self.reused += rmbe.served
                rmbe.in_use = rmbe.served = True
                return rmbe
        return None

    def has_free(self, size: int) -> bool:
        """Whether `take` would find an element of ``size`` bytes, which is a size class."""
        return any(free and rmb.element_size == size for rmb, free in self._free.items())

    def release(self, rmbe: Rmbe, used: int | None = None) -> None:
        """Take an element back; its connection is CLOSED and the peer will not write to it.

        Args:
          rmbe: an element of this pool that is in use.
          used: how many bytes from the ring's start the peer can have written; None: unknown,
            all of it is zeroed.

        Raises:
          ValueError: it is not in use, or not of this pool.
        """
        free = self._free.get(rmbe.rmb)
        if free is None or not rmbe.in_use:
            raise ValueError(f"RMBE {rmbe.index} is not in use here")
        rmbe.clear(rmbe.usable if used is None else used)
        rmbe.in_use = False
        free.append(rmbe)

    def is_empty(self, rmb: Rmb) -> bool:
        """Whether no element of an RMB of this pool is in use: DELETE RKEY may name it."""
        return len(self._free[rmb]) == len(rmb.elements)

    def remove(self, rmb: Rmb) -> None:
        """Take an RMB out, before its RKey is deleted and its memory closed.

        Raises:
          ValueError: an element is in use, or the RMB is not of this pool.
        """
        free = self._free.get(rmb)
        if free is None or len(free) != len(rmb.elements):
            raise ValueError("the RMB is in use, or not in this pool")
        del self._free[rmb]
