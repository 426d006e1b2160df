"""Moving one connection to another link, with the replay of lost requests (RFC 7609, 4.6).

Theory of operation
-------------------
Each side chooses the link on which it sends. A move has four steps:

1. The connection gives up the completions of the old link (`Channel.hand_over`). A late completion
   must not release memory that the new link has yet to read.
2. The connection posts the failover validation message. It has the flag F, and as its sequence
   number SS, the number of the last CDC message that *completed*. If the peer has not received the
   CDC message SS, the peer resets the connection (4.6.1): its RNIC acknowledged a message that
   never reached its memory.
3. The connection posts again, in order and to the same places, every write that is not known to
   have arrived.
4. The connection posts one CDC message with the next sequence number and with the current cursors
   and flags.

4.6.2 allows two ways: the same writes and messages unchanged, or fewer messages with a higher
sequence number. This module takes the second way, for three reasons.

- A CDC message contains both cursors and all flags. So the last message replaces all before it.
  This holds for urgent data as well, because no byte is written behind urgent data before the peer
  has received it.
- The hot path need not keep a message that is hardly ever needed again.
- To repeat writes unchanged would be wrong. If the peer has received a part of a write, newer bytes
  may lie in the place of that part, and the peer may know of them. (Bytes that the peer has not
  received have a place of their own: the window guarantees that.)

The connection posts nothing else between steps 2 and 4. A CDC message in between would announce
bytes that are not there yet, or a producer cursor that goes back. So the connection is held while
the link has no room for the whole replay, and its own requests wait. Only a signaled request makes
room when it completes. So if the room ends after a write, the validation message is posted again,
signaled. The repetition changes nothing at the peer.

Sequence numbers have 16 bits. If link after link is lost before any completion, no number is left
that is newer than every number that the peer may have seen. Then the connection ends. A link holds
far fewer messages (`Channel.capacity`), so this takes many losses in a row.

A link that fails during a replay does not change the record from which the replay is made: the next
move starts over. A link that is deleted while it works must no longer write once the new link
writes. So `hold` stops posting and waits until no request is in flight. Then there is nothing to
replay.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.connection import Connection
    from trio_smc.datapath.messenger import Channel

__all__ = ["hold", "move", "stay"]


def move(connection: Connection, link: Channel, address: int, rkey: int) -> None:
    """Move a connection to ``link``, and send again each write that may not have arrived (4.6).

    Before `Connection.peer_known`, and after the end of the connection, this is a no-op. If so many
    messages were lost that no sequence number is newer than all of them, the connection ends.

    Args:
      connection: the connection.
      link: the link.
      address: the virtual address of the peer's RMBE on that link.
      rkey: the RKey of the peer's RMB on that link.
    """
    old, messenger = connection.channel, connection.messenger
    if old is None:
        return
    if isinstance(messenger.holder, _Mover):
        old.hand_over(messenger.holder, None)
    old.hand_over(connection, None)
    connection.switch(link, address, rkey)
    if (messenger.sequence + 1 - messenger.completed) & 0x8000:
        connection.links_lost()
        return
    if not messenger.final_posted or messenger.completed != messenger.sequence:
        _Replay(connection, link).proceed()
    # Else the peer has our last CDC message (A.4: no message may follow it).


def hold(connection: Connection, ready: Callable[[], None]) -> None:
    """Stop posting on the connection's link, which still works, until `move` names another link.

    Args:
      connection: the connection.
      ready: called once, as soon as no request is in flight on the link or the connection has
        ended; this may be at once. It is not called if `move` or another `hold` comes first.
    """
    link, mover = connection.channel, connection.messenger.holder
    if link is None:
        ready()
    elif isinstance(mover, _Mover):
        mover.hold_later(ready)
    else:
        _Hold(connection, link, ready).proceed()


def stay(connection: Connection) -> None:
    """End a `hold`: the connection stays on its link. A no-op if the connection is not held."""
    mover = connection.messenger.holder
    if isinstance(mover, _Hold):
        mover.link.hand_over(mover, connection)
        connection.resume()


class _Mover:
    """Owns the posting of a connection while the connection changes its link.

    It is the `messenger.Holder` of the connection.
    """

    __slots__ = ("_connection", "link")

    def __init__(self, connection: Connection, link: Channel) -> None:
        self._connection = connection
        self.link = link
        connection.hold(self)

    def on_room(self) -> None:
        """The link has room again."""
        if self._connection.messenger.holder is self:
            self.proceed()

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message has reached the peer."""

    @abstractmethod
    def proceed(self) -> None:
        """Post as many requests as the link has room for."""

    @abstractmethod
    def hold_later(self, ready: Callable[[], None]) -> None:
        """See `hold`."""

    @abstractmethod
    def connection_ended(self) -> None:
        """The connection has ended."""


class _Replay(_Mover):
    """Steps 2 to 4 of a move, as far as the link has room for them."""

    __slots__ = ("_next", "_ready", "_validated")

    def __init__(self, connection: Connection, link: Channel) -> None:
        super().__init__(connection, link)
        self._next = 0  # position in the stream of the next byte to write
        self._validated = False
        self._ready: Callable[[], None] | None = None

    def proceed(self) -> None:
        connection, link = self._connection, self.link
        if not self._validated:
            if not self._room():
                return
            self._validated = True
            link.post_cdc(self, connection.messenger.validation())
        for start, data in connection.sender.replay(self._next):
            done = 0
            while done < len(data):
                room = self._room()
                if not room:
                    return
                piece = data[done : done + room]
                connection.sender.write(link, piece, start + done)
                done += len(piece)
                self._next = start + done
                if link.capacity() <= 0:
                    link.post_cdc(self, connection.messenger.validation())
        if self._room():
            connection.messenger.announce_again(link)
            connection.resume()
            if self._ready is not None:
                hold(connection, self._ready)

    def _room(self) -> int:
        room = self.link.capacity()
        if room <= 0:
            self.link.wait_for_room(self)
        return max(0, room)

    def hold_later(self, ready: Callable[[], None]) -> None:
        """The new link is being deleted, too: finish the replay first."""
        self._ready = ready

    def connection_ended(self) -> None:
        if self._ready is not None:
            self._ready()


class _Hold(_Mover):
    """Waits until no request of a connection is in flight on a working link."""

    __slots__ = ("_ready",)

    def __init__(self, connection: Connection, link: Channel, ready: Callable[[], None]) -> None:
        super().__init__(connection, link)
        self._ready: Callable[[], None] | None = ready

    def proceed(self) -> None:
        connection, link = self._connection, self.link
        messenger = connection.messenger
        if messenger.announced != messenger.produced and not messenger.final_posted:
            # These writes have no CDC message yet. Without one, no completion would show that they
            # have arrived.
            if link.capacity() <= 0:
                link.wait_for_room(self)
                return
            messenger.post(link)
        link.hand_over(connection, self)
        self._check()

    def on_cdc_complete(self, sequence: int) -> None:
        """A message that the connection posted before it was held."""
        self._connection.on_cdc_complete(sequence)
        self._check()

    def _check(self) -> None:
        messenger = self._connection.messenger
        if messenger.holder is self and messenger.is_idle:
            self._notify_ready()

    def hold_later(self, ready: Callable[[], None]) -> None:
        """The connection is held already: notify another caller instead."""
        self._ready = ready
        self._check()

    def connection_ended(self) -> None:
        self._notify_ready()

    def _notify_ready(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
