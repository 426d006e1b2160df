"""How two peers find each other and agree: discovery, CLC negotiation, links (RFC 7609, 3)."""
