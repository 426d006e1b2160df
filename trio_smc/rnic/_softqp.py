"""Queue pairs of the software RNIC.

`SoftQueuePair` is the state machine of a queue pair and its send queue; the bytes are moved by
`_ring` (SEND) and `_softmr` (RDMA WRITE).

Work is done while it is posted: a write is a copy into the peer's memory, a send fills a slot of
the peer's ring.  Only a send for which the peer has no receive posted waits (RNR), and what is
posted after it waits behind it.  So the send queue is normally empty, and `_ready` says in one
look that nothing stands in the way: RTS, port up, peer known, queue empty.

An error ends the queue pair as verbs do: the request that met it completes with its status, all
later ones with WR_FLUSH_ERR, posted receives with *one* WR_FLUSH_ERR completion for them all.
What the peer had sent before is delivered first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from trio_smc._base.errors import ProtocolError

from ._fabric import Hello, Message, Register, close_all, decode_untrusted, receive
from ._ring import (
    CLOSED,
    PORT_DOWN,
    RING_SIZE,
    ReceiveRing,
    SendRing,
    Sent,
    ring_doorbell,
)
from ._softmr import KEY_PAGE_SIZE, PeerRegions, SoftProtectionDomain
from .memory import PeerMemory
from .verbs import (
    RECEIVE_SIZE,
    Completion,
    QpState,
    QueueFull,
    QueuePair,
    RnicError,
    WcOpcode,
    WcStatus,
)

if TYPE_CHECKING:
    from .software import SoftRnic

__all__ = ["SoftQueuePair"]

_SEND: Final = int(WcOpcode.SEND)
_WRITE: Final = int(WcOpcode.RDMA_WRITE)
_RECV: Final = int(WcOpcode.RECV)
_OK: Final = int(WcStatus.SUCCESS)
_FLUSHED: Final = int(WcStatus.WR_FLUSH_ERR)
_STALLED: Final = -1

_UNLIMITED: Final = 1 << 62
_MOST_PENDING: Final = 4
_EDGES: Final = select.EPOLLIN | select.EPOLLET
_BOTH_EDGES: Final = _EDGES | select.EPOLLOUT
_ENDED: Final = select.EPOLLHUP | select.EPOLLERR

_STATUS_OF: Final = {
    Sent.DONE: _OK,
    Sent.NOT_READY: _STALLED,
    Sent.GONE: int(WcStatus.RETRY_EXC_ERR),
    Sent.NONSENSE: int(WcStatus.GENERAL_ERR),
}


class _Request(NamedTuple):
    """A work request that could not be done while it was posted."""

    wr_id: int
    signaled: bool
    message: bytes | None
    data: memoryview | None = None
    more: memoryview | None = None
    address: int = 0
    rkey: int = 0


class _Peer:
    """What the peer's queue pair gave us to reach it with."""

    __slots__ = ("hello", "regions", "ring")

    def __init__(self, hello: Hello, ring: SendRing, regions: PeerRegions) -> None:
        self.hello = hello
        self.ring = ring
        self.regions = regions

    @classmethod
    def map_untrusted(cls, hello: Hello, fds: list[int]) -> _Peer:
        """Map what came with a Hello.  The descriptors stay the caller's.  ProtocolError."""
        with contextlib.ExitStack() as undo:
            ring = PeerMemory.map_untrusted(fds[0], RING_SIZE)
            undo.callback(ring.close)
            keys = PeerMemory.map_untrusted(fds[1], KEY_PAGE_SIZE)
            undo.callback(keys.close)
            try:
                # Anything else could block, or be a file that the peer wants written to.
                if os.readlink(f"/proc/self/fd/{fds[2]}") != "anon_inode:[eventfd]":
                    raise ProtocolError("a doorbell that is not an eventfd")
                doorbell = os.dup(fds[2])
            except OSError as problem:
                raise ProtocolError(f"a doorbell that cannot be kept: {problem}") from problem
            os.set_blocking(doorbell, False)
            undo.pop_all()
        return cls(hello, SendRing(ring, doorbell), PeerRegions(keys))

    def close(self) -> None:
        self.ring.close()
        self.regions.close()


