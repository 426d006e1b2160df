"""The sending half of a connection: window, RDMA writes, replay.

Theory of operation
-------------------
Three counts of bytes since the connection began::

    taken <= produced <= taken + usable          delivered <= announced <= produced

``produced`` is what was written into the peer's RMBE, ``taken`` the peer's consumer cursor, and
the window is what may still be written: usable - (produced - taken), with the size of the
*peer's* ring. A send is cut into chunks of at most a quarter of the ring, so that the peer reads
one while the next is written. Each chunk is one RDMA write, two where the ring wraps, and a CDC
message with the new producer cursor; the consumer cursor of our own RMBE rides along.

Writer blocked (B) is set in the CDC message that fills the window while more data waits, or in
one of its own when a send finds the window closed. It asks the peer for a cursor update whenever
anything is consumed, and is cleared in the next message after the window has opened again.
A blocked writer goes on at a tenth of the ring and not at each byte the peer takes (the silly
window of 4.5.1, seen from the other side); the peer reports any consumption until then, so this
cannot stall.

Whatever is posted is kept, in order, until the CDC message that announces it is complete
(4.6.2): `replay` gives it back after a link failed. What the application passed as bytes is kept
as it is; other buffers are copied when they are small. Large ones are only borrowed, since a
copy would cost more than waiting: `borrowed` is then not 0, and the caller waits until it is, or
calls `keep_copies` before it lets the buffer go.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.datapath.messenger import Messenger
from trio_smc.datapath.rmb import EYE_CATCHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_smc.datapath.channel import Channel
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Sender"]


class Sender(Messenger):
    """Base of `Connection`: what it sends."""

    __slots__ = (
        "_address",
        "_chunk",
        "_completed",
        "_copy_limit",
        "_corked",
        "_delivered",
        "_flush_when_delivered",
        "_replay",
        "_resume",
        "_rkey",
        "_sendable",
        "_taken",
        "_taken_offset",
        "_taken_wrap",
        "_wanted",
        "borrowed",
        "send_limit",
        "window_stalls",
        "writes",
    )

    _replay: deque[tuple[int, int, memoryview]]
    borrowed: int
    """Bytes of the caller's own, changeable memory that a replay would read."""
    send_limit: int | None
    """At most this many bytes are unacknowledged at a time; None: as many as fit."""

    def __init__(
        self,
        rmbe: Rmbe,
        *,
        chunks: bool,
        copy_limit: int,
        flush_later: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        super().__init__(rmbe, flush_later=flush_later)
        self._address = self._rkey = 0  # where the peer's ring starts
        self._chunk = 0 if chunks else -1  # set by _set_peer
        self._resume = 1
        self._copy_limit = copy_limit
        self._delivered = 0
        self._corked = self._flush_when_delivered = False
        self._taken = 0
        self._taken_wrap = self._taken_offset = 0
        self._replay = deque()
        self._completed = 0  # of the last one completed: SS of 4.6.1
        self._sendable = False
        self._wanted = 0  # bytes the blocked writer has left
        self.borrowed = 0
        self.send_limit = None
        self.writes = 0
        self.window_stalls = 0

    def _set_peer(self, alert_token: int, element_size: int, first: int) -> None:
        self._peer_token = alert_token
        self._peer_first = self._taken_offset = first
        usable = self._peer_usable = element_size - first
        self._chunk = usable if self._chunk < 0 else max(1, usable // 4)
        self._resume = max(1, usable // 10)

    # --- what the application sees -----------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether `send` would post at least one byte now."""
        limit = self.send_limit
        return (
            self._sendable
            and self.window > 0
            and not self._waiting
            and not self._urgent_end
            and (limit is None or self._produced - self._delivered < limit)
        )

    @property
    def starved(self) -> bool:
        """Whether a task waits to send and nothing can be posted."""
        return self.on_writable is not None and self._sendable and not self.can_send

    @property
    def peer_ring(self) -> int:
        """Bytes the peer's ring holds."""
        return self._peer_usable

    @property
    def window(self) -> int:
        """Bytes the peer's ring has room for, as far as we know."""
        return self._peer_usable - self._produced + self._taken

    @property
    def bytes_sent(self) -> int:
        """Bytes posted so far."""
        return self._produced

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

    def send(self, data: memoryview) -> int:
        """Post as much of ``data`` as window and link take; never waits.

        Args:
          data: a contiguous view of bytes (format "B"): all that waits to be sent, since
            whether more waits is part of the protocol. Unless it is a view of a bytes object
            it must not change while `borrowed` is not 0.

        Returns:
          The number of bytes posted. With fewer than given, set `on_writable` and send the rest
          when it was called.

        Raises:
          OSError: the connection has failed, or (EPIPE) its writing side was shut down.
        """
        if not self._sendable or self._urgent_end:
            return self._refuse_send()
        if self.send_limit is not None:
            data = self._within_limit(data, self.send_limit)
        total = left = len(data)
        window = self._peer_usable - self._produced + self._taken
        if window < left and (not window or (self._blocked and window < self._resume)):
            self._stall(left)
            return 0
        channel = self._channel
        assert channel is not None
        stable = type(data.obj) is bytes
        chunk = self._chunk
        while left:
            take = channel.capacity()
            if take <= 0:
                self._wait_for_room(channel)
                break
            if take > chunk:
                take = chunk
            if take > window:
                take = window
            if take > left:
                take = left
            sent = total - left
            piece = data if take == total else data[sent : sent + take]
            if not stable:
                piece = self._copy_or_borrow(piece)
            self._write(channel, piece, take)
            left -= take
            window -= take
            self._blocked = not window and left > 0
            if self._flush_later is None or self._blocked or not self._may_defer(channel):
                self._post_cdc(channel)
            else:
                self._defer_cdc()
            if not window:
                break
        self._wanted = left
        return total - left

    def merge_messages(
        self,
        flush_later: Callable[[Callable[[], None]], None] | None,
        *,
        when_delivered: bool = False,
        corked: bool = False,
    ) -> None:
        """From now on put CDC messages of sends smaller than a chunk off, or no longer.

        What was put off so far is sent now.

        Args:
          flush_later: as for the constructor.
          when_delivered: flush also as soon as everything told of before has arrived.
          corked: that may be long: a piece smaller than a chunk is always copied, so that its
            sender need not wait.
        """
        self._flush_later = flush_later
        self._flush_when_delivered = when_delivered
        self._corked = corked
        self.flush()

    def limit_unacknowledged(self, limit: int | None) -> None:
        """Have at most ``limit`` bytes unacknowledged at a time; None: as many as fit."""
        self.send_limit = limit
        self._wake_writer()

    @property
    def quiet(self) -> bool:
        """Whether all that the peer was told of has arrived there."""
        return self._delivered == self._announced

    def keep_copies(self) -> None:
        """Copy what is `borrowed`: the caller takes its buffer back (a cancelled send)."""
        if self.borrowed:
            self._replay = deque(
                (sequence, end, data if type(data.obj) is bytes else memoryview(bytes(data)))
                for sequence, end, data in self._replay
            )
            self.borrowed = 0

    def replay(self) -> Iterator[tuple[int, memoryview]]:
        """What is posted and not delivered, in order: (count of its first byte, bytes)."""
        for _, end, data in self._replay:
            yield end - len(data), data

    def _copy_or_borrow(self, data: memoryview) -> memoryview:
        if len(data) <= self._copy_limit or (self._corked and len(data) < self._chunk):
            return memoryview(bytes(data))
        self.borrowed += len(data)
        return data

    def _within_limit(self, data: memoryview, limit: int) -> memoryview:
        allowed = max(0, limit - self._produced + self._delivered)
        if not allowed and self._flush_pending:
            self.flush()  # nothing else would make it more before the message is due
        return data if allowed >= len(data) else data[:allowed]

    # --- posting -----------------------------------------------------------------------------

    def _write(self, channel: Channel, data: memoryview, length: int) -> None:
        """One RDMA write at the producer cursor, two where the ring wraps (4.7.4)."""
        start = self._produced % self._peer_usable
        head = self._peer_usable - start
        if length <= head:
            channel.post_write(self, data, self._address + start, self._rkey)
            self.writes += 1
        else:
            channel.post_write(self, data[:head], self._address + start, self._rkey)
            channel.post_write(self, data[head:], self._address, self._rkey)
            self.writes += 2
        self._produced += length
        self._replay.append(((self._sequence + 1) & 0xFFFF, self._produced, data))

    def _stall(self, wanted: int) -> None:
        """The window is closed, or too small for a writer that was told blocked."""
        self.window_stalls += 1
        self._wanted = wanted
        if not self._blocked:
            self._blocked = True
            self._owe_cdc()

    def _may_defer(self, channel: Channel) -> bool:
        """Whether the CDC message of a write may wait for more.

        Not with a chunk the peer could be reading. And not when the link is full: writes are
        unsignaled, so with every message put off no completion would ever make room again.
        Nor with urgent data.
        """
        return (
            self._produced - self._announced < self._chunk
            and channel.capacity() > 0
            and not self._urgent_goal
        )

    # --- what comes back ---------------------------------------------------------------------

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""
        self._completed = sequence
        replay = self._replay
        while replay and not (sequence - replay[0][0]) & 0x8000:
            if self.borrowed:
                self._release(replay)
            else:
                self._delivered = replay.popleft()[1]
        self._after_delivery()
        if self._silent:
            self._last_word_complete(sequence)

    def _release(self, replay: deque[tuple[int, int, memoryview]]) -> None:
        _, self._delivered, data = replay.popleft()
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
            replay = self._replay
            while replay and replay[0][1] <= self._taken:
                self._release(replay)
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

    # --- endings -----------------------------------------------------------------------------

    def _drop_unsent(self) -> None:
        """Nothing posted will be replayed, nothing more is sent."""
        self._replay.clear()
        self._delivered = self._produced
        self.borrowed = 0

    def _refuse_send(self) -> int:
        """Raise what `send` owes its caller in a connection that takes no data; 0 in one that
        does, only not before the peer has taken an urgent byte (4.7.5, step 3)."""
        if self._sendable:
            return 0
        if self.error is not None:
            raise self._failure(self.error)
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    # --- supplied by the class built on this one ---------------------------------------------

    def _all_delivered(self) -> None:
        """`unsent` became false."""
        raise NotImplementedError

    def _last_word_complete(self, sequence: int) -> None:
        """A CDC message is complete, and one with C or A was posted."""
        raise NotImplementedError
