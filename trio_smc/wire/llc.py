"""Link Layer Control messages (RFC 7609, A.3): how two RNICs manage their links and RMBs.

LLC messages are sent by RoCE SEND on a link.  Each message is a frozen value; `V1` and `V2` encode
and decode messages for a link group of version 1 (the RFC's) or version 2.  A field's annotation
gives its position, in bytes from the start of the message (``trio_smc.wire.layout``).  A
constructor raises ValueError for a value that does not fit its field.

The versions differ in the framing of messages, and little in their meaning:

=======================  ==========================  ===============================================
..                       version 1                   version 2
=======================  ==========================  ===============================================
byte 0                   type                        0x20 | type
length                   byte 1: 44                  bytes 1-2, in the *sender's* byte order
size                     44 bytes                    44; three types may be longer
RTokens of a new link    ADD LINK CONTINUATION       in ADD LINK and its reply: `AddLinkExtension`
client has a new RNIC    ADD LINK without a QP       REQUEST ADD LINK
limits of the group      links                       links, and from release 1 on connections
=======================  ==========================  ===============================================

Version 2 is the protocol of Linux 6.12.  A length and the count of RTokens are in the sender's byte
order, which the receiver does not know.  So the decoder relies on the received size instead.

The two high bits of the type define how a receiver treats a message of unknown type (A.3):

====  =========================================================================
b00   must be supported: ProtocolError
b10   optional: an :class:`OptionalMessage`, to be discarded silently
b11   a CDC message (``trio_smc.wire.cdc``), never an LLC message: ProtocolError
b01   not defined: ProtocolError
====  =========================================================================

The codec checks the form only.  Invalid reasons, MTUs, link numbers and counts of a peer are
decoded as plain integers.  The exchange that receives them checks their meaning, because it may
have to answer (a negative CONFIRM RKEY reply, an ADD LINK rejection).

An answer repeats its request with the reply flag: ``dataclasses.replace(request, reply=True)``.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.fields import Value
from trio_smc.wire.layout import Bits, Layout, Slots, Span, laid_out

__all__ = [
    "MESSAGE_SIZE",
    "V1",
    "V2",
    "AddLink",
    "AddLinkContinuation",
    "AddLinkExtension",
    "AddLinkReason",
    "ConfirmLink",
    "ConfirmRkey",
    "ConfirmRkeyContinuation",
    "DeleteLink",
    "DeleteLinkReason",
    "DeleteRkey",
    "Framing",
    "LinkRToken",
    "LlcMessage",
    "Message",
    "MessageType",
    "OptionalMessage",
    "RTokenPair",
    "RequestAddLink",
    "TestLink",
    "decode_untrusted",
]


MESSAGE_SIZE = 44
"""Bytes of each LLC message of version 1, and of the shortest one of version 2."""

_MAX_ITEMS = 255  # the most RTokens, GIDs or RKeys in a message of version 2
_NATIVE = sys.byteorder


class MessageType(IntEnum):
    """First byte of an LLC message, in version 2 its low bits."""

    CONFIRM_LINK = 1
    ADD_LINK = 2
    ADD_LINK_CONTINUATION = 3  # version 1
    DELETE_LINK = 4
    REQUEST_ADD_LINK = 5  # version 2
    CONFIRM_RKEY = 6
    TEST_LINK = 7
    CONFIRM_RKEY_CONTINUATION = 8  # version 1
    DELETE_RKEY = 9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class LlcMessage(Value):
    """Base class of all LLC messages.

    Fields:
      reply: the R bit; clear in a request.
    """

    TYPE: ClassVar[MessageType]
    LAYOUT: ClassVar[Layout]
    LARGEST: ClassVar[int] = MESSAGE_SIZE
    """Bytes of the longest message of the type, in version 2."""

    reply: Annotated[bool, Bits(3, 0x80)] = False

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)

    def encode(self) -> bytes:
        """The 44 bytes on the wire in version 1."""
        return V1.encode(self)


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class ConfirmLink(LlcMessage):
    """CONFIRM LINK, figure 31: the first message on a new link, to show that it works.

    Fields:
      no_eye_catcher: the sender's RMBEs have no eye catcher and their data starts at offset 0.
        Not in the RFC: Linux sets the two low flag bits for this, and requires them of its peers.
      mac, gid, qp_number: the sender's end of this link: 6 and 16 bytes, 24 bits.
      link_number: given by the server, echoed by the client.
      link_user_id: opaque, for display only.
      max_links: the most links that the sender supports in the group; the smaller value of the
        two sides counts.  In version 2 the number on which the sides agreed by CLC.
      max_connections: of the group, from release 1 of version 2 on; else 0.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM_LINK

    no_eye_catcher: Annotated[bool, Bits(3, 0x03)] = False
    mac: Annotated[bytes, Span(4, 6)]
    gid: Annotated[bytes, Span(10, 16)]
    qp_number: Annotated[int, Span(26, 3)]
    link_number: Annotated[int, Span(29, 1)]
    link_user_id: Annotated[int, Span(30, 4)]
    max_links: Annotated[int, Span(34, 1)]
    max_connections: Annotated[int, Span(35, 1, 2)] = 0


