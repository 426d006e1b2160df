"""Deleting single links of a group: DELETE LINK and its reply (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

Theory of operation
-------------------
The server deletes links, in an exchange: its connections leave the link (`LinkLeaving`), then it
sends DELETE LINK over another link, and on the client's reply it frees the link. When DELETE LINK
arrives, the client's connections leave the link, too. Then the client replies, and frees the link
when the reply has arrived. A link that has failed already has no connections and is freed at once,
but the two sides exchange the messages for it, too.

A client requests a deletion from its server, and waits for the server's DELETE LINK
(`DeletionRequests`).

If the link to which the connections have moved fails, and no other link is usable, the deletion is
cancelled, because the peers still reach each other over the link that was to be deleted (4.8.3).
Each side decides this alone, unless it knows that the other side has freed the link.

`states.link_group` handles DELETE LINK for the whole group.

Two links without a common RNIC are always kept, for redundancy. A further link that no connection
has used for a while is deleted, and added again when connections use all other links (`IdleLinks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from trio_smc.states import USABLE
from trio_smc.wire import llc

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer
    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.link_demand import LinkDemand

__all__ = [
    "IdleLinks",
    "LinkDeletion",
]


LOGGER = logging.getLogger("trio_smc.link_group")

_PATIENCE: Final = 3
"""A client waits for its server's DELETE LINK this many times as long as for a reply: one time-out
each for another exchange that the server may have to end first (3.5.5.3.1), for its connections to
leave the link, and for the message. Chosen."""


class PlannedDeletion(NamedTuple):
    """A link that will be deleted.

    Fields:
      number: the link's number.
      reason: a 32-bit reason code (A.3.4).
      orderly: True if connections leave the link while it still works.
    """

    number: int
    reason: int
    orderly: bool


class _PendingRequest(NamedTuple):
    """A client's DELETE LINK that waits for the server's DELETE LINK."""

    wanted: PlannedDeletion
    link: Link
    timer: Timer


class DeletionRequests:
    """The client's requests to its server to delete links.

    Attributes:
      pending: the requests that the server has not answered yet, by the number of the link.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pending: dict[int, _PendingRequest] = {}

    def request(self, number: int, reason: int, *, orderly: bool = False) -> None:
        """Send DELETE LINK; the server answers later, by a DELETE LINK of its own."""
        links = self._group.links
        link = links.for_llc(avoid=links.get(number))
        if link is not None and number not in self.pending:
            self._send(link, PlannedDeletion(number, reason, orderly))

    def _send(self, link: Link, wanted: PlannedDeletion) -> None:
        number = wanted.number
        timer = self._group.timers.call_later(
            _PATIENCE * self._group.reply_timeout, lambda: self._deletion_timed_out(number)
        )
        self.pending[number] = _PendingRequest(wanted, link, timer)
        link.send_llc(
            llc.DeleteLink(orderly=wanted.orderly, link_number=number, reason=wanted.reason)
        )

    def _deletion_timed_out(self, number: int) -> None:
        wanted, link, _ = self.pending[number]
        LOGGER.info("%r: DELETE LINK was not answered", link)
        if link.peer_lives or (number != link.number and self._group.links.usable() == [link]):
            # The peer's process may stand still: the kernel reports its end, if it has ended.
            # Linux answers only when all its sends over the lost link have failed, which may never
            # happen over soft-RoCE, and it drops requests that arrive during another exchange. The
            # last link has delivered the request, so the link works, and TEST LINK tests it
            # (4.5.3): keep it with its connections, and repeat the request.
            self._send(link, wanted)
            return
        # C.7.1: the link that carried the request is not usable either. `link_lost` repeats the
        # request.
        link.machine.send("failed")

    def wanted(self, number: int) -> PlannedDeletion | None:
        """The request for link ``number`` that the server has not answered yet, or None."""
        request = self.pending.get(number)
        return None if request is None else request.wanted

    def has_request_for(self, link: Link) -> bool:
        """True if this client has sent a DELETE LINK for ``link`` over another link.

        Until the answer, requests of the server over ``link`` are ignored; the server repeats them
        over another link (C.7.1).
        """
        request = self.pending.get(link.number)
        return request is not None and request.link is not link

    def discard(self, number: int) -> bool:
        """Discard a request; True if there was one."""
        request = self.pending.pop(number, None)
        if request is not None:
            request.timer.cancel()
        return request is not None

    def link_lost(self, link: Link) -> None:
        """Repeat the requests sent over ``link``, which has failed."""
        for wanted in [request.wanted for request in self.pending.values() if request.link is link]:
            self.discard(wanted.number)
            self.request(wanted.number, wanted.reason, orderly=wanted.orderly)

    def close(self) -> None:
        """The group is gone."""
        for number in list(self.pending):
            self.discard(number)


