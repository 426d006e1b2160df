"""Generates the tables of the state machines, and draws and lists them for docs/states."""
