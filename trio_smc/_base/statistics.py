"""Frozen counters, as `Stack.statistics()` and `SmcStream.statistics()` return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from .reasons import FallbackReason, Origin

__all__ = ["STREAM_COUNTERS", "Agreed", "StackStatistics", "StreamStatistics"]


class Agreed(NamedTuple):
    """What the two sides of a link group have agreed on, as tools and metrics tell it.

    Fields:
      version: of SMC-R, 1 or 2.
      release: of version 2: 0 or 1; else 0.
      ueid: by which they speak version 2; None in version 1.
      direct: whether their first RNICs reach each other without a gateway, as version 1 has it.
    """

    version: int
    release: int
    ueid: str | None
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """Counters of one connection since it was opened.  Sizes are bytes."""

    bytes_sent: int = 0
    bytes_received: int = 0
    writes: int = 0
    """RDMA writes posted."""
    cdcs_sent: int = 0
    cdcs_received: int = 0
    coalesced: int = 0
    """CDC messages spared because a later one carried the same news."""
    window_stalls: int = 0
    """How often a sender found the peer's window closed."""
    stale_cdcs: int = 0
    """CDC messages discarded for their sequence number (RFC 7609, A.4)."""
    failovers: int = 0
    """How often this side moved its sending to another link (RFC 7609, 4.6)."""


STREAM_COUNTERS = tuple(field.name for field in fields(StreamStatistics))
"""Their names, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatistics:
    """Counters of a stack since it was opened.  Sizes are bytes."""

    connections: int = 0
    """SMC-R connections opened, open ones included."""
    agreed: Mapping[Agreed, int]
    """The same by what their link groups have agreed on."""
    open_connections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    tcp_bytes_sent: int = 0
    """By connections that stay on TCP."""
    tcp_bytes_received: int = 0
    writes: int = 0
    cdcs_sent: int = 0
    cdcs_received: int = 0
    coalesced: int = 0
    window_stalls: int = 0
    stale_cdcs: int = 0
    unknown_tokens: int = 0
    """CDC messages dropped because their alert token names no connection."""
    buffers_allocated: int = 0
    """RMB elements given out."""
    buffers_reused: int = 0
    """RMB elements given out that had served a connection before."""
    link_groups: int = 0
    """Link groups opened."""
    failovers: int = 0
    """Moves of a connection's sending to another link, of all connections."""
    handshakes: int = 0
    """Exchanges of CLC messages begun, or waited for because the peer is assumed to speak SMC-R."""
    handshakes_failed: int = 0
    """Those that ended the TCP connection; calls cancelled in the middle included."""
    refused: int = 0
    """Connections closed by a listener because `require_smc` is set."""
    fallbacks: Mapping[tuple[Origin, FallbackReason], int]
