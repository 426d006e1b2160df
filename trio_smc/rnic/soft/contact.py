"""What a software queue pair says to its peer and hears of it: the slow path beside the rings.

A `Contact` holds the two sockets of `messages`: this side says what it has to say on the *speaker*
and listens to the *hearer*.  Mostly that is one, which the first of the two has dialled.  Where
both belong to one user each may have a bell beside it, which the other one rings.  Nothing here
changes the state of the queue pair or runs its queue, because all of it can happen in the middle of
a post; what is found is noted with the RNIC (`Port.gone`, `Port.stalled`) for the next poll.
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
    BELL,
    RUNG_AT_MOST,
    Bell,
    Hello,
    Message,
    Register,
    Revoke,
    close_all,
    decode_untrusted,
    open_rope_untrusted,
    take_bell,
)
from trio_smc.rnic.soft.port import Port, PortUser
from trio_smc.rnic.soft.regions import PeerRegions
from trio_smc.rnic.soft.ring import RING_SIZE, SendRing, silent

__all__ = [
    "Contact",
    "Peer",
]


_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_AT_ONCE: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MOST_PENDING: Final = 4
_MOST_HEARD: Final = 64
"""Messages of one peer that are taken in at a time."""


class Peer:
    """What the peer's queue pair gave us to reach it with."""

    __slots__ = ("_rope", "hello", "regions", "ring")

    def __init__(self, hello: Hello, ring: SendRing, regions: PeerRegions, rope: int) -> None:
        self.hello: Hello = hello
        self.ring: SendRing = ring
        self.regions: PeerRegions = regions
        self._rope = rope  # what `ring` rings with; -1: it has a socket for that, or nothing

    @classmethod
    def map_untrusted(
        cls,
        rnic: Port,
        hello: Hello,
        ring_fd: int,
        rope_fd: int | None,
        speaker: socket.socket | None,
    ) -> Peer:
        """Map what came with a Hello.  The descriptors stay the caller's.

        Raises:
          ProtocolError: it is not what it should be.
          OSError: this process lacks memory or address space.
        """
        memory = PeerMemory.map_untrusted(ring_fd, RING_SIZE)
        rope = -1
        doorbell: Callable[[], object] = silent
        try:
            if rope_fd is not None:
                rope = open_rope_untrusted(rope_fd)
                doorbell = partial(os.write, rope, BELL)
        except ProtocolError:
            memory.close()
            raise
        except OSError:
            pass  # the socket does
        if rope < 0 and speaker is not None:
            doorbell = partial(speaker.send, BELL, _AT_ONCE)
        ring = SendRing(memory, doorbell, partial(_ring_later, rnic))
        return cls(hello, ring, PeerRegions(ring.keys, rnic.intake.unmapper.run), rope)

    def close(self) -> None:
        """Unmap and close everything.  Idempotent."""
        self.ring.close()
        self.regions.close()
        self.let_go()

    def let_go(self) -> None:
        """Ring no more.  Idempotent."""
        rope, self._rope = self._rope, -1
        if rope >= 0:
            self.ring.silence()
            os.close(rope)


