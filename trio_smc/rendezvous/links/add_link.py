"""Adding links to a group: ADD LINK, ADD LINK CONTINUATION, CONFIRM LINK on the new link
(RFC 7609, 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, 3.5.5.2.3, C.8).

Theory of operation
-------------------
ADD LINK and its reply name both ends; CONTINUATIONs go to and fro until both sides have told all
their RTokens, the server's first, each with up to two RTokens and the number of those that are
still to come; CONFIRM LINK then shows that the link works.  All but the last travel on an existing
link, the carrier.  In version 2 ADD LINK and its reply have the RTokens in themselves; there are
no CONTINUATIONs.

Each side looks for the other end's address before it connects its own, by a timer where nobody
has answered for it yet (`address_wait`); then all that decides is looked at anew.

When a link is wanted is told in `link_demand`, which RNICs it joins in `link_set`.  Where an
exchange stands is in `states.llc_exchange`; what happens when it fails, too.  At first contact no
data may flow before the second link is there or given up (`settle`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.links.link import AddressWait, Link, PeerPort, PeerQueuePair
from trio_smc.rendezvous.links.link_set import client_rnic, server_rnic, violates_rules
from trio_smc.rnic.verbs import RnicError
from trio_smc.wire import llc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.delete_link import LinkDeletion
    from trio_smc.rendezvous.links.first_contact import LinkSetup
    from trio_smc.rendezvous.links.link_demand import LinkDemand
    from trio_smc.rendezvous.links.rkeys import Rkeys
    from trio_smc.rnic.verbs import Rnic

__all__ = ["LinkAdding"]


LOGGER = logging.getLogger("trio_smc.link_group")


class LinkAdding:
    """How further links of one group come up, one at a time.

    Attributes:
      new: the link that is being added.
      number: its number; it stays after the link was given up.
      peer_answers: whether the peer has ever answered ADD LINK; always true of a client's server.
      continuations: what the two sides say of their RMBs on it.
    """

    def __init__(
        self, group: Group, exchange: Exchange, setup: LinkSetup, rkeys: Rkeys,
        demand: LinkDemand, deletion: LinkDeletion,
    ) -> None:  # fmt: skip
        self._group = group
        self._exchange = exchange
        self._setup = setup
        self._rkeys = rkeys
        self._demand = demand
        self._deletion = deletion
        self.new: Link | None = None
        self.number: int = -1
        self.peer_answers: bool = group.client
        self.continuations: Continuations = Continuations(group, exchange, setup, rkeys, self)
        self._address = AddressWait(group.timers)
        self._request_link: Link | None = None
        self._given_up: set[int] = set()
        self._dropped: set[int] = set()

    # --- when one is wanted ----------------------------------------------------------------------

    def start(self) -> bool:
        """Begin ADD LINK, if one is wanted and can be had."""
        group, demand = self._group, self._demand
        if not demand.wanted:
            return False
        news = demand.take_news()
        if group.client:
            self._send_notice()
            return False
        carrier = group.links.oldest()
        rnic = None
        if self._setup.max_links > 1:
            rnic = server_rnic(group.links, group.usable_rnics(), self._setup.max_links, news=news)
        if carrier is None or rnic is None or not self._make(group.links.next_number(), rnic):
            self._answer_request()
            if self._setup.max_links > 1:
                demand.retry_later()
            return False
        self._offer(carrier, rnic)
        self._exchange.begin("add_link", carrier)
        return True

    def start_second(self, carrier: Link) -> None:
        """At first contact the server's ADD LINK follows, with one RNIC too (3.5.1.6)."""
        group = self._group
        self._exchange.begin("add_link", carrier)
        if group.client:
            return
        rnics = [carrier.rnic, *group.usable_rnics()]
        rnic = server_rnic(group.links, rnics, self._setup.max_links, news=True) or carrier.rnic
        # The client waits for ADD LINK; one without a queue pair is as good as none.
        self._make(group.links.next_number(), rnic)
        self._offer(carrier, rnic)

    def _answer_request(self) -> None:
        """Version 2: tell a client that asked for a link that none is added."""
        asked, self._request_link = self._request_link, None
        if asked is not None:
            asked.send_llc(llc.RequestAddLink(reply=True))

    def on_message_untrusted(self, link: Link, message: llc.AddLink | llc.RequestAddLink) -> None:
        """ADD LINK or REQUEST ADD LINK, or the reply.

        Raises ProtocolError when it cannot come now.
        """
        if isinstance(message, llc.AddLink):
            self._on_add_link_untrusted(link, message)
        else:
            self._on_request_untrusted(link, message)

    def _on_request_untrusted(self, link: Link, message: llc.RequestAddLink) -> None:
        """REQUEST ADD LINK, or the reply that none is added.

        Raises ProtocolError when the peer's role has no such message.
        """
        if message.reply is not self._group.client:
            raise ProtocolError("REQUEST ADD LINK from the wrong side")
        if not message.reply:
            # One under way at this moment answers it.
            self._request_link = link if self._exchange.state != "ADD_LINK" else None
            self._exchange.send("peer_notice")

    def _send_notice(self) -> None:
        """The client's ADD LINK: it has an RNIC for one more link (3.5.5.1.2).

        In version 2 it is REQUEST ADD LINK, with the GIDs of all its RNICs.
        """
        group, links = self._group, self._group.links
        carrier = links.oldest()
        unused = links.unused(group.usable_rnics())
        if carrier is not None and unused and len(links.symmetric()) < self._setup.max_links:
            self._demand.notified = True
            if group.terms.version == 1:
                carrier.send_llc(llc.AddLink(mac=unused[0].mac, gid=unused[0].gid))
            else:
                gids = carrier.rnic.gid, *(rnic.gid for rnic in unused if rnic is not carrier.rnic)
                carrier.send_llc(llc.RequestAddLink(gids=gids))
        elif self._deletion.has_pending:
            # The RNIC that came back may have a link that is still to go.
            self._demand.wanted = True

    # --- the new link --------------------------------------------------------------------------

    def _make(self, number: int, rnic: Rnic) -> bool:
        """Make the new link's end on ``rnic``; whether that worked."""
        group = self._group
        self.number = number
        self._given_up.discard(number)
        self._dropped.discard(number)
        try:
            link = Link(group, number, rnic)
            try:
                self._rkeys.register_on(link)
            except RnicError:
                link.close()
                raise
        except RnicError as error:
            LOGGER.info("%r: no queue pair for another link: %s", group, error)
            return False
        self.new = group.links[number] = link
        self.continuations.begin()
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

    def withdraw(self) -> None:
        """The server's DELETE LINK for the link that could not be added (3.5.1.6.2)."""
        self._deletion.withdraw(self.number)

    def request_withdrawal(self) -> None:
        """The client's DELETE LINK for it, which the server answers with one of its own."""
        self._deletion.requests.request(self.number, llc.DeleteLinkReason.LOST_PATH)

    def new_link_failed(self, link: Link) -> bool:
        """Whether ``link``, which has failed, is the one that is being added."""
        if link is not self.new:
            return False
        self._exchange.send("new_link_lost")
        return True

    def settle(self) -> None:
        """The exchange is over: at first contact data may flow now."""
        if self._group.state == "FORMING":
            self._group.machine.send("formed")

    # --- ADD LINK ------------------------------------------------------------------------------

    def _offer(self, carrier: Link, rnic: Rnic) -> None:
        """Send the server's ADD LINK for the new link."""
        new = self.new
        self._request_link = None
        carrier.send_llc(
            llc.AddLink(
                mac=rnic.mac,
                gid=rnic.gid,
                link_number=self.number,
                qp_number=new.qp.qp_num if new is not None else 0,
                qp_mtu=rnic.mtu if new is not None else 0,
                initial_psn=new.psn if new is not None else 0,
                extension=None if new is None else self._extension(carrier, new),
            ),
            self._setup.commit_to_smc,
        )

    def _extension(self, carrier: Link, new: Link) -> llc.AddLinkExtension | None:
        """Version 2 tells the RTokens on the new link at once."""
        terms = self._group.terms
        if terms.version == 1:
            return None
        return llc.AddLinkExtension(
            direct=terms.direct, target_gid=new.rnic.gid,
            pairs=tuple(self._rkeys.pairs_for(carrier, new)),
        )  # fmt: skip

    def _learn_untrusted(self, carrier: Link, new: Link, message: llc.AddLink) -> None:
        """Take the peer's RTokens on the new link, which version 2 tells at once.

        Raises:
          ProtocolError: they contradict what is known, or are not all there.
        """
        if self._group.terms.version > 1:
            if message.extension is None:
                raise ProtocolError("ADD LINK without RTokens")
            self._rkeys.learn_pairs_untrusted(carrier, new, message.extension.pairs)
            if not self._rkeys.covers(new):
                raise ProtocolError("no RToken for an RMB in use")

    def _exchange_rtokens(self, carrier: Link, new: Link) -> None:
        """Both ends of the new link are named: its RTokens come next, or have come."""
        self._exchange.begin("accepted", carrier)
        if self._group.terms.version > 1:
            self.rkeys_exchanged(new)
        elif not self._group.client:
            self.continuations.start(carrier, new)

    def _on_add_link_untrusted(self, link: Link, message: llc.AddLink) -> None:
        """ADD LINK or its reply.  Raises ProtocolError when neither can come now."""
        exchange = self._exchange
        if self._group.client:
            if message.reply:
                raise ProtocolError("ADD LINK reply from the server")
            self._answer_untrusted(link, message)
        elif not message.reply:
            exchange.send("peer_notice")
        else:
            self.peer_answers = True
            number = message.link_number
            if number in self._given_up:
                self._given_up.discard(number)
                if not message.rejected:  # the client believes in the link
                    self._deletion.delete_link(
                        number, llc.DeleteLinkReason.LOST_PATH, orderly=False
                    )
            elif number == self.number and exchange.state == "ADD_LINK":
                self._on_reply(link, message)
            elif message.rejected:
                self._on_late_rejection_untrusted(number)
            else:
                raise ProtocolError("ADD LINK reply without a request")

    def _on_late_rejection_untrusted(self, number: int) -> None:
        """The client takes its agreement to the new link back, as Linux does when anything fails
        after it: it has no such link.  Then it does not answer the DELETE LINK that crossed this.
        """
        exchange = self._exchange
        if number in self._dropped:
            self._dropped.discard(number)
            self._deletion.on_client_has_none(number)
        elif number == self.number and exchange.state in (
            "ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM",
        ):  # fmt: skip
            exchange.send("refused")
        elif number != self.number:
            raise ProtocolError("ADD LINK reply without a request")

    def _answer_untrusted(self, link: Link, message: llc.AddLink) -> None:
        """Answer the server's ADD LINK.

        Raises:
          ProtocolError: its number is that of a link of the group.  The server frees a number when
            the client has replied to DELETE LINK, so they do not agree on their links (A.3.2,
            C.7.1).  If such a reply was sent, and its completion is yet to come, they do agree.
        """
        exchange = self._exchange
        self._address.cancel()  # the server gave up what it offered before
        self._setup.our_turn = True
        if exchange.state in ("ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM"):
            exchange.send("superseded")
        if (
            message.qp_number
            and message.link_number in self._group.links
            and not self._deletion.has_replied(message.link_number)
        ):
            raise ProtocolError(f"ADD LINK with the number of link {message.link_number}")
        rnic = self._client_end(link, message)
        if rnic is None:
            self._reject(link, message)
        else:
            self._when_reachable(rnic, message, lambda: self._answer_offer(link, message))

    def _client_end(self, link: Link, message: llc.AddLink) -> Rnic | None:
        """The client's end of the link that is offered, as things are now."""
        group = self._group
        if (
            self._exchange.state == "DELETE_LINK"
            or message.link_number in group.links
            or not message.qp_number
            or self._setup.max_links < 2
            or _mtu_reserved(message)
        ):
            return None
        rnics = group.usable_rnics()
        if group.state == "FORMING" and link.rnic not in rnics:
            rnics = [link.rnic, *rnics]
        peer = PeerPort(message.gid, message.mac)
        return client_rnic(group.links, rnics, self._setup.max_links, peer)

    def _when_reachable(self, rnic: Rnic, message: llc.AddLink, then: Callable[[], None]) -> None:
        """Go on when the RNIC knows the address of the peer's end, or will not get to know it."""
        exchange = self._exchange
        if not self._address.begin(rnic, message.gid, then) and exchange.state == "ADD_LINK":
            exchange.send("address_awaited")

    def _answer_offer(self, link: Link, message: llc.AddLink) -> None:
        """Take the offer, if it can still be taken: anything may have happened since it came."""
        group = self._group
        if group.links.get(link.number) is not link or link.state == "DOWN":
            return  # nobody waits for an answer any more
        rnic = self._client_end(link, message)
        if rnic is None:
            self._reject(link, message)
        elif not self._accept(link, message, rnic):
            self._reject(link, message)
            # What came back in the way (a neighbour not yet known) passes, and a server whose link
            # was rejected may wait for an RNIC of the client's before it offers one again.
            self._demand.on_join_failed()

    def _accept(self, carrier: Link, message: llc.AddLink, rnic: Rnic) -> bool:
        if not self._make(message.link_number, rnic) or self.new is None:
            return False
        new = self.new
        try:
            self._learn_untrusted(carrier, new, message)
            new.connect(_peer_of(message))
        except (ProtocolError, RnicError) as error:
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
                extension=self._extension(carrier, new),
            ),
            self._setup.commit_to_smc,
        )
        if carrier.state != "DOWN":
            self._exchange_rtokens(carrier, new)
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
        self._setup.commit_to_smc()
        if self._exchange.state in ("ADD_LINK", "IDLE", "CHANGE_RKEYS"):
            self._exchange.send("refused")

    def _on_reply(self, carrier: Link, message: llc.AddLink) -> None:
        new = self.new
        self._address.cancel()
        self._setup.commit_to_smc()
        if message.rejected:
            self._demand.on_rejected()
            self._exchange.send("refused")
        elif new is None or not self._fits(new, message):
            self._exchange.send("withdraw")
        else:
            self._when_reachable(new.rnic, message, lambda: self._connect(carrier, message))

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
        new, exchange = self.new, self._exchange
        if new is None or carrier.state == "DOWN" or not self._fits(new, message):
            exchange.send("withdraw")
            return
        try:
            self._learn_untrusted(carrier, new, message)
            new.connect(_peer_of(message))
        except (ProtocolError, RnicError) as error:
            LOGGER.info("%r: %s", new, error)
            exchange.send("withdraw")
            return
        self._exchange_rtokens(carrier, new)

    # --- CONFIRM LINK ----------------------------------------------------------------------------

    def rkeys_exchanged(self, new: Link) -> None:
        """Both sides know each other's RMBs on the new link; does it work?"""
        self._exchange.send("rkeys_exchanged")
        if new.state == "DOWN":
            self._exchange.send("new_link_lost")
        elif not self._group.client:
            new.send_llc(self._setup.confirm_link(new, reply=False))

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        """CONFIRM LINK on the new link, or its reply; it is active then.

        Raises ProtocolError when it cannot come now or names other ends (C.7.1).
        """
        group = self._group
        if self._exchange.state != "ADD_LINK_CONFIRM":
            raise ProtocolError("CONFIRM LINK out of turn")
        self._setup.check_confirm_link_untrusted(link, message)
        if message.link_number != link.number:
            raise ProtocolError("CONFIRM LINK for another link")
        link.peer_user_id = message.link_user_id
        self._setup.commit_to_smc()
        try:
            for rkey in group.peer_rmbs.rkeys(link.number):
                link.check_reach(rkey)
            if group.client:
                link.ready_to_send()
        except RnicError as error:
            LOGGER.info("%r: %s", link, error)
            link.machine.send("failed")
            return
        if group.client:
            link.send_llc(self._setup.confirm_link(link, reply=True))
            if link.state != "CONFIRMING":
                return
        self.new = None
        link.machine.send("confirmed")
        self._exchange.done()
        group.link_ready(link)
        self._demand.on_link_added()

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


