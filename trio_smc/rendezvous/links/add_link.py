"""Adding links to a group: ADD LINK, ADD LINK CONTINUATION, CONFIRM LINK on the new link
(RFC 7609, 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, C.8).

Theory of operation
-------------------
ADD LINK and its reply name both ends;
CONTINUATIONs go to and fro until both sides have told all their RTokens;
CONFIRM LINK then shows that the link works.  All but the last travel on an existing link, the
carrier.

Each side looks for the other end's address before it connects its own, by a timer where nobody
has answered for it yet (`address_wait`); then all that decides is looked at anew.

At first contact no data may flow before the second link is there or given up (`settle`).  Where
an exchange stands is in `states.llc_exchange`; what happens when it fails, too.

The server offers a link as soon as the first one is confirmed, and later whenever an RNIC comes
at either end, a link is lost, or C.8's timer is due; after each new link it looks whether it has
one more RNIC.  A client only tells its server of an RNIC.

Messages go to and fro on the link that the exchange uses, the server's first, each with up to
two
RTokens and the number of those that are still to come, until neither side has one left.

Waiting until an RNIC knows a peer's address, before a queue pair is connected to it.

A queue pair that is connected to an address which nobody answers for would hold up everything in
this process (`Rnic.address_known`), and a peer may name any address.  So whoever connects one
waits
by a timer first, not for long, and then goes on in any case: connecting is refused at once if
the
address is still not known.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.links.link import Link, PeerPort, PeerQueuePair
from trio_smc.rendezvous.links.link_set import (
    LinkGroupKind,
    client_rnic,
    server_rnic,
    violates_rules,
)
from trio_smc.rnic.verbs import RnicError
from trio_smc.wire import llc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc._base.timers import Timer, Timers
    from trio_smc.rendezvous.links.context import Group, Turns
    from trio_smc.rendezvous.links.delete_link import IdleLinks, LinkDeletion
    from trio_smc.rendezvous.links.first_contact import LinkSetup
    from trio_smc.rendezvous.links.rkeys import Rkeys
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "PATIENCE",
    "AddressWait",
    "LinkAdding",
    "LinkSeeking",
]


LOGGER = logging.getLogger("trio_smc.link_group")


class LinkAdding:
    """How further links of one group come up, one at a time.

    Attributes:
      new: the link that is being added.
      number: its number; it stays after the link was given up.
      answered: whether the peer has ever answered ADD LINK; always true of a client's server.
      telling: what the two sides say of their RMBs on it.
    """

    seeking: LinkSeeking

    def __init__(
        self, group: Group, turns: Turns, setup: LinkSetup, rkeys: Rkeys, deletion: LinkDeletion
    ) -> None:
        self._group = group
        self._turns = turns
        self._setup = setup
        self._deletion = deletion
        self.new: Link | None = None
        self.number = -1
        self.answered = group.client
        self.telling = LinkTelling(group, turns, setup, rkeys, self)
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
                group.register_link(link)
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
        self._turns.send("new_link_lost")
        return True

    def settle(self) -> None:
        """The exchange is over: at first contact data may flow now."""
        if self._group.state == "FORMING":
            self._group.formed()

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
            self._setup.past_return,
        )

    def on_add_link_untrusted(self, link: Link, message: llc.AddLink) -> None:
        """ADD LINK or its reply.  Raises ProtocolError when neither can come now."""
        exchanges = self._turns
        if self._group.client:
            if message.reply:
                raise ProtocolError("ADD LINK reply from the server")
            self._answer(link, message)
        elif not message.reply:
            exchanges.send("peer_notice")
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
        exchanges = self._turns
        if number in self._dropped:
            self._dropped.discard(number)
            self._deletion.client_has_none(number)
        elif number == self.number and exchanges.state in (
            "ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM",
        ):  # fmt: skip
            exchanges.send("refused")
        elif number != self.number:
            raise ProtocolError("ADD LINK reply without a request")

    def _answer(self, link: Link, message: llc.AddLink) -> None:
        exchanges = self._turns
        self._address.cancel()  # the server gave up what it offered before
        self._setup.our_turn = True
        if exchanges.state in ("ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM"):
            exchanges.send("superseded")
        rnic = self._end_for(link, message)
        if rnic is None:
            self._reject(link, message)
        else:
            self._find(rnic, message, lambda: self._join(link, message))

    def _end_for(self, link: Link, message: llc.AddLink) -> Rnic | None:
        """The client's end of the link that is offered, as things are now."""
        group = self._group
        if (
            self._turns.state == "DELETE_LINK"
            or message.link_number in group.links
            or not message.qp_number
            or _mtu_reserved(message)
        ):
            return None
        rnics = group.usable_rnics()
        if group.state == "FORMING" and link.rnic not in rnics:
            rnics = [link.rnic, *rnics]
        peer = PeerPort(message.gid, message.mac)
        return client_rnic(group.links, rnics, self._setup.max_links, peer)

    def _find(self, rnic: Rnic, message: llc.AddLink, then: Callable[[], None]) -> None:
        """Go on when the RNIC knows the address of the peer's end, or will not get to know it."""
        exchanges = self._turns
        if not self._address.begin(rnic, message.gid, then) and exchanges.state == "ADD_LINK":
            exchanges.send("address_awaited")

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
            self.seeking.not_joined()

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
            self._setup.past_return,
        )
        if carrier.state != "DOWN":
            self._turns.begin("accepted", carrier)
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
        self._setup.past_return()
        if self._turns.state in ("ADD_LINK", "IDLE", "CHANGE_RKEYS"):
            self._turns.send("refused")

    def _on_reply(self, carrier: Link, message: llc.AddLink) -> None:
        new = self.new
        self._address.cancel()
        self._setup.past_return()
        if message.rejected:
            self.seeking.rejected()
            self._turns.send("refused")
        elif new is None or not self._fits(new, message):
            self._turns.send("withdraw")
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
        new, exchanges = self.new, self._turns
        if new is None or carrier.state == "DOWN" or not self._fits(new, message):
            exchanges.send("withdraw")
            return
        try:
            new.connect(_peer_of(message))
        except RnicError as error:
            LOGGER.info("%r: %s", new, error)
            exchanges.send("withdraw")
            return
        exchanges.begin("accepted", carrier)
        self.telling.start(carrier, new)

    # --- CONFIRM LINK ----------------------------------------------------------------------------

    def rkeys_told(self, new: Link) -> None:
        """Both sides know each other's RMBs on the new link; does it work?"""
        self._turns.send("rkeys_told")
        if new.state == "DOWN":
            self._turns.send("new_link_lost")
        elif not self._group.client:
            new.send_llc(self._setup.confirm_link(new, reply=False))

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        """CONFIRM LINK on the new link, or its reply; it is active then.

        Raises ProtocolError when it cannot come now or names other ends (C.7.1).
        """
        group = self._group
        if self._turns.state != "ADD_LINK_CONFIRM":
            raise ProtocolError("CONFIRM LINK out of turn")
        self._setup.check_confirm_link_untrusted(link, message)
        if message.link_number != link.number:
            raise ProtocolError("CONFIRM LINK for another link")
        link.peer_user_id = message.link_user_id
        self._setup.past_return()
        if group.client:
            try:
                link.ready_to_send()
            except RnicError as error:
                LOGGER.info("%r: %s", link, error)
                link.machine.send("failed")
                return
            link.send_llc(self._setup.confirm_link(link, reply=True))
            if link.state != "CONFIRMING":
                return
        self.new = None
        link.machine.send("confirmed")
        self._turns.done()
        group.link_ready(link)
        self.seeking.added()

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


