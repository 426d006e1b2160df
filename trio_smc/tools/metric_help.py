"""The metrics of trio_smc: their HELP texts, for `tools.metrics` and `tools.exposition`."""

from __future__ import annotations

from typing import Final

__all__ = ["GAUGES", "HELP", "PREFIX"]

PREFIX: Final = "trio_smc_"
GAUGES: Final = ("open_connections",)
"""The counters of `StackStatistics` that may fall."""

HELP: Final = {
    # Fields of `StackStatistics`.
    "connections": "SMC-R connections opened since the stack was opened, open ones included.",
    "client_connections": "SMC-R connections that this side opened as the TCP client.",
    "server_connections": "SMC-R connections that this side accepted.",
    "open_connections": "SMC-R connections that are open now, closing ones included.",
    "bytes_sent": "Bytes that programs sent over SMC-R.",
    "bytes_received": "Bytes that programs received over SMC-R.",
    "tcp_bytes_sent": "Bytes sent by connections that stay on TCP.",
    "tcp_bytes_received": "Bytes received by connections that stay on TCP.",
    "writes": "RDMA writes posted. Many small ones mean many small messages.",
    "cdcs_sent": "CDC messages sent. They announce data and free space (RFC 7609, A.4).",
    "cdcs_received": "CDC messages received.",
    "coalesced": "CDC messages that were not sent because a later one included their contents.",
    "window_stalls": "How often a sender found the peer's ring full: the peer reads too slowly, or "
    "its receive_buffer is too small.",
    "stale_cdcs": "CDC messages dropped because they were old, after a failover.",
    "unknown_tokens": "CDC messages dropped because they named no connection.",
    "buffers_allocated": "RMB elements (receive buffers) assigned to connections.",
    "buffers_reused": "RMB elements assigned that an earlier connection had used.",
    "link_groups": "Link groups opened. Peers that restart form new ones.",
    "failovers": "How often a connection moved to another link because its link or RNIC failed or "
    "was drained.",
    "handshakes": "CLC handshakes started.",
    "handshakes_failed": "CLC handshakes that ended the TCP connection.",
    "refused": "Connections closed because require_smc is set and SMC-R could not be used.",
    # Others.
    "build_info": "Always 1. Labels: the release of trio_smc and of Python.",
    "connections_agreed": "SMC-R connections by the terms of their link groups: version of SMC-R, "
    "release, UEID, and the route between the RNICs.",
    "connections_now": "Connections that are open now, by mode.",
    "fallbacks": "Connections that stay on TCP, by the side that decided (local or peer) and the "
    "reason; trio-smc reasons explains each.",
    "link_groups_now": "Link groups that exist now, by role and kind. Only symmetric ones survive "
    "the loss of any RNIC.",
    "links_now": "Links that exist now, by RNIC and state.",
    "rmb_elements": "RMB elements (receive buffers), by size in bytes, in use and free.",
    "rnic_port_active": "Stacks in which the port of this RNIC is up.",
    "rnic_drained": "Stacks in which this RNIC is drained.",
    "scrape_failures": "Stacks that did not answer a scrape, since this exporter was started.",
    "silent_processes": "Processes that did not answer the last scrape: stopped, or their event "
    "loop is blocked.",
    "stacks": "Stacks that answered.",
    "uptime_seconds": "Seconds since the stack was opened.",
}
"""By the name of the metric, without its prefix and "_total"."""
