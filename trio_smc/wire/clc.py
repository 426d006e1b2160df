"""Connection Layer Control messages (RFC 7609, A.2): the handshake on the TCP connection.

Every message is a frozen value with ``encode() -> bytes``; :func:`decode_untrusted` makes one out
of what a peer sent.  A constructor raises ValueError for a value that may not be sent.  Reserved
bits are zero from us and never looked at (A.2).

After a Decline the application's bytes follow at once, so nothing beyond a message may be taken
from the TCP connection.  A reader takes :data:`HEADER_SIZE` bytes, asks
:func:`message_length_untrusted`, and then takes exactly the rest: :class:`ClcReader` does.

Theory of operation: error or Decline?  RFC 7609, C.6 ends the TCP connection for everything that
is not a well-formed message, and wants a Decline only for reserved values of enumerations, since
a peer that uses them may just be newer.  So

- ProtocolError: wrong eye catcher at either end, unknown type, version 0, a length that the type
  does not allow or that its parts do not add up to; an IPv4 mask beyond 32 or an IPv6 prefix
  beyond 128 bits, more than 8 prefixes; in Accept and Confirm an RMBE index of 0 (they count from
  1), QP number 0 (never a reliably connected QP), a GID of zeros, and an RMBE that would end
  beyond 2**64, none of which names anything that could be written to.
- Decode, for the negotiation to Decline: a reserved QP MTU (``known_mtu`` is None; it counts on
  first contact only), a Proposal that does not offer SMC-R (``offers_smc_r``), and whatever is a
  matter of policy, such as a buffer size above the RFC's 512 KiB.

A newer version nibble decodes; the answer carries ``answer_version``, the lower of both (A.2).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Container
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import ClassVar, Self, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.sizes import rmbe_size_of

__all__ = [
    "EYE_CATCHER",
    "HEADER_SIZE",
    "MAX_MESSAGE_SIZE",
    "MAX_PREFIXES",
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
    "decode_untrusted",
    "message_length_untrusted",
]


EYE_CATCHER = bytes.fromhex("E2D4C3D9")
"""First and last four bytes of every CLC message: "SMCR" in EBCDIC."""
VERSION = 1
"""The version of SMC-R that we speak, the only one RFC 7609 defines."""
HEADER_SIZE = 8
"""Bytes to read before a message's length is known."""
MAX_MESSAGE_SIZE = 1024
"""The longest message we read, bytes.  With all that version 2 can add a Proposal has 652."""
MAX_PREFIXES = 8
"""IPv6 prefixes in a Proposal, at most (A.2.2)."""

_HEADER = struct.Struct(">4sBHB")  # eye catcher, type, length, version and flags
_PROPOSAL = struct.Struct(">4sBHB8s16s6sH")  # the last is the offset to the prefix area, figure 26
_AREA = struct.Struct(">4sB2xB")  # IPv4 subnet, its length, number of IPv6 prefixes, figure 27
_PREFIX = struct.Struct(">16sB")
_ACCEPT = struct.Struct(">4sBHB8s16s6s3sIBIBxQx3s")  # and Confirm, figures 28 and 29
_DECLINE = struct.Struct(">4sBHB8sI4x")  # figure 30
_DIAGNOSIS = struct.Struct(">4I")

_MIN_PROPOSAL_SIZE = 52
_ACCEPT_SIZE = 68
_DECLINE_SIZES = (28, 44)

_REMEMBERED = 64  # Proposals encoded and decoded last
_FIRST_CONTACT = _OUT_OF_SYNC = 0x08  # in byte 7
# Version 2 and newer: the two low bits of a Proposal's flags say what version 1 offers.
_V1_OFFER_MASK, _V1_SMC_R, _V1_NOTHING, _V1_BOTH = 0x03, 0, 2, 3
_NO_GID = bytes(16)
_MEMORY = 1 << 64


class MessageType(IntEnum):
    """Byte 4 of a CLC message."""

    PROPOSAL = 1
    ACCEPT = 2
    CONFIRM = 3
    DECLINE = 4


