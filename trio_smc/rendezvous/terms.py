"""`Terms`: the agreement of the two sides of a link group, and the rules by which they agree.

Theory of operation
-------------------
One Proposal may offer SMC-R version 1 (RFC 7609) and version 2. Version 2 is used if possible,
otherwise version 1, otherwise TCP. Version 1 has nothing to negotiate: its terms are a constant.
For version 2 the two sides need a common UEID, IPv4-mapped RoCE version 2 GIDs and a route between
them. They agree on release, limits and features:

- the server answers a Proposal (`answer`), using its UEIDs and the route;
- the client checks the Accept against its Proposal (`check_accept`);
- the server checks that Confirm repeats the Accept (`check_confirm`).

The terms belong to the link group. They decide the format of LLC messages, the exchange of RTokens,
the limits of links and connections, and the comparison of GIDs.

The rules are those of Linux, in the same order. In addition, a client of trio_smc declines an EID,
release or limit that it has not offered.
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
"""The largest number of links that this side permits in a group (RFC 7609, 2.2.2, A.3.5)."""
HOST_SIZE: Final = 32
"""Bytes of a host's name."""
_RELEASE: Final = 1
_CONNECTIONS: Final = 255  # the field has one byte
_LEAST_CONNECTIONS: Final = 16  # Linux declines a smaller limit
# CONFIRM RKEY of version 2 has room for the RTokens of three links, and there is no continuation.
# The third link may be an asymmetric one.
_LINKS: Final = 2
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4-mapped address (RFC 4291, 2.5.5.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The agreement of a link group's two sides.

    Attributes:
      version: the version of SMC-R: 1 or 2.
      release: the release of version 2: 0 or 1.
      eid: the common UEID, 32 bytes; empty in version 1.
      direct: True if no gateway is between the two first RNICs; always in version 1.
      max_connections: largest number of connections; None: only the RMBs limit it.
      max_links: largest number of symmetric links.
      features: a bit mask of version 2.
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
        """The format of LLC messages."""
        return llc.V1 if self.version == 1 else llc.V2

    @property
    def agreed(self) -> Agreed:
        """The part that users see in statistics."""
        return Agreed(self.version, self.release, eid_name(self.eid) or None, self.direct)

    def fits(self, other: Terms) -> bool:
        """True if a connection on these terms may use a link group on the ``other`` terms."""
        return (self.version, self.eid) == (other.version, other.eid)

    def v2_part(self, gids: Sequence[bytes] = (), *, first: bool, host: bytes) -> clc.V2Answer:
        """The version 2 part of this side's Accept or Confirm.

        Parameters:
          gids: the GIDs of this side's RNICs, for a Confirm.
          first: True on first contact.
          host: this host's name, 32 bytes.
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
    """This side's offer for version 2.

    Attributes:
      eids: the UEIDs of this side, 32 bytes each.
      release, max_connections, max_links: upper limits for `Terms`.
      host: this host's name, ASCII, padded with blanks, 32 bytes.
    """

    eids: tuple[bytes, ...]
    release: int = _RELEASE
    max_connections: int = _CONNECTIONS
    max_links: int = _LINKS
    host: bytes = b" " * HOST_SIZE


def is_routable(gid: bytes) -> bool:
    """True if a GID is IPv4-mapped, as version 2 requires."""
    return gid.startswith(_MAPPED)


def with_v2_offer(proposal: clc.Proposal, offer: Offer) -> clc.Proposal:
    """The same Proposal with an offer for version 2 added."""
    limits = (offer.max_connections, offer.max_links) if offer.release else (0, 0)
    v2 = clc.V2Offer(
        eids=offer.eids, gid=proposal.gid, release=offer.release,
        max_connections=limits[0], max_links=limits[1],
    )  # fmt: skip
    flags = clc.proposal_flags(v1=True, v2=True)
    return replace(proposal, version=2, flags=flags, v2=v2)


def proposed(proposal: clc.Proposal, terms: Terms) -> tuple[bytes, bytes]:
    """The peer ID and the GID, by which a server identifies a client.

    Both are needed: peer IDs of processes on one RoCE port may be equal by chance, and Linux sends
    no peer ID in a Proposal that offers version 2 only.
    """
    if terms.version == 1 or proposal.v2 is None:
        return proposal.peer_id, proposal.gid
    return proposal.peer_id, proposal.v2.gid


def answer(
    proposal: clc.Proposal, offer: Offer | None, v1: FallbackReason | None, direct: bool | None
) -> Terms | FallbackReason:
    """The server's answer: the terms, or the reason of a refusal.

    Parameters:
      offer: this side's offer of version 2 for the connection, or None.
      v1: the reason why version 1 is not possible for the connection; None: it is possible.
      direct: True if the client's GID of version 2 is reached without a gateway; None: there is no
        route.
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
    """Check an Accept for the client: the terms, or the reason of a refusal.

    On a subsequent contact the terms have only version and EID.

    Parameters:
      direct: True if the server's GID is reached without a gateway; None: there is no route. Used
        on first contact in version 2.
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
    """Check a Confirm for the server: the reason of a refusal; None if it repeats the terms.

    Raises:
      ProtocolError: the Confirm has another version than the terms.
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