class AddLinkReason(IntEnum):
    """Why a client rejected ADD LINK (RFC 7609, A.3.2)."""

    NO_ALTERNATE_PATH = 1
    INVALID_MTU = 2


@laid_out(16)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class RTokenPair(Value):
    """The RToken of an RMB on the new link (RFC 7609, figure 34).

    Fields:
      reference_rkey: the RMB's RKey on the link that carries the message.
      new_rkey, new_address: its RToken on the new link, 32 and 64 bits.
    """

    LAYOUT: ClassVar[Layout]

    reference_rkey: Annotated[int, Span(0, 4)]
    new_rkey: Annotated[int, Span(4, 4)]
    new_address: Annotated[int, Span(8, 8)]

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class AddLinkExtension(Value):
    """The additional part of ADD LINK and its reply in version 2: the RTokens on the new link.

    Fields:
      direct: no gateway is between the two RNICs.
      target_gid: 16 bytes.  Linux puts its own new GID there in both directions and never reads it.
      pairs: of all RMBs, in any order, at most 255.
    """

    direct: bool
    target_gid: bytes
    pairs: tuple[RTokenPair, ...]

    def __post_init__(self) -> None:
        if len(self.target_gid) != 16:
            raise ValueError(f"target_gid has {len(self.target_gid)} bytes instead of 16")
        if len(self.pairs) > _MAX_ITEMS:
            raise ValueError(f"{len(self.pairs)} pairs, more than {_MAX_ITEMS}")

    def encode(self) -> bytes:
        """The bytes from offset 44 on."""
        head = _EXTENSION.pack(0x80 if self.direct else 0, self.target_gid)
        count = len(self.pairs).to_bytes(2, _NATIVE)
        return b"".join((head, count, *(pair.LAYOUT.pack(pair) for pair in self.pairs)))

    @classmethod
    def decode_untrusted(cls, data: bytes) -> AddLinkExtension:
        """Decode the bytes from offset 44 on.  The number of RTokens follows from the size; the
        count field is ignored.

        Raises:
          ProtocolError: the bytes end within an RToken, or there are too many RTokens.
        """
        count, rest = divmod(len(data) - _EXTENSION.size - 2, _PAIR_SIZE)
        if rest or not 0 <= count <= _MAX_ITEMS:
            raise ProtocolError(f"LLC ADD_LINK with an extension of {len(data)} bytes")
        flags, gid = _EXTENSION.unpack_from(data)
        starts = range(_EXTENSION.size + 2, len(data), _PAIR_SIZE)
        pairs = (RTokenPair.LAYOUT.unpack_untrusted(data[at : at + _PAIR_SIZE]) for at in starts)
        direct = flags & 0x80 != 0
        return cls(direct=direct, target_gid=gid, pairs=tuple(RTokenPair(**pair) for pair in pairs))


