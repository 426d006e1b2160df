"""LLC exchanges of one link group, one configuration change at a time (RFC 7609, 3.5.5.3).

Theory of operation
-------------------
An exchange is a request of ours that waits for a reply.  What may run when is declared in
`states.llc_exchange`; this module is that machine's model.  Requests that cannot start yet wait
in bounded queues.  An exchange that fails (no reply, link lost) is not repeated on another
link (RFC 7609, 2.3): its owner is told and may begin anew.

Requests of the peer are answered at once where the table allows it.  While links change, a
CONFIRM RKEY is refused with "retry" (3.5.5.3.1) and a DELETE RKEY is answered when they have
changed.  TEST LINK, DELETE LINK for the whole group and notices never come here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.states.engine import Machine
from trio_smc.states.llc_exchange import LLC_EXCHANGE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.rkeys import RkeyMessage
    from trio_smc.rendezvous.timers import Timer

__all__ = ["Exchanges", "RkeyRequest"]

LOGGER = logging.getLogger("trio_smc.llc")

_MAX_QUEUED: Final = 512
_MAX_PUT_OFF: Final = 16
_RETRIES: Final = 3
_RETRY_DELAY: Final = 0.05
"""Seconds before the first retry; four times as long before each further one."""


@dataclass(slots=True, eq=False)
class RkeyRequest:
    """A CONFIRM RKEY with its CONTINUATIONs or a DELETE RKEY of ours, waiting or under way.

    Attributes:
      messages: makes the request for the link it will travel on, when its turn has come.
      finished: called once with whether the peer agreed.
    """

    messages: Callable[[Link], list[llc.Message]]
    finished: Callable[[bool], None]
    tries: int = 0
    _awaited: deque[type[llc.Message]] = field(default_factory=deque)
    _negative: bool = False
    _retry: bool = False

    def send(self, link: Link) -> None:
        """Send all messages; each is echoed by itself (A.3.5, A.3.6)."""
        messages = self.messages(link)
        self._awaited = deque(map(type, messages))
        self._negative = self._retry = False
        for message in messages:
            link.send_llc(message)

    def on_echo_untrusted(self, echo: RkeyMessage) -> bool:
        """Whether this echo was the last.  Raises ProtocolError when it is not one."""
        if not self._awaited or type(echo) is not self._awaited.popleft():
            raise ProtocolError(f"{type(echo).__name__} reply without a request")
        if isinstance(echo, llc.DeleteRkey):
            if echo.negative:  # nothing beyond logging (A.3.7)
                LOGGER.info("the peer did not know all RKeys: mask %#04x", echo.error_mask)
        elif echo.negative and not self._negative:
            self._negative = True
            # Only CONFIRM RKEY has the C bit; what refuses a CONTINUATION is a change (3.5.5.3).
            self._retry = not isinstance(echo, llc.ConfirmRkey) or echo.retry
        return not self._awaited

    @property
    def agreed(self) -> bool:
        """Whether no echo was negative."""
        return not self._negative

    @property
    def to_be_retried(self) -> bool:
        """Whether the peer wants it again when its configuration change is over."""
        return self._negative and self._retry and self.tries < _RETRIES


class Exchanges:
    """The serializer of one link group; the model of `states.llc_exchange`."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.machine = Machine(LLC_EXCHANGE, self)
        self._queue: deque[RkeyRequest] = deque()
        self._current: RkeyRequest | None = None
        self._link: Link | None = None
        self._timer: Timer | None = None
        self._peer_request: tuple[Link, RkeyMessage] | None = None
        self._put_off: deque[tuple[Link, llc.DeleteRkey]] = deque()
        self._retries: dict[RkeyRequest, Timer] = {}
        # Links to delete and why, by number.
        self._deletions: dict[int, int] = {}
        self.deleting = -1
        """Number of the link that the DELETE LINK under way names."""

    @property
    def state(self) -> str:
        """The exchange under way (`trio_smc.states.llc_exchange`)."""
        return self.machine.state

    # --- what the group asks for -----------------------------------------------------------

    def begin(self, event: str, link: Link) -> None:
        """Begin a CONFIRM LINK or ADD LINK exchange on ``link``; `done` ends it."""
        self._link = link
        self.machine.send(event)

    def done(self) -> None:
        """The exchange under way is complete."""
        self.machine.send("done")

    def change_rkeys(self, request: RkeyRequest) -> None:
        """Confirm or delete RKeys, now or when the exchange under way is done."""
        if self.machine.state == "ENDED" or len(self._queue) >= _MAX_QUEUED:
            request.finished(False)
            return
        self._queue.append(request)
        self.machine.send("queued")

    def delete_link(self, number: int, reason: int) -> None:
        """Delete a link, now or when the exchange under way is done (3.5.5.3.1); server only."""
        if self.machine.state == "DELETE_LINK" and number == self.deleting:
            return
        self._deletions[number] = reason
        self.machine.send("queued")

    def end(self) -> None:
        """The group is gone: nothing can be exchanged any more."""
        self.machine.send("end")

    # --- messages of the peer -----------------------------------------------------------

    def on_reply_untrusted(self, link: Link, reply: RkeyMessage) -> None:
        """An echo of our RKey request; raises ProtocolError when there was none on ``link``."""
        request = self._current
        if request is None or link is not self._link:
            raise ProtocolError(f"{type(reply).__name__} reply without a request")
        if not request.on_echo_untrusted(reply):
            return
        self._current = None
        self.machine.send("done")
        if request.to_be_retried:
            # 3.5.5.3.1: begin anew when the peer's exchange is over; nothing tells when it is.
            delay = _RETRY_DELAY * 4**request.tries
            request.tries += 1
            self._retries[request] = self._group.timers.call_later(
                delay, lambda: self._retry(request)
            )
            return
        request.finished(request.agreed)

    def _retry(self, request: RkeyRequest) -> None:
        del self._retries[request]
        self.change_rkeys(request)

    def on_request(self, link: Link, message: RkeyMessage) -> None:
        """An RKey request of the peer (`Rkeys.on_request_untrusted`)."""
        self._peer_request = (link, message)
        self.machine.send("peer_rkeys")

    # --- actions of states.llc_exchange ---------------------------------------------------

    def start_next(self) -> None:
        """Begin the oldest queued exchange."""
        while self._put_off:
            self._group.rkeys.answer(*self._put_off.popleft())
        link = self._group.any_active_link()
        if link is None:
            return
        if self._deletions:
            self.deleting, reason = self._deletions.popitem()
            self._link = link
            self.machine.send("delete_link")
            self._group.deletion.send_delete_link(link, self.deleting, reason)
            return
        if not self._queue:
            return
        self._current = self._queue.popleft()
        self._link = link
        self.machine.send("change_rkeys")
        self._current.send(link)

    def start_reply_timer(self) -> None:
        """C.7: longer at first contact, so that a write time-out and a Decline fit in."""
        self.stop_reply_timer()
        config = self._group.config
        forming = self._group.state == "FORMING"
        seconds = config.first_contact_timeout if forming else config.llc_timeout
        self._timer = self._group.timers.call_later(seconds, self._timed_out)

    def stop_reply_timer(self) -> None:
        """The reply came, or does not matter any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def answer_rkeys(self) -> None:
        """Answer the peer's RKey request."""
        if self._peer_request is not None:
            self._group.rkeys.answer(*self._peer_request)

    def put_off_rkeys(self) -> None:
        """RKeys may not change while links do (3.5.5.3.1, 3.5.5.3.2)."""
        if self._peer_request is None:
            return
        link, message = self._peer_request
        if not isinstance(message, llc.DeleteRkey):
            self._group.rkeys.refuse(link, message)
        elif len(self._put_off) < _MAX_PUT_OFF:
            self._put_off.append((link, message))
        else:
            LOGGER.warning("%r: the peer does not wait for replies to DELETE RKEY", link)
            link.machine.send("failed")

    def confirm_link_timed_out(self) -> None:
        """First contact only: break the connection (C.7.1)."""
        self._group.setup.first_contact_timed_out()

    def add_link_timed_out(self) -> None:
        """The server goes on with the links there are (C.8); a client whose server is silent
        breaks the connection at first contact (C.7.1)."""
        if self._group.client and self._group.state == "FORMING":
            self._group.setup.first_contact_timed_out()
        else:
            self._group.setup.add_link_settled()

    def delete_link_timed_out(self) -> None:
        """The link over which the message was sent is not usable either (C.7.1)."""
        self._fail_link("DELETE LINK")

    def rkeys_timed_out(self) -> None:
        """The link over which the message was sent has failed (C.7.1)."""
        request, self._current = self._current, None
        self._fail_link("CONFIRM RKEY or DELETE RKEY")
        if request is not None:
            request.finished(False)

    def _fail_link(self, what: str) -> None:
        link = self._link
        if link is not None:
            LOGGER.info("%r: %s was not answered", link, what)
            link.machine.send("failed")

    def fail_queued(self) -> None:
        """Tell everybody who waits (2.3)."""
        waiting = [self._current] if self._current is not None else []
        waiting += self._queue
        waiting += self._retries
        for timer in self._retries.values():
            timer.cancel()
        self._current = None
        self._queue.clear()
        self._retries.clear()
        self._put_off.clear()
        self._deletions.clear()
        for request in waiting:
            request.finished(False)

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers."""
        observer = self._group.host.observer
        if observer is not None:
            observer.state(self, old, new, event)

    def _timed_out(self) -> None:
        self._timer = None
        self.machine.send("timeout")
