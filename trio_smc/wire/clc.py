"""Connection Layer Control messages (RFC 7609, A.2): the handshake on the TCP connection.

Every message is a frozen value with ``encode() -> bytes``; :func:`decode_untrusted` makes one
out
of what a peer sent.  Because application data may follow a message at once, a reader first takes
:data:`HEADER_SIZE` bytes, asks :func:`message_length_untrusted`, and then takes exactly the
rest.
A field's annotation says where it lies (byte offsets from the start of the message, big-endian);
``trio_smc.wire.layout`` explains how.  A constructor raises ValueError for a value that may
not be sent.

Theory of operation: error or Decline?  RFC 7609, C.6 ends the TCP connection for everything that
is not a well-formed message, and wants a Decline only for reserved values of enumerations, since
a peer that uses them may just be newer.  So

- ProtocolError: wrong eye catcher at either end, unknown type, version 0, a length that the type
  does not allow or that its parts do not add up to; an IPv4 mask beyond 32 or an IPv6 prefix
  beyond 128 bits, more than 8 prefixes; in Accept and Confirm an RMBE index of 0 (they count
from
  1), QP number 0 (never a reliably connected QP), a GID of zeros, and an RMBE that would end
  beyond 2**64, none of which names anything that could be written to.
- Decode, for the negotiation to Decline: a reserved QP MTU (``known_mtu`` is None; it counts on
  first contact only), a Proposal that does not offer SMC-R (``offers_smc_r``), and whatever is a
  matter of policy, such as a buffer size above the RFC's 512 KiB.

A newer version nibble decodes; the answer carries ``answer_version``, the lower of both (A.2).

Cutting CLC messages out of a byte stream without taking a byte too many.

After a Decline the application's bytes follow at once, so nothing beyond a message may be taken
from the TCP connection: `ClcReader` says how many bytes are its own for certain.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.layout import Bits, Layout, Span, laid_out
from trio_smc.wire.sizes import rmbe_size_of

__all__ = [
    "EYE_CATCHER",
    "HEAD",
    "HEADER_SIZE",
    "MAX_MESSAGE_SIZE",
    "MAX_PREFIXES",
    "MIN_PROPOSAL_SIZE",
    "VERSION",
    "Accept",
    "ClcMessage",
    "ClcReader",
    "Confirm",
    "Decline",
    "Ipv6Prefix",
    "Message",
    "MessageType",
    "Proposal",
    "QpMtu",
    "decode_proposal_untrusted",
    "decode_untrusted",
    "message_length_untrusted",
]


EYE_CATCHER = bytes.fromhex("E2D4C3D9")
"""First and last four bytes of every CLC message: "SMCR" in EBCDIC."""
VERSION = 1
"""The version of SMC-R that we speak, the only one RFC 7609 defines."""
HEADER_SIZE = 8
"""Bytes to read before a message's length is known."""
HEAD = 7
"""Bytes of the header that are no field's: eye catcher, type, length."""