_EXTENSION = struct.Struct(">Bx16s8x")  # then the count of RTokens, 2 bytes
_PAIR_SIZE = 16


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class AddLink(LlcMessage):
    """ADD LINK: the server adds a link, or a client requests one (then only MAC and GID count).

    Two reserved bytes (10-11) lie between MAC and GID.  Figure 32 does not have them, but existing
    peers send and expect them.

    Fields:
      rejected: the Z bit of a reply; then ``reason`` says why (:class:`AddLinkReason`, 4 bits),
        in version 1 only.
      mac, gid, qp_number: the sender's end of the new link: 6 and 16 bytes, 24 bits.
      link_number: number of the new link, given by the server, echoed by the client.
      qp_mtu: enumerated path MTU, 4 bits (``trio_smc.wire.clc.QpMtu``).
      initial_psn: the first packet sequence number that the sender will use, 24 bits.
      extension: version 2's RTokens; None in a rejection, which has 44 bytes.
    """

    TYPE: ClassVar[MessageType] = MessageType.ADD_LINK
    LARGEST: ClassVar[int] = MESSAGE_SIZE + _EXTENSION.size + 2 + _MAX_ITEMS * _PAIR_SIZE

    rejected: Annotated[bool, Bits(3, 0x40)] = False
    reason: Annotated[int, Bits(2, 0x0F, 1)] = 0
    mac: Annotated[bytes, Span(4, 6)]
    gid: Annotated[bytes, Span(12, 16)]
    qp_number: Annotated[int, Span(28, 3)] = 0
    link_number: Annotated[int, Span(31, 1)] = 0
    qp_mtu: Annotated[int, Bits(32, 0x0F)] = 0
    initial_psn: Annotated[int, Span(33, 3)] = 0
    extension: AddLinkExtension | None = None


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class RequestAddLink(LlcMessage):
    """REQUEST ADD LINK, version 2: a client that has another RNIC requests a link.

    The server answers with ADD LINK or, if it adds no link, with a reply without GIDs.

    Fields:
      gids: of the client's RNICs, 16 bytes each, at most 255.
    """

    TYPE: ClassVar[MessageType] = MessageType.REQUEST_ADD_LINK
    LARGEST: ClassVar[int] = 28 + _MAX_ITEMS * 16

    gids: Annotated[tuple[bytes, ...], Slots(28, 16, slots=_MAX_ITEMS, count_in=24, version=2)] = ()


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class AddLinkContinuation(LlcMessage):
    """ADD LINK CONTINUATION, figure 33: the RTokens that existing RMBs have on the new link.

    Fields:
      link_number: the new link.
      tokens_left: RTokens not sent yet, those in this message included; 0..255.
      pairs: two of them, or as many as are left.
    """

    TYPE: ClassVar[MessageType] = MessageType.ADD_LINK_CONTINUATION

    link_number: Annotated[int, Span(4, 1)]
    tokens_left: Annotated[int, Span(5, 1)]
    pairs: Annotated[tuple[RTokenPair, ...], Slots(8, 16, slots=2, count_in="tokens_left")] = ()


class DeleteLinkReason(IntEnum):
    """Why one or all links are deleted (RFC 7609, A.3.4); UNKNOWN_* are for replies."""

    LOST_PATH = 0x00010000
    OPERATOR = 0x00020000
    PROGRAM = 0x00030000
    PROTOCOL_VIOLATION = 0x00040000
    ASYMMETRIC_NOT_NEEDED = 0x00050000
    UNKNOWN_LINK = 0x00100000
    UNKNOWN_LINK_GROUP = 0x00200000  # Linux only


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class DeleteLink(LlcMessage):
    """DELETE LINK, figure 35: delete one link, or with ``all_links`` the link group.

    Fields:
      all_links: the A bit; ``link_number`` is then 0 and has no meaning.
      orderly: the O bit; False if an error is the reason.
      link_number: the link to delete.
      reason: 32 bits, :class:`DeleteLinkReason` or any other value of a peer.
    """

    TYPE: ClassVar[MessageType] = MessageType.DELETE_LINK

    all_links: Annotated[bool, Bits(3, 0x40)] = False
    orderly: Annotated[bool, Bits(3, 0x20)] = False
    link_number: Annotated[int, Span(4, 1)] = 0
    reason: Annotated[int, Span(5, 4)]


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class TestLink(LlcMessage):
    """TEST LINK, figure 40: a keepalive.  The reply echoes the 16 bytes of ``user_data``."""

    __test__: ClassVar[bool] = False  # otherwise pytest would collect this class as a test case
    TYPE: ClassVar[MessageType] = MessageType.TEST_LINK

    user_data: Annotated[bytes, Span(4, 16)] = bytes(16)


