"""`publish`: classes and functions name the module from which users import them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from inspect import get_annotations
from typing import Any, get_type_hints

__all__ = ["publish"]


def publish(namespace: Mapping[str, Any], names: Iterable[str]) -> None:
    """Let public classes and functions name their public module and their public name.

    Args:
      namespace: the globals of the public module.
      names: the public names.
    """
    for name in names:
        thing = namespace[name]
        if isinstance(thing, type):
            # `typing.get_type_hints` evaluates annotations in the module that a class names.  Those
            # of modules that only type checkers import are never evaluated.
            with contextlib.suppress(NameError):
                hints = get_type_hints(thing, include_extras=True)
                thing.__annotations__ = {key: hints[key] for key in get_annotations(thing)}
            thing.__name__ = thing.__qualname__ = name
        thing.__module__ = namespace["__name__"]
