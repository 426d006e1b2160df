"""The history of waits for completions, from which the next wait is planned.  No Trio."""

from __future__ import annotations

import time
from typing import Final

from .spinner import AdaptiveSpin, Crowd

__all__ = ["WaitHistory"]

_MAX_FAILURES: Final = 8
"""Failures after which the spin is discouraged.  Chosen: docs/decisions.md has measurements with
this value only ("how long to spin for the next message of a connection")."""
_RETRY_EVERY: Final = 64
"""Waits for each try while discouraged.  Chosen, and measured with this value only, like
`_MAX_FAILURES`."""

_now: Final = time.perf_counter_ns


class WaitHistory:
    """When the current wait began, and what the waits before it have taught.

    Times are those of `time.perf_counter_ns`.

    Args:
      seconds: how long a spin is; 0: never spin.

    Attributes:
      spin: decides if a spin is worthwhile, and how long it is.
      since: when the current wait began; 0: no task waits, or completions have ended the wait.
    """

    __slots__ = ("since", "spin")

    def __init__(self, seconds: float) -> None:
        self.spin = AdaptiveSpin(
            seconds, max_failures=_MAX_FAILURES, retry_every=_RETRY_EVERY, crowd=Crowd()
        )
        self.since = 0

    def begin(self) -> int:
        """Begin a wait; returns the time."""
        self.since = now = _now()
        return now

    def note_wakeup(self) -> None:
        """Completions ended the wait while Trio slept: `AdaptiveSpin` learns how long it was."""
        if self.since:
            self.spin.slept(_now() - self.since)
        self.since = 0
