"""LLC exchanges of one link group, one configuration change at a time (RFC 7609, 3.5.5.3).

Theory of operation
-------------------
What may run when is declared in `states.llc_exchange`; this module is that machine's model, but
for its half about RKeys, which is in `rkey_exchanges`.  Adding links is told in `link_adding`,
deleting them in `link_deletion`, RKeys in `rkeys`.  Requests that cannot start yet wait in bounded
queues.  When an exchange is over, the next one is chosen: deletions first, for nothing works on a
link that is lost, then links, then RKeys.

An exchange that fails is not repeated on another link (2.3), unless it is one of RKeys.  TEST LINK
and DELETE LINK for the whole group never come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_smc.rendezvous import llc
from trio_smc.rendezvous.rkey_exchanges import RkeyExchanges
from trio_smc.states.engine import Machine
from trio_smc.states.llc_exchange import LLC_EXCHANGE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["Exchanges"]


class Exchanges(RkeyExchanges):
    """The serializer of one link group; the model of `states.llc_exchange`.

    Attributes:
      carrier: the link that the ADD LINK or DELETE LINK exchange under way travels on.
    """

    def __init__(self, group: LinkGroup) -> None:
        super().__init__(group)
        self.machine = Machine(LLC_EXCHANGE, self)
        self.carrier: Link | None = None
        self._timer: Timer | None = None
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

    def fail_carrier(self) -> None:
        """The link over which the message was sent is not usable either (C.7.1)."""
        self._fail(self.carrier)

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

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers."""
        if old == "IDLE":
            self._chosen = False
        observer = self._group.host.observer
        if observer is not None:
            observer.state(self, old, new, event)
