"""One SMC-R connection without I/O: states, flags, and what a received CDC message does.

Theory of operation
-------------------
`Connection` is built in three layers, each a class: `Receiver` knows the own RMBE, `Sender`
the peer's and the link, and this class the states of RFC 7609, 4.8. It is the model of the state
machine in `trio_smc.states.connection`: guards are its attributes, actions its methods, and
every ending is an edge there. Nothing here waits, and nothing here knows the time: the stream
above sets `on_readable` and `on_writable`, the host below calls `on_timer`.

A received CDC message is applied in this order: sequence number, cursors (and with them data),
producer flags, then the connection flags in the order A, C, D. One that outruns the end of the
rendezvous is applied too, but its data is shown only after `established` (3.5.2.4).

CLOSED means that the RMBE may serve another connection. If the last word (C or A) is still owed
because the link had no room, the host hears of it only when that has been posted.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc._base.statistics import StreamStatistics
from trio_smc.datapath.cdc import (
    ABNORMAL_CLOSE,
    CONNECTION_CLOSED,
    FAILOVER_VALIDATION,
    SENDING_DONE,
    UPDATE_REQUESTED,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
    unpack_untrusted,
)
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.datapath.sender import Sender
from trio_smc.states.connection import CONNECTION
from trio_smc.states.engine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.channel import Channel, Host
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Connection"]

_log = logging.getLogger(__name__)
_URGENT = URGENT_PENDING | URGENT_PRESENT
_TELL_ALL = WRITER_BLOCKED | UPDATE_REQUESTED | _URGENT
# States in which the peer's data is of no interest (4.8.2, 1A).
_ABORTING = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})


class _Nobody:
    """Model of the machine that all closed connections share: CLOSED has no guards or actions."""

    def state_changed(self, old: str, new: str, event: str) -> None:
        raise AssertionError("CLOSED is never left")


# Taking the place of a closed connection's own machine, so that the two are no cycle.
_CLOSED = Machine(CONNECTION, _Nobody(), state="CLOSED")


class Connection(Sender):
    """One SMC-R connection.

    Args:
      alert_token: our token, by which the peer's CDC messages name this connection.
      rmbe: our element, exclusively this connection's until `Host.connection_closed`.
      host: whom to tell.
      close_timeout: seconds the peer may take to answer an ending (4.8.1, 4.8.2).
      chunks: cut sends into a quarter of the peer's ring each.
      copy_limit: largest changeable buffer, in bytes, that is copied and not borrowed.
      flush_later: called with `flush` when a CDC message may wait until the scheduler sleeps;
        None: every send posts its own.
    """

    __slots__ = (
        "_aborting",
        "_alert_token",
        "_application_closed",
        "_cause",
        "_close_timeout",
        "_errno",
        "_host",
        "_last_received",
        "_machine",
        "_peer_flags",
        "_released",
        "_tcp_ended",
        "_timer",
        "cdcs_received",
        "close_pending",
        "eof_pending",
        "got_closed",
        "peer_rmbe_known",
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
        super().__init__(rmbe, chunks=chunks, copy_limit=copy_limit, flush_later=flush_later)
        self._host = host
        self._alert_token = alert_token
        self._close_timeout = close_timeout
        self._machine = Machine(CONNECTION, self)
        self._timer: str | None = None  # the event that the running timer stands for
        self._errno = errno.ECONNABORTED  # what an abort is to the application
        self._cause: BaseException | None = None
        self._last_received = 0  # SR of 4.6.1
        self._peer_flags = 0  # D, C, A seen so far
        self._aborting = False
        self._application_closed = False
        self._released = False
        self._tcp_ended = False
        self.write_closed = False
        self.sent_closed = False
        self.got_closed = False
        self.eof_pending = False
        self.close_pending = False
        self.peer_rmbe_known = False
        self.cdcs_received = 0
        self.stale_cdcs = 0

    def __repr__(self) -> str:
        return f"<Connection {self._alert_token:#010x} {self.state}>"

    # --- properties --------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of RFC 7609, 4.8, as `trio_smc.states` names it."""
        return self._machine.state

    @property
    def alert_token(self) -> int:
        """Our token, 32 bits."""
        return self._alert_token

    @property
    def rmbe(self) -> Rmbe:
        """Our element."""
        return self._rmbe

    @property
    def channel(self) -> Channel | None:
        """The link it is on; None before `peer_known` and when it is over."""
        return self._channel

    @property
    def unread(self) -> bool:
        """Whether data is there that the application has not taken (guard of the states)."""
        return self._received != self._consumed

    @property
    def used(self) -> int | None:
        """Bytes from the ring's start that the peer can have written; None: unknown."""
        if self._peer_flags & CONNECTION_CLOSED and not self._purged:
            return min(self._received, self._rmbe.usable)
        return None

    @property
    def sequence_sent(self) -> int:
        """Sequence number of the last CDC message completed: SS of RFC 7609, 4.6.1."""
        return self._completed

    @property
    def sequence_received(self) -> int:
        """Sequence number of the last CDC message received: SR of RFC 7609, 4.6.1."""
        return self._last_received

    def statistics(self) -> StreamStatistics:
        """The counters so far."""
        return StreamStatistics(
            bytes_sent=self._produced,
            bytes_received=self._received,
            writes=self.writes,
            cdcs_sent=self.cdcs_sent,
            cdcs_received=self.cdcs_received,
            coalesced=self.coalesced,
            window_stalls=self.window_stalls,
            stale_cdcs=self.stale_cdcs,
        )

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
          eye_catcher: whether the peer's RMBEs start with an eye catcher.
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
        self._set_peer(alert_token, element_size, first)
        self.attach(channel, address, rkey)

    def attach(self, channel: Channel, address: int, rkey: int) -> None:
        """Use this link from now on (the address and RKey of the peer's RMBE differ by link).

        What was posted to another link before is not sent again by this: see `replay`.
        """
        self._channel = channel
        self._address = address + self._peer_first
        self._rkey = rkey
        self._waiting = False
        if self._owed:
            self._owe_cdc()

    def established(self) -> None:
        """The rendezvous is complete: the application may send and receive (4.8.1, 2)."""
        self._machine.send("established")

    def withdraw(self) -> None:
        """The rendezvous fell back to TCP: give the RMBE back and leave TCP alone."""
        self._tcp_ended = True
        self.peer_rmbe_known = False
        self._machine.send("close")

    def links_lost(self) -> None:
        """No link is left in the group: nothing can be sent any more (4.8.3)."""
        self._channel = None
        self._owed = False
        self._machine.send("links_lost")
        self._release_if_due()

    def rmbe_conflict(self) -> None:
        """The peer gave the RMBE that we write into to another connection (4.4.2)."""
        self._silent = True
        self._owed = False
        self._machine.send("rmbe_conflict")
        self._release_if_due()

    def tcp_reset(self) -> None:
        """The TCP connection was reset by the peer (4.8.2)."""
        self._errno = errno.ECONNRESET
        self._machine.send("abort")

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort because the peer broke the protocol; the application's error names ``exc``."""
        if self._cause is None:
            self._cause = exc
        self._machine.send("abort")

    def on_timer(self) -> None:
        """The time of `Host.set_timer` is over."""
        event, self._timer = self._timer, None
        if event is not None:
            self._machine.send(event)

    # --- from the application ----------------------------------------------------------------

    def shutdown_write(self) -> None:
        """Nothing more will be sent; what is under way still arrives (4.8.1, 3A)."""
        if not self.write_closed:
            self.write_closed = True
            self._sendable = False
            self._machine.send("shutdown_wr")

    def close(self) -> None:
        """The application is done with both directions; the rest happens by itself.

        What is under way still arrives, unless data is unread: then the connection is reset
        (4.8.1, 3A). Large buffers still `borrowed` are copied.
        """
        self.keep_copies()
        self.write_closed = True
        self._sendable = False
        self._application_closed = True
        self._machine.send("close")

    def abort(self) -> None:
        """Reset the connection: nothing more is sent or received (4.8.2)."""
        self.write_closed = True
        self._sendable = False
        self._machine.send("abort")

    def _refuse_send(self) -> None:
        if self.error is None and not self.write_closed:
            if not self._open_to_application:
                raise OSError(errno.ENOTCONN, "the rendezvous is not complete")
            # The peer has closed: data cannot reach a reader any more.
            self._machine.send("abort")
        super()._refuse_send()

    # --- from the peer -----------------------------------------------------------------------

    def on_cdc_untrusted(self, message: bytes) -> None:
        """Apply a CDC message that names our token.

        Raises:
          ProtocolError: it cannot be true; the connection has been aborted.
        """
        arrived = False
        try:
            _, sequence, _, wrap, offset, taken_wrap, taken_offset, flags, endings = (
                unpack_untrusted(message)
            )
            if flags & FAILOVER_VALIDATION and not self._released:
                self._validate_untrusted(sequence)
                return
            if (sequence - self._last_received) & 0x8000 or self._released:
                self.stale_cdcs += 1
                return
            self._last_received = sequence
            self.cdcs_received += 1
            if not self._aborting:
                if offset != self._received_offset or wrap != self._received_wrap:
                    self._producer_untrusted(wrap, offset)
                    arrived = True
                    if self.sent_closed:
                        self._drop_unread()
                if taken_offset != self._taken_offset or taken_wrap != self._taken_wrap:
                    self._consumer_untrusted(taken_wrap, taken_offset)
                self._tell_all = bool(flags & _TELL_ALL)
                self.urgent_flags = flags & _URGENT
                if flags & UPDATE_REQUESTED and self._consumed != self._told:
                    self._owe_cdc()
        except ProtocolError as exc:
            self.protocol_error(exc)
            raise
        endings &= ~self._peer_flags
        if endings:
            self._on_endings(endings)
        if arrived and self.on_readable is not None:
            self._wake_reader()

    def _on_endings(self, endings: int) -> None:
        """The first CDC message with these flags: A before C before D; C implies D."""
        if endings & ABNORMAL_CLOSE:
            self._peer_flags |= ABNORMAL_CLOSE | CONNECTION_CLOSED | SENDING_DONE
            self._errno = errno.ECONNRESET
            self._machine.send("peer_abort")
        elif endings & CONNECTION_CLOSED:
            self._peer_flags |= CONNECTION_CLOSED | SENDING_DONE
            self._peer_done = True
            self._machine.send("peer_closed")
        elif endings & SENDING_DONE:
            self._peer_flags |= SENDING_DONE
            self._peer_done = True
            self._machine.send("peer_done")

    def _validate_untrusted(self, sequence: int) -> None:
        """Failover validation: of such a message only token and sequence count (4.6.1).

        Raises:
          ProtocolError: the peer believes we have a message that never arrived.
        """
        if (self._last_received - sequence) & 0x8000:
            raise ProtocolError(
                f"data was lost with a link: message {sequence} is missing after "
                f"{self._last_received}"
            )

    def on_cdc_complete(self, sequence: int) -> None:
        """A CDC message, and every write before it, has reached the peer."""
        super().on_cdc_complete(sequence)
        if self._silent and self._flags & ABNORMAL_CLOSE and sequence == self._sequence:
            self._machine.send("abort_sent")

    def on_room(self) -> None:
        """The channel has room again, as `Channel.wait_for_room` promised."""
        super().on_room()
        self._release_if_due()

    # --- hooks of the halves -----------------------------------------------------------------

    def _all_delivered(self) -> None:
        if self.eof_pending or self.close_pending:
            self._machine.send("all_sent")

    def _protocol_error(self, exc: ProtocolError) -> None:
        _log.warning("%r is reset: %s", self, exc)
        self.protocol_error(exc)

    # --- model of the state machine ----------------------------------------------------------

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Called by the machine after each transition: every waiter looks again."""
        if new in _ABORTING:
            self._aborting = True
            self._sendable = False
        self._host.state_changed(self, old, new, event)
        if new == "CLOSED":
            if event in ("close_timeout", "abort_timeout"):
                self._owed = False  # the peer is given up, and with it the last word
            if self._timer is not None:
                self._timer = None
                self._host.set_timer(self, None)
            self.close_tcp()
            self._release_if_due()
        self._wake_reader()
        self._wake_writer()

    def _release_if_due(self) -> None:
        """Give the RMBE back once the state is CLOSED and the last word is posted."""
        if self._released or self._owed or self._machine.state != "CLOSED":
            return
        self._released = True
        if self._application_closed:
            self._drop_unread()
        self._leave_ring()
        self._drop_unsent()
        self._channel = None
        self._machine = _CLOSED
        self._host.connection_closed(self)

    def open_to_application(self) -> None:
        """Action."""
        self._open_to_application = True
        self._sendable = not self.got_closed

    def send_done(self) -> None:
        """Action: D."""
        self._flags |= SENDING_DONE
        self._owe_cdc()

    def send_closed(self) -> None:
        """Action: C, the last message."""
        self.sent_closed = True
        self._flags |= CONNECTION_CLOSED
        self._owe_cdc()

    def send_abort(self) -> None:
        """Action: A, the last message."""
        if self._channel is None or self._silent:
            self._machine.send("abort_sent")
            return
        self._blocked = False
        self._flags |= ABNORMAL_CLOSE
        self._owe_cdc()

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
        self._purged = True
        self._drop_unread()
        self._drop_unsent()

    def purge_unsent(self) -> None:
        """Action: drop unsent data; what was received whole can still be read."""
        self._drop_unsent()

    def fail_aborted(self) -> None:
        """Action: an abort of our own, or the TCP reset that came in its place."""
        self._fail(self._errno, self._cause)

    def fail_reset(self) -> None:
        """Action: the peer's abort."""
        self._fail(errno.ECONNRESET)

    def fail_links_lost(self) -> None:
        """Action: no way to the peer."""
        self._fail(errno.ECONNABORTED)

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
        self._sendable = False

    def wake_receivers(self) -> None:
        """Action."""
        self._wake_reader()
