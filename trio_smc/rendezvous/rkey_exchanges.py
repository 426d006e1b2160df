"""RKey exchanges of one link group, of this side and of the peer (RFC 7609, 3.5.5.2, 3.5.5.3).

Theory of operation
-------------------
The actions of `states.llc_exchange` that are about RKeys; `exchanges` has the others, and calls
when it is the turn of a request of ours.

Our requests begin anew, with the links there are then: after a failed link, after a reply that
says so, and when an ADD LINK or DELETE LINK of the server overtook them (3.5.5.3.3); the last kind
stays `_current` until its reply has come.

Requests of the peer are answered at once where the table allows it.  While links change, a
CONFIRM RKEY is refused with "retry" (3.5.5.3.1) and a DELETE RKEY is answered when they have
changed.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.rkey_request import RkeyRequest

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.rkeys import PeerRequest, RkeyMessage
    from trio_smc.rendezvous.timers import Timer
    from trio_smc.states.engine import Machine

__all__ = ["RkeyExchanges"]

LOGGER = logging.getLogger("trio_smc.llc")

_MAX_QUEUED: Final = 512
_MAX_PUT_OFF: Final = 16


class RkeyExchanges:
    """What `exchanges.Exchanges` does about RKeys."""

    machine: Machine

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._queue: deque[RkeyRequest] = deque()
        self._current: RkeyRequest | None = None
        self._rkeys_link: Link | None = None
        self._rkeys_timer: Timer | None = None
        # More than one when they come in the middle of an action: their events wait, too.
        self._peer_requests: deque[PeerRequest] = deque()
        self._put_off: deque[PeerRequest] = deque()
        self._retries: dict[RkeyRequest, Timer] = {}

    # --- requests of this side ------------------------------------------------------------

    def change_rkeys(self, request: RkeyRequest) -> None:
        """Confirm or delete RKeys, now or when the exchange under way is done."""
        if self.machine.state == "ENDED" or len(self._queue) >= _MAX_QUEUED:
            request.finished(False)
            return
        self._queue.append(request)
        self.machine.send("queued")

    def _start_rkeys(self) -> bool:
        """Begin the request of ours that waits longest, if one does and may."""
        link = self._group.any_active_link()
        if not self._queue or link is None or self._current is not None:
            return False
        self._current = self._queue.popleft()
        self._rkeys_link = link
        self.machine.send("change_rkeys")
        return True

    def on_reply_untrusted(self, link: Link, reply: RkeyMessage) -> None:
        """An echo of our RKey request; raises ProtocolError when there was none on ``link``."""
        request = self._current
        if request is None or link is not self._rkeys_link:
            raise ProtocolError(f"{type(reply).__name__} reply without a request")
        if request.on_echo_untrusted(reply):
            self.machine.send("rkeys_replied")

    def send_rkeys(self) -> None:
        """Our request; then wait for the echoes."""
        if self._current is not None and self._rkeys_link is not None:
            self._current.send(self._rkeys_link)
        self._rkeys_timer = self._group.timers.call_later(
            self._group.config.llc_timeout, lambda: self._timed_out("rkeys_timeout")
        )

    def stop_rkeys_timer(self) -> None:
        """They came, or do not matter any more."""
        if self._rkeys_timer is not None:
            self._rkeys_timer.cancel()
            self._rkeys_timer = None

    def end_rkeys(self) -> None:
        """All echoes are there."""
        request, self._current, self._rkeys_link = self._current, None, None
        if request is None:
            return
        if request.to_be_retried:
            # 3.5.5.3.1: begin anew when the peer's exchange is over; nothing tells when it is.
            self._retries[request] = self._group.timers.call_later(
                request.next_delay(), lambda: self._retry(request)
            )
            return
        request.finished(request.agreed)

    def redo_rkeys(self) -> None:
        """Links have changed meanwhile: begin anew, whatever the peer said (3.5.5.3.3)."""
        request, self._current, self._rkeys_link = self._current, None, None
        if request is not None:
            self._queue.appendleft(request)

    def fail_rkeys_link(self) -> None:
        """The link over which the request was sent has failed (C.7.1)."""
        self._fail(self._rkeys_link)

    def _retry(self, request: RkeyRequest) -> None:
        del self._retries[request]
        self.change_rkeys(request)

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
        for request in waiting:
            request.finished(False)

    # --- requests of the peer -------------------------------------------------------------

    def on_request(self, request: PeerRequest) -> None:
        """An RKey request of the peer (`Rkeys.on_request_untrusted`)."""
        self._peer_requests.append(request)
        self.machine.send("peer_rkeys")

    def answer_rkeys(self) -> None:
        """Answer the peer's RKey request."""
        self._answer(self._peer_requests.popleft())

    def _answer(self, request: PeerRequest) -> None:
        if request.link.state != "DOWN":
            self._group.rkeys.answer(request)

    def put_off_rkeys(self) -> None:
        """RKeys may not change while links do (3.5.5.3.1, 3.5.5.3.2)."""
        request = self._peer_requests.popleft()
        if not isinstance(request.message, llc.DeleteRkey):
            self._group.rkeys.refuse(request)
        elif len(self._put_off) < _MAX_PUT_OFF:
            self._put_off.append(request)
        else:
            LOGGER.warning("%r: the peer does not wait for replies to DELETE RKEY", request.link)
            request.link.machine.send("failed")

    # --- requests without an answer -------------------------------------------------------

    def _timed_out(self, event: str) -> None:
        self.machine.send(event)

    def _fail(self, link: Link | None) -> None:
        if link is not None:
            LOGGER.info("%r: an LLC request was not answered: %s", link, self.machine.state)
            link.machine.send("failed")
