"""Protocols of the link group and its `Exchanges`, for the parts of a group.

`group` and `exchanges` import the parts, so the parts cannot import them.  All other parts import
each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trio_smc.rendezvous.links.link import LinkConnection, LinkOwner
from trio_smc.rendezvous.links.peer_rmbs import ElementUser

if TYPE_CHECKING:
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rendezvous.links.link_set import Links
    from trio_smc.rendezvous.links.own_rmbs import OwnRmbs
    from trio_smc.rendezvous.links.peer_rmbs import PeerRmbs
    from trio_smc.rnic.verbs import Rnic
    from trio_smc.states.engine import Machine

__all__ = [
    "Exchange",
    "Group",
    "GroupConnection",
]


class GroupConnection(LinkConnection, ElementUser, Protocol):
    """A connection as its link group sees it."""

    def links_lost(self, *, all_received: bool = False) -> None:
        """No link is left, or the group was terminated; see `Connection.links_lost`."""


class Exchange(Protocol):
    """The LLC exchange under way, of which there is one at a time (3.5.5.3)."""

    carrier: Link | None
    """The link that carries the ADD LINK or DELETE LINK exchange under way."""

    @property
    def state(self) -> str:
        """The state (`trio_smc.states.llc_exchange`)."""

    def send(self, event: str) -> None:
        """Send an event to the exchange under way."""

    def begin(self, event: str, link: Link) -> None:
        """Begin an exchange on ``link`` with an event of `trio_smc.states.llc_exchange`."""

    def done(self) -> None:
        """The exchange under way is complete."""

    def start_queued(self) -> None:
        """Start a waiting exchange, if none is under way."""

    def is_adding(self, number: int) -> bool:
        """True if ``number`` is the new link that is being confirmed."""


class Group(LinkOwner, Protocol):
    """A link group, as seen by its parts, which `group` imports."""

    links: Links
    own_rmbs: OwnRmbs
    peer_rmbs: PeerRmbs

    @property
    def machine(self) -> Machine:
        """The state machine (`trio_smc.states.link_group`)."""

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""

    @property
    def forming(self) -> bool:
        """True during the first contact."""

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for an LLC message."""

    def usable_rnics(self) -> list[Rnic]:
        """This side's RNICs that links may use."""

    def rnic_unavailable(self, rnic: Rnic) -> None:
        """Delete the links on ``rnic`` orderly: their connections leave first."""

    def free_link(self, link: Link) -> None:
        """Free the resources of a link that has failed or was deleted."""

    def link_ready(self, link: Link) -> None:
        """A further link was confirmed."""

    def remove_link(self, number: int) -> None:
        """Remove a link, because both sides have agreed to delete it."""

    def delete_all(self, reason: int) -> None:
        """Process the peer's DELETE LINK for the whole group."""
