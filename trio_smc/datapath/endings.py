"""The endings of a connection: the model of its state machine.

Theory of operation
-------------------
The states of RFC 7609, 4.8 and all their edges are declared in `trio_smc.states.connection`;
`Endings` is what that machine reads and does: guards are attributes here, actions methods. Where
an ending comes from, the application, the peer or the host, is `Connection`'s matter.

CLOSED means that the RMBE may serve another connection. The host hears of it only when the last
word (C or A) is complete: it may be lost with its link, and a peer that has not heard it may send
its writes again over another link (RFC 7609, 4.6.2), into the RMBE. Unless a timer or the loss of
the links says that nobody is there to hear it.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from trio_smc.failover.replay import Moving
from trio_smc.states.engine import Machine
from trio_smc.states.tables import CONNECTION
from trio_smc.wire.cdc import ABNORMAL_CLOSE, CONNECTION_CLOSED, SENDING_DONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc._base.errors import ProtocolError
    from trio_smc.datapath.channel import Host
    from trio_smc.datapath.rmb import Rmbe

__all__ = ["Endings"]

_LAST_WORD = ABNORMAL_CLOSE | CONNECTION_CLOSED
_log = logging.getLogger(__name__)
# States in which the peer's data is of no interest (4.8.2, 1A).
_ABORTING = frozenset({"PEERABORTWAIT", "PROCESSABORT", "CLOSED"})
_GIVEN_UP = frozenset({"close_timeout", "abort_timeout"})


class _Nobody:
    """Model of the machine that all closed connections share: CLOSED has no guards or actions."""

    def state_changed(self, old: str, new: str, event: str) -> None:
        raise AssertionError("CLOSED is never left")


# Taking the place of a closed connection's own machine, so that the two are no cycle.
_CLOSED = Machine(CONNECTION, _Nobody(), state="CLOSED")


class Endings(Moving):
    """Base of `Connection`: its states."""

    __slots__ = (
        "_aborting",
        "_application_closed",
        "_cause",
        "_close_timeout",
        "_errno",
        "_heard_all",
        "_host",
        "_machine",
        "_peer_flags",
        "_released",
        "_spare_unread",
        "_tcp_ended",
        "_timer",
        "close_pending",
        "eof_pending",
        "got_closed",
        "peer_rmbe_known",
        "sent_closed",
        "write_closed",
    )

    def __init__(
        self,
        rmbe: Rmbe,
        *,
        host: Host,
        close_timeout: float,
        chunks: bool,
        copy_limit: int,
        flush_later: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        super().__init__(rmbe, chunks=chunks, copy_limit=copy_limit, flush_later=flush_later)
        self._host = host
        self._close_timeout = close_timeout
        self._machine = Machine(CONNECTION, self)
        self._timer: str | None = None  # the event that the running timer stands for
        self._errno = errno.ECONNABORTED  # what an abort is to the application
        self._cause: BaseException | None = None
        self._peer_flags = 0  # D, C, A seen so far
        self._aborting = False
        self._heard_all = True
        self._application_closed = False
        self._released = False
        self._spare_unread = False
        self._tcp_ended = False
        self.write_closed = False
        self.sent_closed = False
        self.got_closed = False
        self.eof_pending = False
        self.close_pending = False
        self.peer_rmbe_known = False

    @property
    def state(self) -> str:
        """The state of RFC 7609, 4.8, as `trio_smc.states` names it."""
        return self._machine.state

    @property
    def unread(self) -> bool:
        """Whether data is there that the application has not taken (guard of the states)."""
        return self._received != self._consumed

    @property
    def used(self) -> int | None:
        """Bytes from the ring's start that the peer can have written; None: unknown."""
        # Only C is a promise that every write was told, and only unaborted we listened to it.
        if self._peer_flags & _LAST_WORD == CONNECTION_CLOSED and self._heard_all:
            return min(self._received, self._rmbe.usable)
        return None

    @property
    def ending(self) -> bool:
        """Whether `close` was called and data of ours, or the C after it, may not have reached
        the peer yet: until then the link must stay."""
        if self._aborting:
            return False
        if self.sent_closed:
            return self._owed or self._completed != self._sequence
        return self.close_pending

    # --- events that come up here ------------------------------------------------------------

    def on_timer(self) -> None:
        """The time of `Host.set_timer` is over."""
        event, self._timer = self._timer, None
        if event is not None:
            self._machine.send(event)

    def protocol_error(self, exc: ProtocolError) -> None:
        """Abort because the peer broke the protocol; the application's error names ``exc``."""
        if self._cause is None:
            self._cause = exc
        self._machine.send("abort")

    def _last_word_complete(self, sequence: int) -> None:
        if self._flags & ABNORMAL_CLOSE and sequence == self._sequence:
            self._machine.send("abort_sent")
        self._release_if_due()

    def on_room(self) -> None:
        """The channel has room again, as `Channel.wait_for_room` promised."""
        super().on_room()
        self._release_if_due()

    def _refuse_send(self) -> int:
        if not self._sendable and self.error is None and not self.write_closed:
            if not self._open_to_application:
                raise OSError(errno.ENOTCONN, "the rendezvous is not complete")
            # The peer has closed: data cannot reach a reader any more.
            self._machine.send("abort")
        return super()._refuse_send()

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
            self._heard_all = new == "CLOSED" and not self._aborting
            self._aborting = True
            self._sendable = False
        self._host.state_changed(self, old, new, event)
        if new == "CLOSED":
            if event in _GIVEN_UP:
                self._owed = False  # the peer is given up, and with it the last word
                self._leave_link()
            if self._timer is not None:
                self._timer = None
                self._host.set_timer(self, None)
            self.close_tcp()
            self._release_if_due()
        self._wake_reader()
        self._wake_writer()
        self._wake_urgent()

    def _release_if_due(self) -> None:
        """Give the RMBE back once the state is CLOSED and the last word has arrived."""
        if self._released or self._owed or self._machine.state != "CLOSED":
            return
        if self._silent and self._completed != self._sequence and self._channel is not None:
            return
        self._released = True
        if self._application_closed:
            self._drop_unread()
        self._leave_ring()
        self._drop_unsent()
        self._leave_link()
        self._flush_later = None
        self._machine = _CLOSED
        host = self._host
        del self._host  # which knows us: no cycle, and CLOSED calls nobody
        host.connection_closed(self)

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
        self._urgent_goal = 0
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
        self._drop_unsent()
        if not self._spare_unread:
            self._purged = True
            self._drop_unread()

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
        self._sendable = False

    def wake_receivers(self) -> None:
        """Action."""
        self._wake_reader()
        self._wake_urgent()