def _ring_later(rnic: Port, ring: SendRing, problem: OSError) -> None:
    """Ring again soon if only a lack of memory kept a doorbell from being rung."""
    if is_lack(problem) and not isinstance(problem, BlockingIOError):
        rnic.retry_later(ring.ring)


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
      lacking: the next of that needs descriptors, memory or address space that this process lacks.
        It is tried again soon; until then nothing is read.
    """

    __slots__ = (
        "_bell", "_deferred", "_hearer", "_owner", "_pending", "_rnic", "_speaker", "behind",
        "lacking", "peer", "unsaid",
    )  # fmt: skip

    def __init__(self, rnic: Port, owner: ContactOwner) -> None:
        self.peer: Peer | None = None
        self.unsaid: deque[tuple[Message, list[int]]] = deque()
        self.behind: bool = False
        self.lacking: bool = False
        # A message that was taken, but could not be taken in for that reason.
        self._deferred: tuple[Message, list[int]] | None = None
        self._rnic = rnic
        self._owner = owner
        self._speaker: socket.socket | None = None
        self._hearer: socket.socket | None = None
        self._bell: Bell | None = None
        # Who said Hello before this side went to RTR.
        self._pending: list[tuple[Hello, socket.socket, list[int]]] = []

    def dial(self, name: tuple[bytes, int]) -> None:
        """Dial the RNIC of the peer of that GID and queue pair number, to speak to it, if the peer
        has not dialled already.  Raises RnicError."""
        for hello, sock, _ in self._pending:
            if (hello.gid, hello.qp_num) == name:
                self._speaker = sock
                break
        else:
            self._speaker = self._rnic.dial(name[0])
        self._rnic.watch_peer(self._speaker, self._on_events)

    def greet(self, hello: Hello, ring: int) -> None:
        """Say Hello to the peer; ``ring``: a descriptor of the receive ring."""
        bell = None
        if self._speaker is not None and is_same_user(self._speaker):
            bell = self._bell = self._rnic.hang_bell(self._on_bell)
        if bell is None:
            self.say(hello, (ring,))
            return
        try:
            self.say(hello, (ring, bell.rope))
        finally:
            bell.let_go()

    def say(self, message: Message, fds: tuple[int, ...]) -> None:
        """Tell the peer, as soon as the socket takes it; without a socket nothing happens.

        Raises OSError: a message with descriptors cannot be sent for lack of resources, such as
        too many descriptors in flight (ETOOMANYREFS); the peer will never get it.
        """
        sock = self._speaker
        if sock is None:
            return
        if not self.unsaid:
            try:
                if self._send(message, fds):
                    return
            except OSError:
                if fds:
                    raise
                self._rnic.retry_later(self._speak_again)
        kept: list[int] = []
        try:
            kept.extend(map(os.dup, fds))
        except OSError:
            close_all(kept)
            raise
        self.unsaid.append((message, kept))
        self._rnic.watch_room(sock, wanted=True)

    def speak(self) -> None:
        """Send what is unsaid, as far as the socket takes it."""
        unsaid = self.unsaid
        while unsaid:
            message, kept = unsaid[0]
            try:
                if not self._send(message, kept):
                    return
            except OSError:
                if isinstance(message, Revoke):
                    self._rnic.retry_later(self._speak_again)
                    return
                if isinstance(message, Hello):
                    self._rnic.gone.append(self._owner)  # there will be no connection
                    return
                # Waiting would hold up everything else.  The peer refuses a region that it was not
                # told of (`QueuePair.can_reach`).
            unsaid.popleft()
            close_all(kept)
        if self._speaker is not None:
            self._rnic.watch_room(self._speaker, wanted=False)

    def _speak_again(self) -> None:
        if self.unsaid and self._speaker is not None:
            self.speak()
            self._rnic.stalled[self._owner] = None  # its requests may wait for that

    def _send(self, message: Message, fds: Sequence[int]) -> bool:
        """True if the socket took it; if the peer is gone, that is noted.

        Raises OSError: it cannot be sent for another reason, such as a lack of resources.
        """
        assert self._speaker is not None
        try:
            socket.send_fds(self._speaker, [message.encode()], fds, _AT_ONCE)
        except BlockingIOError:
            return False
        except OSError as problem:
            if not is_peer_gone(problem):
                raise
            self._rnic.gone.append(self._owner)
            return False
        return True

    def hear(self) -> None:
        """Take in the peer's announcements; of very many only some, and the rest at a later
        look."""
        if self.lacking:
            return
        self.behind = False
        intake = self._rnic.intake
        for _ in range(_MOST_HEARD):
            sock = self._hearer or self._speaker
            if sock is None:
                return
            message: Message | None = None
            fds: list[int] = []
            try:
                if self._deferred is not None:
                    (message, fds), self._deferred = self._deferred, None
                else:
                    packet = intake.receive(sock)
                    if packet is None:
                        return
                    data, fds = packet
                    if data == BELL:
                        continue
                    if not data:
                        raise ProtocolError("the peer's queue pair ended")
                    message = decode_untrusted(data, len(fds))
                self._on_message_untrusted(message, fds)
            except ProtocolError:
                intake.close(fds, sock)
                self._rnic.gone.append(self._owner)
                return
            except OSError:
                if message is not None:
                    self._deferred = message, fds
                self._lack()
                return
            intake.close(fds, sock, mapped=isinstance(message, Register))
            if self._is_lacking():
                return
        self.behind = True
        self._rnic.look_again(self._hear_on)

    def _lack(self) -> None:
        """Read nothing more until what is there can be taken in; try again soon."""
        self.lacking = self.behind = True
        self._watch_readers(wanted=False)
        self._rnic.retry_later(self._try_again)

    def _try_again(self) -> None:
        if not self.lacking:
            return
        self.lacking = False
        self._watch_readers(wanted=True)
        if self._owner.ring.dozes:
            self._rnic.rouse(self._owner.ring)  # a doorbell may be among what was not read
        if self._pending:
            self.greet_pending()
        self._hear_on()

    def _watch_readers(self, *, wanted: bool) -> None:
        for sock in {self._speaker, self._hearer}:
            if sock is not None:
                self._rnic.watch_reader(sock, wanted=wanted)

    def _hear_on(self) -> None:
        self.hear()
        self._rnic.stalled[self._owner] = None  # its requests may wait for what came

    def keep(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        """Somebody said Hello too early: keep it for `greet_pending`, or refuse it."""
        if len(self._pending) < _MOST_PENDING:
            self._pending.append((hello, sock, fds))
        else:
            self._rnic.intake.discard(sock)
            self._rnic.intake.close(fds)

    def greet_pending(self) -> None:
        """Look again at those who were too early."""
        pending, self._pending = self._pending, []
        for hello, sock, fds in pending:
            self._owner.offer(hello, sock, fds)

    def accept(self, sock: socket.socket, hello: Hello, fds: list[int]) -> None:
        """The peer itself said Hello: get everything needed to reach it, or refuse it.

        For lack of resources it is kept, to be tried again.
        """
        intake = self._rnic.intake
        try:
            if self._hearer is not None:
                raise ProtocolError("a second Hello of the same queue pair")
            # Whoever has no bell for this peer has no descriptor to spare for its rope either.
            rope = fds[1] if len(fds) > 1 and self._bell is not None else None
            peer = Peer.map_untrusted(self._rnic, hello, fds[0], rope, self._speaker)
        except ProtocolError:
            intake.close(fds, sock)
            if sock is self._speaker:
                self._rnic.gone.append(self._owner)
            else:
                intake.discard(sock)
            return
        except OSError:
            self._wait_with(hello, sock, fds)
            return
        if sock is not self._speaker:
            try:
                self._rnic.watch_peer(sock, self._on_events)
            except OSError:
                peer.close()
                self._wait_with(hello, sock, fds)
                return
        intake.close(fds, sock)
        self.peer = peer
        self._hearer = sock
        self.hear()

    def _wait_with(self, hello: Hello, sock: socket.socket, fds: list[int]) -> None:
        kept = fds.copy()
        fds.clear()  # else the caller closes them
        if sock is self._speaker:
            self._pending.append((hello, sock, kept))
        else:
            self.keep(hello, sock, kept)
        self._lack()

    def end(self, *, quietly: bool) -> None:
        """Close the sockets, which tells the peer unless ``quietly``, and unmap what it gave.

        Idempotent.
        """
        intake = self._rnic.intake
        dialled = self._speaker
        self._rnic.hang_up(dialled, quietly=quietly)
        if self._hearer is not dialled:
            self._rnic.hang_up(self._hearer, quietly=quietly)
        self._speaker = self._hearer = None
        self.lacking = False
        if self._deferred is not None:
            intake.close(self._deferred[1])
            self._deferred = None
        if self._bell is not None:
            self._rnic.take_down(self._bell)
            self._bell = None
        for _, kept in self.unsaid:
            close_all(kept)
        self.unsaid.clear()
        self.behind = False
        if self.peer is not None:
            self.peer.close()
            self.peer = None
        for _, sock, fds in self._pending:
            if sock is not dialled:
                intake.discard(sock)
            intake.close(fds)
        self._pending.clear()

    def abandon(self) -> None:
        """In a forked child: close this process's descriptors and nothing else."""
        if self._bell is not None:
            self._bell.close()
        if self.peer is not None:
            self.peer.let_go()
        for sock in (self._speaker, self._hearer, *(sock for _, sock, _ in self._pending)):
            if sock is not None:
                sock.close()

    def _on_bell(self) -> bool:
        """Whether the bell was rung."""
        bell = self._bell
        if bell is None:
            return False
        try:
            os.read(bell.fd, RUNG_AT_MOST)
        except BlockingIOError:
            return False
        if self._owner.ring.dozes:
            self._rnic.rouse(self._owner.ring)
        return True

    def _on_events(self, events: int) -> None:
        if self._owner.ring.dozes:
            self._rnic.rouse(self._owner.ring)
        if events == select.EPOLLIN and self._is_bell():
            return
        self.hear()
        if events & _ENDED:
            self._rnic.gone.append(self._owner)
        elif self.unsaid:
            self.speak()
            self._rnic.stalled[self._owner] = None

    def _is_bell(self) -> bool:
        """The usual case: take a doorbell behind which there is nothing; False: look closer."""
        sock = self._hearer or self._speaker
        try:
            return sock is not None and not self.behind and not self.unsaid and take_bell(sock)
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
        if self._hearer is not None or self._speaker is None:
            raise ProtocolError("a second Hello")
        self._owner.offer(hello, self._speaker, fds)
        if not self._is_heard() and not self._is_lacking():
            raise ProtocolError("somebody else says Hello")

    # A type checker goes on believing what it saw before `offer` called `accept`.

    def _is_heard(self) -> bool:
        return self._hearer is not None

    def _is_lacking(self) -> bool:
        return self.lacking
