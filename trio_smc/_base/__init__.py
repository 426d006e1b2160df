"""Shared by all rooms: errors, fallback reasons, statistics, observers, timers.

Imports no other room of trio_smc.
"""