class LinkTelling:
    """The RTokens of one new link at a time: which are still to be told, and to be heard."""

    def __init__(
        self, group: Group, turns: Turns, setup: LinkSetup, rkeys: Rkeys, adding: LinkAdding
    ) -> None:
        self._group = group
        self._turns = turns
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
        self._tell(carrier, new)

    def _tell(self, carrier: Link, new: Link) -> None:
        pairs, left = tuple(self._own[:_PAIRS]), len(self._own)
        del self._own[:_PAIRS]
        carrier.send_llc(
            llc.AddLinkContinuation(
                reply=self._group.client, link_number=new.number, tokens_left=left, pairs=pairs
            ),
            self._setup.past_return,
        )

    def on_continuation_untrusted(self, link: Link, message: llc.AddLinkContinuation) -> None:
        """RTokens of the peer's RMBs on the new link.

        Raises ProtocolError when none can come now, or they do not fit the announced number.
        """
        group, exchanges, new = self._group, self._turns, self._adding.new
        if message.reply is group.client or message.link_number != self._adding.number:
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        if new is None and exchanges.state == "DELETE_LINK":
            return  # given up meanwhile
        if (
            new is None
            or exchanges.state != "ADD_LINK_CONTINUATION"
            or link is not exchanges.carrier
        ):
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        first = self._peer_left is None
        self._learn_untrusted(link, new, message)
        if group.client:
            if first:
                self._own = self._rkeys.pairs_for(link, new)
            self._tell(link, new)
            if link.state == "DOWN":
                return
        if self._own or self._peer_left:
            exchanges.send("continued")
            if not group.client:
                self._tell(link, new)
        elif not self._rkeys.covers(new):
            raise ProtocolError("no RToken for an RMB in use")
        else:
            self._adding.rkeys_told(new)

    def _learn_untrusted(self, link: Link, new: Link, message: llc.AddLinkContinuation) -> None:
        expected, left = self._peer_left, message.tokens_left
        # Fewer: an RMB went meanwhile; whether any is missing is looked at when all are told.
        if expected is not None and left > expected:
            raise ProtocolError(f"{left} RTokens are left instead of {expected}")
        self._peer_left = max(0, left - _PAIRS)
        self._rkeys.learn_pairs_untrusted(link, new, message.pairs)


