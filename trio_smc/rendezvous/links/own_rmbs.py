"""This side's RMBs in one link group: created on demand, registered on every link.

A new RMB of an established group is announced to the peer by CONFIRM RKEY before a CLC message
names one of its elements (RFC 7609, 3.5.5.2.1). The first RMB of a group needs no CONFIRM RKEY,
because the CLC messages of the first contact carry its RToken.

During a burst of connections, a spare RMB is created as soon as the last free element of a size is
taken, before a connection needs one. So one connection of a burst, and not all, waits for the
peer's reply.

Theory of operation: idle RMBs
------------------------------
An RMB without an element in use is kept for the next connections, which may come in bursts. When
the RMB has been empty for a minute, it is removed from the pool and named in a DELETE RKEY. Its
memory is freed when the peer has replied, even negatively. The last RMB of a size is kept as long
as a group without connections would be: the size is likely to be used again, but a large RMB must
not hold its memory for long. If a group has no connections, none of its RMBs is deleted, because
the group soon ends as a whole.

An RMB that was removed from the pool is never used again: if the reply is lost with its link, it is
unknown whether the peer still knows the RMB. The next check repeats the DELETE RKEY. An RMB is also
deleted in this way if its CONFIRM RKEY had no reply and was then refused over another link, because
the peer may have processed the first message.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc.datapath.rmb import MAX_RMBS, Rmb, Rmbe, RmbPool, rmb_elements
from trio_smc.host.heap import HEAP
from trio_smc.rendezvous.links.peer_rmbs import RToken
from trio_smc.wire.fields import rmbe_size_for

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer, Timers
    from trio_smc.config.config import Config
    from trio_smc.rendezvous.links.link import Link
    from trio_smc.rnic.verbs import MemoryRegion, Rnic

__all__ = [
    "BURST_GAP",
    "MAX_DELETED",
    "RMB_IDLE",
    "OwnRmbs",
    "PeerKnowledge",
    "RmbAnnouncer",
    "RmbOwner",
]


LOGGER = logging.getLogger("trio_smc.link_group")

_Done = Callable[["Rmbe | None"], None]
_Waiter = tuple[_Done, "Link | None"]
"""A callback, and the link of its connection."""

BURST_GAP: Final = 1.0
"""The longest time in seconds between two connections of a burst. Chosen, far above the time that
creating an RMB takes, so that a spare RMB is ready. Less frequent connections can wait for the
peer's reply."""

_RESERVED_RMBS: Final = 16
"""RMBs that are never created as spares: one of each of the 16 sizes (A.2.3)."""


MAX_DELETED: Final = 8
"""RMBs that one DELETE RKEY names (RFC 7609, A.3.7)."""

RMB_IDLE: Final = 60.0
"""Seconds that an RMB without users is kept. Chosen: if bursts come once a minute, they find their
RMBs, and the memory of a peak is freed soon."""

_CHECK_INTERVAL: Final = 15.0
"""Seconds between two checks, and so the time that an RMB may be kept longer. Chosen."""


class PeerKnowledge(enum.Enum):
    """The outcome of announcing a new RMB to the peer."""

    KNOWN = enum.auto()
    """The peer knows the RMB on all links."""
    REFUSED = enum.auto()
    """The peer does not know the RMB."""
    IN_DOUBT = enum.auto()
    """The peer refused the RMB, but may have accepted an earlier request whose reply was lost."""


class RmbAnnouncer(Protocol):
    """Announces RMBs to the peer; calls ``finished`` with the outcome."""

    def confirm(
        self, rmb: Rmb, finished: Callable[[PeerKnowledge], None], over: Link | None
    ) -> None:
        """Announce a new RMB (3.5.5.2.1), over the link ``over`` if that is usable (A.3.5)."""

    def delete(self, rmbs: Sequence[Rmb], finished: Callable[[bool], None]) -> None:
        """Delete up to `MAX_DELETED` unused RMBs (3.5.5.2.2).

        ``finished`` is called with True if the peer replied.
        """


