"""Work that is deferred until the scheduler is about to sleep.  Pure: no Trio, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["DEFERRED_PASSES", "Deferred"]

DEFERRED_PASSES: Final = 16
"""Passes of a loop that does not sleep, after which work that was added with `Deferred.add_soon`
runs.  Chosen: docs/decisions.md has a measurement with this value only (the update of a blocked
writer: a write of 1 MiB took 327 µs before, 285 after)."""

Work = Callable[[], None]


class Deferred:
    """Work for the end of this pass, and work that may wait a few passes more.

    Args:
      on_failure: gets the exception of a piece of work; the other work still runs.

    Attributes:
      now: runs before the scheduler sleeps or polls for I/O.
      soon: runs before the scheduler sleeps, or after `DEFERRED_PASSES` passes.
    """

    __slots__ = ("_on_failure", "_passes", "now", "soon")

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self.now: list[Work] = []
        self.soon: list[Work] = []
        self._passes = 0  # since the first entry of `soon`

    def add_soon(self, work: Work) -> None:
        """Append to `soon`."""
        if not self.soon:
            self._passes = 0
        self.soon.append(work)

    def begin_pass(self, *, sleeping: bool) -> None:
        """Run what is due in this pass; ``sleeping``: the scheduler is about to sleep."""
        if self.soon:
            self._passes += 1
            if sleeping or self._passes >= DEFERRED_PASSES:
                self.run_all()
        if self.now:
            self.run()

    def run(self) -> None:
        """Run `now`, and the work that this adds to `now`."""
        while self.now:
            work, self.now = self.now, []
            for each in work:
                try:
                    each()
                except Exception as problem:
                    self._on_failure(problem)

    def run_all(self) -> None:
        """Run `now` and `soon`."""
        self.now += self.soon
        self.soon = []
        self.run()

    def clear(self) -> None:
        """Drop all work without running it."""
        self.now = []
        self.soon = []
