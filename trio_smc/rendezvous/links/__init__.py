"""Links and link groups, LLC flows (RFC 7609, 2.2, 3.5, 4.4). Pure: no Trio, no clock."""