# Bytes that a message of each type may have.
_SIZES: dict[int, Container[int]] = {
    MessageType.PROPOSAL: range(_MIN_PROPOSAL_SIZE, MAX_MESSAGE_SIZE + 1),
    MessageType.ACCEPT: (_ACCEPT_SIZE,),
    MessageType.CONFIRM: (_ACCEPT_SIZE,),
    MessageType.DECLINE: _DECLINE_SIZES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClcMessage:
    """What all CLC messages have.

    Fields:
      peer_id: the sender's: 2 bytes instance, 6 bytes RoCE MAC (A.2.1).
      version: the version nibble, 1..15.
    """

    TYPE: ClassVar[MessageType]
    # How many bytes, and how many bits, the fields have.
    SIZES: ClassVar[tuple[tuple[str, int], ...]] = (("peer_id", 8),)
    BITS: ClassVar[tuple[tuple[str, int], ...]] = (("version", 4),)

    peer_id: bytes
    version: int = VERSION

    def __post_init__(self) -> None:
        for name, size in self.SIZES:
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} has {len(getattr(self, name))} bytes instead of {size}")
        for name, bits in self.BITS:
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ValueError(f"{name} is {getattr(self, name)}, beyond {bits} bits")
        if self.version == 0:
            raise ValueError("there is no version 0")
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what only this type of message forbids."""

    @property
    def answer_version(self) -> int:
        """The version of our answer: the lowest common one (A.2)."""
        return min(VERSION, self.version)


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
      extension: what a newer version adds after the prefixes; b"" in version 1.
    """

    TYPE: ClassVar[MessageType] = MessageType.PROPOSAL
    SIZES: ClassVar = (("peer_id", 8), ("gid", 16), ("mac", 6), ("ipv4_subnet", 4))
    BITS: ClassVar = (("version", 4), ("flags", 4))

    gid: bytes
    mac: bytes
    flags: int = 0
    growth: bytes = b""
    ipv4_subnet: bytes = bytes(4)
    ipv4_mask_length: int = 0
    ipv6_prefixes: tuple[Ipv6Prefix, ...] = ()
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
        if not 0 <= self.ipv4_mask_length <= 32:
            raise ValueError(f"IPv4 mask of {self.ipv4_mask_length} bits")
        if len(self.ipv6_prefixes) > MAX_PREFIXES:
            raise ValueError(f"{len(self.ipv6_prefixes)} IPv6 prefixes")
        if self.extension and self.version == 1:
            raise ValueError("version 1 ends with the prefixes")
        if not self._has_area and self._area() != bytes(_AREA.size):
            raise ValueError("prefixes without a version-1 offer")
        length = len(self.encode())
        if not _MIN_PROPOSAL_SIZE <= length <= MAX_MESSAGE_SIZE:
            raise ValueError(f"{length} bytes, not {_MIN_PROPOSAL_SIZE} to {MAX_MESSAGE_SIZE}")

    def _area(self) -> bytes:
        prefixes = [_PREFIX.pack(each.prefix, each.length) for each in self.ipv6_prefixes]
        head = _AREA.pack(self.ipv4_subnet, self.ipv4_mask_length, len(prefixes))
        return head + b"".join(prefixes)

    def encode(self) -> bytes:
        """The message on the wire."""
        return _encoded(self)

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Proposal:
        """Decode a Proposal whose header and trailer were checked.

        Raises:
          ProtocolError, ValueError: its parts do not add up to its length, or have values that
            none may have.
        """
        return _decoded_untrusted(raw)


@functools.lru_cache(_REMEMBERED)
def _encoded(m: Proposal) -> bytes:
    """A client sends the same one for all its connections."""
    body = m.growth + (m._area() if m._has_area else b"") + m.extension + EYE_CATCHER
    length, last = _PROPOSAL.size + len(body), m.version << 4 | m.flags
    ids = m.peer_id, m.gid, m.mac
    return _PROPOSAL.pack(EYE_CATCHER, m.TYPE, length, last, *ids, len(m.growth)) + body


