"""The stack's control socket, which `trio-smc` queries: its protocol, server and snapshots."""