_PAIRS: Final = 2  # RTokens in one message (A.3.3)


class Continuations:
    """The RTokens of one new link at a time: which are still to be told, and to be heard."""

    def __init__(
        self, group: Group, exchange: Exchange, setup: LinkSetup, rkeys: Rkeys,
        adding: LinkAdding,
    ) -> None:  # fmt: skip
        self._group = group
        self._exchange = exchange
        self._setup = setup
        self._rkeys = rkeys
        self._adding = adding
        self._own: list[llc.RTokenPair] = []
        self._peer_left: int | None = None

    def begin(self) -> None:
        """A link is being added: nothing was told or heard of it."""
        self._own = []
        self._peer_left = None

    def start(self, carrier: Link, new: Link) -> None:
        """Send the server's first message."""
        self._own = self._rkeys.pairs_for(carrier, new)
        self._send_next(carrier, new)

    def _send_next(self, carrier: Link, new: Link) -> None:
        pairs, left = tuple(self._own[:_PAIRS]), len(self._own)
        del self._own[:_PAIRS]
        carrier.send_llc(
            llc.AddLinkContinuation(
                reply=self._group.client, link_number=new.number, tokens_left=left, pairs=pairs
            ),
            self._setup.commit_to_smc,
        )

    def on_continuation_untrusted(self, link: Link, message: llc.AddLinkContinuation) -> None:
        """RTokens of the peer's RMBs on the new link.

        Raises ProtocolError when none can come now, or they do not fit the announced number.
        """
        group, exchange, new = self._group, self._exchange, self._adding.new
        if message.reply is group.client or message.link_number != self._adding.number:
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        if new is None and exchange.state == "DELETE_LINK":
            return  # given up meanwhile
        if new is None or exchange.state != "ADD_LINK_CONTINUATION" or link is not exchange.carrier:
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        first = self._peer_left is None
        self._learn_untrusted(link, new, message)
        if group.client:
            if first:
                self._own = self._rkeys.pairs_for(link, new)
            self._send_next(link, new)
            if link.state == "DOWN":
                return
        if self._own or self._peer_left:
            exchange.send("continued")
            if not group.client:
                self._send_next(link, new)
        elif not self._rkeys.covers(new):
            raise ProtocolError("no RToken for an RMB in use")
        else:
            self._adding.rkeys_exchanged(new)

    def _learn_untrusted(self, link: Link, new: Link, message: llc.AddLinkContinuation) -> None:
        expected, left = self._peer_left, message.tokens_left
        # Fewer: an RMB went meanwhile; whether any is missing is looked at when all are told.
        if expected is not None and left > expected:
            raise ProtocolError(f"{left} RTokens are left instead of {expected}")
        self._peer_left = max(0, left - _PAIRS)
        self._rkeys.learn_pairs_untrusted(link, new, message.pairs)
