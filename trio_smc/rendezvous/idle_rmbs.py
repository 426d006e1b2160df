"""RMBs that nobody uses: kept a while, then deleted (RFC 7609, 3.5.5.2.2).

Theory of operation
-------------------
An RMB without an element in use stays for the next connections; a program whose connections
come in bursts finds it again.  Only when it was empty for a minute it is taken out of the pool
and named in a DELETE RKEY, and its memory is freed when the peer has replied, be it negatively.
The last RMB of a size stays as long as a group without connections would: a size that was used
once is likely to be used again, but a large one must not pin its memory for ever.  When the
group has no connections at all it soon goes as a whole, and nothing is deleted piece by piece.

An RMB that is out of the pool never comes back: a reply that was lost with its link leaves open
whether the peer still knows it.  Its deletion is asked for again at the next look.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous.rkeys import MAX_DELETED

if TYPE_CHECKING:
    from trio_smc.datapath.rmb import Rmb
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.own_rmbs import OwnRmbs
    from trio_smc.rendezvous.timers import Timer

__all__ = ["RMB_IDLE", "IdleRmbs"]

LOGGER = logging.getLogger("trio_smc.link_group")

RMB_IDLE: Final = 60.0
"""Seconds an RMB stays without users at least: a burst that comes every minute finds it again,
and the memory of a peak is free soon after it."""

_LOOK_EVERY: Final = 15.0
"""Seconds between two looks: how much longer than needed an RMB may stay."""


class IdleRmbs:
    """When this side's RMBs of one link group are deleted."""

    def __init__(self, group: LinkGroup, own: OwnRmbs) -> None:
        self._group = group
        self._own = own
        self._empty_since: dict[Rmb, float] = {}
        # Out of the pool; the first of them may be named in a DELETE RKEY under way.
        self._leaving: dict[Rmb, None] = {}
        self._asking = False
        self._timer: Timer | None = None
        self._closed = False

    @property
    def leaving(self) -> tuple[Rmb, ...]:
        """RMBs that are out of the pool; the peer may know them still."""
        return tuple(self._leaving)

    def emptied(self, rmb: Rmb) -> None:
        """Nobody uses an RMB of the pool any more."""
        self._empty_since[rmb] = self._group.timers.now()
        self._look_later()

    def used(self, rmb: Rmb) -> None:
        """An element of an RMB was handed out."""
        self._empty_since.pop(rmb, None)
        if self._empty_since:
            self._look_later()

    def close(self) -> None:
        """The group ends; the memory is `OwnRmbs`'s to free."""
        self._closed = True
        self._empty_since.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._group.timers.call_later(_LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._timer = None
        for rmb in self._due():
            self._own.pool.remove(rmb)
            del self._empty_since[rmb]
            self._leaving[rmb] = None
        self._delete()
        # A group without connections goes as a whole; with the next one, `used` looks again.
        if self._leaving or (self._empty_since and self._group.connections):
            self._look_later()

    def _due(self) -> list[Rmb]:
        """Which RMBs have been empty long enough; of one size the newest go first."""
        now, group = self._group.timers.now(), self._group
        if not group.connections:
            return []
        longest = max(RMB_IDLE, group.config.link_group_idle)
        left = Counter(rmb.element_size for rmb in self._own.pool.rmbs)
        due = []
        for rmb in reversed(self._own.pool.rmbs):
            since = self._empty_since.get(rmb)
            patience = RMB_IDLE if left[rmb.element_size] > 1 else longest
            if since is not None and now - since >= patience:
                left[rmb.element_size] -= 1
                due.append(rmb)
        return due

    def _delete(self) -> None:
        batch = tuple(islice(self._leaving, MAX_DELETED))
        if batch and not self._asking and self._group.usable:
            self._asking = True
            self._group.rkeys.delete(batch, lambda replied: self._deleted(batch, replied))

    def _deleted(self, batch: tuple[Rmb, ...], replied: bool) -> None:
        self._asking = False
        if self._closed:
            return
        if replied:
            for rmb in batch:
                del self._leaving[rmb]
                self._own.free(rmb)
            self._delete()
