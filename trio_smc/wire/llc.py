"""Link Layer Control messages (RFC 7609, A.3): how two RNICs manage their links and RMBs.

44 bytes each, sent by RoCE SEND on a link.  Every message is a frozen value with
``encode() -> bytes``; :func:`decode_untrusted` makes one out of what a peer sent.  A field's
annotation says where it lies (byte offsets from the start of the message);
``trio_smc.wire.layout`` explains how.  A constructor raises ValueError for a value that does not
fit its field, so every value that exists can be encoded.

The two high bits of the type say what to do with a type that is not known (A.3):

====  =========================================================================
b00   must be supported: ProtocolError
b10   optional: an :class:`OptionalMessage`, to be discarded silently
b11   a CDC message (``trio_smc.wire.cdc``), never an LLC message: ProtocolError
b01   not defined: ProtocolError
====  =========================================================================

The codec judges form only.  Reasons, MTUs, link numbers and counts a peer made up survive
decoding as plain integers; whether they make sense is for the exchange that gets them, which may
still have to answer (a negative CONFIRM RKEY reply, an ADD LINK rejection).

An answer repeats its request with the reply flag: ``dataclasses.replace(request, reply=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.layout import Bits, Layout, Slots, Span, laid_out

__all__ = [
    "MESSAGE_SIZE",
    "AddLink",
    "AddLinkContinuation",
    "AddLinkReason",
    "ConfirmLink",
    "ConfirmRkey",
    "ConfirmRkeyContinuation",
    "DeleteLink",
    "DeleteLinkReason",
    "DeleteRkey",
    "LinkRToken",
    "LlcMessage",
    "Message",
    "MessageType",
    "OptionalMessage",
    "RTokenPair",
    "TestLink",
    "decode_untrusted",
]


MESSAGE_SIZE = 44
"""Bytes in an LLC message, always: it fits where a CDC message fits."""


class MessageType(IntEnum):
    """First byte of an LLC message.  There is no type 5."""

    CONFIRM_LINK = 1
    ADD_LINK = 2
    ADD_LINK_CONTINUATION = 3
    DELETE_LINK = 4
    CONFIRM_RKEY = 6
    TEST_LINK = 7
    CONFIRM_RKEY_CONTINUATION = 8
    DELETE_RKEY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class LlcMessage:
    """What all LLC messages have.

    Fields:
      reply: the R bit; clear in a request.
    """

    TYPE: ClassVar[MessageType]
    LAYOUT: ClassVar[Layout]

    reply: Annotated[bool, Bits(3, 0x80)] = False

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)

    def encode(self) -> bytes:
        """The 44 bytes on the wire."""
        return self.LAYOUT.pack(self, bytes((self.TYPE, MESSAGE_SIZE)))


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmLink(LlcMessage):
    """CONFIRM LINK, figure 31: the first message on a new link, to show that it works.

    Fields:
      no_eye_catcher: the sender's RMBEs have no eye catcher and their data starts at offset 0.
        Not in the RFC: Linux announces it in the two low flag bits and insists on it.
      mac, gid, qp_number: the sender's end of this link: 6 and 16 bytes, 24 bits.
      link_number: given by the server, echoed by the client.
      link_user_id: opaque, for display only.
      max_links: the most links the sender supports in the group; the smaller value counts.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM_LINK

    no_eye_catcher: Annotated[bool, Bits(3, 0x03)] = False
    mac: Annotated[bytes, Span(4, 6)]
    gid: Annotated[bytes, Span(10, 16)]
    qp_number: Annotated[int, Span(26, 3)]
    link_number: Annotated[int, Span(29, 1)]
    link_user_id: Annotated[int, Span(30, 4)]
    max_links: Annotated[int, Span(34, 1)]


class AddLinkReason(IntEnum):
    """Why a client rejected ADD LINK (RFC 7609, A.3.2)."""

    NO_ALTERNATE_PATH = 1
    INVALID_MTU = 2


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True)
class AddLink(LlcMessage):
    """ADD LINK: the server adds a link, or a client asks it to (then only MAC and GID count).

    Two reserved bytes (10-11) lie between MAC and GID.  Figure 32 draws the message without
    them, but that is what deployed peers send and what their readers expect.

    Fields:
      rejected: the Z bit of a reply; then ``reason`` says why (:class:`AddLinkReason`, 4 bits).
      mac, gid, qp_number: the sender's end of the new link: 6 and 16 bytes, 24 bits.
      link_number: number of the new link, given by the server, echoed by the client.
      qp_mtu: enumerated path MTU, 4 bits (``trio_smc.wire.clc.QpMtu``).
      initial_psn: the first packet sequence number the sender will use, 24 bits.
    """

    TYPE: ClassVar[MessageType] = MessageType.ADD_LINK

    rejected: Annotated[bool, Bits(3, 0x40)] = False
    reason: Annotated[int, Bits(2, 0x0F)] = 0
    mac: Annotated[bytes, Span(4, 6)]
    gid: Annotated[bytes, Span(12, 16)]
    qp_number: Annotated[int, Span(28, 3)] = 0
    link_number: Annotated[int, Span(31, 1)] = 0
    qp_mtu: Annotated[int, Bits(32, 0x0F)] = 0
    initial_psn: Annotated[int, Span(33, 3)] = 0


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


