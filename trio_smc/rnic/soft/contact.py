"""What a software queue pair says to its peer and hears of it: the slow path beside the rings.

A `Contact` holds the two sockets of `messages`: the *speaker*, which this side dialled, and the
*hearer*, which the peer dialled.  Nothing here changes the state of the queue pair or runs its
queue, because all of it can happen in the middle of a post; what is found is noted with the RNIC
(`Port.gone`, `Port.stalled`) for the next poll.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.rnic.memory import PeerMemory
from trio_smc.rnic.soft.messages import (
    Hello,
    Message,
    Register,
    close_all,
    decode_untrusted,
    receive,
)
from trio_smc.rnic.soft.port import Port, PortUser
from trio_smc.rnic.soft.regions import KEY_PAGE_SIZE, PeerRegions
from trio_smc.rnic.soft.ring import RING_SIZE, SendRing, open_doorbell_untrusted

__all__ = [
    "Contact",
    "Peer",
]


_EDGES: Final = select.EPOLLIN | select.EPOLLET
_BOTH_EDGES: Final = _EDGES | select.EPOLLOUT
_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_MOST_PENDING: Final = 4
_MOST_HEARD: Final = 64
"""Messages of one peer that are taken in at a time."""


class Peer:
    """What the peer's queue pair gave us to reach it with."""

    __slots__ = ("hello", "regions", "ring")

    def __init__(self, hello: Hello, ring: SendRing, regions: PeerRegions) -> None:
        self.hello = hello
        self.ring = ring
        self.regions = regions

    @classmethod
    def map_untrusted(cls, hello: Hello, fds: list[int]) -> Peer:
        """Map what came with a Hello.  The descriptors stay the caller's.  ProtocolError."""
        with contextlib.ExitStack() as undo:
            ring = PeerMemory.map_untrusted(fds[0], RING_SIZE)
            undo.callback(ring.close)
            keys = PeerMemory.map_untrusted(fds[1], KEY_PAGE_SIZE)
            undo.callback(keys.close)
            doorbell = open_doorbell_untrusted(fds[2])
            undo.pop_all()
        return cls(hello, SendRing(ring, doorbell), PeerRegions(keys))

    def close(self) -> None:
        """Unmap everything.  Idempotent."""
        self.ring.close()
        self.regions.close()


