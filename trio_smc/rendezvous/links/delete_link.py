"""Deleting single links of a group: DELETE LINK and its reply (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

Theory of operation
-------------------
The server deletes, in an exchange of its own: connections leave the link (`LinkLeaving`), then
DELETE LINK goes out over any other link, and with the client's reply the link is freed.  The
client does the same in between: it leaves the link, replies, and frees the link when the reply has
arrived.  A link that has failed already has nothing to leave and is freed at once; both sides tell
the other all the same.

A client that wants a link deleted asks its server to, and waits for the server's DELETE LINK
(`DeletionRequests`).

When the link fails that connections have left for, and no other is usable, the one that was to go
stays: the peers still reach each other over it (4.8.3).  Each side decides that by itself, as
long as it does not know that the other has freed the link.

DELETE LINK for the whole group is the affair of `states.link_group`.

Two links without a common RNIC always stay, for redundancy.  A link that nobody used for a while
goes, and is added again when connections use all that are left (`IdleLinks`).
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
"""Reply time-outs that a client gives its server, which may first wait for the end of an exchange
of its own (3.5.5.3.1), and then for its connections to leave the link."""


class PlannedDeletion(NamedTuple):
    """A link that is to go.

    Fields:
      number: the link's.
      reason: a 32-bit reason code (A.3.4).
      orderly: connections leave it while it still works.
    """

    number: int
    reason: int
    orderly: bool


class _PendingRequest(NamedTuple):
    """A client's DELETE LINK that waits for the server's."""

    wanted: PlannedDeletion
    link: Link
    timer: Timer


class DeletionRequests:
    """What the client of one group has asked its server to delete.

    Attributes:
      pending: by link number, what the server has not answered yet.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pending: dict[int, _PendingRequest] = {}

    def request(self, number: int, reason: int, *, orderly: bool = False) -> None:
        """Send DELETE LINK; the server's will follow."""
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
        if number != link.number and self._group.links.usable() == [link]:
            # Linux answers only when all it has sent over the lost link has failed, which over
            # soft-RoCE may be never; and it drops requests that come in the middle of another
            # exchange.  The last link took our message, so it works: no connection is to die of
            # it, and TEST LINK watches it (4.5.3).  Ask again.
            self._send(link, wanted)
            return
        # C.7.1: the link it was sent over is not usable either; `link_lost` asks again.
        link.machine.send("failed")

    def wanted(self, number: int) -> PlannedDeletion | None:
        """What was asked for link ``number``, if the server's DELETE LINK has not come yet."""
        asked = self.pending.get(number)
        return None if asked is None else asked.wanted

    def given_up(self, link: Link) -> bool:
        """Whether another link has told the server that ``link`` is to go: what the server asks
        over it meanwhile is ignored, and asked again over another one (C.7.1)."""
        asked = self.pending.get(link.number)
        return asked is not None and asked.link is not link

    def discard(self, number: int) -> bool:
        """Wait no longer; whether anything was asked."""
        asked = self.pending.pop(number, None)
        if asked is not None:
            asked.timer.cancel()
        return asked is not None

    def link_lost(self, link: Link) -> None:
        """What was sent over ``link``, which has failed, may not have arrived: ask again."""
        for wanted in [asked.wanted for asked in self.pending.values() if asked.link is link]:
            self.discard(wanted.number)
            self.request(wanted.number, wanted.reason, orderly=wanted.orderly)

    def close(self) -> None:
        """The group is gone."""
        for number in list(self.pending):
            self.discard(number)


