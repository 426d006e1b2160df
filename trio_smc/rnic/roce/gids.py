"""Which entry of a port's GID table a RoCE port uses, and which towards a peer.

A GID stands in the table once for each encapsulation that the adapter knows: RoCE v1 (its own
Ethernet type) and RoCE v2 (UDP).  Both ends of a link must use the same one, and no message of
RFC 7609 tells which; what tells is the peer's GID (`towards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trio_smc.rnic.roce.pyverbs import ROCE_V1, ROCE_V2, Gid

__all__ = [
    "choose",
    "contains_mac",
    "is_mapped",
    "towards",
]


_LINK_LOCAL: Final = b"\xfe\x80" + bytes(6)


def choose(table: Sequence[Gid], index: int | None) -> Gid | None:
    """The entry at ``index``; None: one of RoCE v2 and made from a global address, if possible."""
    if index is not None:
        return next((gid for gid in table if gid.number == index), None)
    # Global before link-local: it can be routed.  False sorts before True.
    order = sorted(table, key=lambda gid: (gid.kind != ROCE_V2, gid.value[:2] == b"\xfe\x80"))
    return order[0] if order else None


def towards(peer: bytes, table: Sequence[Gid], own: Gid, *, fixed: bool) -> Gid | None:
    """The entry of ``own``'s GID for a link to the peer with this GID; None: it has gone.

    An address that goes and comes back changes its index, so the table of this moment is asked.
    Of the GID's entries that of the peer's encapsulation is taken, if there is one, else
    that of ``own``.

    Args:
      peer: the peer's GID, 16 bytes.
      table: the port's entries now.
      own: the entry that was chosen when the RNIC was opened.
      fixed: the user chose it: no other encapsulation will do.
    """
    wanted = own.kind if fixed else _encapsulation(peer)
    same = [gid for gid in table if (gid.ifindex, gid.value) == (own.ifindex, own.value)]
    if fixed:
        same = [gid for gid in same if gid.kind == wanted]
    return min(same, key=lambda gid: (gid.kind != wanted, gid.kind != own.kind), default=None)


def is_mapped(gid: bytes) -> bool:
    """Whether it was made from an IPv4 address."""
    return gid[:12] == bytes(10) + b"\xff\xff"


def contains_mac(peer: bytes, own: Gid) -> bool:
    """Whether nobody has to be asked for this peer's MAC address: with RoCE v1 a link-local GID
    is made from it."""
    return own.kind == ROCE_V1 and peer[:8] == _LINK_LOCAL


def _encapsulation(gid: bytes) -> int:
    """What a peer with this GID speaks.

    Whoever has no IP address in its GID, but the one that is made from the port's MAC address,
    asks for RoCE v1: Linux does for SMC-R version 1, and takes the table's first entry.
    """
    return ROCE_V1 if gid[:8] == _LINK_LOCAL and gid[11:13] == b"\xff\xfe" else ROCE_V2