class RmbOwner(Protocol):
    """The group, as seen by its RMBs. The module of the group imports this one."""

    rnic: Rnic
    config: Config
    timers: Timers

    @property
    def connections(self) -> Mapping[int, object]:
        """The connections of the group, by alert token."""

    @property
    def forming(self) -> bool:
        """True during the first contact."""

    @property
    def usable(self) -> bool:
        """True if messages can be sent to the peer."""

    @property
    def rkey_exchanges(self) -> RmbAnnouncer:
        """Announces RMBs to the peer."""


class OwnRmbs:
    """The RMBs of this side of one link group.

    Attributes:
      pool: the RMBs whose elements may be handed out; the peer knows them on all links.
      eye_catcher: True if the elements of the group, also the peer's, begin with an eye catcher.
    """

    def __init__(self, owner: RmbOwner) -> None:
        self._owner = owner
        self.pool: RmbPool = RmbPool()
        self.eye_catcher: bool = owner.config.rmbe_eye_catcher
        # The links on which each RMB is registered.
        self._links: dict[int, Link] = {}
        # Registrations by RMB and link number: an RKey belongs to one protection domain.
        self._regions: dict[Rmb, dict[int, MemoryRegion]] = {}
        # By element size of an RMB under way: the callbacks that wait for it; none for a spare RMB.
        self._waiting: dict[int, list[_Waiter]] = {}
        self._last_request: dict[int, float] = {}
        self._idle = IdleRmbs(owner, self)
        self._wiping: Timer | None = None

    def __len__(self) -> int:
        """The number of RMBs, including those being added or deleted."""
        return len(self._regions)

    def __iter__(self) -> Iterator[Rmb]:
        return iter(self._regions)

    @property
    def leaving(self) -> tuple[Rmb, ...]:
        """The RMBs removed from the pool whose deletion the peer has not confirmed."""
        return self._idle.leaving

    @property
    def busy(self) -> bool:
        """True if a connection waits for a new RMB."""
        return any(self._waiting.values())

    def has_room(self, size: int) -> bool:
        """True if an element of ``size`` bytes is free or can be created (at most 255 RMBs)."""
        if len(self._regions) < MAX_RMBS:
            return True
        size = rmbe_size_for(size)
        return size in self._waiting or self.pool.has_free(size)

    def take_free(self, size: int) -> Rmbe | None:
        """An element of ``size`` bytes that is free and has its pages; None: `request` one."""
        size = rmbe_size_for(size)
        try:
            rmbe = self.pool.take(size)
        except OSError:
            return None
        if rmbe is not None:
            self._idle.on_used(rmbe.rmb)
            self._make_ahead(size)
        return rmbe

    def request(self, size: int, done: _Done, over: Link | None = None) -> None:
        """Call ``done`` with an element of ``size`` bytes or with None, now or later.

        ``over``: the link that the connection will use.
        """
        size = rmbe_size_for(size)
        self._serve(size, [(done, over)])

    def enable_eye_catchers(self) -> None:
        """Use eye catchers, because the peer does. No data may have arrived yet."""
        self.eye_catcher = True
        for rmb in self._regions:
            rmb.enable_eye_catchers()

    def region(self, rmb: Rmb, link: Link) -> MemoryRegion:
        """The registration of ``rmb`` on ``link``: its RKey and address."""
        return self._regions[rmb][link.number]

    def tokens(self, rmb: Rmb) -> dict[int, RToken]:
        """The RTokens of ``rmb``, by link number."""
        regions = self._regions[rmb].items()
        return {number: RToken(region.rkey, region.address) for number, region in regions}

    def known_to_peer(self) -> tuple[Rmb, ...]:
        """The RMBs that the peer may know, including those being deleted."""
        return self.pool.rmbs + self.leaving

    def release(self, rmbe: Rmbe, used: int | None) -> None:
        """Release an element; ``used``: the bytes of its ring that were written, None: unknown."""
        if rmbe.rmb in self._regions:
            self.pool.release(rmbe, used)
            if self.pool.is_empty(rmbe.rmb):
                self._idle.on_empty(rmbe.rmb)
            self._wipe_later()

    def _wipe_later(self) -> None:
        if self.pool.has_dirty and self._wiping is None:
            self._wiping = self._owner.timers.call_later(0.0, self._wipe)

    def _wipe(self) -> None:
        self._wiping = None
        for rmb in set(self.pool.wipe_some(self._owner.timers.now)):
            if self.pool.is_empty(rmb):
                self._idle.on_empty(rmb)
        self._wipe_later()

    def free(self, rmb: Rmb) -> None:
        """Revoke the RKeys of an RMB that is not in the pool and free its memory."""
        for region in self._regions.pop(rmb).values():
            region.close()
        rmb.memory.close()

    # --- links ---------------------------------------------------------------------------------

    def register_on(self, link: Link) -> None:
        """See `Rkeys.register_on`."""
        regions: dict[Rmb, MemoryRegion] = {}
        try:
            for rmb in self._regions:
                regions[rmb] = link.pd.register(rmb.memory)
        except BaseException:
            for region in regions.values():
                region.close()
            raise
        self._links[link.number] = link
        for rmb, region in regions.items():
            self._regions[rmb][link.number] = region

    def drop_link(self, number: int) -> None:
        """See `Rkeys.drop_link`."""
        self._links.pop(number, None)
        for regions in self._regions.values():
            region = regions.pop(number, None)
            if region is not None:
                region.close()

    def renumber(self, old: int, new: int) -> None:
        """Note the number that the server has assigned to a link."""
        self._links[new] = self._links.pop(old)
        for regions in self._regions.values():
            regions[new] = regions.pop(old)

    # --- the end of the group --------------------------------------------------------------------

    def close_regions(self) -> None:
        """Revoke every RKey, so that the peer can no longer write."""
        self._idle.close()
        self.pool.close()
        if self._wiping is not None:
            self._wiping.cancel()
            self._wiping = None
        for regions in self._regions.values():
            for region in regions.values():
                region.close()

    def free_one(self) -> bool:
        """Free the memory of one RMB that no connection uses; False if none was left."""
        if not self._regions:
            self._links.clear()
            return False
        rmb, _ = self._regions.popitem()
        rmb.memory.close()
        return True

    # --- new RMBs -----------------------------------------------------------------------------

    def _serve(self, size: int, waiting: list[_Waiter]) -> None:
        """Give each callback an element; if there are too few, the others wait for one more RMB.

        If the pages of an element cannot be allocated, its callback gets None at once: for another
        element there would be no pages either.
        """
        taken: list[Rmbe | None] = []
        for _ in waiting:
            try:
                rmbe = self.pool.take(size)
            except OSError as error:
                self._log_refusal(size, error)
                taken.append(None)
                continue
            if rmbe is None:
                break
            self._idle.on_used(rmbe.rmb)
            taken.append(rmbe)
        rest = waiting[len(taken) :]
        if rest:
            if size in self._waiting:
                self._waiting[size] += rest
            else:
                self._add_rmb(size, rest)
        elif taken:
            self._make_ahead(size)
        # Last: the messages sent above may have failed a link, and ``done`` must not name that one.
        for (done, _), each in zip(waiting, taken, strict=False):
            done(each)

    def _take_first(self, size: int) -> Rmbe | None:
        """An element of an RMB that was just added; None if its pages cannot be allocated."""
        try:
            return self.pool.take(size)
        except OSError as error:
            self._log_refusal(size, error)
            return None

    def _log_refusal(self, size: int, error: OSError) -> None:
        LOGGER.warning("%r: no memory for an element of %d bytes: %s", self._owner, size, error)

    def _make_ahead(self, size: int) -> None:
        now = self._owner.timers.now()
        before = self._last_request.get(size, -math.inf)
        self._last_request[size] = now
        if (
            now - before < BURST_GAP
            and not self._waiting  # one at a time
            and not self.pool.has_free(size)
            and len(self._regions) < MAX_RMBS - _RESERVED_RMBS
            and self._owner.usable
        ):
            self._add_rmb(size, [])

    def _add_rmb(self, size: int, waiting: list[_Waiter]) -> None:
        owner = self._owner
        try:
            if len(self._regions) >= MAX_RMBS:
                raise OverflowError(f"a link group has at most {MAX_RMBS} RMBs")
            rmb = self._make_rmb(size)
        except (OSError, OverflowError) as error:
            LOGGER.warning("%r: no new RMB of %d-byte elements: %s", owner, size, error)
            for done, _ in waiting:
                done(None)
            return
        if owner.forming:
            self.pool.add(rmb)
            for done, _ in waiting:
                done(self._take_first(size))
            return
        self._waiting[size] = waiting
        over = waiting[0][1] if waiting else None  # of the first connection (A.3.5)
        owner.rkey_exchanges.confirm(rmb, lambda known: self._confirmed(rmb, known), over)

    def _make_rmb(self, size: int) -> Rmb:
        owner = self._owner
        count = rmb_elements(size, owner.rnic.kind)
        HEAP.raise_for(size)  # a read returns at most an element
        memory = owner.rnic.alloc_memory(size * count)
        regions: dict[int, MemoryRegion] = {}
        try:
            for link in self._links.values():
                if link.state != "DOWN":
                    regions[link.number] = link.pd.register(memory)
        except BaseException:
            for region in regions.values():
                region.close()
            memory.close()
            raise
        rmb = Rmb(memory, size, count, eye_catcher=self.eye_catcher)
        self._regions[rmb] = regions
        return rmb

    def _confirmed(self, rmb: Rmb, known: PeerKnowledge) -> None:
        waiting = self._waiting.pop(rmb.element_size)
        if known is not PeerKnowledge.KNOWN:
            if rmb not in self._regions:
                pass  # the group has ended, and has freed the RMB
            elif known is PeerKnowledge.IN_DOUBT:
                self._idle.delete_later(rmb)
            else:
                self.free(rmb)
            for done, _ in waiting:
                done(None)
            return
        self.pool.add(rmb)
        self._idle.on_empty(rmb)  # an element of a spare RMB may be taken only much later
        self._serve(rmb.element_size, waiting)


