"""One SMC-R connection without I/O: its states, its endings, and what its peer's messages do.

Theory of operation
-------------------
A `Connection` holds a `Receiver`, which knows our RMBE, a `Sender`, which writes into the peer's,
and a `Messenger`, which tells the peer about both. What is left is here: the states of RFC 7609,
4.8, and what others call: the rendezvous and the link group, the application, the peer by its CDC
messages. Nothing here waits, and nothing here knows the time: the stream above sets `on_readable`
and `on_writable`, the host below calls `on_timer`.

A received CDC message is applied in this order: sequence number, cursors (and with them data),
producer flags, then the connection flags in the order A, C, D. If A is set, cursors and producer
flags are not read, however wrong they are: all data is dropped with them (A.4, A-bit; 4.8.2, 2A).
C and D promise that the cursors announce all data, so they do not count beside impossible cursors.
A message that outruns the end of the rendezvous is applied too, but its data is shown only after
`established` (3.5.2.4).

The states and all their edges are declared in `trio_smc.states.connection`; a connection is what
that machine reads and does: guards are attributes here, actions methods.

CLOSED means that the RMBE may serve another connection. The host hears of it only when the last
word (C or A) is complete: it may be lost with its link, and a peer that has not heard it may send
its writes again over another link (RFC 7609, 4.6.2), into the RMBE. Unless a timer or the loss of
the links says that nobody is there to hear it.
"""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.statistics import STREAM_COUNTERS, StreamStatistics
from trio_smc.datapath.messenger import Messenger
from trio_smc.datapath.receiver import Receiver, failure
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.datapath.sender import Sender
from trio_smc.states.engine import Machine
from trio_smc.states.tables import CONNECTION
from trio_smc.wire.cdc import (
    ABNORMAL_CLOSE,
    CONNECTION_CLOSED,
    FAILOVER_VALIDATION,
    SENDING_DONE,
    MessageMissing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.messenger import Channel, Holder
    from trio_smc.datapath.rmb import Rmbe
    from trio_smc.wire.cdc import CdcItems

__all__ = ["Connection", "Host"]

_FINAL = ABNORMAL_CLOSE | CONNECTION_CLOSED
_log = logging.getLogger(__name__)
# States in which the peer's data is of no interest (4.8.2, 1A).
_ABORTING = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})
_GIVEN_UP = frozenset({"close_timeout", "abort_timeout"})


class Host(Protocol):
    """Who owns the connection: link group and stream."""

    def connection_closed(self, connection: Connection) -> None:
        """The connection is CLOSED and owes nothing: its RMBE and its alert token are free.

        ``connection.used`` says how much of the RMBE has to be zeroed.
        """

    def set_timer(self, connection: Connection, seconds: float | None) -> None:
        """(Re)start the connection's one timer: ``connection.on_timer()`` then; None stops it."""

    def reset_tcp(self, connection: Connection) -> None:
        """End the TCP connection by RST."""

    def close_tcp(self, connection: Connection) -> None:
        """End the TCP connection by FIN."""

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        """For observers: the connection's state machine has moved."""


_CLOSE_COST: Final = 0.00005
"""Seconds of processor time that a task takes to close a stream at its end: 40 µs by
``python -m tests.e2e.mass_ends closed 1000``, and a reserve."""


def _at_once(callback: Callable[[], None], _charge: float) -> None:
    callback()


def _no_op(*_: object) -> None:
    """Who hears it does nothing."""


# In the place of all that a released connection would call: it and they are no cycle.
_NO_HOST: Final[Any] = SimpleNamespace(
    **dict.fromkeys(
        (
            "connection_closed", "set_timer", "reset_tcp", "close_tcp", "state_changed",
            "request_cdc", "update_soon", "on_cdc_complete", "on_room",
        ),
        _no_op,
    )
)  # fmt: skip
# The machine that all released connections share: CLOSED is never left, and asks nothing.
_CLOSED = Machine(CONNECTION, _NO_HOST, state="CLOSED")


