"""What the peer of a link group lets us write into: its RMBs and their RTokens.

An RToken is the RKey and address of an RMB on one link (RFC 7609, 1.1).  An RMB is known under
one RToken per link; all of them name the same elements, so that an element in use is found
whichever link a new message names it on (RFC 7609, 3.5.2.2).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.rmb import MAX_RMBS

__all__ = ["ElementUser", "PeerRmb", "PeerRmbs", "RToken"]


class RToken(NamedTuple):
    """How one RMB is reached over one link."""

    rkey: int
    address: int


class ElementUser(Protocol):
    """A connection that writes into an RMB element of the peer."""

    def rmbe_conflict(self) -> None:
        """The peer gave the element to another connection (RFC 7609, 4.4.2)."""


class PeerRmb:
    """One RMB of the peer."""

    __slots__ = ("elements", "tokens")

    def __init__(self) -> None:
        self.tokens: dict[int, RToken] = {}
        """By link number."""
        self.elements: dict[int, ElementUser] = {}
        """Connections that write into it, by element index."""


class PeerRmbs:
    """All RMBs of the peer of one link group."""

    def __init__(self) -> None:
        self._by_token: dict[tuple[int, int], PeerRmb] = {}

    def __len__(self) -> int:
        return len(set(map(id, self._by_token.values())))

    def find(self, link_number: int, rkey: int) -> PeerRmb | None:
        """The RMB that has this RKey on this link."""
        return self._by_token.get((link_number, rkey))

    def learn_untrusted(self, tokens: dict[int, RToken]) -> PeerRmb:
        """Note an RMB's RTokens, by link number; the same again is no change.

        Raises ProtocolError when the table is full or the tokens contradict what is known.
        """
        known = {self._by_token.get((number, token.rkey)) for number, token in tokens.items()}
        rmb = known.pop() if len(known) == 1 else None
        if known:
            raise ProtocolError("RKeys of two RMBs are given as one")
        if rmb is None:
            if len(self) >= MAX_RMBS:
                raise ProtocolError("more RMBs than a link group may have")
            rmb = PeerRmb()
        for number, token in tokens.items():
            if rmb.tokens.get(number, token) != token:
                raise ProtocolError("an RMB's RToken changed")
            rmb.tokens[number] = token
            self._by_token[number, token.rkey] = rmb
        return rmb

    def renumber(self, old: int, new: int) -> None:
        """A link got its number from the server."""
        moved = {rmb for (number, _), rmb in self._by_token.items() if number == old}
        for rmb in moved:
            token = rmb.tokens.pop(old)
            rmb.tokens[new] = token
            del self._by_token[old, token.rkey]
            self._by_token[new, token.rkey] = rmb

    def forget(self, rmb: PeerRmb) -> None:
        """Drop an RMB under all its RTokens."""
        for number, token in rmb.tokens.items():
            del self._by_token[number, token.rkey]
