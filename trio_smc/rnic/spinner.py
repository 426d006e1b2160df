"""Busy-waiting for a peer that is expected to answer sooner than a sleep and a wakeup would take.

Theory of operation.  To sleep and to be woken costs more than all other work for a small message,
so a task that waits alone polls for a moment first.  That pays if the peer answers at once and has
a processor of its own.  `AdaptiveSpin` finds out if it does:

* After several failures it tries only every so many waits, for example because both ends are in
  one process or share a processor, and less and less often while the tries fail.  A success brings
  it back, and keeps it while one of three tries succeeds.
* How long answers take depends on the machine and on the program at the other end.  If the last
  waits were only somewhat longer than the spin, so that each paid for a spin and for a sleep, the
  spin becomes as long as they are.  A long spin that fails as often as it succeeds only takes the
  processor from the peer; each time it takes twice as many such waits until it is tried again.
* For a peer that makes pauses there is no spin.

If no spin is worthwhile, a task that has sent something may at least yield the processor: Linux
wakes a peer mostly on the processor of the task that woke it.  That too is done less often if it
does not help.

Three parts of the package wait like this: `rnic.pump` for completions; `Spinner` in handshakes, for
a message of a peer on this host, which answers within some 100 µs; and `AcceptSpin` in a server
whose connections are short, for the next one, of which only Trio's loop can tell.  A loop that has
other work to do sleeps instead: the time is for that work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import trio

__all__ = [
    "NEVER",
    "PAUSE_NS",
    "AcceptSpin",
    "AdaptiveSpin",
    "Probe",
    "Spinner",
]

Probe = Callable[[], bool]
"""True if what a task waits for has arrived."""


PAUSE_NS: Final = 800_000
"""Nanoseconds after which the peer sleeps.  Waking it takes longer than any spin."""

_PAUSE_FAILURES: Final = 3
"""A wait of that length counts for so many more failures: a peer that makes pauses will make
others."""

_SUCCESS_WEIGHT: Final = 2
"""Failures that one success outweighs: sleeping costs half a spin."""

_MAX_RETRY_EVERY: Final = 1024

_STRETCH: Final = 4
"""How many times its normal length a spin may last: sleeping costs about as much.  With 8 and 16 a
websocket echo became slower (docs/decisions.md)."""

_WAITS_TO_STRETCH: Final = 4
"""Consecutive waits that a stretched spin would have covered before the spin is stretched."""

_MAX_WAITS_TO_STRETCH: Final = 1024
"""The same, after stretched spins that failed."""


_MAX_FRUITLESS_YIELDS: Final = 64
_NO_TURN_NS: Final = 10_000
"""Nanoseconds: less than a peer needs to be scheduled, to take a message and to answer it."""
_LONG_TURN_NS: Final = 1_000_000
"""Nanoseconds: a task that keeps the processor for so long is no peer."""
_YIELD_BACKOFF: Final = 64


class AdaptiveSpin:
    """Polls for a moment: longer if that would succeed, less often if it fails.

    Args:
      seconds: how long to poll; 0: never.
      max_failures: consecutive failures before it is discouraged; one success outweighs two.
      retry_every: when discouraged, it tries at every so-many-th wait, and less and less often
        while the tries fail.

    Attributes:
      ns: how long to poll, in nanoseconds: ``seconds``, or four times that.
      discouraged: recent spins all failed.
    """

    __slots__ = (
        "_failures", "_fruitless_yields", "_gain", "_max_failures", "_near_misses", "_normal_ns",
        "_retry_every", "_retry_now_every", "_skipped", "_waits_to_stretch", "_yield_backoff",
        "discouraged", "ns",
    )  # fmt: skip

    def __init__(self, seconds: float, *, max_failures: int, retry_every: int) -> None:
        self.ns: int = int(seconds * 1e9)
        self._normal_ns = self.ns
        self._near_misses = 0  # consecutive waits that a stretched spin would have covered
        self._waits_to_stretch = _WAITS_TO_STRETCH
        self._gain = 0  # successes less failures since the spin was stretched
        self._max_failures = max_failures
        self._retry_every = retry_every
        self._retry_now_every = retry_every  # grows while the tries fail
        self._skipped = 0  # waits since the last try
        self._failures = 0
        self.discouraged: bool = False
        self._fruitless_yields = 0  # consecutive
        self._yield_backoff = 0  # waits until the next yield

    def slept(self, ns: int) -> None:
        """Note a wait of ``ns`` nanoseconds that ended in a sleep; a failed spin is included."""
        if ns > _STRETCH * self._normal_ns:
            self._near_misses = 0
            if self.ns > self._normal_ns:
                self._end_stretch()
            if ns > PAUSE_NS:
                self._note_failures(_PAUSE_FAILURES)
            return
        self._near_misses += 1
        if self._near_misses == self._waits_to_stretch:
            self.ns = _STRETCH * self._normal_ns
            self._failures = self._gain = 0
            self.discouraged = False

    def _end_stretch(self) -> None:
        self.ns = self._normal_ns
        self._near_misses = 0
        if self._gain > 0:
            self._waits_to_stretch = _WAITS_TO_STRETCH
        else:
            self._waits_to_stretch = min(2 * self._waits_to_stretch, _MAX_WAITS_TO_STRETCH)
            self._note_failures(self._max_failures)

    def should_spin(self) -> bool:
        """True if a try is worthwhile now.  To be called once for each wait: it counts them."""
        if not self.discouraged:
            return True
        self._skipped += 1
        if self._skipped < self._retry_now_every:
            return False
        self._skipped = 0
        return True

    def should_yield(self) -> bool:
        """True if `yield_processor` is worthwhile now.  To be called once for each wait."""
        if self._yield_backoff:
            self._yield_backoff -= 1
            return False
        return True

    def yield_processor(self) -> None:
        """Let a peer run that waits for this processor, because it was woken on it.

        If no peer ran, several times in a row, it is done less often; and so it is if another
        process keeps the processor for long.
        """
        began = time.perf_counter_ns()
        os.sched_yield()
        took = time.perf_counter_ns() - began
        if took < _NO_TURN_NS:
            self.yield_was_useless()
            return
        self._fruitless_yields = 0
        if took > _LONG_TURN_NS:
            self._yield_backoff = _YIELD_BACKOFF

    def yield_was_useless(self) -> None:
        """No peer ran when the processor was yielded, or other tasks are runnable."""
        self._fruitless_yields += 1
        if self._fruitless_yields >= _MAX_FRUITLESS_YIELDS:
            self._yield_backoff = _YIELD_BACKOFF

    def spin(self, probes: Iterable[Probe], end: int) -> Probe | None:
        """Call the probes round and round; returns the first that succeeds.

        Args:
          probes: one round.  It should be long enough: the look at the clock and the yield of the
            processor that follow a round take longer than a probe.
          end: the time of `time.perf_counter_ns` at which the spin fails and returns None.
        """
        now = time.perf_counter_ns
        while True:
            for probe in probes:
                if probe():
                    self.spin_succeeded()
                    return probe
            if now() >= end:
                self.spin_failed()
                return None
            # If both ends share one processor, the peer could not run otherwise.
            os.sched_yield()

    def spin_succeeded(self) -> None:
        """A try succeeded."""
        self._failures = max(0, self._failures - _SUCCESS_WEIGHT)
        self.discouraged = False
        self._retry_now_every = self._retry_every
        self._gain += 1

    def spin_skipped(self) -> None:
        """Not tried, because other tasks are runnable.  To find that out takes time as well."""
        self._note_failures(1)

    def spin_failed(self) -> None:
        """A try failed."""
        if self.discouraged:
            self._retry_now_every = min(2 * self._retry_now_every, _MAX_RETRY_EVERY)
        self._gain -= 1
        self._note_failures(1)
        if self.discouraged and self.ns > self._normal_ns:
            self._end_stretch()

    def _note_failures(self, count: int) -> None:
        self._failures = min(self._failures + count, self._max_failures)
        self.discouraged = self._failures == self._max_failures


_PROBES_PER_ROUND: Final = 4
_ROUNDS_BEFORE_DRAIN: Final = 8
"""Rounds, some 50 µs, without a drain, if the answer is expected any moment."""


class Spinner:
    """Spins for all handshakes of a stack.

    Completions that arrive meanwhile are drained, too.  A completion may end another connection,
    which takes longer than an answer that is expected any moment; if the peer has more to do before
    it answers, there is time for that.

    Args:
      seconds: how long to poll; 0: never.
      drain: drains completions, for which other tasks may wait; True if there were any.

    Attributes:
      sleeping: handshakes that wait asleep; kept by those handshakes.
    """

    __slots__ = ("_drain", "_spin", "sleeping")

    def __init__(self, seconds: float, drain: Probe) -> None:
        self.sleeping: int = 0
        self._spin = AdaptiveSpin(seconds, max_failures=4, retry_every=256)
        self._drain = drain

    def until(self, ready: Probe, *, soon: bool = False) -> bool:
        """Call ``ready`` until it is true.  False: a spin is not worthwhile, or took too long.

        ``soon``: the peer needs no longer than some 50 µs to answer.
        """
        spin = self._spin
        if not spin.ns or self.sleeping or not spin.should_spin():
            return False
        if trio.lowlevel.current_statistics().tasks_runnable:
            return False
        rounds = _ROUNDS_BEFORE_DRAIN if soon else 0

        def others_are_runnable() -> bool:
            """Drain; True if that woke other tasks, which have to run now."""
            nonlocal rounds
            if rounds:
                rounds -= 1
                return False
            return self._drain() and trio.lowlevel.current_statistics().tasks_runnable > 0

        end = time.perf_counter_ns() + spin.ns
        probes = [others_are_runnable, *[ready] * _PROBES_PER_ROUND]
        return spin.spin(probes, end) is ready or ready()


NEVER: Final = Spinner(0.0, lambda: False)
"""For peers of other hosts, and for connections without a stack."""


class AcceptSpin:
    """Keeps Trio's loop awake for a moment, for an event that only the loop can report.

    Args:
      seconds: how long; 0: never.
    """

    __slots__ = ("_busy", "_spin")

    def __init__(self, seconds: float) -> None:
        self._spin = AdaptiveSpin(seconds, max_failures=4, retry_every=64)
        self._busy = False

    async def spin(self, ready: Probe) -> None:
        """Yield to the loop until ``ready`` is true, for one task at a time.

        Not a checkpoint: it cannot be cancelled.
        """
        spin = self._spin
        if self._busy or not spin.ns or not spin.should_spin():
            return
        self._busy = True
        end = time.perf_counter_ns() + spin.ns
        try:
            while not ready():
                if time.perf_counter_ns() >= end:
                    spin.spin_failed()
                    return
                await trio.lowlevel.cancel_shielded_checkpoint()
            spin.spin_succeeded()
        finally:
            self._busy = False
