"""Codecs of all CLC, LLC and CDC messages (RFC 7609, appendix A). Pure; below all other rooms."""
