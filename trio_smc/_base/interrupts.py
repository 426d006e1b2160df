"""Ctrl-C: where `KeyboardInterrupt` may be raised.

Trio raises it at once, wherever the Python code of a task is, unless the code is protected; then
the main task gets it at its next checkpoint.  Trio protects system tasks, but not the tasks that
they start.  In the middle of a link's timer it would end the stack, so that the peers of all
connections see a reset where TCP shows the end; in the middle of a send or a drain, bytes or
completions would be lost.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import trio

__all__ = ["ki_protected"]

_Class = TypeVar("_Class", bound=type)


def ki_protected(cls: _Class) -> _Class:
    """Protect all methods of a class, and what they call, from `KeyboardInterrupt`.

    A call costs nothing: Trio looks at the code that a signal has interrupted.
    """
    for method in vars(cls).values():
        # The code of a function with a wrapper is that of the wrapper, which others have, too.
        if inspect.isfunction(method) and not hasattr(method, "__wrapped__"):
            trio.lowlevel.enable_ki_protection(method)
    return cls
