"""What the parts of a link group know of it and of each other, as protocols.

No part knows the group itself, nor a part that is built on it: what it wants of them is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trio_smc.rendezvous.links.link import LinkConnection, LinkMover, LinkOwner
from trio_smc.rendezvous.links.peer_rmbs import ElementUser

if TYPE_CHECKING:
    from trio_smc._base.timers import Timers
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.link_set import Links
    from trio_smc.rendezvous.links.own_rmbs import OwnRmbs
    from trio_smc.rendezvous.links.peer_rmbs import PeerRmbs
    from trio_smc.rendezvous.terms import Terms
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.states.engine import Machine

__all__ = [
    "Exchange",
    "Group",
    "GroupConnection",
    "GroupData",
    "Mover",
]


class GroupConnection(LinkConnection, ElementUser, Protocol):
    """A connection as its link group sees it."""

    def links_lost(self) -> None:
        """No link is left, or the group was terminated."""


class Exchange(Protocol):
    """The LLC exchange under way, of which there is one at a time (3.5.5.3)."""

    carrier: Link | None
    """The link that the ADD LINK or DELETE LINK exchange under way travels on."""

    @property
    def state(self) -> str:
        """Which one it is (`trio_smc.states.llc_exchange`)."""

    def send(self, event: str) -> None:
        """Something happened to it."""

    def begin(self, event: str, link: Link) -> None:
        """Begin an exchange on ``link``, by the event that the chart calls it."""

    def done(self) -> None:
        """It is complete."""

    def queued(self) -> None:
        """Something waits: start it, if nothing is under way."""

    def adds(self, number: int) -> bool:
        """Whether link ``number`` is being confirmed as a new one."""


class GroupData(Protocol):
    """A link group, for the parts that need no more than to know it."""

    client: bool
    config: Config
    timers: Timers
    links: Links
    own_rmbs: OwnRmbs
    peer_rmbs: PeerRmbs
    terms: Terms

    @property
    def mover(self) -> Mover:
        """Who moves connections between links."""

    @property
    def machine(self) -> Machine:
        """Takes the events of `trio_smc.states.link_group`."""

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""

    @property
    def forming(self) -> bool:
        """Whether this is the first contact."""

    @property
    def reply_timeout(self) -> float:
        """Seconds that we wait for an LLC message."""


class Group(GroupData, LinkOwner, Protocol):
    """A link group, for the parts by which links come and go."""

    def usable_rnics(self) -> list[Rnic]:
        """This side's RNICs that links may use."""

    def rnic_unavailable(self, rnic: Rnic) -> None:
        """Its links go in order."""

    def forget_link(self, link: Link) -> None:
        """Free what the link had."""

    def link_ready(self, link: Link) -> None:
        """A further link was confirmed."""

    def remove_link(self, number: int) -> None:
        """Both sides agree that the link goes."""

    def delete_all(self, reason: int) -> None:
        """Comply with the peer's DELETE LINK for the whole group."""


class Mover(LinkMover, Protocol):
    """Moves the connections of one link group between its links (RFC 7609, 2.3, 4.6).

    Who sends on which link is in `Link.users`; `GroupConnections.move` changes it.
    """

    def link_lost(self, link: Link) -> None:
        """The link is failing: move its connections now.

        Called before the queue pair is closed.  Without another usable link nothing is done:
        the group ends its connections then.
        """

    def link_leaving(self, link: Link, done: Callable[[], None]) -> None:
        """The link goes in order: move its connections off while it still works.

        ``done()`` is called once nothing of them is in flight there, at once if nothing is.
        """

    def link_ready(self, link: Link) -> None:
        """A link became ACTIVE: connections may be spread anew."""

    def link_stays(self, link: Link) -> None:
        """The link, which was to go in order, stays: `link_leaving`'s ``done`` is not called."""

    def catch_up(self) -> None:
        """Take what has arrived on all links: the peer knows of it already."""

    def close(self) -> None:
        """The group is gone."""
