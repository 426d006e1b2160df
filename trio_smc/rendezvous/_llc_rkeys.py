"""LLC messages that tell RKeys: of new and deleted RMBs, and of a new link (RFC 7609, A.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from trio_smc.rendezvous._llc_base import HEAD, MESSAGE_SIZE, LlcMessage, MessageType
from trio_smc.rendezvous._wire import Bits, Layout, Slots, Span, laid_out

__all__ = [
    "AddLinkContinuation",
    "ConfirmRkey",
    "ConfirmRkeyContinuation",
    "DeleteRkey",
    "LinkRToken",
    "RTokenPair",
]


@laid_out(16)
@dataclass(frozen=True, slots=True, kw_only=True)
class RTokenPair:
    """What an RMB is called on the new link (RFC 7609, figure 34).

    Fields:
      reference_rkey: the RMB's RKey on the link that the message travels on.
      new_rkey, new_address: its RToken on the new link, 32 and 64 bits.
    """

    LAYOUT: ClassVar[Layout]

    reference_rkey: Annotated[int, Span(0, 4)]
    new_rkey: Annotated[int, Span(4, 4)]
    new_address: Annotated[int, Span(8, 8)]

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)


@laid_out(MESSAGE_SIZE, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddLinkContinuation(LlcMessage):
    """ADD LINK CONTINUATION, figure 33: the RTokens that existing RMBs have on the new link.

    Fields:
      link_number: the new link.
      tokens_left: RTokens still to tell, those in this message included; 0..255.
      pairs: two of them, or as many as are left.
    """

    TYPE: ClassVar[MessageType] = MessageType.ADD_LINK_CONTINUATION

    link_number: Annotated[int, Span(4, 1)]
    tokens_left: Annotated[int, Span(5, 1)]
    pairs: Annotated[tuple[RTokenPair, ...], Slots(8, 16, slots=2, count_at=5)] = ()


@laid_out(13)
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRToken:
    """What an RMB is called on one link (RFC 7609, figure 37): 8, 32 and 64 bits."""

    LAYOUT: ClassVar[Layout]

    link_number: Annotated[int, Span(0, 1)]
    rkey: Annotated[int, Span(1, 4)]
    address: Annotated[int, Span(5, 8)]

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)


@laid_out(MESSAGE_SIZE, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmRkey(LlcMessage):
    """CONFIRM RKEY, figure 36: a new RMB, and what it is called on every link.

    Fields:
      negative: the Z bit of a reply.
      retry: the C bit of a negative reply: try again after the current configuration change.
      other_tokens: NumTkns, how many *other* links' RTokens there are in all; the link that the
        message travels on is not counted.  Above 2 a CONFIRM RKEY CONTINUATION follows (the
        RFC's "three or fewer" counts a slot that does not exist).
      rkey, address: the RToken on the link the message travels on, 32 and 64 bits.
      others: two RTokens on other links, or as many as ``other_tokens`` says.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM_RKEY

    negative: Annotated[bool, Bits(3, 0x20)] = False
    retry: Annotated[bool, Bits(3, 0x10)] = False
    other_tokens: Annotated[int, Span(4, 1)] = 0
    rkey: Annotated[int, Span(5, 4)]
    address: Annotated[int, Span(9, 8)]
    others: Annotated[tuple[LinkRToken, ...], Slots(17, 13, slots=2, count_at=4)] = ()


@laid_out(MESSAGE_SIZE, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmRkeyContinuation(LlcMessage):
    """CONFIRM RKEY CONTINUATION: the RTokens for which CONFIRM RKEY had no room.

    Figure 38 also draws a reserved byte at the end, for which 44 bytes have no room.

    Fields:
      negative: the Z bit of a reply.
      tokens_left: RTokens still to tell, those in this message included.
      others: three RTokens on other links, or as many as are left.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM_RKEY_CONTINUATION

    negative: Annotated[bool, Bits(3, 0x20)] = False
    tokens_left: Annotated[int, Span(4, 1)]
    others: Annotated[tuple[LinkRToken, ...], Slots(5, 13, slots=3, count_at=4)] = ()


@laid_out(MESSAGE_SIZE, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRkey(LlcMessage):
    """DELETE RKEY, figure 39: RMBs that are no more.

    Fields:
      negative: the Z bit of a reply; then ``error_mask`` tells which RKeys were not deleted,
        0x80 being the first.
      rkeys: at most 8, as known on the link the message travels on.
    """

    TYPE: ClassVar[MessageType] = MessageType.DELETE_RKEY

    negative: Annotated[bool, Bits(3, 0x20)] = False
    error_mask: Annotated[int, Span(5, 1)] = 0
    rkeys: Annotated[tuple[int, ...], Slots(8, 4, slots=8, count_at=4)]
