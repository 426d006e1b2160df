"""Waiting awake for what a peer on this host is about to say.

Theory of operation: each message of a handshake on one host is answered within some 100 µs, and
to sleep and to be woken takes a good part of that.  Who waits alone therefore looks again and
again for a while, as `rnic.pump` does for completions.  Whoever shares its loop with other work
sleeps: that work is then what the time is for.  After several misses in a row, as when both ends
are in one process or share a processor, it is tried only now and then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import trio

__all__ = [
    "NEVER",
    "Spinner",
]


_PATIENCE: Final = 4
_SELDOM: Final = 256
_LOOKS: Final = 4
"""So often it looks before it asks for the time and yields the processor."""


class Spinner:
    """One for all handshakes of a stack.

    Args:
      seconds: how long to look; 0: never.
      drain: takes completions, which others may wait for; True: some have come.

    Attributes:
      sleeping: how many handshakes wait asleep; kept by those who wait.
    """

    __slots__ = ("_drain", "_misses", "_ns", "_tries", "sleeping")

    def __init__(self, seconds: float, drain: Callable[[], bool]) -> None:
        self.sleeping = 0
        self._ns = int(seconds * 1e9)
        self._drain = drain
        self._misses = 0
        self._tries = 0

    def until(self, ready: Callable[[], bool]) -> bool:
        """Call ``ready`` until it is true; False: sleep, it is not worth it or took too long."""
        if not self._ns or self.sleeping:
            return False
        if self._misses >= _PATIENCE:
            self._tries += 1
            if self._tries % _SELDOM:
                return False
        if trio.lowlevel.current_statistics().tasks_runnable:
            return False
        clock = time.perf_counter_ns
        end = clock() + self._ns
        while True:
            for _ in range(_LOOKS):
                if ready():
                    self._misses = 0
                    return True
            if self._drain():
                return ready()
            if clock() >= end:
                self._misses += 1
                return False
            os.sched_yield()


NEVER: Final = Spinner(0.0, lambda: False)
"""For peers of other hosts, and for whoever has no stack."""
