"""The history of waits for completions, from which the next wait is planned.  No Trio."""

from __future__ import annotations

import time
from typing import Final

from .spinner import PAUSE_NS, AdaptiveSpin

__all__ = ["WaitHistory"]

_MAX_FAILURES: Final = 8
"""Failures after which the spin is discouraged.  Chosen: docs/decisions.md has measurements with
this value only ("how long to spin for the next message of a connection")."""
_RETRY_EVERY: Final = 64
"""Waits for each try while discouraged.  Chosen, and measured with this value only, like
`_MAX_FAILURES`."""

_now: Final = time.perf_counter_ns


class WaitHistory:
    """When the current wait began, and when the last one ended.

    Times are those of `time.perf_counter_ns`.

    Args:
      seconds: how long a spin is; 0: never spin.

    Attributes:
      spin: decides if a spin is worthwhile, and how long it is.
      since: when the current wait began; 0: no task waits.
      last_arrival: when completions last ended a wait.
      after_pause: the current wait began more than `PAUSE_NS` after that.  The peer is asleep by
        then, and waking it takes longer than a spin.
    """

    __slots__ = ("after_pause", "last_arrival", "since", "spin")

    def __init__(self, seconds: float) -> None:
        self.spin = AdaptiveSpin(seconds, max_failures=_MAX_FAILURES, retry_every=_RETRY_EVERY)
        self.since = 0
        self.last_arrival = 0
        self.after_pause = False

    def begin(self) -> int:
        """Begin a wait; returns the time."""
        self.since = now = _now()
        self.after_pause = now - self.last_arrival > PAUSE_NS
        return now

    @property
    def is_spin_hopeless(self) -> bool:
        """True if a spin would most likely fail."""
        return self.after_pause or self.spin.discouraged

    def note_arrival(self, at: int) -> None:
        """Completions ended the wait before Trio slept."""
        self.since = 0
        self.last_arrival = at

    def note_wakeup(self) -> None:
        """Completions ended the wait while Trio slept.

        `AdaptiveSpin` learns how long the wait was.  A wait that began after a pause teaches
        nothing: no spin is made then, however short the wait turns out to be.
        """
        self.last_arrival = now = _now()
        if self.since and not self.after_pause:
            self.spin.slept(now - self.since)
        self.since = 0
        self.after_pause = False
