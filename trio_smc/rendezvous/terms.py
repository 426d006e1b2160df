"""What the two sides of a link group agree on: `Terms`, and the rules by which they do.

Theory of operation
-------------------
One Proposal may offer SMC-R version 1 (RFC 7609) and version 2.  Version 2 is taken where it fits,
version 1 where only that does; else the connection stays TCP.  Version 1 has nothing to negotiate:
it is one constant.  For version 2 the two sides need a UEID in common, RoCE version 2 GIDs that are
IPv4-mapped, and a route between them, and agree on release, limits and features:

- the server answers a Proposal (`answer`), after its own UEIDs and what it knows of the route;
- the client checks that an Accept says what it may (`check_accept`);
- the server checks that Confirm repeats it (`check_confirm`).

What was agreed belongs to the link group.  How LLC messages are framed, how RTokens are told, how
many links and connections there may be, and how GIDs are compared follows from it.

The rules are Linux's, in its order, with the exception that our client believes no EID, release or
limit that it has not offered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.statistics import Agreed
from trio_smc.wire import clc, llc
from trio_smc.wire.fields import eid_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HOST_SIZE",
    "LINK_LIMIT",
    "VERSION_1",
    "Offer",
    "Terms",
    "answer",
    "check_accept",
    "check_confirm",
    "is_routable",
    "proposed",
    "with_v2_offer",
]


LINK_LIMIT: Final = 8
"""The most links of a group that this side takes part in (RFC 7609, 2.2.2, A.3.5)."""
HOST_SIZE: Final = 32
"""Bytes of a host's name."""
_RELEASE: Final = 1
_CONNECTIONS: Final = 255  # an RMB has as many elements at most
_LEAST_CONNECTIONS: Final = 16  # Linux declines less
_LINKS: Final = 2  # CONFIRM RKEY has room for three, with an asymmetric one, and no continuation
_MAPPED: Final = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a link group's two sides have agreed on.

    Attributes:
      version: of SMC-R, 1 or 2.
      release: of version 2: 0 or 1.
      eid: the UEID in common, 32 bytes; empty in version 1.
      direct: no gateway is between the two first RNICs; version 2 tells so.
      max_connections: of the group; None: as many as RMBs have room for.
      max_links: symmetric ones, at most.
      features: of version 2, a mask.
    """

    version: int
    release: int = 0
    eid: bytes = b""
    direct: bool = True
    max_connections: int | None = None
    max_links: int = LINK_LIMIT
    features: int = 0

    @property
    def framing(self) -> llc.Framing:
        """How LLC messages are framed."""
        return llc.V1 if self.version == 1 else llc.V2

    @property
    def agreed(self) -> Agreed:
        """What of it people want to see."""
        return Agreed(self.version, self.release, eid_name(self.eid) or None, self.direct)

    def fits(self, other: Terms) -> bool:
        """Whether a connection on these terms may use a link group that was formed on others."""
        return (self.version, self.eid) == (other.version, other.eid)

    def contact(self, gids: Sequence[bytes] = (), *, first: bool, host: bytes) -> clc.V2Answer:
        """What version 2 adds to our Accept or Confirm.

        Parameters:
          gids: in a Confirm those of our RNICs.
          first: on first contact.
          host: our name, 32 bytes.
        """
        if not first:
            return clc.V2Answer(eid=self.eid)
        limits = (self.max_connections or 0, self.max_links) if self.release else (0, 0)
        contact = clc.FirstContact(
            direct=self.direct, release=self.release, max_connections=limits[0],
            max_links=limits[1], features=self.features, host=host,
        )  # fmt: skip
        return clc.V2Answer(eid=self.eid, first=contact, gids=tuple(gids))


VERSION_1: Final = Terms(version=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What this side has for version 2.

    Attributes:
      eids: its UEIDs, 32 bytes each.
      release, max_connections, max_links: as in `Terms`, at most.
      host: our name, ASCII, padded with blanks, 32 bytes.
    """

    eids: tuple[bytes, ...]
    release: int = _RELEASE
    max_connections: int = _CONNECTIONS
    max_links: int = _LINKS
    host: bytes = b" " * HOST_SIZE


def is_routable(gid: bytes) -> bool:
    """Whether a GID is IPv4-mapped, as version 2 wants it."""
    return gid.startswith(_MAPPED)


def with_v2_offer(proposal: clc.Proposal, offer: Offer) -> clc.Proposal:
    """The same Proposal with version 2 offered, too."""
    limits = (offer.max_connections, offer.max_links) if offer.release else (0, 0)
    v2 = clc.V2Offer(
        eids=offer.eids, gid=proposal.gid, release=offer.release,
        max_connections=limits[0], max_links=limits[1],
    )  # fmt: skip
    flags = clc.proposal_flags(v1=True, v2=True)
    return replace(proposal, version=2, flags=flags, v2=v2)


