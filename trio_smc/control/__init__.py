"""The stack's control socket: protocol, server, snapshots."""