class MessageType(IntEnum):
    """Byte 4 of a CLC message."""

    PROPOSAL = 1
    ACCEPT = 2
    CONFIRM = 3
    DECLINE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClcMessage:
    """What all CLC messages have.

    Fields:
      peer_id: the sender's: 2 bytes instance, 6 bytes RoCE MAC (A.2.1).
      version: the version nibble, 1..15.
    """

    TYPE: ClassVar[MessageType]
    LAYOUT: ClassVar[Layout]

    peer_id: Annotated[bytes, Span(8, 8)]
    version: Annotated[int, Bits(7, 0xF0)] = VERSION

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)
        if self.version == 0:
            raise ValueError("there is no version 0")
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what only this type of message forbids."""

    @property
    def answer_version(self) -> int:
        """The version of our answer: the lowest common one (A.2)."""
        return min(VERSION, self.version)

    def _head(self, length: int) -> bytes:
        return EYE_CATCHER + bytes((self.TYPE,)) + length.to_bytes(2, "big")


MAX_MESSAGE_SIZE = 1024
"""The longest message we read, bytes.  With all that version 2 can add a Proposal has 652."""
MAX_PREFIXES = 8
"""IPv6 prefixes in a Proposal, at most (A.2.2)."""
MIN_PROPOSAL_SIZE = 52
"""Bytes of a Proposal without growth area and IPv6 prefixes."""

_FIXED = 38  # up to the offset to the prefix area
_AREA = struct.Struct(">4sB2sB")  # IPv4 subnet, its length, reserved, number of IPv6 prefixes
_PREFIX_SIZE = 17
_REMEMBERED = 64  # Proposals encoded and decoded last

# Version 2 and newer: the two low bits of a Proposal's flags say what version 1 offers.
_V1_OFFER_MASK, _V1_SMC_R, _V1_NOTHING, _V1_BOTH = 0x03, 0, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipv6Prefix:
    """One IPv6 prefix of a Proposal (figure 27): 16 bytes, and how many bits of them count."""

    prefix: bytes
    length: int

    def __post_init__(self) -> None:
        if len(self.prefix) != 16:
            raise ValueError(f"an IPv6 prefix has 16 bytes, not {len(self.prefix)}")
        if not 0 <= self.length <= 128:
            raise ValueError(f"IPv6 prefix of {self.length} bits")


@laid_out(_FIXED, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(ClcMessage):
    """SMC Proposal, figure 26: 52 bytes for IPv4, 17 more for every IPv6 prefix.

    Linux sends version nibble 2 and 40 more bytes before the prefixes even when it offers version
    1 only: 92 bytes for IPv4.

    Fields:
      gid, mac: the client's preferred RNIC, 16 and 6 bytes.
      flags: the 4 low bits of byte 7; reserved in version 1.
      growth: the area for future growth before the prefixes, skipped and kept.
      ipv4_subnet: the subnet *number*, address & mask, 4 bytes; zeros on IPv6.  (The RFC's prose
        says mask; its use in 3.5.1.2 and every known peer mean the subnet.)
      ipv4_mask_length: bits of it, 0..32; 0 on IPv6.
      ipv6_prefixes: at most 8; empty on IPv4.
      area_reserved: two reserved bytes before the number of prefixes, as a peer set them.
      extension: what a newer version adds after the prefixes; b"" in version 1.
    """

    TYPE: ClassVar[MessageType] = MessageType.PROPOSAL

    gid: Annotated[bytes, Span(16, 16)]
    mac: Annotated[bytes, Span(32, 6)]
    flags: Annotated[int, Bits(7, 0x0F)] = 0
    growth: bytes = b""
    ipv4_subnet: bytes = bytes(4)
    ipv4_mask_length: int = 0
    ipv6_prefixes: tuple[Ipv6Prefix, ...] = ()
    area_reserved: bytes = bytes(2)
    extension: bytes = b""

    @property
    def offers_smc_r(self) -> bool:
        """Whether SMC-R version 1 is offered; a newer client may offer SMC-D or nothing."""
        return self.version == 1 or self.flags & _V1_OFFER_MASK in (_V1_SMC_R, _V1_BOTH)

    @property
    def _has_area(self) -> bool:
        # Without any version-1 offer there are no prefixes: all is extension.
        return self.version == 1 or self.flags & _V1_OFFER_MASK != _V1_NOTHING

    def _check(self) -> None:
        if len(self.ipv4_subnet) != 4 or len(self.area_reserved) != 2:
            raise ValueError("ipv4_subnet has 4 bytes, area_reserved 2")
        if not 0 <= self.ipv4_mask_length <= 32:
            raise ValueError(f"IPv4 mask of {self.ipv4_mask_length} bits")
        if len(self.ipv6_prefixes) > MAX_PREFIXES:
            raise ValueError(f"{len(self.ipv6_prefixes)} IPv6 prefixes")
        if self.extension and self.version == 1:
            raise ValueError("version 1 ends with the prefixes")
        if not self._has_area and self._area() != bytes(_AREA.size):
            raise ValueError("prefixes without a version-1 offer")
        if not MIN_PROPOSAL_SIZE <= self._length() <= MAX_MESSAGE_SIZE:
            raise ValueError(
                f"{self._length()} bytes, not {MIN_PROPOSAL_SIZE} to {MAX_MESSAGE_SIZE}"
            )

    def _area(self) -> bytes:
        count = len(self.ipv6_prefixes)
        return _AREA.pack(
            self.ipv4_subnet, self.ipv4_mask_length, self.area_reserved, count
        ) + b"".join(item.prefix + bytes((item.length,)) for item in self.ipv6_prefixes)

    def _length(self) -> int:
        area = _AREA.size + _PREFIX_SIZE * len(self.ipv6_prefixes) if self._has_area else 0
        return _FIXED + 2 + len(self.growth) + area + len(self.extension) + 4

    def encode(self) -> bytes:
        """The message on the wire."""
        return _encoded(self)


@functools.lru_cache(_REMEMBERED)
def _encoded(proposal: Proposal) -> bytes:
    """A client sends the same one for all its connections."""
    return b"".join(
        (
            proposal.LAYOUT.pack(proposal, proposal._head(proposal._length())),
            len(proposal.growth).to_bytes(2, "big"),
            proposal.growth,
            proposal._area() if proposal._has_area else b"",
            proposal.extension,
            EYE_CATCHER,
        )
    )


@functools.lru_cache(_REMEMBERED)
def decode_proposal_untrusted(raw: bytes) -> Proposal:
    """Decode a Proposal whose header and trailer were checked.

    A peer sends the same one for all its connections, so the last ones are remembered.

    Raises:
      ProtocolError: its parts do not add up to its length, or have values that none may have.
    """
    values = Proposal.LAYOUT.unpack_untrusted(raw)
    at = _FIXED + 2
    skip = int.from_bytes(raw[_FIXED:at], "big")
    body = raw[at:-4]
    # A reader that trusts this offset, or the number of prefixes, reads beyond the message
    # (CVE-2024-49571).
    if skip > len(body):
        raise ProtocolError(f"CLC PROPOSAL: prefix area at {skip} bytes, beyond its end")
    values["growth"], body = body[:skip], body[skip:]
    newer = values["version"] > 1
    try:
        if newer and values["flags"] & _V1_OFFER_MASK == _V1_NOTHING:
            return Proposal(**values, extension=body)
        if len(body) < _AREA.size:
            raise ProtocolError("CLC PROPOSAL: no room for the prefix area")
        subnet, mask_length, reserved, count = _AREA.unpack_from(body)
        end = _AREA.size + _PREFIX_SIZE * count
        if end > len(body) or (end < len(body) and not newer):
            space = len(body) - _AREA.size
            raise ProtocolError(f"CLC PROPOSAL: {count} IPv6 prefixes in {space} bytes")
        return Proposal(
            **values,
            ipv4_subnet=subnet,
            ipv4_mask_length=mask_length,
            ipv6_prefixes=_prefixes(body[_AREA.size : end]),
            area_reserved=reserved,
            extension=body[end:],
        )
    except ValueError as error:
        raise ProtocolError(f"CLC PROPOSAL: {error}") from None


def _prefixes(data: bytes) -> tuple[Ipv6Prefix, ...]:
    return tuple(
        Ipv6Prefix(prefix=data[at : at + 16], length=data[at + 16])
        for at in range(0, len(data), _PREFIX_SIZE)
    )


_HEADER = struct.Struct(">4sBHB")
_ACCEPT_SIZE = 68
_DECLINE_SIZES = (28, 44)
_DIAGNOSIS = struct.Struct(">4I")
_NO_GID = bytes(16)
_MEMORY = 1 << 64
# Bytes that a message of each type may have.
_SIZES: dict[int, Container[int]] = {
    MessageType.PROPOSAL: range(MIN_PROPOSAL_SIZE, MAX_MESSAGE_SIZE + 1),
    MessageType.ACCEPT: (_ACCEPT_SIZE,),
    MessageType.CONFIRM: (_ACCEPT_SIZE,),
    MessageType.DECLINE: _DECLINE_SIZES,
}


class QpMtu(IntEnum):
    """Path MTU of a QP as RFC 7609, A.2.3 enumerates it; all other values are reserved."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def size(self) -> int:
        """The MTU in bytes."""
        return 128 << self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credentials(ClcMessage):
    """What Accept and Confirm have in common: how to write to the sender (A.2.3).

    Fields:
      gid, mac, qp_number: the sender's end of the link: 16 and 6 bytes, 24 bits, not zero.
      rkey, rmb_address: the RToken of its RMB, 32 and 64 bits.
      rmbe_index: which element of the RMB is this connection's, 1..255.
      alert_token: what CDC messages to the sender carry, 32 bits.
      buffer_size_code: n; an element has 16 KiB << n.  The RFC ends at 5, Linux at 15.
      qp_mtu: enumerated path MTU, 4 bits; see ``known_mtu``.
      initial_psn: the first packet sequence number the sender will use, 24 bits.
      reserved: reserved bits as a peer set them, at their offsets, without trailing zero bytes.
    """

    gid: Annotated[bytes, Span(16, 16)]
    mac: Annotated[bytes, Span(32, 6)]
    qp_number: Annotated[int, Span(38, 3)]
    rkey: Annotated[int, Span(41, 4)]
    rmbe_index: Annotated[int, Span(45, 1)]
    alert_token: Annotated[int, Span(46, 4)]
    buffer_size_code: Annotated[int, Bits(50, 0xF0)]
    qp_mtu: Annotated[int, Bits(50, 0x0F)]
    rmb_address: Annotated[int, Span(52, 8)]
    initial_psn: Annotated[int, Span(61, 3)]
    reserved: bytes = b""

    @property
    def buffer_size(self) -> int:
        """Size of one element of the sender's RMB, bytes."""
        return rmbe_size_of(self.buffer_size_code)

    @property
    def known_mtu(self) -> QpMtu | None:
        """The QP MTU; None is a reserved value: Decline, on first contact (C.6)."""
        try:
            return QpMtu(self.qp_mtu)
        except ValueError:
            return None

    def _check(self) -> None:
        if self.qp_number == 0:
            raise ValueError("QP number 0")
        if self.gid == _NO_GID:
            raise ValueError("a GID of zeros")
        if self.rmbe_index == 0:
            raise ValueError("RMBE index 0")
        end = self.rmb_address + self.rmbe_index * rmbe_size_of(self.buffer_size_code)
        if end > _MEMORY:
            raise ValueError("an RMBE beyond the end of memory")

    def encode(self) -> bytes:
        """The 68 bytes on the wire."""
        return self.LAYOUT.pack(self, self._head(_ACCEPT_SIZE)) + EYE_CATCHER


