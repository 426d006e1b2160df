"""What was sent and is not known to have arrived: the record that a replay is made from.

Theory of operation
-------------------
Whatever is written is kept, in order, until it is known to be in the peer's RMBE: the CDC message
that announces it is complete, or the peer has taken it (RFC 7609, 4.6.2). Three counts of bytes
since the connection began::

    taken, delivered <= announced <= produced

What the application passed as bytes is kept as it is; other buffers are copied when they are
small. Large ones are only borrowed, since a copy would cost more than waiting: `borrowed` is then
not 0, and the caller waits until it is, or calls `keep_copies` before it lets the buffer go.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.datapath.messenger import Messenger
from trio_smc.datapath.rmb import EYE_CATCHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Delivery"]


class Delivery(Messenger):
    """Base of `Sender`: what is under way, and what the peer's answers say about it."""

    __slots__ = (
        "_completed",
        "_delivered",
        "_flush_when_delivered",
        "_record",
        "_resume",
        "_sendable",
        "_taken",
        "_taken_offset",
        "_taken_wrap",
        "_wanted",
        "borrowed",
    )

    _record: deque[tuple[int, int, memoryview]]
    """Sequence number of the CDC message that announces it, count behind its last byte, bytes."""
    borrowed: int
    """Bytes of the caller's own, changeable memory that a replay would read."""

    def __init__(
        self, rmbe: Rmbe, *, flush_later: Callable[[Callable[[], None]], None] | None
    ) -> None:
        super().__init__(rmbe, flush_later=flush_later)
        self._completed = 0  # of the last CDC message completed: SS of 4.6.1
        self._delivered = 0
        self._flush_when_delivered = False
        self._record = deque()
        self._resume = 1
        self._sendable = False
        self._taken = 0
        self._taken_wrap = self._taken_offset = 0
        self._wanted = 0  # bytes the blocked writer has left
        self.borrowed = 0

    @property
    def unacknowledged(self) -> int:
        """Bytes posted and not yet known to have reached the peer's RMBE."""
        return self._produced - self._delivered

    @property
    def unsent(self) -> bool:
        """Whether data is under way (guard of the states, RFC 7609, 4.8.1 (3A, 4A)).

        Data only: a cursor update under way is no reason to wait with an ending, as what is
        posted arrives in order, nor to call the peer's close a loss of data.
        """
        return self._produced != self._delivered

    @property
    def quiet(self) -> bool:
        """Whether all that the peer was told of has arrived there."""
        return self._delivered == self._announced

    def keep_copies(self) -> None:
        """Copy what is `borrowed`: the caller takes its buffer back (a cancelled send)."""
        if self.borrowed:
            self._record = deque(
                (sequence, end, data if type(data.obj) is bytes else memoryview(bytes(data)))
                for sequence, end, data in self._record
            )
            self.borrowed = 0

    def replay(self, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        """What would have to be written again after a link failed, from count ``start`` on.

        Nothing that the peer has taken: where those bytes lay newer ones may lie now, which it
        was told of and may be reading.

        Returns:
          (count of its first byte, bytes), in order.
        """
        start = max(start, self._taken)
        for _, end, data in self._record:
            first = end - len(data)
            if end > start:
                yield max(first, start), data[max(0, start - first) :]

    # --- what comes back ---------------------------------------------------------------------

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""
        self._completed = sequence
        record = self._record
        while record and not (sequence - record[0][0]) & 0x8000:
            if self.borrowed:
                self._release(record)
            else:
                self._delivered = record.popleft()[1]
        self._after_delivery()
        if self._silent:
            self._last_word_complete(sequence)

    def _release(self, record: deque[tuple[int, int, memoryview]]) -> None:
        _, self._delivered, data = record.popleft()
        if self.borrowed and type(data.obj) is not bytes:
            self.borrowed -= len(data)
            if not self.borrowed:
                self._wake_writer()

    def _after_delivery(self) -> None:
        if self._flush_when_delivered and self._delivered == self._announced:
            self.flush()
        if self._produced == self._delivered:
            self._all_delivered()
            # Delivery opens no window: who waits for that would only look and sleep again.
            if not self._blocked or not self._sendable:
                self._wake_writer()

    def _consumer_untrusted(self, wrap: int, offset: int) -> None:
        """Follow the peer's consumer cursor; the caller knows that it has moved.

        Raises:
          ProtocolError: it goes back, or beyond what the peer was told of.
        """
        if self._channel is None:
            # A message that outran the Confirm: nothing was produced, either layout is fine.
            if wrap or offset not in (0, len(EYE_CATCHER)):
                raise ProtocolError("a consumer cursor before anything was sent")
            return
        count = self._taken + offset - self._taken_offset
        if (
            wrap != self._taken_wrap
            or offset >= self._peer_usable
            or not self._taken < count <= self._announced
        ):
            count = advance_untrusted(
                self._taken,
                wrap,
                offset,
                usable=self._peer_usable,
                first=self._peer_first,
                limit=self._announced,
            )
        self._taken = count
        self._taken_wrap = wrap
        self._taken_offset = offset
        if self._taken > self._delivered:
            # What the peer has taken has arrived, whether or not its completion was seen.
            record = self._record
            while record and record[0][1] <= self._taken:
                self._release(record)
            self._after_delivery()
        if self._urgent_end and self._taken >= self._urgent_end:
            self._urgent_end = 0
        if self._blocked:
            window = self._peer_usable - self._produced + self._taken
            if window < self._resume and window < self._wanted:
                return
            self._blocked = False
        if self.on_writable is not None:
            self._wake_writer()

    def _drop_unsent(self) -> None:
        """Nothing posted will be replayed, nothing more is sent."""
        self._record.clear()
        self._delivered = self._produced
        self.borrowed = 0

    # --- supplied by the classes built on this one -------------------------------------------

    def _all_delivered(self) -> None:
        """`unsent` became false."""
        raise NotImplementedError

    def _last_word_complete(self, sequence: int) -> None:
        """A CDC message is complete, and one with C or A was posted."""
        raise NotImplementedError
