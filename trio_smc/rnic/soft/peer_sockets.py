"""What a software queue pair says to its peer and hears of it: the slow path beside the rings.

A `PeerSockets` holds the two sockets of `messages`: this side sends on one
and receives on the other.  Mostly that is one, which the first of the two has dialled.  Where
both belong to one user each may have a doorbell beside it, which the other one rings.  Nothing here
changes the state of the queue pair or runs its queue, because all of it can happen in the middle of
a post; what is found is noted with the RNIC (`Port.disconnected`, `Port.stalled`)
for the next poll.
"""

from __future__ import annotations

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
    close_all,
    decode_untrusted,
    open_doorbell_untrusted,
    take_doorbell,
)
from trio_smc.rnic.soft.port import Port, PortUser
from trio_smc.rnic.soft.regions import PeerRegions
from trio_smc.rnic.soft.ring import RING_SIZE, SendRing, no_doorbell

__all__ = [
    "Peer",
    "PeerSockets",
]


_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_NO_WAIT: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MAX_PENDING: Final = 4
_MAX_RECEIVED: Final = 64
"""Messages of one peer that are taken in at a time."""


class Peer:
    """What the peer's queue pair gave us to reach it with."""

    __slots__ = ("_doorbell_fd", "hello", "regions", "ring")

    def __init__(self, hello: Hello, ring: SendRing, regions: PeerRegions, rope: int) -> None:
        self.hello: Hello = hello
        self.ring: SendRing = ring
        self.regions: PeerRegions = regions
        self._doorbell_fd = rope  # what `ring` rings with; -1: it has a socket for that, or nothing

    @classmethod
    def map_untrusted(
        cls,
        rnic: Port,
        hello: Hello,
        ring_fd: int,
        doorbell_fd: int | None,
        speaker: socket.socket | None,
    ) -> Peer:
        """Map what came with a Hello.  The descriptors stay the caller's.

        Raises:
          ProtocolError: it is not what it should be.
          OSError: this process lacks memory or address space.
        """
        memory = PeerMemory.map_untrusted(ring_fd, RING_SIZE)
        rope = -1
        doorbell: Callable[[], object] = no_doorbell
        try:
            if doorbell_fd is not None:
                rope = open_doorbell_untrusted(doorbell_fd)
                doorbell = partial(os.write, rope, DOORBELL)
        except ProtocolError:
            memory.close()
            raise
        except OSError:
            pass  # the socket does
        if rope < 0 and speaker is not None:
            doorbell = partial(speaker.send, DOORBELL, _NO_WAIT)
        ring = SendRing(memory, doorbell, partial(_retry_doorbell, rnic))
        return cls(hello, ring, PeerRegions(ring.keys, rnic.intake.unmapper.run), rope)

    def close(self) -> None:
        """Unmap and close everything.  Idempotent."""
        self.ring.close()
        self.regions.close()
        self.close_doorbell()

    def close_doorbell(self) -> None:
        """Ring no more.  Idempotent."""
        rope, self._doorbell_fd = self._doorbell_fd, -1
        if rope >= 0:
            self.ring.remove_doorbell()
            os.close(rope)


def _retry_doorbell(rnic: Port, ring: SendRing, problem: OSError) -> None:
    """Ring again soon if only a lack of memory kept a doorbell from being rung."""
    if is_lack(problem) and not isinstance(problem, BlockingIOError):
        rnic.retry_later(ring.ring_doorbell)


