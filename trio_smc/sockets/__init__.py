"""Sockets of unmodified programs that may become SMC-R: `enable()` and the drop-in socket."""
