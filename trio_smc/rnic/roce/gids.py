"""Choose the entry of a port's GID table, for the port itself and for each peer.

The table has one entry of a GID for each encapsulation that the adapter supports: RoCE v1 (an
Ethernet type of its own) and RoCE v2 (UDP).  Both ends of a link must use the same encapsulation.
No message of RFC 7609 names it, but the peer's GID shows it (`entry_for_peer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trio_smc.rnic.roce.pyverbs import ROCE_V1, ROCE_V2, Gid

__all__ = [
    "choose_entry",
    "contains_mac",
    "entry_for_peer",
    "is_ipv4_mapped",
]


_LINK_LOCAL: Final = b"\xfe\x80" + bytes(6)


def choose_entry(table: Sequence[Gid], index: int | None) -> Gid | None:
    """The entry at ``index``.  If that is None, an entry of RoCE v2 with a global address is
    preferred."""
    if index is not None:
        return next((gid for gid in table if gid.number == index), None)
    # A global address can be routed.  False sorts before True.
    order = sorted(table, key=lambda gid: (gid.kind != ROCE_V2, gid.value[:2] == b"\xfe\x80"))
    return order[0] if order else None


def entry_for_peer(peer: bytes, table: Sequence[Gid], own: Gid, *, fixed: bool) -> Gid | None:
    """The entry of ``own``'s GID for a link to the peer with this GID; None: the GID was removed.

    An address that is removed and added again gets another index, so the current table is searched.
    The entry with the peer's encapsulation is preferred, then the entry with that of ``own``.

    Args:
      peer: the peer's GID, 16 bytes.
      table: the current entries of the port.
      own: the entry that was chosen when the RNIC was opened.
      fixed: the user chose ``own``, so no other encapsulation is allowed.
    """
    wanted = own.kind if fixed else _encapsulation(peer)
    same = [gid for gid in table if (gid.ifindex, gid.value) == (own.ifindex, own.value)]
    if fixed:
        same = [gid for gid in same if gid.kind == wanted]
    return min(same, key=lambda gid: (gid.kind != wanted, gid.kind != own.kind), default=None)


def is_ipv4_mapped(gid: bytes) -> bool:
    """True if the GID was made from an IPv4 address."""
    return gid[:12] == bytes(10) + b"\xff\xff"


def contains_mac(peer: bytes, own: Gid) -> bool:
    """True if this peer's MAC address follows from its GID: a link-local GID of RoCE v1 was made
    from the MAC address."""
    return own.kind == ROCE_V1 and peer[:8] == _LINK_LOCAL


def _encapsulation(gid: bytes) -> int:
    """The encapsulation that a peer with this GID uses.

    If the GID contains no IP address and was made from the port's MAC address, the peer uses RoCE
    v1.  Linux does so for SMC-R version 1: it takes the first entry of its table.
    """
    return ROCE_V1 if gid[:8] == _LINK_LOCAL and gid[11:13] == b"\xff\xfe" else ROCE_V2
