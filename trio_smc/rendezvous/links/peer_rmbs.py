"""The RMBs of the peer of a link group, into which this side writes, and their RTokens.

An RToken is the RKey and address of an RMB on one link (RFC 7609, 1.1). An RMB has one RToken per
link, and a CLC message names an element by any of them. So this module keeps all RTokens of an RMB
together: then it finds an element that is in use already (RFC 7609, 3.5.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.rmb import MAX_RMBS
from trio_smc.rendezvous.links.link_set import GONE_LINKS

__all__ = [
    "ElementUser",
    "PeerRmb",
    "PeerRmbs",
    "RToken",
]


class RToken(NamedTuple):
    """RKey and address of one RMB on one link."""

    rkey: int
    address: int


class ElementUser(Protocol):
    """A connection that writes into an RMB element of the peer."""

    def rmbe_conflict(self) -> bool:
        """The peer gave the element to another connection (RFC 7609, 4.4.2).

        Returns:
          True if this ends a connection that had not been aborted before.
        """


class PeerRmb:
    """One RMB of the peer."""

    __slots__ = ("elements", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[int, RToken] = {}
        """By link number."""
        self.elements: dict[int, ElementUser] = {}
        """Connections that write into the RMB, by element index."""


class PeerRmbs:
    """All RMBs of the peer of one link group."""

    def __init__(self) -> None:
        self._by_token: dict[tuple[int, int], PeerRmb] = {}
        self._rmbs: dict[PeerRmb, None] = {}
        # RTokens of links that were just removed, by link number, the latest last.
        self._late: dict[int, dict[tuple[int, int], PeerRmb]] = {}

    def __len__(self) -> int:
        return len(self._rmbs)

    def __iter__(self) -> Iterator[PeerRmb]:
        return iter(self._rmbs)

    def find(self, link_number: int, rkey: int) -> PeerRmb | None:
        """The RMB that has this RKey on this link."""
        return self._by_token.get((link_number, rkey))

    def find_named(self, link_number: int, token: tuple[int, int]) -> PeerRmb | None:
        """The RMB with this RToken on this link, even if the link was just removed.

        Args:
          token: RKey and address; an `RToken`, or a tuple, which takes less time to make.
        """
        rmb = self._by_token.get((link_number, token[0]))
        if rmb is not None:
            return rmb if rmb.tokens[link_number] == token else None
        rmb = self._late.get(link_number, {}).get(token)
        return rmb if rmb in self._rmbs else None

    def learn_untrusted(self, tokens: dict[int, RToken]) -> PeerRmb:
        """Note an RMB's RTokens, by link number. RTokens that are known already change nothing.

        Raises:
          ProtocolError: the table is full, or the tokens contradict known ones. Nothing is noted.
        """
        keys = [(number, token.rkey) for number, token in tokens.items()]
        known = {self._by_token[key] for key in keys if key in self._by_token}
        if len(known) > 1:
            raise ProtocolError("RKeys of two RMBs are announced as those of one")
        rmb = known.pop() if known else PeerRmb()
        if rmb not in self._rmbs and len(self._rmbs) >= MAX_RMBS:
            raise ProtocolError("more RMBs than a link group may have")
        for number, token in tokens.items():
            self._check_untrusted(rmb, number, token)
        self._rmbs[rmb] = None
        for number, token in tokens.items():
            rmb.tokens[number] = token
            self._by_token[number, token.rkey] = rmb
        return rmb

    def add_token_untrusted(self, rmb: PeerRmb, number: int, token: RToken) -> None:
        """Note a known RMB's RToken on one more link. A known RToken changes nothing.

        Raises:
          ProtocolError: the RToken contradicts a known one.
        """
        self._check_untrusted(rmb, number, token)
        rmb.tokens[number] = token
        self._by_token[number, token.rkey] = rmb

    def _check_untrusted(self, rmb: PeerRmb, number: int, token: RToken) -> None:
        if self._by_token.get((number, token.rkey), rmb) is not rmb:
            raise ProtocolError("two RMBs with one RKey")
        if rmb.tokens.get(number, token) != token:
            raise ProtocolError("an RMB's RToken changed")

    def covers(self, number: int, *, unused: bool = False) -> bool:
        """True if every RMB that a connection writes into has an RToken on this link.

        Args:
          unused: RMBs without a connection count, too.
        """
        return all(number in rmb.tokens for rmb in self._rmbs if rmb.elements or unused)

    def rkeys(self, number: int) -> list[int]:
        """The RKeys of all RMBs on this link."""
        return [rmb.tokens[number].rkey for rmb in self._rmbs if number in rmb.tokens]

    def renumber(self, old: int, new: int) -> None:
        """The server has assigned a number to a link."""
        if old == new:
            return
        for rmb in self._rmbs:
            token = rmb.tokens.pop(old, None)
            if token is not None:
                rmb.tokens[new] = token
                del self._by_token[old, token.rkey]
                self._by_token[new, token.rkey] = rmb

    def remove(self, rmb: PeerRmb) -> None:
        """Drop an RMB with all its RTokens."""
        del self._rmbs[rmb]
        for number, token in rmb.tokens.items():
            del self._by_token[number, token.rkey]

    def drop_link(self, number: int) -> None:
        """Drop all RTokens of a link, and the RMBs that have no RToken on another link."""
        self._late.pop(number, None)
        late = self._late[number] = {}
        if len(self._late) > GONE_LINKS:
            del self._late[next(iter(self._late))]
        for rmb in list(self._rmbs):
            token = rmb.tokens.pop(number, None)
            if token is not None:
                late[token] = rmb
                del self._by_token[number, token.rkey]
                if not rmb.tokens:
                    del self._rmbs[rmb]
