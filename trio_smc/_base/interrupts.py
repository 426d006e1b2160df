"""Ctrl-C: where `KeyboardInterrupt` may be raised.

Trio raises it at once, wherever the Python code of a task is, unless the code is protected; then
the main task gets it at its next checkpoint.  Trio protects system tasks, but not the tasks that
they start.  In the middle of a link's timer it would end the stack, so that the peers of all
connections see a reset where TCP shows the end; in the middle of a send or a drain, bytes or
completions would be lost; in the middle of a connect, the end of the stack would wait for a call
that is no longer under way.

So the code that users call is protected: their tasks get `KeyboardInterrupt` at checkpoints only,
and the code handles the exception like `trio.Cancelled`.  The protection of a function covers
everything that the function calls.  A function that runs code of the user must not be protected,
because an endless loop in that code has to end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import trio

__all__ = ["ki_protected", "protect_module"]

_Class = TypeVar("_Class", bound=type)


def ki_protected(cls: _Class) -> _Class:
    """Protect all methods of a class, and what they call, from `KeyboardInterrupt`.

    A call costs nothing: Trio looks at the code that a signal has interrupted.
    """
    _protect(vars(cls).values(), cls.__module__)
    return cls


def protect_module(namespace: dict[str, Any]) -> None:
    """Protect all functions and methods of a module from `KeyboardInterrupt`.

    Args:
      namespace: the `globals` of the module, at its end.
    """
    name = namespace["__name__"]
    _protect(namespace.values(), name)
    for member in namespace.values():
        if inspect.isclass(member) and member.__module__ == name:
            ki_protected(member)


def _protect(members: Iterable[object], module: str) -> None:
    for member in members:
        for function in _functions_of(member):
            # A wrapper may be of another module, and then other functions have its code, too.
            if function.__globals__["__name__"] == module:
                trio.lowlevel.enable_ki_protection(function)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """The functions of a member of a class or module, also those in wrappers and properties."""
    if isinstance(member, FunctionType):
        yield member
    if isinstance(member, property):
        parts = [member.fget, member.fset, member.fdel]
    elif isinstance(member, cached_property):
        parts = [member.func]
    else:
        parts = [getattr(member, "__wrapped__", None)]
    for part in parts:
        if part is not None:
            yield from _functions_of(part)
