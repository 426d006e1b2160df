"""What users hold: streams, socket options, views of connections and link groups."""
