"""The leaf room: errors, fallback reasons, configuration and statistics values.

Imports nothing of trio_smc and may be imported by every other room.
"""