@laid_out(13)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class LinkRToken(Value):
    """The RToken of an RMB on one link (RFC 7609, figure 37): 8, 32 and 64 bits."""

    LAYOUT: ClassVar[Layout]

    link_number: Annotated[int, Span(0, 1)]
    rkey: Annotated[int, Span(1, 4)]
    address: Annotated[int, Span(5, 8)]

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class ConfirmRkey(LlcMessage):
    """CONFIRM RKEY, figure 36: a new RMB, with its RToken on each link.

    Fields:
      negative: the Z bit of a reply.
      retry: the C bit of a negative reply: try again after the current configuration change.
      other_tokens: NumTkns, the number of RTokens on *other* links; the RToken on the link that
        carries the message is not counted.  If it is above 2, a CONFIRM RKEY CONTINUATION follows
        (the RFC's "three or fewer" counts a slot that does not exist).
      rkey, address: the RToken on the link that carries the message, 32 and 64 bits.
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
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class ConfirmRkeyContinuation(LlcMessage):
    """CONFIRM RKEY CONTINUATION: the RTokens for which CONFIRM RKEY had no room.

    Figure 38 also has a reserved byte at the end, for which there is no room in 44 bytes.

    Fields:
      negative: the Z bit of a reply.
      tokens_left: RTokens not sent yet, those in this message included.
      others: three RTokens on other links, or as many as are left.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM_RKEY_CONTINUATION

    negative: Annotated[bool, Bits(3, 0x20)] = False
    tokens_left: Annotated[int, Span(4, 1)]
    others: Annotated[tuple[LinkRToken, ...], Slots(5, 13, slots=3, count_in="tokens_left")] = ()


