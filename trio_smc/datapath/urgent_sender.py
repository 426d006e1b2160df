"""Urgent data that we send (RFC 7609, 4.7.5, 4.7.6); `urgent_receiver` is the other half.

Theory of operation
-------------------
The last byte of what `send_urgent` is given is urgent. The *goal* is the count of bytes behind
it: while less is produced every CDC message carries P, so that a peer whose window is closed
learns of it at once. The message that tells the goal carries P and U, the next ones neither.
From then on nothing is written until the peer's consumer cursor has reached it: the *end* that
holds the writer.

P is not said while the writer is held: some peers forget a byte that nobody has fetched yet when
a message without new data announces another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_smc.datapath.sender import Sender
from trio_smc.wire.cdc import URGENT_PENDING, URGENT_PRESENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.rmb import Rmbe

__all__ = ["UrgentSender"]


class UrgentSender(Sender):
    """Base of `Moving`: our urgent data."""

    __slots__ = ("_urgent_sequence",)

    def __init__(
        self,
        rmbe: Rmbe,
        *,
        chunks: bool,
        copy_limit: int,
        flush_later: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        super().__init__(rmbe, chunks=chunks, copy_limit=copy_limit, flush_later=flush_later)
        self._urgent_sequence = 0  # of the CDC message that told U last

    def send_urgent(self, data: memoryview) -> int:
        """Like `send`, and the last byte of ``data`` is urgent.

        With fewer bytes posted than given, call it again with the rest, or `withdraw_urgent`;
        nothing else may be sent before. No byte is posted by anybody until the peer has taken
        the urgent byte before this one.

        Raises:
          ValueError: no data.
          OSError: as from `send`.
        """
        if not data:
            raise ValueError("at least one byte is urgent")
        told = self._sequence
        waited = self._urgent_goal
        self._urgent_goal = self._produced + len(data)
        sent = self.send(data)
        if sent < len(data) and not waited and self._sequence == told and not self._urgent_end:
            self._owe_cdc()
        return sent

    def withdraw_urgent(self) -> None:
        """What is left of an urgent send will not be sent; does nothing when nothing is."""
        if self._urgent_goal:
            self._urgent_goal = 0
            self._owe_cdc()

    def _tell_urgent(self) -> int:
        if self._produced < self._urgent_goal:
            return 0 if self._urgent_end else URGENT_PENDING
        self._urgent_end = self._urgent_goal
        self._urgent_goal = 0
        self._urgent_sequence = self._sequence
        return URGENT_PENDING | URGENT_PRESENT

    def _tell_urgent_again(self) -> None:
        """The link has changed: the message with U may be lost."""
        if self._urgent_end and (self._completed - self._urgent_sequence) & 0x8000:
            self._urgent_goal = self._urgent_end
