"""Tools on top of the public API: the command `trio-smc`, and metrics for Prometheus.

This room imports the public API (`trio_smc`) and the values of `trio_smc._base`, and also uses the
control protocol, captures and wire formats.  No other room imports this room.  Data about running
processes comes from the control sockets of their stacks.
"""
