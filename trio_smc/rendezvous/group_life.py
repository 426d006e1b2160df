"""What happens when a link group is formed, changes its kind, is idle, and ends.

GroupLife is the model of `states.link_group`: its guards and actions (RFC 7609, 2.2.2, 3.5.1.6,
3.5.4, 4.8.3, C.7.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous import llc
from trio_smc.rendezvous.links import Kind
from trio_smc.states.engine import Machine
from trio_smc.states.link_group import LINK_GROUP, USABLE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["GroupLife"]

_CLIENT_IDLE_EXTRA: Final = 10.0
"""The server ends idle groups (3.5.4); a client does so only when its server did not."""


class GroupLife:
    """The life of one link group.

    Attributes:
      reason: what DELETE LINK for the whole group will say.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.machine = Machine(LINK_GROUP, self)
        self.reason = llc.DeleteLinkReason.PROGRAM
        self._timer: Timer | None = None
        self._termination_link: Link | None = None
        self._settled: list[Callable[[], None]] = []

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the group is formed or gone."""
        self._settled.append(callback)

    # --- guards ------------------------------------------------------------------------------

    @property
    def client(self) -> bool:
        """Our role."""
        return self._group.client

    @property
    def is_single(self) -> bool:
        """No redundancy."""
        return self._group.links.kind is Kind.SINGLE

    @property
    def is_asymmetric(self) -> bool:
        """Two links that share an RNIC."""
        return self._group.links.kind is Kind.ASYMMETRIC

    @property
    def is_symmetric(self) -> bool:
        """Links that share no RNIC."""
        return self._group.links.kind is Kind.SYMMETRIC

    @property
    def has_spare_link(self) -> bool:
        """Whether DELETE LINK could be sent over another link than it was."""
        link = self._group.links.for_llc(avoid=self._termination_link)
        return link is not None and link is not self._termination_link

    # --- actions: links come and go ------------------------------------------------------------

    def tell_formed(self) -> None:
        """Data may flow."""
        contact, self._group.first_contact = self._group.first_contact, None
        if contact is not None:
            contact.group_formed()

    def seek_links(self) -> None:
        """The server adds links up to the maximum; the client only when it has news."""
        if not self._group.client:
            self._group.seeking.seek(news=False)

    def delete_asymmetric_link(self) -> None:
        """There are better ones now."""
        group = self._group
        if not group.client:
            for link in group.links.asymmetric():
                group.delete_link(link.number, reason=llc.DeleteLinkReason.ASYMMETRIC_NOT_NEEDED)

    # --- actions: idle groups ------------------------------------------------------------------

    def start_idle_timer(self) -> None:
        """Keep a group without connections for a while (3.5.4)."""
        self.stop_timer()
        if not self._group.connections:
            extra = _CLIENT_IDLE_EXTRA if self._group.client else 0.0
            self._call_later(self._group.config.link_group_idle + extra, self._idle_too_long)

    def _idle_too_long(self) -> None:
        if self._group.own_rmbs.busy:
            # A connection is just coming, or not: the peer's reply decides, or its time.
            self._call_later(self._group.config.llc_timeout, self._idle_too_long)
        else:
            self._group.terminate()

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self._group.timers.call_later(seconds, callback)

    def stop_timer(self) -> None:
        """The group is in use, or over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- actions: the end ----------------------------------------------------------------------

    def leave_turn(self) -> None:
        """See `LinkSetup.leave_turn`."""
        self._group.setup.leave_turn()

    def tell_failed(self) -> None:
        """The negotiation decides between Decline and reset."""
        group = self._group
        contact, group.first_contact = group.first_contact, None
        if contact is not None:
            contact.group_failed(group.setup.failure, group.setup.error)

    def end_connections(self) -> None:
        """4.8.3: no link is left for them."""
        for connection in list(self._group.connections.values()):
            connection.links_lost()

    def send_delete_all(self) -> None:
        """DELETE LINK for the whole group; the server's needs no answer (3.5.4)."""
        self._termination_link = link = self._group.links.for_llc()
        if link is not None:
            message = llc.DeleteLink(all_links=True, orderly=True, reason=self.reason)
            link.send_llc(message, None if self._group.client else self._delete_sent)

    def _delete_sent(self) -> None:
        self.machine.send("delete_sent")

    def start_termination_timer(self) -> None:
        """Do not wait for ever for a peer that is gone."""
        self.stop_timer()
        self._call_later(self._group.config.llc_timeout, self._termination_timed_out)

    def _termination_timed_out(self) -> None:
        self.machine.send("termination_timeout")

    def fail_termination_link(self) -> None:
        """The link that DELETE LINK was sent over is not usable either."""
        if self._termination_link is not None:
            self._termination_link.machine.send("failed")

    def free_resources(self) -> None:
        """Queue pairs, registrations and memory."""
        group = self._group
        self.stop_timer()
        group.deletion.close()
        group.adding.close()
        group.seeking.close()
        group.idle_links.close()
        group.own_rmbs.close_regions()
        for link in group.links.values():
            link.close()
        # Who is told now finds a group that cannot be used any more.
        group.exchanges.end()
        self.end_connections()
        group.mover.close()
        group.own_rmbs.close()

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers, whoever waited, and at the end the stack."""
        group = self._group
        if group.host.observer is not None:
            group.host.observer.state(group, old, new, event)
        if new in USABLE or new == "GONE":
            settled, self._settled = self._settled, []
            for callback in settled:
                callback()
        if new == "GONE":
            group.host.group_gone(group)
        elif old == "FORMING":
            group.exchanges.look()
