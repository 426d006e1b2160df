"""Sends CDC messages: when one is posted, requested or deferred, and what it contains.

Theory of operation
-------------------
Every CDC message contains the current state of both cursors and all flags. So at most one message
waits at a time, and a later message makes an earlier one unnecessary. A message is

- posted at once if the link has room;
- requested if the link has none: `Channel.wait_for_room` was called, and `on_room` posts it;
- deferred if small sends in one pass of the scheduler can share it, but for 64 KiB at most, and
  not if the peer sleeps (`datapath.sender`): ``flush_later`` was given
  `flush`, and calls it before the scheduler sleeps. The first two sends after a wait of the
  application are not deferred if they can be posted at once: usually no other send follows, and a
  deferred message takes longer than a message of its own. The same holds after a pass in which
  fewer than two sends were deferred. A task that is about to wait calls `flush_before_wait`: it may
  wait for the peer's answer. This is not Nagle's algorithm (4.5.2): no message waits for a timer;
- deferred also if it would announce to a blocked writer that less than 10 % of the ring was
  consumed: the reader may consume more soon. If the reader waits instead, `flush_before_wait` or
  ``update_later`` sends the message (4.5.1).

If the link can deliver at once (`Channel.try_post`), a message is in the peer's memory as soon as
it is posted. Then nothing is kept for a replay, and no completion follows. Messages with D, C or A
never take this path: their completion is an event of the state machine.

A connection posts on a link, its `Channel`, and the link calls the connection back as a `Poster`.
All this happens on the Trio thread, and no method of a channel may block, or call back before it
has returned.

Nothing follows a message with C or A (RFC 7609, A.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trio_smc.datapath.cursor import to_wire
from trio_smc.rnic.memory import PROGRESS_WORDS
from trio_smc.rnic.verbs import AWAKE, DeliveryUnknown
from trio_smc.rnic.words import Words
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
    """A user of a link: a connection, or the replay that moves it to another link (`failover`)."""

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""

    def on_room(self) -> None:
        """The link has room again, as `Channel.wait_for_room` promised."""


class Channel(Protocol):
    """One link, as a connection sees it. It delivers in the order of posting.

    No method raises an error if the link has failed: `Connection.switch` (another link takes over)
    or `Connection.links_lost` is called instead.
    """

    @property
    def number(self) -> int:
        """The link number within its link group."""

    def capacity(self) -> int:
        """Bytes that can be written now.

        If 0, nothing can be posted; call `wait_for_room`. Otherwise the send queue has room for two
        RDMA writes, of that many bytes together, and a CDC message. A send queue holds at most
        2**14 messages, so that a sequence number of 16 bits shows which of two messages in flight
        is newer.
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
          True if both, and everything posted on the link before, are in the peer's memory; no
          completion follows. False if nothing has happened; the caller can use `post_write` and
          `post_cdc` when there is `capacity`.

        Raises:
          DeliveryUnknown: the link is failing; the data and the message may have arrived or not,
            like everything that was posted and did not complete.
        """

    def progress_words(self, address: int, rkey: int, size: int) -> tuple[Words, int] | None:
        """See `QueuePair.progress_words`."""

    def peer_asleep(self) -> Words:
        """See `QueuePair.peer_asleep`."""

    def hand_over(self, poster: Poster, successor: Poster | None) -> None:
        """Report the completions of ``poster`` to ``successor`` from now on; None: drop them.

        If ``poster`` waits for room, its ``on_room`` is not called.
        """


_IMMEDIATE_SENDS = 2
"""Sends after a wait that post a message of their own: web servers and clients send a head and a
body. Measured: 32 µs for a request; 53.6 if all sends are deferred (docs/decisions.md)."""
_FINAL = cdc.CONNECTION_CLOSED | cdc.ABNORMAL_CLOSE
# Looked up once, because each message needs them.
_HEADER = cdc.HEADER
_pack = cdc.LAYOUT.pack


class Holder(Protocol):
    """Posts for a connection while it changes its link (`failover.replay`)."""

    def connection_ended(self) -> None:
        """The connection is closed."""


class Messenger:
    """The link in use, and the CDC messages it carries for one connection.

    Attributes:
      poster: the connection, which the link calls back.
      channel: the link; None before the link is known, and after `stop`.
      holder: posts in the connection's place; usually None.
      rkey: the RKey of the peer's ring.
      peer_token, peer_usable, peer_first: the peer's alert token; its ring's size and offset.
      progress, progress_at: the progress words of the peer's memory (`trio_smc.rnic.memory`), and
        the index of the one that shows ``produced``; None: not known yet.
      peer_asleep: the word that shows whether the peer sleeps; valid while ``progress`` is known.
      produced: bytes written into the peer's ring.
      announced: ``produced`` in the last CDC message posted.
      sequence, completed: sequence number of the last CDC message posted, and of the last one
        completed (SS of 4.6.1).
      flags: D, C, A.
      final_posted: True after C or A was posted: nothing may follow.
      blocked: True if the last CDC message has B, or the next one will have it.
      urgent_goal: if not 0, urgent data up to this count is to be sent (`datapath.sender`).
      urgent_end: if not 0, nothing may be written before the peer has consumed this many bytes.
      cdc_requested: True if a message is posted as soon as there is room, or by `flush`.
      waiting: True while the connection waits for room on the link, or for the holder.
      immediate_sends_left: number of sends that still post a message of their own; later sends may
        defer it.
      defers_past_pass: True if a deferred message may wait longer than this pass.
      flush_later: calls `flush` before the scheduler sleeps; None: every send posts its own.
      flush_pending: True if ``flush_later`` will call `flush`.
      update_later: calls its argument before the scheduler sleeps, or soon; None: no window update
        is deferred.
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
        "peer_asleep",
        "peer_first",
        "peer_token",
        "peer_usable",
        "poster",
        "produced",
        "progress",
        "progress_at",
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
        self.progress: Words | None = None
        self.progress_at: int = 0
        self.peer_asleep: Words = AWAKE
        self.produced: int = 0
        self.announced: int = 0
        self.sequence: int = 0
        self.completed: int = 0
        self.flags: int = 0
        self.final_posted: bool = False
        self.blocked: bool = False
        self.urgent_goal: int = 0
        self.urgent_end: int = 0
        self._urgent_sequence = 0  # of the last CDC message with U
        self.cdc_requested: bool = False
        self.waiting: bool = False
        self.immediate_sends_left: int = _IMMEDIATE_SENDS
        self.defers_past_pass: bool = False
        self.flush_later: Callable[[Callable[[], None]], None] | None = flush_later
        self.flush_pending: bool = False
        self._coalesced_before = 0  # `coalesced` at the last flush
        self.update_later: Callable[[Callable[[], None]], None] | None = None
        self._update_pending = False
        self.cdcs_sent: int = 0
        self.coalesced: int = 0

    @property
    def peer_is_current(self) -> bool:
        """True if the peer has received the current state, and needs no CDC message."""
        return (
            self.completed == self.sequence
            and self.announced == self.produced
            and not self.cdc_requested
        )

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight, and every write has been announced."""
        return self.completed == self.sequence and (
            self.announced == self.produced or self.final_posted
        )

    def flush(self) -> None:
        """Post the deferred CDC message; ``flush_later`` calls this."""
        self.flush_pending = False
        more, self._coalesced_before = self.coalesced - self._coalesced_before, self.coalesced
        if more < _IMMEDIATE_SENDS and not self.defers_past_pass:
            self.immediate_sends_left = _IMMEDIATE_SENDS  # deferring saved too little
        if self.cdc_requested or self.announced != self.produced:
            self.request_cdc()

    def flush_before_wait(self) -> bool:
        """Post a deferred CDC message, because the application is about to wait.

        Returns:
          True if there was one. Posting it may have ended the connection.
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
        """Announce to a blocked writer, a moment later, that a few bytes were consumed (4.5.1)."""
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
        """Write ``data`` and post a CDC message, if the link can deliver both at once.

        Not for urgent data, D, C or A.

        Args:
          produced: the count behind ``data``.
          flags: B or none.

        Returns:
          True if these and everything before them have arrived. False if nothing has happened.

        Raises:
          DeliveryUnknown: the link is failing; the message counts as posted.
        """
        sequence = (self.sequence + 1) & 0xFFFF
        receiver = self._receiver
        theirs, consumed, ours = self.peer_usable, receiver.consumed, receiver.usable
        # Like `post`, in half the time: no calls, and // and % are faster than divmod.
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
        """Post a CDC message; the channel has room."""
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
        """Send a CDC message now, or as soon as there is room; none after C or A (A.4)."""
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

    def use_progress(self, words: Words, index: int, peer_asleep: Words) -> None:
        """Show the peer from now on, in its progress words, what was written and what was taken.

        Args:
          words, index: see `QueuePair.progress_words`.
          peer_asleep: see `QueuePair.peer_asleep`.
        """
        self.progress, self.progress_at, self.peer_asleep = words, index, peer_asleep
        self._receiver.show_taken(words, PROGRESS_WORDS + index)

    def forget_progress(self) -> None:
        """The words are not to be used any more: the link changes, or the connection has ended."""
        self.progress = None
        self._receiver.show_taken(None)

    def stop(self) -> None:
        """Send nothing more."""
        self.channel = None
        self.forget_progress()
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.connection_ended()

    # --- urgent data (4.7.5) and changes of the link (4.6) ------------------------------------

    def _take_urgent_flags(self) -> int:
        """Return P and U for the message being made; there is urgent data to send."""
        if self.produced < self.urgent_goal:
            return 0 if self.urgent_end else cdc.URGENT_PENDING
        self.urgent_end = self.urgent_goal
        self.urgent_goal = 0
        self._urgent_sequence = self.sequence
        return cdc.URGENT_PENDING | cdc.URGENT_PRESENT

    def validation(self) -> bytes:
        """Return the failover validation message, which the caller posts (4.6.1)."""
        self.cdcs_sent += 1
        return cdc.pack(self.completed, self.peer_token, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION)

    def announce_again(self, channel: Channel) -> None:
        """Announce the data that was written again, unless the peer is current; there is room."""
        if self.peer_is_current:
            return
        if self.urgent_end and (self.completed - self._urgent_sequence) & 0x8000:
            self.urgent_goal = self.urgent_end  # the message with U may be lost
        self.post(channel)
