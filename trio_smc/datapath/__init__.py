"""The data path: RMBs, cursors, CDC messages and the connection core (RFC 7609, 4)."""
