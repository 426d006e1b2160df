"""How a negotiation can end, and what it wants of the stack it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous import clc
from trio_smc.rendezvous.link import Link
from trio_smc.rendezvous.link_group import GroupConnection, LinkGroup
from trio_smc.rnic.verbs import Rnic

__all__ = ["Established", "Failed", "FellBack", "NegotiationHost", "RdmaConnection"]


class RdmaConnection(GroupConnection, Protocol):
    """A connection as its negotiation sees it."""

    @property
    def alert_token(self) -> int:
        """What the peer's CDC messages carry."""

    @property
    def state(self) -> str:
        """Its state (`trio_smc.states.connection`)."""

    def peer_known(
        self, *, alert_token: int, element_size: int, eye_catcher: bool, channel: Link,
        address: int, rkey: int,
    ) -> None:  # fmt: skip
        """Where the peer's RMB element is."""

    def established(self) -> None:
        """The rendezvous is complete."""

    def abort(self) -> None:
        """Reset it: its rendezvous is complete, but nobody wants it any more."""

    def withdraw(self) -> None:
        """The rendezvous failed after the element was given out; TCP is not touched."""


class NegotiationHost(Protocol):
    """What a negotiation wants of the stack it belongs to."""

    peer_id: bytes
    observer: Observer | None

    def find_client_group(self, accept: clc.Accept) -> LinkGroup | None:
        """The client-role group that an SMC Accept names (RFC 7609, 3.5.2.2)."""

    def find_server_group(self, peer_id: bytes, rnic: Rnic, size: int) -> LinkGroup | None:
        """A server-role group with this peer that has room for an element of ``size`` bytes,
        or else one that is just forming."""

    def new_group(self, *, client: bool, peer_id: bytes, rnic: Rnic) -> LinkGroup:
        """A link group that is about to be formed."""

    def open_connection(self, group: LinkGroup, rmbe: Rmbe) -> RdmaConnection:
        """A connection that owns ``rmbe``, registered with the group by its alert token."""


@dataclass(frozen=True, slots=True)
class Established:
    """The connection speaks SMC-R."""

    connection: RdmaConnection
    group: LinkGroup


@dataclass(frozen=True, slots=True)
class FellBack:
    """The connection stays on TCP."""

    fallback: Fallback


@dataclass(frozen=True, slots=True)
class Failed:
    """The TCP connection must end; ``error`` is for the user."""

    error: OSError
