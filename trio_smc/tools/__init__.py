"""Tools on top of the public API: the command `trio-smc`, metrics, logs, captures.

This room imports the public API (`trio_smc`) and the values of `trio_smc._base`.  No other room
imports it.  Data about running processes comes from the control sockets of their stacks.
"""
