"""The counters that `Stack.statistics()` and `SmcStream.statistics()` return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from .reasons import FallbackReason, Origin

__all__ = ["STREAM_COUNTERS", "Agreed", "StackStatistics", "StreamStatistics"]


class Agreed(NamedTuple):
    """The terms of a link group that both sides have agreed on, for tools and metrics.

    Fields:
      version: the version of SMC-R, 1 or 2.
      release: the release of version 2, 0 or 1; 0 in version 1.
      ueid: the common UEID of version 2; None in version 1.
      direct: True if no gateway is between the first RNICs of both sides; always so in version 1.
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
    """CDC messages that were not sent because a later one included their contents."""
    window_stalls: int = 0
    """How often a sender found the peer's window closed."""
    stale_cdcs: int = 0
    """CDC messages discarded because of an old sequence number (RFC 7609, A.4)."""
    failovers: int = 0
    """How often this side moved its sending to another link (RFC 7609, 4.6)."""


STREAM_COUNTERS = tuple(field.name for field in fields(StreamStatistics))
"""The names of the counters, in the order of the fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatistics:
    """Counters of a stack since it was opened.  Sizes are bytes."""

    connections: int = 0
    """SMC-R connections opened, open ones included."""
    client_connections: int = 0
    """Those that this side has opened as the TCP client."""
    server_connections: int = 0
    """Those that this side has accepted."""
    agreed: Mapping[Agreed, int]
    """SMC-R connections opened, by the terms of their link groups."""
    open_connections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    tcp_bytes_sent: int = 0
    """Sent by connections that stay on TCP."""
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
    """RMB elements assigned to connections."""
    buffers_reused: int = 0
    """RMB elements assigned that an earlier connection had used."""
    link_groups: int = 0
    """Link groups opened."""
    failovers: int = 0
    """How often any connection moved its sending to another link."""
    handshakes: int = 0
    """CLC handshakes started, including waits for a Proposal of a peer assumed to use SMC-R."""
    handshakes_failed: int = 0
    """Handshakes that ended the TCP connection, including cancelled ones."""
    refused: int = 0
    """Connections closed by a listener because `require_smc` is set."""
    fallbacks: Mapping[tuple[Origin, FallbackReason], int]
