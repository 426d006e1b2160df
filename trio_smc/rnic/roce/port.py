"""A RoCE port: its state, its GIDs, and which of them to use towards a peer.

`RocePort` is the part of `roce.VerbsRnic` that has nothing to do with queue pairs.

Which entry of a port's GID table to use.

A GID stands in the table once for each encapsulation that the adapter knows: RoCE v1 (its own
Ethernet type) and RoCE v2 (UDP).  Both ends of a link must use the same one, and no message of
RFC 7609 tells which; what tells is the peer's GID (`towards`).
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, Self

from trio_smc.rnic.roce import neighbours as _neighbours
from trio_smc.rnic.roce import pyverbs as _pyverbs
from trio_smc.rnic.roce.pyverbs import ROCE_V1, ROCE_V2, Gid
from trio_smc.rnic.verbs import Rnic, RnicError, RnicEvent

__all__ = [
    "RocePort",
    "choose",
    "tells_mac",
    "towards",
]


_log = logging.getLogger("trio_smc.rnic")

_FRESH: Final = 0.1
"""Seconds: who has looked whether an address is known connects to it next, and asks no more."""


class RocePort(Rnic):
    """A port of an RDMA device that runs RoCE; arguments and attributes are `VerbsRnic`'s."""

    kind: Literal["software", "roce"] = "roce"
    _context: _pyverbs.Context

    def __init__(self, device: str, port: int = 1, gid_index: int | None = None) -> None:
        self.name = device if port == 1 else f"{device}/{port}"
        self.device = device
        self.port = port
        self._gid_index = gid_index
        self.gid_is_fixed = gid_index is not None
        self._lib: _pyverbs.Verbs | None = None
        self.failed = False
        self.port_active = False
        self._known, self._known_until = b"", 0.0

    def _read_port(self, lib: _pyverbs.Verbs) -> None:
        with lib.refusals(f"reading port {self.port} of {self.device}"):
            port = self._context.query_port(self.port)
            table = lib.gids(self._context, self.port)
        self.port_active = port.state == lib.port_active
        self.mtu = port.active_mtu
        gid = choose(table, self._gid_index)
        if gid is None:
            raise RnicError(errno.ENODATA, f"{self.name} has no such GID")
        self._gid = gid
        self.gid = gid.value
        netdev = socket.if_indextoname(gid.ifindex)
        address = Path(f"/sys/class/net/{netdev}/address").read_text(encoding="ascii")
        self.mac = bytes.fromhex(address.strip().replace(":", ""))

    @property
    def gid_entry(self) -> _pyverbs.Gid:
        """The entry of the GID table that this RNIC uses, as it was when it was opened."""
        return self._gid

    def gid_table(self) -> list[_pyverbs.Gid]:
        """The port's GIDs now; empty when the device is gone."""
        lib = self._opened()
        try:
            return lib.gids(self._context, self.port)
        except lib.error:
            return []

    def with_gid(self, number: int) -> Self:
        """The same port with another GID, not open yet; its name says which."""
        other = type(self)(self.device, self.port, number)
        other.gid_is_fixed = self.gid_is_fixed
        other.name = f"{self.name}#{number}"
        return other

    def gid_towards(self, peer: bytes) -> _pyverbs.Gid:
        """Our GID's entry with the encapsulation that this peer speaks.

        Raises RnicError when the GID is not in the table any more.
        """
        lib = self._opened()
        with lib.refusals("ibv_query_gid_table"):
            table = lib.gids(self._context, self.port)
        gid = towards(peer, table, self._gid, fixed=self.gid_is_fixed)
        if gid is None:
            raise RnicError(errno.ENODATA, f"{self.name} has lost its GID")
        return gid

    def address_known(self, gid: bytes) -> bool:
        if self._known == gid and time.monotonic() < self._known_until:
            return True
        try:
            own = self.gid_towards(gid)
        except RnicError:
            return True  # it will be told by who needs it
        if not tells_mac(gid, own):
            if not _neighbours.is_known(gid, own.value, own.ifindex):
                return False
            self._known, self._known_until = gid, time.monotonic() + _FRESH
        return True

    def _opened(self) -> _pyverbs.Verbs:
        if self._lib is None:
            raise RnicError(errno.EBADF, f"{self.name} is not open")
        return self._lib

    @contextmanager
    def releasing(self, what: str) -> Iterator[None]:
        """Around giving something back, which a device that has failed refuses."""
        lib = self._opened()
        try:
            yield
        except lib.error as refused:
            if not self.failed:
                raise lib.refusal(what, refused) from refused

    def look_at_port(self) -> None:
        """See whether the port went down or came up, and what its MTU is: `RnicEvent` tells."""
        lib = self._opened()
        before = self.port_active
        try:
            port = self._context.query_port(self.port)
        except lib.error as refused:  # the device is gone
            self._fail(str(refused))
            return
        self.mtu = port.active_mtu
        self.port_active = port.state == lib.port_active
        if self.port_active != before:
            self._tell(RnicEvent.PORT_UP if self.port_active else RnicEvent.PORT_DOWN)

    def _fail(self, why: str) -> None:
        """The device is gone: tell so, once."""
        if self.failed:
            return
        _log.warning("%s has failed: %s", self.name, why)
        self.failed = True
        self.port_active = False
        self._tell(RnicEvent.FATAL)

    def _tell(self, event: RnicEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)


_LINK_LOCAL: Final = b"\xfe\x80" + bytes(6)


def choose(table: Sequence[Gid], index: int | None) -> Gid | None:
    """The entry at ``index``; None: one of RoCE v2 and made from a global address, if possible."""
    if index is not None:
        return next((gid for gid in table if gid.number == index), None)
    # Global before link-local: it can be routed.  False sorts before True.
    order = sorted(table, key=lambda gid: (gid.kind != ROCE_V2, gid.value[:2] == b"\xfe\x80"))
    return order[0] if order else None


def towards(peer: bytes, table: Sequence[Gid], own: Gid, *, fixed: bool) -> Gid | None:
    """The entry of ``own``'s GID for a link to the peer with this GID; None: it has gone.

    An address that goes and comes back changes its index, so the table of this moment is asked.
    Of the GID's entries that of the peer's encapsulation is taken, if there is one, else
    that of ``own``.

    Args:
      peer: the peer's GID, 16 bytes.
      table: the port's entries now.
      own: the entry that was chosen when the RNIC was opened.
      fixed: the user chose it: no other encapsulation will do.
    """
    wanted = own.kind if fixed else _encapsulation(peer)
    same = [gid for gid in table if (gid.ifindex, gid.value) == (own.ifindex, own.value)]
    if fixed:
        same = [gid for gid in same if gid.kind == wanted]
    return min(same, key=lambda gid: (gid.kind != wanted, gid.kind != own.kind), default=None)


def tells_mac(peer: bytes, own: Gid) -> bool:
    """Whether nobody has to be asked for this peer's MAC address: with RoCE v1 a link-local GID
    is made from it."""
    return own.kind == ROCE_V1 and peer[:8] == _LINK_LOCAL


def _encapsulation(gid: bytes) -> int:
    """What a peer with this GID speaks.

    Whoever has no IP address in its GID, but the one that is made from the port's MAC address,
    asks for RoCE v1: Linux does for SMC-R version 1, and takes the table's first entry.
    """
    return ROCE_V1 if gid[:8] == _LINK_LOCAL and gid[11:13] == b"\xff\xfe" else ROCE_V2
