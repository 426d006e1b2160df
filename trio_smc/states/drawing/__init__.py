"""Diagrams and tables of the state machines, for docs/states."""