class ContactOwner(PortUser, Protocol):
    """The queue pair, for its sockets."""

    def offer(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """A peer said Hello."""


class Contact:
    """The sockets of one queue pair.

    Attributes:
      peer: what the peer's Hello brought; None before it came and after the end.
      unsaid: announcements that the socket had no room for, with descriptors of their own: what
        they are about may be closed before they are out.  Sends wait until then, so that no
        message overtakes the memory region it is about.
      behind: the peer has said more than was taken in yet.
    """

    __slots__ = ("_hearer", "_owner", "_pending", "_rnic", "_speaker", "behind", "peer", "unsaid")

    def __init__(self, rnic: Port, owner: ContactOwner) -> None:
        self.peer: Peer | None = None
        self.unsaid: deque[tuple[Message, list[int]]] = deque()
        self.behind = False
        self._rnic = rnic
        self._owner = owner
        self._speaker: socket.socket | None = None
        self._hearer: socket.socket | None = None
        # Who said Hello before this side went to RTR.
        self._pending: list[tuple[Hello, socket.socket, list[int]]] = []

    def dial(self, gid: bytes) -> None:
        """Dial the peer's RNIC, to speak to it.  Raises RnicError."""
        self._speaker = self._rnic.dial(gid)
        self._rnic.watch(self._speaker.fileno(), _BOTH_EDGES, self._on_speaker)

    def say(self, message: Message, fds: tuple[int, ...]) -> None:
        """Tell the peer, as soon as the socket takes it; without a socket nothing happens."""
        if self._speaker is None or (not self.unsaid and self._send(message, fds)):
            return
        kept: list[int] = []
        self.unsaid.append((message, kept))
        try:
            kept.extend(map(os.dup, fds))
        except OSError:  # out of descriptors
            self._rnic.gone.append(self._owner)

    def speak(self) -> None:
        """Send what is unsaid, as far as the socket takes it."""
        unsaid = self.unsaid
        while unsaid and self._send(*unsaid[0]):
            close_all(unsaid.popleft()[1])

    def _send(self, message: Message, fds: Sequence[int]) -> bool:
        """Whether the socket took it."""
        if self._speaker is None:
            return False
        try:
            socket.send_fds(self._speaker, [message.encode()], fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            self._rnic.gone.append(self._owner)
            return False
        return True

    def hear(self) -> None:
        """Take in the peer's announcements; of very many only some, and the rest at a later
        look."""
        self.behind = False
        for _ in range(_MOST_HEARD):
            packet = None if self._hearer is None else receive(self._hearer)
            if packet is None:
                return
            data, fds = packet
            try:
                if not data:
                    raise ProtocolError("the peer's queue pair ended")
                self._on_message_untrusted(decode_untrusted(data, len(fds)), fds)
            except ProtocolError:
                self._rnic.gone.append(self._owner)
                return
            finally:
                close_all(fds)
        self.behind = True
        self._rnic.look_again(self._hear_on)

    def _hear_on(self) -> None:
        self.hear()
        self._rnic.stalled[self._owner] = None  # its requests may wait for what came

    def keep(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Somebody said Hello too early: keep it for `greet_pending`, or refuse it."""
        if len(self._pending) < _MOST_PENDING:
            self._pending.append((hello, sock, fds))
        else:
            sock.close()
            close_all(fds)

    def greet_pending(self) -> None:
        """Look again at those who were too early."""
        pending, self._pending = self._pending, []
        for hello, sock, fds in pending:
            self._owner.offer(hello, sock, fds)

    def accept(self, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """The peer itself said Hello: get everything needed to reach it, or refuse it."""
        try:
            if self._hearer is not None:
                raise ProtocolError("a second Hello of the same queue pair")
            self.peer = Peer.map_untrusted(hello, fds)
        except ProtocolError:
            sock.close()
            return
        finally:
            close_all(fds)
        self._hearer = sock
        self._rnic.watch(sock.fileno(), _EDGES, self._on_hearer)
        self.hear()

    def end(self, *, quietly: bool) -> None:
        """Close the sockets, which tells the peer unless ``quietly``, and unmap what it gave.

        Idempotent.
        """
        self._rnic.hang_up(self._speaker, quietly=quietly)
        self._rnic.hang_up(self._hearer, quietly=quietly)
        self._speaker = self._hearer = None
        for _, kept in self.unsaid:
            close_all(kept)
        self.unsaid.clear()
        self.behind = False
        if self.peer is not None:
            self.peer.close()
            self.peer = None
        for _, sock, fds in self._pending:
            sock.close()
            close_all(fds)
        self._pending.clear()

    def abandon(self) -> None:
        """In a forked child: close this process's sockets and nothing else."""
        for sock in (self._speaker, self._hearer, *(sock for _, sock, _ in self._pending)):
            if sock is not None:
                sock.close()

    def _on_speaker(self, events: int) -> None:
        if events & _ENDED:
            self._rnic.gone.append(self._owner)
        elif self.unsaid:
            self.speak()
            self._rnic.stalled[self._owner] = None

    def _on_hearer(self, _events: int) -> None:
        self.hear()

    def _on_message_untrusted(self, message: Message, fds: list[int]) -> None:
        if self.peer is None:
            return
        if isinstance(message, Register):
            self.peer.regions.add_untrusted(message, fds[0])
        elif isinstance(message, Hello):
            raise ProtocolError("a second Hello")
        else:
            self.peer.regions.discard(message.rkey)