@laid_out(MESSAGE_SIZE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class DeleteRkey(LlcMessage):
    """DELETE RKEY, figure 39: deleted RMBs.

    Fields:
      negative: the Z bit of a reply; then ``error_mask`` marks the RKeys that were not deleted
        (0x80 is the first).  Version 2 has their number, ``unknown``, instead.
      rkeys: at most 8, or 255 in version 2: the RKeys on the link that carries the message.  Linux
        sends one at a time, and in its replies of version 2 the RKeys are zeros.
    """

    TYPE: ClassVar[MessageType] = MessageType.DELETE_RKEY
    LARGEST: ClassVar[int] = 8 + _MAX_ITEMS * 4

    negative: Annotated[bool, Bits(3, 0x20)] = False
    error_mask: Annotated[int, Span(5, 1, 1)] = 0
    unknown: Annotated[int, Span(5, 1, 2)] = 0
    rkeys: Annotated[
        tuple[int, ...],
        Slots(8, 4, slots=8, count_in=4, version=1),
        Slots(8, 4, slots=_MAX_ITEMS, count_in=4, version=2),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class OptionalMessage(Value):
    """A message of an unknown optional type, to be discarded silently (A.3).

    Fields:
      data: the bytes of the message; the first is the type, 0x80-0xBF.
    """

    data: bytes

    def encode(self) -> bytes:
        """The received bytes, unchanged."""
        return self.data


Message: TypeAlias = (
    ConfirmLink
    | AddLink
    | AddLinkContinuation
    | RequestAddLink
    | DeleteLink
    | ConfirmRkey
    | ConfirmRkeyContinuation
    | DeleteRkey
    | TestLink
    | OptionalMessage
)

_COMMON: tuple[type[LlcMessage], ...] = (
    *(ConfirmLink, AddLink, DeleteLink, ConfirmRkey, DeleteRkey, TestLink),
)


class Framing(ABC):
    """The framing of the messages of a link group: `V1` or `V2`, as agreed by CLC.

    A version omits fields that it does not have, and decodes them as their defaults: the RTokens of
    an ADD LINK in version 1, the reason of its rejection in version 2.

    Attributes:
      version: of SMC-R.
      types: first bytes of the messages that must be supported.
      largest: bytes of the longest message, and so of a receive buffer.
    """

    version: ClassVar[int]
    largest: ClassVar[int]
    _MARK: ClassVar[int]
    _SPECIFIC: ClassVar[tuple[type[LlcMessage], ...]]

    def __init__(self) -> None:
        self._classes = {self._MARK | cls.TYPE: cls for cls in (*_COMMON, *self._SPECIFIC)}
        self.types: frozenset[int] = frozenset(self._classes)

    def encode(self, message: LlcMessage | OptionalMessage) -> bytes:
        """The message on the wire.

        Raises:
          ValueError: this version has no such message, or the message is too long for it.
        """
        if isinstance(message, OptionalMessage):
            return message.data
        kind = self._MARK | message.TYPE
        if kind not in self._classes:
            raise ValueError(f"{message.TYPE.name} is not a message of version {self.version}")
        body = message.LAYOUT.pack(message, self.version)
        if self.version > 1 and isinstance(message, AddLink) and message.extension is not None:
            body += message.extension.encode()
        return self._with_header(kind, body)

    def decode_untrusted(self, data: bytes | bytearray | memoryview) -> Message:
        """Decode one message; `encode` of the value gives the same bytes except reserved bits.

        Parameters:
          data: exactly the received message.

        Raises:
          ProtocolError: no message of the type has this size, the length field does not match the
            size, the type must be supported but is unknown, or a list is longer than the message.
        """
        raw = bytes(data)
        self._check_size_untrusted(raw, self.largest)
        if raw[0] & 0xC0 == 0x80:
            return OptionalMessage(data=raw)
        cls = self._classes.get(raw[0])
        if cls is None:
            raise ProtocolError(f"LLC message of unknown type {raw[0]:#04x}")
        self._check_size_untrusted(raw, cls.LARGEST)
        self._check_length_untrusted(raw)
        try:
            values = cls.LAYOUT.unpack_untrusted(raw, self.version)
            if cls is AddLink and len(raw) > MESSAGE_SIZE:
                values["extension"] = AddLinkExtension.decode_untrusted(raw[MESSAGE_SIZE:])
            return cls(**values)  # type: ignore[return-value]  # the classes are Message
        except ValueError as error:
            raise ProtocolError(f"LLC {cls.TYPE.name}: {error}") from None

    def _check_size_untrusted(self, raw: bytes, largest: int) -> None:
        if not MESSAGE_SIZE <= len(raw) <= largest:
            wanted = f"{MESSAGE_SIZE} to {largest}" if largest > MESSAGE_SIZE else MESSAGE_SIZE
            raise ProtocolError(f"LLC message of {len(raw)} bytes instead of {wanted}")

    @abstractmethod
    def _with_header(self, kind: int, body: bytearray) -> bytes:
        """The message: ``body`` with type and length filled in."""

    @abstractmethod
    def _check_length_untrusted(self, raw: bytes) -> None:
        """Raise ProtocolError if the length field differs from the size."""


class _Version1(Framing):
    version: ClassVar[int] = 1
    largest: ClassVar[int] = MESSAGE_SIZE
    _MARK = 0
    _SPECIFIC = (AddLinkContinuation, ConfirmRkeyContinuation)

    def _with_header(self, kind: int, body: bytearray) -> bytes:
        body[:2] = bytes((kind, MESSAGE_SIZE))
        return bytes(body)

    def _check_length_untrusted(self, raw: bytes) -> None:
        if raw[1] != MESSAGE_SIZE:
            raise ProtocolError(f"LLC message with length byte {raw[1]} instead of {MESSAGE_SIZE}")


class _Version2(Framing):
    version: ClassVar[int] = 2
    largest: ClassVar[int] = AddLink.LARGEST
    _MARK = 0x20
    _SPECIFIC = (RequestAddLink,)

    def _with_header(self, kind: int, body: bytearray) -> bytes:
        body[:3] = bytes((kind,)) + len(body).to_bytes(2, _NATIVE)
        return bytes(body)

    def _check_length_untrusted(self, raw: bytes) -> None:
        if len(raw) not in (int.from_bytes(raw[1:3], "little"), int.from_bytes(raw[1:3], "big")):
            raise ProtocolError(f"LLC message of {len(raw)} bytes with length {raw[1:3].hex()}")


V1 = _Version1()
V2 = _Version2()


def decode_untrusted(data: bytes | bytearray | memoryview) -> Message:
    """Decode one message of version 1, as `Framing.decode_untrusted`."""
    return V1.decode_untrusted(data)
