"""Adding links to a group: ADD LINK, ADD LINK CONTINUATION, CONFIRM LINK on the new link
(RFC 7609, 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, 3.5.5.2.3, C.8).

Theory of operation
-------------------
ADD LINK and its reply name the two queue pairs. Then the two sides exchange CONTINUATIONs, the
server first, until both have sent all their RTokens. Each CONTINUATION has up to two RTokens and
the number of RTokens that are left. CONFIRM LINK then shows that the link works. CONFIRM LINK
travels on the new link, and all other messages on an existing link, the carrier. In version 2 ADD
LINK and its reply contain the RTokens, and there are no CONTINUATIONs.

Before a side connects its queue pair, its RNIC must know the address of the other end. If the RNIC
does not know it, the side waits by a timer (`AddressWait`) and then checks all conditions again.

`link_demand` decides when a link is added, and `link_set` on which RNICs. `states.llc_exchange`
has the states of the exchange, and its failures. At first contact no data may flow before the
second link is confirmed or given up (`end_first_contact`).
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
    """Adds further links to one group, one at a time.

    Attributes:
      new: the link that is being added.
      number: the number of `new`, which is kept after the link was given up.
      peer_answers: True if the peer has answered an ADD LINK at any time; always true for a client.
      continuations: the exchange of RTokens for the new link.
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

    # --- the decision to add a link --------------------------------------------------------------

    def start(self) -> bool:
        """Begin ADD LINK if a link is wanted and possible; True if the exchange has begun."""
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
        if carrier is None or rnic is None:
            self._answer_request()
            if self._setup.max_links > 1:
                demand.retry_later()
            return False
        if not self._make(group.links.next_number(), rnic):
            # The lack may be temporary, and a client notifies its server of an RNIC only once: try
            # again even if the group has redundancy, for a link on one more RNIC was possible.
            self._answer_request()
            demand.retry_failed()
            return False
        self._offer(carrier, rnic)
        self._exchange.begin("add_link", carrier)
        return True

    def start_second(self, carrier: Link) -> None:
        """At first contact, exchange ADD LINK now, even if there is a single RNIC (3.5.1.6)."""
        group = self._group
        self._exchange.begin("add_link", carrier)
        if group.client:
            return
        rnics = [carrier.rnic, *group.usable_rnics()]
        rnic = server_rnic(group.links, rnics, self._setup.max_links, news=True) or carrier.rnic
        # If this fails, ADD LINK names no queue pair: the client waits for it in any case.
        self._make(group.links.next_number(), rnic)
        self._offer(carrier, rnic)

    def _answer_request(self) -> None:
        """Version 2: reply to a client's request that no link is added."""
        link, self._request_link = self._request_link, None
        if link is not None:
            link.send_llc(llc.RequestAddLink(reply=True))

    def on_message_untrusted(self, link: Link, message: llc.AddLink | llc.RequestAddLink) -> None:
        """Process ADD LINK or REQUEST ADD LINK, or the reply.

        Raises ProtocolError if the message is unexpected.
        """
        if isinstance(message, llc.AddLink):
            self._on_add_link_untrusted(link, message)
        else:
            self._on_request_untrusted(link, message)

    def _on_request_untrusted(self, link: Link, message: llc.RequestAddLink) -> None:
        """Process REQUEST ADD LINK, or the reply that no link is added.

        Raises ProtocolError if the peer's role never sends such a message.
        """
        if message.reply is not self._group.client:
            raise ProtocolError("REQUEST ADD LINK from the wrong side")
        if not message.reply:
            # If an ADD LINK is under way, it is the answer.
            self._request_link = link if self._exchange.state != "ADD_LINK" else None
            self._exchange.send("peer_notice")

    def _send_notice(self) -> None:
        """Send the client's ADD LINK: the client has an RNIC for one more link (3.5.5.1.2).

        In version 2 this is REQUEST ADD LINK, with the GIDs of the RNICs.
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
            # The RNIC that has returned may have a link that is still being deleted.
            self._demand.wanted = True

    # --- the new link --------------------------------------------------------------------------

    def _make(self, number: int, rnic: Rnic) -> bool:
        """Create this side's end of the new link on ``rnic``; True if that worked."""
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
        """Free the new link, which has carried no data."""
        self._address.cancel()
        link, self.new = self.new, None
        if link is not None:
            self._dropped.add(link.number)
            self._group.free_link(link)

    def give_up(self) -> None:
        """Note that the client did not answer; its reply may still come."""
        self._given_up.add(self.number)

    def withdraw(self) -> None:
        """Delete the link that could not be added, by the server's DELETE LINK (3.5.1.6.2)."""
        self._deletion.withdraw(self.number)

    def request_withdrawal(self) -> None:
        """Request the deletion of that link from the server, by the client's DELETE LINK."""
        self._deletion.requests.request(self.number, llc.DeleteLinkReason.LOST_PATH)

    def new_link_failed(self, link: Link) -> bool:
        """``link`` has failed: give it up if it is being added; True if it is."""
        if link is not self.new:
            return False
        self._exchange.send("new_link_lost")
        return True

    def end_first_contact(self) -> None:
        """End a first contact that is under way: data may flow now, with or without a new link."""
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
        """The RTokens on the new link, which version 2 sends at once."""
        terms = self._group.terms
        if terms.version == 1:
            return None
        return llc.AddLinkExtension(
            direct=terms.direct, target_gid=new.rnic.gid,
            pairs=tuple(self._rkeys.pairs_for(carrier, new)),
        )  # fmt: skip

    def _learn_untrusted(self, carrier: Link, new: Link, message: llc.AddLink) -> None:
        """Note the peer's RTokens on the new link, which version 2 sends at once.

        Raises:
          ProtocolError: the RTokens contradict known ones, or one is missing.
        """
        if self._group.terms.version > 1:
            if message.extension is None:
                raise ProtocolError("ADD LINK without RTokens")
            self._rkeys.learn_pairs_untrusted(carrier, new, message.extension.pairs)
            if not self._rkeys.covers(new):
                raise ProtocolError("no RToken for an RMB in use")

    def _exchange_rtokens(self, carrier: Link, new: Link) -> None:
        """Exchange RTokens, now that both ends of the new link are named."""
        self._exchange.begin("accepted", carrier)
        if self._group.terms.version > 1:
            self.rkeys_exchanged(new)
        elif not self._group.client:
            self.continuations.start(carrier, new)

    def _on_add_link_untrusted(self, link: Link, message: llc.AddLink) -> None:
        """Process ADD LINK or its reply.  Raises ProtocolError if it is unexpected."""
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
                if not message.rejected:  # the client has the link
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
        """The client rejects the new link after it has agreed to it.

        Linux does so if an error occurs after its agreement. The client then does not have the
        link, and does not answer a DELETE LINK that crossed its rejection.
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
          ProtocolError: a link of the group has the number in the message. The server reuses a
            number only after the client has replied to DELETE LINK, so the two sides have different
            links (A.3.2, C.7.1). It is no error if this client has sent that reply, and does not
            know yet that the reply has arrived.
        """
        exchange = self._exchange
        self._address.cancel()  # the server has given up its previous offer
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
        """The RNIC for the client's end of the offered link, or None."""
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
        """Call ``then`` when the RNIC knows the address of the peer's end, or after `PATIENCE`."""
        exchange = self._exchange
        if not self._address.begin(rnic, message.gid, then) and exchange.state == "ADD_LINK":
            exchange.send("address_awaited")

    def _answer_offer(self, link: Link, message: llc.AddLink) -> None:
        """Accept or reject the offer. The conditions may have changed during the wait."""
        group = self._group
        if group.links.get(link.number) is not link or link.state == "DOWN":
            return  # the server expects no answer any more
        rnic = self._client_end(link, message)
        if rnic is None:
            self._reject(link, message)
        elif not self._accept(link, message, rnic):
            self._reject(link, message)
            # The cause (such as an unknown neighbour) may be temporary, and the server may offer a
            # link again only after a notice of the client.
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
        """True if the new link may have the client's end that the message names."""
        peer = PeerPort(message.gid, message.mac)
        return (
            new.state != "DOWN"
            and 1 <= message.qp_mtu <= 5
            and not violates_rules(self._group.links, new.rnic, peer)
        )

    def _connect(self, carrier: Link, message: llc.AddLink) -> None:
        """Connect the server's end, if the new link is still possible after the wait."""
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
        """Confirm the new link, because both sides have all RTokens."""
        self._exchange.send("rkeys_exchanged")
        if new.state == "DOWN":
            self._exchange.send("new_link_lost")
        elif not self._group.client:
            new.send_llc(self._setup.confirm_link(new, reply=False))

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        """Process CONFIRM LINK on the new link, or its reply; afterwards the link is active.

        Raises ProtocolError if the message is unexpected or names other queue pairs (C.7.1).
        """
        group = self._group
        if self._exchange.state != "ADD_LINK_CONFIRM":
            raise ProtocolError("unexpected CONFIRM LINK")
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
    """True if the message names a queue pair and an invalid MTU (A.3.2)."""
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
    """The exchange of RTokens for one new link at a time."""

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
        """Start again for a new link."""
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
        """Note the RTokens of the peer's RMBs on the new link.

        Raises ProtocolError if the message is unexpected, or has more RTokens than were announced.
        """
        group, exchange, new = self._group, self._exchange, self._adding.new
        if message.reply is group.client or message.link_number != self._adding.number:
            raise ProtocolError("unexpected ADD LINK CONTINUATION")
        if new is None and exchange.state == "DELETE_LINK":
            return  # the link was given up meanwhile
        if new is None or exchange.state != "ADD_LINK_CONTINUATION" or link is not exchange.carrier:
            raise ProtocolError("unexpected ADD LINK CONTINUATION")
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
        # There may be fewer, if an RMB was deleted meanwhile. `covers` checks that none is missing.
        if expected is not None and left > expected:
            raise ProtocolError(f"{left} RTokens are left instead of {expected}")
        self._peer_left = max(0, left - _PAIRS)
        self._rkeys.learn_pairs_untrusted(link, new, message.pairs)
