"""The sockets between a software queue pair and its peer: the slow path beside the rings.

`PeerSockets` has the socket on which this side sends the messages of `messages`, and the socket on
which it receives them.  Usually both are the same socket, opened by the side that connected first.
If both sides belong to one user, each may also have a doorbell pipe, which the other side rings.

This module never changes the state of the queue pair and never executes its queued requests,
because it may be called in the middle of a post.  Instead it notes the queue pair in
`Port.disconnected` or `Port.stalled` for the next poll.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack, is_peer_gone
from trio_smc.host.private_directory import is_same_user
from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft.messages import (
    DOORBELL,
    DOORBELL_READ_SIZE,
    Doorbell,
    Hello,
    Message,
    Register,
    Revoke,
    Send,
    Waiting,
    close_all,
    decode_untrusted,
    open_doorbell_untrusted,
    take_doorbell,
)
from trio_smc.rnic.soft.packets import PacketReceiver, PacketSender
from trio_smc.rnic.soft.port import Port, PortUser
from trio_smc.rnic.soft.regions import PeerRegions
from trio_smc.rnic.soft.ring import RING_SIZE, SendRing, Sent, no_doorbell

__all__ = [
    "Peer",
    "PeerSockets",
]


_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_NO_WAIT: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MAX_PENDING: Final = 4
"""Hellos that one queue pair keeps until it goes to RTR.  Chosen: only the peer's is needed."""
_MAX_POSTPONED: Final = 8
"""Messages with descriptors that are kept while this process lacks resources.  Chosen: a peer has
few regions before its first message."""
_MAX_RECEIVED: Final = 64
"""Messages of one peer that are handled in one call.  Chosen; no measurement is recorded."""


class Peer:
    """The peer's queue pair, with the ring and the doorbell that came with its Hello."""

    __slots__ = ("_pipe", "hello", "regions", "ring")

    def __init__(self, hello: Hello, ring: SendRing, regions: PeerRegions, pipe: int) -> None:
        self.hello: Hello = hello
        self.ring: SendRing = ring
        self.regions: PeerRegions = regions
        self._pipe = pipe  # the peer's doorbell; -1: a packet rings, or there is no doorbell

    @classmethod
    def map_untrusted(
        cls,
        rnic: Port,
        hello: Hello,
        ring_fd: int,
        doorbell_fd: int | None,
        send_socket: socket.socket | None,
        packets: PeerSockets | None,
    ) -> Peer:
        """Map the ring that came with a Hello, and open its doorbell.

        The caller still closes the descriptors.  ``packets``: the sockets that messages pass; None:
        they pass the ring.

        Raises:
          ProtocolError: a descriptor is not a ring or a doorbell.
          OSError: this process lacks memory or address space.
        """
        memory = PeerMemory.map_untrusted(ring_fd, RING_SIZE)
        pipe = -1
        doorbell: Callable[[], object] = no_doorbell
        try:
            if doorbell_fd is not None:
                pipe = open_doorbell_untrusted(doorbell_fd)
                doorbell = partial(os.write, pipe, DOORBELL)
        except ProtocolError:
            memory.close()
            raise
        except OSError:
            pass  # a packet on the socket rings instead
        if pipe < 0 and send_socket is not None:
            doorbell = partial(send_socket.send, DOORBELL, _NO_WAIT)
        retry = partial(_retry_doorbell, rnic)
        ring = (
            SendRing(memory, doorbell, retry)
            if packets is None
            else PacketSender(memory, doorbell, retry, packets)
        )
        return cls(hello, ring, PeerRegions(ring.keys, rnic.intake.unmapper.run), pipe)

    def close(self) -> None:
        """Unmap and close everything.  Idempotent."""
        self.ring.close()
        self.regions.close()
        self.close_doorbell()

    def close_doorbell(self) -> None:
        """Stop ringing the peer.  Idempotent."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            self.ring.remove_doorbell()
            os.close(pipe)


def _retry_doorbell(rnic: Port, ring: SendRing, problem: OSError) -> None:
    """Ring again soon, if the doorbell could not be rung for lack of memory."""
    if is_lack(problem) and not isinstance(problem, BlockingIOError):
        rnic.retry_later(ring.ring_doorbell)


class SocketsOwner(PortUser, Protocol):
    """The queue pair, as its sockets see it."""

    def on_hello(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Handle the Hello of a peer."""

    def receive_packets(self) -> None:
        """From now on receive messages as packets, and not in the ring."""


