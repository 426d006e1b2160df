"""What a link group wants of others: its stack, its connections, and who moves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trio_smc.rendezvous.link import LinkConnection
from trio_smc.rendezvous.rtokens import ElementUser

if TYPE_CHECKING:
    from trio_smc._base.observer import Observer
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.link_judged import JudgedLink
    from trio_smc.rnic.verbs import QueuePair, Rnic

__all__ = ["GroupConnection", "GroupHost", "Mover"]


class GroupConnection(LinkConnection, ElementUser, Protocol):
    """A connection as its link group sees it."""

    def links_lost(self) -> None:
        """No link is left, or the group was terminated."""


class GroupHost(Protocol):
    """What a link group wants of the stack it belongs to."""

    observer: Observer | None

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Send a queue pair's completions to ``link.on_completion``."""

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Stop doing so."""

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs that may carry links now beside one on ``rnic``, the preferred one first.

        All are of its kind and on its network (RFC 7609, 2.2, 5.1); it is one of them itself
        unless it cannot be used now.
        """

    def new_mover(self, group: LinkGroup) -> Mover:
        """Who moves the connections of ``group`` between its links."""

    def group_gone(self, group: LinkGroup) -> None:
        """The group has freed everything."""

    def count_unknown_token(self) -> None:
        """A CDC message named no connection; it was dropped."""


class Mover(Protocol):
    """Moves the connections of one link group between its links (RFC 7609, 2.3, 4.6).

    Who sends on which link is in `Link.users`; `LinkGroup.place` changes it.
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

    def link_ends(self, link: Link) -> None:
        """Take what the link still brought; its queue pair is closed next."""

    def link_stays(self, link: Link) -> None:
        """The link, which was to go in order, stays: `link_leaving`'s ``done`` is not called."""

    def catch_up(self) -> None:
        """Take what has arrived on all links: the peer knows of it already."""

    def judge(self, link: JudgedLink) -> None:
        """A failover validation message on ``link`` misses what other links may have brought."""

    def close(self) -> None:
        """The group is gone."""
