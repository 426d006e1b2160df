"""Queue pairs of the software RNIC.

`SoftQueuePair` has the states of a queue pair and its send queue.  `ring` (SEND) and `regions`
(RDMA WRITE) move the bytes, and `peer_sockets` exchanges messages with the peer's queue pair.

A request is executed while it is posted: a write is a copy into the peer's memory, a send fills a
slot of the peer's ring.  If the peer has no receive posted, a send waits (RNR), and all later
requests wait behind it.  So the send queue is normally empty.  `_ready_peer` is the peer if a
request can be executed at once (RTS, port up, peer known, queue empty), else None.  `deliver` works
only in the first case: its return value is the result, so it has no completion.

If the peer ends while a send is executed, it is not known yet if the peer has taken it.  The send
stays in the queue then, as `_published`, until the peer's socket has ended.

An error ends the queue pair as with verbs: the request that failed completes with its status, and
all later ones with WR_FLUSH_ERR.  All posted receives together have *one* completion with
WR_FLUSH_ERR.  Messages that the peer has sent before the error are delivered first.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from typing import Final, NamedTuple

from trio_smc.rnic.soft.messages import Hello, Message
from trio_smc.rnic.soft.packets import PacketReceiver
from trio_smc.rnic.soft.peer_sockets import Peer, PeerSockets
from trio_smc.rnic.soft.port import Port
from trio_smc.rnic.soft.regions import SoftProtectionDomain
from trio_smc.rnic.soft.ring import (
    CLOSED,
    PORT_DOWN,
    SLOTS,
    ReceiveRing,
    Sent,
)
from trio_smc.rnic.verbs import (
    AWAKE,
    RECEIVE_SIZE,
    DeliveryUnknown,
    QpState,
    QueueFull,
    QueuePair,
    RnicError,
    WcOpcode,
    WcStatus,
    refusals,
)
from trio_smc.rnic.words import Words

__all__ = [
    "STALLED",
    "Request",
    "SoftQueuePair",
]


_SEND: Final = int(WcOpcode.SEND)
_WRITE: Final = int(WcOpcode.RDMA_WRITE)
_RECV: Final = int(WcOpcode.RECV)
_OK: Final = int(WcStatus.SUCCESS)
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
_UNREACHABLE: Final = int(WcStatus.RETRY_EXC_ERR)
STALLED: Final = -1
"""In place of a `WcStatus`: the request cannot be executed yet."""

# Module constants, because looking up a member of an enumeration costs more than the comparison.
_RESET: Final = QpState.RESET
_ERR: Final = QpState.ERR

_UNLIMITED: Final = 1 << 62
_STATUS_OF: Final = {
    Sent.DONE: _OK,
    Sent.NOT_READY: STALLED,
    Sent.GONE: _UNREACHABLE,
    Sent.INVALID: int(WcStatus.GENERAL_ERR),
    Sent.UNKNOWN: _UNREACHABLE,
    Sent.ENDING: STALLED,
}


class Request(NamedTuple):
    """A work request that could not be executed while it was posted.

    ``message`` belongs to a send.  The other fields from ``data`` on belong to a write, which puts
    ``data`` and then ``more`` at ``address``.
    """

    wr_id: int
    signaled: bool
    message: bytes | None
    data: memoryview | None = None
    more: memoryview | None = None
    address: int = 0
    rkey: int = 0

    def copied(self) -> Request:
        """The same request with a copy of its data, which the sender cannot change."""
        return self._replace(data=_copied(self.data), more=_copied(self.more))


def _copied(data: memoryview | None) -> memoryview | None:
    if data is None or type(data.obj) is bytes:
        return data
    return memoryview(bytes(data))


class SoftQueuePair(QueuePair):
    """A queue pair, created by `SoftRnic.create_qp`."""

    def __init__(self, rnic: Port, pd: SoftProtectionDomain, qp_num: int) -> None:
        self.qp_num = qp_num
        self.state: QpState = QpState.RESET
        self.receive_depth = SLOTS
        self.ring: ReceiveRing = ReceiveRing(qp_num)
        self._rnic = rnic
        self._pd = pd
        self._complete = rnic.done.append
        self._sockets = PeerSockets(rnic, self)
        self._ready_peer: Peer | None = None
        self._closed = False
        self._psn = -1
        self._peer_name: tuple[bytes, int] | None = None
        self._queue: deque[Request] = deque()
        self._published = False  # the first request of `_queue` is in the ring of an ending peer
        self._holds_writes = False  # an RDMA write may be in `_queue`

    # -- states --------------------------------------------------------------------------

    def to_init(self) -> None:
        self._check_state(QpState.RESET)
        self.state = QpState.INIT

    def to_rtr(self, *, gid: bytes, qp_num: int, psn: int, mtu: int) -> None:
        """Go from INIT to RTR.  Raises RnicError also if the peer's RNIC cannot be reached."""
        self._check_state(QpState.INIT)
        if len(gid) != 16 or not 0 < qp_num < 1 << 24 or not 1 <= mtu <= 5:
            raise RnicError(errno.EINVAL, "not a valid GID, queue pair number or MTU")
        self._peer_name = (bytes(gid), qp_num)
        sockets = self._sockets
        with refusals():
            if self._rnic.port_active:
                self._rnic.poll_sockets()
                sockets.dial(self._peer_name)
            self.state = QpState.RTR
            hello = Hello(
                gid=self._rnic.gid,
                qp_num=self.qp_num,
                peer_qp_num=qp_num,
                peer_psn=psn,
                packets=self._rnic.sends_packets,
            )
            sockets.send_hello(hello, self.ring.memory.fd)
            self.ring.memory.close_descriptor()
            for region in self._pd.regions:
                message, fd = region.announcement()
                sockets.send(message, (fd,))
        sockets.offer_pending()
        self._rnic.poll_sockets()

    def to_rts(self, *, psn: int) -> None:
        self._check_state(QpState.RTR)
        self._psn = psn
        self.state = QpState.RTS
        self.update_ready()

    def to_err(self) -> None:
        self._enter_err()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._enter_err()
        done = self._rnic.done
        done[:] = [completion for completion in done if completion[0] != self.qp_num]
        self.ring.close()
        self._pd.queue_pairs.discard(self)
        self._rnic.remove_queue_pair(self)

    # -- work ----------------------------------------------------------------------------

    def post_receive(self, count: int) -> None:
        state = self.state
        if state is _RESET or self._closed:
            raise RnicError(
                errno.EINVAL, f"a queue pair in {self._state_name()} accepts no receives"
            )
        ring = self.ring
        posted = ring.posted + count
        if posted - ring.tail > SLOTS:
            raise QueueFull
        if state is _ERR:
            return
        ring.posted = posted
        if self._rnic.port_active and ring.set_posted(posted):
            self._ring_doorbell()

    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        if len(data) > RECEIVE_SIZE:
            raise RnicError(errno.EINVAL, f"a send has at most {RECEIVE_SIZE} bytes")
        peer = self._ready_peer
        if peer is not None:
            sent = peer.ring.put(data)
            if not sent:
                if signaled:
                    self._complete((self.qp_num, _SEND, _OK, wr_id, None))
                return
            if sent == Sent.ENDING:
                self._hold_published(Request(wr_id, signaled, bytes(data)))
                return
        self._post(Request(wr_id, signaled, bytes(data)))

    def post_write(
        self,
        wr_id: int,
        data: memoryview,
        more: memoryview | None,
        address: int,
        rkey: int,
        *,
        signaled: bool = False,
    ) -> None:
        peer = self._ready_peer
        if (
            peer is not None
            and peer.ring.posted[0] < PORT_DOWN
            and not peer.regions.write(data, more, address, rkey)
        ):
            if signaled:
                self._complete((self.qp_num, _WRITE, _OK, wr_id, None))
            return
        self._post(Request(wr_id, signaled, None, data, more, address, rkey))

    def deliver(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        peer = self._ready_peer
        if peer is None:
            return False
        # If the ring refuses the message, the caller writes the data again, to the same place.
        if data is not None and (
            peer.ring.posted[0] >= PORT_DOWN or peer.regions.write(data, None, address, rkey)
        ):
            return False
        sent = peer.ring.put(message)
        if not sent:
            return True
        if sent in (Sent.UNKNOWN, Sent.ENDING):
            self._enter_err(Request(0, True, message), _UNREACHABLE)
            raise DeliveryUnknown
        return False

    def write_capacity(self) -> int:
        return _UNLIMITED

    def peer_lives(self) -> bool:
        # The kernel closes the socket of a process that has ended, and `PeerSockets` notices.
        peer = self._sockets.peer
        return (
            self.state is QpState.RTS
            and self._rnic.port_active
            and peer is not None
            and not peer.ring.is_closed()
        )

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        peer = self._sockets.peer
        return None if peer is None else peer.regions.progress_words(address, rkey, size)

    def peer_asleep(self) -> Words:
        peer = self._sockets.peer
        return AWAKE if peer is None else peer.ring.armed

    def lacks_resources(self) -> bool:
        sockets = self._sockets
        if sockets.peer is None and self.state is not QpState.ERR:
            self._rnic.poll_sockets()
        return sockets.lacks_resources

    def can_reach(self, rkey: int) -> bool:
        sockets = self._sockets
        if sockets.peer is None and self.state is not QpState.ERR:
            # The peer's Hello may be unread although a message in the ring was taken already.
            self._rnic.poll_sockets()
        peer = sockets.peer
        if peer is None:
            return not sockets.lacks_resources  # no Hello yet, or its ring cannot be mapped yet
        if rkey in peer.regions:
            return True
        sockets.receive()
        return rkey in peer.regions or (sockets.has_unread and not sockets.lacks_resources)

    # -- what the RNIC calls -------------------------------------------------------------

    def update_ready(self) -> None:
        """Set `_ready_peer` after a change of any of its conditions."""
        ready = (
            self.state is QpState.RTS
            and self._rnic.port_active
            and not self._queue
            and not self._sockets.unsent
            and self._is_reachable()
        )
        self._ready_peer = self._sockets.peer if ready else None

    def push(self) -> None:
        """Execute queued requests, until the peer has no receive posted."""
        self._push()
        if self._holds_writes and not self._queue:
            self._hold_writes(held=False)

    def _push(self) -> None:
        queue = self._queue
        while queue:
            request = queue[0]
            status = self._execute(request)
            if status == STALLED:
                self._rnic.stalled[self] = None
                return
            queue.popleft()
            if status:
                self._enter_err(request, status)
                return
            if request.signaled:
                self._finish(request, _OK)
        self._rnic.stalled.pop(self, None)
        self.update_ready()

    def on_port_change(self) -> None:
        """Publish in the ring that the port went down or up; the peer reads this when it posts."""
        if self.state is QpState.ERR:
            return
        if self.ring.set_posted(self.ring.posted if self._rnic.port_active else PORT_DOWN):
            self._ring_doorbell()
        self.update_ready()
        if self._queue:
            self.push()

    def on_peer_end(self) -> None:
        """Go to ERR, because the peer has ended.  The peer's last messages are taken first."""
        if self.state is _ERR:
            return
        peer = self._sockets.peer
        killed = peer is not None and not peer.ring.is_closed() and self._sockets.has_ended()
        taken = self._enter_err()
        self.received_all = killed and taken and not self.ring.peer_holds_data

    def on_invalid_ring(self) -> None:
        """Go to ERR, because the receive ring holds invalid values."""
        self._complete((self.qp_num, _RECV, int(WcStatus.GENERAL_ERR), 0, None))
        self._enter_err()

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        self._sockets.abandon()

    def announce(self, message: Message, fds: tuple[int, ...]) -> None:
        """Send a message about a memory region to the peer, before all later sends.

        Raises:
          OSError: a region cannot be announced for lack of resources.
        """
        try:
            self._sockets.send(message, fds)
        finally:
            self.update_ready()

    def on_hello(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Handle the Hello of a peer: accept it, keep it for later, or refuse it.

        From now on this queue pair owns the socket and the descriptors.
        """
        if self.state in (QpState.RESET, QpState.INIT):
            self._sockets.keep_pending(hello, sock, fds)
        elif self.state is QpState.ERR or self._peer_name != (hello.gid, hello.qp_num):
            self._rnic.intake.discard(sock)
            self._rnic.intake.close_fds(fds)
        else:
            self._sockets.accept(sock, hello, fds)
            self.update_ready()

    def receive_packets(self) -> None:
        """From now on receive messages as packets, and not in the ring."""
        if not isinstance(self.ring, PacketReceiver):
            ring = PacketReceiver(self.ring, self._sockets)
            self._rnic.replace_ring(self.ring, ring)
            self.ring = ring

    # -- inside --------------------------------------------------------------------------

    def _check_state(self, state: QpState) -> None:
        if self.state is not state or self._closed:
            raise RnicError(errno.EINVAL, f"a queue pair in {self._state_name()}, not in {state}")

    def _state_name(self) -> str:
        return "closed" if self._closed else self.state.value

    def _is_reachable(self) -> bool:
        # Hardware, too, does not acknowledge a packet with an unexpected sequence number.
        peer = self._sockets.peer
        return peer is not None and peer.hello.peer_psn == self._psn

    def _post(self, request: Request) -> None:
        """Queue a request that could not be executed at once, or flush it."""
        if self.state is QpState.ERR and not self._closed:
            self._finish(request, _FLUSHED)
            return
        self._check_state(QpState.RTS)
        if len(self._queue) >= self._rnic.send_depth:
            raise QueueFull
        self._queue.append(request)
        if len(self._queue) == 1:
            self._ready_peer = None
            self.push()
        if self._queue and self._queue[-1] is request:
            if request.message is None and not self._holds_writes:
                self._hold_writes(held=True)
            # The request may wait long, and the caller may reuse its buffer if it is cancelled.
            self._queue[-1] = request.copied()

    def _hold_published(self, request: Request) -> None:
        """Keep a request that may have reached a peer that is ending, until it has ended."""
        self._published = True
        self._ready_peer = None
        self._queue.append(request)

    def _hold_writes(self, *, held: bool) -> None:
        self._holds_writes = held
        peer = self._sockets.peer
        if peer is not None:
            peer.ring.set_held(held)

    def _execute(self, request: Request) -> int:
        """Execute one request; return a `WcStatus` or `STALLED`."""
        if self._published:
            return STALLED
        if not self._rnic.port_active:
            return _FLUSHED
        sockets = self._sockets
        if sockets.peer is None:
            self._rnic.poll_sockets()
        sockets.flush()
        peer = sockets.peer
        if peer is None and (self._rnic.accepting_later or sockets.lacks_resources):
            return STALLED  # the peer's connection may wait in the backlog
        if peer is None or not self._is_reachable():
            return _UNREACHABLE
        if sockets.unsent:
            return STALLED
        if request.message is not None:
            sent = peer.ring.put(request.message)
            self._published = sent == Sent.ENDING
            return _STATUS_OF[sent]
        if peer.ring.is_closed():
            return _UNREACHABLE
        if request.rkey not in peer.regions:
            sockets.receive()
            if sockets.has_unread and request.rkey not in peer.regions:
                return STALLED
        assert request.data is not None
        try:
            return peer.regions.write(request.data, request.more, request.address, request.rkey)
        except ValueError:
            return int(WcStatus.LOC_PROT_ERR)  # the sender has released the memory

    def _finish(self, request: Request, status: int) -> None:
        opcode = _WRITE if request.message is None else _SEND
        self._complete((self.qp_num, opcode, status, request.wr_id, None))

    def _enter_err(
        self, failed: Request | None = None, status: int = _FLUSHED, *, quietly: bool = False
    ) -> bool:
        """Go to ERR; no-op in ERR.

        Args:
          failed: a request that failed and is no longer queued; it completes with ``status``.
          status: a `WcStatus`.
          quietly: do not notify the peer, which will notice when it posts.

        Returns:
          True if all messages in the ring have been taken; False if the ring is not valid.
        """
        if self.state is _ERR:
            return False
        if self._sockets.peer is None and self.state in (QpState.RTR, QpState.RTS):
            # The peer's Hello may be unread, and messages behind it (`packets`).
            self._rnic.poll_sockets()
        self.state = _ERR
        self._ready_peer = None
        ring = self.ring
        # A port that is down cannot notify the peer.
        notify = self._rnic.port_active and not quietly
        if ring.set_posted_finally(CLOSED if notify else PORT_DOWN) and notify:
            self._ring_doorbell()
        taken = ring.take_untrusted(self._complete)
        ring.publish_taken()
        if self._published:
            self._finish_published()
        if failed is not None:
            self._finish(failed, status)
        for request in self._queue:
            self._finish(request, _FLUSHED)
        self._queue.clear()
        if ring.posted > ring.tail:
            self._complete((self.qp_num, _RECV, _FLUSHED, 0, None))
        self._rnic.stop_polling(self)
        self._sockets.close(quietly=quietly)
        return taken

    def _finish_published(self) -> None:
        """Complete the request that was published while the peer ended."""
        request = self._queue.popleft()
        peer = self._sockets.peer
        if peer is None or not peer.ring.was_taken():
            self._finish(request, _UNREACHABLE)
        elif request.signaled:
            self._finish(request, _OK)

    def _ring_doorbell(self) -> None:
        if self._sockets.peer is None:
            self._rnic.poll_sockets()
        if self._sockets.peer is not None:
            self._sockets.peer.ring.ring_doorbell()
