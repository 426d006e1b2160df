"""The links of one group: the choice of a link to use, and of RNICs for a new one.

Theory of operation
-------------------
A new connection sends on the usable link with the fewest connections (`Links.least_loaded`).

Two links of a group never join the same two RNICs (the second one would be a *parallel* link). A
link that shares an RNIC with another link at one end is *asymmetric*. A group has at most one such
link, and only while it has no two links that share no RNIC (a symmetric pair). An asymmetric link
does not count towards the agreed maximum of links (RFC 7609, 2.2.2).

Both sides choose the RNICs of a new link by these rules (3.5.1.6, 3.5.5.1). The server chooses its
end first and names it in ADD LINK (`server_rnic`). The client chooses the other end, or rejects the
link if it finds none (`client_rnic`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous.terms import LINK_LIMIT

if TYPE_CHECKING:
    from trio_smc.rendezvous.links.link import Link, PeerPort
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "FIRST_LINK",
    "GONE_LINKS",
    "LinkGroupKind",
    "Links",
    "client_rnic",
    "server_rnic",
    "shares_peer_port",
    "violates_rules",
]


FIRST_LINK: Final = 1
_NUMBERS: Final = 255
"""The largest link number: one byte (RFC 7609, A.3.1)."""
GONE_LINKS: Final = 2 * LINK_LIMIT
"""Links that can still be found after their end.  Chosen: a CLC message may name a link that ended
while the message was under way."""


class LinkGroupKind(StrEnum):
    """How well a group survives the loss of an RNIC (RFC 7609, 2.2.3)."""

    SINGLE = "single"
    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"


class Links(dict[int, "Link"]):
    """The links by number, without those that have failed or were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._last_number = 0
        self._gone: deque[Link] = deque(maxlen=GONE_LINKS)

    def remove(self, link: Link) -> None:
        """Remove a link that has failed or was deleted."""
        if self.get(link.number) is link:
            del self[link.number]
            if link.peer is not None:  # without a peer no message can name the link
                self._gone.append(link)

    def reached_recently(self, gid: bytes) -> bool:
        """True if a link leads to this RNIC of the peer, or a link that has just ended did."""
        links = (*self.values(), *self._gone)
        return any(link.peer is not None and link.peer.gid == gid for link in links)

    def next_number(self) -> int:
        """The next link number. Numbers repeat only after all of 1 to 255 were used (2.2.4)."""
        for _ in range(_NUMBERS):
            self._last_number = self._last_number % _NUMBERS + 1
            if self._last_number not in self:
                return self._last_number
        raise RuntimeError("a link group with 255 links")

    def usable(self) -> list[Link]:
        """Links that may carry more connections."""
        return [link for link in self.values() if link.usable]

    def least_loaded(
        self, but: Link | None = None, among: Container[int] | None = None
    ) -> Link | None:
        """The usable link on which the fewest connections send: a new connection goes there.

        Args:
          but: a link that is not chosen.
          among: the numbers of the links to choose from; None: all.
        """
        best: Link | None = None
        for link in self.values():
            fits = link.usable and link is not but and (among is None or link.number in among)
            if fits and (best is None or link.load < best.load):
                best = link
        return best

    def oldest(self, but: Link | None = None) -> Link | None:
        """The oldest usable link that is not ``but``."""
        return next((link for link in self.values() if link.usable and link is not but), None)

    def for_llc(self, avoid: Link | None = None) -> Link | None:
        """A link that can carry LLC messages.

        ``avoid``, or a link that is being deleted, is returned only if there is no other.
        """
        return min(
            (link for link in self.values() if link.confirmed),
            key=lambda link: (link is avoid, not link.usable),
            default=None,
        )

    def find(self, gid: bytes, mac: bytes | None, qp_number: int) -> Link | None:
        """The link with this peer end (RFC 7609, 3.5.2.2, 3.5.2.3).

        Links that were just removed are found, too: SMC Accept and Confirm travel over TCP, and the
        link that they name may have ended meanwhile.

        Args:
          mac: None: any MAC address.
        """
        for links in (self.values(), self._gone):
            for link in links:
                peer = link.peer
                if (
                    peer is not None
                    and peer.qp_number == qp_number
                    and peer.gid == gid
                    and (mac is None or mac == peer.mac)
                    # When a group ends, its links are not removed from the group.
                    and (link.confirmed or link.state == "DOWN")
                ):
                    return link
        return None

    def symmetric(self) -> list[Link]:
        """Usable links no two of which share an RNIC, the oldest first."""
        found: list[Link] = []
        for link in self.usable():
            if not any(_shares_rnic(link, other) for other in found):
                found.append(link)
        return found

    def asymmetric(self) -> list[Link]:
        """The usable links that are not in `symmetric`; by the rules there is at most one."""
        symmetric = self.symmetric()
        return [link for link in self.usable() if link not in symmetric]

    @property
    def kind(self) -> LinkGroupKind:
        """The kind of a group with these links."""
        symmetric = len(self.symmetric())
        if symmetric > 1:
            return LinkGroupKind.SYMMETRIC
        return LinkGroupKind.ASYMMETRIC if self.asymmetric() else LinkGroupKind.SINGLE

    def unused(self, rnics: Iterable[Rnic]) -> list[Rnic]:
        """Those of ``rnics`` that no symmetric link uses; RNICs without any link come first."""
        symmetric = {link.rnic for link in self.symmetric()}
        used = {link.rnic for link in self.usable()}
        return sorted((rnic for rnic in rnics if rnic not in symmetric), key=used.__contains__)