class PeerSockets:
    """The sockets of one queue pair.

    Attributes:
      peer: the peer's queue pair; None before its Hello came, and after the end.
      unsent: messages that the socket had no room for, with copies of their descriptors, because a
        region may be closed before its message is sent.  Posted sends wait until this is empty, so
        that no send overtakes the announcement of a memory region.
      has_unread: messages of the peer may be unread.
      lacks_resources: this process lacks the descriptors, memory or address space for the next
        message.  Until a retry, which comes soon, only what would be in a ring is read.
    """

    __slots__ = (
        "_doorbell", "_owner", "_pending", "_postponed", "_receive_socket", "_rnic",
        "_send_socket", "has_unread", "lacks_resources", "peer", "unsent",
    )  # fmt: skip

    def __init__(self, rnic: Port, owner: SocketsOwner) -> None:
        self.peer: Peer | None = None
        self.unsent: deque[tuple[Message, list[int]]] = deque()
        self.has_unread: bool = False
        self.lacks_resources: bool = False
        # Messages that were read, but not handled for lack of resources.
        self._postponed: deque[tuple[Message, list[int]]] = deque()
        self._rnic = rnic
        self._owner = owner
        self._send_socket: socket.socket | None = None
        self._receive_socket: socket.socket | None = None
        self._doorbell: Doorbell | None = None
        # Peers whose Hello came before this side went to RTR.
        self._pending: list[tuple[Hello, socket.socket, list[int]]] = []

    def dial(self, name: tuple[bytes, int]) -> None:
        """Connect to the RNIC of the peer, unless the peer has connected already.

        Args:
          name: the peer's GID and queue pair number.

        Raises:
          RnicError: the RNIC cannot be reached.
        """
        for hello, sock, _ in self._pending:
            if (hello.gid, hello.qp_num) == name:
                self._send_socket = sock
                break
        else:
            self._send_socket = self._rnic.dial(name[0])
        self._rnic.watch_peer(self._send_socket, self._on_events)

    def send_hello(self, hello: Hello, ring: int) -> None:
        """Send Hello to the peer; ``ring``: a descriptor of the receive ring."""
        doorbell = None
        sock = self._send_socket
        if not self._rnic.sends_packets and sock is not None and is_same_user(sock):
            doorbell = self._doorbell = self._rnic.add_doorbell(self._on_doorbell)
        if doorbell is None:
            self.send(hello, (ring,))
            return
        try:
            self.send(hello, (ring, doorbell.write_fd))
        finally:
            doorbell.close_write_end()

    def send(self, message: Message, fds: tuple[int, ...]) -> None:
        """Send a message as soon as the socket has room; no-op without a socket.

        Raises:
          OSError: a message with descriptors cannot be sent for lack of resources, such as too
            many descriptors in flight (ETOOMANYREFS); the peer will never receive it.
        """
        sock = self._send_socket
        if sock is None:
            return
        if not self.unsent:
            try:
                if self._send(message, fds):
                    return
            except OSError:
                if fds:
                    raise
                self._rnic.retry_later(self._send_again)
        kept: list[int] = []
        try:
            kept.extend(map(os.dup, fds))
        except OSError:
            close_all(kept)
            raise
        self.unsent.append((message, kept))
        self._rnic.watch_writable(sock, wanted=True)

    def flush(self) -> None:
        """Send the messages in `unsent` that the socket has room for."""
        unsent = self.unsent
        while unsent:
            message, kept = unsent[0]
            try:
                if not self._send(message, kept):
                    return
            except OSError:
                if isinstance(message, Revoke):
                    self._rnic.retry_later(self._send_again)
                    return
                if isinstance(message, Hello):
                    self._rnic.disconnected.append(self._owner)  # there will be no connection
                    return
                # Skip this message: a retry would delay all messages behind it.  The peer refuses
                # a region that was not announced (`QueuePair.can_reach`).
            unsent.popleft()
            close_all(kept)
        if self._send_socket is not None:
            self._rnic.watch_writable(self._send_socket, wanted=False)

    def _send_again(self) -> None:
        if self.unsent and self._send_socket is not None:
            self.flush()
            self._push_owner()  # requests may have waited for `unsent`

    def _send(self, message: Message, fds: Sequence[int]) -> bool:
        """Send a message.  If the peer has gone, note that for the next poll.

        Returns:
          False: the socket has no room, or the peer has gone.

        Raises:
          OSError: the message cannot be sent for another reason, such as a lack of resources.
        """
        assert self._send_socket is not None
        try:
            socket.send_fds(self._send_socket, [message.encode()], fds, _NO_WAIT)
        except BlockingIOError:
            return False
        except OSError as problem:
            if not is_peer_gone(problem):
                raise
            self._rnic.disconnected.append(self._owner)
            return False
        return True

    def send_packet(self, message: Message) -> int:
        """Send a message of the queue pair without waiting.

        Returns:
          `Sent.DONE`.  `Sent.NOT_READY`: the socket has no room, and the queue pair is pushed when
          there is some; or the peer receives nothing any more, which the next poll handles.
          `Sent.GONE`: there is no socket.
        """
        sock = self._send_socket
        if sock is None:
            return Sent.GONE
        try:
            sock.send(message.encode(), _NO_WAIT)
        except BlockingIOError:
            self._rnic.watch_writable(sock, wanted=True)
            return Sent.NOT_READY
        except OSError as problem:
            if is_peer_gone(problem):
                self._rnic.disconnected.append(self._owner)
            else:
                self._rnic.retry_later(self._push_owner)
            return Sent.NOT_READY
        return Sent.DONE

    def _push_owner(self) -> None:
        self._rnic.stalled[self._owner] = None

    def end_receiving(self) -> None:
        """Make all later sends of the peer fail; packets that are there can still be read."""
        sock = self._receive_socket or self._send_socket
        if sock is not None:
            with contextlib.suppress(OSError):  # the peer has closed it
                sock.shutdown(socket.SHUT_RD)

    def receive(self) -> None:
        """Read and handle at most `_MAX_RECEIVED` messages of the peer; the rest follows soon."""
        if self.lacks_resources:
            self._receive_packets(self._receive_socket or self._send_socket)
            return
        self.has_unread = False
        intake = self._rnic.intake
        for _ in range(_MAX_RECEIVED):
            sock = self._receive_socket or self._send_socket
            if sock is None:
                return
            message: Message | None = None
            fds: list[int] = []
            try:
                if self._postponed:
                    message, fds = self._postponed.popleft()
                else:
                    packet = intake.receive(sock)
                    if packet is None:
                        return
                    data, fds = packet
                    if data == DOORBELL:
                        continue
                    if not data:
                        raise ProtocolError("the peer's queue pair has ended")
                    message = decode_untrusted(data, len(fds))
                self._on_message_untrusted(message, fds)
            except ProtocolError:
                intake.close_fds(fds, sock)
                self._rnic.disconnected.append(self._owner)
                return
            except OSError:
                if message is not None:
                    self._postponed.appendleft((message, fds))
                self._wait_for_resources()
                self._receive_packets(sock)
                return
            intake.close_fds(fds, sock, mapped=isinstance(message, Register))
            if self._is_short_of_resources():
                self._receive_packets(sock)
                return
        self.has_unread = True
        self._rnic.call_at_service(self._receive_more)

    def _receive_packets(self, sock: socket.socket | None) -> None:
        """Read the messages behind one that waits for resources, as from a ring.

        By them the peer finds out that this side cannot reach it (`QueuePair.can_reach`).
        """
        if sock is None or not isinstance(self._owner.ring, PacketReceiver):
            return
        intake = self._rnic.intake
        for _ in range(_MAX_RECEIVED):
            if len(self._postponed) >= _MAX_POSTPONED:
                self._watch_readable(wanted=False)
                return
            try:
                packet = intake.receive(sock)
            except OSError:  # the packet stays in the socket
                self._watch_readable(wanted=False)
                return
            if packet is None:
                return
            data, fds = packet
            try:
                if not data:
                    raise ProtocolError("the peer's queue pair has ended")
                if data == DOORBELL:
                    continue
                message = decode_untrusted(data, len(fds))
                if isinstance(message, Send | Waiting):
                    self._on_packet_untrusted(message)
                else:
                    self._postponed.append((message, fds))
            except ProtocolError:
                intake.close_fds(fds, sock)
                self._rnic.disconnected.append(self._owner)
                return

    def _wait_for_resources(self) -> None:
        """Stop reading, or read only messages behind the one that waits; and retry soon."""
        self.lacks_resources = self.has_unread = True
        if not isinstance(self._owner.ring, PacketReceiver):
            self._watch_readable(wanted=False)
        self._rnic.retry_later(self._retry_receive)

    def _retry_receive(self) -> None:
        if not self.lacks_resources:
            return
        self.lacks_resources = False
        self._watch_readable(wanted=True)
        if self._owner.ring.interrupt_mode:
            # One of the unread packets may be a doorbell.
            self._rnic.resume_polling(self._owner.ring)
        if self._pending:
            self.offer_pending()
        self._receive_more()

    def _watch_readable(self, *, wanted: bool) -> None:
        for sock in {self._send_socket, self._receive_socket}:
            if sock is not None:
                self._rnic.watch_readable(sock, wanted=wanted)

    def _receive_more(self) -> None:
        self.receive()
        self._push_owner()  # requests may have waited for these messages

    def keep_pending(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Keep a Hello that came before this side went to RTR; refuse it if there are too many."""
        if len(self._pending) < _MAX_PENDING:
            self._pending.append((hello, sock, fds))
        else:
            self._rnic.intake.discard(sock)
            self._rnic.intake.close_fds(fds)

    def offer_pending(self) -> None:
        """Pass the kept Hellos to the queue pair again."""
        pending, self._pending = self._pending, []
        for hello, sock, fds in pending:
            self._owner.on_hello(hello, sock, fds)

    def accept(self, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """Map the memory of the peer that this queue pair is connected to, or refuse the peer.

        If this process lacks resources, the Hello is kept for a retry.
        """
        intake = self._rnic.intake
        packets = hello.packets or self._rnic.sends_packets
        try:
            if self._receive_socket is not None:
                raise ProtocolError("a second Hello of the same queue pair")
            # If this side has no doorbell pipe, it does not use the peer's either, to save the
            # descriptor.
            has_pipe = len(fds) > 1 and self._doorbell is not None
            peer = Peer.map_untrusted(
                self._rnic,
                hello,
                fds[0],
                fds[1] if has_pipe and not packets else None,
                self._send_socket,
                self if packets else None,
            )
        except ProtocolError:
            intake.close_fds(fds, sock)
            if sock is self._send_socket:
                self._rnic.disconnected.append(self._owner)
            else:
                intake.discard(sock)
            return
        except OSError:
            if packets:
                self._owner.receive_packets()
            self._keep_for_retry(hello, sock, fds)
            return
        if sock is not self._send_socket:
            try:
                self._rnic.watch_peer(sock, self._on_events)
            except OSError:
                peer.close()
                self._keep_for_retry(hello, sock, fds)
                return
        intake.close_fds(fds, sock)
        if packets:
            self._owner.receive_packets()
        self.peer = peer
        self._receive_socket = sock
        self.receive()

    def _keep_for_retry(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        kept = fds.copy()
        fds.clear()  # so that the caller does not close them
        if sock is self._send_socket:
            self._pending.append((hello, sock, kept))
        else:
            self.keep_pending(hello, sock, kept)
        self._wait_for_resources()

    def close(self, *, quietly: bool) -> None:
        """Close the sockets and unmap the peer's memory.  Idempotent.

        Args:
          quietly: leave the sockets open for now, so that the peer does not notice.
        """
        intake = self._rnic.intake
        dialled = self._send_socket
        self._rnic.close_peer_socket(dialled, quietly=quietly)
        if self._receive_socket is not dialled:
            self._rnic.close_peer_socket(self._receive_socket, quietly=quietly)
        self._send_socket = self._receive_socket = None
        self.lacks_resources = False
        for _, kept in self._postponed:
            intake.close_fds(kept)
        self._postponed.clear()
        if self._doorbell is not None:
            self._rnic.remove_doorbell(self._doorbell)
            self._doorbell = None
        for _, kept in self.unsent:
            close_all(kept)
        self.unsent.clear()
        self.has_unread = False
        if self.peer is not None:
            self.peer.close()
            self.peer = None
        for _, sock, fds in self._pending:
            if sock is not dialled:
                intake.discard(sock)
            intake.close_fds(fds)
        self._pending.clear()

    def has_ended(self) -> bool:
        """True if the peer has closed its end of a socket, or the kernel has done so for it."""
        ends = select.poll()
        for sock in (self._send_socket, self._receive_socket):
            if sock is not None:
                ends.register(sock, 0)  # POLLHUP and POLLERR are always reported
        return bool(ends.poll(0))

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        if self._doorbell is not None:
            self._doorbell.close()
        if self.peer is not None:
            self.peer.close_doorbell()
        for sock in (
            self._send_socket,
            self._receive_socket,
            *(sock for _, sock, _ in self._pending),
        ):
            if sock is not None:
                sock.close()

    def _on_doorbell(self) -> bool:
        """Read the doorbell; True if it was rung."""
        doorbell = self._doorbell
        if doorbell is None:
            return False
        try:
            os.read(doorbell.fd, DOORBELL_READ_SIZE)
        except BlockingIOError:
            return False
        if self._owner.ring.interrupt_mode:
            self._rnic.resume_polling(self._owner.ring)
        return True

    def _on_events(self, events: int) -> None:
        if self._owner.ring.interrupt_mode:
            self._rnic.resume_polling(self._owner.ring)
        if events == select.EPOLLIN and self._took_doorbell():
            return
        self.receive()
        if events & _ENDED:
            self._rnic.disconnected.append(self._owner)
        elif self.unsent or events & select.EPOLLOUT:
            self.flush()
            self._push_owner()

    def _took_doorbell(self) -> bool:
        """Read a doorbell if nothing else is unread, the usual case; False: call `receive`."""
        sock = self._receive_socket or self._send_socket
        try:
            is_alone = not self.has_unread and not self.unsent
            return sock is not None and is_alone and take_doorbell(sock)
        except OSError:
            return False

    def _on_message_untrusted(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Hello):
            self._on_hello_untrusted(message, fds)
        elif self.peer is None:
            raise ProtocolError("the first message of a queue pair is not Hello")
        elif isinstance(message, Register):
            self.peer.regions.add_untrusted(message, fds[0])
        elif isinstance(message, Revoke):
            self.peer.regions.discard(message.rkey)
        else:
            self._on_packet_untrusted(message)

    def _on_packet_untrusted(self, message: Send | Waiting) -> None:
        ring = self._owner.ring
        if not isinstance(ring, PacketReceiver):
            raise ProtocolError("a message outside the ring")
        if isinstance(message, Send):
            ring.add_untrusted(message)
            if ring.interrupt_mode:
                self._rnic.resume_polling(ring)
        elif ring.must_ring() and self.peer is not None:
            self.peer.ring.ring_doorbell()

    def _on_hello_untrusted(self, hello: Hello, fds: list[int]) -> None:
        """Handle the Hello of a peer that was dialled."""
        if self._receive_socket is not None or self._send_socket is None:
            raise ProtocolError("a second Hello")
        self._owner.on_hello(hello, self._send_socket, fds)
        if not self._is_connected() and not self._is_short_of_resources():
            raise ProtocolError("a Hello of another queue pair")

    # Methods, because mypy would assume that `on_hello` does not change the attributes.

    def _is_connected(self) -> bool:
        return self._receive_socket is not None

    def _is_short_of_resources(self) -> bool:
        return self.lacks_resources
