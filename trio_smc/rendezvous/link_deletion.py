"""Deleting single links of a group: DELETE LINK and its reply (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

Theory of operation
-------------------
The server deletes, in an exchange of its own: connections leave the link (`link_leaving`), then
DELETE LINK goes out over any other link, and with the client's reply the link is freed.  The
client does the same in between: it leaves the link, replies, and frees the link when the reply has
arrived.  A link that has failed already has nothing to leave and is freed at once; both sides tell
the other all the same.

A client that wants a link deleted asks its server to, and waits for the server's DELETE LINK
(`deletion_requests`).

When the link fails that connections have left for, and no other is usable, the one that was to go
stays: the peers still reach each other over it (4.8.3).  Each side decides that by itself, as
long as it does not know that the other has freed the link.

DELETE LINK for the whole group is the affair of `states.link_group`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_smc.rendezvous import llc
from trio_smc.rendezvous.deletion_requests import DeletionRequests, Wanted
from trio_smc.rendezvous.link_leaving import LinkLeaving
from trio_smc.states.link_group import USABLE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["LinkDeletion"]

LOGGER = logging.getLogger("trio_smc.link_group")


class LinkDeletion:
    """How single links of one group go.

    Attributes:
      requests: what this side asked for, as the client.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.requests = DeletionRequests(group)
        # The server's: those that wait, and the one under way.
        self._queue: dict[int, Wanted] = {}
        self._current: Wanted | None = None
        self._from_client: Wanted | None = None
        # The client's: what it was told to, by link number.
        self._told: dict[int, tuple[Link, llc.DeleteLink]] = {}
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
            self.requests.ask(number, reason, orderly=orderly)
        elif self._current is None or self._current.number != number:
            self._queue[number] = Wanted(number, reason, orderly)
            self._group.exchanges.look()

    def told_to_delete(self, number: int) -> bool:
        """Whether the server wants the link deleted: it need not be told that it failed."""
        return number in self._told

    @property
    def links_to_go(self) -> bool:
        """Whether this client has links that it asked to be deleted, or was told to delete."""
        return bool(self.requests.asked or self._told)

    @property
    def is_of_lost_link(self) -> bool:
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
            self._group.machine.send("delete_all")
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
        adding, exchanges = self._group.adding, self._group.exchanges
        if exchanges.state == "ADD_LINK_CONFIRM" and number == adding.number:
            exchanges.machine.send("new_link_lost")  # 3.5.1.6.2: CONFIRM LINK failed there
            return
        # 3.5.5.1.4: the server answers with a DELETE LINK of its own.
        self._from_client = Wanted(number, message.reason, message.orderly)
        exchanges.machine.send("delete_asked")

    def _cleaning_up(self, number: int) -> bool:
        current = self._current is not None and self._current.number == number
        return current or (number in self._queue and number not in self._group.links)

    def _on_request_from_server(self, link: Link, message: llc.DeleteLink) -> None:
        number = message.link_number
        if number not in self._group.links:
            asked = self.requests.forget(number)
            reason = message.reason if asked else llc.DeleteLinkReason.UNKNOWN_LINK
            self._reply(link, number, reason)
            self._asked_is_over()
            return
        self._told[number] = (link, message)
        self._group.exchanges.machine.send("delete_link")

    def _on_reply(self, number: int) -> None:
        if self._group.client:
            # The server knows no such link (any more).
            if self.requests.forget(number):
                self._asked_is_over()
        elif self._current is not None and self._current.number == number:
            wanted, self._current = self._current, None
            if wanted.reason == llc.DeleteLinkReason.OPERATOR:
                self._group.seeking.hold()
            # 3.5.5.1.3: only now the server frees what the link had.
            link = self._group.links.get(number)
            had_come = link is not None and link.confirmed
            self._group.remove_link(number)
            if self._group.state != "GONE":
                if had_come:
                    # If it left as soon as it came, it has never counted: nobody else asks then.
                    self._group.seeking.seek(news=False)
                self._group.exchanges.done()

    def client_has_none(self, number: int) -> None:
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
        self._group.exchanges.machine.send("delete_link")
        return True

    def note_asked(self) -> None:
        """Queue what the client asked for."""
        wanted = self._from_client
        if wanted is not None:
            self._queue[wanted.number] = wanted

    def withdraw(self, number: int) -> None:
        """The exchange becomes one that deletes a link that could not be added (3.5.1.6.2)."""
        self._current = Wanted(number, llc.DeleteLinkReason.LOST_PATH, False)
        self._queue.pop(number, None)
        self._group.seeking.retry_failed()
        self._group.exchanges.machine.send("link_left")

    def leave(self) -> None:
        """Move connections off the link, or off all links that the server named."""
        if self._group.client:
            for number, (_, message) in list(self._told.items()):
                link = self._group.links.get(number)
                if link is not None and not message.orderly:
                    self.keep_last(link)  # this one has failed, and nobody told us yet
                self._leaving.begin(number, orderly=True)
        elif self._current is not None:
            self._leaving.begin(self._current.number, orderly=self._current.orderly)

    def _left(self, number: int) -> None:
        if self._group.client:
            self._comply(number)
        else:
            self._group.exchanges.machine.send("link_left")

    def send(self) -> None:
        """The server's DELETE LINK, over another link if there is one."""
        wanted, links = self._current, self._group.links
        if wanted is None:
            return
        carrier = links.for_llc(avoid=links.get(wanted.number))
        if carrier is not None:
            self._group.exchanges.carrier = carrier
            carrier.send_llc(
                llc.DeleteLink(
                    orderly=wanted.orderly, link_number=wanted.number, reason=wanted.reason
                )
            )

    def again(self) -> None:
        """The link that DELETE LINK was sent over has failed (C.7.1)."""
        wanted, self._current = self._current, None
        if wanted is not None:
            self._queue = {wanted.number: wanted, **self._queue}

    # --- the client ----------------------------------------------------------------------------

    def _asked_is_over(self) -> None:
        if self._group.exchanges.state == "DELETE_LINK" and not self._told:
            self._group.exchanges.done()

    def _comply(self, number: int) -> None:
        link, message = self._told[number]
        self.requests.forget(number)
        if link.state == "DOWN":
            other = self._group.links.for_llc()
            if other is None:
                return
            link = other
        self._replied[number] = link
        link.send_llc(
            llc.DeleteLink(reply=True, link_number=number, reason=message.reason),
            lambda: self._complied(number),
        )

    def _complied(self, number: int) -> None:
        """The reply has arrived, or never will: the link is gone on this side."""
        self._told.pop(number, None)
        if self._replied.pop(number, None) is not None:
            self._group.remove_link(number)
            if self._group.state != "GONE":
                self._asked_is_over()

    # --- failures ----------------------------------------------------------------------------

    def keep_last(self, lost: Link) -> None:
        """``lost`` fails; if the only other link was to go in order, it stays (4.8.3)."""
        group = self._group
        others = [each for each in group.links.values() if each.confirmed and each is not lost]
        usable = [each for each in others if each.usable]
        if group.state not in USABLE or not others or len(usable) > 1:
            return
        link = (usable or others)[0]
        if self._withdrawn(link, lost):
            LOGGER.info("%r stays: it is the only one", link)
            if link.state == "LEAVING":
                link.machine.send("stay")
                group.mover.link_stays(link)
            if link.rnic not in group.usable_rnics():
                group.seeking.replace(link)  # it is drained

    def _withdrawn(self, link: Link, lost: Link) -> bool:
        """Forget that ``link`` was to go; False: it was not, or it is too late for that."""
        number, exchanges = link.number, self._group.exchanges
        current = self._current
        under_way = current is not None and current.number == number
        if self._replied.get(number) is link or (under_way and exchanges.carrier is link):
            return False
        wishes = [self._queue.get(number), self.requests.wanted(number)]
        if link.usable and not any(wish is not None and wish.orderly for wish in wishes):
            return False
        self._queue.pop(number, None)
        self.requests.forget(number)
        self._told.pop(number, None)
        self._replied.pop(number, None)
        self._leaving.stop(number)
        if under_way:
            self._current = None
        if exchanges.state == "DELETE_LINK" and self._current is None and not self._told:
            exchanges.carrier = lost  # the exchange ends with it
        return True

    def link_lost(self, link: Link) -> None:
        """What was sent over ``link``, which has failed, may not have arrived."""
        if self._leaving.stop(link.number):
            self._left(link.number)
        for number in [each for each, over in self._replied.items() if over is link]:
            self._complied(number)
        self.requests.link_lost(link)

    def close(self) -> None:
        """The group is gone."""
        self.requests.close()
        self._leaving.close()
