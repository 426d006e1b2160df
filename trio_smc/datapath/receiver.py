"""Receiving: the bytes in our RMBE, and the window updates to the peer (RFC 7609, 4.5.1).

Theory of operation
-------------------
Three counts of bytes since the connection began, in this order::

    announced <= consumed <= received <= announced + usable

``received`` follows the peer's producer cursor. ``consumed`` counts the bytes that the application
has taken. ``announced`` is the consumer cursor of the last CDC message posted. The peer may write
up to ``announced + usable``; a producer cursor beyond that is a protocol error.

Every CDC message carries the consumer cursor. A message for that cursor alone, a window update, is
sent in these cases only (RFC 7609, 4.5.1):

- the window that the peer knows is smaller than half of the ring, and the update adds at least
  10 % of the ring; or
- the peer's writer is blocked (B) and anything was consumed. If that is 10 % of the ring, the
  update is sent at once. Otherwise it is sent at the latest when the reader waits for more data,
  or when the scheduler is about to sleep (``update_later``); or
- the peer requests updates (R) and anything was consumed. An update that is due when the request
  arrives is sent at once, because "for a while" cannot be measured without a clock; or
- the peer has urgent data (P, U) under way and anything was consumed: the peer writes nothing more
  until that data is consumed (4.7.5).

`Receiver._consume` decides this when the application takes data, `Receiver.flags_untrusted` when a
CDC message arrives.

The peer can change the bytes of the ring at any time, so they are copied out once and never read
again in place. Only a *loan* gives the application a view of the ring itself (`Receiver.lend`). The
bytes count as consumed when the loan is over, so the window keeps the peer from writing there. If
the connection is CLOSED before that, the element goes back to its pool after the loan.

A loan is over if no view of it is left. A view of a view shares its buffer, and Python does not
count such views separately. So the application gets a view of a `PickleBuffer`, which is a buffer
of its own: `piece.release` then fails as long as any view, slice or array of it exists.

A peer that changes links writes data again that may not have arrived (4.6.2). Linux then moves its
producer cursor back to the data that has certainly arrived, and CDC messages sent meanwhile contain
that old cursor. It is at most one ring behind ``received``, because of the window, and is ignored.

Urgent data (4.7.5, 4.7.6)
--------------------------
P in a CDC message announces that urgent data will follow. U says that the urgent byte has arrived:
it is the byte before the message's producer cursor. The *mark* is the count of bytes up to and
including it. The peer may write nothing until our consumer cursor has reached the mark, so there is
at most one mark ahead, and no data after it.

The urgent byte is copied when its mark is received. Unless it stays in the stream
(``urgent_inline``), the byte in the ring is *hidden*: it is the last unread byte, and is skipped as
soon as all bytes before it are consumed. The peer always gets an update when the mark is reached
(4.7.5, step 3). A second urgent byte replaces one that the application has not read, as in TCP.

If the byte stays in the stream, a read that begins before it ends before it, too: as in TCP, a
program finds the mark between two reads.

Some peers set P and U in one message, others until the mark is reached. So U with a known mark
changes nothing.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted
from trio_smc.rnic.words import Words
from trio_smc.wire.cdc import (
    UPDATE_REQUESTED,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Receiver", "Updates"]

_NOWHERE: Words = memoryview(bytearray(8)).cast("Q")
_OVERWRITTEN = "the eye catcher of the RMBE was overwritten"  # 4.4.1
_URGENT = URGENT_PENDING | URGENT_PRESENT
_ANNOUNCE_EACH = UPDATE_REQUESTED | _URGENT


class Updates(Protocol):
    """The messenger, as seen by the receiver. (Its module imports this one.)"""

    def request_cdc(self) -> None:
        """Send a CDC message now, or as soon as there is room."""

    def update_soon(self) -> None:
        """Send a CDC message for the bytes consumed, unless another one soon does."""


class _Loan:
    """``piece`` of the ring, the application's ``view`` of it, ``consumed`` when it began."""

    __slots__ = ("consumed", "piece", "view")

    def __init__(self, piece: memoryview, view: memoryview, consumed: int) -> None:
        self.piece = piece
        self.view = view
        self.consumed = consumed


