"""Every state machine, declared once with python-statemachine and run by one small engine.

Pure: no trio, no I/O, no clock.  A declaration is a chart (`connection`, `link`, ...).
``python -m scripts.states`` generates `tables` from all charts, and `engine` runs the tables.  So a
program never imports python-statemachine, which only developers install.
"""

from __future__ import annotations

USABLE = frozenset({"SINGLE", "ASYMMETRIC", "SYMMETRIC"})
"""States of a link group in which connections use it."""