@functools.lru_cache(_REMEMBERED)
def _decoded_untrusted(raw: bytes) -> Proposal:
    """A peer sends the same one for all its connections."""
    *_, last, peer_id, gid, mac, skip = _PROPOSAL.unpack_from(raw)
    version, flags = last >> 4, last & 0x0F
    body = raw[_PROPOSAL.size : -4]
    # A reader that trusts this offset, or the number of prefixes, reads beyond the message
    # (CVE-2024-49571).
    if skip > len(body):
        raise ProtocolError(f"CLC PROPOSAL: prefix area at {skip} bytes, beyond its end")
    make = functools.partial(
        Proposal,
        peer_id=peer_id, version=version, gid=gid, mac=mac, flags=flags, growth=body[:skip],
    )  # fmt: skip
    body = body[skip:]
    if version > 1 and flags & _V1_OFFER_MASK == _V1_NOTHING:
        return make(extension=body)
    if len(body) < _AREA.size:
        raise ProtocolError("CLC PROPOSAL: no room for the prefix area")
    subnet, mask_length, count = _AREA.unpack_from(body)
    end = _AREA.size + _PREFIX.size * count
    if end > len(body) or (end < len(body) and version == 1):
        space = len(body) - _AREA.size
        raise ProtocolError(f"CLC PROPOSAL: {count} IPv6 prefixes in {space} bytes")
    return make(
        ipv4_subnet=subnet,
        ipv4_mask_length=mask_length,
        ipv6_prefixes=tuple(
            Ipv6Prefix(prefix=prefix, length=length)
            for prefix, length in _PREFIX.iter_unpack(body[_AREA.size : end])
        ),
        extension=body[end:],
    )


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
      first_contact: the F bit; the server sets up a new link group.  In Confirm it is reserved in
        the RFC; Linux sets it.
      gid, mac, qp_number: the sender's end of the link: 16 and 6 bytes, 24 bits, not zero.
      rkey, rmb_address: the RToken of its RMB, 32 and 64 bits.
      rmbe_index: which element of the RMB is this connection's, 1..255.
      alert_token: what CDC messages to the sender carry, 32 bits.
      buffer_size_code: n; an element has 16 KiB << n.  The RFC ends at 5, Linux at 15.
      qp_mtu: enumerated path MTU, 4 bits; see ``known_mtu``.
      initial_psn: the first packet sequence number the sender will use, 24 bits.
    """

    SIZES: ClassVar = (("peer_id", 8), ("gid", 16), ("mac", 6))
    BITS: ClassVar = (
        *(("version", 4), ("qp_number", 24), ("rkey", 32), ("rmbe_index", 8), ("alert_token", 32)),
        *(("buffer_size_code", 4), ("qp_mtu", 4), ("rmb_address", 64), ("initial_psn", 24)),
    )

    first_contact: bool = False
    gid: bytes
    mac: bytes
    qp_number: int
    rkey: int
    rmbe_index: int
    alert_token: int
    buffer_size_code: int
    qp_mtu: int
    rmb_address: int
    initial_psn: int

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
        if self.rmb_address + self.rmbe_index * self.buffer_size > _MEMORY:
            raise ValueError("an RMBE beyond the end of memory")

    def encode(self) -> bytes:
        """The 68 bytes on the wire."""
        return (
            _ACCEPT.pack(
                EYE_CATCHER,
                self.TYPE,
                _ACCEPT_SIZE,
                self.version << 4 | (_FIRST_CONTACT if self.first_contact else 0),
                self.peer_id,
                self.gid,
                self.mac,
                self.qp_number.to_bytes(3, "big"),
                self.rkey,
                self.rmbe_index,
                self.alert_token,
                self.buffer_size_code << 4 | self.qp_mtu,
                self.rmb_address,
                self.initial_psn.to_bytes(3, "big"),
            )
            + EYE_CATCHER
        )

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Self:
        """Decode one whose header and trailer were checked.

        Raises:
          ValueError: it names nothing that could be written to.
        """
        *_, last, peer_id, gid, mac, qp, rkey, index, token, codes, address, psn = (
            _ACCEPT.unpack_from(raw)
        )
        found = (
            peer_id,
            last >> 4,
            last & _FIRST_CONTACT != 0,
            gid,
            mac,
            int.from_bytes(qp, "big"),
            rkey,
            index,
            token,
            codes >> 4,
            codes & 0x0F,
            address,
            int.from_bytes(psn, "big"),
        )
        # Past ``__init__``, as every connection gets one: what a struct has read fits its field.
        value = object.__new__(cls)
        for put, field in zip(_PUT_CREDENTIALS, found, strict=True):
            put(value, field)
        value._check()
        return value


_PUT_CREDENTIALS = [getattr(_Credentials, field.name).__set__ for field in fields(_Credentials)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(_Credentials):
    """SMC Accept, figure 28: 68 bytes."""

    TYPE: ClassVar[MessageType] = MessageType.ACCEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(_Credentials):
    """SMC Confirm, figure 29: 68 bytes."""

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline(ClcMessage):
    """SMC Decline, figure 30: 28 bytes; 44 from a newer peer that answers a newer Proposal.

    Fields:
      out_of_sync: the S bit; the receiver must clean up its link group.
      diagnosis: 32 bits, defined by each implementation.
      more_diagnosis: four more words in the 44-byte form, else None.
    """

    TYPE: ClassVar[MessageType] = MessageType.DECLINE
    BITS: ClassVar = (("version", 4), ("diagnosis", 32))

    out_of_sync: bool = False
    diagnosis: int
    more_diagnosis: tuple[int, int, int, int] | None = None

    def _check(self) -> None:
        more = self.more_diagnosis
        if more is not None and any(not 0 <= word < 1 << 32 for word in more):
            raise ValueError("more_diagnosis is four words of 32 bits")

    def encode(self) -> bytes:
        """The 28 or 44 bytes on the wire."""
        more = b"" if self.more_diagnosis is None else _DIAGNOSIS.pack(*self.more_diagnosis)
        length = _DECLINE_SIZES[bool(more)]
        last = self.version << 4 | (_OUT_OF_SYNC if self.out_of_sync else 0)
        head = _DECLINE.pack(EYE_CATCHER, self.TYPE, length, last, self.peer_id, self.diagnosis)
        return head + more + EYE_CATCHER

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Decline:
        """Decode one whose header and trailer were checked."""
        *_, length, last, peer_id, diagnosis = _DECLINE.unpack_from(raw)
        return cls(
            peer_id=peer_id,
            version=last >> 4,
            out_of_sync=last & _OUT_OF_SYNC != 0,
            diagnosis=diagnosis,
            more_diagnosis=(
                _DIAGNOSIS.unpack_from(raw, _DECLINE.size) if length > _DECLINE_SIZES[0] else None
            ),
        )


Message: TypeAlias = Proposal | Accept | Confirm | Decline

_CLASSES: dict[int, type[Message]] = {cls.TYPE: cls for cls in (Proposal, Accept, Confirm, Decline)}


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
    """Decode one CLC message; ``encode`` of the value gives the same bytes but for reserved bits.

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
    try:
        return _CLASSES[raw[4]].read_untrusted(raw)
    except ValueError as error:
        raise ProtocolError(f"CLC {MessageType(raw[4]).name}: {error}") from None


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