def _shares_rnic(one: Link, other: Link) -> bool:
    return one.rnic is other.rnic or (
        one.peer is not None and other.peer is not None and one.peer.port == other.peer.port
    )


def server_rnic(links: Links, rnics: Sequence[Rnic], most: int, *, news: bool) -> Rnic | None:
    """The server's end of one more link; None if no link should be offered.

    Args:
      rnics: this side's usable RNICs, the preferred one first.
      most: the agreed maximum of symmetric links.
      news: True if an RNIC was added at either end since the client rejected the last link.
    """
    symmetric = links.symmetric()
    unused = links.unused(rnics)
    if unused and len(symmetric) < most:
        if links.kind is LinkGroupKind.ASYMMETRIC and shares_peer_port(links) and not news:
            return None  # the client has no RNIC for a symmetric link
        return unused[0]
    if links.kind is LinkGroupKind.SINGLE:
        # 3.5.1.6: the same RNIC again, because the client may have a second one.
        return next((rnic for rnic in rnics if rnic is symmetric[0].rnic), None)
    return None


def client_rnic(links: Links, rnics: Sequence[Rnic], most: int, peer: PeerPort) -> Rnic | None:
    """The client's end of the link that the server offers.

    None if the link would be parallel, a second asymmetric link, or above the maximum (3.5.1.6.1).
    """
    symmetric = links.symmetric()
    unused = links.unused(rnics)
    single = links.kind is LinkGroupKind.SINGLE
    if any(link.peer is not None and link.peer.port == peer for link in symmetric):
        return unused[0] if unused and single else None
    if unused:
        return unused[0] if len(symmetric) < most else None
    if not single:
        return None
    return next((rnic for rnic in rnics if rnic is symmetric[0].rnic), None)


def shares_peer_port(links: Links) -> bool:
    """True if the asymmetric link shares an RNIC at the peer's end."""
    symmetric = [link.peer.port for link in links.symmetric() if link.peer is not None]
    return any(link.peer is not None and link.peer.port in symmetric for link in links.asymmetric())


def violates_rules(links: Links, rnic: Rnic, peer: PeerPort) -> bool:
    """True if a link between these two would be parallel, or asymmetric without need (C.7.1)."""
    shared = False
    for link in links.usable():
        here = link.rnic is rnic
        there = link.peer is not None and link.peer.port == peer
        if here and there:
            return True
    for link in links.symmetric():
        shared |= link.rnic is rnic or (link.peer is not None and link.peer.port == peer)
    return shared and links.kind is not LinkGroupKind.SINGLE
