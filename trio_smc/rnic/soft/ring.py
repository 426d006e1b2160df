"""The receive queue of a software queue pair: a ring of slots that the peer writes into.

Theory of operation.  A ring is one memfd that belongs to the receiver and is mapped by exactly
one sender; the key page (`regions`) is its last page.  Six words control the ring, each in a cache
line of its own.  HEAD and POSTED count messages from 0:

=========  ===========  =======================================================================
word       written by   meaning
=========  ===========  =======================================================================
HEAD       sender       messages published: slots below it hold data
POSTED     receiver     receives posted; a sender may publish while HEAD < POSTED.  The values
                        `PORT_DOWN` and `CLOSED` mean that no message will be received
ARMED      both         set by a receiver that does not poll; the sender clears it and rings
WAITING    both         set by a sender without a posted receive; the receiver clears it and rings
HELD       sender       1 while an RDMA write of the sender waits in its send queue
TAKEN      receiver     0; one more than the messages taken, when the queue pair has ended
=========  ===========  =======================================================================

If the sender's process ends while HELD is 1, data that its application has sent is lost.  A message
that waits alone is no loss: the progress words (`trio_smc.rnic.memory`) show what it would
announce.

A receiver that stops polling does ``ARMED = 1; fence; read HEAD``, and a sender does
``HEAD = n; fence; read ARMED``.  At least one of the two sees the other's store, so no wakeup is
lost.  WAITING and POSTED work the same way in the other direction.  `trio_smc.rnic.words` has the
order that each word needs.

The end of a receiver works in the same way: the receiver does ``POSTED = CLOSED; ARMED = 1; fence``
and then takes the last messages.  A sender that finds ARMED set clears it by an exchange, reads
POSTED again, and does not report a message as sent if the receiver may not have taken it.  Whether
it has taken it, the sender learns from TAKEN, which the receiver stores before it closes the socket
of the queue pair.  To guess would be wrong in both cases: if one side believes that a message of
the first contact has arrived and the other that it has not, both decline (RFC 7609, C.7).

The other side may write any value anywhere in the ring at any time.  Therefore this side compares
each word with its own counters, and copies a slot before it reads the contents.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from trio_smc.rnic.memory import Memory, PeerMemory
from trio_smc.rnic.verbs import RECEIVE_SIZE, PlainCompletion, WcOpcode
from trio_smc.rnic.words import VARIANT, Words, exchange, fence, fence_lock

__all__ = [
    "CLOSED",
    "KEYS",
    "PORT_DOWN",
    "POSTED",
    "RING_SIZE",
    "SLOTS",
    "ReceiveRing",
    "SendRing",
    "Sent",
    "no_doorbell",
    "pack_slot",
    "unpack_slot",
    "uses_lock",
]


SLOTS: Final = 1024
"""Receives that can be posted; a power of two.  Chosen; no measurement is recorded."""
_SLOT_MASK: Final = SLOTS - 1
_SLOT_SIZE: Final = 64
_SLOTS_AT: Final = 4096
_KEYS_AT: Final = _SLOTS_AT + SLOTS * _SLOT_SIZE
KEYS: Final = 512
"""Words of the key page."""
RING_SIZE: Final = _KEYS_AT + KEYS * 8

# Indices of 8-byte words, 64 bytes apart.
_HEAD: Final = 0
POSTED: Final = 8
_ARMED: Final = 16
_WAITING: Final = 24
_HELD: Final = 32
_TAKEN: Final = 40

CLOSED: Final = (1 << 64) - 1
PORT_DOWN: Final = (1 << 64) - 2

# A slot: the message's length, 7 bytes of padding, the message.
_SLOT: Final = struct.Struct(f"<B7x{RECEIVE_SIZE}s")
pack_slot = _SLOT.pack_into
unpack_slot = _SLOT.unpack_from

_RECV: Final = int(WcOpcode.RECV)

uses_lock: Final = VARIANT != "native"


def no_doorbell() -> None:
    """No-op doorbell of a peer that cannot be woken: the port was down when this side should have
    connected, or the peer has ended."""


class Sent:
    """The results of `SendRing.put`."""

    DONE: Final = 0
    NOT_READY: Final = 1
    """No receive is posted (RNR); the peer rings when there is one."""
    GONE: Final = 2
    """The peer's queue pair is in ERR or its port is down."""
    INVALID: Final = 3
    """The peer's control words are not valid."""
    UNKNOWN: Final = 4
    """Published while the peer's port went down: perhaps the peer has taken the message."""
    ENDING: Final = 5
    """Published while the peer's queue pair ended: `SendRing.was_taken` tells the result when the
    peer's socket has ended."""