@laid_out(MESSAGE_SIZE)
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
    pairs: Annotated[tuple[RTokenPair, ...], Slots(8, 16, slots=2, count_in="tokens_left")] = ()


class DeleteLinkReason(IntEnum):
    """Why a link or all links go (RFC 7609, A.3.4); UNKNOWN_* are a reply's."""

    LOST_PATH = 0x00010000
    OPERATOR = 0x00020000
    PROGRAM = 0x00030000
    PROTOCOL_VIOLATION = 0x00040000
    ASYMMETRIC_NOT_NEEDED = 0x00050000
    UNKNOWN_LINK = 0x00100000
    UNKNOWN_LINK_GROUP = 0x00200000  # Linux only


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteLink(LlcMessage):
    """DELETE LINK, figure 35: one link goes, or with ``all_links`` the link group.

    Fields:
      all_links: the A bit; ``link_number`` is then 0 and means nothing.
      orderly: the O bit; not because of an error.
      link_number: the link that goes.
      reason: 32 bits, :class:`DeleteLinkReason` or anything else a peer thinks of.
    """

    TYPE: ClassVar[MessageType] = MessageType.DELETE_LINK

    all_links: Annotated[bool, Bits(3, 0x40)] = False
    orderly: Annotated[bool, Bits(3, 0x20)] = False
    link_number: Annotated[int, Span(4, 1)] = 0
    reason: Annotated[int, Span(5, 4)]


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True)
class TestLink(LlcMessage):
    """TEST LINK, figure 40: is this link alive?  The reply echoes the 16 bytes of ``user_data``."""

    __test__: ClassVar[bool] = False  # not a test case, whatever its name says to pytest
    TYPE: ClassVar[MessageType] = MessageType.TEST_LINK

    user_data: Annotated[bytes, Span(4, 16)] = bytes(16)


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


@laid_out(MESSAGE_SIZE)
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
    others: Annotated[tuple[LinkRToken, ...], Slots(17, 13, slots=2, count_in="other_tokens")] = ()


@laid_out(MESSAGE_SIZE)
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
    others: Annotated[tuple[LinkRToken, ...], Slots(5, 13, slots=3, count_in="tokens_left")] = ()


@laid_out(MESSAGE_SIZE)
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
    rkeys: Annotated[tuple[int, ...], Slots(8, 4, slots=8, count_in=4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalMessage:
    """A message of an optional type that we do not know, to be discarded silently (A.3).

    Fields:
      data: its 44 bytes; the first is the type, 0x80-0xBF.
    """

    data: bytes

    def encode(self) -> bytes:
        """The 44 bytes as they came."""
        return self.data


Message: TypeAlias = (
    ConfirmLink
    | AddLink
    | AddLinkContinuation
    | DeleteLink
    | ConfirmRkey
    | ConfirmRkeyContinuation
    | DeleteRkey
    | TestLink
    | OptionalMessage
)

_CLASSES: dict[int, type[LlcMessage]] = {
    cls.TYPE: cls
    for cls in (
        ConfirmLink,
        AddLink,
        AddLinkContinuation,
        DeleteLink,
        ConfirmRkey,
        ConfirmRkeyContinuation,
        DeleteRkey,
        TestLink,
    )
}


def decode_untrusted(data: bytes | bytearray | memoryview) -> Message:
    """Decode one LLC message; ``encode`` of the value gives the same bytes but for reserved bits.

    Parameters:
      data: exactly the message, 44 bytes.

    Raises:
      ProtocolError: not 44 bytes, a length byte other than 44, a type that must be supported
        and is not, or more deleted RKeys than fit.
    """
    raw = bytes(data)
    if len(raw) != MESSAGE_SIZE:
        raise ProtocolError(f"LLC message of {len(raw)} bytes instead of {MESSAGE_SIZE}")
    if raw[0] & 0xC0 == 0x80:
        return OptionalMessage(data=raw)
    cls = _CLASSES.get(raw[0])
    if cls is None:
        raise ProtocolError(f"LLC message of unknown type {raw[0]:#04x}")
    if raw[1] != MESSAGE_SIZE:
        raise ProtocolError(f"LLC message with length byte {raw[1]} instead of {MESSAGE_SIZE}")
    try:
        return cls(**cls.LAYOUT.unpack_untrusted(raw))  # type: ignore[return-value]  # _CLASSES is Message
    except ValueError as error:
        raise ProtocolError(f"LLC {MessageType(raw[0]).name}: {error}") from None
