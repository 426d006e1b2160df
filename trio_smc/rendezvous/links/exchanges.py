"""LLC exchanges of one link group, one configuration change at a time (RFC 7609, 3.5.5.3).

Theory of operation
-------------------
`states.llc_exchange` declares which exchange may run when; `Exchanges` is the model of that
machine. The parts do the work: `first_contact` brings up the first link, `add_link` further links,
`delete_link` deletes links, `rkeys` exchanges RKeys. They send the machine's events
(`context.Exchange`), and its actions are their methods. Requests that cannot start yet wait in
bounded queues. After an exchange the next one is chosen: deletions first, because nothing works on
a lost link, then new links, then RKeys.

An exchange that fails is not repeated on another link (2.3), except an exchange of RKeys. TEST LINK
and DELETE LINK for the whole group are processed at once, and are no exchanges in this sense.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.links.add_link import LinkAdding
from trio_smc.rendezvous.links.delete_link import LinkDeletion
from trio_smc.rendezvous.links.first_contact import LinkSetup
from trio_smc.rendezvous.links.link_demand import LinkDemand
from trio_smc.rendezvous.links.rkeys import RkeyExchanges, fail_unanswered
from trio_smc.states.engine import Machine
from trio_smc.states.tables import LLC_EXCHANGE
from trio_smc.wire import llc

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer
    from trio_smc.rendezvous.links.context import Group
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.rkeys import Rkeys

__all__ = ["Exchanges"]


LOGGER = logging.getLogger("trio_smc.link_group")


class Exchanges:
    """Runs the exchanges of one link group in turn; the model of `states.llc_exchange`.

    Attributes:
      carrier: the link that carries the ADD LINK or DELETE LINK exchange under way.
      setup: brings up the first link.
      demand, adding: decide when further links are added, and add them.
      deletion: deletes links.
      rkey_exchanges: exchanges RKeys.
    """

    def __init__(self, group: Group, rkeys: Rkeys) -> None:
        self._group = group
        self.machine: Machine = Machine(LLC_EXCHANGE, self)
        self.carrier: Link | None = None
        self._timer: Timer | None = None
        self._chosen = False  # the next exchange is chosen, but its event is not processed yet
        self.setup: LinkSetup = LinkSetup(group, self, rkeys)
        self.demand: LinkDemand = LinkDemand(group, self)
        self.deletion: LinkDeletion = LinkDeletion(group, self, self.demand)
        self.adding: LinkAdding = LinkAdding(
            group, self, self.setup, rkeys, self.demand, self.deletion
        )
        self.rkey_exchanges: RkeyExchanges = RkeyExchanges(group, self, rkeys)

    @property
    def state(self) -> str:
        """The exchange under way (`trio_smc.states.llc_exchange`)."""
        return self.machine.state

    # --- for the parts: `context.Exchange` --------------------------------------------------

    def send(self, event: str) -> None:
        """Send an event to the machine."""
        self.machine.send(event)

    def is_adding(self, number: int) -> bool:
        """True if ``number`` is the new link that is being confirmed."""
        return self.machine.state == "ADD_LINK_CONFIRM" and number == self.adding.number

    def begin(self, event: str, link: Link) -> None:
        """Begin an exchange on ``link`` with an event of `trio_smc.states.llc_exchange`."""
        self.carrier = link
        self.machine.send(event)

    def done(self) -> None:
        """The exchange under way is complete."""
        self.machine.send("done")

    def start_queued(self) -> None:
        """Start a waiting exchange, if none is under way."""
        self.machine.send("queued")

    def link_lost(self, link: Link) -> None:
        """``link`` has failed, and with it the exchanges that it carried."""
        begun = self.machine.state == "CHANGE_RKEYS" or self._chosen
        carried_rkeys = self.rkey_exchanges.link_lost(link, begun=begun)
        if link is self.carrier or (carried_rkeys and begun):
            self.machine.send("carrier_lost")

    def end(self) -> None:
        """End all exchanges, because the group is gone."""
        self.rkey_exchanges.fail_queued()  # at once: the event may have to wait for another one
        self.machine.send("end")

    # --- messages of the peer ----------------------------------------------------------------

    def dispatch_untrusted(self, link: Link, data: bytes) -> None:
        """Dispatch one LLC message of the peer (A.3, C.7.1).

        Raises:
          ProtocolError: the message violates the rules, so the link fails (C.7.1).
        """
        message = self._group.terms.framing.decode_untrusted(data)
        if link.state == "CONFIRMING" and not _may_come_first(message):
            raise ProtocolError(f"{type(message).__name__} before CONFIRM LINK")
        if _is_obsolete(self._group, link, message) or (
            self.deletion.requests.has_request_for(link) and _is_request(message)
        ):
            LOGGER.debug("%r: %s is ignored", link, type(message).__name__)
            return
        match message:
            case llc.ConfirmLink():
                self._on_confirm_link_untrusted(link, message)
            case llc.TestLink(reply=True):
                link.on_test_reply_untrusted(message)
            case llc.TestLink():
                link.on_test_request(message)
            case llc.AddLink() | llc.RequestAddLink():
                self.adding.on_message_untrusted(link, message)
            case llc.AddLinkContinuation():
                self.adding.continuations.on_continuation_untrusted(link, message)
            case llc.DeleteLink():
                self.deletion.on_delete_link_untrusted(link, message)
            case llc.ConfirmRkey() | llc.ConfirmRkeyContinuation() | llc.DeleteRkey():
                if message.reply:
                    self.rkey_exchanges.on_reply_untrusted(link, message)
                else:
                    self.rkey_exchanges.on_request_untrusted(link, message)
            case llc.OptionalMessage():
                pass  # A.3: silently discarded

    def _on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        if link is self.adding.new:
            self.adding.on_confirm_link_untrusted(link, message)
        elif self.setup.on_confirm_link_untrusted(link, message):
            if self.setup.max_links > 1:
                self.adding.start_second(link)
            else:
                self.setup.commit_to_smc()
                self.adding.end_first_contact()

    # --- actions of states.llc_exchange; others are actions of the parts ---------------------

    def start_next(self) -> None:
        """Begin the waiting exchange that comes first: a deletion, a new link, or RKeys."""
        if self._chosen:
            return
        self.carrier = None
        self.rkey_exchanges.answer_deferred()
        group = self._group
        if group.forming or group.links.for_llc() is None:
            return
        if self.deletion.start() or self.adding.start() or self.rkey_exchanges.start():
            self._chosen = True

    def start_reply_timer(self) -> None:
        """Limit the wait for the next message of the exchange by `Group.reply_timeout`."""
        self.stop_reply_timer()
        self._timer = self._group.timers.call_later(
            self._group.reply_timeout, lambda: self.send("timeout")
        )

    def stop_reply_timer(self) -> None:
        """The message has come, or is no longer needed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fail_carrier(self) -> None:
        """Fail the link that carried a message without an answer (C.7.1)."""
        fail_unanswered(self.carrier, self.machine.state)

    # --- guards --------------------------------------------------------------------------------

    @property
    def client(self) -> bool:
        """True if this side is the client."""
        return self._group.client

    @property
    def forming(self) -> bool:
        """True during the first contact."""
        return self._group.forming

    @property
    def only_carrier(self) -> bool:
        """True if the only usable link carries the deletion of a lost link.

        Linux replies when all its sends over the lost link have failed, which may take long.
        Meanwhile TEST LINK shows whether the carrier works.
        """
        return (
            not self.forming
            and self.deletion.link_is_lost
            and self._group.links.usable() == [self.carrier]
        )

    @property
    def peer_lives(self) -> bool:
        """True if the peer's process exists, even if it does not run now."""
        return self.carrier is not None and self.carrier.peer_lives

    @property
    def rkeys_peer_lives(self) -> bool:
        """As `peer_lives`, for the exchange of RKeys."""
        return self.rkey_exchanges.peer_lives

    @property
    def peer_adds_links(self) -> bool:
        """True if the peer has ever answered ADD LINK; old kernels never do."""
        return self.adding.peer_answers

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Notify observers."""
        if old == "IDLE":
            self._chosen = False
        observer = self._group.host.observer
        if observer is not None:
            observer.state(self, old, new, event)


def _may_come_first(message: llc.Message) -> bool:
    """True if a message may arrive before its link is confirmed (3.5.1.5, 3.5.5.3.1, A.3)."""
    return isinstance(message, (llc.ConfirmLink, llc.OptionalMessage)) or _ends_group(message)


def _is_obsolete(group: Group, link: Link, message: llc.Message) -> bool:
    """True if a message is to be ignored (C.7.1).

    Such a message arrived on a failing link, on which no exchange is possible, or is an ADD LINK
    over a link that is about to be deleted.
    """
    if group.state == "GONE" or (link.failing and not _ends_group(message)):
        return True
    return group.client and link.state == "LEAVING" and isinstance(message, llc.AddLink)


def _is_request(message: llc.Message) -> bool:
    """True if a server's message is a request to the group (C.7.1).

    DELETE LINK does not count as one, so it is never ignored: it may report that the other link has
    failed.
    """
    no_requests = llc.ConfirmLink | llc.TestLink | llc.OptionalMessage | llc.DeleteLink
    return not (isinstance(message, no_requests) or message.reply)


def _ends_group(message: llc.Message) -> bool:
    return isinstance(message, llc.DeleteLink) and message.all_links and not message.reply
