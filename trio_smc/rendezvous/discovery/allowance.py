"""Limits for the work that a client's lookups do in the directories of other members of a group.

Theory of operation
-------------------
A lookup reads directories on the thread of the event loop, and each member may fill its own ones
with any names and change them all the time.  So a lookup has a limit for each other member: a
*share*, which one member cannot take from another.  Beyond its share a member takes from a *pool*,
which all members have in common.  The pool is for members with hundreds of listeners.  After a
lookup that has used the pool, the next lookups have an empty pool for ten times as long as that
lookup took.  So the pool takes at most a tenth of the time, even if members change their
directories all the time.

This user's own directories have no limit here.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from trio_smc._base.timers import Timers
from trio_smc.host.real_time import now

__all__ = [
    "DIRECTORY_COSTS",
    "LISTENER_COSTS",
    "NAMESPACE_COSTS",
    "POOL",
    "SHARE",
    "Allowance",
    "Allowances",
]

NAMESPACE_COSTS: Final = 48
"""The cost of the directory of a network namespace that a lookup opens: 17 µs.  The unit is one
name of a listing, which takes 0.35 µs: `os.scandir` of 4,096 names on a tmpfs."""
DIRECTORY_COSTS: Final = 20
"""The cost of the directory of an address that a lookup tries to open: 7 µs, missing or not."""
LISTENER_COSTS: Final = 32
"""The cost of a connection to the socket of a listener, alive or dead: 12 µs."""
SHARE: Final = 512
"""The share of each other member in one lookup.  Chosen: 0.2 ms, or ten listeners."""
POOL: Final = 4096
"""The pool of one lookup.  Chosen: 2 ms, or a hundred listeners of one address."""
_POOL_INTERVALS: Final = 10
"""The pool takes at most one tenth of the time.  Chosen, as in `discovery.names`."""


class Allowance:
    """The work that one lookup may still do in the directories of other members.

    Args:
      pool: for all members together, beyond the share of each.
      listeners: of each other member that the lookup may connect to.

    Attributes:
      used_pool: True if a member has used a part of the pool, or would have if it were not empty.
    """

    __slots__ = ("_listeners", "_most_listeners", "_pool", "_shares", "_user", "used_pool")

    def __init__(self, pool: int, listeners: int) -> None:
        self._pool = pool
        self._most_listeners = listeners
        self._listeners: dict[int | None, int] = {}
        self._shares: dict[int | None, int] = {}
        self._user = os.geteuid()
        self.used_pool: bool = False

    def take(self, owner: int | None, cost: int) -> bool:
        """True if work in a directory of this owner is within the limits; then it is counted."""
        if owner == self._user:
            return True
        share = self._shares.get(owner, SHARE)
        if cost <= share:
            self._shares[owner] = share - cost
            return True
        self.used_pool = True
        if cost > self._pool:
            return False
        self._pool -= cost
        return True

    def take_listener(self, owner: int | None) -> bool:
        """As `take`, for a connection to the socket of a listener."""
        if owner == self._user:
            return True
        count = self._listeners.get(owner, 0)
        self._listeners[owner] = count + 1
        return count < self._most_listeners and self.take(owner, LISTENER_COSTS)


class Allowances:
    """The allowances of all lookups of one stack.

    Args:
      timers: of the stack; None: it has none.
    """

    def __init__(self, timers: Timers | None) -> None:
        self._timers = timers
        self._not_before = 0.0  # earliest time of the next lookup with a pool

    def grant(self, began: float, listeners: int = sys.maxsize) -> Allowance:
        """The allowance of a lookup.

        began: its time, by the clock of the timers.
        listeners: as for `Allowance`.
        """
        return Allowance(POOL if began >= self._not_before else 0, listeners)

    def settle(self, allowance: Allowance, began: float) -> None:
        """End a lookup that began at this time."""
        if allowance.used_pool and began >= self._not_before:
            moment = now(self._timers)
            self._not_before = moment + _POOL_INTERVALS * (moment - began)