class Receiver:
    """The receiving half of a connection.

    Attributes:
      messenger: sends the window updates; set by the connection.
      on_overwritten: aborts the connection, because the peer overwrote the eye catcher (4.4.1).
      error: the reason of a failed connection, else None.
      error_pending: True until a call of the application has reported ``error``.
      received, consumed, announced: see the top of this module.
      received_wrap, received_offset: the peer's producer cursor, as received.
      usable: bytes of the ring.
      first: offset of the ring in the element.
      peer_done: True after D or C: the peer sends nothing more.
      purged: True if unread data was dropped: every further read fails.
      open: True if the application may read.
      replayed: True after the peer has changed links: its cursor may go back.
      writer_waits: True while the peer's writer is blocked (B).
      urgent_mark: the count of bytes up to and including the last urgent byte.
      urgent_inline: True if urgent bytes that arrive from now on stay in the stream.
      flags_pending: True if the last CDC message had flags, which the next one may clear.
      application_closed: True after the application has closed: it reads nothing more.
      on_returned: called when the loan is over, because the connection was closed during the loan.
    """

    __slots__ = (
        "_cursor_replayed",
        "_eye_catcher",
        "_has_checks",
        "_hidden",
        "_inline_mark",
        "_least_update",
        "_loan",
        "_ring",
        "_ring_start",
        "_rmbe",
        "_shown",
        "_shown_at",
        "_announce_each",
        "_urgent_byte",
        "_urgent_flags",
        "consumed",
        "peer_done",
        "error",
        "error_pending",
        "application_closed",
        "first",
        "messenger",
        "on_overwritten",
        "on_returned",
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
        self.on_returned: Callable[[], None] | None = None
        self._loan: _Loan | None = None
        self.error: OSError | None = None
        self.error_pending: bool = False
        self._rmbe = rmbe
        self._ring_start = 0  # the count at which the ring began
        self.received: int = 0
        self.received_wrap: int = 0
        self._inline_mark = 0  # of an urgent byte in the stream, at which a read stops
        self.lay_out()
        self.consumed: int = 0
        self._shown: Words = _NOWHERE
        self._shown_at = 0
        self.announced: int = 0
        self.peer_done: bool = False
        self.purged: bool = False
        self.application_closed: bool = False
        self.open: bool = False
        self.replayed: bool = False
        self._cursor_replayed = False  # the current message has an old cursor; its flags come next
        self.flags_pending: bool = False
        self._announce_each = False  # the peer waits for every window update: R, P or U
        self.writer_waits: bool = False
        self._hidden = 0  # 1 if the last byte received is an urgent byte to be skipped
        self.urgent_mark: int = 0
        self.urgent_inline: bool = False
        self._urgent_flags = 0  # P and U of the last CDC message
        self._urgent_byte: int | None = None

    def lay_out(self) -> None:
        """Read the element's layout, which a first contact may change late (A.3.1)."""
        rmbe = self._rmbe
        self.first: int = rmbe.first
        self.received_offset: int = rmbe.first
        self._eye_catcher = bool(rmbe.first)
        self._has_checks = self._eye_catcher or bool(self._inline_mark)
        self._ring = rmbe.data
        self.usable: int = rmbe.usable
        self._least_update = max(1, -(-rmbe.usable // 10))

    # --- calls of the application ------------------------------------------------------------

    @property
    def readable(self) -> int:
        """Bytes that `receive` can return now; 0 before the connection is established."""
        if not self.open:
            return 0
        return self.received - self.consumed - self._hidden

    @property
    def at_eof(self) -> bool:
        """True if everything was read and nothing more comes: `receive` returns b"".

        The peer is done writing, or the connection has failed and a call has reported the error.
        """
        return (
            self.received == self.consumed
            and (self.peer_done or (self.error is not None and not self.error_pending))
            and not self.purged
            and self.open
        )

    def is_blank(self) -> bool:
        """True if no byte, end or error has arrived."""
        return self.received == self.consumed and not self.peer_done and self.error is None

    @property
    def bytes_received(self) -> int:
        """Bytes that arrived in the ring so far."""
        return self.received

    def receive(self, max_bytes: int) -> bytes:
        """Take at most ``max_bytes`` bytes without waiting.

        b"" means that nothing is readable; `at_eof` shows why. Data stays readable after the
        connection has failed.

        Raises:
          ValueError: ``max_bytes`` is not positive.
          OSError: the connection has failed, all data was read, the peer had not ended its side,
            and no other call has reported the error.
        """
        consumed = self.consumed
        length = self.received - consumed - self._hidden
        if not length and max_bytes > 0 and self.error is None and not self._has_checks:
            return b""  # inlined `_available`
        if length > max_bytes:
            length = max_bytes
        if length <= 0 or self._has_checks or not self.open:
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
            self.consumed = consumed = consumed + length  # inlined `_consume`
            try:
                self._shown[self._shown_at] = consumed
            except ValueError:
                self.show_taken(None)
        else:
            self._consume(length)
        return data

    def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Like `receive`, into ``buffer``; return the number of bytes.

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

    @property
    def is_lent(self) -> bool:
        """True between `lend` and `take_back`."""
        return self._loan is not None

    def lend(self, max_bytes: int) -> memoryview:
        """Like `receive`, but return a read-only view of the ring, which ends where the ring wraps.

        Call `take_back` afterwards, and nothing else that takes data before that.
        """
        length = self._available(max_bytes)
        if not length:
            return memoryview(b"")
        start = (self.consumed - self._ring_start) % self.usable
        piece = self._ring[start : min(start + length, self.usable)].toreadonly()
        view = memoryview(PickleBuffer(piece))
        self._loan = _Loan(piece, view, self.consumed)
        return view

    def take_back(self, count: int) -> bool:
        """End a loan, if there is one; its first ``count`` bytes are consumed.

        Returns:
          False if the application still has a view of it: then no byte is consumed.
        """
        loan, self._loan = self._loan, None
        if loan is None:
            return True
        returned = True
        try:
            loan.view.release()
            loan.piece.release()
        except BufferError:
            returned = False
        if returned and count and self.consumed == loan.consumed:  # otherwise it was dropped
            self._consume(count)
        on_returned, self.on_returned = self.on_returned, None
        if on_returned is not None:
            on_returned()
        return returned

    def peek(self, max_bytes: int) -> bytes:
        """Like `receive`, but the bytes stay unread."""
        length = self._available(max_bytes)
        return self._copy(length) if length else b""

    def measure(self, max_bytes: int) -> int:
        """Like `peek`, but return only the number of bytes."""
        return self._available(max_bytes)

    def discard(self, max_bytes: int) -> int:
        """Like `receive`, but drop the bytes and return their number."""
        length = self._available(max_bytes)
        if length:
            self._consume(length)
        return length

    @property
    def urgent(self) -> str:
        """The state of urgent data.

        "present": `receive_urgent` returns a byte, or, inline, the byte is unread in the stream.
        "pending": the peer has an urgent byte that it could not write yet. "none": neither.
        """
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
        return self.peer_done or self.error is not None or self.application_closed

    def receive_urgent(self) -> int | None:
        """Take the urgent byte; None if there is none, or if it stays in the stream.

        Raises:
          OSError: the connection has failed.
        """
        byte = self._urgent_byte
        if byte is None and self.error is not None and not (self.peer_done and not self.purged):
            raise _failure(self.error)
        self._urgent_byte = None
        return byte

    def peek_urgent(self) -> int | None:
        """Like `receive_urgent`, but the byte stays unread."""
        return self._urgent_byte

    def _available(self, max_bytes: int) -> int:
        """Return the number of bytes that a read may take now, at most ``max_bytes``."""
        if max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            self.on_overwritten(ProtocolError(_OVERWRITTEN))
        length = self.received - self.consumed - self._hidden
        if not length or not self.open:
            if self.error is not None and (self.purged or not self.peer_done):
                if self.purged:
                    raise _failure(self.error)
                if self.error_pending:
                    self.error_pending = False
                    raise _failure(self.error)
            return 0
        if self._inline_mark:
            before_mark = self._inline_mark - 1 - self.consumed
            if before_mark > 0:
                length = min(length, before_mark)
            elif before_mark < 0:
                self._inline_mark = 0
                self._has_checks = self._eye_catcher
        if length > max_bytes:
            return max_bytes
        return length

    def take_error(self) -> OSError | None:
        """Return the error that no call has reported yet, which is thereby reported; or None."""
        if not self.error_pending:
            return None
        self.error_pending = False
        assert self.error is not None
        return _failure(self.error)

    def _copy(self, length: int) -> bytes:
        start = (self.consumed - self._ring_start) % self.usable
        end = start + length
        if end <= self.usable:
            return self._ring[start:end].tobytes()
        return b"".join((self._ring[start:], self._ring[: end - self.usable]))

    def _consume(self, length: int) -> None:
        """Count ``length`` bytes as consumed, and send a window update if one is due (4.5.1)."""
        consumed = self.consumed = self.consumed + length
        self._show()
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
        """Skip the urgent byte, which is the next one and was copied.

        `_show` is not called: over TCP the byte stays in the receive buffer.
        """
        self._hidden = 0
        self.consumed += 1

    def show_taken(self, words: Words | None, index: int = 0) -> None:
        """Store ``consumed`` from now on where the peer finds it if this process is killed.

        Args:
          words: progress words of the peer's memory (`trio_smc.rnic.memory`); None: nowhere.
          index: the word for the bytes taken.
        """
        self._shown, self._shown_at = (_NOWHERE, 0) if words is None else (words, index)
        self._show()

    def _show(self) -> None:
        try:
            self._shown[self._shown_at] = self.consumed
        except ValueError:  # the link has ended, and with it the peer's memory here
            self.show_taken(None)

    # --- CDC messages of the peer ------------------------------------------------------------

    def producer_untrusted(self, wrap: int, offset: int) -> bool:
        """Follow the peer's producer cursor, which has changed.

        Returns:
          True if it has moved forward; False if it is older than a failover.

        Raises:
          ProtocolError: the cursor left the window, or moved after the peer was done.
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
        if self.peer_done and count != self.received:
            raise ProtocolError("the peer sent data after the end of its stream")
        if self.urgent_mark > self.announced:
            raise ProtocolError("data behind urgent data that was not acknowledged")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            self.purge()
            raise ProtocolError(_OVERWRITTEN)
        self.received = count
        self.received_wrap = wrap
        self.received_offset = offset
        return True

    def last_producer_untrusted(self, wrap: int, offset: int, flags: int) -> bool:
        """Follow the producer cursor beside A, if it is plausible.

        The RDMA writes before A have arrived, except those on links that the peer has left. With
        urgent flags it is ignored, because the last byte may not be part of the stream.

        Returns:
          True if the cursor has moved forward.
        """
        if self.replayed or flags & _URGENT:
            return False
        if offset == self.received_offset and wrap == self.received_wrap:
            return False
        try:
            return self.producer_untrusted(wrap, offset)
        except ProtocolError:
            return False

    def progress_untrusted(self, count: int) -> None:
        """Receive what the peer has written, but not announced before its process ended.

        Args:
          count: bytes that the peer has written since the connection began.

        Raises:
          ProtocolError: the peer claims more than the window.
        """
        if count <= self.received:
            return
        if count > self.announced + self.usable:
            raise ProtocolError("the peer claims to have written beyond the window")
        if self.peer_done or self.urgent_mark > self.announced:
            raise ProtocolError(
                "the peer wrote after its end, or behind unacknowledged urgent data"
            )
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            raise ProtocolError(_OVERWRITTEN)
        self.received = count

    def flags_untrusted(self, flags: int, arrived: bool) -> bool:
        """Apply the producer flags of a CDC message, after its cursors.

        To be called if the message has flags, or if `flags_pending` is true.

        Args:
          flags: the producer flags.
          arrived: True if the producer cursor has moved.

        Returns:
          True if `urgent` may have changed.

        Raises:
          ProtocolError: U marks a byte that was not sent, or was already read.
        """
        if self._cursor_replayed:
            self._cursor_replayed = False
            flags &= ~URGENT_PRESENT  # the bit belongs to the old cursor
        urgent = bool((flags | self._urgent_flags) & _URGENT)
        if urgent:
            self._urgent_untrusted(flags & _URGENT, arrived)
        self._announce_each = bool(flags & _ANNOUNCE_EACH) or self.urgent_mark > self.consumed
        self.writer_waits = bool(flags & WRITER_BLOCKED)
        self.flags_pending = self._announce_each or self.writer_waits or bool(self._urgent_flags)
        if self.consumed != self.announced:
            # Do not wait for the next read, which may come much later.
            if flags & UPDATE_REQUESTED or (
                self.writer_waits and self.consumed - self.announced >= self._least_update
            ):
                self.messenger.request_cdc()
            elif self.writer_waits:
                self.messenger.update_soon()
        return urgent

    def _urgent_untrusted(self, flags: int, arrived: bool) -> None:
        """Apply P and U of a CDC message, after its cursors.

        Args:
          flags: P and U, or 0 if only the last message had them.
          arrived: True if the producer cursor has moved.

        Raises:
          ProtocolError: U marks a byte that was not sent, or was already read.
        """
        self._urgent_flags = flags
        mark = self.received
        if flags & URGENT_PRESENT and (mark != self.urgent_mark or not mark):
            if not arrived and mark <= self.consumed:
                raise ProtocolError("the peer marked an urgent byte, but no byte arrived")
            self.urgent_mark = mark
            # After the application has closed, it is data without a reader, like the rest.
            inline = self.urgent_inline or self.application_closed
            self._urgent_byte = None if inline else self._byte_before(mark)
            if inline and mark > self.consumed:
                self._inline_mark = mark
                self._has_checks = True
            if not inline and mark > self.consumed:
                self._hidden = 1
                if self.consumed + 1 == mark:
                    self._skip_hidden()
                    self.messenger.request_cdc()

    def _byte_before(self, count: int) -> int:
        return self._ring[(count - 1 - self._ring_start) % self.usable]

    # --- endings -----------------------------------------------------------------------------

    def drop_unread(self) -> None:
        """Drop all unread data."""
        self.consumed = self.received
        self._hidden = 0
        self._urgent_byte = None

    def drop_behind(self, count: int) -> bool:
        """Drop all data behind the first ``count`` bytes of the connection; True if there was any.

        Nothing more may be received afterwards.
        """
        if self.received <= count:
            return False
        self.received = count
        return True

    def purge(self) -> None:
        """Drop all unread data; every further read fails, also if the peer has ended its side."""
        self.purged = True
        self.drop_unread()

    def leave_ring(self) -> None:
        """Copy the unread data, because the RMBE goes back to its pool.

        So no data is lost if a peer closes and its process ends at once.
        """
        if self._eye_catcher and self.error is not None and not self._rmbe.check_eye_catcher():
            self.purge()
        unread = self.received - self.consumed
        self._ring = memoryview(self._copy(unread) if unread else b"")
        self._ring_start = self.consumed
        self.usable = max(1, unread)
        self._eye_catcher = False
        self._has_checks = bool(self._inline_mark)


def _failure(error: OSError) -> OSError:
    """Return a copy of a connection's error to raise: the original collects no tracebacks."""
    copy = OSError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