_FIRST_RETRY: Final = 10.0
_LAST_RETRY: Final = 320.0
"""Seconds until a failed link is tried again (C.8): doubled each time.  A rejection waits the
longest at once, as the client tells when it has another RNIC (3.5.5.1.2), unless it has told so:
then what was in its way may pass."""


class LinkSeeking:
    """When one link group begins ADD LINK."""

    def __init__(
        self, group: Group, turns: Turns, setup: LinkSetup, adding: LinkAdding,
        deletion: LinkDeletion, idle_links: IdleLinks,
    ) -> None:  # fmt: skip
        self._group = group
        self._turns = turns
        self._setup = setup
        self._adding = adding
        self._deletion = deletion
        self._idle_links = idle_links
        self._delay = _FIRST_RETRY
        self._timer: Timer | None = None
        self._wanted = False
        self._news = False
        self._held = False
        self._asked = False
        self._notified = False
        self._replaced: Link | None = None

    def seek(self, *, news: bool = True) -> None:
        """Add a link, or tell the server of an RNIC, now or when the exchange under way is over.

        Args:
          news: an RNIC came, or time passed: what was rejected before may work now.
        """
        if news:
            self._held = False
        elif self._held:
            self.retry_later()
            return
        elif self._idle_links.spared and self._group.links.kind is LinkGroupKind.SYMMETRIC:
            return
        self._wanted = True
        self._news |= news
        self._turns.look()

    def asked(self) -> None:
        """The client has an RNIC for a further link (3.5.5.1.2)."""
        if not self._asked:
            self._asked = True
            self._delay = _FIRST_RETRY
            self.close()
        self.seek()

    def hold(self) -> None:
        """An operator deleted a link: do not add another one before something has changed."""
        self._held = True
        self._wanted = self._news
        self._delay = _LAST_RETRY
        self.retry_later()

    def start(self) -> bool:
        """Begin ADD LINK, if one is wanted and can be had."""
        group = self._group
        if not self._wanted:
            return False
        self._wanted = False
        news, self._news = self._news, False
        if group.client:
            self._send_notice()
            return False
        carrier = group.any_active_link()
        rnic = server_rnic(group.links, group.usable_rnics(), self._setup.max_links, news=news)
        if (
            carrier is None
            or rnic is None
            or not self._adding.make(group.links.next_number(), rnic)
        ):
            if group.links.kind is LinkGroupKind.SINGLE:
                self.retry_later()
            return False
        self._adding.offer(carrier, rnic)
        self._turns.begin("add_link", carrier)
        return True

    def offer_second(self, carrier: Link) -> None:
        """The server's ADD LINK at first contact, with one RNIC too (3.5.1.6)."""
        group = self._group
        rnics = [carrier.rnic, *group.usable_rnics()]
        rnic = server_rnic(group.links, rnics, self._setup.max_links, news=True) or carrier.rnic
        # The client waits for ADD LINK; one without a queue pair is as good as none.
        self._adding.make(group.links.next_number(), rnic)
        self._adding.offer(carrier, rnic)

    def replace(self, link: Link) -> None:
        """Add a link in the place of the only one, whose RNIC is taken out; it goes then."""
        self._replaced = link
        self.seek()

    def not_joined(self) -> None:
        """The client could not connect its end of the link that the server offers: tell of the RNIC
        later (3.5.5.1.2), soon again when the server offered by itself, as something is new there.
        """
        if not self._notified:
            self.close()
            self._delay = _FIRST_RETRY
        self._notified = False
        self.retry_failed()

    def retry_later(self) -> None:
        """C.8: when there is no redundancy; a client's timer is for its notice (C.7.1)."""
        if self._group.links.kind is LinkGroupKind.SINGLE:
            self.retry_failed()

    def retry_failed(self) -> None:
        """C.7.1: a link could not be confirmed, be there others or not."""
        if self._timer is None:
            self._timer = self._group.timers.call_later(self._delay, self._retry)
            self._delay = min(2 * self._delay, _LAST_RETRY)

    def _retry(self) -> None:
        self._timer = None
        self.seek()

    def _send_notice(self) -> None:
        """The client's ADD LINK: it has an RNIC for one more link (3.5.5.1.2)."""
        group = self._group
        links = group.links
        carrier = group.any_active_link()
        unused = links.unused(group.usable_rnics())
        if carrier is not None and unused and len(links.symmetric()) < self._setup.max_links:
            self._notified = True
            carrier.send_llc(llc.AddLink(mac=unused[0].mac, gid=unused[0].gid))
        elif self._deletion.links_to_go:
            self._wanted = True  # the RNIC that came back may have a link that is still to go

    def rejected(self) -> None:
        """The client has no RNIC for another link: the same again would be rejected again."""
        if not self._asked:
            self._delay = _LAST_RETRY
        self._wanted = self._news

    def added(self) -> None:
        """There is one more link; one whose RNIC is to be taken out can go."""
        self.close()
        self._delay = _FIRST_RETRY
        self._asked = False
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.rnic not in self._group.usable_rnics():
            self._group.rnic_unavailable(replaced.rnic)

    def close(self) -> None:
        """No retry is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


PATIENCE: Final = 1.0
"""Seconds: the kernel's own, in which it asks the network once."""
_FIRST_PAUSE: Final = 0.002
_LAST_PAUSE: Final = 0.064
"""Seconds between two looks: doubled each time."""


class AddressWait:
    """One wait at a time; a new one takes the place of the one before."""

    __slots__ = ("_timer", "_timers")

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._timer: Timer | None = None

    def begin(self, rnic: Rnic, gid: bytes, then: Callable[[], None]) -> bool:
        """Call ``then`` once: when ``rnic`` knows the address of this GID, or after `PATIENCE`.

        Returns:
          True: it was called already, as is the rule.  False: it will be called by a timer, and
            anything may have happened until then.
        """
        self.cancel()
        if rnic.address_known(gid):
            then()
            return True
        give_up = self._timers.now() + PATIENCE
        pause = _FIRST_PAUSE

        def look() -> None:
            nonlocal pause
            self._timer = None
            now = self._timers.now()
            if now >= give_up or rnic.address_known(gid):
                then()
                return
            pause = min(2 * pause, _LAST_PAUSE)
            self._timer = self._timers.call_at(min(now + pause, give_up), look)

        self._timer = self._timers.call_later(pause, look)
        return False

    def cancel(self) -> None:
        """Nobody waits any more.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
