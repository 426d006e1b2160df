"""Waiting awake for what a peer is about to say, where sleeping would take longer than the answer.

Theory of operation.  To sleep and to be woken costs more than all else that a small message
costs, so who waits alone looks again and again for a moment first.  That pays where the peer
answers at once and has a processor of its own.  `AdaptiveSpin` finds out: after several fruitless
tries only every so many-th is made, as when both ends are in one process or share a processor, and
ever fewer while those are in vain; one that is fruitful brings it back, and for as long as one of
three is.  How long answers take depends on the machine and on the program at the other end: where
the last waits were only somewhat longer than the spin, so that each was paid for and slept through
all the same, it is made as long as they are.  Where that misses as often as it hits it only takes
the processor from the peer, and each time it takes twice as many such waits until it is tried
again.  A peer that makes pauses is not waited for so.

Where no spin is worth it, whoever has sent something may at least step aside: Linux wakes a peer
mostly on the processor of whoever woke it.  That, too, is done less often where nobody takes it up.

There are three who wait so: `rnic.pump` for completions, with `Spinner` each handshake for a
message of a peer on this host, which answers within some 100 µs, and with `Vigil` a server whose
connections are short for the next one, of which Trio's loop alone can tell.  Whoever shares its
loop with other work sleeps: that work is then what the time is for.
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
    "AdaptiveSpin",
    "Look",
    "Spinner",
    "Vigil",
]

Look = Callable[[], bool]
"""Whether something has come."""


PAUSE_NS: Final = 800_000
"""After such a pause the peer sleeps, and no spin is as long as waking it takes."""

_PAUSE_MISSES: Final = 3
"""A wait of that length counts for so many fruitless tries more: a peer that makes pauses will
make others."""

_OUTWEIGHS: Final = 2
"""So many fruitless tries does one that is fruitful outweigh: sleeping costs half a spin."""

_MOST_RARELY: Final = 1024

_STRETCH: Final = 4
"""How many times as long as asked for a spin may be: sleeping costs about as much."""

_ALIKE: Final = 4
"""So many waits in a row that a stretched spin would have met are taken for a habit."""

_MOST_ALIKE: Final = 1024
"""And so many when that was often in vain."""


_MOST_VAIN: Final = 64
_NO_TURN_NS: Final = 10_000
"""Less than anybody needs to be switched to, to take a message and to answer it."""
_LONG_TURN_NS: Final = 1_000_000
_SELDOM_ASIDE: Final = 64


class AdaptiveSpin:
    """Looks for a moment, longer where that would be met, less often where nothing comes of it.

    Args:
      seconds: how long to look; 0: never.
      patience: so many fruitless tries in a row are made all the same; a fruitful one outweighs
        two of them.
      seldom: and then each so many-th, and less and less often while those are fruitless.

    Attributes:
      ns: how long to look, in nanoseconds: ``seconds``, or four times that.
      tired: the last tries were all fruitless.
    """

    __slots__ = (
        "_aloof", "_asked", "_gain", "_habit", "_misses", "_near", "_patience", "_rarely",
        "_seldom", "_skipped", "_vain", "ns", "tired",
    )  # fmt: skip

    def __init__(self, seconds: float, *, patience: int, seldom: int) -> None:
        self.ns: int = int(seconds * 1e9)
        self._asked = self.ns
        self._near = 0
        self._habit = _ALIKE
        self._gain = 0  # hits less misses since it was stretched
        self._patience = patience
        self._seldom = seldom
        self._rarely = seldom  # how seldom that is by now
        self._skipped = 0
        self._misses = 0
        self.tired: bool = False
        self._vain = 0  # so many times in a row stepping aside brought nothing
        self._aloof = 0  # so many times more nobody steps aside

    def slept(self, ns: int) -> None:
        """A wait that no spin has met took so long, the spin included."""
        if ns > _STRETCH * self._asked:
            self._near = 0
            if self.ns > self._asked:
                self._end_stretch()
            if ns > PAUSE_NS:
                self._miss(_PAUSE_MISSES)
            return
        self._near += 1
        if self._near == self._habit:
            self.ns = _STRETCH * self._asked
            self._misses = self._gain = 0
            self.tired = False

    def _end_stretch(self) -> None:
        self.ns = self._asked
        self._near = 0
        if self._gain > 0:
            self._habit = _ALIKE
        else:
            self._habit = min(2 * self._habit, _MOST_ALIKE)
            self._miss(self._patience)

    def worthwhile(self) -> bool:
        """Whether to try now; to be asked once for each try."""
        if not self.tired:
            return True
        self._skipped += 1
        if self._skipped < self._rarely:
            return False
        self._skipped = 0
        return True

    def may_step_aside(self) -> bool:
        """Whether to `step_aside` now; to be asked once for each wait."""
        if self._aloof:
            self._aloof -= 1
            return False
        return True

    def step_aside(self) -> None:
        """Let a peer run now that waits for this processor, as it may have been woken on it.

        Where nobody did, several times in a row, it is done less often, and so it is where others
        keep the processor for long, who are no such peer.
        """
        began = time.perf_counter_ns()
        os.sched_yield()
        took = time.perf_counter_ns() - began
        if took < _NO_TURN_NS:
            self.stay()
            return
        self._vain = 0
        if took > _LONG_TURN_NS:
            self._aloof = _SELDOM_ASIDE

    def stay(self) -> None:
        """To step aside was in vain, or other tasks have to run."""
        self._vain += 1
        if self._vain >= _MOST_VAIN:
            self._aloof = _SELDOM_ASIDE

    def spin(self, looks: Iterable[Look], end: int) -> Look | None:
        """Take one look after the other, round and round; returns the first that is fruitful.

        Args:
          looks: a round: enough of them that asking for the time and yielding the processor,
            which come after each round and take longer, delay little.
          end: when `time.perf_counter_ns` gives this, it ends with None.
        """
        now = time.perf_counter_ns
        while True:
            for look in looks:
                if look():
                    self.met()
                    return look
            if now() >= end:
                self.missed()
                return None
            # With one processor for both ends the peer could not get on otherwise.
            os.sched_yield()

    def met(self) -> None:
        """A try was fruitful."""
        self._misses = max(0, self._misses - _OUTWEIGHS)
        self.tired = False
        self._rarely = self._seldom
        self._gain += 1

    def hindered(self) -> None:
        """A try was not made, as others have to run; to find that out takes a while, too."""
        self._miss(1)

    def missed(self) -> None:
        """A try was fruitless."""
        if self.tired:
            self._rarely = min(2 * self._rarely, _MOST_RARELY)
        self._gain -= 1
        self._miss(1)
        if self.tired and self.ns > self._asked:
            self._end_stretch()

    def _miss(self, count: int) -> None:
        self._misses = min(self._misses + count, self._patience)
        self.tired = self._misses == self._patience


_LOOKS: Final = 4
_SOON: Final = 8
"""So many rounds, some 50 µs, without a look at completions where the answer is about to come."""


class Spinner:
    """Spins for the handshakes of a stack: one for all of them.

    Completions that come meanwhile are taken, too.  One may end another connection, which takes
    longer than an answer that is about to come; where the peer has more to do first, that is the
    time for it.

    Args:
      seconds: how long to look; 0: never.
      drain: takes completions, which others may wait for; True: some have come.

    Attributes:
      sleeping: how many handshakes wait asleep; kept by those who wait.
    """

    __slots__ = ("_drain", "_spin", "sleeping")

    def __init__(self, seconds: float, drain: Look) -> None:
        self.sleeping: int = 0
        self._spin = AdaptiveSpin(seconds, patience=4, seldom=256)
        self._drain = drain

    def until(self, ready: Look, *, soon: bool = False) -> bool:
        """Call ``ready`` until it is true; False: sleep, it is not worth it or took too long.

        ``soon``: the answer takes the peer no longer than some 50 µs.
        """
        spin = self._spin
        if not spin.ns or self.sleeping or not spin.worthwhile():
            return False
        if trio.lowlevel.current_statistics().tasks_runnable:
            return False
        rounds = _SOON if soon else 0

        def others() -> bool:
            """Whether somebody else has to run now, as completions have come."""
            nonlocal rounds
            if rounds:
                rounds -= 1
                return False
            return self._drain() and trio.lowlevel.current_statistics().tasks_runnable > 0

        end = time.perf_counter_ns() + spin.ns
        looks = [others, *[ready] * _LOOKS]
        return spin.spin(looks, end) is ready or ready()


NEVER: Final = Spinner(0.0, lambda: False)
"""For peers of other hosts, and for whoever has no stack."""


class Vigil:
    """Keeps Trio's loop awake for a moment, where nobody but the loop can look.

    Args:
      seconds: how long; 0: never.
    """

    __slots__ = ("_kept", "_spin")

    def __init__(self, seconds: float) -> None:
        self._spin = AdaptiveSpin(seconds, patience=4, seldom=64)
        self._kept = False  # by some task

    async def keep(self, came: Look) -> None:
        """Have the loop turn until ``came`` is true, for one task at a time.  No checkpoint."""
        spin = self._spin
        if self._kept or not spin.ns or not spin.worthwhile():
            return
        self._kept = True
        end = time.perf_counter_ns() + spin.ns
        try:
            while not came():
                if time.perf_counter_ns() >= end:
                    spin.missed()
                    return
                await trio.lowlevel.cancel_shielded_checkpoint()
            spin.met()
        finally:
            self._kept = False