class LinkLeaving:
    """Lets the connections of one group leave links that will be deleted."""

    def __init__(self, group: Group, left: Callable[[int], None]) -> None:
        """``left``: called with the number of a link when its connections have left."""
        self._group = group
        self._left = left
        self._leaving: dict[int, Timer] = {}

    def begin(self, number: int, *, orderly: bool) -> None:
        """Let connections leave a link, if there is another usable link.

        ``orderly``: connections leave while the link still works; otherwise the link fails at once.
        """
        link = self._group.links.get(number)
        if number in self._leaving:
            return
        if link is None or not link.usable or self._group.links.least_loaded(but=link) is None:
            self._left(number)  # no connection can leave, or there is no other link
        elif orderly:
            link.machine.send("leave")
            self._leaving[number] = self._group.timers.call_later(
                self._group.config.llc_timeout, lambda: self._timed_out(number)
            )
            self._group.mover.link_leaving(link, lambda: self._has_left(number))
        else:
            link.machine.send("failed")
            self._left(number)

    def _timed_out(self, number: int) -> None:
        link = self._group.links.get(number)
        if link is not None:
            LOGGER.info("%r: connections did not leave in time", link)
            self._group.mover.link_lost(link)
        self._has_left(number)

    def _has_left(self, number: int) -> None:
        if self.stop(number):
            self._left(number)

    def stop(self, number: int) -> bool:
        """Stop the wait for connections to leave a link; True if there was such a wait."""
        timer = self._leaving.pop(number, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def close(self) -> None:
        """The group is gone."""
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()


class LinkDeletion:
    """Deletes single links of one group.

    Attributes:
      requests: this client's requests to the server.
    """

    def __init__(self, group: Group, exchange: Exchange, demand: LinkDemand) -> None:
        self._group = group
        self._exchange = exchange
        self._demand = demand
        self.requests: DeletionRequests = DeletionRequests(group)
        # The server's deletions: those that wait, and the one under way.
        self._queue: dict[int, PlannedDeletion] = {}
        self._current: PlannedDeletion | None = None
        self._from_client: PlannedDeletion | None = None
        # The server's requests to this client, by link number.
        self._server_requests: dict[int, tuple[Link, llc.DeleteLink]] = {}
        self._replied: dict[int, Link] = {}
        self._leaving = LinkLeaving(group, self._left)

    def delete_link(
        self, number: int, reason: int = llc.DeleteLinkReason.OPERATOR, *, orderly: bool = True
    ) -> None:
        """Delete one link; a client requests it from its server.

        Args:
          number: the number of the link, which may have failed already.
          reason: a 32-bit reason code for the peer.
          orderly: True if connections leave the link while it still works (A.3.4).
        """
        if self._group.client:
            self.requests.request(number, reason, orderly=orderly)
        elif self._current is None or self._current.number != number:
            self._queue[number] = PlannedDeletion(number, reason, orderly)
            self._exchange.start_queued()

    def server_deletes(self, number: int) -> bool:
        """True if the server is deleting the link: then a failure of it is not announced."""
        return number in self._server_requests

    def has_replied(self, number: int) -> bool:
        """True if this client has replied to DELETE LINK for this link, but not freed the link yet.

        The server may have freed it.
        """
        return number in self._replied

    @property
    def has_pending(self) -> bool:
        """True if this client waits for the deletion of a link."""
        return bool(self.requests.pending or self._server_requests)

    @property
    def link_is_lost(self) -> bool:
        """True if the server's exchange under way deletes a link that is down already."""
        if self._current is None:
            return False
        link = self._group.links.get(self._current.number)
        return link is None or link.state == "DOWN"

    # --- messages ----------------------------------------------------------------------------

    def on_delete_link_untrusted(self, link: Link, message: llc.DeleteLink) -> None:
        if message.reply:
            self._on_reply(message.link_number)
        elif message.all_links:
            self._group.timers.in_turn(lambda: self._group.delete_all(message.reason))
        elif self._group.client:
            self._on_request_from_server(link, message)
        else:
            self._on_request_from_client(link, message)

    def _on_request_from_client(self, link: Link, message: llc.DeleteLink) -> None:
        number = message.link_number
        if self._is_being_deleted(number):
            return  # C.7.1: this request and the server's DELETE LINK have crossed
        if number not in self._group.links:
            self._reply(link, number, llc.DeleteLinkReason.UNKNOWN_LINK)
            return
        if self._exchange.is_adding(number):
            self._exchange.send("new_link_lost")  # 3.5.1.6.2: CONFIRM LINK failed there
            return
        # 3.5.5.1.4: the server sends a DELETE LINK of its own.
        self._from_client = PlannedDeletion(number, message.reason, message.orderly)
        self._exchange.send("deletion_requested")

    def _is_being_deleted(self, number: int) -> bool:
        current = self._current is not None and self._current.number == number
        return current or (number in self._queue and number not in self._group.links)

    def _on_request_from_server(self, link: Link, message: llc.DeleteLink) -> None:
        number = message.link_number
        if number not in self._group.links:
            was_requested = self.requests.discard(number)
            reason = message.reason if was_requested else llc.DeleteLinkReason.UNKNOWN_LINK
            self._reply(link, number, reason)
            self._finish_if_done()
            return
        self._server_requests[number] = (link, message)
        self._exchange.send("delete_link")

    def _on_reply(self, number: int) -> None:
        if self._group.client:
            # The server does not have the link, or no longer.
            if self.requests.discard(number):
                self._finish_if_done()
        elif self._current is not None and self._current.number == number:
            wanted, self._current = self._current, None
            if wanted.reason == llc.DeleteLinkReason.OPERATOR:
                self._demand.pause()
            # 3.5.5.1.3: the server frees the link only after the reply.
            link = self._group.links.get(number)
            was_confirmed = link is not None and link.confirmed
            self._group.remove_link(number)
            if self._group.state != "GONE":
                if was_confirmed:
                    # Needed if the kind of the group is unchanged: then no state change does this.
                    self._demand.want(news=False)
                self._exchange.done()

    def on_client_has_none(self, number: int) -> None:
        """The client has rejected the link, which counts as a reply to DELETE LINK."""
        self._on_reply(number)

    def _reply(self, link: Link, number: int, reason: int) -> None:
        link.send_llc(llc.DeleteLink(reply=True, link_number=number, reason=reason))

    # --- the server's exchange ---------------------------------------------------------------

    def start(self) -> bool:
        """Begin the oldest waiting deletion, if there is one."""
        if not self._queue:
            return False
        number = next(iter(self._queue))
        self._current = self._queue.pop(number)
        self._exchange.send("delete_link")
        return True

    def queue_client_request(self) -> None:
        """Queue the deletion that the client has requested."""
        wanted = self._from_client
        if wanted is not None:
            self._queue[wanted.number] = wanted

    def withdraw(self, number: int) -> None:
        """Turn the exchange into the deletion of a link that could not be added (3.5.1.6.2)."""
        self._current = PlannedDeletion(number, llc.DeleteLinkReason.LOST_PATH, False)
        self._queue.pop(number, None)
        self._demand.retry_failed()
        self._exchange.send("link_left")

    def leave(self) -> None:
        """Let connections leave the link; on a client, all links that the server deletes."""
        if self._group.client:
            for number, (_, message) in list(self._server_requests.items()):
                link = self._group.links.get(number)
                if link is not None and not message.orderly:
                    self.keep_last_link(link)  # the link has failed, and this side did not notice
                self._leaving.begin(number, orderly=True)
        elif self._current is not None:
            self._leaving.begin(self._current.number, orderly=self._current.orderly)

    def _left(self, number: int) -> None:
        if self._group.client:
            self._confirm_deletion(number)
        else:
            self._exchange.send("link_left")

    def send(self) -> None:
        """Send the server's DELETE LINK, over another link if there is one."""
        wanted, links = self._current, self._group.links
        if wanted is None:
            return
        carrier = links.for_llc(avoid=links.get(wanted.number))
        if carrier is not None:
            self._exchange.carrier = carrier
            carrier.send_llc(
                llc.DeleteLink(
                    orderly=wanted.orderly, link_number=wanted.number, reason=wanted.reason
                )
            )

    def requeue(self) -> None:
        """Begin the deletion again later: the link that carried DELETE LINK has failed (C.7.1)."""
        wanted, self._current = self._current, None
        if wanted is not None:
            self._queue = {wanted.number: wanted, **self._queue}

    # --- the client ----------------------------------------------------------------------------

    def _finish_if_done(self) -> None:
        if self._exchange.state == "DELETE_LINK" and not self._server_requests:
            self._exchange.done()

    def _confirm_deletion(self, number: int) -> None:
        link, message = self._server_requests[number]
        self.requests.discard(number)
        if link.state == "DOWN":
            other = self._group.links.for_llc()
            if other is None:
                return
            link = other
        self._replied[number] = link
        link.send_llc(
            llc.DeleteLink(reply=True, link_number=number, reason=message.reason),
            lambda: self._deletion_confirmed(number),
        )

    def _deletion_confirmed(self, number: int) -> None:
        """Remove the link on this side, because the reply has arrived, or never will."""
        self._server_requests.pop(number, None)
        if self._replied.pop(number, None) is not None:
            self._group.remove_link(number)
            if self._group.state != "GONE":
                self._finish_if_done()

    # --- failures ----------------------------------------------------------------------------

    def keep_last_link(self, lost: Link) -> None:
        """Cancel the orderly deletion of the only other link, because ``lost`` fails (4.8.3)."""
        group = self._group
        others = [each for each in group.links.values() if each.confirmed and each is not lost]
        usable = [each for each in others if each.usable]
        if group.state not in USABLE or not others or len(usable) > 1:
            return
        link = (usable or others)[0]
        if self._cancel_deletion(link, lost):
            LOGGER.info("%r is not deleted: no other link is usable", link)
            if link.state == "LEAVING":
                link.machine.send("stay")
                group.mover.link_stays(link)
            if link.rnic not in group.usable_rnics():
                self._demand.replace(link)  # the RNIC is being drained

    def _cancel_deletion(self, link: Link, lost: Link) -> bool:
        """Cancel the deletion of ``link``; False if there is none, or it is too late."""
        number, exchange = link.number, self._exchange
        current = self._current
        under_way = current is not None and current.number == number
        if self._replied.get(number) is link or (under_way and exchange.carrier is link):
            return False
        wanted = [self._queue.get(number), self.requests.wanted(number)]
        if link.usable and not any(each is not None and each.orderly for each in wanted):
            return False
        self._queue.pop(number, None)
        self.requests.discard(number)
        self._server_requests.pop(number, None)
        self._replied.pop(number, None)
        self._leaving.stop(number)
        if under_way:
            self._current = None
        if exchange.state == "DELETE_LINK" and self._current is None and not self._server_requests:
            exchange.carrier = lost  # the failure of this link ends the exchange
        return True

    def link_lost(self, link: Link) -> None:
        """``link`` has failed, so messages that were sent over it may not have arrived."""
        if self._leaving.stop(link.number):
            self._left(link.number)
        for number in [each for each, over in self._replied.items() if over is link]:
            self._deletion_confirmed(number)
        self.requests.link_lost(link)

    def close(self) -> None:
        """The group is gone."""
        self.requests.close()
        self._leaving.close()


_REDUNDANT: Final = 2
"""Links without a common RNIC that are kept even if they are idle: two give redundancy."""


class IdleLinks:
    """Deletes links of one group that no connection uses."""

    def __init__(self, group: Group, demand: LinkDemand, deletion: LinkDeletion) -> None:
        self._group = group
        self._demand = demand
        self._deletion = deletion
        self._timer: Timer | None = None

    def watch(self) -> None:
        """Start the timer, with the time of idle groups (`Config.link_group_idle`); server only."""
        group = self._group
        if self._timer is None and not group.client and self._more_than_needed():
            self._timer = group.timers.call_later(group.config.link_group_idle, self._check)

    def _more_than_needed(self) -> bool:
        return len(self._group.links.symmetric()) > _REDUNDANT

    def _check(self) -> None:
        self._timer = None
        group = self._group
        if group.state not in USABLE:
            return
        oldest = group.timers.now() - group.config.link_group_idle
        for link in reversed(group.links.symmetric()[_REDUNDANT:]):
            if not link.users and link.empty_since <= oldest:
                self._demand.idle_link_deleted = True
                self._deletion.delete_link(link.number, llc.DeleteLinkReason.PROGRAM)
                break  # one at a time; the next check finds the next link
        self.watch()

    def connection_placed(self) -> None:
        """A connection has got a link: if all links are in use now, add a link again."""
        demand = self._demand
        if demand.idle_link_deleted and all(link.users for link in self._group.links.usable()):
            demand.idle_link_deleted = False
            demand.want(news=False)

    def close(self) -> None:
        """The group is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
