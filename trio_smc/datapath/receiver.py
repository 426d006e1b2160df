"""Receiving: what lies in our RMBE, and when the peer is sent a window update (RFC 7609, 4.5.1).

Theory of operation
-------------------
Three counts of bytes since the connection began, in this order::

    announced <= consumed <= received <= announced + usable

``received`` follows the peer's producer cursor, ``consumed`` what the application has taken,
``announced`` the consumer cursor of the last CDC message posted. The peer may write up to
``announced + usable`` and not a byte further; a producer cursor beyond that is a lie and ends the
connection.

A CDC message for the consumer cursor alone is sent by the rules of RFC 7609, 4.5.1 only:

- the peer's window, as it knows it, is under half of the ring and the update widens it by at
  least 10 %; or
- the peer says that its writer is blocked (B) and anything was consumed, before that or since: at
  once when that is 10 % of the ring, and less than that at the latest when the reader waits for
  more or the scheduler sleeps, where there is one to ask (`update_later`); or
- the peer requests updates (R) and anything was consumed; a request that finds the cursor
  untold is answered at once, since "for a while" cannot be told without a clock; or
- the peer has urgent data (P, U) under way and anything was consumed: it writes nothing more
  until that data is taken (4.7.5).

`Receiver._consume` decides it for what the application takes, `Receiver.flags_untrusted` for what
the peer says. Every other CDC message carries the cursor for free.

The peer can change the ring's bytes at any time: they are copied out once and never looked at
again in place.

A peer that changes links writes again what may not have arrived (4.6.2). Linux's producer cursor
goes back for that to what it knows to have arrived, and a CDC message that it sends for another
reason meanwhile says so. By its window that is at most a ring behind ``received``, and no news.

Urgent data (4.7.5, 4.7.6)
--------------------------
P in a CDC message says that urgent data is on its way, U that it is there: the byte before the
message's producer cursor. The *mark* is the count of bytes behind it. Until our consumer cursor
has reached the mark the peer may write nothing, so at most one mark lies ahead, and nothing lies
behind it.

The byte is copied when the mark is learned, wherever in the ring it lies. Unless it is to stay
in the stream (``urgent_inline``) it is *hidden*: behind all else that is unread, and skipped as
soon as that was taken, at once when there is nothing. Reaching the mark is always told to the
peer (4.7.5, step 3). A second urgent byte takes the place of one that nobody asked for, as TCP's
does.

Peers keep P and U set for different times: for one message, or until the mark was reached. So U
that tells the mark already known tells nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.wire.cdc import (
    UPDATE_REQUESTED,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Receiver", "Updates", "failure"]

_OVERWRITTEN = "the eye catcher of the RMBE was overwritten"  # 4.4.1
_URGENT = URGENT_PENDING | URGENT_PRESENT
_ANNOUNCE_EACH = UPDATE_REQUESTED | _URGENT


class Updates(Protocol):
    """The messenger, which itself imports `Receiver`."""

    def request_cdc(self) -> None:
        """Send a CDC message now, or as soon as there is room."""

    def update_soon(self) -> None:
        """Send a CDC message for the bytes consumed, unless another one soon does."""


class Receiver:
    """The receiving half of a connection.

    Attributes:
      messenger: sends the window updates; set by the connection.
      on_overwritten: aborts the connection, because the peer wrote where it must not (4.4.1).
      error: why the connection failed; None while it has not.
      received, consumed, announced: see the top of this module.
      received_wrap, received_offset: the peer's producer cursor, as it came.
      usable: bytes of the ring.
      first: offset of the ring in the element.
      done: the peer has said that it sends nothing more.
      purged: what it had sent was dropped.
      open: the application may see what has come.
      replayed: the peer has changed links: its cursor may have gone back.
      writer_waits: the peer's writer is blocked (B).
      urgent_mark: the count behind the last urgent byte.
      urgent_inline: leave urgent bytes that arrive from now on in the stream.
      flags_pending: the last CDC message had flags, so the next one may clear them.
      finished: the application has closed: it takes nothing more.
    """

    __slots__ = (
        "_cursor_replayed",
        "_eye_catcher",
        "_hidden",
        "_least_update",
        "_ring",
        "_ring_start",
        "_rmbe",
        "_announce_each",
        "_urgent_byte",
        "_urgent_flags",
        "consumed",
        "done",
        "error",
        "finished",
        "first",
        "messenger",
        "on_overwritten",
        "open",
        "purged",
        "received",
        "received_offset",
        "received_wrap",
        "replayed",
        "announced",
        "urgent_inline",
        "urgent_mark",
        "usable",
        "flags_pending",
        "writer_waits",
    )

    messenger: Updates

    def __init__(self, rmbe: Rmbe, on_overwritten: Callable[[ProtocolError], None]) -> None:
        self.on_overwritten: Callable[[ProtocolError], None] = on_overwritten
        self.error: OSError | None = None
        self._rmbe = rmbe
        self._ring_start = 0  # the count at which the ring began
        self.received: int = 0
        self.received_wrap: int = 0
        self.lay_out()
        self.consumed: int = 0
        self.announced: int = 0
        self.done: bool = False
        self.purged: bool = False
        self.finished: bool = False
        self.open: bool = False
        self.replayed: bool = False
        self._cursor_replayed = False  # so is the cursor of the message whose flags come next
        self.flags_pending: bool = False
        self._announce_each = False  # the peer waits for each cursor update: R, P or U
        self.writer_waits: bool = False
        self._hidden = 0  # 1: an urgent byte is the last one received, and is to be skipped
        self.urgent_mark: int = 0
        self.urgent_inline: bool = False
        self._urgent_flags = 0  # P and U of the last CDC message
        self._urgent_byte: int | None = None

    def lay_out(self) -> None:
        """Take the ring as the element has it: at first contact that comes late (A.3.1)."""
        rmbe = self._rmbe
        self.first: int = rmbe.first
        self.received_offset: int = rmbe.first
        self._eye_catcher = bool(rmbe.first)
        self._ring = rmbe.data
        self.usable: int = rmbe.usable
        self._least_update = max(1, -(-rmbe.usable // 10))

    # --- what the application sees -----------------------------------------------------------

    @property
    def readable(self) -> int:
        """Bytes that `receive` can return now; 0 before the connection is established."""
        if not self.open:
            return 0
        return self.received - self.consumed - self._hidden

    @property
    def at_eof(self) -> bool:
        """The peer is done writing and everything was read: `receive` returns b""."""
        return self.done and self.received == self.consumed and not self.purged and self.open

    def is_blank(self) -> bool:
        """Whether there is neither a byte nor an end nor an error, as far as anybody has heard."""
        return self.received == self.consumed and not self.done and self.error is None

    @property
    def bytes_received(self) -> int:
        """Bytes that arrived in the ring so far."""
        return self.received

    def receive(self, max_bytes: int) -> bytes:
        """Take at most ``max_bytes`` bytes; never waits.

        b"" when nothing is readable: look at `at_eof`. Data that arrived whole before the peer
        ended its side stays readable, whatever happened since.

        Raises:
          ValueError: ``max_bytes`` is not positive.
          OSError: the connection has failed (ECONNRESET by the peer, ECONNABORTED by us).
        """
        consumed = self.consumed
        length = self.received - consumed - self._hidden
        if not length and max_bytes > 0 and self.error is None and not self._eye_catcher:
            return b""  # as `_available` would come to
        if length > max_bytes:
            length = max_bytes
        if length <= 0 or self._eye_catcher or not self.open:
            length = self._available(max_bytes)
            if not length:
                return b""
        start = (consumed - self._ring_start) % self.usable
        end = start + length
        data = self._ring[start:end].tobytes() if end <= self.usable else self._copy(length)
        if (
            consumed + length - self.announced < self._least_update
            and not self._announce_each
            and not self.writer_waits
        ):
            self.consumed = consumed + length  # as `_consume` would come to
        else:
            self._consume(length)
        return data

    def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Like `receive`, into ``buffer``, as many bytes as there are or as fit.

        Raises:
          ValueError: the buffer is empty.
          OSError: the connection has failed.
        """
        view = memoryview(buffer).cast("B")
        length = self._available(len(view))
        if not length:
            return 0
        start = (self.consumed - self._ring_start) % self.usable
        head = min(length, self.usable - start)
        view[:head] = self._ring[start : start + head]
        view[head:length] = self._ring[: length - head]
        self._consume(length)
        return length

    def peek(self, max_bytes: int) -> bytes:
        """What `receive` would return, without taking it; same errors."""
        length = self._available(max_bytes)
        return self._copy(length) if length else b""

    @property
    def urgent(self) -> str:
        """ "present": there is a byte for `receive_urgent` or, inline, one still unread in the
        stream. "pending": the peer has one that it could not write yet."""
        if self._urgent_byte is not None:
            return "present"
        if self.urgent_inline and self.urgent_mark > self.consumed:
            return "present"
        if self._urgent_flags == URGENT_PENDING and not self.urgent_over:
            return "pending"
        return "none"

    @property
    def urgent_over(self) -> bool:
        """True if no urgent byte can come for the application: the peer is done, the connection
        has failed, or the application has closed it."""
        return self.done or self.error is not None or self.finished

    def receive_urgent(self) -> int | None:
        """Take the urgent byte; None when there is none, or when it stays in the stream.

        Raises:
          OSError: the connection has failed.
        """
        byte = self._urgent_byte
        if byte is None and self.error is not None and not (self.done and not self.purged):
            raise failure(self.error)
        self._urgent_byte = None
        return byte

    def _available(self, max_bytes: int) -> int:
        """How many bytes the application gets now."""
        if max_bytes <= 0:
            raise ValueError("a positive number of bytes is wanted")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            self.on_overwritten(ProtocolError(_OVERWRITTEN))
        length = self.received - self.consumed - self._hidden
        if not length or not self.open:
            if self.error is not None and not (self.done and not self.purged):
                raise failure(self.error)
            return 0
        if length > max_bytes:
            return max_bytes
        return length

    def _copy(self, length: int) -> bytes:
        start = (self.consumed - self._ring_start) % self.usable
        end = start + length
        if end <= self.usable:
            return self._ring[start:end].tobytes()
        return b"".join((self._ring[start:], self._ring[: end - self.usable]))

    def _consume(self, length: int) -> None:
        """Count ``length`` bytes as taken and tell the peer if it has to know (4.5.1)."""
        consumed = self.consumed = self.consumed + length
        announced = self.announced
        if consumed - announced >= self._least_update:
            if not (
                self.writer_waits
                or self._announce_each
                or 2 * (self.usable - self.received + announced) < self.usable
            ):
                return
        elif not self._announce_each:
            if self.writer_waits:
                self.messenger.update_soon()
            return
        if self._hidden and consumed + 1 == self.received:
            self._skip_hidden()
        self.messenger.request_cdc()

    def _skip_hidden(self) -> None:
        """The urgent byte is the next one: it was remembered, nobody reads it here."""
        self._hidden = 0
        self.consumed += 1

    # --- what the peer says ------------------------------------------------------------------

    def producer_untrusted(self, wrap: int, offset: int) -> bool:
        """Follow the peer's producer cursor; the caller knows that it is not what it was.

        Returns:
          Whether it has moved on; else it is from before a failover.

        Raises:
          ProtocolError: it left the window, or moved after the peer said it was done.
        """
        usable = self.usable
        count = self.received + offset - self.received_offset
        if (
            wrap != self.received_wrap
            or offset >= usable
            or not self.received < count <= self.announced + usable
        ):
            received = self.received
            count = advance_untrusted(
                max(0, received - usable) if self.replayed else received,
                wrap,
                offset,
                usable=usable,
                first=self.first,
                limit=self.announced + usable,
            )
            if count < received:
                self._cursor_replayed = self.flags_pending = True
                return False
        if self.done and count != self.received:
            raise ProtocolError("data after the end of the data")
        if self.urgent_mark > self.announced:
            raise ProtocolError("data behind urgent data that was not acknowledged")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            raise ProtocolError(_OVERWRITTEN)
        self.received = count
        self.received_wrap = wrap
        self.received_offset = offset
        return True

    def flags_untrusted(self, flags: int, arrived: bool) -> bool:
        """Apply producer flags, where they or those of the message before say anything.

        Args:
          flags: of a CDC message whose cursors were applied before.
          arrived: whether the producer cursor has moved.

        Returns:
          Whether `urgent` may have changed.

        Raises:
          ProtocolError: it calls urgent what cannot be.
        """
        if self._cursor_replayed:
            self._cursor_replayed = False
            flags &= ~URGENT_PRESENT  # that byte is no news either
        urgent = bool((flags | self._urgent_flags) & _URGENT)
        if urgent:
            self._urgent_untrusted(flags & _URGENT, arrived)
        self._announce_each = bool(flags & _ANNOUNCE_EACH) or self.urgent_mark > self.consumed
        self.writer_waits = bool(flags & WRITER_BLOCKED)
        self.flags_pending = self._announce_each or self.writer_waits or bool(self._urgent_flags)
        if self.consumed != self.announced:
            # The reader may take nothing more for long.
            if flags & UPDATE_REQUESTED or (
                self.writer_waits and self.consumed - self.announced >= self._least_update
            ):
                self.messenger.request_cdc()
            elif self.writer_waits:
                self.messenger.update_soon()
        return urgent

    def _urgent_untrusted(self, flags: int, arrived: bool) -> None:
        """Apply P and U of a CDC message whose cursors were applied before.

        Args:
          flags: P and U; the message before may have had them if this one has not.
          arrived: whether the producer cursor has moved.

        Raises:
          ProtocolError: it calls urgent what nobody has sent, or what was read before.
        """
        self._urgent_flags = flags
        mark = self.received
        if flags & URGENT_PRESENT and (mark != self.urgent_mark or not mark):
            if not arrived and mark <= self.consumed:
                raise ProtocolError("urgent data where no data is")
            self.urgent_mark = mark
            # Behind the application's close it is data without a reader, as the rest.
            inline = self.urgent_inline or self.finished
            self._urgent_byte = None if inline else self._byte_before(mark)
            if not inline and mark > self.consumed:
                self._hidden = 1
                if self.consumed + 1 == mark:
                    self._skip_hidden()
                    self.messenger.request_cdc()

    def _byte_before(self, count: int) -> int:
        return self._ring[(count - 1 - self._ring_start) % self.usable]

    # --- endings -----------------------------------------------------------------------------

    def drop_unread(self) -> None:
        """Nobody will read what is there."""
        self.consumed = self.received
        self._hidden = 0
        self._urgent_byte = None

    def leave_ring(self) -> None:
        """The RMBE goes back to its pool: what the application may still read is copied, so
        that a peer who closes and goes at once loses nothing."""
        unread = self.received - self.consumed
        self._ring = memoryview(self._copy(unread) if unread else b"")
        self._ring_start = self.consumed
        self.usable = max(1, unread)
        self._eye_catcher = False


def failure(error: OSError) -> OSError:
    """A copy of a connection's error, to raise: tracebacks do not pile up on the one it keeps."""
    copy = OSError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
