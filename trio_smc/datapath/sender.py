"""The sending half of a connection: window and RDMA writes; `delivery` is what comes back.

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
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from trio_smc.datapath.delivery import Delivery
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.wire.cdc import WRITER_BLOCKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.channel import Channel
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Sender"]


class Sender(Delivery):
    """Base of `UrgentSender`: what it sends."""

    __slots__ = (
        "_address",
        "_chunk",
        "_copy_limit",
        "_corked",
        "send_limit",
        "window_stalls",
        "writes",
    )

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
        self._address = 0  # where the peer's ring starts
        self._chunk = 0 if chunks else -1  # set by _set_peer
        self._copy_limit = copy_limit
        self._corked = False
        self.send_limit = None
        self.writes = 0
        self.window_stalls = 0

    def _set_peer(self, alert_token: int, element_size: int, first: int) -> None:
        self._peer_token = alert_token
        self._peer_first = self._taken_offset = first
        usable = self._peer_usable = element_size - first
        self._chunk = usable if self._chunk < 0 else max(1, usable // 4)
        self._resume = max(1, usable // 4)

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
            return self._send_limited(data, self.send_limit)
        return self._send_pieces(data)

    def _send_pieces(self, data: memoryview) -> int:
        total = left = len(data)
        window = self._peer_usable - self._produced + self._taken
        if window < left and (not window or (self._blocked and window < self._resume)):
            self._stall(left)
            return 0
        channel = self._channel
        assert channel is not None
        later = self._flush_later
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
                or self._first
                or blocked
                or self._produced - self._announced + take >= chunk
            ) and self._send_at_once(channel, piece, take, blocked):
                left -= take
                window -= take
                if not window:
                    break
                continue
            room = channel.capacity()
            if room <= 0:
                self._wait_for_room(channel)
                break
            if take > room:
                take = room
                piece = piece[:room]
            if type(piece.obj) is not bytes:
                piece = self._copy_or_borrow(piece)
            self._write(channel, piece, take, self._produced)
            produced = self._produced = self._produced + take
            self._record.append(((self._sequence + 1) & 0xFFFF, produced, piece))
            left -= take
            window -= take
            self._blocked = not window and left > 0
            self._tell_of_write(channel)
            if not window:
                break
        self._wanted = left
        self._first = False
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
        self._patient = corked or when_delivered
        self._first = False
        self.flush()

    def limit_unacknowledged(self, limit: int | None) -> None:
        """Have at most ``limit`` bytes unacknowledged at a time; None: as many as fit."""
        self.send_limit = limit
        self._wake_writer()

    def _send_limited(self, data: memoryview, limit: int) -> int:
        sent = 0
        while sent < len(data):
            piece = self._within_limit(data[sent:], limit)
            posted = self._send_pieces(piece)
            sent += posted
            if not posted or posted < len(piece) or self._produced != self._delivered:
                break  # the next delivery, or a wider window, wakes the writer
        return sent

    def _copy_or_borrow(self, data: memoryview) -> memoryview:
        if len(data) <= self._copy_limit or (self._corked and len(data) < self._chunk):
            return memoryview(bytes(data))
        self.borrowed += len(data)
        return data

    def _within_limit(self, data: memoryview, limit: int) -> memoryview:
        allowed = max(0, limit - self._produced + self._delivered)
        if not allowed and self._flush_pending:
            self.flush()  # nothing else would make it more before the message is due
            allowed = max(0, limit - self._produced + self._delivered)
        return data if allowed >= len(data) else data[:allowed]

    # --- posting -----------------------------------------------------------------------------

    def _send_at_once(self, channel: Channel, data: memoryview, length: int, blocked: bool) -> bool:
        """Write a piece and tell of it where that can be done at once (`Channel.try_post`).

        ``blocked``: it fills the window, and more waits. False: nothing has happened.
        """
        if self._urgent_goal or self._waiting:
            return False
        before = self._produced
        start = before % self._peer_usable
        if start + length > self._peer_usable:
            return False  # the ring wraps: two writes, which `_write` knows
        produced = before + length
        flags = WRITER_BLOCKED if blocked else 0
        try:
            if not self._try_cdc(channel, data, self._address + start, produced, flags):
                return False
            self._completed = self._sequence
            self._delivered = produced
            if self._record:
                self._record.clear()
                self.borrowed = 0
        except DeliveryUnknown:
            kept = data if type(data.obj) is bytes else memoryview(bytes(data))
            self._record.append((self._sequence, produced, kept))  # as if posted
        self._blocked = blocked
        self.writes += 1
        return True

    def _write(self, channel: Channel, data: memoryview, length: int, count: int) -> None:
        """One RDMA write where byte number ``count`` belongs, two where the ring wraps (4.7.4)."""
        start = count % self._peer_usable
        head = self._peer_usable - start
        if length <= head:
            channel.post_write(self, data, self._address + start, self._rkey)
            self.writes += 1
        else:
            channel.post_write(self, data[:head], self._address + start, self._rkey)
            channel.post_write(self, data[head:], self._address, self._rkey)
            self.writes += 2

    def _stall(self, wanted: int) -> None:
        """The window is closed, or too small for a writer that was told blocked."""
        self.window_stalls += 1
        self._wanted = wanted
        if not self._blocked:
            self._blocked = True
            self._owe_cdc()

    def _tell_of_write(self, channel: Channel) -> None:
        """Post the CDC message of a write, or let it wait for more.

        It does not wait with a chunk the peer could be reading. And not when the link is full:
        writes are unsignaled, so with every message put off no completion would ever make room
        again. Nor with urgent data, or when a writer is blocked.
        """
        later = self._flush_later
        if (
            later is None
            or self._blocked
            or self._produced - self._announced >= self._chunk
            or self._urgent_goal
            or channel.capacity() <= 0
        ):
            self._post_cdc(channel)
        elif self._owed:
            self.coalesced += 1
        else:
            self._defer_cdc(later)

    def _refuse_send(self) -> int:
        """Raise what `send` owes its caller in a connection that takes no data; 0 in one that
        does, only not before the peer has taken an urgent byte (4.7.5, step 3)."""
        if self._sendable:
            return 0
        if self.error is not None:
            raise self._failure(self.error)
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
