"""Every message byte by byte: CLC, LLC, CDC (RFC 7609, appendix A). Pure; below everything else."""
