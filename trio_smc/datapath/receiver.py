"""The receiving half of a connection: the own RMBE, its cursors, when the peer is told.

Theory of operation
-------------------
Three counts of bytes since the connection began, in this order::

    told <= consumed <= received <= told + usable

``received`` follows the peer's producer cursor, ``consumed`` what the application has taken,
``told`` the consumer cursor of the last CDC message posted. The peer may write up to
``told + usable`` and not a byte further; a producer cursor beyond that is a lie and ends the
connection.

A CDC message for the consumer cursor alone is sent by the rules of RFC 7609, 4.5.1 only:

- the peer's window, as it knows it, is under half of the ring and the update widens it by at
  least 10 %; or
- the peer says that its writer is blocked (B) and anything was consumed, before that or since: at
  once when that is 10 % of the ring, and less than that at the latest when the reader waits for
  more or the scheduler sleeps, where there is one to ask (`tell_later`); or
- the peer requests updates (R) and anything was consumed; a request that finds the cursor
  untold is answered at once, since "for a while" cannot be told without a clock; or
- the peer has urgent data (P, U) under way and anything was consumed: it writes nothing more
  until that data is taken (4.7.5; `trio_smc.datapath.urgent_receiver`).

Every other CDC message carries it for free.

The peer can change the ring's bytes at any time: they are copied out once and never looked at
again in place.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.cursor import advance_untrusted

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Receiver"]

_OVERWRITTEN = "the eye catcher of the RMBE was overwritten"  # 4.4.1


class Receiver:
    """Base of `Connection`: what it receives, and the cursor updates it owes for that."""

    __slots__ = (
        "_consumed",
        "_eye_catcher",
        "_hidden",
        "_least_update",
        "_open_to_application",
        "_own_first",
        "_peer_done",
        "_purged",
        "_received",
        "_received_offset",
        "_received_wrap",
        "_ring",
        "_ring_start",
        "_rmbe",
        "_tell_all",
        "_told",
        "_urgent_mark",
        "_usable",
        "_writer_waits",
        "error",
        "on_readable",
        "tell_later",
    )

    error: OSError | None
    """Why the connection failed; None while it has not."""
    on_readable: Callable[[], None] | None
    """Called once, and cleared, when a blocked reader might go on."""
    tell_later: Callable[[Callable[[], None]], None] | None
    """Calls what it is given before the scheduler sleeps, or soon; None: nothing is put off."""

    def __init__(self, rmbe: Rmbe) -> None:
        self._rmbe = rmbe
        self._own_first = rmbe.first  # offset of the ring in the element
        self._eye_catcher = bool(rmbe.first)
        self._ring = rmbe.data
        self._ring_start = 0  # the count at which the ring began
        self._usable = rmbe.usable
        self._least_update = max(1, -(-rmbe.usable // 10))
        self._received = 0
        self._received_wrap = 0
        self._received_offset = rmbe.first
        self._consumed = 0
        self._told = 0
        self._tell_all = False  # the peer waits for each cursor update: R, P or U
        self._writer_waits = False  # the peer's writer is blocked: B
        self._urgent_mark = 0  # the count behind the last urgent byte
        self._hidden = 0  # 1: an urgent byte is the last one received, and is to be skipped
        self._peer_done = False
        self._purged = False
        self._open_to_application = False
        self.error = None
        self.on_readable = None
        self.tell_later = None

    # --- what the application sees -----------------------------------------------------------

    @property
    def readable(self) -> int:
        """Bytes that `receive` can return now; 0 before the connection is established."""
        if not self._open_to_application:
            return 0
        return self._received - self._consumed - self._hidden

    @property
    def at_eof(self) -> bool:
        """The peer is done writing and everything was read: `receive` returns b""."""
        return (
            self._peer_done
            and self._received == self._consumed
            and not self._purged
            and self._open_to_application
        )

    @property
    def bytes_received(self) -> int:
        """Bytes that arrived in the ring so far."""
        return self._received

    def receive(self, max_bytes: int) -> bytes:
        """Take at most ``max_bytes`` bytes; never waits.

        b"" when nothing is readable: look at `at_eof`. Data that arrived whole before the peer
        ended its side stays readable, whatever happened since.

        Raises:
          ValueError: ``max_bytes`` is not positive.
          OSError: the connection has failed (ECONNRESET by the peer, ECONNABORTED by us).
        """
        consumed = self._consumed
        length = self._received - consumed - self._hidden
        if not length or max_bytes <= 0 or self._eye_catcher or not self._open_to_application:
            length = self._take(max_bytes)
            if not length:
                return b""
        elif length > max_bytes:
            length = max_bytes
        start = (consumed - self._ring_start) % self._usable
        end = start + length
        data = self._ring[start:end].tobytes() if end <= self._usable else self._copy(length)
        self._consume(length)
        return data

    def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Like `receive`, into ``buffer``, as many bytes as there are or as fit.

        Raises:
          ValueError: the buffer is empty.
          OSError: the connection has failed.
        """
        view = memoryview(buffer).cast("B")
        length = self._take(len(view))
        if not length:
            return 0
        start = (self._consumed - self._ring_start) % self._usable
        head = min(length, self._usable - start)
        view[:head] = self._ring[start : start + head]
        view[head:length] = self._ring[: length - head]
        self._consume(length)
        return length

    def peek(self, max_bytes: int) -> bytes:
        """What `receive` would return, without taking it; same errors."""
        length = self._take(max_bytes)
        return self._copy(length) if length else b""

    def _take(self, max_bytes: int) -> int:
        """How many bytes the application gets now."""
        if max_bytes <= 0:
            raise ValueError("a positive number of bytes is wanted")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            self._protocol_error(ProtocolError(_OVERWRITTEN))
        length = self._received - self._consumed - self._hidden
        if not length or not self._open_to_application:
            if self.error is not None and not (self._peer_done and not self._purged):
                raise self._failure(self.error)
            return 0
        if length > max_bytes:
            return max_bytes
        return length

    def _copy(self, length: int) -> bytes:
        start = (self._consumed - self._ring_start) % self._usable
        end = start + length
        if end <= self._usable:
            return self._ring[start:end].tobytes()
        return b"".join((self._ring[start:], self._ring[: end - self._usable]))

    def _consume(self, length: int) -> None:
        """Count ``length`` bytes as taken and tell the peer if it has to know (4.5.1)."""
        consumed = self._consumed = self._consumed + length
        told = self._told
        if consumed - told >= self._least_update:
            if not (
                self._writer_waits
                or self._tell_all
                or 2 * (self._usable - self._received + told) < self._usable
            ):
                return
        elif not self._tell_all:
            if self._writer_waits:
                self._tell_soon()
            return
        if self._hidden and consumed + 1 == self._received:
            self._skip_hidden()
        self._owe_cdc()

    def _skip_hidden(self) -> None:
        """The urgent byte is the next one: it was remembered, nobody reads it here."""
        self._hidden = 0
        self._consumed += 1

    # --- what the peer says ------------------------------------------------------------------

    def _producer_untrusted(self, wrap: int, offset: int) -> None:
        """Follow the peer's producer cursor; the caller knows that it has moved.

        Raises:
          ProtocolError: it left the window, or moved after the peer said it was done.
        """
        usable = self._usable
        count = self._received + offset - self._received_offset
        if (
            wrap != self._received_wrap
            or offset >= usable
            or not self._received < count <= self._told + usable
        ):
            count = advance_untrusted(
                self._received,
                wrap,
                offset,
                usable=usable,
                first=self._own_first,
                limit=self._told + usable,
            )
        if self._peer_done and count != self._received:
            raise ProtocolError("data after the end of the data")
        if self._urgent_mark > self._told:
            raise ProtocolError("data behind urgent data that was not acknowledged")
        if self._eye_catcher and not self._rmbe.check_eye_catcher():
            raise ProtocolError(_OVERWRITTEN)
        self._received = count
        self._received_wrap = wrap
        self._received_offset = offset

    # --- endings -----------------------------------------------------------------------------

    def _drop_unread(self) -> None:
        """Nobody will read what is there."""
        self._consumed = self._received
        self._hidden = 0

    def _leave_ring(self) -> None:
        """The RMBE goes back to its pool: what the application may still read is copied, so
        that a peer who closes and goes at once loses nothing."""
        unread = self._received - self._consumed
        self._ring = memoryview(self._copy(unread) if unread else b"")
        self._ring_start = self._consumed
        self._usable = max(1, unread)
        self._eye_catcher = False

    def _wake_reader(self) -> None:
        wake = self.on_readable
        if wake is not None:
            self.on_readable = None
            wake()

    def _fail(
        self, number: int, cause: BaseException | None = None, text: str | None = None
    ) -> None:
        """Make later calls of the application fail; the first error stays."""
        if self.error is None:
            self.error = OSError(number, text or os.strerror(number))
            self.error.__cause__ = cause

    @staticmethod
    def _failure(error: OSError) -> OSError:
        """A copy of the error to raise: tracebacks do not pile up on the one that is kept."""
        copy = OSError(*error.args)
        copy.__cause__ = error.__cause__
        return copy

    # --- supplied by the classes built on this one -------------------------------------------

    def _tell_soon(self) -> None:
        """Send a CDC message for what was consumed so far, if no other one does before long."""
        raise NotImplementedError

    def _owe_cdc(self) -> None:
        """Send a CDC message now, or as soon as there is room."""
        raise NotImplementedError

    def _protocol_error(self, exc: ProtocolError) -> None:
        """Abort the connection because of ``exc``."""
        raise NotImplementedError
