"""`PendingHandshakes`: the handshakes of a listener that wait for their clients.

If a listener has too many of them, some *give way*: their connections are reset.

Theory of operation
-------------------
A handshake is *recent* for `GRACE` seconds after its last progress: TCP accepted the connection,
or a complete Proposal arrived. Single bytes are no progress, so a client that sends one byte per
second gains nothing. Afterwards the handshake is *overdue*. If its address holds at most a
quarter of the handshakes that the largest address holds, it is *spared* for another `GRACE` seconds
first, so that a slow client does not pay for a flood from elsewhere. At most an eighth of the
limit is spared at a time: many addresses with one handshake each gain little by it.

If the listener is full, overdue handshakes give way, a batch in one pass. The oldest handshake of
the address with the most overdue handshakes gives way first. If several addresses have that many,
the address that reached the number first is chosen.

A client on this host that has announced its connection can be refused before anything is sent, and
then uses TCP. So if the listener is nearly full, such connections become TCP at once, and need not
give way later.

An address is an IPv4 address or an IPv6 /64 (`trio_smc.host.addresses.address_block`), since a host
chooses freely among the addresses of its /64.

Cost: each event (`add`, `renew`, `discard`, one handshake that gives way) takes constant time on
average, whatever the number of handshakes and addresses. Recent and spared handshakes are ordered
by their last progress, so the expired ones are always the first ones. Addresses are grouped by
their count, which changes by one at a time. They are counted only while a quarter of the limit is
reached, and until an eighth remains: a server that is not busy never needs the counts. The number
of unread bytes is queried only once per handshake that is about to give way.
"""

from __future__ import annotations

import itertools
import logging
import math
from typing import Final, Protocol

__all__ = ["GRACE", "Pending", "PendingHandshakes"]

LOGGER = logging.getLogger("trio_smc")

GRACE: Final = 1.0
"""Seconds without progress after which a handshake may give way.  Chosen; docs/security.md has
the cost of floods with this value."""
_BATCHES: Final = 32
"""The limit divided by this is the size of a batch: 16 of 512.  Chosen; docs/security.md has the
cost of a flood with this value."""
_SPARED: Final = 8
"""The limit divided by this is the largest number of spared handshakes: 64 of 512.  Chosen."""
_SMALL: Final = 4
"""An address is small if the largest address has at least this many times as many handshakes.
Chosen."""
_COUNTED: Final = 4
"""Addresses are counted from the limit divided by this on, and until half of that number remains.
Chosen: between the two there are so many events that counting all again costs each of them little.
"""

_MISSING: Final = ()


class Pending(Protocol):
    """A handshake that waits for its client.

    Attributes:
      progressed: when it last made progress, by the clock of the stack's timers.
    """

    progressed: float

    @property
    def block(self) -> str:
        """The client's address, as `trio_smc.host.addresses.address_block` groups addresses."""

    def is_silent(self) -> bool:
        """True if the client has sent nothing that this side can process."""

    def cancel(self) -> None:
        """Reset the connection."""