class ReceiveRing:
    """The receiving end.  Raises OSError if there is no memory or no descriptor.

    Attributes:
      head: the word HEAD, alone; there are messages if ``head[0] != tail``.
      armed: the word ARMED, alone.  1 requests a doorbell at the next message; after
        setting it, the RNIC must call `fence` and check ``head``.
      keys: the key page.
      words: all control words.
      tail: messages taken.
      posted: receives posted.
      interrupt_mode: the ring stays armed, and the RNIC polls it only after its doorbell; set by
        the RNIC.
      polled_tail: the value of ``tail`` when the RNIC last checked which rings are idle.
    """

    __slots__ = (
        "armed", "head", "interrupt_mode", "keys", "memory", "polled_tail", "posted", "qp_num",
        "tail", "words",
    )  # fmt: skip

    def __init__(self, qp_num: int) -> None:
        self.memory: Memory = Memory(RING_SIZE, name="trio_smc-ring")
        try:
            self.memory.commit(0, RING_SIZE)
        except BaseException:
            self.memory.close()
            raise
        self.qp_num: int = qp_num
        self.words: Words = self.memory.words(0, _SLOTS_AT)
        self.head: Words = self.memory.words(_HEAD * 8, 8)
        self.armed: Words = self.memory.words(_ARMED * 8, 8)
        self.keys: Words = self.memory.words(_KEYS_AT, KEYS * 8)
        self.tail: int = 0
        self.polled_tail: int = 0
        self.posted: int = 0
        self.interrupt_mode: bool = False

    def set_posted(self, word: int) -> bool:
        """Set POSTED to `posted`, `PORT_DOWN` or `CLOSED`.

        Returns:
          True: the sender waits, and the caller has to ring its doorbell.
        """
        words = self.words
        words[POSTED] = word
        fence()
        if words[_WAITING]:
            words[_WAITING] = 0
            return True
        return False

    def set_posted_finally(self, word: int) -> bool:
        """As `set_posted`, for the last time.

        A message that a later `take_untrusted` does not find was not reported to the sender as
        sent.
        """
        words = self.words
        # POSTED first: ARMED may be 1 already.  A sender that clears ARMED after this store finds
        # `word` when it reads POSTED again, at the latest for its next message.
        words[POSTED] = word
        words[_ARMED] = 1
        return self.set_posted(word)

    def publish_taken(self) -> None:
        """Tell the sender how many messages were taken.  None is taken afterwards."""
        self.words[_TAKEN] = self.tail + 1

    @property
    def peer_holds_data(self) -> bool:
        """True if the sender has data that it has not written; a hint of the peer's."""
        return bool(self.words[_HELD])

    def take_untrusted(self, append: Callable[[PlainCompletion], None]) -> bool:
        """Append a completion for each message in the ring; False: the ring is not valid."""
        tail = self.tail
        head: int = self.head[0]
        if not tail <= head <= self.posted:
            return False
        view, qp_num = self.memory.view, self.qp_num
        while tail < head:
            size, data = unpack_slot(view, _SLOTS_AT + (tail & _SLOT_MASK) * _SLOT_SIZE)
            if size > RECEIVE_SIZE:
                return False
            self.tail = tail = tail + 1
            append((qp_num, _RECV, 0, 0, data if size == RECEIVE_SIZE else data[:size]))
        return True

    def close(self) -> None:
        """Unmap and close.  Idempotent."""
        self.memory.close()


