"""Sending: the window, RDMA writes into the peer's RMBE, and what is kept to write it again.

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
A blocked writer goes on at a quarter of the ring, or when all it has left fits, and not at each
byte the peer takes (the silly window of 4.5.1, seen from the other side); the peer reports any
consumption until then, so this cannot stall.

What is kept
------------
Whatever is written is kept, in order, until it is known to be in the peer's RMBE: the CDC message
that announces it is complete, or the peer has taken it (RFC 7609, 4.6.2). Three counts of bytes
since the connection began::

    taken, delivered <= announced <= produced

What the application passed as bytes is kept as it is; other buffers are copied when they are
small. Large ones are only borrowed, since a copy would cost more than waiting: `borrowed` is then
not 0, and the caller waits until it is, or calls `keep_copies` before it lets the buffer go.

Urgent data (4.7.5, 4.7.6)
--------------------------
The last byte of what `send_urgent` is given is urgent. The *goal* is the count of bytes behind
it: while less is produced every CDC message carries P, so that a peer whose window is closed
learns of it at once. The message that tells the goal carries P and U, the next ones neither.
From then on nothing is written until the peer's consumer cursor has reached it: the *end* that
holds the writer.

P is not said while the writer is held: some peers forget a byte that nobody has fetched yet when
a message without new data announces another.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.wire.cdc import WRITER_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_smc.datapath.messenger import Channel, Messenger

__all__ = ["Sender"]


class Sender:
    """The sending half of a connection.

    Attributes:
      address: where the peer's ring starts.
      sendable: the state of the connection lets data be sent.
      taken: the peer's consumer cursor; taken_wrap, taken_offset: as it came.
      delivered: bytes known to have reached the peer's RMBE.
      borrowed: bytes of the caller's own, changeable memory that a replay would read.
      flush_when_delivered: post what was put off as soon as all told of before has arrived.
      send_limit: at most this many bytes are unacknowledged at a time; None: as many as fit.
    """

    __slots__ = (
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
        self._copy_limit = copy_limit
        self._corked = False
        # Sequence number of the CDC message that announces it, count behind its last byte, bytes.
        self._record: deque[tuple[int, int, memoryview]] = deque()
        self._resume_window = 1
        self._wanted = 0  # bytes the blocked writer has left
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
        """What the peer's element is like: its size in bytes, and where its ring starts in it."""
        messenger = self._messenger
        messenger.peer_token = alert_token
        messenger.peer_first = self.taken_offset = first
        usable = messenger.peer_usable = element_size - first
        self._chunk = usable if self._chunk < 0 else max(1, usable // 4)
        self._resume_window = max(1, usable // 4)

    # --- what the application sees -----------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether `send` would post at least one byte now."""
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
        """Bytes the peer's ring holds."""
        return self._messenger.peer_usable

    @property
    def window(self) -> int:
        """Bytes the peer's ring has room for, as far as we know."""
        return self._messenger.peer_usable - self._messenger.produced + self.taken

    @property
    def bytes_sent(self) -> int:
        """Bytes posted so far."""
        return self._messenger.produced

    @property
    def unacknowledged(self) -> int:
        """Bytes posted and not yet known to have reached the peer's RMBE."""
        return self._messenger.produced - self.delivered

    @property
    def announced_is_delivered(self) -> bool:
        """Whether all that the peer was told of has arrived there."""
        return self.delivered == self._messenger.announced

    def send(self, data: bytes | memoryview) -> int:
        """Post as much of ``data`` as window and link take; see `Connection.send`."""
        messenger = self._messenger
        if messenger.urgent_end:
            return 0  # not before the peer has taken the urgent byte (4.7.5, step 3)
        total = len(data)
        window = messenger.peer_usable - messenger.produced + self.taken
        channel = messenger.channel
        if channel is not None and 0 < total <= window and total <= self._chunk:
            # One piece, as mostly: the same as below in fewer steps.
            if messenger.immediate_sends_left or messenger.flush_later is None:
                if self._send_at_once(channel, data, total, False):
                    self._wanted = 0
                    if messenger.immediate_sends_left:
                        messenger.immediate_sends_left -= 1
                    return total
            elif (
                messenger.produced + total - messenger.announced < self._chunk
                and messenger.holder is None
                and channel.capacity() >= total
            ):
                self._post_piece(channel, memoryview(data), total, False)
                self._wanted = 0
                return total
        return self._send_pieces(memoryview(data), window)

    def _send_pieces(self, data: memoryview, window: int) -> int:
        """As `send`, piece by piece; the window has room for so many bytes."""
        messenger = self._messenger
        total = left = len(data)
        if window < left and (not window or (messenger.blocked and window < self._resume_window)):
            self._stall(left)
            return 0
        channel = messenger.channel
        assert channel is not None
        later = messenger.flush_later
        chunk = self._chunk
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
                or messenger.produced - messenger.announced + take >= chunk
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
        if messenger.immediate_sends_left:
            messenger.immediate_sends_left -= 1
        return total - left

    def send_limited(self, data: memoryview) -> int:
        """The same, where `send_limit` is set: no more than that is unacknowledged."""
        sent = 0
        while sent < len(data):
            piece = self._within_limit(data[sent:])
            posted = self.send(piece)
            sent += posted
            if not posted or posted < len(piece) or self.unacknowledged:
                break  # the next delivery, or a wider window, wakes the writer
        return sent

    def _within_limit(self, data: memoryview) -> memoryview:
        limit = self.send_limit
        assert limit is not None
        if self.unacknowledged >= limit and self._messenger.flush_pending:
            self._messenger.flush()  # nothing else would make it less before the message is due
        allowed = max(0, limit - self.unacknowledged)
        return data if allowed >= len(data) else data[:allowed]

    def send_urgent(self, data: memoryview) -> int:
        """The same, and the last byte is urgent; see `Connection.send_urgent`."""
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
        """What is left of an urgent send will not be sent; does nothing when nothing is."""
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
        """From now on put CDC messages of sends smaller than a chunk off, or no longer.

        What was put off so far is sent now.

        Args:
          flush_later: as for the connection.
          when_delivered: flush also as soon as everything told of before has arrived.
          corked: that may be long: a piece smaller than a chunk is always copied, so that its
            sender need not wait.
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
        """Copy what is `borrowed`: the caller takes its buffer back (a cancelled send)."""
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
        """Write a piece and tell of it where that can be done at once (`Messenger.post_at_once`).

        ``blocked``: it fills the window, and more waits. False: nothing has happened.
        """
        messenger = self._messenger
        if messenger.urgent_goal or messenger.waiting:
            return False
        before = messenger.produced
        start = before % messenger.peer_usable
        if start + length > messenger.peer_usable:
            return False  # the ring wraps: two writes, which `write` knows
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
            self._record.append((messenger.sequence, produced, kept))  # as if posted
        messenger.blocked = blocked
        self.writes += 1
        return True

    def _post_piece(self, channel: Channel, data: memoryview, length: int, blocked: bool) -> None:
        """Write a piece for which there is room, and tell of it now or later.

        ``blocked``: it fills the window, and more waits.
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
        """One RDMA write where byte number ``count`` belongs, two where the ring wraps (4.7.4)."""
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
        """The window is closed, or too small for a writer that was told blocked."""
        self.window_stalls += 1
        self._wanted = wanted
        if not self._messenger.blocked:
            self._messenger.blocked = True
            self._messenger.request_cdc()

    def _announce_write(self, channel: Channel) -> None:
        """Post the CDC message of a write, or let it wait for more.

        It does not wait with a chunk the peer could be reading. And not when the link is full:
        writes are unsignaled, so with every message put off no completion would ever make room
        again. Nor with urgent data, or when a writer is blocked.
        """
        messenger = self._messenger
        later = messenger.flush_later
        if (
            later is None
            or messenger.blocked
            or messenger.produced - messenger.announced >= self._chunk
            or messenger.urgent_goal
            or channel.capacity() <= 0
        ):
            messenger.post(channel)
        elif messenger.cdc_requested:
            messenger.coalesced += 1
        else:
            messenger.defer(later)

    def replay(self, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        """What would have to be written again after a link failed, from count ``start`` on.

        Nothing that the peer has taken: where those bytes lay newer ones may lie now, which it
        was told of and may be reading.

        Returns:
          (count of its first byte, bytes), in order.
        """
        start = max(start, self.taken)
        for _, end, data in self._record:
            first = end - len(data)
            if end > start:
                yield max(first, start), data[max(0, start - first) :]

    # --- what comes back ---------------------------------------------------------------------

    def complete(self, sequence: int) -> bool:
        """A CDC message, and every write before it, has reached the peer.

        Returns:
          Whether nothing is `borrowed` any more.
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
        """Follow the peer's consumer cursor; the caller knows that it has moved.

        What it has taken has arrived, whether or not its completion was seen: `delivered` may
        change.

        Returns:
          Whether a writer that waits may go on.

        Raises:
          ProtocolError: it goes back, or beyond what the peer was told of.
        """
        messenger = self._messenger
        if messenger.channel is None:
            # A message that outran the Confirm: nothing was produced, either layout is fine.
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
        """Nothing posted will be replayed, nothing more is sent."""
        self._record.clear()
        self.delivered = self._messenger.produced
        self.borrowed = 0
