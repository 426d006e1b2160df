"""A RoCE port: its state, its GIDs, and what becomes of it.

`RocePort` is the part of `roce.VerbsRnic` that has nothing to do with queue pairs.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, Self

from . import _neighbours, _pyverbs, _rocegids
from .verbs import Rnic, RnicError, RnicEvent

__all__ = ["RocePort"]

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
        gid = _rocegids.choose(table, self._gid_index)
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
        gid = _rocegids.towards(peer, table, self._gid, fixed=self.gid_is_fixed)
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
        if not _rocegids.tells_mac(gid, own):
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
