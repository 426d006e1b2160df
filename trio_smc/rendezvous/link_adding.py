"""Adding links to a group: ADD LINK, ADD LINK CONTINUATION, CONFIRM LINK on the new link
(RFC 7609, 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, C.8).

Theory of operation
-------------------
Which link is wanted when is told in `link_seeking`.  ADD LINK and its reply name both ends;
CONTINUATIONs go to and fro until both sides have told all their RTokens (`link_telling`);
CONFIRM LINK then shows that the link works.  All but the last travel on an existing link, the
carrier.

Each side looks for the other end's address before it connects its own, by a timer where nobody
has answered for it yet (`address_wait`); then all that decides is looked at anew.

At first contact no data may flow before the second link is there or given up (`settle`).  Where
an exchange stands is in `states.llc_exchange`; what happens when it fails, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.address_wait import AddressWait
from trio_smc.rendezvous.link import Link, PeerPort, PeerQueuePair
from trio_smc.rendezvous.link_choice import client_rnic, violates_rules
from trio_smc.rendezvous.link_telling import LinkTelling
from trio_smc.rnic.verbs import RnicError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rnic.verbs import Rnic

__all__ = ["LinkAdding"]

LOGGER = logging.getLogger("trio_smc.link_group")


class LinkAdding:
    """How further links of one group come up, one at a time.

    Attributes:
      new: the link that is being added.
      number: its number; it stays after the link was given up.
      answered: whether the peer has ever answered ADD LINK; always true of a client's server.
      telling: what the two sides say of their RMBs on it.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.new: Link | None = None
        self.number = -1
        self.answered = group.client
        self.telling = LinkTelling(group)
        self._address = AddressWait(group.timers)
        self._given_up: set[int] = set()
        self._dropped: set[int] = set()

    # --- the new link --------------------------------------------------------------------------

    def make(self, number: int, rnic: Rnic) -> bool:
        """Make the new link's end on ``rnic``; whether that worked."""
        group = self._group
        self.number = number
        self._given_up.discard(number)
        self._dropped.discard(number)
        try:
            link = Link(group, number, rnic)
            try:
                group.rkeys.register_on(link)
            except RnicError:
                link.close()
                raise
        except RnicError as error:
            LOGGER.info("%r: no queue pair for another link: %s", group, error)
            return False
        self.new = group.links[number] = link
        self.telling.begin()
        return True

    def drop(self) -> None:
        """Free the new link; it carried nothing."""
        self._address.cancel()
        link, self.new = self.new, None
        if link is not None:
            self._dropped.add(link.number)
            self._group.forget_link(link)

    def give_up(self) -> None:
        """The client did not answer: its reply may come after all."""
        self._given_up.add(self.number)

    def failed(self, link: Link) -> bool:
        """Whether ``link``, which has failed, is the one that is being added."""
        if link is not self.new:
            return False
        self._group.exchanges.machine.send("new_link_lost")
        return True

    def settle(self) -> None:
        """The exchange is over: at first contact data may flow now."""
        if self._group.state == "FORMING":
            self._group.machine.send("formed")

    # --- ADD LINK ------------------------------------------------------------------------------

    def offer(self, carrier: Link, rnic: Rnic) -> None:
        """Send the server's ADD LINK for the new link."""
        new = self.new
        carrier.send_llc(
            llc.AddLink(
                mac=rnic.mac,
                gid=rnic.gid,
                link_number=self.number,
                qp_number=new.qp.qp_num if new is not None else 0,
                qp_mtu=rnic.mtu if new is not None else 0,
                initial_psn=new.psn if new is not None else 0,
            ),
            self._group.setup.past_return,
        )

    def on_add_link_untrusted(self, link: Link, message: llc.AddLink) -> None:
        """ADD LINK or its reply.  Raises ProtocolError when neither can come now."""
        exchanges = self._group.exchanges
        if self._group.client:
            if message.reply:
                raise ProtocolError("ADD LINK reply from the server")
            self._answer(link, message)
        elif not message.reply:
            exchanges.machine.send("peer_notice")
        else:
            self.answered = True
            number = message.link_number
            if number in self._given_up:
                self._given_up.discard(number)
                if not message.rejected:  # the client believes in the link
                    self._group.delete_link(
                        number, orderly=False, reason=llc.DeleteLinkReason.LOST_PATH
                    )
            elif number == self.number and exchanges.state == "ADD_LINK":
                self._on_reply(link, message)
            elif message.rejected:
                self._on_late_rejection_untrusted(number)
            else:
                raise ProtocolError("ADD LINK reply without a request")

    def _on_late_rejection_untrusted(self, number: int) -> None:
        """The client takes its agreement to the new link back, as Linux does when anything fails
        after it: it has no such link.  Then it does not answer the DELETE LINK that crossed this.
        """
        exchanges = self._group.exchanges
        if number in self._dropped:
            self._dropped.discard(number)
            self._group.deletion.client_has_none(number)
        elif number == self.number and exchanges.state in (
            "ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM",
        ):  # fmt: skip
            exchanges.machine.send("refused")
        elif number != self.number:
            raise ProtocolError("ADD LINK reply without a request")

    def _answer(self, link: Link, message: llc.AddLink) -> None:
        group, exchanges = self._group, self._group.exchanges
        self._address.cancel()  # the server gave up what it offered before
        group.setup.our_turn = True
        if exchanges.state in ("ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM"):
            exchanges.machine.send("superseded")
        rnic = self._end_for(link, message)
        if rnic is None:
            self._reject(link, message)
        else:
            self._find(rnic, message, lambda: self._join(link, message))

    def _end_for(self, link: Link, message: llc.AddLink) -> Rnic | None:
        """The client's end of the link that is offered, as things are now."""
        group = self._group
        if (
            group.exchanges.state == "DELETE_LINK"
            or message.link_number in group.links
            or not message.qp_number
            or _mtu_reserved(message)
        ):
            return None
        rnics = group.usable_rnics()
        if group.state == "FORMING" and link.rnic not in rnics:
            rnics = [link.rnic, *rnics]
        peer = PeerPort(message.gid, message.mac)
        return client_rnic(group.links, rnics, group.setup.max_links, peer)

    def _find(self, rnic: Rnic, message: llc.AddLink, then: Callable[[], None]) -> None:
        """Go on when the RNIC knows the address of the peer's end, or will not get to know it."""
        exchanges = self._group.exchanges
        if not self._address.begin(rnic, message.gid, then) and exchanges.state == "ADD_LINK":
            exchanges.machine.send("address_awaited")

    def _join(self, link: Link, message: llc.AddLink) -> None:
        """Take the offer, if it can still be taken: anything may have happened since it came."""
        group = self._group
        if group.links.get(link.number) is not link or link.state == "DOWN":
            return  # nobody waits for an answer any more
        rnic = self._end_for(link, message)
        if rnic is None:
            self._reject(link, message)
        elif not self._accept(link, message, rnic):
            self._reject(link, message)
            # What came back in the way (a neighbour not yet known) passes, and a server whose link
            # was rejected may wait for an RNIC of the client's before it offers one again.
            group.seeking.not_joined()

    def _accept(self, carrier: Link, message: llc.AddLink, rnic: Rnic) -> bool:
        if not self.make(message.link_number, rnic) or self.new is None:
            return False
        new = self.new
        try:
            new.connect(_peer_of(message))
        except RnicError as error:
            LOGGER.info("%r: %s", new, error)
            self.drop()
            return False
        carrier.send_llc(
            llc.AddLink(
                reply=True,
                mac=rnic.mac,
                gid=rnic.gid,
                qp_number=new.qp.qp_num,
                link_number=new.number,
                qp_mtu=rnic.mtu,
                initial_psn=new.psn,
            ),
            self._group.setup.past_return,
        )
        if carrier.state != "DOWN":
            self._group.exchanges.begin("accepted", carrier)
        return True

    def _reject(self, link: Link, message: llc.AddLink) -> None:
        reason = llc.AddLinkReason.NO_ALTERNATE_PATH
        if _mtu_reserved(message):
            reason = llc.AddLinkReason.INVALID_MTU
        link.send_llc(
            llc.AddLink(
                reply=True, rejected=True, reason=reason, mac=link.rnic.mac,
                gid=link.rnic.gid, link_number=message.link_number,
            )
        )  # fmt: skip
        if link.state == "DOWN":
            return
        self._group.setup.past_return()
        if self._group.exchanges.state in ("ADD_LINK", "IDLE", "CHANGE_RKEYS"):
            self._group.exchanges.machine.send("refused")

    def _on_reply(self, carrier: Link, message: llc.AddLink) -> None:
        group, new = self._group, self.new
        self._address.cancel()
        group.setup.past_return()
        if message.rejected:
            group.seeking.rejected()
            group.exchanges.machine.send("refused")
        elif new is None or not self._fits(new, message):
            group.exchanges.machine.send("withdraw")
        else:
            self._find(new.rnic, message, lambda: self._connect(carrier, message))

    def _fits(self, new: Link, message: llc.AddLink) -> bool:
        """Whether the client's end is one for the new link."""
        peer = PeerPort(message.gid, message.mac)
        return (
            new.state != "DOWN"
            and 1 <= message.qp_mtu <= 5
            and not violates_rules(self._group.links, new.rnic, peer)
        )

    def _connect(self, carrier: Link, message: llc.AddLink) -> None:
        """Connect the server's end, if it can still be used."""
        new, exchanges = self.new, self._group.exchanges
        if new is None or carrier.state == "DOWN" or not self._fits(new, message):
            exchanges.machine.send("withdraw")
            return
        try:
            new.connect(_peer_of(message))
        except RnicError as error:
            LOGGER.info("%r: %s", new, error)
            exchanges.machine.send("withdraw")
            return
        exchanges.begin("accepted", carrier)
        self.telling.start(carrier, new)

    # --- CONFIRM LINK ----------------------------------------------------------------------------

    def rkeys_told(self, new: Link) -> None:
        """Both sides know each other's RMBs on the new link; does it work?"""
        self._group.exchanges.machine.send("rkeys_told")
        if new.state == "DOWN":
            self._group.exchanges.machine.send("new_link_lost")
        elif not self._group.client:
            new.send_llc(self._group.setup.confirm_link(new, reply=False))

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        """CONFIRM LINK on the new link, or its reply; it is active then.

        Raises ProtocolError when it cannot come now or names other ends (C.7.1).
        """
        group = self._group
        if group.exchanges.state != "ADD_LINK_CONFIRM":
            raise ProtocolError("CONFIRM LINK out of turn")
        group.setup.check_confirm_link_untrusted(link, message)
        if message.link_number != link.number:
            raise ProtocolError("CONFIRM LINK for another link")
        link.peer_user_id = message.link_user_id
        group.setup.past_return()
        if group.client:
            try:
                link.ready_to_send()
            except RnicError as error:
                LOGGER.info("%r: %s", link, error)
                link.machine.send("failed")
                return
            link.send_llc(group.setup.confirm_link(link, reply=True))
            if link.state != "CONFIRMING":
                return
        self.new = None
        link.machine.send("confirmed")
        group.exchanges.done()
        group.link_ready(link)
        group.seeking.added()

    def close(self) -> None:
        """The group is gone."""
        self._address.cancel()
        self.new = None


def _mtu_reserved(message: llc.AddLink) -> bool:
    """Whether a queue pair is named with an MTU that is none (A.3.2)."""
    return message.qp_number != 0 and not 1 <= message.qp_mtu <= 5


def _peer_of(message: llc.AddLink) -> PeerQueuePair:
    return PeerQueuePair(
        gid=message.gid,
        mac=message.mac,
        qp_number=message.qp_number,
        mtu=message.qp_mtu,
        psn=message.initial_psn,
    )
