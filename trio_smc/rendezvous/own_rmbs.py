"""This side's RMBs in one link group: made on demand, registered on every link.

A new RMB of an established group is told to the peer by CONFIRM RKEY before one of its elements
is named in a CLC message (RFC 7609, 3.5.5.2.1); the first RMB of a group needs none, as the CLC
messages of the first contact carry its RToken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from trio_smc._base.config import rmbe_size_code, rmbe_size_of
from trio_smc.datapath.rmb import MAX_RMBS, Rmb, Rmbe, RmbPool, rmb_elements
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.exchanges import RkeyRequest

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rnic.verbs import MemoryRegion

__all__ = ["OwnRmbs"]

LOGGER = logging.getLogger("trio_smc.link_group")

_Done = Callable[["Rmbe | None"], None]


class OwnRmbs:
    """The RMBs of this side of one link group."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.pool = RmbPool()
        # Registrations by RMB and link number: an RKey belongs to one protection domain.
        self._regions: dict[Rmb, dict[int, MemoryRegion]] = {}
        self._waiting: dict[int, list[_Done]] = {}

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a new RMB."""
        return bool(self._waiting)

    def has_room(self, size: int) -> bool:
        """Whether an element of ``size`` bytes is free or can be made (ruling of 2.1: 255 RMBs)."""
        if len(self._regions) < MAX_RMBS:
            return True
        size = rmbe_size_of(rmbe_size_code(size))
        return size in self._waiting or self.pool.has_free(size)

    def request(self, size: int, done: _Done) -> None:
        """Call ``done`` with an element of ``size`` bytes, or with None; now or later."""
        size = rmbe_size_of(rmbe_size_code(size))
        rmbe = self.pool.take(size)
        if rmbe is not None:
            done(rmbe)
        elif size in self._waiting:
            self._waiting[size].append(done)
        else:
            self._add_rmb(size, done)

    def region(self, rmb: Rmb, link: Link) -> MemoryRegion:
        """The registration of ``rmb`` on ``link``: its RKey and address."""
        return self._regions[rmb][link.number]

    def release(self, rmbe: Rmbe, used: int | None) -> None:
        """Give an element back; ``used`` bytes of its ring were written, None: unknown."""
        if rmbe.rmb in self._regions:
            self.pool.release(rmbe, used)

    def renumber(self, old: int, new: int) -> None:
        """A link got its number from the server."""
        for regions in self._regions.values():
            regions[new] = regions.pop(old)

    def close_regions(self) -> None:
        """Revoke every RKey: the peer cannot write any more."""
        for regions in self._regions.values():
            for region in regions.values():
                region.close()

    def close(self) -> None:
        """Free the memory; no connection uses it any more."""
        for rmb in self._regions:
            rmb.memory.close()
        self._regions.clear()

    def _add_rmb(self, size: int, done: _Done) -> None:
        group = self._group
        if len(self._regions) >= MAX_RMBS:
            LOGGER.warning("%r: it has %d RMBs, the most there may be", group, MAX_RMBS)
            done(None)
            return
        try:
            rmb = self._make_rmb(size)
        except OSError as error:
            LOGGER.warning("%r: no new RMB of %d-byte elements: %s", group, size, error)
            done(None)
            return
        if group.state == "FORMING":
            self.pool.add(rmb)
            done(self.pool.take(size))
            return
        self._waiting[size] = [done]
        group.exchanges.confirm_rkey(
            RkeyRequest(
                message=lambda link: self._confirm_rkey(rmb, link),
                finished=lambda agreed: self._confirmed(rmb, agreed),
            )
        )

    def _make_rmb(self, size: int) -> Rmb:
        group = self._group
        count = rmb_elements(size, group.rnic.kind)
        memory = group.rnic.alloc_memory(size * count)
        regions: dict[int, MemoryRegion] = {}
        try:
            for link in group.links.values():
                if link.state != "DOWN":
                    regions[link.number] = link.pd.register(memory)
        except BaseException:
            for region in regions.values():
                region.close()
            memory.close()
            raise
        rmb = Rmb(memory, size, count, eye_catcher=group.config.rmbe_eye_catcher)
        self._regions[rmb] = regions
        return rmb

    def _confirm_rkey(self, rmb: Rmb, link: Link) -> llc.ConfirmRkey:
        here = self._regions[rmb][link.number]
        others = tuple(
            llc.LinkRToken(link_number=number, rkey=region.rkey, address=region.address)
            for number, region in self._regions[rmb].items()
            if number != link.number
        )
        return llc.ConfirmRkey(
            other_tokens=len(others), rkey=here.rkey, address=here.address, others=others
        )

    def _confirmed(self, rmb: Rmb, agreed: bool) -> None:
        waiting = self._waiting.pop(rmb.element_size)
        if agreed:
            self.pool.add(rmb)
        elif rmb in self._regions:
            for region in self._regions.pop(rmb).values():
                region.close()
            rmb.memory.close()
        for done in waiting:
            if agreed:
                self.request(rmb.element_size, done)
            else:
                done(None)