@laid_out(_ACCEPT_SIZE - 4, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(_Credentials):
    """SMC Accept, figure 28: 68 bytes.

    Fields beside those of both Accept and Confirm:
      first_contact: the F bit; the server sets up a new link group.
    """

    TYPE: ClassVar[MessageType] = MessageType.ACCEPT

    first_contact: Annotated[bool, Bits(7, 0x08)] = False


@laid_out(_ACCEPT_SIZE - 4, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(_Credentials):
    """SMC Confirm, figure 29: 68 bytes.

    Fields beside those of both Accept and Confirm:
      first_contact: reserved in the RFC, and false from us; Linux sets it on first contact.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM

    first_contact: Annotated[bool, Bits(7, 0x08)] = False


@laid_out(_DECLINE_SIZES[0] - 4, head=HEAD)
@dataclass(frozen=True, slots=True, kw_only=True)
class Decline(ClcMessage):
    """SMC Decline, figure 30: 28 bytes; 44 from a newer peer that answers a newer Proposal.

    Fields:
      out_of_sync: the S bit; the receiver must clean up its link group.
      diagnosis: 32 bits, defined by each implementation.
      more_diagnosis: four more words in the 44-byte form, else None.
      reserved: reserved bits as a peer set them, at their offsets, without trailing zero bytes.
        (In the 44-byte form the high nibble of byte 20 is the sender's operating system.)
    """

    TYPE: ClassVar[MessageType] = MessageType.DECLINE

    out_of_sync: Annotated[bool, Bits(7, 0x08)] = False
    diagnosis: Annotated[int, Span(16, 4)]
    more_diagnosis: tuple[int, int, int, int] | None = None
    reserved: bytes = b""

    def _check(self) -> None:
        more = self.more_diagnosis
        if more is not None and any(not 0 <= word < 1 << 32 for word in more):
            raise ValueError("more_diagnosis is four words of 32 bits")

    def encode(self) -> bytes:
        """The 28 or 44 bytes on the wire."""
        more = b"" if self.more_diagnosis is None else _DIAGNOSIS.pack(*self.more_diagnosis)
        length = _DECLINE_SIZES[bool(more)]
        return self.LAYOUT.pack(self, self._head(length)) + more + EYE_CATCHER


Message: TypeAlias = Proposal | Accept | Confirm | Decline


def message_length_untrusted(header: bytes | bytearray | memoryview) -> int:
    """The length in bytes of a message, header included, from its first :data:`HEADER_SIZE` bytes.

    Parameters:
      header: at least 8 bytes; more are not looked at.

    Raises:
      ProtocolError: too few bytes, no eye catcher, an unknown type, version 0, or a length that
        this type cannot have.  So bytes that are not a CLC message fail here, before anything
        beyond the header was taken from the stream.
    """
    if len(header) < HEADER_SIZE:
        raise ProtocolError(f"CLC header of {len(header)} bytes")
    eye_catcher, kind, length, last = _HEADER.unpack_from(header)
    if eye_catcher != EYE_CATCHER:
        raise ProtocolError("no CLC message: it does not start with the eye catcher")
    if last >> 4 == 0:
        raise ProtocolError("CLC message of version 0")
    fits = _SIZES.get(kind)
    if fits is None:
        raise ProtocolError(f"CLC message of unknown type {kind}")
    if length not in fits:
        raise ProtocolError(f"CLC {MessageType(kind).name} of {length} bytes")
    return int(length)


def decode_untrusted(data: bytes | bytearray | memoryview) -> Message:
    """Decode one CLC message; ``encode`` of the value gives the same bytes again.

    Parameters:
      data: exactly the message.

    Raises:
      ProtocolError: the module's docstring lists what for.
    """
    raw = bytes(data)
    length = message_length_untrusted(raw)
    if len(raw) != length:
        raise ProtocolError(f"CLC message says {length} bytes and has {len(raw)}")
    if raw[-4:] != EYE_CATCHER:
        raise ProtocolError("CLC message without the eye catcher at its end")
    kind = raw[4]
    if kind == MessageType.PROPOSAL:
        return decode_proposal_untrusted(raw)
    try:
        if kind == MessageType.DECLINE:
            more = _DIAGNOSIS.unpack_from(raw, 24) if length == _DECLINE_SIZES[1] else None
            return Decline(**Decline.LAYOUT.unpack_untrusted(raw), more_diagnosis=more)
        cls = Accept if kind == MessageType.ACCEPT else Confirm
        usual: Accept | Confirm | None = cls.LAYOUT.make_untrusted(raw)
        if usual is not None:
            usual._check()
            return usual
        return cls(**cls.LAYOUT.unpack_untrusted(raw))
    except ValueError as error:
        raise ProtocolError(f"CLC {MessageType(kind).name}: {error}") from None


class ClcReader:
    """Collects one message after the other.

    Attributes:
      wanted: how many bytes may be taken now, at most; never 0.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self.wanted = HEADER_SIZE

    @property
    def halfway(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._data)

    def feed_untrusted(self, piece: bytes) -> bytes | None:
        """Take 1 to `wanted` bytes; returns a message when it is complete.

        Raises:
          ProtocolError: the header is none of a CLC message (RFC 7609, C.6).
        """
        data = self._data
        data += piece
        self.wanted -= len(piece)
        if self.wanted:
            return None
        if len(data) == HEADER_SIZE:
            self.wanted = message_length_untrusted(data) - HEADER_SIZE
            return None
        message = bytes(data)
        data.clear()
        self.wanted = HEADER_SIZE
        return message
