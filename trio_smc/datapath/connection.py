"""One SMC-R connection without I/O: states, endings and the messages of the peer.

Theory of operation
-------------------
A `Connection` holds a `Receiver`, which reads our RMBE, a `Sender`, which writes into the peer's,
and a `Messenger`, which announces both to the peer. This module has the states of RFC 7609, 4.8,
and the calls of the rendezvous, the link group, the application and the peer's CDC messages.
Nothing here waits or reads a clock: the stream above sets `on_readable` and `on_writable`, the host
below calls `on_timer`.

A received CDC message is applied in this order: sequence number, cursors (and with them data),
producer flags, then the connection flags in the order A (abnormal close), C (connection closed), D
(sending done). If A is set, only the producer cursor is read, and it is ignored if it is invalid,
or if the peer has changed links: then the data before it may be lost (4.6.2). C and D promise that
the cursors announce all data, so both are ignored if the cursors beside them are invalid. A message
that arrives before the end of the rendezvous is applied, but its data can be read only after
`established` (3.5.2.4).

Endings, as the application sees them
-------------------------------------
The application sees the end of the connection as it would see that of a TCP connection on Linux:

- It reads all data that has arrived, whatever happens afterwards. If D or C had arrived, the end of
  the stream follows. Otherwise one call gets the error, and after it reading is at the end.
- After the peer's C the first send succeeds, although no reader is left: TCP cannot know that
  before the peer answers, either. RFC 7609, 4.8.1 (4A) requires an abort, which that send starts;
  later sends fail with EPIPE. So do sends after any error that a call has reported.
- The error is reported once, by a send, a read at the end of the data, or SO_ERROR, whichever comes
  first. It is ECONNRESET for everything that the peer or the links did. If D or C had arrived, it
  is EPIPE, and only sends and SO_ERROR report it. If this side has ended, too, there is no error.

The states and all their edges are declared in `trio_smc.states.connection`, and a connection is the
model of that machine: guards are attributes, actions are methods.

CLOSED means that the RMBE may serve another connection. The host is notified only when the final
message (C or A) is complete. That message may be lost with its link, and a peer that has not
received it may write its data again over another link (RFC 7609, 4.6.2), into the RMBE. The host is
notified without it after a timer has expired, or when the links are lost.
"""

from __future__ import annotations

import errno
import logging
import os
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.statistics import STREAM_COUNTERS, StreamStatistics
from trio_smc.datapath.messenger import Messenger
from trio_smc.datapath.receiver import Receiver
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
_CLOSED_AND_DONE = CONNECTION_CLOSED | SENDING_DONE  # C implies D
_ALL_ENDINGS = ABNORMAL_CLOSE | _CLOSED_AND_DONE  # A implies both
_log = logging.getLogger(__name__)
# States in which the peer's data is of no interest (4.8.2, 1A).
_ABORTING = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})
_GIVEN_UP = frozenset({"close_timeout", "abort_timeout"})


class Host(Protocol):
    """The owner of a connection: its link group and stream."""

    def connection_closed(self, connection: Connection) -> None:
        """The connection is CLOSED and complete: its RMBE and its alert token are free.

        ``connection.used`` is the number of bytes of the ring to be zeroed.
        """

    def set_timer(self, connection: Connection, seconds: float | None) -> None:
        """(Re)start the timer that calls ``connection.on_timer()``; None stops it."""

    def reset_tcp(self, connection: Connection) -> None:
        """End the TCP connection by RST."""

    def close_tcp(self, connection: Connection) -> None:
        """End the TCP connection by FIN."""

    def show_end(self, connection: Connection) -> bool:
        """The peer sends no more: its D or C has arrived, or its process has ended.

        Returns:
          False if the peer has sent bytes on the TCP connection, which is a violation.
        """

    def tcp_end(self, connection: Connection) -> Literal["none", "fin", "reset"]:
        """How the peer has ended the TCP connection."""

    def state_changed(self, connection: Connection, old: str, new: str, event: str) -> None:
        """Notify observers of a new state."""


