"""Streams, their socket options, and the views of connections and link groups."""
