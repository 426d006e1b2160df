"""Telling the peer: when a CDC message is posted, owed or put off, and what it says.

Theory of operation
-------------------
Every CDC message tells everything: both cursors and all flags as they are at that moment. So at
most one is ever owed, and a later one makes an earlier one unnecessary. One is

- posted at once when the link has room;
- owed when it has none: `Channel.wait_for_room` was called, and `on_room` posts it;
- put off when many small sends in one pass of the scheduler may share one: ``flush_later`` was
  given `flush`, to be called before the scheduler sleeps. The first two sends since the
  application waited put nothing off where their messages can be posted at once: mostly no others
  follow, and what is put off takes longer by itself than a message of its own. So do those after
  a pass in which no more were put off. And whoever is about to wait calls
  `flush_before_wait`: what it waits for may be the answer. This is no Nagle algorithm (4.5.2):
  nothing waits for time;
- put off, too, when it tells a blocked writer of less than 10 % of the ring: a reader that goes
  on makes it more, and `flush_before_wait` or ``update_later`` sends it for one that does not
  (4.5.1).

Where the link can do it (`Channel.try_post`), a message is in the peer's memory as soon as it is
posted. Then nothing of it has to be remembered, and no completion tells of it. Messages with D, C
or A never go that way: their completion is an event of the state machine.

A link is a `Channel` to the connection, which posts on it and is called back as a `Poster`.  All of
it happens on the Trio thread, and no method of a channel may block or call back from within a call.

Nothing follows a message with C or A (RFC 7609, A.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trio_smc.datapath.cursor import to_wire
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.wire import cdc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.receiver import Receiver

__all__ = [
    "Channel",
    "Holder",
    "Messenger",
    "Poster",
]


class Poster(Protocol):
    """Who posts on a link: a connection, or what moves it to another one (`failover.replay`)."""

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""

    def on_room(self) -> None:
        """The link has room again, as `Channel.wait_for_room` promised."""


class Channel(Protocol):
    """One link, as a connection sees it. What is posted arrives in the order of posting.

    No method raises because the link has failed: that is told by `Connection.switch` (another link
    carries on) or `Connection.links_lost`.
    """

    @property
    def number(self) -> int:
        """The link number within its link group."""

    def capacity(self) -> int:
        """Bytes that can be written now.

        0: nothing can be posted; call `wait_for_room`. More: the send queue has room for two
        RDMA writes of that many bytes together and a CDC message.  It holds 2**14 messages at
        most, so that 16 bits tell which of those in flight is newer.
        """

    def wait_for_room(self, poster: Poster) -> None:
        """Call ``poster.on_room()`` once, later, when `capacity` is no longer 0."""

    def post_write(self, poster: Poster, data: memoryview, address: int, rkey: int) -> None:
        """RDMA-write ``data`` to ``address`` of the peer's memory, unsignaled.

        ``data`` does not change until the next CDC message of this poster is complete.
        """

    def post_cdc(self, poster: Poster, message: bytes) -> None:
        """Send a CDC message; its completion calls ``poster.on_cdc_complete(sequence)``.

        Completions are reported in order, each once.
        """

    def try_post(
        self, message: bytes, data: bytes | memoryview | None, address: int, rkey: int
    ) -> bool:
        """RDMA-write ``data``, if any, and send a CDC message, if both can be done at once.

        Returns:
          True: both are in the peer's memory, and all that was posted on the link before is; no
          completion follows. False: nothing has happened, and the same can be posted with
          `post_write` and `post_cdc` when there is `capacity`.

        Raises:
          DeliveryUnknown: the link fails just now; they may be there or not, as what was posted
            and did not complete.
        """

    def hand_over(self, poster: Poster, heir: Poster | None) -> None:
        """Report completions of what ``poster`` has posted to ``heir``; None: to nobody.

        A call of ``on_room`` that ``poster`` waits for is not made.
        """


_IMMEDIATE_SENDS = 2  # a head and a body, as web servers and clients send them
_FINAL = cdc.CONNECTION_CLOSED | cdc.ABNORMAL_CLOSE
# What each message needs, looked up once.
_HEADER = cdc.HEADER
_pack = cdc.LAYOUT.pack


class Holder(Protocol):
    """Who decides what is posted while a connection changes its link (`failover.replay`)."""

    def over(self) -> None:
        """The connection is over."""


class Messenger:
    """The link in use, and the CDC messages it carries for one connection.

    Attributes:
      poster: the connection, which the link calls back.
      channel: the link; None before it is known and when nothing will be sent any more.
      holder: posts in the connection's place; None: nobody does, as mostly.
      rkey: of the peer's ring.
      peer_token, peer_usable, peer_first: the peer's alert token; its ring's size and offset.
      produced: bytes written into the peer's ring.
      announced: produced, in the last CDC message posted.
      sequence, completed: of the last CDC message posted, and of the last completed (SS of 4.6.1).
      flags: D, C, A.
      final_posted: C or A was posted: nothing may follow.
      blocked: B is, or is to be, told.
      urgent_goal: not 0: urgent data up to this count is to be sent (`datapath.sender`).
      urgent_end: not 0: nothing may be written before the peer has taken so much.
      cdc_requested: a message is to be posted when there is room, or when `flush` is called.
      waiting: for room on the link, or for the holder.
      immediate_sends_left: so many more sends post a message of their own; the next ones may put
        it off.
      defers_past_pass: what is put off waits for more than the end of this pass.
      flush_later: calls `flush` before the scheduler sleeps; None: every send posts its own.
      flush_pending: `flush` is to be called.
      update_later: calls what it is given before the scheduler sleeps, or soon; None: nothing that
        the reader consumed is put off.
    """

    __slots__ = (
        "_coalesced_before",
        "_receiver",
        "_update_pending",
        "_urgent_sequence",
        "announced",
        "blocked",
        "cdcs_sent",
        "channel",
        "coalesced",
        "completed",
        "flags",
        "flush_later",
        "flush_pending",
        "holder",
        "cdc_requested",
        "defers_past_pass",
        "peer_first",
        "peer_token",
        "peer_usable",
        "poster",
        "produced",
        "immediate_sends_left",
        "rkey",
        "sequence",
        "final_posted",
        "update_later",
        "urgent_end",
        "urgent_goal",
        "waiting",
    )

    def __init__(
        self,
        poster: Poster,
        receiver: Receiver,
        flush_later: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        self.poster: Poster = poster
        self._receiver = receiver
        self.channel: Channel | None = None
        self.holder: Holder | None = None
        self.rkey: int = 0
        self.peer_token: int = 0
        self.peer_usable: int = 1
        self.peer_first: int = 0
        self.produced: int = 0
        self.announced: int = 0
        self.sequence: int = 0
        self.completed: int = 0
        self.flags: int = 0
        self.final_posted: bool = False
        self.blocked: bool = False
        self.urgent_goal: int = 0
        self.urgent_end: int = 0
        self._urgent_sequence = 0  # of the CDC message that told U last
        self.cdc_requested: bool = False
        self.waiting: bool = False
        self.immediate_sends_left: int = _IMMEDIATE_SENDS
        self.defers_past_pass: bool = False
        self.flush_later: Callable[[Callable[[], None]], None] | None = flush_later
        self.flush_pending: bool = False
        self._coalesced_before = 0  # by the last flush
        self.update_later: Callable[[Callable[[], None]], None] | None = None
        self._update_pending = False
        self.cdcs_sent: int = 0
        self.coalesced: int = 0

    @property
    def peer_is_current(self) -> bool:
        """Whether the peer needs no CDC message of ours."""
        return (
            self.completed == self.sequence
            and self.announced == self.produced
            and not self.cdc_requested
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing posted is in flight, nor a write whose message is yet to come."""
        return self.completed == self.sequence and (
            self.announced == self.produced or self.final_posted
        )

    def flush(self) -> None:
        """Post the CDC message that was put off; for whom ``flush_later`` told about it."""
        self.flush_pending = False
        more, self._coalesced_before = self.coalesced - self._coalesced_before, self.coalesced
        if more < _IMMEDIATE_SENDS and not self.defers_past_pass:
            self.immediate_sends_left = _IMMEDIATE_SENDS  # it was hardly worth it
        if self.cdc_requested:
            self.request_cdc()

    def flush_before_wait(self) -> bool:
        """The application is about to wait: post a CDC message that waits for more sends.

        Returns:
          Whether there was one to post, at which everything may have come to an end.
        """
        receiver = self._receiver
        self.immediate_sends_left = 0 if self.defers_past_pass else _IMMEDIATE_SENDS
        if (self.cdc_requested and self.flush_pending and not self.defers_past_pass) or (
            receiver.writer_waits and receiver.consumed != receiver.announced
        ):
            self.request_cdc()
            return True
        return False

    def update_soon(self) -> None:
        """A blocked writer is to know what was consumed, which is little (4.5.1)."""
        if self.update_later is None:
            self.request_cdc()
        elif not self._update_pending:
            self._update_pending = True
            self.update_later(self._update_now)

    def _update_now(self) -> None:
        self._update_pending = False
        receiver = self._receiver
        if receiver.writer_waits and receiver.consumed != receiver.announced:
            self.request_cdc()

    def post_at_once(
        self,
        channel: Channel,
        data: bytes | memoryview | None,
        address: int,
        produced: int,
        flags: int,
    ) -> bool:
        """Write ``data`` and tell the peer everything, if that can be done at once.

        ``produced``: the count behind ``data``. ``flags``: B or none. True: it and all before it
        has arrived. False: nothing has happened. Not for urgent data, D, C or A.

        Raises DeliveryUnknown: it counts as posted, and its link fails.
        """
        sequence = (self.sequence + 1) & 0xFFFF
        receiver = self._receiver
        theirs, consumed, ours = self.peer_usable, receiver.consumed, receiver.usable
        # As in `post`, in half the time: no calls, and // and % take less than divmod.
        message = _pack(
            _HEADER,
            sequence,
            self.peer_token,
            produced // theirs & 0xFFFF,
            self.peer_first + produced % theirs,
            consumed // ours & 0xFFFF,
            receiver.first + consumed % ours,
            flags,
            0,
        )
        known = True
        try:
            if not channel.try_post(message, data, address, self.rkey):
                return False
        except DeliveryUnknown:
            known = False
        self.sequence = sequence
        receiver.announced = consumed
        self.produced = self.announced = produced
        self.cdc_requested = False
        self.cdcs_sent += 1
        if not known:
            raise DeliveryUnknown
        return True

    def post(self, channel: Channel) -> None:
        """Tell the peer everything; the channel has room."""
        sequence = self.sequence = (self.sequence + 1) & 0xFFFF
        flags = cdc.WRITER_BLOCKED if self.blocked else 0
        if self.urgent_goal:
            flags |= self._take_urgent_flags()
        if self.flags & _FINAL:
            self.final_posted = True
        receiver = self._receiver
        message = cdc.pack(
            sequence,
            self.peer_token,
            *to_wire(self.produced, self.peer_usable, self.peer_first),
            *to_wire(receiver.consumed, receiver.usable, receiver.first),
            flags,
            self.flags,
        )
        receiver.announced = receiver.consumed
        self.announced = self.produced
        self.cdc_requested = False
        self.cdcs_sent += 1
        channel.post_cdc(self.poster, message)

    def request_cdc(self) -> None:
        """Send a CDC message now, or as soon as there is room; nothing after C or A (A.4)."""
        channel = self.channel
        if self.final_posted or channel is None:
            return
        if self.waiting:
            self.cdc_requested = True
            return
        if not (self.flags or self.urgent_goal):
            try:
                flags = cdc.WRITER_BLOCKED if self.blocked else 0
                if self.post_at_once(channel, None, 0, self.produced, flags):
                    self.poster.on_cdc_complete(self.sequence)
                    return
            except DeliveryUnknown:
                return
        if channel.capacity() > 0:
            self.post(channel)
        else:
            self.cdc_requested = True
            self.wait_for_room(channel)

    def defer(self, flush_later: Callable[[Callable[[], None]], None]) -> None:
        """Send one CDC message for all that happens until the scheduler sleeps."""
        self.cdc_requested = True
        if not self.flush_pending:
            self.flush_pending = True
            flush_later(self.flush)

    def wait_for_room(self, channel: Channel) -> None:
        if not self.waiting:
            self.waiting = True
            channel.wait_for_room(self.poster)

    def on_room(self) -> None:
        """The link has room again."""
        self.waiting = False
        if self.cdc_requested:
            self.request_cdc()

    def stop(self) -> None:
        """Nothing will be sent any more."""
        self.channel = None
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.over()

    # --- urgent data (4.7.5) and the change of a link (4.6) ------------------------------------

    def _take_urgent_flags(self) -> int:
        """P and U of the message that is just made; there is urgent data to send."""
        if self.produced < self.urgent_goal:
            return 0 if self.urgent_end else cdc.URGENT_PENDING
        self.urgent_end = self.urgent_goal
        self.urgent_goal = 0
        self._urgent_sequence = self.sequence
        return cdc.URGENT_PENDING | cdc.URGENT_PRESENT

    def validation(self) -> bytes:
        """The failover validation message, which the caller posts (4.6.1)."""
        self.cdcs_sent += 1
        return cdc.pack(self.completed, self.peer_token, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION)

    def announce_again(self, channel: Channel) -> None:
        """Post what tells of all that was written again, unless the peer knows; there is room."""
        if self.peer_is_current:
            return
        if self.urgent_end and (self.completed - self._urgent_sequence) & 0x8000:
            self.urgent_goal = self.urgent_end  # the message with U may be lost
        self.post(channel)