class SoftQueuePair(QueuePair):
    """A queue pair; made by `SoftRnic.create_qp`."""

    def __init__(self, rnic: SoftRnic, pd: SoftProtectionDomain, qp_num: int) -> None:
        self.qp_num = qp_num
        self.state = QpState.RESET
        self.ring = ReceiveRing(qp_num)
        self._rnic = rnic
        self._pd = pd
        self._complete = rnic.done.append
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        rnic.watch(self._doorbell, _EDGES, None)
        self._ready = False
        self._closed = False
        self._psn = -1
        self._peer_psn = -1
        self._peer_name: tuple[bytes, int] | None = None
        self._peer: _Peer | None = None
        self._queue: deque[_Request] = deque()
        # Announcements that the socket had no room for; sends wait until they are out.
        self._unsaid: deque[tuple[Message, tuple[int, ...]]] = deque()
        self._speaker: socket.socket | None = None
        self._hearer: socket.socket | None = None
        self._pending: list[tuple[Hello, socket.socket, list[int]]] = []

    # -- states --------------------------------------------------------------------------

    def to_init(self) -> None:
        self._expect(QpState.RESET)
        self.state = QpState.INIT

    def to_rtr(self, *, gid: bytes, qp_num: int, psn: int, mtu: int) -> None:
        """INIT to RTR.  Raises RnicError also when no such RNIC can be reached."""
        self._expect(QpState.INIT)
        if len(gid) != 16 or not 0 < qp_num < 1 << 24 or not 1 <= mtu <= 5:
            raise RnicError(errno.EINVAL, "no such address of a queue pair")
        self._peer_name = (bytes(gid), qp_num)
        self._peer_psn = psn
        if self._rnic.port_active:
            self._speaker = self._rnic.dial(gid)
            self._rnic.watch(self._speaker.fileno(), _BOTH_EDGES, self._on_speaker)
            hello = Hello(gid=self._rnic.gid, qp_num=self.qp_num, peer_qp_num=qp_num, peer_psn=psn)
            fds = (self.ring.memory.fd, self._pd.key_page.fd, self._doorbell)
            self._unsaid.append((hello, fds))
            for region in self._pd.regions:
                message, fd = region.announcement()
                self._unsaid.append((message, (fd,)))
        self.state = QpState.RTR
        self._speak()
        for pending in self._pending:
            self.offer(*pending)
        self._pending.clear()
        self._rnic.look()

    def to_rts(self, *, psn: int) -> None:
        self._expect(QpState.RTR)
        self._psn = psn
        self.state = QpState.RTS
        self.refresh()

    def to_err(self) -> None:
        if self.state is not QpState.ERR:
            self.ring.take_untrusted(self._complete)
            self._enter_err()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._enter_err()
        done = self._rnic.done
        done[:] = [completion for completion in done if completion.qp_num != self.qp_num]
        for _, sock, fds in self._pending:
            sock.close()
            close_all(fds)
        self._pending.clear()
        self._rnic.unwatch(self._doorbell)
        os.close(self._doorbell)
        self.ring.close()
        self._pd.queue_pairs.discard(self)
        self._rnic.forget_qp(self)

    # -- work ----------------------------------------------------------------------------

    def post_receive(self, count: int) -> None:
        if self.state is QpState.RESET or self._closed:
            raise RnicError(errno.EINVAL, f"a queue pair in {self._name()} takes no receives")
        ring = self.ring
        if count > ring.room():
            raise QueueFull
        if self.state is QpState.ERR:
            return
        ring.posted += count
        if self._rnic.port_active and ring.tell(ring.posted):
            self._ring_peer()

    def post_send(self, wr_id: int, data: bytes, *, signaled: bool = True) -> None:
        if len(data) > RECEIVE_SIZE:
            raise RnicError(errno.EINVAL, f"a send has at most {RECEIVE_SIZE} bytes")
        if self._ready:
            sent = self._peer.ring.put(data)  # type: ignore[union-attr]
            if not sent:
                if signaled:
                    self._complete(Completion(self.qp_num, _SEND, _OK, wr_id, None))
                return
        self._post(_Request(wr_id, signaled, bytes(data)))

    def post_write(
        self,
        wr_id: int,
        data: memoryview,
        more: memoryview | None,
        *,
        address: int,
        rkey: int,
        signaled: bool = False,
    ) -> None:
        if self._ready:
            peer = self._peer
            if not peer.ring.gone() and not peer.regions.write(data, more, address, rkey):  # type: ignore[union-attr]
                if signaled:
                    self._complete(Completion(self.qp_num, _WRITE, _OK, wr_id, None))
                return
        self._post(_Request(wr_id, signaled, None, data, more, address, rkey))

    def write_capacity(self) -> int:
        return _UNLIMITED

    # -- what the RNIC calls -------------------------------------------------------------

    def refresh(self) -> None:
        """Decide anew whether work can be done while it is posted."""
        self._ready = (
            self.state is QpState.RTS
            and self._rnic.port_active
            and not self._queue
            and not self._unsaid
            and self._reachable()
        )

    def push(self) -> None:
        """Do what is queued, as far as the peer has receives posted."""
        queue = self._queue
        while queue:
            request = queue[0]
            status = self._execute(request)
            if status == _STALLED:
                self._rnic.stalled.add(self)
                return
            queue.popleft()
            if status:
                self._fail(request, status)
                return
            if request.signaled:
                self._finish(request, _OK)
        self._rnic.stalled.discard(self)
        self.refresh()

    def port_changed(self) -> None:
        """The RNIC's port went down or up: peers see it when they post."""
        if self.state is QpState.ERR:
            return
        if self.ring.tell(self.ring.posted if self._rnic.port_active else PORT_DOWN):
            self._ring_peer()
        self.refresh()
        if self._queue:
            self.push()

    def peer_gone(self) -> None:
        """The peer's end is no more: take what it sent before, then go to ERR."""
        self.to_err()

    def broken(self) -> None:
        """The receive ring makes no sense."""
        self._complete(Completion(self.qp_num, _RECV, int(WcStatus.GENERAL_ERR), 0, None))
        self._enter_err()

    def announce(self, message: Message, fds: tuple[int, ...]) -> None:
        """Tell the peer of a memory region, before anything that is sent later."""
        if self._speaker is not None:
            self._unsaid.append((message, fds))
            self._speak()

    def offer(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """A peer said Hello to this queue pair: take it, keep it for later, or refuse it.

        The socket and the descriptors become this queue pair's.
        """
        if self.state in (QpState.RESET, QpState.INIT) and len(self._pending) < _MOST_PENDING:
            self._pending.append((hello, sock, fds))
            return
        wanted = self._peer_name == (hello.gid, hello.qp_num) and self._hearer is None
        try:
            if self.state not in (QpState.RTR, QpState.RTS) or not wanted:
                raise ProtocolError("not the peer of this queue pair")
            self._peer = _Peer.map_untrusted(hello, fds)
        except ProtocolError:
            sock.close()
            return
        finally:
            close_all(fds)
        self._hearer = sock
        self._rnic.watch(sock.fileno(), _EDGES, self._on_hearer)
        self._hear()
        self.refresh()

    # -- inside --------------------------------------------------------------------------

    def _expect(self, state: QpState) -> None:
        if self.state is not state or self._closed:
            raise RnicError(errno.EINVAL, f"a queue pair in {self._name()}, not in {state}")

    def _name(self) -> str:
        return "closed" if self._closed else self.state.value

    def _reachable(self) -> bool:
        # A packet with an unexpected sequence number is not acknowledged.
        return self._peer is not None and self._peer.hello.peer_psn == self._psn

    def _post(self, request: _Request) -> None:
        """Post what could not be done at once, or not at all."""
        if self.state is QpState.ERR and not self._closed:
            self._finish(request, _FLUSHED)
            return
        self._expect(QpState.RTS)
        if len(self._queue) >= self._rnic.send_depth:
            raise QueueFull
        self._queue.append(request)
        if len(self._queue) == 1:
            self._ready = False
            self.push()

    def _execute(self, request: _Request) -> int:
        """Do one request; returns a `WcStatus` or `_STALLED`."""
        if not self._rnic.port_active:
            return _FLUSHED
        if self._peer is None:
            self._rnic.look()
        self._speak()
        if not self._reachable():
            return int(WcStatus.RETRY_EXC_ERR)
        if self._unsaid:
            return _STALLED
        peer = self._peer
        assert peer is not None
        if request.message is not None:
            return _STATUS_OF[peer.ring.put(request.message)]
        if peer.ring.gone():
            return int(WcStatus.RETRY_EXC_ERR)
        if request.rkey not in peer.regions:
            self._hear()
        assert request.data is not None
        try:
            return peer.regions.write(request.data, request.more, request.address, request.rkey)
        except ValueError:
            return int(WcStatus.LOC_PROT_ERR)  # the memory was released meanwhile

    def _finish(self, request: _Request, status: int) -> None:
        opcode = _WRITE if request.message is None else _SEND
        self._complete(Completion(self.qp_num, opcode, status, request.wr_id, None))

    def _fail(self, request: _Request, status: int) -> None:
        self.ring.take_untrusted(self._complete)
        self._finish(request, status)
        self._enter_err()

    def _enter_err(self) -> None:
        was, self.state = self.state, QpState.ERR
        self._ready = False
        for request in self._queue:
            self._finish(request, _FLUSHED)
        self._queue.clear()
        self._unsaid.clear()
        if was is QpState.ERR:
            return
        if self.ring.posted > self.ring.tail:
            self._complete(Completion(self.qp_num, _RECV, _FLUSHED, 0, None))
        # A port that is down tells nobody.
        if self._rnic.port_active and self.ring.tell(CLOSED):
            self._ring_peer()
        self._rnic.disconnect(self, (self._speaker, self._hearer))
        self._speaker = self._hearer = None
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _ring_peer(self) -> None:
        if self._peer is None:
            self._rnic.look()
        if self._peer is not None:
            ring_doorbell(self._peer.ring.doorbell)

    # -- sockets -------------------------------------------------------------------------

    def _on_speaker(self, events: int) -> None:
        if events & _ENDED:
            self._rnic.gone.append(self)
            return
        self._speak()
        if self._queue:
            # Not now: `push` may be what looked at the sockets.
            self._rnic.stalled.add(self)

    def _on_hearer(self, _events: int) -> None:
        self._hear()

    def _speak(self) -> None:
        """Send what is unsaid, as far as the socket takes it."""
        if self._speaker is None:
            return
        unsaid = self._unsaid
        while unsaid:
            message, fds = unsaid[0]
            try:
                socket.send_fds(self._speaker, [message.encode()], fds, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._ready = False
                return
            except OSError:
                self._rnic.gone.append(self)
                return
            unsaid.popleft()
        self.refresh()

    def _hear(self) -> None:
        """Take in the peer's announcements."""
        while self._hearer is not None:
            packet = receive(self._hearer)
            if packet is None:
                return
            data, fds = packet
            try:
                if not data:
                    raise ProtocolError("the peer's queue pair ended")
                self._on_message_untrusted(decode_untrusted(data, len(fds)), fds)
            except ProtocolError:
                self._rnic.gone.append(self)
                return
            finally:
                close_all(fds)

    def _on_message_untrusted(self, message: Message, fds: list[int]) -> None:
        if self._peer is None:
            return
        if isinstance(message, Register):
            self._peer.regions.add_untrusted(message, fds[0])
        elif isinstance(message, Hello):
            raise ProtocolError("a second Hello")
        else:
            self._peer.regions.discard(message.rkey)
