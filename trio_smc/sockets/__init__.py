"""`enable()` and the drop-in socket: SMC-R for unmodified programs."""
