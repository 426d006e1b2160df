"""Which RNICs a new link joins (RFC 7609, 2.2.2, 3.5.1.6, 3.5.5.1).

The server picks its end first and names it in ADD LINK; the client picks the other end, or finds
none and rejects.  Both follow the same rules: no two links join the same RNICs, one link at most
is asymmetric, as long as there is no symmetric pair, and the others are no more than the two
sides have agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trio_smc.rendezvous.links import Kind

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import PeerPort
    from trio_smc.rendezvous.links import Links
    from trio_smc.rnic.verbs import Rnic

__all__ = ["client_rnic", "server_rnic", "shares_peer_port", "violates_rules"]


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
        if links.kind is Kind.ASYMMETRIC and shares_peer_port(links) and not news:
            return None  # the client has no RNIC for a symmetric link
        return unused[0]
    if links.kind is Kind.SINGLE:
        # 3.5.1.6: the same one again, in case that the client has a second one.
        return next((rnic for rnic in rnics if rnic is symmetric[0].rnic), None)
    return None


def client_rnic(links: Links, rnics: Sequence[Rnic], most: int, peer: PeerPort) -> Rnic | None:
    """The client's end of the link that the server offers; None: it would be a parallel one, a
    second asymmetric one, or one too many (3.5.1.6.1)."""
    symmetric = links.symmetric()
    unused = links.unused(rnics)
    single = links.kind is Kind.SINGLE
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
    return shared and links.kind is not Kind.SINGLE
