"""The books of a send queue: which slots and which bytes of the send ring are still in use.

A RoCE adapter reads what it sends from registered memory after the post has returned, so every
request's bytes lie in a ring until the request is done.  Requests are done in the order of their
posting, and an adapter tells it of signalled ones only; so now and then one is signalled that the
caller did not want to hear of: `PostedSends.due` says when, `done` says whose it was.

Pure: no verbs, no memory.
"""

from __future__ import annotations

from collections import deque

from .verbs import QueueFull

__all__ = ["PostedSends"]

_PARTS = 4
"""At the latest after this part of the slots or of the bytes a request is signalled."""


class PostedSends:
    """Requests posted and not known to be done, oldest first.

    Attributes:
      next_id: the number of the next request; numbers count from 0 for ever.
      position: where in the ring the next request's bytes start.
      free: bytes of the ring that are free; they start at `position` and may wrap.
    """

    __slots__ = (
        "_depth", "_oldest", "_posted", "_size", "_unheard", "_unheard_bytes", "free", "next_id",
        "position",
    )  # fmt: skip

    def __init__(self, *, depth: int, size: int) -> None:
        self._depth = depth
        self._size = size
        self._posted: deque[tuple[int, int, bool, int]] = deque()
        self._oldest = 0
        self._unheard = 0
        self._unheard_bytes = 0
        self.next_id = 0
        self.position = 0
        self.free = size

    def check(self, length: int) -> None:
        """Raise QueueFull when there is no slot or no room for ``length`` bytes."""
        if len(self._posted) >= self._depth or length > self.free:
            raise QueueFull

    def due(self, length: int) -> bool:
        """Whether the next request, of ``length`` bytes, has to be signalled."""
        return (
            (self._unheard + 1) * _PARTS >= self._depth
            or (self._unheard_bytes + length) * _PARTS >= self._size
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
            self._unheard = self._unheard_bytes = 0
        else:
            self._unheard += 1
            self._unheard_bytes += length

    def done(self, number: int) -> tuple[int, int, bool]:
        """Request ``number`` completed, and with it all before it: (wr_id, opcode, wanted)."""
        while True:
            wr_id, opcode, wanted, length = self._posted.popleft()
            self._oldest += 1
            self.free += length
            if self._oldest > number:
                return wr_id, opcode, wanted
