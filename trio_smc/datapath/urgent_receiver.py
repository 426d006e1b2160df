"""Urgent data that the peer sends (RFC 7609, 4.7.5, 4.7.6).

Theory of operation
-------------------
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

from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.receiver import Receiver
from trio_smc.wire.cdc import URGENT_PENDING, URGENT_PRESENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["UrgentReceiver"]


class UrgentReceiver(Receiver):
    """Base of `Messenger`: the peer's urgent data."""

    __slots__ = ("_urgent_byte", "_urgent_flags", "on_urgent", "urgent_inline")

    on_urgent: Callable[[], None] | None
    """Called once, and cleared, when `urgent` may have changed."""
    urgent_inline: bool
    """Leave urgent bytes that arrive from now on in the stream."""

    def __init__(self, rmbe: Rmbe) -> None:
        super().__init__(rmbe)
        self._urgent_flags = 0  # P and U of the last CDC message
        self._urgent_byte: int | None = None
        self.on_urgent = None
        self.urgent_inline = False

    @property
    def urgent(self) -> str:
        """ "present": there is a byte for `receive_urgent` or, inline, one still unread in the
        stream. "pending": the peer has one that it could not write yet."""
        if self._urgent_byte is not None:
            return "present"
        if self.urgent_inline and self._urgent_mark > self._consumed:
            return "present"
        if self._urgent_flags == URGENT_PENDING and not self.urgent_over:
            return "pending"
        return "none"

    @property
    def urgent_over(self) -> bool:
        """Whether no more urgent data can come: the peer is done, or the connection failed."""
        return self._peer_done or self.error is not None

    def receive_urgent(self) -> int | None:
        """Take the urgent byte; None when there is none, or when it stays in the stream.

        Raises:
          OSError: the connection has failed.
        """
        byte = self._urgent_byte
        if byte is None and self.error is not None and not (self._peer_done and not self._purged):
            raise self._failure(self.error)
        self._urgent_byte = None
        return byte

    def _urgent_untrusted(self, flags: int, arrived: bool) -> None:
        """Apply P and U of a CDC message whose cursors were applied before.

        Args:
          flags: P and U; the message before may have had them if this one has not.
          arrived: whether the producer cursor has moved.

        Raises:
          ProtocolError: it calls urgent what nobody has sent, or what was read before.
        """
        self._urgent_flags = flags
        mark = self._received
        if flags & URGENT_PRESENT and (mark != self._urgent_mark or not mark):
            if not arrived and mark <= self._consumed:
                raise ProtocolError("urgent data where no data is")
            self._urgent_mark = mark
            self._urgent_byte = None if self.urgent_inline else self._byte_before(mark)
            if not self.urgent_inline and mark > self._consumed:
                self._hidden = 1
                if self._consumed + 1 == mark:
                    self._skip_hidden()
                    self._owe_cdc()
        self._wake_urgent()

    def _byte_before(self, count: int) -> int:
        return self._ring[(count - 1 - self._ring_start) % self._usable]

    def _drop_unread(self) -> None:
        super()._drop_unread()
        self._urgent_byte = None

    def _wake_urgent(self) -> None:
        wake = self.on_urgent
        if wake is not None:
            self.on_urgent = None
            wake()
