"""What every room may use: errors, fallback reasons, statistics, observers, timers.

Imports nothing of trio_smc and may be imported by every other room.
"""
