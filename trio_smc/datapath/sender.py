"""Sending: the window, RDMA writes into the peer's RMBE, and the data kept for a replay.

Theory of operation
-------------------
Three counts of bytes since the connection began::

    taken <= produced <= taken + usable          delivered <= announced <= produced

``produced`` counts the bytes written into the peer's RMBE. ``taken`` is the peer's consumer cursor.
The window, usable - (produced - taken), is the number of bytes that may still be written; usable is
the size of the *peer's* ring. A send is cut into chunks of at most a quarter of the ring, so that
the peer reads one chunk while the next is written. Each chunk is one RDMA write, or two if the ring
wraps, and a CDC message with the new producer cursor, which also carries the consumer cursor of our
own RMBE. A quarter was measured: with half of the ring 64 KiB writes were 18 % slower, with less
not faster (docs/decisions.md).

The announcement of smaller writes may be deferred (`datapath.messenger`), but not for more than
`_MAX_UNANNOUNCED` bytes, and not while the peer sleeps: otherwise the peer would wait while this
side prepares its next write.

Writer blocked (B) is set in the CDC message that fills the window while more data waits, or in a
message of its own if a send finds the window closed. It requests a cursor update from the peer for
everything consumed, and is cleared in the next message after the window has opened. A blocked
writer continues when a quarter of the ring is free, or when all the remaining data fits, but not
for each byte that the peer consumes (the silly window of 4.5.1, seen from the sender). Until then
the peer announces everything that it consumes, so the writer cannot stall.

Data kept for a replay
----------------------
Written data is kept, in order, until it is known to be in the peer's RMBE: the CDC message that
announces it is complete, or the peer has consumed it (RFC 7609, 4.6.2). Three counts of bytes since
the connection began::

    taken, delivered <= announced <= produced

A bytes object is kept without a copy. Other buffers are copied if they are small. Large ones are
only borrowed, since a copy would cost more than waiting. Before the caller reuses such a buffer, it
waits until `borrowed` is 0, or calls `keep_copies`.

Urgent data (4.7.5, 4.7.6)
--------------------------
The last byte of an urgent send is urgent. The *goal* is the count of bytes up to and including it:
while less is produced, every CDC message carries P, so that a peer whose window is closed is
notified at once. The message that announces the goal carries P and U, the next ones neither. From
then on nothing is written until the peer's consumer cursor has reached this count, the *end*.

P is not set while the writer waits for the end: some peers drop an urgent byte that was not read
yet if a message without new data announces another.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.rnic.words import Words
from trio_smc.wire.cdc import WRITER_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_smc.datapath.messenger import Channel, Messenger

__all__ = ["Sender"]

_MAX_UNANNOUNCED = 64 * 1024
"""Bytes that are announced at once, with everything written before, so that the peer reads them
while the next are prepared and written. Measured with several values: docs/decisions.md."""


class Sender:
    """The sending half of a connection.

    Attributes:
      address: where the peer's ring starts.
      sendable: True if the state of the connection permits sending.
      taken: the peer's consumer cursor as a count; taken_wrap, taken_offset: as received.
      delivered: bytes known to have reached the peer's RMBE.
      borrowed: bytes of the caller's own, changeable memory that a replay would read.
      flush_when_delivered: True if a deferred message is posted as soon as all announced data has
        been delivered.
      send_limit: at most this many bytes are unacknowledged at a time; None: as many as fit.
    """

    __slots__ = (
        "_announce_limit",
        "_chunk",
        "_copy_limit",
        "_corked",
        "_messenger",
        "_record",
        "_resume_window",
        "_wanted",
        "address",
        "borrowed",
        "delivered",
        "flush_when_delivered",
        "send_limit",
        "sendable",
        "taken",
        "taken_offset",
        "taken_wrap",
        "window_stalls",
        "writes",
    )

    def __init__(self, messenger: Messenger, *, chunks: bool, copy_limit: int) -> None:
        self._messenger = messenger
        self.address: int = 0
        self._chunk = 0 if chunks else -1  # set by set_peer
        self._announce_limit = 0  # bytes whose announcement is not deferred
        self._copy_limit = copy_limit
        self._corked = False
        # Sequence number of the CDC message that announces it, count behind its last byte, bytes.
        self._record: deque[tuple[int, int, memoryview]] = deque()
        self._resume_window = 1
        self._wanted = 0  # bytes that the blocked writer has yet to send
        self.borrowed: int = 0
        self.delivered: int = 0
        self.flush_when_delivered: bool = False
        self.send_limit: int | None = None
        self.sendable: bool = False
        self.taken: int = 0
        self.taken_wrap: int = 0
        self.taken_offset: int = 0
        self.writes: int = 0
        self.window_stalls: int = 0

    def set_peer(self, alert_token: int, element_size: int, first: int) -> None:
        """Note the peer's element: its size in bytes, and the offset of its ring."""
        messenger = self._messenger
        messenger.peer_token = alert_token
        messenger.peer_first = self.taken_offset = first
        usable = messenger.peer_usable = element_size - first
        self._chunk = usable if self._chunk < 0 else max(1, usable // 4)
        self._announce_limit = min(self._chunk, _MAX_UNANNOUNCED)
        self._resume_window = max(1, usable // 4)

    # --- calls of the application ------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """True if `send` would post at least one byte now."""
        messenger, limit = self._messenger, self.send_limit
        return (
            self.sendable
            and self.window > 0
            and not messenger.waiting
            and not messenger.urgent_end
            and (limit is None or self.unacknowledged < limit)
        )

    @property
    def peer_ring(self) -> int:
        """Size of the peer's ring, in bytes."""
        return self._messenger.peer_usable

    @property
    def window(self) -> int:
        """Bytes that fit into the peer's ring, as far as is known."""
        return self._messenger.peer_usable - self._messenger.produced + self.taken

    @property
    def bytes_sent(self) -> int:
        """Bytes posted so far."""
        return self._messenger.produced

    @property
    def unacknowledged(self) -> int:
        """Bytes posted that are not yet known to have reached the peer's RMBE."""
        return self._messenger.produced - self.delivered

    @property
    def announced_is_delivered(self) -> bool:
        """True if all announced data has reached the peer's RMBE."""
        return self.delivered == self._messenger.announced

    def send(self, data: bytes | memoryview) -> int:
        """Post as much of ``data`` as fits into window and link; see `Connection.send`."""
        messenger = self._messenger
        if messenger.urgent_end:
            return 0  # until the peer has consumed the urgent byte (4.7.5, step 3)
        total = len(data)
        window = messenger.peer_usable - messenger.produced + self.taken
        channel = messenger.channel
        if channel is not None and 0 < total <= window and total <= self._chunk:
            # A single piece, the usual case: like `_send_pieces`, in fewer steps.
            if (
                messenger.immediate_sends_left
                or messenger.flush_later is None
                or messenger.produced + total - messenger.announced >= self._announce_limit
            ):
                if self._send_at_once(channel, data, total, False):
                    self._wanted = 0
                    if messenger.immediate_sends_left:
                        messenger.immediate_sends_left -= 1
                    return total
            elif messenger.holder is None and channel.capacity() >= total:
                self._post_piece(channel, memoryview(data), total, False)
                self._wanted = 0
                return total
        return self._send_pieces(memoryview(data), window)

    def _send_pieces(self, data: memoryview, window: int) -> int:
        """Like `send`, piece by piece. ``window``: bytes that fit into the window."""
        messenger = self._messenger
        total = left = len(data)
        if window < left and (not window or (messenger.blocked and window < self._resume_window)):
            self._stall(left)
            return 0
        channel = messenger.channel
        assert channel is not None
        later = messenger.flush_later
        chunk, limit = self._chunk, self._announce_limit
        while left:
            take = left
            if take > chunk:
                take = chunk
            if take > window:
                take = window
            sent = total - left
            piece = data if take == total else data[sent : sent + take]
            blocked = take == window and take < left
            if (
                later is None
                or messenger.immediate_sends_left
                or blocked
                or messenger.produced - messenger.announced + take >= limit
            ) and self._send_at_once(channel, piece, take, blocked):
                left -= take
                window -= take
                if not window:
                    break
                continue
            room = channel.capacity() if messenger.holder is None else 0
            if room <= 0:
                messenger.wait_for_room(channel)
                break
            if take > room:
                take = room
                piece = piece[:room]
            left -= take
            window -= take
            self._post_piece(channel, piece, take, not window and left > 0)
            if not window:
                break
        self._wanted = left
        if left and not window:
            self.window_stalls += 1  # the caller waits, and calls again only when there is room
        if messenger.immediate_sends_left:
            messenger.immediate_sends_left -= 1
        return total - left

    def send_limited(self, data: memoryview) -> int:
        """Like `send`, with at most `send_limit` bytes unacknowledged."""
        sent = 0
        while sent < len(data):
            piece = self._within_limit(data[sent:])
            posted = self.send(piece)
            sent += posted
            if not posted or posted < len(piece) or self.unacknowledged:
                break  # a delivery, or a larger window, wakes the writer
        return sent

    def _within_limit(self, data: memoryview) -> memoryview:
        limit = self.send_limit
        assert limit is not None
        if self.unacknowledged >= limit and self._messenger.flush_pending:
            self._messenger.flush()  # otherwise no completion would lower `unacknowledged`
        allowed = max(0, limit - self.unacknowledged)
        return data if allowed >= len(data) else data[:allowed]

    def send_more(
        self, data: memoryview, announce_later: Callable[[Callable[[], None]], None]
    ) -> int:
        """Like `send`, but leave the announcement of a small last piece to the next CDC message
        (MSG_MORE).

        Args:
          data: must not change afterwards, unless the caller calls `keep_copies`.
          announce_later: called with `Messenger.flush` if a piece was left unannounced.
        """
        messenger = self._messenger
        usual, immediate = messenger.flush_later, messenger.immediate_sends_left
        past_pass = messenger.defers_past_pass
        unannounced = False

        def leave(_: Callable[[], None]) -> None:
            nonlocal unannounced
            unannounced = True

        messenger.flush_later, messenger.immediate_sends_left = leave, 0
        messenger.defers_past_pass = True
        try:
            sent = self.send(data) if self.send_limit is None else self.send_limited(data)
        finally:
            messenger.flush_later, messenger.immediate_sends_left = usual, immediate
            messenger.defers_past_pass = past_pass
        if unannounced:
            # The next send must not find a message that is deferred already.
            messenger.cdc_requested = messenger.flush_pending = False
            announce_later(messenger.flush)
        return sent

    def send_urgent(self, data: memoryview) -> int:
        """Like `send`, and the last byte is urgent; see `Connection.send_urgent`."""
        messenger = self._messenger
        before = messenger.sequence
        waited = messenger.urgent_goal
        messenger.urgent_goal = messenger.produced + len(data)
        sent = self.send(data) if self.send_limit is None else self.send_limited(data)
        if (
            sent < len(data)
            and not waited
            and messenger.sequence == before
            and not messenger.urgent_end
        ):
            messenger.request_cdc()
        return sent

    def withdraw_urgent(self) -> None:
        """Give up the rest of an urgent send, if there is one."""
        if self._messenger.urgent_goal:
            self._messenger.urgent_goal = 0
            self._messenger.request_cdc()

    def merge_messages(
        self,
        flush_later: Callable[[Callable[[], None]], None] | None,
        *,
        when_delivered: bool = False,
        corked: bool = False,
    ) -> None:
        """Set whether CDC messages of sends smaller than a chunk are deferred.

        A message deferred so far is posted now.

        Args:
          flush_later: see `Connection`; None: not deferred.
          when_delivered: flush also as soon as all announced data has been delivered.
          corked: a message may be deferred for long, so a piece smaller than a chunk is always
            copied, and its sender need not wait.
        """
        messenger = self._messenger
        messenger.flush_later = flush_later
        self.flush_when_delivered = when_delivered
        self._corked = corked
        messenger.defers_past_pass = corked or when_delivered
        messenger.immediate_sends_left = 0
        messenger.flush()

    def _copy_or_borrow(self, data: memoryview) -> memoryview:
        if len(data) <= self._copy_limit or (self._corked and len(data) < self._chunk):
            return memoryview(bytes(data))
        self.borrowed += len(data)
        return data

    def keep_copies(self) -> None:
        """Copy the `borrowed` buffers, because the caller reuses them (a cancelled send)."""
        if self.borrowed:
            self._record = deque(
                (sequence, end, data if type(data.obj) is bytes else memoryview(bytes(data)))
                for sequence, end, data in self._record
            )
            self.borrowed = 0

    # --- posting -----------------------------------------------------------------------------

    def _send_at_once(
        self, channel: Channel, data: bytes | memoryview, length: int, blocked: bool
    ) -> bool:
        """Write and announce a piece if that can be done at once (`Messenger.post_at_once`).

        ``blocked``: the piece fills the window, and more data waits. Returns False if nothing has
        happened.
        """
        messenger = self._messenger
        if messenger.urgent_goal or messenger.waiting:
            return False
        before = messenger.produced
        start = before % messenger.peer_usable
        if start + length > messenger.peer_usable:
            return False  # the ring wraps: `write` needs two writes
        produced = before + length
        flags = WRITER_BLOCKED if blocked else 0
        try:
            if not messenger.post_at_once(channel, data, self.address + start, produced, flags):
                return False
            messenger.completed = messenger.sequence
            self.delivered = produced
            if self._record:
                self._record.clear()
                self.borrowed = 0
        except DeliveryUnknown:
            kept = memoryview(data)
            if type(kept.obj) is not bytes:
                kept = memoryview(bytes(data))
            # The write counts as posted.
            self._record.append((messenger.sequence, produced, kept))
        messenger.blocked = blocked
        self.writes += 1
        return True

    def _post_piece(self, channel: Channel, data: memoryview, length: int, blocked: bool) -> None:
        """Write a piece for which there is room, and announce it now or later.

        ``blocked``: the piece fills the window, and more data waits.
        """
        messenger = self._messenger
        if type(data.obj) is not bytes:
            data = self._copy_or_borrow(data)
        before = messenger.produced
        self.write(channel, data, before)
        messenger.produced = produced = before + length
        self._record.append(((messenger.sequence + 1) & 0xFFFF, produced, data))
        messenger.blocked = blocked
        self._announce_write(channel)

    def write(self, channel: Channel, data: memoryview, count: int) -> None:
        """RDMA-write ``data`` as byte number ``count``: twice if the ring wraps (4.7.4)."""
        messenger = self._messenger
        poster, rkey = messenger.poster, messenger.rkey
        start = count % messenger.peer_usable
        head = messenger.peer_usable - start
        if len(data) <= head:
            channel.post_write(poster, data, self.address + start, rkey)
            self.writes += 1
        else:
            channel.post_write(poster, data[:head], self.address + start, rkey)
            channel.post_write(poster, data[head:], self.address, rkey)
            self.writes += 2

    def _stall(self, wanted: int) -> None:
        """The window is closed, or too small for a writer that is blocked already."""
        self.window_stalls += 1
        self._wanted = wanted
        if not self._messenger.blocked:
            self._messenger.blocked = True
            self._messenger.request_cdc()

    def _announce_write(self, channel: Channel) -> None:
        """Post the CDC message of a write, or defer it.

        `_MAX_UNANNOUNCED` bytes are announced at once, since the peer can read them meanwhile. So
        are urgent data, a blocked writer, and, unless the application has asked for larger
        messages (TCP_CORK, MSG_MORE, no TCP_NODELAY), everything while the peer sleeps. If the link
        is full, a message is posted too: writes are unsignaled, so without a message no completion
        would ever make room again.
        """
        messenger = self._messenger
        later = messenger.flush_later
        progress = messenger.progress
        if progress is None:
            progress = self.find_progress(channel)
        asleep = 0
        if progress is not None:
            try:
                progress[messenger.progress_at] = messenger.produced
                asleep = messenger.peer_asleep[0]
            except ValueError:
                progress = None  # the link has ended, and with it the peer's memory here
        if (
            later is None
            or progress is None
            or messenger.blocked
            or (asleep and not messenger.defers_past_pass)
            or messenger.produced - messenger.announced >= self._announce_limit
            or messenger.urgent_goal
            or channel.capacity() <= 0
        ):
            messenger.post(channel)
        elif messenger.cdc_requested:
            messenger.coalesced += 1
        else:
            messenger.defer(later)

    def find_progress(self, channel: Channel) -> Words | None:
        """Find the words that show the peer what was written and taken, if this process ends
        unexpectedly, and the word that shows whether the peer sleeps.

        None: the peer's memory is not known yet, so a message must not be deferred.
        """
        messenger = self._messenger
        size = messenger.peer_first + messenger.peer_usable
        found = channel.progress_words(self.address - messenger.peer_first, messenger.rkey, size)
        if found is None:
            return None
        messenger.use_progress(*found, channel.peer_asleep())
        return messenger.progress

    def replay(self, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        """The data to write again after a link has failed, from count ``start`` on.

        Data that the peer has consumed is left out: newer data, which the peer may be reading, can
        be in its place.

        Returns:
          (count of the first byte, bytes), in order.
        """
        start = max(start, self.taken)
        for _, end, data in self._record:
            first = end - len(data)
            if end > start:
                yield max(first, start), data[max(0, start - first) :]

    # --- acknowledgments ---------------------------------------------------------------------

    def complete(self, sequence: int) -> bool:
        """A CDC message, and every write before it, has reached the peer.

        Returns:
          True if nothing is `borrowed` now.
        """
        record = self._record
        if self.borrowed:
            while record and not (sequence - record[0][0]) & 0x8000:
                self._release(record)
            return not self.borrowed
        while record and not (sequence - record[0][0]) & 0x8000:
            self.delivered = record.popleft()[1]
        return False

    def _release(self, record: deque[tuple[int, int, memoryview]]) -> None:
        _, self.delivered, data = record.popleft()
        if self.borrowed and type(data.obj) is not bytes:
            self.borrowed -= len(data)

    def consumer_untrusted(self, wrap: int, offset: int) -> bool:
        """Follow the peer's consumer cursor, which has changed.

        Data that the peer has consumed has arrived, even if its completion was not seen, so
        `delivered` may change.

        Returns:
          True if a waiting writer may continue.

        Raises:
          ProtocolError: the cursor goes back, or beyond the announced data.
        """
        messenger = self._messenger
        if messenger.channel is None:
            # The message arrived before SMC Confirm: nothing was produced, both layouts are valid.
            if wrap or offset not in (0, len(EYE_CATCHER)):
                raise ProtocolError("a consumer cursor before anything was sent")
            return False
        count = self.taken + offset - self.taken_offset
        if (
            wrap != self.taken_wrap
            or offset >= messenger.peer_usable
            or not self.taken < count <= messenger.announced
        ):
            count = advance_untrusted(
                self.taken,
                wrap,
                offset,
                usable=messenger.peer_usable,
                first=messenger.peer_first,
                limit=messenger.announced,
            )
        self.taken = count
        self.taken_wrap = wrap
        self.taken_offset = offset
        if count > self.delivered:
            record = self._record
            while record and record[0][1] <= count:
                self._release(record)
        if messenger.urgent_end and count >= messenger.urgent_end:
            messenger.urgent_end = 0
        if messenger.blocked:
            window = messenger.peer_usable - messenger.produced + count
            if window < self._resume_window and window < self._wanted:
                return False
            messenger.blocked = False
        return True

    def drop_unsent(self) -> None:
        """Drop the data kept for a replay, because nothing more is sent."""
        self._record.clear()
        self.delivered = self._messenger.produced
        self.borrowed = 0
