"""Moving connections between the links of their group (RFC 7609, 2.3, 4.6)."""
