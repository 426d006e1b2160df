"""Links that fail, are left, and carry on, for `tests.campaigns.datapath`.

A link fails with everything in flight: some of it arrives, a write perhaps in part, and of what
arrived some is never known to have. Completions of a link that is not used any more come later,
or never. A link that is left in order works until nothing is in flight on it.
"""

from __future__ import annotations

import random

from tests.datapath.datapath_pair import FakeChannel, Pair
from trio_smc.failover.replay import hold

__all__ = ["Moves", "crowd"]


def crowd(channel: FakeChannel, rng: random.Random) -> None:
    """Make the link narrow, now and then, or one that needs no completions."""
    if rng.random() < 0.4:
        channel.slots = rng.randint(1, 5)
    if rng.random() < 0.4:
        channel.work = rng.randint(3, 12)
    if rng.random() < 0.3:
        channel.room = rng.randint(1, 5000)
    channel.instant = rng.random() < 0.4
    if rng.random() < 0.3:
        channel.doubt = rng.randint(1, 20)
        channel.arrives = rng.random() < 0.6


class Moves:
    """Moves both sides of a pair between links, now and then.

    Attributes:
      old: links that are not used any more.
      failures: links that failed.
      departures: links that were left in order.
    """

    def __init__(self, pair: Pair, rng: random.Random, patience: int) -> None:
        self._pair = pair
        self._rng = rng
        self._patience = patience
        self._held: list[object] = [None, None]
        self.old: list[FakeChannel] = []
        self.failures = 0
        self.departures = 0
        pair.mend = self._mend  # type: ignore[method-assign]

    def _mend(self, side: int) -> None:
        self._held[side] = None
        self.failures += 1
        self._pair.channels[side].deliver_announced()
        self._pair.channels[side].queue.clear()
        self._change(side)

    def step(self) -> None:
        """Something happens to a link, or nothing."""
        rng = self._rng
        if rng.randrange(self._patience) == 0:
            side = rng.randrange(2)
            if rng.random() < 0.7:
                self.fail(side)
            else:
                self.leave(side)
        for side in (0, 1):
            if self._pair.channels[side].dead and rng.random() < 0.2:
                self._mend(side)
        if self.old and rng.random() < 0.1:
            rng.choice(self.old).complete(rng.randint(1, 3))

    def fail(self, side: int) -> None:
        """The link that ``side`` sends on fails in the middle of its work."""
        rng, channel = self._rng, self._pair.channels[side]
        if channel.dead:
            self._mend(side)
            return
        channel.instant = False
        channel.deliver(rng.choice([0, 0, 1, 2, 5]))
        if channel.queue and channel.queue[0][0] == "write" and rng.random() < 0.5:
            kind, data, start = channel.queue[0]
            assert isinstance(data, memoryview)
            part = rng.randint(0, len(data) - 1)
            channel.queue[0] = (kind, data[:part], start)
            channel.deliver(1)
        channel.complete(rng.choice([0, 0, 1, 5]))
        # What came back may have moved it already, or ended it.
        channel = self._pair.channels[side]
        channel.deliver_announced()
        channel.queue.clear()
        self._held[side] = None
        self.failures += 1
        self._change(side)

    def leave(self, side: int) -> None:
        """The link that ``side`` sends on is left in order; it works until then."""
        if self._held[side] is not None:
            return
        token = self._held[side] = object()

        def ready() -> None:
            assert self._held[side] is token
            self._held[side] = None
            channel = self._pair.channels[side]
            if self._pair.connections[side].channel is not None:
                assert all(kind != "write" for kind, _, _ in channel.queue), "writes are in flight"
            self.departures += 1
            self._change(side)

        hold(self._pair.connections[side], ready)

    def _change(self, side: int) -> None:
        # A peer that misses a message takes what the old link has brought first (4.6.1).
        self._pair.channels[side].deliver_announced()
        self.old.append(self._pair.next_channel(side))
        crowd(self._pair.channels[side], self._rng)
        self._pair.move(side)