class _Counts:
    """Handshakes by the block of their address, and the block that has most of them."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[Pending, None]] = {}  # oldest first
        self.most = 0  # handshakes of the largest block
        self._by_count: dict[int, dict[str, None]] = {}

    def add(self, handshake: Pending) -> None:
        block = handshake.block
        in_block = self.blocks.setdefault(block, {})
        in_block[handshake] = None
        self._recount(block, len(in_block) - 1, len(in_block))

    def remove(self, handshake: Pending) -> None:
        block = handshake.block
        in_block = self.blocks[block]
        del in_block[handshake]
        self._recount(block, len(in_block) + 1, len(in_block))
        if not in_block:
            del self.blocks[block]

    def oldest_of_largest(self) -> Pending:
        """The oldest handshake of the largest block; there must be one."""
        block = next(iter(self._by_count[self.most]))
        return next(iter(self.blocks[block]))

    def _recount(self, block: str, before: int, after: int) -> None:
        """Note that a block has one handshake more or less."""
        if before:
            equals = self._by_count[before]
            del equals[block]
            if not equals:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[block] = None
        # If no block has `most` handshakes now, this block had them and has lost one.
        if after > self.most or self.most not in self._by_count:
            self.most = after


class PendingHandshakes:
    """The handshakes of one listener that wait for their clients.

    Args:
      limit: how many there may be; at the limit, overdue handshakes give way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batch = max(limit // _BATCHES, 1)
        self._most_spared = max(limit // _SPARED, 1)
        self._counted_from = max(limit // _COUNTED, 1)
        self._all: dict[Pending, None] = {}  # the oldest first
        # Both are ordered by `progressed`, which is always set to the present.
        self._recent: dict[Pending, None] = {}
        self._spared: dict[Pending, None] = {}
        self._counts: _Counts | None = None  # of all; None: there are too few
        self._overdue = _Counts()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_full(self) -> bool:
        """True if the limit is reached."""
        return len(self._all) >= self._limit

    @property
    def is_nearly_full(self) -> bool:
        """True if two batches or less are left, so that a client that can be TCP had better be."""
        return len(self._all) >= self._limit - 2 * self._batch

    def add(self, handshake: Pending) -> None:
        """Add a handshake whose connection TCP has just accepted."""
        self._all[handshake] = self._recent[handshake] = None
        if self._counts is not None:
            self._counts.add(handshake)
        elif len(self._all) >= self._counted_from:
            self._counts = _Counts()
            for each in self._all:
                self._counts.add(each)

    def renew(self, handshake: Pending, now: float) -> None:
        """Note that a handshake has made progress; one that is not pending is ignored."""
        if handshake in self._all:
            if self._recent.pop(handshake, _MISSING) is not None:
                self._remove_age(handshake)
            handshake.progressed = now
            self._recent[handshake] = None

    def discard(self, handshake: Pending) -> bool:
        """Remove a handshake; False if it was not pending."""
        if self._all.pop(handshake, _MISSING) is not None:
            return False
        if self._recent.pop(handshake, _MISSING) is not None:
            self._remove_age(handshake)
        if self._counts is not None:
            self._counts.remove(handshake)
            if len(self._all) < self._counted_from // 2:
                self._counts = None
        return True

    def give_way(self, now: float) -> float:
        """If the limit is reached, let a batch of overdue handshakes give way.

        Returns when to call again, by the same clock: ``now`` if there may be more overdue
        handshakes, infinity if the limit is not reached.
        """
        if not self.is_full:
            return math.inf
        self._find_overdue(now)
        if not self._overdue.most:
            return self._next_overdue()
        gone = 0
        for _ in range(self._batch):
            if not self._overdue.most:
                break
            handshake = self._overdue.oldest_of_largest()
            if handshake.is_silent():
                self.discard(handshake)
                handshake.cancel()
                gone += 1
            else:
                # The client has sent something that this side has not processed yet.
                self.renew(handshake, now)
        if gone:
            LOGGER.info("%d handshakes without progress were reset to make room", gone)
        return now

    def _find_overdue(self, now: float) -> None:
        """Move expired handshakes from `_recent` and `_spared` to `_spared` or `_overdue`."""
        counts = self._counts
        assert counts is not None  # the limit is reached
        for handshake in _older_than(2 * GRACE, self._spared, now):
            del self._spared[handshake]
            self._overdue.add(handshake)
        for handshake in _older_than(GRACE, self._recent, now):
            del self._recent[handshake]
            is_small = len(counts.blocks[handshake.block]) * _SMALL <= counts.most
            if is_small and len(self._spared) < self._most_spared:
                self._spared[handshake] = None
            else:
                self._overdue.add(handshake)

    def _next_overdue(self) -> float:
        """When the next handshake becomes overdue, or is found to be spared."""
        recent = next((each.progressed + GRACE for each in self._recent), math.inf)
        spared = next((each.progressed + 2 * GRACE for each in self._spared), math.inf)
        return min(recent, spared)

    def _remove_age(self, handshake: Pending) -> None:
        """Remove a handshake that is not recent."""
        if handshake in self._spared:
            del self._spared[handshake]
        else:
            self._overdue.remove(handshake)


def _older_than(age: float, handshakes: dict[Pending, None], now: float) -> list[Pending]:
    """The leading handshakes that have made no progress for ``age`` seconds."""
    return list(itertools.takewhile(lambda each: each.progressed + age <= now, handshakes))