class LinkLeaving:
    """The links of one group that connections are leaving."""

    def __init__(self, group: Group, left: Callable[[int], None]) -> None:
        """`left`: called with the number of a link that nobody uses any more."""
        self._group = group
        self._left = left
        self._leaving: dict[int, Timer] = {}

    def begin(self, number: int, *, orderly: bool) -> None:
        """Let connections leave a link, if there is one to leave and one to go to.

        orderly: while it still works; else it fails at once.
        """
        link = self._group.links.get(number)
        if number in self._leaving:
            return
        if link is None or not link.usable or self._group.links.least_loaded(but=link) is None:
            self._left(number)  # there is nothing to leave, or nowhere to go
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
            LOGGER.info("%r: its connections do not leave", link)
            self._group.mover.link_lost(link)
        self._has_left(number)

    def _has_left(self, number: int) -> None:
        if self.stop(number):
            self._left(number)

    def stop(self, number: int) -> bool:
        """Wait no longer for a link; whether anybody did."""
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
    """How single links of one group go.

    Attributes:
      requests: what this side asked for, as the client.
    """

    def __init__(self, group: Group, exchange: Exchange, demand: LinkDemand) -> None:
        self._group = group
        self._exchange = exchange
        self._demand = demand
        self.requests: DeletionRequests = DeletionRequests(group)
        # The server's: those that wait, and the one under way.
        self._queue: dict[int, PlannedDeletion] = {}
        self._current: PlannedDeletion | None = None
        self._from_client: PlannedDeletion | None = None
        # The client's: what it was told to, by link number.
        self._server_requests: dict[int, tuple[Link, llc.DeleteLink]] = {}
        self._replied: dict[int, Link] = {}
        self._leaving = LinkLeaving(group, self._left)

    def delete_link(
        self, number: int, reason: int = llc.DeleteLinkReason.OPERATOR, *, orderly: bool = True
    ) -> None:
        """Delete one link; a client asks its server to.

        Args:
          number: the link's; it may have failed already.
          reason: a 32-bit reason code for the peer.
          orderly: connections leave it while it still works (A.3.4).
        """
        if self._group.client:
            self.requests.request(number, reason, orderly=orderly)
        elif self._current is None or self._current.number != number:
            self._queue[number] = PlannedDeletion(number, reason, orderly)
            self._exchange.start_queued()

    def server_deletes(self, number: int) -> bool:
        """Whether the server wants the link deleted: it need not be told that it failed."""
        return number in self._server_requests

    def has_replied(self, number: int) -> bool:
        """True if this client has sent its reply to the server's DELETE LINK of this link, and has
        not freed the link yet: the server may have."""
        return number in self._replied

    @property
    def has_pending(self) -> bool:
        """Whether this client has links that it asked to be deleted, or was told to delete."""
        return bool(self.requests.pending or self._server_requests)

    @property
    def link_is_lost(self) -> bool:
        """Whether the server's exchange under way deletes a link that is down already."""
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
        if self._cleaning_up(number):
            return  # C.7.1: a timing window
        if number not in self._group.links:
            self._reply(link, number, llc.DeleteLinkReason.UNKNOWN_LINK)
            return
        if self._exchange.is_adding(number):
            self._exchange.send("new_link_lost")  # 3.5.1.6.2: CONFIRM LINK failed there
            return
        # 3.5.5.1.4: the server answers with a DELETE LINK of its own.
        self._from_client = PlannedDeletion(number, message.reason, message.orderly)
        self._exchange.send("deletion_requested")

    def _cleaning_up(self, number: int) -> bool:
        current = self._current is not None and self._current.number == number
        return current or (number in self._queue and number not in self._group.links)

    def _on_request_from_server(self, link: Link, message: llc.DeleteLink) -> None:
        number = message.link_number
        if number not in self._group.links:
            asked = self.requests.discard(number)
            reason = message.reason if asked else llc.DeleteLinkReason.UNKNOWN_LINK
            self._reply(link, number, reason)
            self._finish_if_done()
            return
        self._server_requests[number] = (link, message)
        self._exchange.send("delete_link")

    def _on_reply(self, number: int) -> None:
        if self._group.client:
            # The server knows no such link (any more).
            if self.requests.discard(number):
                self._finish_if_done()
        elif self._current is not None and self._current.number == number:
            wanted, self._current = self._current, None
            if wanted.reason == llc.DeleteLinkReason.OPERATOR:
                self._demand.pause()
            # 3.5.5.1.3: only now the server frees what the link had.
            link = self._group.links.get(number)
            had_come = link is not None and link.confirmed
            self._group.remove_link(number)
            if self._group.state != "GONE":
                if had_come:
                    # If it left as soon as it came, it has never counted: nobody else asks then.
                    self._demand.want(news=False)
                self._exchange.done()

    def on_client_has_none(self, number: int) -> None:
        """The client has said otherwise that it has no such link: as good as a reply."""
        self._on_reply(number)

    def _reply(self, link: Link, number: int, reason: int) -> None:
        link.send_llc(llc.DeleteLink(reply=True, link_number=number, reason=reason))

    # --- the server's exchange ---------------------------------------------------------------

    def start(self) -> bool:
        """Begin the deletion that waits longest, if one does."""
        if not self._queue:
            return False
        number = next(iter(self._queue))
        self._current = self._queue.pop(number)
        self._exchange.send("delete_link")
        return True

    def queue_client_request(self) -> None:
        """Queue what the client asked for."""
        wanted = self._from_client
        if wanted is not None:
            self._queue[wanted.number] = wanted

    def withdraw(self, number: int) -> None:
        """The exchange becomes one that deletes a link that could not be added (3.5.1.6.2)."""
        self._current = PlannedDeletion(number, llc.DeleteLinkReason.LOST_PATH, False)
        self._queue.pop(number, None)
        self._demand.retry_failed()
        self._exchange.send("link_left")

    def leave(self) -> None:
        """Move connections off the link, or off all links that the server named."""
        if self._group.client:
            for number, (_, message) in list(self._server_requests.items()):
                link = self._group.links.get(number)
                if link is not None and not message.orderly:
                    self.keep_last_link(link)  # this one has failed, and nobody told us yet
                self._leaving.begin(number, orderly=True)
        elif self._current is not None:
            self._leaving.begin(self._current.number, orderly=self._current.orderly)

    def _left(self, number: int) -> None:
        if self._group.client:
            self._confirm_deletion(number)
        else:
            self._exchange.send("link_left")

    def send(self) -> None:
        """The server's DELETE LINK, over another link if there is one."""
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
        """The link that DELETE LINK was sent over has failed (C.7.1)."""
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
        """The reply has arrived, or never will: the link is gone on this side."""
        self._server_requests.pop(number, None)
        if self._replied.pop(number, None) is not None:
            self._group.remove_link(number)
            if self._group.state != "GONE":
                self._finish_if_done()

    # --- failures ----------------------------------------------------------------------------

    def keep_last_link(self, lost: Link) -> None:
        """``lost`` fails; if the only other link was to go in order, it stays (4.8.3)."""
        group = self._group
        others = [each for each in group.links.values() if each.confirmed and each is not lost]
        usable = [each for each in others if each.usable]
        if group.state not in USABLE or not others or len(usable) > 1:
            return
        link = (usable or others)[0]
        if self._cancel_deletion(link, lost):
            LOGGER.info("%r stays: it is the only one", link)
            if link.state == "LEAVING":
                link.machine.send("stay")
                group.mover.link_stays(link)
            if link.rnic not in group.usable_rnics():
                self._demand.replace(link)  # it is drained

    def _cancel_deletion(self, link: Link, lost: Link) -> bool:
        """Forget that ``link`` was to go; False: it was not, or it is too late for that."""
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
            exchange.carrier = lost  # the exchange ends with it
        return True

    def link_lost(self, link: Link) -> None:
        """What was sent over ``link``, which has failed, may not have arrived."""
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
"""Symmetric links that are never deleted for being idle."""


class IdleLinks:
    """When links of one group are deleted because nothing uses them."""

    def __init__(self, group: Group, demand: LinkDemand, deletion: LinkDeletion) -> None:
        self._group = group
        self._demand = demand
        self._deletion = deletion
        self._timer: Timer | None = None

    def watch(self) -> None:
        """Look after the time that an idle group has, too; server only."""
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
                self._demand.spared = True
                self._deletion.delete_link(link.number, llc.DeleteLinkReason.PROGRAM)
                break  # one at a time: the next look finds the next one
        self.watch()

    def connection_placed(self) -> None:
        """All links are in use: one more would be."""
        demand = self._demand
        if demand.spared and all(link.users for link in self._group.links.usable()):
            demand.spared = False
            demand.want(news=False)

    def close(self) -> None:
        """The group is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
