"""LLC exchanges of one link group, one configuration change at a time (RFC 7609, 3.5.5.3).

Theory of operation
-------------------
What may run when is declared in `states.llc_exchange`; this module is that machine's model.
Adding links is told in `link_adding`, deleting them in `link_deletion`, RKeys in `rkeys`.
Requests that cannot start yet wait in bounded queues.  When an exchange is over, the next one
is chosen: deletions first, for nothing works on a link that is lost, then links, then RKeys.

An exchange that fails is not repeated on another link (2.3).  RKey requests begin anew, with the
links there are then: after a failed link, after a reply that says so, and when an ADD LINK or
DELETE LINK of the server overtook them (3.5.5.3.3); the last kind stays `_current` until its
reply has come.

Requests of the peer are answered at once where the table allows it.  While links change, a
CONFIRM RKEY is refused with "retry" (3.5.5.3.1) and a DELETE RKEY is answered when they have
changed.  TEST LINK and DELETE LINK for the whole group never come here.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.rkey_request import RkeyRequest
from trio_smc.states.engine import Machine
from trio_smc.states.llc_exchange import LLC_EXCHANGE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.rkeys import PeerRequest, RkeyMessage
    from trio_smc.rendezvous.timers import Timer

__all__ = ["Exchanges"]

LOGGER = logging.getLogger("trio_smc.llc")

_MAX_QUEUED: Final = 512
_MAX_PUT_OFF: Final = 16


class Exchanges:
    """The serializer of one link group; the model of `states.llc_exchange`.

    Attributes:
      carrier: the link that the ADD LINK or DELETE LINK exchange under way travels on.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.machine = Machine(LLC_EXCHANGE, self)
        self.carrier: Link | None = None
        self._timer: Timer | None = None
        self._queue: deque[RkeyRequest] = deque()
        self._current: RkeyRequest | None = None
        self._rkeys_link: Link | None = None
        self._rkeys_timer: Timer | None = None
        # More than one when they come in the middle of an action: their events wait, too.
        self._peer_requests: deque[PeerRequest] = deque()
        self._put_off: deque[PeerRequest] = deque()
        self._retries: dict[RkeyRequest, Timer] = {}
        self._chosen = False  # the next exchange, whose event the machine has not seen yet

    @property
    def state(self) -> str:
        """The exchange under way (`trio_smc.states.llc_exchange`)."""
        return self.machine.state

    # --- what the group asks for -----------------------------------------------------------

    def begin(self, event: str, link: Link) -> None:
        """Begin an exchange on ``link``, by the event that the chart calls it."""
        self.carrier = link
        self.machine.send(event)

    def done(self) -> None:
        """The exchange under way is complete."""
        self.machine.send("done")

    def look(self) -> None:
        """Something waits: start it, if nothing is under way."""
        self.machine.send("queued")

    def change_rkeys(self, request: RkeyRequest) -> None:
        """Confirm or delete RKeys, now or when the exchange under way is done."""
        if self.machine.state == "ENDED" or len(self._queue) >= _MAX_QUEUED:
            request.finished(False)
            return
        self._queue.append(request)
        self.look()

    def link_lost(self, link: Link) -> None:
        """What travels on ``link`` has failed."""
        begun = self.machine.state == "CHANGE_RKEYS" or self._chosen
        if link is self._rkeys_link and not begun:
            self.stop_rkeys_timer()
            self.redo_rkeys()
        if link is self.carrier or link is self._rkeys_link:
            self.machine.send("carrier_lost")

    def end(self) -> None:
        """The group is gone: nothing can be exchanged any more."""
        self.fail_queued()  # at once, although an exchange may be failing just now
        self.machine.send("end")

    # --- messages of the peer -----------------------------------------------------------

    def on_reply_untrusted(self, link: Link, reply: RkeyMessage) -> None:
        """An echo of our RKey request; raises ProtocolError when there was none on ``link``."""
        request = self._current
        if request is None or link is not self._rkeys_link:
            raise ProtocolError(f"{type(reply).__name__} reply without a request")
        if request.on_echo_untrusted(reply):
            self.machine.send("rkeys_replied")

    def on_request(self, request: PeerRequest) -> None:
        """An RKey request of the peer (`Rkeys.on_request_untrusted`)."""
        self._peer_requests.append(request)
        self.machine.send("peer_rkeys")

    # --- actions of states.llc_exchange: what comes next -------------------------------------

    def start_next(self) -> None:
        """Begin the most urgent exchange that waits."""
        if self._chosen:
            return
        self.carrier = None
        while self._put_off:
            self._answer(self._put_off.popleft())
        group = self._group
        if group.state == "FORMING" or group.links.for_llc() is None:
            return
        if group.deletion.start() or group.seeking.start() or self._start_rkeys():
            self._chosen = True

    def _start_rkeys(self) -> bool:
        link = self._group.any_active_link()
        if not self._queue or link is None or self._current is not None:
            return False
        self._current = self._queue.popleft()
        self._rkeys_link = link
        self.machine.send("change_rkeys")
        return True

    def settle(self) -> None:
        """At first contact data may flow now: there is a second link, or it was given up."""
        self._group.adding.settle()

    def start_reply_timer(self) -> None:
        """C.7: longer at first contact, so that a write time-out and a Decline fit in."""
        self.stop_reply_timer()
        self._timer = self._group.timers.call_later(
            self._group.reply_timeout, lambda: self._timed_out("timeout")
        )

    def stop_reply_timer(self) -> None:
        """The reply came, or does not matter any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self, event: str) -> None:
        self.machine.send(event)

    def fail_carrier(self) -> None:
        """The link over which the message was sent is not usable either (C.7.1)."""
        self._fail(self.carrier)

    def _fail(self, link: Link | None) -> None:
        if link is not None:
            LOGGER.info("%r: an LLC request was not answered: %s", link, self.machine.state)
            link.machine.send("failed")

    def give_up_first_contact(self) -> None:
        """Break the TCP connection (C.7.1)."""
        self._group.setup.first_contact_timed_out()

    # --- actions and guards: links ------------------------------------------------------------

    @property
    def client(self) -> bool:
        """Our role."""
        return self._group.client

    @property
    def forming(self) -> bool:
        """Whether this is the first contact."""
        return self._group.state == "FORMING"

    @property
    def only_carrier(self) -> bool:
        """Whether a lost link's deletion went over the only link there is; TEST LINK watches that.

        Linux answers when all it has sent over the lost link has failed, which may take long.
        """
        return (
            not self.forming
            and self._group.deletion.is_of_lost_link
            and self._group.usable_links() == [self.carrier]
        )

    @property
    def peer_adds_links(self) -> bool:
        """Whether the peer has ever answered ADD LINK; old kernels never do."""
        return self._group.adding.answered

    def give_up_reply(self) -> None:
        """ADD LINK was not answered."""
        self._group.adding.give_up()

    def drop_new_link(self) -> None:
        """Free what the new link had."""
        self._group.adding.drop()

    def retry_later(self) -> None:
        """C.8."""
        self._group.seeking.retry_later()

    def retry_failed(self) -> None:
        """C.7.1."""
        self._group.seeking.retry_failed()

    def retry_soon(self) -> None:
        """C.7.1: over another link, if there is one."""
        self._group.seeking.seek()

    def note_notice(self) -> None:
        """The client has an RNIC for a further link (3.5.5.1.2)."""
        self._group.seeking.asked()

    def note_deletion(self) -> None:
        """The client wants a link deleted (3.5.5.1.4)."""
        self._group.deletion.note_asked()

    def withdraw_link(self) -> None:
        """DELETE LINK for the link that could not be added."""
        self._group.deletion.withdraw(self._group.adding.number)

    def ask_to_withdraw(self) -> None:
        """The same of the client, which the server answers with a DELETE LINK."""
        self._group.deletion.requests.ask(self._group.adding.number, llc.DeleteLinkReason.LOST_PATH)

    def leave_link(self) -> None:
        """Move connections off the link that is to be deleted."""
        self._group.deletion.leave()

    def send_delete_link(self) -> None:
        """They have left."""
        self._group.deletion.send()

    def delete_again(self) -> None:
        """Over another link."""
        self._group.deletion.again()

    # --- actions: RKeys ---------------------------------------------------------------------

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

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers."""
        if old == "IDLE":
            self._chosen = False
        observer = self._group.host.observer
        if observer is not None:
            observer.state(self, old, new, event)
