"""Tools on top of the public API: the command `trio-smc`, metrics, logs, captures.

This room imports the public API (`trio_smc`) and the values of `trio_smc._base`; nothing imports
it.  What a running process shows comes from its stacks' control sockets.
"""
