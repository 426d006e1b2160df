"""`Config`, allow and deny lists, and the TOML file."""