class Connection:
    """One SMC-R connection.

    Args:
      alert_token: our token, by which the peer's CDC messages name this connection.
      rmbe: our element, exclusively this connection's until `Host.connection_closed`.
      host: whom to tell.
      close_timeout: seconds the peer may take to answer an ending (4.8.1, 4.8.2).
      chunks: cut sends into a quarter of the peer's ring each.
      copy_limit: largest changeable buffer, in bytes, that is copied and not borrowed.
      flush_later: called with `Messenger.flush` when a CDC message may wait until the scheduler
        sleeps; None: every send posts its own.

    Attributes:
      receiver, messenger, sender: its parts.
      error: why it failed; None while it has not.
      in_turn: calls what the peer's ending does here, at once or soon (`Timers.in_turn`): of a
        thousand connections that a peer closes together a few at a time wake their tasks.
      on_readable: called once, and cleared, when a blocked reader might go on.
      on_urgent: the same, when `Receiver.urgent` may have changed.
      on_writable: the same, when a blocked writer might go on: window, room on the link,
        everything delivered, nothing borrowed any more, an ending.
    """

    __slots__ = (
        "_aborting",
        "_alert_token",
        "_application_closed",
        "_cause",
        "_close_timeout",
        "_errno",
        "_applied_all",
        "_host",
        "_last_received",
        "_machine",
        "_peer_flags",
        "_released",
        "_rmbe",
        "_keep_unread",
        "_tcp_ended",
        "_timer",
        "cdcs_received",
        "close_pending",
        "eof_pending",
        "error",
        "failovers",
        "got_closed",
        "in_turn",
        "messenger",
        "on_readable",
        "on_urgent",
        "on_writable",
        "peer_rmbe_known",
        "receiver",
        "sender",
        "sent_closed",
        "stale_cdcs",
        "write_closed",
    )

    def __init__(
        self,
        *,
        alert_token: int,
        rmbe: Rmbe,
        host: Host,
        close_timeout: float,
        chunks: bool = True,
        copy_limit: int = 64 * 1024,
        flush_later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._alert_token = alert_token
        self._rmbe = rmbe
        self._host = host
        self._close_timeout = close_timeout
        self.receiver: Receiver = Receiver(rmbe, self._on_overwritten)
        self.messenger: Messenger = Messenger(self, self.receiver, flush_later)
        self.receiver.messenger = self.messenger
        self.sender: Sender = Sender(self.messenger, chunks=chunks, copy_limit=copy_limit)
        self.error: OSError | None = None
        self.in_turn: Callable[[Callable[[], None], float], None] = _at_once
        self.on_readable: Callable[[], None] | None = None
        self.on_urgent: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._machine = Machine(CONNECTION, self)
        self._timer: str | None = None  # the event that the running timer stands for
        self._errno = errno.ECONNABORTED  # what an abort is to the application
        self._cause: BaseException | None = None
        self._last_received = 0  # SR of 4.6.1
        self._peer_flags = 0  # D, C, A seen so far
        self._aborting = False
        self._applied_all = True
        self._application_closed = False
        self._released = False
        self._keep_unread = False
        self._tcp_ended = False
        self.write_closed: bool = False
        self.sent_closed: bool = False
        self.got_closed: bool = False
        self.eof_pending: bool = False
        self.close_pending: bool = False
        self.peer_rmbe_known: bool = False
        self.cdcs_received: int = 0
        self.stale_cdcs: int = 0
        self.failovers: int = 0

    def __repr__(self) -> str:
        return f"<Connection {self._alert_token:#010x} {self.state}>"

    # --- properties --------------------------------------------------------------------------

    @property
    def alert_token(self) -> int:
        """Our token, 32 bits."""
        return self._alert_token

    @property
    def rmbe(self) -> Rmbe:
        """Our element."""
        return self._rmbe

    @property
    def sequence_sent(self) -> int:
        """Sequence number of the last CDC message completed: SS of RFC 7609, 4.6.1."""
        return self.messenger.completed

    @property
    def sequence_received(self) -> int:
        """Sequence number of the last CDC message received: SR of RFC 7609, 4.6.1."""
        return self._last_received

    @property
    def state(self) -> str:
        """The state of RFC 7609, 4.8, as `trio_smc.states` names it."""
        return self._machine.state

    @property
    def unread(self) -> bool:
        """Whether data is there that the application has not taken (guard of the states)."""
        return self.receiver.received != self.receiver.consumed

    @property
    def used(self) -> int | None:
        """Bytes from the ring's start that the peer can have written; None: unknown."""
        # Only C is a promise that every write was told, and only unaborted we listened to it.
        if self._peer_flags & _FINAL == CONNECTION_CLOSED and self._applied_all:
            return min(self.receiver.received, self._rmbe.usable)
        return None

    @property
    def ending(self) -> bool:
        """Whether `close` was called and data of ours, or the C after it, may not have reached
        the peer yet: until then the link must stay."""
        if self._aborting:
            return False
        if self.sent_closed:
            return (
                self.messenger.cdc_requested or self.messenger.completed != self.messenger.sequence
            )
        return self.close_pending

    @property
    def unsent(self) -> bool:
        """Whether data is under way (guard of the states, RFC 7609, 4.8.1 (3A, 4A)).

        Data only: a cursor update under way is no reason to wait with an ending, as what is
        posted arrives in order, nor to call the peer's close a loss of data.
        """
        return self.messenger.produced != self.sender.delivered

    @property
    def starved(self) -> bool:
        """Whether a task waits to send and nothing can be posted."""
        return self.on_writable is not None and self.sender.sendable and not self.sender.can_send

    def counters(self) -> tuple[int, ...]:
        """The counters so far, in the order of `STREAM_COUNTERS`."""
        return (
            self.messenger.produced,
            self.receiver.received,
            self.sender.writes,
            self.messenger.cdcs_sent,
            self.cdcs_received,
            self.messenger.coalesced,
            self.sender.window_stalls,
            self.stale_cdcs,
            self.failovers,
        )

    def statistics(self) -> StreamStatistics:
        """The counters so far."""
        return StreamStatistics(**dict(zip(STREAM_COUNTERS, self.counters(), strict=True)))

    def set_policy(
        self, *, close_timeout: float, flush_later: Callable[[Callable[[], None]], None] | None
    ) -> None:
        """Change what the constructor was given, as the call that opens the connection wants."""
        self._close_timeout = close_timeout
        self.messenger.flush_later = flush_later

    # --- from the rendezvous and the link group ----------------------------------------------

    def peer_known(
        self,
        *,
        alert_token: int,
        element_size: int,
        eye_catcher: bool,
        channel: Channel,
        address: int,
        rkey: int,
    ) -> None:
        """The peer's Accept or Confirm is in: where our data goes.

        Args:
          alert_token: the peer's token, for our CDC messages to it.
          element_size: bytes of the peer's RMBE.
          eye_catcher: whether the peer's RMBEs start with an eye catcher; ours are laid out.
          channel: the link to use.
          address: where the peer's RMBE starts, as its RMB's address on that link says.
          rkey: of the peer's RMB on that link.

        Raises:
          ValueError: the element has no room for data.
        """
        first = len(EYE_CATCHER) if eye_catcher else 0
        if element_size <= first:
            raise ValueError("the peer's element has no room for data")
        self.peer_rmbe_known = True
        self.sender.set_peer(alert_token, element_size, first)
        if self._released:
            return
        if self.receiver.first != self._rmbe.first:
            self.receiver.lay_out()
        self._use(channel, address, rkey)
        if self.receiver.announced < self.receiver.urgent_mark <= self.receiver.consumed:
            self.messenger.request_cdc()

    def established(self) -> None:
        """The rendezvous is complete: the application may send and receive (4.8.1, 2)."""
        self._process("established")
        if self._released:
            self.receiver.open = True  # its link group was quicker: see `ended_before_established`
            self.wake_all()

    def ended_before_established(self) -> bool:
        """The link group ended before the rendezvous: whether data or an end came before that.

        If so `established` is due all the same: TCP would show it, too.
        """
        self.links_lost()
        receiver = self.receiver
        return not receiver.purged and (receiver.done or receiver.received > 0)

    def withdraw(self) -> None:
        """The rendezvous fell back to TCP: give the RMBE back and leave TCP alone."""
        self._tcp_ended = True
        self.peer_rmbe_known = False
        self._process("close")

    def links_lost(self) -> None:
        """No link is left in the group: nothing can be sent any more (4.8.3)."""
        self.messenger.cdc_requested = False
        self.messenger.stop()
        self._process("links_lost")
        self._release_if_due()

    def rmbe_conflict(self) -> None:
        """The peer gave the RMBE that we write into to another connection (4.4.2)."""
        self.messenger.cdc_requested = False
        self.messenger.stop()
        self._process("rmbe_conflict")
        self._release_if_due()

    def tcp_reset(self) -> None:
        """The TCP connection was reset by the peer (4.8.2).

        A peer that had closed has only given up waiting for our answer: it gets one, and all it
        sent can still be read, as when its links are lost (4.8.3).
        """
        self._errno = errno.ECONNRESET
        self._keep_unread = self.got_closed
        self._process("abort")

    def user_timeout(self) -> None:
        """Data was not acknowledged for as long as the application is willing to wait."""
        self._errno = errno.ETIMEDOUT
        self._process("abort")

    # --- from the application ----------------------------------------------------------------

    def send(self, data: memoryview) -> int:
        """Post as much of ``data`` as window and link take; never waits.

        Args:
          data: a contiguous view of bytes (format "B"): all that waits to be sent, since
            whether more waits is part of the protocol. Unless it is a view of a bytes object
            it must not change while `Sender.borrowed` is not 0.

        Returns:
          The number of bytes posted. With fewer than given, set `on_writable` and send the rest
          when it was called.

        Raises:
          OSError: the connection has failed, or (EPIPE) its writing side was shut down.
        """
        sender = self.sender
        if not sender.sendable:
            raise self._refusal()
        return sender.send(data) if sender.send_limit is None else sender.send_limited(data)

    def send_urgent(self, data: memoryview) -> int:
        """Like `send`, and the last byte of ``data`` is urgent.

        With fewer bytes posted than given, call it again with the rest, or
        `Sender.withdraw_urgent`; nothing else may be sent before. No byte is posted by anybody
        until the peer has taken the urgent byte before this one.

        Raises:
          ValueError: no data.
          OSError: as from `send`.
        """
        if not data:
            raise ValueError("at least one byte is urgent")
        if not self.sender.sendable:
            raise self._refusal()
        return self.sender.send_urgent(data)

    def _refusal(self) -> OSError:
        """Why no data can be sent."""
        if self.error is None and not self.write_closed:
            if not self.receiver.open:
                return OSError(errno.ENOTCONN, "the rendezvous is not complete")
            # The peer has closed: data cannot reach a reader any more.
            self._process("abort")
        if self.error is not None:
            return failure(self.error)
        return OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    def limit_unacknowledged(self, limit: int | None) -> None:
        """Have at most ``limit`` bytes unacknowledged at a time; None: as many as fit."""
        self.sender.send_limit = limit
        self._wake_writer()

    def shutdown_write(self) -> None:
        """Nothing more will be sent; what is under way still arrives (4.8.1, 3A)."""
        if not self.write_closed:
            self.write_closed = True
            self.sender.sendable = False
            self.messenger.urgent_goal = 0
            self.messenger.flush()
            self._process("shutdown_wr")

    def close(self) -> None:
        """The application is done with both directions; the rest happens by itself.

        What is under way still arrives, unless data is unread: then the connection is reset
        (4.8.1, 3A). Large buffers still `borrowed` are copied.
        """
        self.sender.keep_copies()
        self.write_closed = True
        self.sender.sendable = False
        self._application_closed = True
        self.messenger.urgent_goal = 0
        self.receiver.finished = True
        self.messenger.flush()
        self._process("close")

    def disown(self) -> None:
        """`close`, but not by the application, whose calls fail from now on."""
        self.close()
        self._fail(errno.EBADF)
        self.wake_all()

    def abort(self) -> None:
        """Reset the connection: nothing more is sent or received (4.8.2)."""
        self.write_closed = True
        self.sender.sendable = False
        self._process("abort")

    # --- from the link and the host ----------------------------------------------------------

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""
        self.messenger.completed = sequence
        if self.sender.complete(sequence):
            self._wake_writer()
        self._after_delivery()
        if self.messenger.final_posted:
            if self.messenger.flags & ABNORMAL_CLOSE and sequence == self.messenger.sequence:
                self._process("abort_sent")
            self._release_if_due()

    def _after_delivery(self) -> None:
        messenger, sender = self.messenger, self.sender
        if sender.flush_when_delivered and sender.delivered == messenger.announced:
            messenger.flush()
        if messenger.produced == sender.delivered:
            if self.eof_pending or self.close_pending:
                self._process("all_sent")
            # Delivery opens no window: who waits for that would only look and sleep again.
            if not messenger.blocked or not sender.sendable:
                self._wake_writer()

    def on_room(self) -> None:
        """The link has room again, as `Channel.wait_for_room` promised."""
        if self.messenger.holder is None:
            self.messenger.on_room()
            self._wake_writer()
            self._release_if_due()

    def on_timer(self) -> None:
        """The time of `Host.set_timer` is over."""
        event, self._timer = self._timer, None
        if event is not None:
            self._process(event)

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort because the peer broke the protocol; the application's error names ``exc``."""
        if self._cause is None:
            self._cause = exc
        self._process("abort")

    # --- changing the link, for `trio_smc.failover.replay` (4.6) -----------------------------

    @property
    def channel(self) -> Channel | None:
        """The link it sends on; None before `peer_known` and when it is over."""
        return self.messenger.channel

    def hold(self, holder: Holder) -> None:
        """Post nothing from now on: ``holder`` does, until `resume` or `switch`."""
        self.messenger.holder = holder
        self.messenger.waiting = True

    def switch(self, channel: Channel, address: int, rkey: int) -> None:
        """Send on another link from now on; see `peer_known`."""
        self.failovers += 1
        self._use(channel, address, rkey)

    def resume(self) -> None:
        """Post again, and first what came to be owed meanwhile."""
        self.messenger.holder = None
        self.on_room()

    def _use(self, channel: Channel, address: int, rkey: int) -> None:
        messenger = self.messenger
        messenger.channel = channel
        messenger.rkey = rkey
        messenger.holder = None
        messenger.waiting = False
        self.sender.address = address + messenger.peer_first

    # --- from the peer -----------------------------------------------------------------------

    def on_cdc_untrusted(self, message: CdcItems) -> None:
        """Apply a CDC message that names our token, unpacked.

        Raises:
          MessageMissing: failover validation failed, and nothing has happened. When everything
            was taken that other links have brought, call this again; with the same answer the
            data is lost, and `protocol_error` is due.
          ProtocolError: it cannot be true; the connection has been aborted.
        """
        _, sequence, _, wrap, offset, taken_wrap, taken_offset, flags, endings = message
        arrived = False
        receiver, sender = self.receiver, self.sender
        try:
            if flags & FAILOVER_VALIDATION and not self._released:
                self._validate_untrusted(sequence)
                return
            if (sequence - self._last_received) & 0x8000 or self._released:
                self.stale_cdcs += 1
                return
            self._last_received = sequence
            self.cdcs_received += 1
            if not (self._aborting or (endings and endings & ABNORMAL_CLOSE)):
                if offset != receiver.received_offset or wrap != receiver.received_wrap:
                    arrived = receiver.producer_untrusted(wrap, offset)
                    if self.sent_closed:
                        receiver.drop_unread()
                if taken_offset != sender.taken_offset or taken_wrap != sender.taken_wrap:
                    delivered = sender.delivered
                    opened = sender.consumer_untrusted(taken_wrap, taken_offset)
                    if sender.delivered != delivered or (opened and self.on_writable is not None):
                        self._on_consumer(opened, sender.delivered != delivered)
                if (flags or receiver.flags_pending) and receiver.flags_untrusted(flags, arrived):
                    self._wake_urgent()
        except ProtocolError as exc:
            self._abort_for(exc)
        if endings and endings & ~self._peer_flags:
            self._note_endings(endings & ~self._peer_flags)
        wake = self.on_readable
        if arrived and wake is not None:
            self.on_readable = None
            wake()

    def _on_consumer(self, opened: bool, delivered: bool) -> None:
        """The peer's consumer cursor has ``opened`` the window, or shows what was ``delivered``."""
        if delivered:
            self._after_delivery()
        if opened and self.on_writable is not None:
            self._wake_writer()

    def _abort_for(self, exc: ProtocolError) -> None:
        """Abort and raise ``exc``, unless it is about a message behind A, whose turn is to come."""
        if self._peer_flags & ABNORMAL_CLOSE and not self._aborting:
            return
        if not isinstance(exc, MessageMissing):
            self.protocol_error(exc)
        raise exc

    def _note_endings(self, endings: int) -> None:
        """Note flags when they come, and process them in turn: A implies C, and C implies D."""
        if endings & ABNORMAL_CLOSE:
            self._peer_flags |= ABNORMAL_CLOSE | CONNECTION_CLOSED | SENDING_DONE
        elif endings & CONNECTION_CLOSED:
            self._peer_flags |= CONNECTION_CLOSED | SENDING_DONE
        elif endings & SENDING_DONE:
            self._peer_flags |= SENDING_DONE
        else:
            return  # reserved bits
        self.in_turn(partial(self._on_endings, endings), _CLOSE_COST)

    def _on_endings(self, endings: int) -> None:
        """The first CDC message with these flags: A before C before D; C implies D."""
        if self._released:
            return
        if endings & ABNORMAL_CLOSE:
            self._errno = errno.ECONNRESET
            self._process("peer_abort")
        elif endings & CONNECTION_CLOSED:
            self.receiver.done = True
            self._process("peer_closed")
        elif endings & SENDING_DONE:
            self.receiver.done = True
            self._process("peer_done")

    def _on_overwritten(self, exc: ProtocolError) -> None:
        """Abort: the eye catcher of our RMBE is gone (4.4.1)."""
        _log.warning("%r is reset: %s", self, exc)
        self.protocol_error(exc)

    def _validate_untrusted(self, sequence: int) -> None:
        """Failover validation: of such a message only token and sequence count (4.6.1).

        What a connection misses that is reset already is no news, nor worth waiting for.

        Raises:
          MessageMissing: the peer believes we have a message that did not arrive yet.
        """
        if (self._last_received - sequence) & 0x8000 and not self._aborting:
            raise MessageMissing(
                f"data was lost with a link: message {sequence} is missing after "
                f"{self._last_received}"
            )
        self.receiver.replayed = True

    # --- waking ------------------------------------------------------------------------------

    def _wake_reader(self) -> None:
        wake = self.on_readable
        if wake is not None:
            self.on_readable = None
            wake()

    def _wake_writer(self) -> None:
        wake = self.on_writable
        if wake is not None:
            self.on_writable = None
            wake()

    def _wake_urgent(self) -> None:
        wake = self.on_urgent
        if wake is not None:
            self.on_urgent = None
            wake()

    def _process(self, event: str) -> None:
        """Process an event of the state machine; then every waiting task checks its condition.

        Also after an internal edge: the peer's C behind its D (4A) leaves APPCLOSEWAIT1 as it is,
        and ends all sending.  Events are rare, so which condition has changed is not worked out.
        """
        if self._machine.send(event):  # else queued: the call that is processing wakes
            self.wake_all()

    def wake_all(self) -> None:
        """Let every waiting task check its condition."""
        if self.on_readable is not None:
            self._wake_reader()
        if self.on_writable is not None:
            self._wake_writer()
        if self.on_urgent is not None:
            self._wake_urgent()

    # --- model of the state machine ----------------------------------------------------------

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Called by the machine after each transition; `_process` wakes."""
        if new in _ABORTING:
            self._applied_all = new == "CLOSED" and not self._aborting
            self._aborting = True
            self.sender.sendable = False
        self._host.state_changed(self, old, new, event)
        if new == "CLOSED":
            if event in _GIVEN_UP:
                self.messenger.cdc_requested = (
                    False  # the peer is given up, and with it the last word
                )
                self.messenger.stop()
            if self._timer is not None:
                self._timer = None
                self._host.set_timer(self, None)
            self.close_tcp()
            self._release_if_due()

    def _release_if_due(self) -> None:
        """Give the RMBE back once the state is CLOSED and the last word has arrived."""
        if self._released or self.messenger.cdc_requested or self._machine.state != "CLOSED":
            return
        if (
            self.messenger.final_posted
            and self.messenger.completed != self.messenger.sequence
            and self.messenger.channel is not None
        ):
            return
        self._released = True
        if self._application_closed:
            self.receiver.drop_unread()
        self.receiver.leave_ring()
        self.sender.drop_unsent()
        self.messenger.stop()
        self.messenger.flush_later = None
        self._machine = _CLOSED
        host, self._host = self._host, _NO_HOST
        self.receiver.messenger = self.messenger.poster = _NO_HOST
        self.receiver.on_overwritten = _no_op
        self.wake_all()  # nothing is borrowed or under way any more
        host.connection_closed(self)

    def open_to_application(self) -> None:
        """Action."""
        self.receiver.open = True
        self.sender.sendable = not self.got_closed

    def send_done(self) -> None:
        """Action: D."""
        self.messenger.flags |= SENDING_DONE
        self.messenger.request_cdc()

    def send_closed(self) -> None:
        """Action: C, the last message."""
        self.sent_closed = True
        self.messenger.flags |= CONNECTION_CLOSED
        self.messenger.request_cdc()

    def send_abort(self) -> None:
        """Action: A, the last message."""
        if self.messenger.channel is None or self.messenger.final_posted:
            self._process("abort_sent")
            return
        self.messenger.blocked = False
        self.messenger.urgent_goal = 0
        self.messenger.flags |= ABNORMAL_CLOSE
        self.messenger.request_cdc()

    def reset_tcp(self) -> None:
        """Action."""
        if not self._tcp_ended:
            self._tcp_ended = True
            self._host.reset_tcp(self)

    def close_tcp(self) -> None:
        """Action: FIN, unless TCP is gone."""
        if not self._tcp_ended:
            self._tcp_ended = True
            self._host.close_tcp(self)

    def purge(self) -> None:
        """Action: drop unread and unsent data."""
        self.sender.drop_unsent()
        if not self._keep_unread:
            self.receiver.purged = True
            self.receiver.drop_unread()

    def _fail(
        self, number: int, cause: BaseException | None = None, text: str | None = None
    ) -> None:
        """Make later calls of the application fail; the first error stays."""
        if self.error is None:
            self.error = self.receiver.error = OSError(number, text or os.strerror(number))
            self.error.__cause__ = cause

    def fail_aborted(self) -> None:
        """Action: an abort of our own, or the TCP reset that came in its place."""
        self._fail(self._errno, self._cause)

    def fail_reset(self) -> None:
        """Action: the peer's abort."""
        self._fail(errno.ECONNRESET)

    def fail_links_lost(self) -> None:
        """Action: no way to the peer."""
        self._fail(errno.ECONNABORTED, text="no link to the peer is left")

    def fail_handshake(self) -> None:
        """Action: for whoever waits for the rendezvous."""
        self._fail(self._errno, self._cause)

    def arm_close_timer(self) -> None:
        """Action (4.8.1, note on stranded states)."""
        self._arm("close_timeout")

    def arm_abort_timer(self) -> None:
        """Action (4.8.2, 1)."""
        self._arm("abort_timeout")

    def _arm(self, event: str) -> None:
        self._timer = event
        self._host.set_timer(self, self._close_timeout)

    def set_eof_pending(self) -> None:
        """Action."""
        self.eof_pending = True

    def set_close_pending(self) -> None:
        """Action."""
        self.eof_pending = False
        self.close_pending = True

    def set_got_closed(self) -> None:
        """Action: what we would send now has no reader."""
        self.got_closed = True
        self.sender.sendable = False
