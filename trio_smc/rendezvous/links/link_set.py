"""The links of one group: which of them a connection or a message takes, and which may be added.

Theory of operation
-------------------
A new connection sends on the usable link with the fewest connections (`Links.least_loaded`).

Two links of a group never join the same two RNICs (a parallel link).  A link that shares an RNIC
with another one at one end only is asymmetric; a group has at most one, as long as there is no
symmetric pair, and it is not counted among the links that the two sides have agreed on as the
most (RFC 7609, 2.2.2).

Which RNICs a new link joins is decided by both sides after these rules (3.5.1.6, 3.5.5.1).  The
server picks its end first and names it in ADD LINK (`server_rnic`); the client picks the other
end, or finds none and rejects (`client_rnic`).
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
GONE_LINKS: Final = 2 * LINK_LIMIT
"""Links that are remembered after their end."""


class LinkGroupKind(StrEnum):
    """How well a group survives the loss of an RNIC (RFC 7609, 2.2.3)."""

    SINGLE = "single"
    ASYMMETRIC = "asymmetric"
    SYMMETRIC = "symmetric"


class Links(dict[int, "Link"]):
    """By number; links that failed or were deleted are not there any more."""

    def __init__(self) -> None:
        super().__init__()
        self._last_number = 0
        self._gone: deque[Link] = deque(maxlen=GONE_LINKS)

    def forget(self, link: Link) -> None:
        """The link has failed or was deleted."""
        if self.get(link.number) is link:
            del self[link.number]
            if link.peer is not None:  # else nobody can name it
                self._gone.append(link)

    def reaches_lately(self, gid: bytes) -> bool:
        """Whether a link joins that RNIC of the peer's, or did so lately."""
        links = (*self.values(), *self._gone)
        return any(link.peer is not None and link.peer.gid == gid for link in links)

    def next_number(self) -> int:
        """A number that was not used before, until all of 1..255 were (2.2.4)."""
        for _ in range(_NUMBERS):
            self._last_number = self._last_number % _NUMBERS + 1
            if self._last_number not in self:
                return self._last_number
        raise RuntimeError("a link group with 255 links")

    @property
    def any_usable(self) -> bool:
        """Whether a link may carry more connections; asked several times for each of them."""
        for link in self.values():  # noqa: SIM110
            if link.usable:
                return True
        return False

    def usable(self) -> list[Link]:
        """Links that may carry more connections."""
        return [link for link in self.values() if link.usable]

    def least_loaded(
        self, but: Link | None = None, among: Container[int] | None = None
    ) -> Link | None:
        """The usable link on which the fewest connections send: a new connection goes there.

        Args:
          but: not this one.
          among: the numbers that come into question; None: all.
        """
        best: Link | None = None
        for link in self.values():
            fits = link.usable and link is not but and (among is None or link.number in among)
            if fits and (best is None or link.load < best.load):
                best = link
        return best

    def oldest(self, but: Link | None = None) -> Link | None:
        """The usable link, and not ``but``, that has been there longest."""
        return next((link for link in self.values() if link.usable and link is not but), None)

    def for_llc(self, avoid: Link | None = None) -> Link | None:
        """A link that can carry LLC messages; ``avoid``, or one that is being deleted, only if no
        other can."""
        return min(
            (link for link in self.values() if link.confirmed),
            key=lambda link: (link is avoid, not link.usable),
            default=None,
        )

    def find(self, gid: bytes, mac: bytes | None, qp_number: int) -> Link | None:
        """The link whose peer end is this one (RFC 7609, 3.5.2.2, 3.5.2.3); None: with any MAC.

        Also one that has just gone: SMC Accept and Confirm travel over TCP, and the link that
        they name may have ended meanwhile.
        """
        for links in (self.values(), self._gone):
            for link in links:
                peer = link.peer
                if (
                    peer is not None
                    and peer.qp_number == qp_number
                    and peer.gid == gid
                    and (mac is None or mac == peer.mac)
                    # Links of a group that is over stay in it.
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
        """The other usable links; in order there is at most one."""
        symmetric = self.symmetric()
        return [link for link in self.usable() if link not in symmetric]

    @property
    def kind(self) -> LinkGroupKind:
        """What these links make the group."""
        symmetric = len(self.symmetric())
        if symmetric > 1:
            return LinkGroupKind.SYMMETRIC
        return LinkGroupKind.ASYMMETRIC if self.asymmetric() else LinkGroupKind.SINGLE

    def unused(self, rnics: Iterable[Rnic]) -> list[Rnic]:
        """Those of ``rnics`` that no symmetric link uses, those without any link first."""
        symmetric = {link.rnic for link in self.symmetric()}
        used = {link.rnic for link in self.usable()}
        return sorted((rnic for rnic in rnics if rnic not in symmetric), key=used.__contains__)


def _shares_rnic(one: Link, other: Link) -> bool:
    return one.rnic is other.rnic or (
        one.peer is not None and other.peer is not None and one.peer.port == other.peer.port
    )


def server_rnic(links: Links, rnics: Sequence[Rnic], most: int, *, news: bool) -> Rnic | None:
    """The server's end of one more link; None when there is no use in offering one.

    Args:
      rnics: this side's usable ones, the preferred one first.
      most: the agreed maximum of symmetric links.
      news: whether an RNIC came since the client rejected the last one, at either end.
    """
    symmetric = links.symmetric()
    unused = links.unused(rnics)
    if unused and len(symmetric) < most:
        if links.kind is LinkGroupKind.ASYMMETRIC and shares_peer_port(links) and not news:
            return None  # the client has no RNIC for a symmetric link
        return unused[0]
    if links.kind is LinkGroupKind.SINGLE:
        # 3.5.1.6: the same one again, in case that the client has a second one.
        return next((rnic for rnic in rnics if rnic is symmetric[0].rnic), None)
    return None


def client_rnic(links: Links, rnics: Sequence[Rnic], most: int, peer: PeerPort) -> Rnic | None:
    """The client's end of the link that the server offers; None: it would be a parallel one, a
    second asymmetric one, or one too many (3.5.1.6.1)."""
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
    """Whether the asymmetric link is one because the peer has too few RNICs."""
    symmetric = [link.peer.port for link in links.symmetric() if link.peer is not None]
    return any(link.peer is not None and link.peer.port in symmetric for link in links.asymmetric())


def violates_rules(links: Links, rnic: Rnic, peer: PeerPort) -> bool:
    """Whether a link between these two would be parallel, or asymmetric without need (C.7.1)."""
    shared = False
    for link in links.usable():
        here = link.rnic is rnic
        there = link.peer is not None and link.peer.port == peer
        if here and there:
            return True
    for link in links.symmetric():
        shared |= link.rnic is rnic or (link.peer is not None and link.peer.port == peer)
    return shared and links.kind is not LinkGroupKind.SINGLE
