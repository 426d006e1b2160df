"""Busy-waiting for a peer that is expected to answer sooner than a sleep and a wakeup would take.

Theory of operation.  To sleep and to be woken costs more than all other work for a small message,
so a task that waits alone polls for a moment first.  That pays if the peer answers at once and has
a processor of its own.  `AdaptiveSpin` finds out if it does:

* After several failures, for example because both ends are in one process or share a processor, it
  is *discouraged*: it spins only at one of many waits, and at fewer and fewer waits while these
  spins fail.  After a success it spins at each wait again, as long as at least one of three spins
  succeeds.
* How long answers take depends on the machine and on the program at the other end.  If the last
  waits were only somewhat longer than the spin, each of them cost a spin and a sleep.  Then the
  spin is *stretched* to four times its length.  A stretched spin that fails as often as it succeeds
  only takes the processor from the peer.  Then the stretch ends, and twice as many such waits are
  needed before the next one.

* If another process keeps the processor after a yield, as a busy loop does for a time slice of some
  milliseconds, the processors are *crowded*: the next waits sleep, without a spin or a yield,
  because Linux gives a task that wakes up the processor at once.  Each further time slice that is
  lost doubles the number of these waits.

If no spin is worthwhile, a task that has sent something may at least yield the processor: Linux
wakes a peer mostly on the processor of the task that woke it.  If yielding does not help, it too is
done less often.

Three parts of the package wait like this: `rnic.pump` for completions; `Spinner` in handshakes, for
a message of a peer on this host, which answers within some 100 µs; and `AcceptSpin` in a server
whose connections are short, for the next connection, which only Trio's loop can report.  The
first two do not spin while other tasks are runnable, and `AcceptSpin` lets other tasks run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import trio

__all__ = [
    "NEVER",
    "AcceptSpin",
    "AdaptiveSpin",
    "Probe",
    "Spinner",
]

Probe = Callable[[], bool]
"""True if what a task waits for has arrived."""


_SUCCESS_WEIGHT: Final = 2
"""Failures that one success cancels, so the spin pays if one of three succeeds.  When one success
cancelled all failures, each success by chance cost eight failed spins (docs/decisions.md)."""

_MAX_RETRY_EVERY: Final = 1024
"""Largest number of waits between two tries while discouraged.  Chosen (docs/decisions.md)."""

_STRETCH: Final = 4
"""Length of a stretched spin, in multiples of the normal length.  Measured: with 4 a TLS echo went
from 0.71 to 1.13 times TCP; with 8 and 16 a websocket echo became slower (docs/decisions.md)."""

_WAITS_TO_STRETCH: Final = 4
"""Consecutive waits that are shorter than a stretched spin before the spin is stretched.
Chosen."""

_MAX_WAITS_TO_STRETCH: Final = 1024
"""Upper limit of that number, which doubles when stretched spins fail.  Chosen.  When a stretch was
tried again after each fourth wait, it took a third of a websocket echo's time
(docs/decisions.md)."""


_MAX_FRUITLESS_YIELDS: Final = 64
"""Consecutive yields without a peer that ran, after which only some waits yield.  Chosen."""
_NO_TURN_NS: Final = 10_000
"""Nanoseconds: a yield that was shorter ran no peer.  Chosen: a peer needs longer to be scheduled,
to take a message and to answer it."""
_LONG_TURN_NS: Final = 1_000_000
"""Nanoseconds: a process that keeps the processor for longer is no peer that answers.  Chosen."""
_YIELD_BACKOFF: Final = 64
"""Waits without a yield after yields that did not help.  Chosen."""
_FIRST_CROWDED: Final = 128
"""Waits without a spin or a yield after a time slice of another process.  Chosen: a wait takes some
50 us, so they take longer than the time slice."""
_MOST_CROWDED: Final = 16_384
"""Upper limit of that number.  Chosen: a time slice of 4 ms is then less than 1 % of the time, and
the spin is tried again within a second."""


class AdaptiveSpin:
    """Polls for a moment: longer if that would succeed, less often if it fails.

    Args:
      seconds: how long to poll; 0: never.
      max_failures: failures before it is discouraged; a success cancels `_SUCCESS_WEIGHT` of them.
      retry_every: number of waits for each try while discouraged; doubles while the tries fail.

    Attributes:
      ns: how long to poll, in nanoseconds: ``seconds``, or four times that.
      discouraged: too many of the recent spins failed, so only some waits have one.
    """

    __slots__ = (
        "_crowded", "_crowding", "_failures", "_fruitless_yields", "_gain", "_max_failures",
        "_near_misses", "_normal_ns", "_retry_every", "_retry_now_every", "_skipped",
        "_waits_to_stretch", "_yield_backoff", "discouraged", "ns",
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
        self._crowded = 0  # waits without a spin or a yield that are left
        self._crowding = _FIRST_CROWDED  # their number after the next loss of the processor

    def slept(self, ns: int) -> None:
        """Note a wait of ``ns`` nanoseconds that ended in a sleep; a failed spin is included."""
        if self._crowded:
            self._crowded -= 1
            return
        if ns > _STRETCH * self._normal_ns:
            self._near_misses = 0
            if self.ns > self._normal_ns:
                self._end_stretch()
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
        if self._crowded:
            self._crowded -= 1
            return False
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
        return not self._crowded

    def yield_processor(self) -> None:
        """Let a peer run that waits for this processor, because it was woken on it.

        If no peer ran, several times in a row, or if another process kept the processor for long,
        `should_yield` is False for the next waits.
        """
        began = time.perf_counter_ns()
        os.sched_yield()
        took = time.perf_counter_ns() - began
        if took < _NO_TURN_NS:
            self.yield_was_useless()
            return
        self._fruitless_yields = 0
        if took > _LONG_TURN_NS:
            self._lost_processor()

    def _lost_processor(self) -> None:
        """Another process has kept the processor for a time slice."""
        self._crowded = self._crowding
        self._crowding = min(2 * self._crowding, _MOST_CROWDED)
        self._failures = self._max_failures
        self.discouraged = True
        self._skipped = self._retry_now_every  # after the crowded waits comes a try
        self.ns = self._normal_ns
        self._near_misses = 0

    def yield_was_useless(self) -> None:
        """No peer ran when the processor was yielded, or other tasks are runnable."""
        self._fruitless_yields += 1
        if self._fruitless_yields >= _MAX_FRUITLESS_YIELDS:
            self._yield_backoff = _YIELD_BACKOFF

    def spin(self, probes: Iterable[Probe], end: int) -> Probe | None:
        """Call the probes round and round; returns the first that succeeds.

        Args:
          probes: one round.  A round should contain several probes, because the read of the clock
            and the yield of the processor that follow it take longer than a probe.
          end: the time of `time.perf_counter_ns` at which the spin fails and returns None.
        """
        now = time.perf_counter_ns
        while True:
            for probe in probes:
                if probe():
                    self.spin_succeeded()
                    return probe
            # If both ends share one processor, the peer could not run otherwise.
            os.sched_yield()
            moment = now()
            if moment >= end:
                if moment - end > _LONG_TURN_NS:
                    self._lost_processor()
                else:
                    self.spin_failed()
                return None

    def spin_succeeded(self) -> None:
        """A try succeeded."""
        if self._failures:  # and only then it may be discouraged
            self._failures = max(0, self._failures - _SUCCESS_WEIGHT)
            self.discouraged = False
            if not self._failures:
                self._crowding = max(self._crowding // 2, _FIRST_CROWDED)
        self._retry_now_every = self._retry_every
        self._gain += 1

    def spin_skipped(self) -> None:
        """Not tried, because other tasks are runnable.  Counts as a failure, because the check for
        them takes as long as a short spin."""
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


_MAX_FAILURES: Final = 4
"""Failures after which handshakes are discouraged to spin.  Chosen: docs/decisions.md has a
measurement with this value only."""
_RETRY_EVERY: Final = 256
"""Handshakes for each try while discouraged.  Chosen; no measurement is recorded."""
_PROBES_PER_ROUND: Final = 4
"""Probes for each drain in a round.  Chosen; no measurement is recorded."""
_ROUNDS_BEFORE_DRAIN: Final = 8
"""Rounds without a drain, about 50 µs, if the answer is expected at once.  A drain may end another
connection, which takes 60 µs, and 37 of them were spent waiting (docs/decisions.md)."""


class Spinner:
    """Spins for all handshakes of a stack.

    Completions that arrive meanwhile are drained, too.  But a completion may end another
    connection, which takes longer than an answer that is expected at once.  So for such an answer
    the drain begins only after `_ROUNDS_BEFORE_DRAIN` rounds.

    Args:
      seconds: how long to poll; 0: never.
      drain: drains completions, for which other tasks may wait; True if there were any.

    Attributes:
      sleeping: handshakes that wait asleep; kept by those handshakes.
    """

    __slots__ = ("_drain", "_spin", "sleeping")

    def __init__(self, seconds: float, drain: Probe) -> None:
        self.sleeping: int = 0
        self._spin = AdaptiveSpin(seconds, max_failures=_MAX_FAILURES, retry_every=_RETRY_EVERY)
        self._drain = drain

    def until(self, ready: Probe, *, soon: bool = False) -> bool:
        """Call ``ready`` until it is true.  False: a spin is not worthwhile, or took too long.

        ``soon``: the peer needs at most about 50 µs to answer.
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


_ACCEPT_MAX_FAILURES: Final = 4
"""Failures after which a server is discouraged to spin for its next connection.  Chosen:
docs/decisions.md has a measurement with this value only."""
_ACCEPT_RETRY_EVERY: Final = 64
"""Connections for each try while discouraged.  Chosen; no measurement is recorded."""


class AcceptSpin:
    """Keeps Trio's loop awake for a moment, for an event that only the loop can report.

    Args:
      seconds: how long; 0: never.
    """

    __slots__ = ("_busy", "_spin")

    def __init__(self, seconds: float) -> None:
        self._spin = AdaptiveSpin(
            seconds, max_failures=_ACCEPT_MAX_FAILURES, retry_every=_ACCEPT_RETRY_EVERY
        )
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
