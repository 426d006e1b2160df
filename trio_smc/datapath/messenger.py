"""Outgoing CDC messages: when one is posted, owed or put off, and what it says.

Theory of operation
-------------------
Every CDC message tells everything: both cursors and all flags as they are at that moment. So at
most one is ever owed, and a later one makes an earlier one unnecessary. One is

- posted at once when the link has room;
- owed when it has none: `Channel.wait_for_room` was called, and `on_room` posts it;
- put off when many small sends in one pass of the scheduler may share one: ``flush_later`` was
  given `flush`, to be called before the scheduler sleeps. The first send since the application
  waited puts nothing off where its message can be posted at once: mostly no other follows. And
  whoever is about to wait calls `tell`: what it waits for may be the answer. This is no Nagle
  algorithm (4.5.2): nothing waits for time;
- put off, too, when it tells a blocked writer of less than 10 % of the ring: a reader that goes
  on makes it more, and `tell` or ``tell_later`` sends it for one that does not (4.5.1).

Where the link can do it (`Channel.try_post`), a message is in the peer's memory as soon as it is
posted. Then nothing of it has to be remembered, and no completion tells of it. Messages with D, C
or A never go that way: their completion is an event of the state machine.

Nothing follows a message with C or A (RFC 7609, A.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_smc.datapath.urgent_receiver import UrgentReceiver
from trio_smc.rnic.verbs import DeliveryUnknown
from trio_smc.wire import cdc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.channel import Channel
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Messenger"]

_LAST_WORD = cdc.CONNECTION_CLOSED | cdc.ABNORMAL_CLOSE
# What each message needs, looked up once.
_HEADER = cdc.HEADER
_pack = cdc.LAYOUT.pack


class Messenger(UrgentReceiver):
    """Base of `Delivery`: the link in use, and the CDC messages it carries for us."""

    __slots__ = (
        "_announced",
        "_blocked",
        "_channel",
        "_first",
        "_flags",
        "_flush_later",
        "_flush_pending",
        "_owed",
        "_peer_first",
        "_peer_token",
        "_patient",
        "_peer_usable",
        "_produced",
        "_rkey",
        "_sequence",
        "_silent",
        "_tell_pending",
        "_urgent_end",
        "_urgent_goal",
        "_waiting",
        "cdcs_sent",
        "coalesced",
        "on_writable",
    )

    _channel: Channel | None
    on_writable: Callable[[], None] | None
    """Called once, and cleared, when a blocked writer might go on: window, room on the link,
    everything delivered, nothing borrowed any more, an ending."""

    def __init__(
        self, rmbe: Rmbe, *, flush_later: Callable[[Callable[[], None]], None] | None
    ) -> None:
        super().__init__(rmbe)
        self._channel = None
        self._peer_token = 0
        self._peer_usable = 1
        self._peer_first = 0
        self._rkey = 0  # of the peer's ring
        self._flush_later = flush_later
        self._flush_pending = False
        self._patient = False  # what is put off waits for more than the end of this pass
        self._produced = 0  # bytes written into the peer's ring
        self._announced = 0  # produced, in the last CDC message posted
        self._sequence = 0  # of the last CDC message posted
        self._first = True  # the next send is the first since the application waited
        self._flags = 0  # D, C, A
        self._blocked = False  # B is, or is to be, told
        self._owed = False
        self._tell_pending = False  # `tell_later` was told
        self._waiting = False  # for room on the channel
        self._silent = False  # C or A was posted: nothing may follow
        self._urgent_goal = 0  # not 0: urgent data up to this count is to be sent
        self._urgent_end = 0  # not 0: nothing may be written before the peer has taken so much
        self.on_writable = None
        self.cdcs_sent = 0
        self.coalesced = 0

    def flush(self) -> None:
        """Post the CDC message that was put off; for whom ``flush_later`` told about it."""
        self._flush_pending = False
        if self._owed:
            self._owe_cdc()

    def tell(self) -> None:
        """The application is about to wait: post a CDC message that waits for more sends."""
        self._first = not self._patient
        if (self._owed and self._flush_pending and not self._patient) or (
            self._writer_waits and self._consumed != self._told
        ):
            self._owe_cdc()

    def _tell_soon(self) -> None:
        """A blocked writer is to know what was consumed, which is little (4.5.1)."""
        if self.tell_later is None:
            self._owe_cdc()
        elif not self._tell_pending:
            self._tell_pending = True
            self.tell_later(self._tell_now)

    def _tell_now(self) -> None:
        self._tell_pending = False
        if self._writer_waits and self._consumed != self._told:
            self._owe_cdc()

    def _try_cdc(
        self, channel: Channel, data: memoryview | None, address: int, produced: int, flags: int
    ) -> bool:
        """Write ``data`` and tell the peer everything, if that can be done at once.

        ``produced``: the count behind ``data``. ``flags``: B or none. True: it and all before it
        has arrived. False: nothing has happened. Not for urgent data, D, C or A.

        Raises DeliveryUnknown: it counts as posted, and its link fails.
        """
        sequence = (self._sequence + 1) & 0xFFFF
        message = self._message(sequence, produced, flags, 0)
        known = True
        try:
            if not channel.try_post(message, data, address, self._rkey):
                return False
        except DeliveryUnknown:
            known = False
        self._sequence = sequence
        self._told = self._consumed
        self._produced = self._announced = produced
        self._owed = False
        self.cdcs_sent += 1
        if not known:
            raise DeliveryUnknown
        return True

    def _post_cdc(self, channel: Channel) -> None:
        """Tell the peer everything; the channel has room."""
        sequence = self._sequence = (self._sequence + 1) & 0xFFFF
        flags = cdc.WRITER_BLOCKED if self._blocked else 0
        if self._urgent_goal:
            flags |= self._tell_urgent()
        if self._flags & _LAST_WORD:
            self._silent = True
        message = self._message(sequence, self._produced, flags, self._flags)
        self._told = self._consumed
        self._announced = self._produced
        self._owed = False
        self.cdcs_sent += 1
        channel.post_cdc(self, message)

    def _message(self, sequence: int, produced: int, flags: int, endings: int) -> bytes:
        """A CDC message with both cursors as they are, ``produced`` bytes written (A.4)."""
        wrap, offset = divmod(produced, self._peer_usable)
        consumer_wrap, consumer_offset = divmod(self._consumed, self._usable)
        return _pack(
            _HEADER,
            sequence,
            self._peer_token,
            wrap & 0xFFFF,
            self._peer_first + offset,
            consumer_wrap & 0xFFFF,
            self._own_first + consumer_offset,
            flags,
            endings,
        )

    def _owe_cdc(self) -> None:
        """Send a CDC message now, or as soon as there is room; nothing after C or A (A.4)."""
        channel = self._channel
        if self._silent or channel is None:
            return
        if self._waiting:
            self._owed = True
            return
        if not (self._flags or self._urgent_goal):
            try:
                flags = cdc.WRITER_BLOCKED if self._blocked else 0
                if self._try_cdc(channel, None, 0, self._produced, flags):
                    self.on_cdc_complete(self._sequence)
                    return
            except DeliveryUnknown:
                return
        if channel.capacity() > 0:
            self._post_cdc(channel)
        else:
            self._owed = True
            self._wait_for_room(channel)

    def _defer_cdc(self, flush_later: Callable[[Callable[[], None]], None]) -> None:
        """Send one CDC message for all that happens until the scheduler sleeps."""
        self._owed = True
        if not self._flush_pending:
            self._flush_pending = True
            flush_later(self.flush)

    def _wait_for_room(self, channel: Channel) -> None:
        if not self._waiting:
            self._waiting = True
            channel.wait_for_room(self)

    def on_room(self) -> None:
        """The channel has room again, as `Channel.wait_for_room` promised."""
        self._waiting = False
        if self._owed:
            self._owe_cdc()
        self._wake_writer()

    def _wake_writer(self) -> None:
        wake = self.on_writable
        if wake is not None:
            self.on_writable = None
            wake()

    # --- supplied by the classes built on this one -------------------------------------------

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""
        raise NotImplementedError

    def _tell_urgent(self) -> int:
        """P and U of the message that is just made; there is urgent data to send."""
        raise NotImplementedError