def proposed(proposal: clc.Proposal, terms: Terms) -> tuple[bytes, bytes]:
    """By what the server tells one client from another: peer ID and GID.

    Peer IDs of processes on one RoCE port may be the same by chance, and Linux has none in a
    Proposal of version 2 alone.
    """
    if terms.version == 1 or proposal.v2 is None:
        return proposal.peer_id, proposal.gid
    return proposal.peer_id, proposal.v2.gid


def answer(
    proposal: clc.Proposal, offer: Offer | None, v1: FallbackReason | None, direct: bool | None
) -> Terms | FallbackReason:
    """The server's answer: on what terms, or why not.

    Parameters:
      offer: what this side has of version 2 for the connection; None: nothing.
      v1: why version 1 does not fit the connection; None: it does.
      direct: whether the client's GID of version 2 is reached without a gateway; None: it is not.
    """
    refusal = None
    if proposal.v2 is not None and offer is not None:
        terms = _answer_v2(proposal.v2, offer, direct)
        if isinstance(terms, Terms):
            return terms
        refusal = terms
    if not proposal.offers_smc_r:
        return refusal or FallbackReason.MODE_MISMATCH
    if v1 is None:
        return VERSION_1
    return refusal or v1


def _answer_v2(v2: clc.V2Offer, offer: Offer, direct: bool | None) -> Terms | FallbackReason:
    release = min(v2.release, offer.release)
    connections, links = _CONNECTIONS, _LINKS
    if release:
        connections = min(v2.max_connections, offer.max_connections)
        links = min(v2.max_links, offer.max_links)
        if connections < _LEAST_CONNECTIONS:
            return FallbackReason.CONNECTION_LIMIT
        if links < 1:
            return FallbackReason.LINK_LIMIT
    eid = next((each for each in v2.eids if each in offer.eids), None)
    if eid is None:
        return FallbackReason.NO_COMMON_UEID
    if direct is None or not is_routable(v2.gid):
        return FallbackReason.NO_ROUTE
    return Terms(
        version=2, release=release, eid=eid, direct=direct, max_connections=connections,
        max_links=links,
    )  # fmt: skip


def check_accept(
    accept: clc.Accept, proposal: clc.Proposal, direct: bool | None
) -> Terms | FallbackReason:
    """The client's look at an Accept: the terms, of which a subsequent contact tells the EID only.

    Parameters:
      direct: whether the server's GID is reached without a gateway; None: it is not.  Counts on
        first contact in version 2.
    """
    v2, offered = accept.v2, proposal.v2
    if v2 is None:
        return VERSION_1 if proposal.offers_smc_r else FallbackReason.VERSION_MISMATCH
    if offered is None:
        return FallbackReason.VERSION_MISMATCH
    if v2.eid not in offered.eids:
        return FallbackReason.NO_COMMON_UEID
    if v2.first is None:
        return Terms(version=2, eid=v2.eid)
    return _check_first(v2.eid, v2.first, offered, is_routable(accept.gid), direct)


def _check_first(
    eid: bytes, first: clc.FirstContact, offered: clc.V2Offer, routable: bool, direct: bool | None
) -> Terms | FallbackReason:
    if first.release > offered.release:
        return FallbackReason.RELEASE_MISMATCH
    connections, links = _CONNECTIONS, _LINKS
    if first.release:
        connections, links = first.max_connections, first.max_links
        if not _LEAST_CONNECTIONS <= connections <= offered.max_connections:
            return FallbackReason.CONNECTION_LIMIT
        if not 1 <= links <= offered.max_links:
            return FallbackReason.LINK_LIMIT
    if direct is None or not routable:
        return FallbackReason.NO_ROUTE
    if direct and not first.direct:
        return FallbackReason.ROUTE_MISMATCH
    return Terms(
        version=2, release=first.release, eid=eid, direct=first.direct,
        max_connections=connections, max_links=links, features=first.features & offered.features,
    )  # fmt: skip


def check_confirm(confirm: clc.Confirm, terms: Terms) -> FallbackReason | None:
    """The server's look at Confirm: why it does not repeat the terms; None: it does.

    Raises:
      ProtocolError: it is of another version, or of another kind of contact.
    """
    v2 = confirm.v2
    if (v2 is not None) != (terms.version == 2):
        raise ProtocolError("SMC Confirm of another version than SMC Accept")
    if v2 is None:
        return None
    if v2.eid != terms.eid:
        return FallbackReason.NO_COMMON_UEID
    if v2.first is None:
        return None
    if v2.first.release != terms.release:
        return FallbackReason.RELEASE_MISMATCH
    if terms.release and v2.first.max_connections != terms.max_connections:
        return FallbackReason.CONNECTION_LIMIT
    if terms.release and v2.first.max_links != terms.max_links:
        return FallbackReason.LINK_LIMIT
    return None if is_routable(confirm.gid) else FallbackReason.NO_ROUTE
