"""What a ladder diagram consists of: peers, link groups with what is named in them, and rows."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from trio_smc.capture.dissection import End, Event
from trio_smc.wire import clc, llc

__all__ = ["Connection", "Group", "Ladder", "Link", "Peer", "Rmb", "Row", "address_text"]


@dataclass(eq=False, slots=True)
class Peer:
    """One side of a ladder: by peer ID where it was said, else by address."""

    peer_id: bytes | None = None
    addresses: list[bytes] = field(default_factory=list)

    def meet(self, address: bytes) -> None:
        """Note an address of its."""
        if address not in self.addresses:
            self.addresses.append(address)


@dataclass(eq=False, slots=True)
class Rmb:
    """An RMB: its address by link, and by place whose its elements are: end and connection."""

    addresses: dict[Link, int] = field(default_factory=dict)
    elements: dict[int, tuple[int, Connection]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Link:
    """One link of a group."""

    group: Group
    number: int | None = None


@dataclass(eq=False, slots=True)
class Group:
    """A link group, and what is named within it.

    Attributes:
      tokens: by (to the server, alert token).
      rmbs: by (link, of the server, RKey).
      confirmed: the last RMB that CONFIRM RKEY told of, by (of the server).
      added: ADD LINK that waits for its reply, by link number.
    """

    client: Peer
    server: Peer
    links: list[Link] = field(default_factory=list)
    tokens: dict[tuple[bool, int], Connection] = field(default_factory=dict)
    rmbs: dict[tuple[Link, bool, int], Rmb] = field(default_factory=dict)
    confirmed: dict[bool, Rmb] = field(default_factory=dict)
    added: dict[int, llc.AddLink] = field(default_factory=dict)

    def link(self, number: int) -> Link | None:
        """The youngest link of this number."""
        return next((each for each in reversed(self.links) if each.number == number), None)

    def rmb(self, link: Link, of_server: bool, rkey: int, address: int) -> Rmb:
        """The RMB with this RToken on ``link``, known or new."""
        rmb = self.rmbs.get((link, of_server, rkey))
        if rmb is None or rmb.addresses[link] != address:
            rmb = Rmb()
            self.name(rmb, link, of_server, rkey, address)
        return rmb

    def name(self, rmb: Rmb, link: Link, of_server: bool, rkey: int, address: int) -> None:
        """Note what an RMB is called on ``link``."""
        rmb.addresses[link] = address
        self.rmbs[link, of_server, rkey] = rmb


@dataclass(eq=False, slots=True)
class Connection:
    """A TCP connection on which SMC-R was proposed.

    Attributes:
      number: from 1, in the order of the Proposals.
    """

    number: int
    client: End
    server: End
    client_peer: Peer
    server_peer: Peer
    group: Group | None = None
    accept: clc.Accept | None = None


@dataclass(eq=False, slots=True)
class Row:
    """One message of a ladder.

    Attributes:
      to_server: its direction.
      link: its link; None for CLC messages.
      connection: whose it is, where that is known.
      place: for a write, where in the RMB element it begins, where that is known.
    """

    time: int
    to_server: bool
    event: Event
    link: Link | None = None
    connection: Connection | None = None
    place: int | None = None

    @property
    def link_number(self) -> int | None:
        """The number of its link, where it is known."""
        return None if self.link is None else self.link.number

    @property
    def group(self) -> Group | None:
        """The link group it belongs to, known at the end."""
        if self.link is not None:
            return self.link.group
        return None if self.connection is None else self.connection.group


@dataclass(eq=False, slots=True)
class Ladder:
    """All messages between a client's and a server's peer."""

    client: Peer
    server: Peer
    rows: list[Row] = field(default_factory=list)


def address_text(address: bytes) -> str:
    """An address as people write it."""
    return str(ipaddress.ip_address(address))
