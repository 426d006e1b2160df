"""Moving a connection's sending from one link to another (RFC 7609, 2.3, 4.6).

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
or a producer cursor that goes back. So while the link has no room for all of it, a stand-in is
the connection's channel, one without capacity. Only what is signaled ever makes room: where the
room ends the validation message is sent again, which tells the peer nothing new.

A link that fails during a replay changes nothing in the record it is made from: the next move
starts over. A link that is left while it works must not write any more once the new one does,
so `hold` stops posting and waits until nothing is in flight; then there is nothing to replay.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from trio_smc.datapath.urgent_sender import UrgentSender
from trio_smc.wire import cdc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.channel import AnyConnection, Channel
    from trio_smc.datapath.rmb import Rmbe

__all__ = [
    "Moving",
]


class Moving(UrgentSender):
    """Base of `Endings`: which link is used, and how another one comes to be."""

    __slots__ = ("failovers",)

    def __init__(
        self,
        rmbe: Rmbe,
        *,
        chunks: bool,
        copy_limit: int,
        flush_later: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        super().__init__(rmbe, chunks=chunks, copy_limit=copy_limit, flush_later=flush_later)
        self.failovers = 0

    @property
    def channel(self) -> Channel | None:
        """The link it sends on; None before `peer_known` and when it is over."""
        channel = self._channel
        return channel.link if isinstance(channel, _StandIn) else channel

    def move(self, channel: Channel, address: int, rkey: int) -> None:
        """Send on this link from now on, and again what may not have arrived (4.6).

        Does nothing before `peer_known` and when the connection is over.

        Args:
          channel: the link.
          address: where the peer's RMBE starts, as its RMB's address on that link says.
          rkey: of the peer's RMB on that link.
        """
        old = self._channel
        if old is None:
            return
        old.hand_over(self, None)
        self.failovers += 1
        self._use(channel, address, rkey)
        if self._silent and self._completed == self._sequence:
            return  # the last word has arrived (A.4: nothing may follow it)
        self._waiting = True
        replay = _Replay(self, channel)
        self._channel = replay
        replay.go()

    def hold(self, ready: Callable[[], None]) -> None:
        """Post nothing more on the link, which still works, until `move` names another.

        Args:
          ready: called once when nothing is in flight there, possibly at once; also when the
            connection is over before. Not when `move` comes first, or another `hold`.
        """
        channel = self._channel
        if channel is None:
            ready()
        elif isinstance(channel, _StandIn):
            channel.hold_later(ready)
        else:
            held = _Hold(self, channel, ready)
            self._waiting = True
            self._channel = held
            held.go()

    def stay(self) -> None:
        """Go on with the link that it was to leave; nothing when it is not held."""
        channel = self._channel
        if isinstance(channel, _Hold):
            channel.link.hand_over(channel, self)
            self._channel = channel.link
            self.on_room()

    def _use(self, channel: Channel, address: int, rkey: int) -> None:
        self._channel = channel
        self._address = address + self._peer_first
        self._rkey = rkey
        self._waiting = False

    def _leave_link(self) -> None:
        """Nothing will be sent any more."""
        channel, self._channel = self._channel, None
        if isinstance(channel, _StandIn):
            channel.over()

    def _all_told(self) -> bool:
        """Whether the peer needs no CDC message of ours."""
        return (
            self._completed == self._sequence
            and self._announced == self._produced
            and not self._owed
        )

    def _validation(self, channel: Channel, replay: _Replay) -> None:
        """Post the failover validation message (4.6.1)."""
        self.cdcs_sent += 1
        message = cdc.pack(self._completed, self._peer_token, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION)
        channel.post_cdc(replay, message)

    def _resume_on(self, channel: Channel) -> None:
        """The replay is complete but for the message that tells of it; there is room for that."""
        self._channel = channel
        self._waiting = False
        if not self._all_told():
            self._tell_urgent_again()
            self._post_cdc(channel)
        self.on_room()


class _StandIn:
    """In the link's place while nothing may be posted by others than this."""

    __slots__ = ("_connection", "link")

    def __init__(self, connection: AnyConnection, link: Channel) -> None:
        self._connection = connection
        self.link = link
        """The real one."""

    @property
    def number(self) -> int:
        return self.link.number

    def capacity(self) -> int:
        return 0

    def wait_for_room(self, connection: AnyConnection) -> None:
        pass  # `Moving._resume_on` tells

    def hand_over(self, connection: AnyConnection, heir: AnyConnection | None) -> None:
        """What this has posted, or waits for, is forgotten with it."""
        self.link.hand_over(self, None)
        self.link.hand_over(connection, heir)

    def post_write(
        self, connection: AnyConnection, data: memoryview, address: int, rkey: int
    ) -> None:
        raise AssertionError("posted without capacity")

    def post_cdc(self, connection: AnyConnection, message: bytes) -> None:
        raise AssertionError("posted without capacity")

    def try_post(self, message: bytes, data: memoryview | None, address: int, rkey: int) -> bool:
        return False

    def on_room(self) -> None:
        """The link has room again."""
        if self._connection._channel is self:
            self.go()

    @abstractmethod
    def go(self) -> None:
        """Do what there is room for."""

    @abstractmethod
    def hold_later(self, ready: Callable[[], None]) -> None:
        """See `Moving.hold`."""

    @abstractmethod
    def over(self) -> None:
        """The connection is over."""


class _Replay(_StandIn):
    """Steps 2 to 4 of a move, as there is room for them."""

    __slots__ = ("_next", "_ready", "_validated")

    def __init__(self, connection: AnyConnection, link: Channel) -> None:
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
            it._validation(link, self)
        for start, data in it.replay(self._next):
            done = 0
            while done < len(data):
                room = self._room()
                if not room:
                    return
                piece = data[done : done + room]
                it._write(link, piece, len(piece), start + done)
                done += len(piece)
                self._next = start + done
                if link.capacity() <= 0:
                    it._validation(link, self)
        if self._room():
            it._resume_on(link)
            if self._ready is not None:
                it.hold(self._ready)

    def _room(self) -> int:
        room = self.link.capacity()
        if room <= 0:
            self.link.wait_for_room(self)
        return max(0, room)

    def on_cdc_complete(self, sequence: int) -> None:
        """A validation message; it completes no other one."""

    def hold_later(self, ready: Callable[[], None]) -> None:
        """The link is to be left again: finish first."""
        self._ready = ready

    def over(self) -> None:
        if self._ready is not None:
            self._ready()


class _Hold(_StandIn):
    """Waits until nothing is in flight on a link that works."""

    __slots__ = ("_ready",)

    def __init__(self, connection: AnyConnection, link: Channel, ready: Callable[[], None]) -> None:
        super().__init__(connection, link)
        self._ready: Callable[[], None] | None = ready

    def go(self) -> None:
        it, link = self._connection, self.link
        if it._announced != it._produced and not it._silent:
            # Writes whose message was put off: nothing else would tell that they are done.
            if link.capacity() <= 0:
                link.wait_for_room(self)
                return
            it._post_cdc(link)
        link.hand_over(it, self)
        self._look()

    def on_cdc_complete(self, sequence: int) -> None:
        """A message that the connection posted before it was held."""
        self._connection.on_cdc_complete(sequence)
        self._look()

    def _look(self) -> None:
        it = self._connection
        if (
            it._channel is self
            and it._completed == it._sequence
            and (it._announced == it._produced or it._silent)
        ):
            self.over()

    def hold_later(self, ready: Callable[[], None]) -> None:
        """Held already; another one waits for the same."""
        self._ready = ready
        self._look()

    def over(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
