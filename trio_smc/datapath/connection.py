"""One SMC-R connection without I/O: states, flags, and what a received CDC message does.

Theory of operation
-------------------
`Connection` is built in layers, each a class and a module: `Receiver` knows the own RMBE,
`Messenger` the link and our CDC messages, `Sender` the peer's RMBE, `Endings` the states of
RFC 7609, 4.8. This one is what others call: the rendezvous and the link group, the application,
the peer by its CDC messages. Nothing here waits, and nothing here knows the time: the stream
above sets `on_readable` and `on_writable`, the host below calls `on_timer`.

A received CDC message is applied in this order: sequence number, cursors (and with them data),
producer flags, then the connection flags in the order A, C, D. One that outruns the end of the
rendezvous is applied too, but its data is shown only after `established` (3.5.2.4).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc._base.statistics import STREAM_COUNTERS, StreamStatistics
from trio_smc.datapath.endings import Endings
from trio_smc.datapath.rmb import EYE_CATCHER
from trio_smc.wire.cdc import (
    ABNORMAL_CLOSE,
    CONNECTION_CLOSED,
    FAILOVER_VALIDATION,
    SENDING_DONE,
    UPDATE_REQUESTED,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
    MessageMissing,
    unpack_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.datapath.channel import Channel, Host
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Connection"]

_URGENT = URGENT_PENDING | URGENT_PRESENT
_TELL_ALL = UPDATE_REQUESTED | _URGENT


class Connection(Endings):
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
        "_alert_token",
        "_last_received",
        "cdcs_received",
        "stale_cdcs",
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
        super().__init__(
            rmbe,
            host=host,
            close_timeout=close_timeout,
            chunks=chunks,
            copy_limit=copy_limit,
            flush_later=flush_later,
        )
        self._alert_token = alert_token
        self._last_received = 0  # SR of 4.6.1
        self.cdcs_received = 0
        self.stale_cdcs = 0

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
        return self._completed

    @property
    def sequence_received(self) -> int:
        """Sequence number of the last CDC message received: SR of RFC 7609, 4.6.1."""
        return self._last_received

    def counters(self) -> tuple[int, ...]:
        """The counters so far, in the order of `STREAM_COUNTERS`."""
        return (
            self._produced,
            self._received,
            self.writes,
            self.cdcs_sent,
            self.cdcs_received,
            self.coalesced,
            self.window_stalls,
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
        self._flush_later = flush_later

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
        if self._released:
            return
        self._use(channel, address, rkey)
        if self._told < self._urgent_mark <= self._consumed:
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
        self._owed = False
        self._leave_link()
        self._machine.send("links_lost")
        self._release_if_due()

    def rmbe_conflict(self) -> None:
        """The peer gave the RMBE that we write into to another connection (4.4.2)."""
        self._owed = False
        self._leave_link()
        self._machine.send("rmbe_conflict")
        self._release_if_due()

    def tcp_reset(self) -> None:
        """The TCP connection was reset by the peer (4.8.2).

        A peer that had closed has only given up waiting for our answer: it gets one, and all it
        sent can still be read, as when its links are lost (4.8.3).
        """
        self._errno = errno.ECONNRESET
        self._spare_unread = self.got_closed
        self._machine.send("abort")

    def user_timeout(self) -> None:
        """Data was not acknowledged for as long as the application is willing to wait."""
        self._errno = errno.ETIMEDOUT
        self._machine.send("abort")

    # --- from the application ----------------------------------------------------------------

    def shutdown_write(self) -> None:
        """Nothing more will be sent; what is under way still arrives (4.8.1, 3A)."""
        if not self.write_closed:
            self.write_closed = True
            self._sendable = False
            self._urgent_goal = 0
            self.flush()
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
        self._urgent_goal = 0
        self.urgent_inline = True  # an urgent byte that comes now is data without a reader, too
        self.flush()
        self._machine.send("close")

    def abort(self) -> None:
        """Reset the connection: nothing more is sent or received (4.8.2)."""
        self.write_closed = True
        self._sendable = False
        self._machine.send("abort")

    # --- from the peer -----------------------------------------------------------------------

    def on_cdc_untrusted(self, message: bytes) -> None:
        """Apply a CDC message that names our token.

        Raises:
          MessageMissing: failover validation failed, and nothing has happened. When everything
            was taken that other links have brought, call this again; with the same answer the
            data is lost, and `protocol_error` is due.
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
                if flags or self._tell_all or self._writer_waits or self._urgent_flags:
                    self._flags_untrusted(flags, arrived)
        except ProtocolError as exc:
            self._abort_for(exc)
            raise
        if endings and endings & ~self._peer_flags:
            self._on_endings(endings & ~self._peer_flags)
        if arrived and self.on_readable is not None:
            self._wake_reader()

    def _flags_untrusted(self, flags: int, arrived: bool) -> None:
        """Apply producer flags, where they or those of the message before say anything.

        Raises:
          ProtocolError: it calls urgent what cannot be.
        """
        if (flags | self._urgent_flags) & _URGENT:
            self._urgent_untrusted(flags & _URGENT, arrived)
        self._tell_all = bool(flags & _TELL_ALL) or self._urgent_mark > self._consumed
        self._writer_waits = bool(flags & WRITER_BLOCKED)
        if self._consumed != self._told:
            # The reader may take nothing more for long.
            if flags & UPDATE_REQUESTED or (
                self._writer_waits and self._consumed - self._told >= self._least_update
            ):
                self._owe_cdc()
            elif self._writer_waits:
                self._tell_soon()

    def _abort_for(self, exc: ProtocolError) -> None:
        if not isinstance(exc, MessageMissing):
            self.protocol_error(exc)

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

        What a connection misses that is reset already is no news, nor worth waiting for.

        Raises:
          MessageMissing: the peer believes we have a message that did not arrive yet.
        """
        if (self._last_received - sequence) & 0x8000 and not self._aborting:
            raise MessageMissing(
                f"data was lost with a link: message {sequence} is missing after "
                f"{self._last_received}"
            )
