"""Work that goes on inside a stack and that leaving the stack ends: calls of users, handshakes."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import trio

__all__ = ["Busy", "Call", "Cancellable", "UnderWay"]


class Cancellable(Protocol):
    """Work that can be told to end."""

    def cancel(self) -> None:
        """End soon."""


class UnderWay:
    """All of one stack's; true while there is some.

    Args:
      ended: called when one of them has ended.
    """

    __slots__ = ("_ended", "_works")

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._works: dict[Busy, Cancellable] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def cancel(self) -> None:
        """Tell all of them to end."""
        for work in list(self._works.values()):
            work.cancel()


class Busy:
    """Around work that leaving the stack cancels and waits for."""

    __slots__ = ("_under_way", "_work")

    def __init__(self, under_way: UnderWay, work: Cancellable) -> None:
        self._under_way = under_way
        self._work = work

    def __enter__(self) -> None:
        self._under_way._works[self] = self._work

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._under_way._works[self]
        self._under_way._ended()


class Call(Busy):
    """Around a user's call: leaving the stack ends it with ClosedResourceError."""

    __slots__ = ("_scope",)

    def __init__(self, under_way: UnderWay) -> None:
        self._scope = trio.CancelScope()
        super().__init__(under_way, self._scope)

    def __enter__(self) -> None:
        super().__enter__()
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._scope.__exit__(kind, error, traceback)
        if self._scope.cancelled_caught:
            raise trio.ClosedResourceError("the stack was closed")