_CLOSE_COST: Final = 0.00005
"""Seconds of processor time that a task takes to close a stream at its end: 40 µs by
``python -m tests.e2e.mass_ends closed 1000``, and a reserve."""


def _at_once(callback: Callable[[], None], _charge: float) -> None:
    callback()


def _no_op(*_: object) -> None:
    """Do nothing."""


# Replaces everything that a released connection would call, so that no reference cycle is left.
_NO_HOST: Final[Any] = SimpleNamespace(
    **dict.fromkeys(
        (
            "connection_closed", "set_timer", "reset_tcp", "close_tcp", "state_changed",
            "request_cdc", "update_soon", "on_cdc_complete", "on_room",
        ),
        _no_op,
    )
)  # fmt: skip
# The machine that all released connections share: CLOSED is never left and has no actions.
_CLOSED = Machine(CONNECTION, _NO_HOST, state="CLOSED")


class Connection:
    """One SMC-R connection.

    Args:
      alert_token: our token, by which the peer's CDC messages name this connection.
      rmbe: our element, of this connection alone until `Host.connection_closed`.
      host: the link group and stream, which are notified.
      close_timeout: seconds that the peer may take to answer an ending (4.8.1, 4.8.2).
      chunks: True to cut sends into pieces of a quarter of the peer's ring.
      copy_limit: largest changeable buffer, in bytes, that is copied and not borrowed. The default
        was chosen; no measurement is recorded.
      flush_later: called with `Messenger.flush` if a CDC message may wait until the scheduler
        sleeps; None: every send posts its own.

    Attributes:
      receiver, messenger, sender: its parts.
      error: the reason of a failed connection, else None.
      refuses_data: data that arrives from now on has no reader, and is dropped.
      in_turn: calls its argument at once or soon (`Timers.in_turn`). If a peer closes a thousand
        connections together, a few of them at a time wake their tasks.
      on_readable: called once, and cleared, when a blocked reader may be able to continue.
      on_urgent: the same, when `Receiver.urgent` may have changed.
      on_writable: the same, when a blocked writer may be able to continue: more window, room on the
        link, all data delivered, nothing borrowed any more, or an ending.
    """

    __slots__ = (
        "_aborting",
        "_alert_token",
        "_application_closed",
        "_cause",
        "_checks_arrivals",
        "_close_timeout",
        "_data_end",
        "_errno",
        "_applied_all",
        "_host",
        "_last_received",
        "_machine",
        "_peer_flags",
        "_released",
        "_rmbe",
        "_reset_due",
        "_tcp_ended",
        "_timer",
        "_validation_received",
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
        "refuses_data",
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
        self._timer: str | None = None  # the event that the running timer will send
        self._errno = errno.ECONNABORTED  # the application's error after an abort
        self._cause: BaseException | None = None
        self._last_received = 0  # SR of 4.6.1
        self._peer_flags = 0  # D, C, A received so far
        self._checks_arrivals = True  # `_check_arrival` is called for the next data
        self._aborting = False
        self._applied_all = True
        self._application_closed = False
        self._released = False
        self._tcp_ended = False
        self._reset_due = False  # TCP ends by RST
        self._data_end: int | None = None  # bytes that had arrived when `refuse_data` was called
        self._validation_received = False  # a failover validation, which `cdcs_received` omits
        self.write_closed: bool = False
        self.sent_closed: bool = False
        self.got_closed: bool = False
        self.eof_pending: bool = False
        self.close_pending: bool = False
        self.peer_rmbe_known: bool = False
        self.refuses_data: bool = False
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
        """The state of RFC 7609, 4.8 (`trio_smc.states.connection`)."""
        return self._machine.state

    @property
    def peer_flags(self) -> int:
        """D, C and A received so far (A.4)."""
        return self._peer_flags

    @property
    def unread(self) -> bool:
        """True if the application has data to read (guard of the states)."""
        return self.receiver.received != self.receiver.consumed

    @property
    def used(self) -> int | None:
        """Bytes from the ring's start that the peer may have written; None: unknown."""
        # C promises that every write was announced; after an abort, C may have been ignored.
        if self._peer_flags & _FINAL == CONNECTION_CLOSED and self._applied_all:
            return min(self.receiver.received, self._rmbe.usable)
        return None

    @property
    def ending(self) -> bool:
        """True if `close` was called and our data, or the C after it, may not have arrived yet.

        Until then the link must stay.
        """
        if self._aborting:
            return False
        if self.sent_closed:
            return (
                self.messenger.cdc_requested or self.messenger.completed != self.messenger.sequence
            )
        return self.close_pending

    @property
    def peer_has_ended(self) -> bool:
        """True if the peer's C or A has arrived."""
        return bool(self._peer_flags & _FINAL)

    @property
    def closed_arrived(self) -> bool:
        """True if C has reached the peer (guard of the states)."""
        messenger = self.messenger
        return (
            self.sent_closed
            and messenger.final_posted
            and messenger.completed == messenger.sequence
        )

    @property
    def abort_in_flight(self) -> bool:
        """True if A was requested or posted, and is not known to have arrived."""
        messenger = self.messenger
        return (
            bool(messenger.flags & ABNORMAL_CLOSE)
            and messenger.channel is not None
            and (messenger.cdc_requested or messenger.completed != messenger.sequence)
        )

    @property
    def unsent(self) -> bool:
        """True if data is in flight (guard of the states, RFC 7609, 4.8.1 (3A, 4A)).

        Window updates do not count. An ending need not wait for them, because messages arrive in
        the order of posting, and the peer's close loses no data with them.
        """
        return self.messenger.produced != self.sender.delivered

    @property
    def writing(self) -> bool:
        """True if data is in flight, or a task waits to send more (guard of the states, 4A).

        Data that the peer had not read when it sent C is in flight, too: the cursor beside C shows
        that, also if the data has arrived. TCP answers such data with RST.
        """
        messenger = self.messenger
        unread = self.sender.taken != messenger.produced
        return unread or self.unsent or messenger.blocked or self.starved

    @property
    def starved(self) -> bool:
        """True if a task waits to send and nothing can be posted."""
        return self.on_writable is not None and self.sender.sendable and not self.sender.can_send

    def counters(self) -> tuple[int, ...]:
        """The counters, in the order of `STREAM_COUNTERS`."""
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
        """The counters as `StreamStatistics`."""
        return StreamStatistics(**dict(zip(STREAM_COUNTERS, self.counters(), strict=True)))

    def set_policy(
        self, *, close_timeout: float, flush_later: Callable[[Callable[[], None]], None] | None
    ) -> None:
        """Replace arguments of the constructor by those of the call that opens the connection."""
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
        """Note the peer's RMBE from its Accept or Confirm.

        Args:
          alert_token: the peer's token, for our CDC messages.
          element_size: bytes of the peer's RMBE.
          eye_catcher: True if the peer's RMBEs start with an eye catcher; our RMBE has
            its final layout.
          channel: the link to use.
          address: start of the peer's RMBE on that link.
          rkey: RKey of the peer's RMB on that link.

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
        if self._peer_flags & ABNORMAL_CLOSE:
            self._process("peer_abort")  # again: it was ignored as long as A had no address

    def established(self) -> None:
        """The rendezvous is complete: the application may send and receive (4.8.1, 2)."""
        if self.messenger.progress is None and self.messenger.channel is not None:
            self.sender.find_progress(self.messenger.channel)
        self._process("established")
        if self._machine.state == "CLOSED":
            self.receiver.open = True  # the peer, or the link group, has ended the connection
            self.wake_all()

    def ended_before_established(self) -> bool:
        """End the connection, because its link group ended after the peer had sent SMC Confirm.

        Returns:
          True if the caller still calls `established`, because on TCP the application would receive
          the connection, what has arrived on it, and its end. False if its data is not to be read.
        """
        self.links_lost()
        return not self.receiver.purged

    def withdraw(self) -> None:
        """The rendezvous fell back to TCP: release the RMBE, but not the TCP connection."""
        self._tcp_ended = True
        self.peer_rmbe_known = False
        self._process("close")

    def links_lost(self, *, all_received: bool = False) -> None:
        """No link is left in the group: nothing more can be sent (4.8.3).

        Args:
          all_received: the peer's process has ended, and this side has received all that the peer
            had posted. If the kernel has ended the TCP connection by FIN, too, the peer has closed.
        """
        self.messenger.cdc_requested = False
        self.messenger.stop()  # first: an end of the peer must post nothing on a closed link
        self.notice_tcp_reset()
        if all_received and not self._released:
            self._peer_ended_untrusted()
        self._process("links_lost")
        self._release_if_due()

    def _peer_ended_untrusted(self) -> None:
        """Process the end of the peer's process like its C, if nothing is missing; like its A, if
        it had not read all that this side has written: over TCP the kernel then sends RST.
        """
        if self._peer_flags & _FINAL or self._aborting:
            return
        if self._host.tcp_end(self) != "fin":
            return
        if not self._host.show_end(self):
            self.sent_past_smc()
            return
        try:
            self.receiver.progress_untrusted(self._rmbe.written)
        except ProtocolError as exc:
            _log.warning("%r is reset: %s", self, exc)
            self.protocol_error(exc)
            return
        if self.refuses_data:
            self._drop_arrived()
        messenger = self.messenger
        if messenger.blocked or self._rmbe.taken < messenger.produced:
            self._peer_flags |= _ALL_ENDINGS
            self._process("peer_abort")
            return
        self.sender.taken = messenger.produced
        self._peer_flags |= _CLOSED_AND_DONE
        self.receiver.peer_done = True
        self._process("peer_closed")

    @property
    def tcp_has_ended(self) -> bool:
        """True if the peer has ended the TCP connection, or this side has.

        False in the handshake: its messages are read first, and then the end.
        """
        if self._tcp_ended:
            return True
        return self.state != "INIT" and self._host.tcp_end(self) != "none"

    @property
    def resets_tcp(self) -> bool:
        """True if the TCP connection ends by RST."""
        return self._reset_due

    def rmbe_conflict(self) -> bool:
        """The peer gave the RMBE that we write into to another connection (4.4.2).

        From now on nothing is written there, also by no replay after a failover.

        Returns:
          True if this ends a connection that neither side had aborted, and that was not closed by
          both.  After an abort, TCP's RST may reach the peer first, which may then reuse the
          element at once.
        """
        aborted = bool((self.messenger.flags | self._peer_flags) & ABNORMAL_CLOSE)
        # The peer's C may still wait for its turn (`_note_endings`).
        closed = self.sent_closed and bool(self._peer_flags & CONNECTION_CLOSED)
        self.messenger.cdc_requested = False
        self.messenger.stop()
        self._process("rmbe_conflict")
        self._release_if_due()
        return not (aborted or closed)

    def tcp_reset(self, *, no_more_writes: bool = False) -> None:
        """The TCP connection was reset by the peer (4.8.2).

        A peer that had closed has only given up waiting for our answer. It gets the answer, and all
        its data can still be read, like after a loss of the links (4.8.3).

        If this side has aborted, and the peer has never sent a CDC message, the peer has given up
        the handshake and does not answer A.

        no_more_writes: no RDMA write of the peer can arrive any more. Otherwise the RMBE is kept
          for the full time-out.
        """
        if self._reset_due and not self._tcp_ended:
            if no_more_writes:
                self._process("abort_timeout")
            return
        self._errno = errno.ECONNRESET
        self._process("abort")

    def notice_tcp_reset(self) -> None:
        """Process a TCP reset after the peer's C, before the host reports it.

        After C no A can follow (A.4), so RST alone shows that the peer has aborted.
        """
        if self.got_closed and not self._tcp_ended and self._host.tcp_end(self) == "reset":
            self.tcp_reset()

    def user_timeout(self) -> None:
        """Abort: data was not acknowledged within the application's limit (TCP_USER_TIMEOUT)."""
        self._errno = errno.ETIMEDOUT
        self._process("abort")

    # --- from the application ----------------------------------------------------------------

    def send(self, data: memoryview) -> int:
        """Post as much of ``data`` as fits into window and link, without waiting.

        Args:
          data: a contiguous view (format "B") of all the bytes to be sent: the protocol tells the
            peer whether more data waits. Unless it is a view of a bytes object, it must not change
            while `Sender.borrowed` is not 0.

        Returns:
          The number of bytes posted. If that is less than given, set `on_writable` and send the
          rest after it was called.

        Raises:
          OSError: the connection has failed, or (EPIPE) its writing side was shut down.
        """
        sender = self.sender
        if not sender.sendable:
            return self._send_without_reader(len(data))
        return sender.send(data) if sender.send_limit is None else sender.send_limited(data)

    def send_more(
        self, data: memoryview, announce_later: Callable[[Callable[[], None]], None]
    ) -> int:
        """Like `send`, but a small last piece may be announced later; see `Sender.send_more`."""
        if not self.sender.sendable:
            return self._send_without_reader(len(data))
        return self.sender.send_more(data, announce_later)

    def send_urgent(self, data: memoryview) -> int:
        """Like `send`, and the last byte of ``data`` is urgent.

        If fewer bytes were posted than given, the next call must be this one with the rest, or
        `Sender.withdraw_urgent`. Nothing is posted until the peer has consumed the previous urgent
        byte.

        Raises:
          ValueError: no data.
          OSError: as from `send`.
        """
        if not data:
            raise ValueError("at least one byte is urgent")
        if not self.sender.sendable:
            return self._send_without_reader(len(data))
        return self.sender.send_urgent(data)

    def _send_without_reader(self, length: int) -> int:
        """Drop data if the peer has closed, and abort (4.8.1, 4A); otherwise raise the error.

        TCP takes such data into its send buffer and learns only from the peer's RST that no reader
        is left. As much is dropped here as would have fitted into the peer's ring.
        """
        self.notice_tcp_reset()
        self.check_sendable()
        if not self.got_closed:
            raise OSError(errno.ENOTCONN, "the rendezvous is not complete")
        self._errno = errno.EPIPE
        self._process("abort")
        self._fail(errno.EPIPE)  # if no link is left, there is nothing to abort
        return min(length, max(1, self.sender.window))

    def check_sendable(self) -> None:
        """Raise the error that a send of no bytes gets.

        Raises:
          OSError: as from `send`.
        """
        error = self.receiver.take_error()
        if error is None and (self.error is not None or self.write_closed):
            error = OSError(errno.EPIPE, os.strerror(errno.EPIPE))
        if error is not None:
            raise error

    def limit_unacknowledged(self, limit: int | None) -> None:
        """Limit the unacknowledged bytes to ``limit``; None: as many as fit."""
        self.sender.send_limit = limit
        self._wake_writer()

    def shutdown_write(self) -> None:
        """End the sending direction; data in flight still arrives (4.8.1, 3A)."""
        if not self.write_closed:
            self.write_closed = True
            self.sender.sendable = False
            self.messenger.urgent_goal = 0
            self.messenger.flush()
            self._process("shutdown_wr")

    def refuse_data(self) -> None:
        """Reset the connection as soon as more data arrives: the application has shut down both
        directions. It still reads what has arrived."""
        if self._data_end is None and not self._application_closed:
            self._data_end = self.receiver.received
            self._refuse_data()

    def _refuse_data(self) -> None:
        self.refuses_data = self._checks_arrivals = True

    def close(self) -> None:
        """Close both directions for the application, without waiting.

        Data in flight still arrives, unless there is unread data: then the connection is reset
        (4.8.1, 3A). Buffers that are still `borrowed` are copied.
        """
        self.sender.keep_copies()
        self.write_closed = True
        self.sender.sendable = False
        self._application_closed = True
        self.messenger.urgent_goal = 0
        self.receiver.application_closed = True
        self.messenger.flush()
        self._process("close")

    def disown(self) -> None:
        """Close without the application, whose calls fail from now on."""
        self.close()
        self._fail(errno.EBADF)
        self.receiver.purge()
        self.wake_all()

    def abort(self) -> None:
        """Reset the connection: nothing more is sent or received (4.8.2)."""
        self.write_closed = self._application_closed = True
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
            # Delivery opens no window, so a writer that waits for the window stays asleep.
            if not messenger.blocked or not sender.sendable:
                self._wake_writer()

    def on_room(self) -> None:
        """The link has room again, as `Channel.wait_for_room` promised."""
        if self.messenger.holder is None:
            self.messenger.on_room()
            self._wake_writer()
            self._release_if_due()

    def on_timer(self) -> None:
        """The timer of `Host.set_timer` has expired."""
        event, self._timer = self._timer, None
        if event is not None:
            self._process(event)

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort: the peer violated the protocol; ``exc`` causes the application's error."""
        if self._cause is None:
            self._cause = exc
            self._errno = errno.ECONNRESET
        self._process("abort")

    # --- changing the link, for `trio_smc.failover.replay` (4.6) -----------------------------

    @property
    def channel(self) -> Channel | None:
        """The link that it sends on; None before `peer_known` and after the end."""
        return self.messenger.channel

    def hold(self, holder: Holder) -> None:
        """Let ``holder`` post in place of the connection, until `resume` or `switch`."""
        self.messenger.holder = holder
        self.messenger.waiting = True

    def switch(self, channel: Channel, address: int, rkey: int) -> None:
        """Send on another link from now on; see `peer_known`."""
        self.failovers += 1
        self._use(channel, address, rkey)

    def resume(self) -> None:
        """Post again, first the CDC message that was requested meanwhile."""
        self.messenger.holder = None
        self.on_room()

    def _use(self, channel: Channel, address: int, rkey: int) -> None:
        messenger = self.messenger
        messenger.channel = channel
        messenger.forget_progress()
        self._checks_arrivals = True
        messenger.rkey = rkey
        messenger.holder = None
        messenger.waiting = False
        self.sender.address = address + messenger.peer_first
        self.sender.find_progress(channel)

    # --- from the peer -----------------------------------------------------------------------

    def on_cdc_untrusted(self, message: CdcItems) -> None:
        """Apply a CDC message that names our token, unpacked.

        Raises:
          MessageMissing: failover validation failed, and nothing has happened. The caller processes
            everything that other links have received and calls this again. If the error stays, data
            is lost, and the caller calls `protocol_error`.
          ProtocolError: the message is invalid; the connection has been aborted.
        """
        _, sequence, _, wrap, offset, taken_wrap, taken_offset, flags, endings = message
        arrived = False
        receiver, sender = self.receiver, self.sender
        try:
            if flags and flags & FAILOVER_VALIDATION and not self._released:
                self._validation_received = True
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
                    if self._checks_arrivals and self._check_arrival():
                        flags = 0  # about bytes that are gone
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
            self._note_endings(endings & ~self._peer_flags, wrap, offset, flags)
        wake = self.on_readable
        if arrived and wake is not None:
            self.on_readable = None
            wake()

    def _check_arrival(self) -> bool:
        """Data has arrived: the first on this link, or data without a reader.

        Returns:
          True if the bytes are gone, and the flags of their message with them.
        """
        messenger = self.messenger
        if messenger.progress is None and messenger.channel is not None:
            self.sender.find_progress(messenger.channel)
        if self.refuses_data:
            return self._drop_arrived()
        self._checks_arrivals = messenger.progress is None
        return False

    def _drop_arrived(self) -> bool:
        """Drop data that has arrived without a reader; True if this resets the connection.

        After `close` the peer gets no answer: C has told it that no reader is left (4.8.1). If the
        application has shut down both directions, Linux' TCP answers such data with RST.
        """
        receiver = self.receiver
        if self._data_end is None:
            receiver.drop_unread()
            return False
        if not receiver.drop_behind(self._data_end):
            return False
        self._errno = errno.ECONNRESET
        self._process("abort")
        return True

    def _on_consumer(self, opened: bool, delivered: bool) -> None:
        """The consumer cursor has ``opened`` the window, or shows more data ``delivered``."""
        if delivered:
            self._after_delivery()
        if opened and self.on_writable is not None:
            self._wake_writer()

    def _abort_for(self, exc: ProtocolError) -> None:
        """Abort and raise ``exc``, unless the peer's A has arrived and waits for its turn."""
        if self._peer_flags & ABNORMAL_CLOSE and not self._aborting:
            return
        if not isinstance(exc, MessageMissing):
            self.protocol_error(exc)
        raise exc

    def _note_endings(self, endings: int, wrap: int, offset: int, flags: int) -> None:
        """Note new flags, and those that they imply, at once; process them in turn.

        ``wrap``, ``offset`` and ``flags`` are those of the producer in the same message.
        """
        if endings & ABNORMAL_CLOSE:
            if not self._aborting:
                self.receiver.last_producer_untrusted(wrap, offset, flags)
                if self._data_end is not None:
                    self.receiver.drop_behind(self._data_end)
            self._peer_flags |= _ALL_ENDINGS
        elif endings & CONNECTION_CLOSED:
            self._peer_flags |= _CLOSED_AND_DONE
        elif endings & SENDING_DONE:
            self._peer_flags |= SENDING_DONE
        else:
            return  # reserved bits
        self.in_turn(partial(self._on_endings, endings, not self._aborting), _CLOSE_COST)

    def _on_endings(self, endings: int, all_arrived: bool) -> None:
        """Process new flags: A before C before D; C implies D.

        Args:
          all_arrived: True if the cursors beside C or D were applied.  After an abort they are not,
            and then data before the end may be missing, so the reader gets the error.
        """
        if self._released:
            return
        if endings & ABNORMAL_CLOSE:
            self._process("peer_abort")
            return
        if not self._aborting and not self._host.show_end(self):
            self.sent_past_smc()
            return
        if all_arrived:
            self.receiver.peer_done = True
        self._process("peer_closed" if endings & CONNECTION_CLOSED else "peer_done")

    def sent_past_smc(self) -> None:
        """The peer has sent bytes on the TCP connection, past SMC-R: abort."""
        self.protocol_error(ProtocolError("data on the TCP connection"))

    def _on_overwritten(self, exc: ProtocolError) -> None:
        """Abort: the eye catcher of our RMBE is gone, and its data cannot be trusted (4.4.1)."""
        self.receiver.purge()
        _log.warning("%r is reset: %s", self, exc)
        self.protocol_error(exc)

    def _validate_untrusted(self, sequence: int) -> None:
        """Check a failover validation message, by its sequence number alone (4.6.1).

        A connection that is being reset accepts any number.

        Raises:
          MessageMissing: a message that the peer counts as delivered has not arrived yet.
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
        """Process an event of the state machine and wake all waiting tasks.

        Tasks are woken after an internal edge too: the peer's C after its D (4A) keeps the state
        APPCLOSEWAIT1, but ends all sending. Events are rare, so all tasks check their conditions.
        """
        # A queued event is processed, and wakes, in an outer call.
        if self._machine.send(event) and (self.on_readable or self.on_writable or self.on_urgent):
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
        """Called by the machine after each transition; `_process` wakes the tasks."""
        if new in _ABORTING:
            self._applied_all = new == "CLOSED" and not self._aborting
            self._aborting = True
            self.sender.sendable = False
        self._host.state_changed(self, old, new, event)
        if new == "CLOSED":
            if event in _GIVEN_UP:
                self.messenger.cdc_requested = False  # the final message is given up
                self.messenger.stop()
            if self._timer is not None:
                self._timer = None
                self._host.set_timer(self, None)
            self.close_tcp()
            self._release_if_due()

    def _release_if_due(self) -> None:
        """Release the RMBE once the state is CLOSED and the final message has arrived."""
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
        self.wake_all()  # now nothing is borrowed or in flight
        host.connection_closed(self)

    def open_to_application(self) -> None:
        """Action: the application may read and send."""
        self.receiver.open = True
        self.sender.sendable = not (self.got_closed or self._aborting or self.write_closed)

    def send_done(self) -> None:
        """Action: D."""
        self.messenger.flags |= SENDING_DONE
        self.messenger.request_cdc()

    def send_closed(self) -> None:
        """Action: C, the final message."""
        self.sent_closed = True
        self._refuse_data()
        self.messenger.flags |= CONNECTION_CLOSED
        self.messenger.request_cdc()

    def send_abort(self) -> None:
        """Action: A, the final message."""
        if self.messenger.channel is None or self.messenger.final_posted:
            self._process("abort_sent")
            return
        self.messenger.blocked = False
        self.messenger.urgent_goal = 0
        self.messenger.flags |= ABNORMAL_CLOSE
        self.messenger.request_cdc()

    def reset_tcp(self) -> None:
        """Action: RST, unless TCP has ended.

        After the handshake, a peer that has not sent any CDC message may not have read SMC Confirm
        yet. RST would discard Confirm, and without the token in it the peer cannot answer A (4.8.2
        (1B)). Then RST waits until the state is CLOSED. After C there is no A, and RST is the only
        way to notify the peer.
        """
        self._reset_due = True
        peer_is_established = self.cdcs_received or self._validation_received
        if peer_is_established or self.sent_closed or not self.receiver.open:
            self.close_tcp()

    def close_tcp(self) -> None:
        """Action: FIN, or RST if that is due, unless TCP has ended."""
        if not self._tcp_ended:
            self._tcp_ended = True
            (self._host.reset_tcp if self._reset_due else self._host.close_tcp)(self)

    def purge(self) -> None:
        """Action: drop unread and unsent data, because the application has closed."""
        self.sender.drop_unsent()
        self.receiver.purge()

    def _fail(
        self, number: int, cause: BaseException | None = None, text: str | None = None
    ) -> None:
        """Make a later call of the application raise an error; the first error stays."""
        receiver = self.receiver
        if self.error is not None:
            return
        if number == errno.ECONNRESET and receiver.peer_done and not receiver.purged:
            # As TCP if RST arrives after FIN. If both sides have ended, there is nothing to report.
            if not self.write_closed:
                number = errno.EPIPE
            elif not self.eof_pending:
                return
        self.error = receiver.error = OSError(number, text or os.strerror(number))
        self.error.__cause__ = cause
        receiver.error_pending = True

    def fail_aborted(self) -> None:
        """Action: an abort by this side, or a TCP reset instead of the peer's abort."""
        self._fail(self._errno, self._cause)

    def fail_reset(self) -> None:
        """Action: the peer's abort."""
        self._fail(errno.ECONNRESET)

    def fail_refused(self) -> None:
        """Action: the peer has closed while this side was writing."""
        self._fail(errno.EPIPE)

    def fail_links_lost(self) -> None:
        """Action: no link to the peer is left."""
        self._fail(errno.ECONNRESET, text="no link to the peer is left")

    def fail_handshake(self) -> None:
        """Action: the rendezvous fails."""
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
        """Action: send D after all data."""
        self.eof_pending = True

    def set_close_pending(self) -> None:
        """Action: send C after all data."""
        self.eof_pending = False
        self.close_pending = True

    def set_got_closed(self) -> None:
        """Action: the peer has no reader any more."""
        self.got_closed = True
        self.sender.sendable = False
