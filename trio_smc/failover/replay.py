"""How one connection goes on over another link, and sends again what it must (RFC 7609, 4.6).

Theory of operation
-------------------
Each side chooses for itself which link it sends on. A move goes like this:

1. What is still reported of the old link is not ours any more (`Channel.hand_over`): a completion
   that comes late must not release memory that the new link has yet to read.
2. The failover validation message: F, and as sequence number SS, that of the last CDC message
   *completed*. The peer resets the connection when it has not received that one (4.6.1): its RNIC
   has acknowledged what never reached its memory.
3. Every write that is not known to have arrived, in order, where it was written before.
4. One CDC message with the next sequence number, that tells everything as it is now.

4.6.2 allows two ways: the same writes and messages unchanged, or fewer with a higher sequence
number. This is the second one, for three reasons. A CDC message tells both cursors and all flags,
so the last one makes those before it unnecessary; urgent data is no exception, as nothing is
written behind it before the peer has taken it. The hot path need not keep a message that is
hardly ever wanted again. And unchanged would be wrong: of a write that the peer has taken in part
the beginning may not be written again, as newer bytes may lie there, which the peer was told of.
(Bytes it has not taken lie each in a place of their own: the window sees to that.)

Nothing else is posted between 2 and 4, since a CDC message in between could only tell too much,
or a producer cursor that goes back. So while the link has no room for all of it the connection is
held: what it wants to post has to wait. Only what is signaled ever makes room: where the
room ends the validation message is sent again, which tells the peer nothing new.

Sequence numbers have 16 bits. When link after link was lost before anything on it was known to have
arrived, no number is left that is newer than all the peer may have seen; then nothing can be told
any more, and the connection ends. A link holds fewer messages by far (`Channel.capacity`), so that
takes many in a row.

A link that fails during a replay changes nothing in the record it is made from: the next move
starts over. A link that is left while it works must not write any more once the new one does,
so `hold` stops posting and waits until nothing is in flight; then there is nothing to replay.
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
    """Let it send on ``link`` from now on, and again what may not have arrived (4.6).

    Does nothing before `Connection.peer_known` and when the connection is over.  Ends it when so
    much was lost that sequence numbers cannot tell what is new.

    Args:
      connection: the connection.
      link: the link.
      address: where the peer's RMBE starts, as its RMB's address on that link says.
      rkey: of the peer's RMB on that link.
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
    if not messenger.silent or messenger.completed != messenger.sequence:
        _Replay(connection, link).go()
    # Else the last word has arrived (A.4: nothing may follow it).


def hold(connection: Connection, ready: Callable[[], None]) -> None:
    """Let it post nothing more on its link, which still works, until `move` names another.

    Args:
      connection: the connection.
      ready: called once when nothing is in flight there, possibly at once; also when the
        connection is over before. Not when `move` comes first, or another `hold`.
    """
    link, mover = connection.channel, connection.messenger.holder
    if link is None:
        ready()
    elif isinstance(mover, _Mover):
        mover.hold_later(ready)
    else:
        _Hold(connection, link, ready).go()


def stay(connection: Connection) -> None:
    """Let it go on with the link that it was to leave; nothing when it is not held."""
    mover = connection.messenger.holder
    if isinstance(mover, _Hold):
        mover.link.hand_over(mover, connection)
        connection.resume()


class _Mover:
    """In charge of what a connection posts while it changes its link (`messenger.Holder`)."""

    __slots__ = ("_connection", "link")

    def __init__(self, connection: Connection, link: Channel) -> None:
        self._connection = connection
        self.link = link
        connection.hold(self)

    def on_room(self) -> None:
        """The link has room again."""
        if self._connection.messenger.holder is self:
            self.go()

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message has reached the peer."""

    @abstractmethod
    def go(self) -> None:
        """Do what there is room for."""

    @abstractmethod
    def hold_later(self, ready: Callable[[], None]) -> None:
        """See `hold`."""

    @abstractmethod
    def over(self) -> None:
        """The connection is over."""


class _Replay(_Mover):
    """Steps 2 to 4 of a move, as there is room for them."""

    __slots__ = ("_next", "_ready", "_validated")

    def __init__(self, connection: Connection, link: Channel) -> None:
        super().__init__(connection, link)
        self._next = 0  # count of the byte to go on with
        self._validated = False
        self._ready: Callable[[], None] | None = None

    def go(self) -> None:
        it, link = self._connection, self.link
        if not self._validated:
            if not self._room():
                return
            self._validated = True
            link.post_cdc(self, it.messenger.validation())
        for start, data in it.sender.replay(self._next):
            done = 0
            while done < len(data):
                room = self._room()
                if not room:
                    return
                piece = data[done : done + room]
                it.sender.write(link, piece, start + done)
                done += len(piece)
                self._next = start + done
                if link.capacity() <= 0:
                    link.post_cdc(self, it.messenger.validation())
        if self._room():
            it.messenger.tell_again(link)
            it.resume()
            if self._ready is not None:
                hold(it, self._ready)

    def _room(self) -> int:
        room = self.link.capacity()
        if room <= 0:
            self.link.wait_for_room(self)
        return max(0, room)

    def hold_later(self, ready: Callable[[], None]) -> None:
        """The link is to be left again: finish first."""
        self._ready = ready

    def over(self) -> None:
        if self._ready is not None:
            self._ready()


class _Hold(_Mover):
    """Waits until nothing is in flight on a link that works."""

    __slots__ = ("_ready",)

    def __init__(self, connection: Connection, link: Channel, ready: Callable[[], None]) -> None:
        super().__init__(connection, link)
        self._ready: Callable[[], None] | None = ready

    def go(self) -> None:
        it, link = self._connection, self.link
        messenger = it.messenger
        if messenger.announced != messenger.produced and not messenger.silent:
            # Writes whose message was put off: nothing else would tell that they are done.
            if link.capacity() <= 0:
                link.wait_for_room(self)
                return
            messenger.post(link)
        link.hand_over(it, self)
        self._look()

    def on_cdc_complete(self, sequence: int) -> None:
        """A message that the connection posted before it was held."""
        self._connection.on_cdc_complete(sequence)
        self._look()

    def _look(self) -> None:
        messenger = self._connection.messenger
        if messenger.holder is self and messenger.at_rest:
            self.over()

    def hold_later(self, ready: Callable[[], None]) -> None:
        """Held already; another one waits for the same."""
        self._ready = ready
        self._look()

    def over(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
