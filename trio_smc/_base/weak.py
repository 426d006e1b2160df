"""Weak collections that run no Python code when an object goes away.

The garbage collector may run in the middle of the user's code.  A signal that arrives meanwhile is
handled by the next Python code, and that is the callback of a collection of `weakref` for an object
that goes away.  Python ignores the exceptions of such a callback, and so it would swallow
`KeyboardInterrupt`.  The callbacks of these collections are methods of `dict`, which are no Python
code.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from functools import partial
from typing import Generic, TypeVar
from weakref import ref

__all__ = ["WeakKeyMapping", "WeakSet", "WeakValueMapping"]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class WeakSet(Generic[_Item]):
    """Weak references to objects that are compared by identity, the oldest first."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[ref[_Item], None] = {}

    def add(self, item: _Item) -> None:
        """Add an object.  Idempotent."""
        references = self._references
        references[ref(item, references.pop)] = None

    def discard(self, item: _Item) -> None:
        """Remove an object; an unknown one is ignored."""
        self._references.pop(ref(item), None)

    def __iter__(self) -> Iterator[_Item]:
        # A copy, because objects may go away meanwhile.
        for reference in list(self._references):
            item = reference()
            if item is not None:
                yield item


class WeakKeyMapping(Generic[_Key, _Value]):
    """Values of objects that are compared by identity.  A value goes away together with its key."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[ref[_Key], _Value] = {}

    def get(self, key: _Key) -> _Value | None:
        """The value of ``key``; None if there is none."""
        return self._values.get(ref(key))

    def __setitem__(self, key: _Key, value: _Value) -> None:
        values = self._values
        values[ref(key, values.pop)] = value


class WeakValueMapping(Generic[_Key, _Value]):
    """Weak references to values.  A key goes away together with its value."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[_Key, ref[_Value]] = {}

    def keys(self) -> KeysView[_Key]:
        """The keys, as those of a `dict`."""
        return self._references.keys()

    def get(self, key: _Key) -> _Value | None:
        """The value of ``key``; None if there is none."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def __setitem__(self, key: _Key, value: _Value) -> None:
        # The reference is the default of `dict.pop`.  One that is replaced here goes away at once,
        # and then its callback is never called.
        self._references[key] = ref(value, partial(self._references.pop, key))
