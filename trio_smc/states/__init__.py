"""Every state machine, declared once with python-statemachine and run by one small engine.

Pure: no trio, no I/O, no clock.  A declaration is a chart (`connection`, `link`, ...); `tables` is
made from all of them (``python -m trio_smc.states``) and is what `engine` runs, so that a program
never imports python-statemachine.
"""

from __future__ import annotations

USABLE = frozenset({"SINGLE", "ASYMMETRIC", "SYMMETRIC"})
"""States of a link group in which connections use it."""