class SocketsOwner(PortUser, Protocol):
    """The queue pair, for its sockets."""

    def on_hello(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """A peer said Hello."""


class PeerSockets:
    """The sockets of one queue pair.

    Attributes:
      peer: what the peer's Hello brought; None before it came and after the end.
      unsent: announcements that the socket had no room for, with descriptors of their own: what
        they are about may be closed before they are out.  Sends wait until then, so that no
        message overtakes the memory region it is about.
      behind: the peer has said more than was taken in yet.
      lacking: the next of that needs descriptors, memory or address space that this process lacks.
        It is tried again soon; until then nothing is read.
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
        # A message that was taken, but could not be taken in for that reason.
        self._postponed: tuple[Message, list[int]] | None = None
        self._rnic = rnic
        self._owner = owner
        self._send_socket: socket.socket | None = None
        self._receive_socket: socket.socket | None = None
        self._doorbell: Doorbell | None = None
        # Who said Hello before this side went to RTR.
        self._pending: list[tuple[Hello, socket.socket, list[int]]] = []

    def dial(self, name: tuple[bytes, int]) -> None:
        """Dial the RNIC of the peer of that GID and queue pair number, to speak to it, if the peer
        has not dialled already.  Raises RnicError."""
        for hello, sock, _ in self._pending:
            if (hello.gid, hello.qp_num) == name:
                self._send_socket = sock
                break
        else:
            self._send_socket = self._rnic.dial(name[0])
        self._rnic.watch_peer(self._send_socket, self._on_events)

    def send_hello(self, hello: Hello, ring: int) -> None:
        """Say Hello to the peer; ``ring``: a descriptor of the receive ring."""
        doorbell = None
        if self._send_socket is not None and is_same_user(self._send_socket):
            doorbell = self._doorbell = self._rnic.add_doorbell(self._on_doorbell)
        if doorbell is None:
            self.send(hello, (ring,))
            return
        try:
            self.send(hello, (ring, doorbell.write_fd))
        finally:
            doorbell.close_write_end()

    def send(self, message: Message, fds: tuple[int, ...]) -> None:
        """Tell the peer, as soon as the socket takes it; without a socket nothing happens.

        Raises OSError: a message with descriptors cannot be sent for lack of resources, such as
        too many descriptors in flight (ETOOMANYREFS); the peer will never get it.
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
        """Send what is unsent, as far as the socket takes it."""
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
                # Waiting would hold up everything else.  The peer refuses a region that it was not
                # told of (`QueuePair.can_reach`).
            unsent.popleft()
            close_all(kept)
        if self._send_socket is not None:
            self._rnic.watch_writable(self._send_socket, wanted=False)

    def _send_again(self) -> None:
        if self.unsent and self._send_socket is not None:
            self.flush()
            self._rnic.stalled[self._owner] = None  # its requests may wait for that

    def _send(self, message: Message, fds: Sequence[int]) -> bool:
        """True if the socket took it; if the peer is gone, that is noted.

        Raises OSError: it cannot be sent for another reason, such as a lack of resources.
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

    def receive(self) -> None:
        """Take in the peer's announcements; of very many only some, and the rest at a later
        look."""
        if self.lacks_resources:
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
                if self._postponed is not None:
                    (message, fds), self._postponed = self._postponed, None
                else:
                    packet = intake.receive(sock)
                    if packet is None:
                        return
                    data, fds = packet
                    if data == DOORBELL:
                        continue
                    if not data:
                        raise ProtocolError("the peer's queue pair ended")
                    message = decode_untrusted(data, len(fds))
                self._on_message_untrusted(message, fds)
            except ProtocolError:
                intake.close_fds(fds, sock)
                self._rnic.disconnected.append(self._owner)
                return
            except OSError:
                if message is not None:
                    self._postponed = message, fds
                self._wait_for_resources()
                return
            intake.close_fds(fds, sock, mapped=isinstance(message, Register))
            if self._is_short_of_resources():
                return
        self.has_unread = True
        self._rnic.call_at_service(self._receive_more)

    def _wait_for_resources(self) -> None:
        """Read nothing more until what is there can be taken in; try again soon."""
        self.lacks_resources = self.has_unread = True
        self._watch_readable(wanted=False)
        self._rnic.retry_later(self._retry_receive)

    def _retry_receive(self) -> None:
        if not self.lacks_resources:
            return
        self.lacks_resources = False
        self._watch_readable(wanted=True)
        if self._owner.ring.interrupt_mode:
            self._rnic.resume_polling(self._owner.ring)  # a doorbell may be among what was not read
        if self._pending:
            self.offer_pending()
        self._receive_more()

    def _watch_readable(self, *, wanted: bool) -> None:
        for sock in {self._send_socket, self._receive_socket}:
            if sock is not None:
                self._rnic.watch_readable(sock, wanted=wanted)

    def _receive_more(self) -> None:
        self.receive()
        self._rnic.stalled[self._owner] = None  # its requests may wait for what came

    def keep_early(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Somebody said Hello too early: keep it for `offer_pending`, or refuse it."""
        if len(self._pending) < _MAX_PENDING:
            self._pending.append((hello, sock, fds))
        else:
            self._rnic.intake.discard(sock)
            self._rnic.intake.close_fds(fds)

    def offer_pending(self) -> None:
        """Look again at those who were too early."""
        pending, self._pending = self._pending, []
        for hello, sock, fds in pending:
            self._owner.on_hello(hello, sock, fds)

    def accept(self, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """The peer itself said Hello: get everything needed to reach it, or refuse it.

        For lack of resources it is kept, to be tried again.
        """
        intake = self._rnic.intake
        try:
            if self._receive_socket is not None:
                raise ProtocolError("a second Hello of the same queue pair")
            # Whoever has no doorbell for this peer has no descriptor to spare for its rope either.
            rope = fds[1] if len(fds) > 1 and self._doorbell is not None else None
            peer = Peer.map_untrusted(self._rnic, hello, fds[0], rope, self._send_socket)
        except ProtocolError:
            intake.close_fds(fds, sock)
            if sock is self._send_socket:
                self._rnic.disconnected.append(self._owner)
            else:
                intake.discard(sock)
            return
        except OSError:
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
        self.peer = peer
        self._receive_socket = sock
        self.receive()

    def _keep_for_retry(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        kept = fds.copy()
        fds.clear()  # else the caller closes them
        if sock is self._send_socket:
            self._pending.append((hello, sock, kept))
        else:
            self.keep_early(hello, sock, kept)
        self._wait_for_resources()

    def close(self, *, quietly: bool) -> None:
        """Close the sockets, which tells the peer unless ``quietly``, and unmap what it gave.

        Idempotent.
        """
        intake = self._rnic.intake
        dialled = self._send_socket
        self._rnic.close_peer_socket(dialled, quietly=quietly)
        if self._receive_socket is not dialled:
            self._rnic.close_peer_socket(self._receive_socket, quietly=quietly)
        self._send_socket = self._receive_socket = None
        self.lacks_resources = False
        if self._postponed is not None:
            intake.close_fds(self._postponed[1])
            self._postponed = None
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
        """Whether the doorbell was rung."""
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
        elif self.unsent:
            self.flush()
            self._rnic.stalled[self._owner] = None

    def _took_doorbell(self) -> bool:
        """The usual case: take a doorbell behind which there is nothing; False: look closer."""
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
            raise ProtocolError("a queue pair that does not say Hello")
        elif isinstance(message, Register):
            self.peer.regions.add_untrusted(message, fds[0])
        else:
            self.peer.regions.discard(message.rkey)

    def _on_hello_untrusted(self, hello: Hello, fds: list[int]) -> None:
        """The answer of a peer that was dialled."""
        if self._receive_socket is not None or self._send_socket is None:
            raise ProtocolError("a second Hello")
        self._owner.on_hello(hello, self._send_socket, fds)
        if not self._is_connected() and not self._is_short_of_resources():
            raise ProtocolError("somebody else says Hello")

    # A type checker goes on believing what it saw before `offer` called `accept`.

    def _is_connected(self) -> bool:
        return self._receive_socket is not None

    def _is_short_of_resources(self) -> bool:
        return self.lacks_resources
