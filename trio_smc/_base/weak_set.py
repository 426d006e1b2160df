"""`WeakSet`: a weak set that runs no Python code when an object goes away.

The garbage collector may run in the middle of the user's code.  A signal that arrives meanwhile is
handled by the next Python code, and that is the callback of a `weakref.WeakSet` or a
`weakref.WeakValueDictionary` for an object that goes away.  Python ignores the exceptions of such a
callback, and so it would swallow `KeyboardInterrupt`.  The callback of this set is a method of
`dict`, which is no Python code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

__all__ = ["WeakSet"]

_Item = TypeVar("_Item")


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
