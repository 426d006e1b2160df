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

* After a yield another process may keep the processor for milliseconds.  If it is a busy loop, a
  peer's answer waits behind it, and a sleep would be better: Linux gives a task that wakes up the
  processor at once.  `Crowd` finds that out.

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
    "Crowd",
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
"""Nanoseconds: a yield that takes longer has perhaps delayed an answer.  Chosen: a peer alone
answers sooner."""
_LEAST_ROUND_NS: Final = 100
"""Nanoseconds: each round of a spin takes longer.  If a program stops all clocks, as tests with
freezegun do, the number of rounds ends the spin.  Chosen: sched_yield alone takes more."""
_YIELD_BACKOFF: Final = 64
"""Waits without a yield after yields that did not help.  Chosen."""
_JUDGED: Final = 16
"""Waits asleep that are compared with a long turn of other processes.  Chosen: so few cost less
than the turn."""
_SHORTER: Final = 8
"""A wait asleep that is shorter than a long turn by this factor shows that the turn delayed an
answer.  Measured: beside busy loops the factor is 87; among eight workers of one program it is
about 3 (docs/decisions.md)."""
_FORGIVEN: Final = 32
"""Long turns that are not judged after some that delayed nothing.  Chosen."""
_FIRST_CROWDED: Final = 128
"""Waits without a spin or a yield after the first long turn that delayed an answer.  Chosen."""
_MOST_CROWDED: Final = 16_384
"""Upper limit of that number.  Chosen: a turn of 4 ms is then less than 1 % of the time, and the
spin is tried again within a second."""


class Crowd:
    """Finds out if other processes keep the processor when a peer could answer.

    A yield that takes milliseconds is no proof.  Eight workers of one program, which wait for one
    another in any case, need as long, and to yield is quicker for them than to sleep.  So the
    `_JUDGED` waits that follow such a *long turn* sleep.  If most of them are much shorter than the
    turn, strangers have kept the processor: the processors are *crowded*, and more waits sleep.
    Each further long turn doubles their number.

    Args:
      judges: False: no long turn is judged, because no caller tells how long waits sleep.

    Attributes:
      left: waits that have to sleep, without a spin or a yield.
    """

    __slots__ = ("_forgiven", "_judged", "_judges", "_next", "_short_ns", "_shorter", "left")

    def __init__(self, *, judges: bool = True) -> None:
        self.left: int = 0
        self._judges = judges
        self._next = _FIRST_CROWDED  # waits asleep if the next long turn delays an answer
        self._forgiven = 0  # long turns that will not be judged
        self._judged = 0  # waits until the last long turn is judged
        self._short_ns = 0  # a wait below this length is much shorter than that turn
        self._shorter = 0  # how many of them there were

    def lost_processor(self, ns: int) -> bool:
        """Other processes have had the processor for a long turn, of ``ns`` nanoseconds.

        Returns False if the turn counts like any other.
        """
        if not self._judges:
            return False
        if self._forgiven:
            self._forgiven -= 1
            return False
        self.left = self._judged = _JUDGED
        self._short_ns = ns // _SHORTER
        self._shorter = 0
        return True

    def slept(self, ns: int) -> None:
        """One of the waits that are `left` has slept for ``ns`` nanoseconds."""
        self.left -= 1
        if not self._judged:
            return
        self._judged -= 1
        self._shorter += ns < self._short_ns
        if self._judged:
            return
        if 2 * self._shorter > _JUDGED:
            self.left = self._next
            self._next = min(2 * self._next, _MOST_CROWDED)
        else:
            self._forgiven = _FORGIVEN

    def spins_succeed(self) -> None:
        """The spin succeeds again and again: the next long turn may be the only one."""
        self._next = max(self._next // 2, _FIRST_CROWDED)


class AdaptiveSpin:
    """Polls for a moment: longer if that would succeed, less often if it fails.

    Args:
      seconds: how long to poll; 0: never.
      max_failures: failures before it is discouraged; a success cancels `_SUCCESS_WEIGHT` of them.
      retry_every: number of waits for each try while discouraged; doubles while the tries fail.
      crowd: told of long turns.

    Attributes:
      ns: how long to poll, in nanoseconds: ``seconds``, or four times that.
      discouraged: too many of the recent spins failed, so only some waits have one.
    """

    __slots__ = (
        "_crowd", "_failures", "_fruitless_yields", "_gain", "_max_failures", "_near_misses",
        "_normal_ns", "_retry_every", "_retry_now_every", "_skipped",
        "_waits_to_stretch", "_yield_backoff", "discouraged", "ns",
    )  # fmt: skip

    def __init__(
        self, seconds: float, *, max_failures: int, retry_every: int, crowd: Crowd
    ) -> None:
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
        self._crowd = crowd

    def slept(self, ns: int) -> None:
        """Note a wait of ``ns`` nanoseconds that ended in a sleep; a failed spin is included."""
        if self._crowd.left:
            self._crowd.slept(ns)
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
        if self._crowd.left:
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
        return not self._crowd.left

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
            self._lost_processor(took)

    def _lost_processor(self, ns: int) -> None:
        """Other processes have kept the processor for ``ns`` nanoseconds."""
        if not self._crowd.lost_processor(ns):
            return
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

    def rounds(self) -> range:
        """The most rounds of a spin, which ends it if all clocks are stopped."""
        return range(self.ns // _LEAST_ROUND_NS + 1)

    def spin(self, probes: Iterable[Probe], end: int) -> Probe | None:
        """Call the probes round and round; returns the first that succeeds.

        Args:
          probes: one round.  A round should contain several probes, because the read of the clock
            and the yield of the processor that follow it take longer than a probe.
          end: the time of `time.perf_counter_ns` at which the spin fails and returns None.
        """
        now = time.perf_counter_ns
        for _ in self.rounds():
            for probe in probes:
                if probe():
                    self.spin_succeeded()
                    return probe
            # If both ends share one processor, the peer could not run otherwise.
            os.sched_yield()
            moment = now()
            if moment >= end:
                self.spin_failed()
                if moment - end > _LONG_TURN_NS:
                    self._lost_processor(moment - end)
                return None
        self.spin_failed()
        return None

    def spin_succeeded(self) -> None:
        """A try succeeded."""
        if self._failures:  # and only then it may be discouraged
            self._failures = max(0, self._failures - _SUCCESS_WEIGHT)
            self.discouraged = False
            if not self._failures:
                self._crowd.spins_succeed()
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
        self._spin = AdaptiveSpin(
            seconds, max_failures=_MAX_FAILURES, retry_every=_RETRY_EVERY, crowd=Crowd(judges=False)
        )
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
            seconds,
            max_failures=_ACCEPT_MAX_FAILURES,
            retry_every=_ACCEPT_RETRY_EVERY,
            crowd=Crowd(judges=False),
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
            for _ in spin.rounds():
                if ready():
                    spin.spin_succeeded()
                    return
                if time.perf_counter_ns() >= end:
                    break
                await trio.lowlevel.cancel_shielded_checkpoint()
            spin.spin_failed()
        finally:
            self._busy = False