class SendRing:
    """The sending end: a peer's ring.

    Args:
      memory: the peer's ring.
      doorbell: wakes the peer.  BlockingIOError means that the peer is awake or will wake up.
      on_failed_ring: called with this object and the exception of the doorbell.

    Attributes:
      keys: the peer's key page.
      posted: the word POSTED, alone.  If the value is `PORT_DOWN` or greater,
        the peer receives nothing.
      armed: the word ARMED as such a view; not 0 if the peer does not poll.
      doorbell: as the parameter, or `no_doorbell`.
    """

    __slots__ = (
        "_acquire", "_head", "_memory", "_on_failed_ring", "_release", "_view",
        "_words", "armed", "doorbell", "keys", "posted",
    )  # fmt: skip

    def __init__(
        self,
        memory: PeerMemory,
        doorbell: Callable[[], object],
        on_failed_ring: Callable[[SendRing, OSError], object] | None = None,
    ) -> None:
        self._memory = memory
        self._view = memory.view
        self._words: Words = memory.words(0, _SLOTS_AT)
        self.posted: Words = memory.words(POSTED * 8, 8)
        self.armed: Words = memory.words(_ARMED * 8, 8)
        self._head = 0
        self.doorbell = doorbell
        self._on_failed_ring = on_failed_ring
        self._acquire, self._release = fence_lock()
        self.keys: Words = memory.words(_KEYS_AT, KEYS * 8)

    def ring_doorbell(self) -> None:
        """Wake the peer.  If the socket or the pipe is full, the peer is awake or will wake up."""
        try:
            self.doorbell()
        except OSError as problem:
            if self._on_failed_ring is not None:
                self._on_failed_ring(self, problem)

    def remove_doorbell(self) -> None:
        """Stop ringing the peer."""
        self.doorbell = no_doorbell

    def put(self, data: bytes) -> int:
        """Publish one message of at most `RECEIVE_SIZE` bytes; return a value of `Sent`."""
        words = self._words
        head = self._head
        if not 0 < words[POSTED] - head <= SLOTS:
            refused = self._refusal()
            if refused:
                return refused
        pack_slot(self._view, _SLOTS_AT + (head & _SLOT_MASK) * _SLOT_SIZE, len(data), data)
        self._head = head = head + 1
        words[_HEAD] = head
        if uses_lock:
            self._acquire(False)  # a fence
            self._release()
        else:
            fence()
        if words[_ARMED]:
            exchange(words, _ARMED, 0)  # a system call follows: the doorbell
            ring = self.doorbell
            try:
                ring()
            except OSError as problem:
                if self._on_failed_ring is not None:
                    self._on_failed_ring(self, problem)
            posted = words[POSTED]
            if posted >= PORT_DOWN:
                return Sent.ENDING if posted == CLOSED else Sent.UNKNOWN
        return 0

    def was_taken(self) -> bool:
        """True if a peer that has ended has taken the last message that was published."""
        return self._words[_TAKEN] > self._head

    def set_held(self, held: bool) -> None:
        """Show the peer whether an RDMA write waits in this side's send queue."""
        self._words[_HELD] = int(held)

    def _refusal(self) -> int:
        """The reason why no message can be published; `Sent.DONE` if that has changed meanwhile."""
        # Set WAITING before POSTED is read again (see the theory of operation).
        self._words[_WAITING] = 1
        fence()
        posted: int = self._words[POSTED]
        if posted == self._head:
            return Sent.NOT_READY
        self._words[_WAITING] = 0
        if 0 < posted - self._head <= SLOTS:
            return Sent.DONE
        return Sent.GONE if posted >= PORT_DOWN else Sent.INVALID

    def is_closed(self) -> bool:
        """True if the peer has announced that it will receive nothing."""
        return self.posted[0] >= PORT_DOWN

    def close(self) -> None:
        """Unmap.  Idempotent."""
        self._memory.close()
