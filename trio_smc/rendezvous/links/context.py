"""What the parts of a link group share: the group's data and services, and whose turn it is.

No part knows the group itself, nor a part that is built on it: what it wants of them is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trio_smc.rendezvous.links.link import LinkConnection, LinkMover, LinkOwner
from trio_smc.rendezvous.links.peer_rmbs import ElementUser

if TYPE_CHECKING:
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.link_set import Links
    from trio_smc.rendezvous.links.peer_rmbs import PeerRmbs
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "Group",
    "GroupConnection",
    "Mover",
    "Turns",
    "Wishes",
]


class GroupConnection(LinkConnection, ElementUser, Protocol):
    """A connection as its link group sees it."""

    def links_lost(self) -> None:
        """No link is left, or the group was terminated."""


class Turns(Protocol):
    """Exchanges, one at a time (3.5.5.3), as who takes part in one sees them."""

    carrier: Link | None
    """The link that the ADD LINK or DELETE LINK exchange under way travels on."""

    @property
    def state(self) -> str:
        """The exchange under way (`trio_smc.states.llc_exchange`)."""

    def send(self, event: str) -> None:
        """Something happened to it."""

    def begin(self, event: str, link: Link) -> None:
        """Begin an exchange on ``link``, by the event that the chart calls it."""

    def done(self) -> None:
        """It is complete."""

    def look(self) -> None:
        """Something waits: start it, if nothing is under way."""

    def adds(self, number: int) -> bool:
        """Whether link ``number`` is being confirmed as a new one."""


class Wishes(Protocol):
    """When one more link is wanted, for who takes links away."""

    def seek(self, *, news: bool = True) -> None:
        """Add a link now, or when the exchange under way is over."""

    def hold(self) -> None:
        """Add none before something has changed."""

    def retry_failed(self) -> None:
        """Try again later what failed (C.7.1)."""

    def replace(self, link: Link) -> None:
        """Add a link in the place of the only one."""


class Group(LinkOwner, Protocol):
    """The group's data and services, for its parts."""

    links: Links
    peer_rmbs: PeerRmbs

    @property
    def mover(self) -> Mover:
        """Who moves connections between links."""

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""

    @property
    def usable(self) -> bool:
        """Whether connections may use the group."""

    @property
    def forming(self) -> bool:
        """Whether this is the first contact."""

    @property
    def reply_timeout(self) -> float:
        """Seconds that we wait for an LLC message."""

    def usable_links(self) -> list[Link]:
        """Links that may carry more connections."""

    def any_active_link(self, but: Link | None = None) -> Link | None:
        """A usable link, and not ``but``: the oldest."""

    def usable_rnics(self) -> list[Rnic]:
        """This side's RNICs that links may use."""

    def rnic_unavailable(self, rnic: Rnic) -> None:
        """Its links go in order."""

    def register_link(self, link: Link) -> None:
        """Register all RMBs of this side on a new link.  Raises RnicError."""

    def forget_link(self, link: Link) -> None:
        """Free what the link had."""

    def link_ready(self, link: Link) -> None:
        """A further link was confirmed."""

    def remove_link(self, number: int) -> None:
        """Both sides agree that the link goes."""

    def delete_link(self, number: int, *, orderly: bool = True, reason: int = 0) -> None:
        """Delete one link; a client asks its server to."""

    def formed(self) -> None:
        """Data may flow."""

    def lost(self) -> None:
        """No link is left that works."""

    def deleted(self) -> None:
        """The peer wants the whole group deleted."""


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
