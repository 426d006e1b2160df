"""The rendezvous of two peers: discovery, CLC negotiation, links (RFC 7609, 3)."""
