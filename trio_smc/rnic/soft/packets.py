"""Messages that travel over the socket of two queue pairs, without a ring.

Theory of operation.  If one of two processes has no ordered words (`trio_smc.rnic.words`, variant
``socket``), neither may use a ring: without order, a receiver could find a slot that is announced
and not written yet.  So `Hello` names the variant, and each side sends its messages as packets
(`messages.Send`).  send(2) and recv(2) order all memory, so RDMA data that was written before a
message is there when the message is received.

Only words that need no order are used in shared memory.  POSTED counts the receives that are
posted, or has the values `PORT_DOWN` and `CLOSED`.  HELD and the key page are as in a ring.  A
sender without a posted receive sends the message `Waiting`, and the receiver rings when it has
posted one.  There is nothing to arm: each packet makes the socket readable.  ARMED only hints the
sender whether the receiver sleeps (`QueuePair.peer_asleep`): the receiver sets it before it sleeps,
and the sender's next message clears it.  A hint that is out of date delays a message at most until
the sender's own scheduler sleeps.

A receiver that ends shuts the receiving direction of its socket down first, and then takes the last
messages.  From then on send(2) fails at the sender, so each message that was sent is taken.  Until
the end each poll reads a bounded number of packets: a peer may send some, such as doorbells, faster
than this side reads them.

`PacketReceiver` and `PacketSender` have the interface of the two ends of a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from trio_smc._base.errors import ProtocolError
from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft.messages import Message, Send, Waiting
from trio_smc.rnic.soft.ring import (
    PORT_DOWN,
    POSTED,
    SLOTS,
    ReceiveRing,
    SendRing,
    Sent,
)
from trio_smc.rnic.verbs import PlainCompletion, WcOpcode
from trio_smc.rnic.words import Words

__all__ = [
    "PacketReceiver",
    "PacketSender",
]

_RECV: Final = int(WcOpcode.RECV)


class Sockets(Protocol):
    """The sockets of a queue pair (`peer_sockets.PeerSockets`)."""

    has_unread: bool
    lacks_resources: bool

    def receive(self) -> None:
        """Read messages of the peer, and handle them."""

    def end_receiving(self) -> None:
        """Make all later sends of the peer fail."""

    def send_packet(self, message: Message) -> int:
        """Send a message without waiting; return a value of `Sent`."""


class _Head:
    """In place of the word HEAD: the number of messages that have arrived."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: PacketReceiver) -> None:
        self._receiver = receiver

    def __getitem__(self, index: int) -> int:
        return self._receiver.read()


class PacketReceiver(ReceiveRing):
    """The receiving end.  Takes the memory of a ring over, whose word HEAD it ignores.

    Args:
      ring: the ring of the queue pair; nothing was received in it.
      sockets: the queue pair's sockets.
    """

    __slots__ = ("_arrived", "_count", "_ended", "_sender_waits", "_sockets")

    def __init__(self, ring: ReceiveRing, sockets: Sockets) -> None:
        self.memory = ring.memory
        self.qp_num = ring.qp_num
        self.keys = ring.keys
        self.armed = ring.armed
        self.posted = ring.posted
        self.tail = 0
        self.polled_tail = 0
        self.interrupt_mode = False
        self.words = ring.words
        self._sockets = sockets
        self._arrived: deque[bytes] = deque()
        self._count = 0
        self._sender_waits = False
        self._ended = False
        self.head = cast("Words", _Head(self))

    def read(self) -> int:
        """Read the socket; return the number of messages that have arrived since the beginning."""
        self._sockets.receive()
        return self._count

    def add_untrusted(self, message: Send) -> None:
        """Add a message that has arrived.  Raises ProtocolError: no receive was posted for it."""
        if self._count >= self.posted:
            raise ProtocolError("a message without a posted receive")
        self._count += 1
        self._arrived.append(message.data)

    def must_ring(self) -> bool:
        """The sender waits for a receive.  True: there is one, and the caller has to ring."""
        self._sender_waits = True
        return self._ends_wait(self.words[POSTED])

    def _ends_wait(self, word: int) -> bool:
        if not self._sender_waits or word == self._count:
            return False
        self._sender_waits = False
        return True

    def set_posted(self, word: int) -> bool:
        self.words[POSTED] = word
        return self._ends_wait(word)

    def set_posted_finally(self, word: int) -> bool:
        self.words[POSTED] = word
        self._sockets.end_receiving()
        self._ended = True
        return self._ends_wait(word)

    def publish_taken(self) -> None:
        """No-op: packets before `set_posted_finally` are taken, and later ones cannot be sent."""

    def take_untrusted(self, append: Callable[[PlainCompletion], None]) -> bool:
        sockets = self._sockets
        sockets.receive()
        while self._ended and sockets.has_unread and not sockets.lacks_resources:
            sockets.receive()  # the peer cannot send any more
        arrived = self._arrived
        while arrived:
            self.tail += 1
            append((self.qp_num, _RECV, 0, 0, arrived.popleft()))
        # False only at the end: some messages could not be read.
        return not (self._ended and sockets.lacks_resources)


class PacketSender(SendRing):
    """The sending end; see `SendRing`.

    Args:
      sockets: the queue pair's sockets.
    """

    __slots__ = ("_sockets", "_waits_at")

    def __init__(
        self,
        memory: PeerMemory,
        doorbell: Callable[[], object],
        on_failed_ring: Callable[[SendRing, OSError], object] | None,
        sockets: Sockets,
    ) -> None:
        super().__init__(memory, doorbell, on_failed_ring)
        self._sockets = sockets
        self._waits_at = -1  # messages sent when `Waiting` was sent

    def put(self, data: bytes) -> int:
        posted = self._words[POSTED]
        if not 0 < posted - self._head <= SLOTS:
            if posted != self._head:
                return Sent.GONE if posted >= PORT_DOWN else Sent.INVALID
            if self._waits_at == self._head:
                return Sent.NOT_READY
            sent = self._send(Waiting())
            if sent == Sent.DONE:
                self._waits_at = self._head
                return Sent.NOT_READY
            return sent
        sent = self._send(Send(data=data))
        if sent == Sent.DONE:
            self._head += 1
            if self.armed[0]:
                self.armed[0] = 0  # the packet wakes the peer
        return sent

    def _send(self, message: Message) -> int:
        sent = self._sockets.send_packet(message)
        # A peer that has closed its queue pair refuses packets, and so does the kernel for a
        # process that was killed: that end is handled by the next poll.
        return Sent.GONE if sent == Sent.NOT_READY and self.is_closed() else sent