class IdleRmbs:
    """Decides when this side's RMBs of one link group are deleted."""

    def __init__(self, owner: RmbOwner, own: OwnRmbs) -> None:
        self._owner = owner
        self._own = own
        self._empty_since: dict[Rmb, float] = {}
        # RMBs removed from the pool, oldest first. A DELETE RKEY under way names the first of them.
        self._leaving: dict[Rmb, None] = {}
        self._deleting = False
        self._timer: Timer | None = None
        self._closed = False

    @property
    def leaving(self) -> tuple[Rmb, ...]:
        """RMBs removed from the pool that the peer may still know."""
        return tuple(self._leaving)

    def on_empty(self, rmb: Rmb) -> None:
        """No element of an RMB of the pool is in use any more."""
        self._empty_since[rmb] = self._owner.timers.now()
        self._check_later()

    def on_used(self, rmb: Rmb) -> None:
        """An element of an RMB was handed out."""
        self._empty_since.pop(rmb, None)
        if self._empty_since:
            self._check_later()

    def delete_later(self, rmb: Rmb) -> None:
        """Delete an RMB that the peer refused, but may know."""
        self._leaving[rmb] = None
        self._check_later()

    def close(self) -> None:
        """The group ends; `OwnRmbs` frees the memory."""
        self._closed = True
        self._empty_since.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._owner.timers.call_later(_CHECK_INTERVAL, self._check)

    def _check(self) -> None:
        self._timer = None
        for rmb in self._due():
            self._own.pool.remove(rmb)
            del self._empty_since[rmb]
            self._leaving[rmb] = None
        self._delete()
        # A group without connections ends as a whole; `on_used` checks again with the next one.
        if self._leaving or (self._empty_since and self._owner.connections):
            self._check_later()

    def _due(self) -> list[Rmb]:
        """The RMBs that have been empty long enough; of each size the newest first."""
        now, owner = self._owner.timers.now(), self._owner
        if not owner.connections:
            return []
        longest = max(RMB_IDLE, owner.config.link_group_idle)
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
        if batch and not self._deleting and self._owner.usable:
            self._deleting = True
            self._owner.rkey_exchanges.delete(batch, lambda replied: self._deleted(batch, replied))

    def _deleted(self, batch: tuple[Rmb, ...], replied: bool) -> None:
        self._deleting = False
        if self._closed:
            return
        if replied:
            for rmb in batch:
                del self._leaving[rmb]
                self._own.free(rmb)
            self._delete()
