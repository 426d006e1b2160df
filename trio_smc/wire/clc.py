"""Connection Layer Control messages (RFC 7609, A.2): the handshake on the TCP connection.

Each message is a value with ``encode() -> bytes``; :func:`decode_untrusted` makes a value from the
bytes of a peer.  A field's annotation gives its position, in bytes from the start of the message or
of its part (``trio_smc.wire.layout``).  A constructor raises ValueError for a value that may not be
sent.  Reserved bits are sent as zero and ignored when received (A.2).

After a Decline the application's bytes follow at once, so no byte beyond a message may be read
from the TCP connection.  :class:`ClcReader` reads :data:`HEADER_SIZE` bytes, decodes the length and
then reads exactly the rest.  It checks eye catcher, type and length as each byte arrives.  So if
the data is not a CLC message, no side waits for the rest of a message that will never come.

Theory of operation: error or Decline?  RFC 7609, C.6 ends the TCP connection after anything but a
well-formed message.  It requires a Decline only for reserved values of enumerations, because a
newer peer may use them.  So a message is answered by one of:

- ProtocolError: wrong eye catcher at either end, unknown type, version 0, a length that the type
  does not allow or that its parts do not add up to; an IPv4 mask beyond 32 or an IPv6 prefix
  beyond 128 bits, more than 8 prefixes; in Accept and Confirm an RMBE index of 0 (indices count
  from 1), QP number 0 (never a reliably connected QP), a GID of zeros, and an RMBE that would end
  beyond 2**64: none of these is a possible target of a write.
- Decline: the message is decoded, and the negotiation declines.  Such values are a reserved QP MTU
  (``known_mtu`` is None; only a first contact declines), a Proposal that does not offer SMC-R
  (``offers_smc_r``), and each value that is a matter of policy, such as a buffer size above the
  RFC's 512 KiB.

A message of a version above 1 is decoded, too.  The negotiation answers with the lower of the two
sides' versions (A.2).

Version 2
---------
Version 2 (as in Linux 6.12) adds a part to each message of the RFC, the field ``v2``: `V2Offer` in
a Proposal, `V2Answer` in Accept and Confirm.  With None the messages are the RFC's.  One Proposal
may offer both versions.  The negotiation creates:

- client: ``Proposal(version=2, flags=..., v2=V2Offer(...))``; `proposal_flags` makes the flags;
- server: ``Accept(version=2, v2=V2Answer(...))`` if it chose version 2, and with ``first_contact``
  a `FirstContact` in it: the accepted release, limits and features, and whether its route is
  direct;
- client: a similar ``Confirm``, which repeats EID, release and limits; on first contact with the
  GIDs of its RNICs, the link's own first;
- either: ``Decline(version=2, more_diagnosis=..., system=...)``, 44 bytes.

The codec checks lengths, counts and offsets, and refuses GIDs of zeros in Confirm's list.  The
negotiation checks EIDs, releases, limits and all other GIDs, and declines invalid ones.  A Proposal
may have zeros as its ID, GID and MAC: Linux sends these if it offers version 2 only.  The parts of
SMC-D are skipped.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.fields import EID_SIZE, MAX_EIDS, RMBE_SIZE_UNIT, Value, eid_name
from trio_smc.wire.layout import Bits, Layout, Slots, Span, laid_out

__all__ = [
    "EYE_CATCHER",
    "HEADER_SIZE",
    "LINUX",
    "MAX_MESSAGE_SIZE",
    "MAX_PREFIXES",
    "VERSION",
    "Accept",
    "ClcMessage",
    "ClcReader",
    "Confirm",
    "Credentials",
    "Decline",
    "FirstContact",
    "Ipv6Prefix",
    "Message",
    "MessageType",
    "Proposal",
    "QpMtu",
    "V2Answer",
    "V2Offer",
    "decode_untrusted",
    "encode_credentials",
    "message_length_untrusted",
    "proposal_flags",
]


EYE_CATCHER = bytes.fromhex("E2D4C3D9")
"""First and last four bytes of every CLC message: "SMCR" in EBCDIC."""
VERSION = 1
"""The version of SMC-R that RFC 7609 defines."""
HEADER_SIZE = 8
"""Bytes to read before a message's length is known."""
MAX_MESSAGE_SIZE = 1024
"""Bytes of the longest message that is read.  Chosen: the longest Proposal of SMC-R has 524."""
MAX_PREFIXES = 8
"""IPv6 prefixes in a Proposal, at most (A.2.2)."""
LINUX = 2
"""The operating system that this side names in messages of version 2."""

_HEADER = struct.Struct(">4sBH")  # eye catcher, type, length; then version and flags
_DIAGNOSIS = struct.Struct(">4I")

_MIN_PROPOSAL_SIZE = 52
_ACCEPT_SIZE = 68
_V2_ACCEPT_SIZE = 108
_V2_FIRST_ACCEPT_SIZE = 160
_V2_FIRST_CONFIRM_SIZE = 164  # and 16 for each GID
_DECLINE_SIZES = (28, 44)

_CACHED_HEADERS = 64  # chosen
_CACHED_LINKS = 64  # encoded Accepts and Confirms of one RMB and link; chosen
_CACHED_PROPOSALS = 64  # encoded Proposals that are cached, and as many decoded ones; chosen
# From version 2 on, the two low bits of a Proposal's flags are the offer of version 1, and the two
# bits above them that of version 2: SMC-R, SMC-D (1), nothing or both.
_OFFER_MASK, _SMC_R, _NOTHING, _BOTH = 0x03, 0, 2, 3
_NO_GID = bytes(16)
_END_OF_MEMORY = 1 << 64
_MAX_GIDS = (MAX_MESSAGE_SIZE - _V2_FIRST_CONFIRM_SIZE) // len(_NO_GID)


class MessageType(IntEnum):
    """Byte 4 of a CLC message."""

    PROPOSAL = 1
    ACCEPT = 2
    CONFIRM = 3
    DECLINE = 4


# Sizes in bytes that a message of each type may have in version 1, and further ones in version 2.
_SIZES: dict[int, Container[int]] = {
    MessageType.PROPOSAL: range(_MIN_PROPOSAL_SIZE, MAX_MESSAGE_SIZE + 1),
    MessageType.ACCEPT: (_ACCEPT_SIZE,),
    MessageType.CONFIRM: (_ACCEPT_SIZE,),
    MessageType.DECLINE: _DECLINE_SIZES,
}
_V2_SIZES: dict[int, Container[int]] = {
    MessageType.PROPOSAL: (),
    MessageType.ACCEPT: (_V2_ACCEPT_SIZE, _V2_FIRST_ACCEPT_SIZE),
    MessageType.CONFIRM: (
        _V2_ACCEPT_SIZE,
        *range(_V2_FIRST_CONFIRM_SIZE, MAX_MESSAGE_SIZE + 1, len(_NO_GID)),
    ),
    MessageType.DECLINE: (),
}
_TYPES: frozenset[int] = frozenset(MessageType)
# The first byte of each length that a message of a type may have, in any version.
_LENGTH_STARTS: dict[int, frozenset[int]] = {
    kind: frozenset(
        size >> 8
        for size in range(MAX_MESSAGE_SIZE + 1)
        if size in _SIZES[kind] or size in _V2_SIZES[kind]
    )
    for kind in _TYPES
}


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class _Part(Value):
    """A message, or a part of one, whose fields have positions."""

    LAYOUT: ClassVar[Layout]

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)
        self._check()

    def _check(self) -> None:
        """Raise ValueError for values that fit their fields, but are forbidden."""

    def encode(self) -> bytes:
        """The bytes on the wire."""
        return bytes(self.LAYOUT.pack(self))

    @classmethod
    def read_untrusted(cls, data: bytes, version: int = 1, **more: Any) -> Self:
        """Decode bytes, at least as many as the layout has.

        Parameters:
          version: 1 or 2: the fields of this version are read.
          more: the values of the fields that have no position.

        Raises:
          ProtocolError: a value is forbidden.
        """
        # Without the constructor, because its `Layout.check` is not needed here and takes time.
        part = object.__new__(cls)
        try:
            cls.LAYOUT.read_untrusted(part, data, version)
            for name, value in more.items():
                setattr(part, name, value)
            part._check()
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        return part


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class ClcMessage(_Part):
    """Base class of all CLC messages.

    Fields:
      peer_id: the sender's peer ID: 2 bytes instance number, 6 bytes RoCE MAC (A.2.1).
      version: the version nibble, 1..15.
    """

    TYPE: ClassVar[MessageType]

    peer_id: Annotated[bytes, Span(8, 8)]
    version: Annotated[int, Bits(7, 0xF0)] = VERSION

    def _check(self) -> None:
        if self.version == 0:
            raise ValueError("there is no version 0")

    def _framed(self, rest: bytes = b"") -> bytes:
        """The message: header, fields with a position, ``rest``, trailer."""
        body = self.LAYOUT.pack(self, min(self.version, 2))
        body += rest + EYE_CATCHER
        _HEADER.pack_into(body, 0, EYE_CATCHER, self.TYPE, len(body))
        return bytes(body)

    @classmethod
    def decode_untrusted(cls, raw: bytes) -> Self:
        """Decode a message whose header and trailer were checked.

        Raises:
          ProtocolError: the parts do not add up to the length, or have forbidden values.
        """
        return cls.read_untrusted(raw, min(raw[7] >> 4, 2))


@laid_out(17)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Ipv6Prefix(_Part):
    """One IPv6 prefix of a Proposal (figure 27): 16 bytes, and the length of the prefix in bits."""

    prefix: Annotated[bytes, Span(0, 16)]
    length: Annotated[int, Span(16, 1)]

    def _check(self) -> None:
        if self.length > 128:
            raise ValueError(f"IPv6 prefix of {self.length} bits")


@laid_out(8)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class _PrefixArea(_Part):
    """The prefix area of a Proposal, figure 27; the fields are those of `Proposal`."""

    ipv4_subnet: Annotated[bytes, Span(0, 4)] = bytes(4)
    ipv4_mask_length: Annotated[int, Span(4, 1)] = 0
    ipv6_prefixes: Annotated[
        tuple[Ipv6Prefix, ...], Slots(8, 17, slots=MAX_PREFIXES, count_in=7)
    ] = ()

    def _check(self) -> None:
        if self.ipv4_mask_length > 32:
            raise ValueError(f"IPv4 mask of {self.ipv4_mask_length} bits")

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return self.LAYOUT.size + Ipv6Prefix.LAYOUT.size * len(self.ipv6_prefixes)


@laid_out(40)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class V2Offer(_Part):
    """The offer of version 2 in a Proposal.

    Fields:
      eids: all EIDs of the client, 32 bytes each, 1 to 8 (a peer may send none).
      gid: the GID of the client's RNIC, for RoCE version 2, 16 bytes.
      release: 0 or 1; 4 bits.
      max_connections, max_links: of a link group, from release 1 on; else 0.
      features: from release 1 on, a mask of 16 bits.
    """

    eids: Annotated[tuple[bytes, ...], Slots(40, EID_SIZE, slots=MAX_EIDS, count_in=0)]
    gid: Annotated[bytes, Span(8, 16)]
    release: Annotated[int, Bits(3, 0xF0)]
    max_connections: Annotated[int, Span(24, 1)] = 0
    max_links: Annotated[int, Span(25, 1)] = 0
    features: Annotated[int, Span(26, 2)] = 0

    @classmethod
    def decode_untrusted(cls, data: bytes) -> Self:
        """Decode the rest of a Proposal, trailer excluded, from the extension on.

        Raises:
          ProtocolError: the parts do not add up to the length, or there are too many EIDs.
        """
        if len(data) < cls.LAYOUT.size:
            raise ProtocolError("no room for the offer of version 2")
        offer = cls.read_untrusted(data)
        smc_d = any(data[6:8])  # the offset of the part of SMC-D, which follows the EIDs
        if not smc_d and len(data) > cls.LAYOUT.size + EID_SIZE * len(offer.eids):
            raise ProtocolError(f"{len(offer.eids)} EIDs in {len(data)} bytes")
        return offer


def proposal_flags(*, v1: bool, v2: bool) -> int:
    """``Proposal.flags`` of a client of version 2 that offers SMC-R in these versions."""
    return (_SMC_R if v2 else _NOTHING) << 2 | (_SMC_R if v1 else _NOTHING)


@laid_out(40)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Proposal(ClcMessage):
    """SMC Proposal, figure 26: 52 bytes for IPv4, 17 more for every IPv6 prefix.

    Linux sends version nibble 2 and 40 more bytes before the prefixes even when it offers version
    1 only: 92 bytes for IPv4.

    Fields:
      gid, mac: the client's preferred RNIC, 16 and 6 bytes.
      flags: the 4 low bits of byte 7, from version 2 on; 0 in version 1, which reserves them.
      ipv4_subnet: the subnet *number*, address & mask, 4 bytes; zeros on IPv6.  (The RFC's text of
        this field says mask; but 3.5.1.2 and all known peers use the subnet.)
      ipv4_mask_length: bits of the subnet, 0..32; 0 on IPv6.
      ipv6_prefixes: at most 8; empty on IPv4.
      v2: the offer of SMC-R version 2.  None if version and flags announce no such offer, or if the
        announced offer is missing.
    """

    TYPE: ClassVar[MessageType] = MessageType.PROPOSAL

    gid: Annotated[bytes, Span(16, 16)]
    mac: Annotated[bytes, Span(32, 6)]
    flags: Annotated[int, Bits(7, 0x0F, 2)] = 0
    ipv4_subnet: bytes = bytes(4)
    ipv4_mask_length: int = 0
    ipv6_prefixes: tuple[Ipv6Prefix, ...] = ()
    v2: V2Offer | None = None

    @property
    def offers_smc_r(self) -> bool:
        """True if SMC-R version 1 is offered; a newer client may offer SMC-D or nothing instead."""
        return self.flags & _OFFER_MASK in (_SMC_R, _BOTH)  # 0 in version 1: SMC-R

    def _check(self) -> None:
        ClcMessage._check(self)
        if self.version == 1 and self.flags:
            raise ValueError(f"flags {self.flags} in version 1, which has none")
        area = self.prefix_area()
        if not _has_prefixes(self.version, self.flags) and area != _PrefixArea():
            raise ValueError("prefixes without a version-1 offer")
        if self.v2 is not None and not _offers_v2(self.version, self.flags):
            raise ValueError("v2, but version and flags do not announce it")

    def prefix_area(self) -> _PrefixArea:
        """The fields with the prefixes, as they are on the wire.  Raises ValueError."""
        return _PrefixArea(
            ipv4_subnet=self.ipv4_subnet,
            ipv4_mask_length=self.ipv4_mask_length,
            ipv6_prefixes=self.ipv6_prefixes,
        )

    def encode(self) -> bytes:
        """The message on the wire."""
        global _last_encoded
        last = _last_encoded
        if last[0] is not self:  # otherwise `hash` would read all fields
            last = _last_encoded = self, _encoded(self)
        return last[1]

    @classmethod
    def decode_untrusted(cls, raw: bytes) -> Proposal:
        """As `ClcMessage.decode_untrusted`."""
        return _decoded_untrusted(raw)


# The field of a Proposal that has the offset of the prefix area.  The offset counts from the end of
# the field (figure 26).
_AREA_OFFSET = slice(38, 40)
# From version 2 on, 40 bytes come before the prefix area.  They have a field with the offset of the
# extension, which counts from the end of that field, too.
_V2_OFFSET = slice(50, 52)
_V2_AREA_SIZE = 40
_V2_AREA_END = _AREA_OFFSET.stop + _V2_AREA_SIZE


def _has_prefixes(version: int, flags: int) -> bool:
    return version == 1 or flags & _OFFER_MASK != _NOTHING


def _offers_v2(version: int, flags: int) -> bool:
    return version > 1 and flags >> 2 & _OFFER_MASK in (_SMC_R, _BOTH)


_last_encoded: tuple[Proposal | None, bytes] = (None, b"")


@functools.lru_cache(_CACHED_PROPOSALS)
def _encoded(proposal: Proposal) -> bytes:
    """Cached, because a client sends the same Proposal for all its connections."""
    prefixes = (
        proposal.prefix_area().encode() if _has_prefixes(proposal.version, proposal.flags) else b""
    )
    offer = b"" if proposal.v2 is None else proposal.v2.encode()
    area = bytes(_V2_AREA_SIZE if proposal.version > 1 else 0)
    message = bytearray(proposal._framed(area + prefixes + offer))
    if prefixes:
        message[_AREA_OFFSET] = len(area).to_bytes(2, "big")
    if offer:
        at = _V2_AREA_END + len(prefixes)
        message[_V2_OFFSET] = (at - _V2_OFFSET.stop).to_bytes(2, "big")
    return bytes(message)


@functools.lru_cache(_CACHED_PROPOSALS)
def _decoded_untrusted(raw: bytes) -> Proposal:
    """Cached, because a peer sends the same Proposal for all its connections."""
    version, flags = raw[7] >> 4, raw[7] & 0x0F
    data, end = raw[: -len(EYE_CATCHER)], _AREA_OFFSET.stop
    skip = int.from_bytes(raw[_AREA_OFFSET], "big")
    parts: dict[str, Any] = {}
    if _has_prefixes(version, flags):
        # A reader that trusts this offset, or the number of prefixes, reads beyond the message
        # (CVE-2024-49571).
        start = end + skip
        if start + _PrefixArea.LAYOUT.size > len(data):
            raise ProtocolError(f"no room for a prefix area at byte {start}")
        area = _PrefixArea.read_untrusted(data[start:])
        parts["ipv4_subnet"] = area.ipv4_subnet
        parts["ipv4_mask_length"] = area.ipv4_mask_length
        parts["ipv6_prefixes"] = area.ipv6_prefixes
        end = start + area.size
    if version == 1 and end < len(data):
        raise ProtocolError(f"{len(data) - end} bytes after the prefixes")
    if _offers_v2(version, flags) and (not parts or skip >= _V2_AREA_SIZE):
        if len(data) < _V2_AREA_END:
            raise ProtocolError("no room for version 2")
        distance = int.from_bytes(data[_V2_OFFSET], "big")
        if distance:
            at, end = _V2_OFFSET.stop + distance, max(end, _V2_AREA_END)
            if at < end:
                raise ProtocolError(f"version 2 at byte {at}, before {end}")
            parts["v2"] = V2Offer.decode_untrusted(data[at:])
    return Proposal.read_untrusted(raw, min(version, 2), **parts)


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


@laid_out(52)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class FirstContact(_Part):
    """The additional part of Accept and Confirm of version 2 on first contact.

    Fields:
      direct: no gateway is between the RNICs; the server announces its route, and that of the
        client must be the same.
      release: the agreed release, 4 bits.
      max_connections, max_links: of the link group, from release 1 on; else 0.
      features: a subset of the Proposal's, from release 1 on, a mask of 16 bits.
      system: the sender's operating system: 1 z/OS, 2 Linux, 3 AIX; 4 bits.
      host: the name of the sender's host in ASCII, padded with blanks, 32 bytes; see ``host_name``.
    """

    direct: Annotated[bool, Bits(0, 0x80)]
    release: Annotated[int, Bits(1, 0x0F)]
    max_connections: Annotated[int, Span(36, 1)] = 0
    max_links: Annotated[int, Span(37, 1)] = 0
    features: Annotated[int, Span(38, 2)] = 0
    system: Annotated[int, Bits(1, 0xF0)] = LINUX
    host: Annotated[bytes, Span(4, 32)] = b" " * 32

    @property
    def host_name(self) -> str:
        """The host's name as printable ASCII; all other bytes are escaped."""
        return eid_name(self.host)


@laid_out(40)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class V2Answer(_Part):
    """The additional part of Accept and Confirm in version 2.

    Fields:
      eid: the agreed EID, 32 bytes.
      first: on first contact the additional part of the message, else None.
      gids: in a Confirm on first contact the GIDs of the client's RNICs, 16 bytes each, the link's
        own first.
    """

    eid: Annotated[bytes, Span(0, EID_SIZE)]
    first: FirstContact | None = None
    gids: tuple[bytes, ...] = ()

    def _check(self) -> None:
        if any(len(gid) != len(_NO_GID) or gid == _NO_GID for gid in self.gids):
            raise ValueError("a GID has 16 bytes, which are not all zero")

    def encode_for(self, kind: MessageType) -> bytes:
        """The bytes after the credentials in an Accept or a Confirm."""
        parts = [self.encode()]
        if self.first is not None:
            parts.append(self.first.encode())
            if kind is MessageType.CONFIRM:
                parts += bytes((len(self.gids), 0, 0, 0)), *self.gids
        return b"".join(parts)

    @classmethod
    def decode_untrusted(cls, data: bytes, kind: MessageType) -> Self:
        """Decode the bytes after the credentials.

        Raises:
          ProtocolError: the parts do not add up to the length, or a GID has only zeros.
        """
        rest = data[cls.LAYOUT.size :]
        if not rest:
            return cls.read_untrusted(data)
        first = FirstContact.read_untrusted(rest)
        if kind is MessageType.ACCEPT:
            return cls.read_untrusted(data, first=first)
        listed = rest[FirstContact.LAYOUT.size :]
        gids = tuple(listed[at : at + len(_NO_GID)] for at in range(4, len(listed), len(_NO_GID)))
        if listed[0] != len(gids):
            raise ProtocolError(f"{listed[0]} GIDs in {len(listed)} bytes")
        return cls.read_untrusted(data, first=first, gids=gids)


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Credentials(ClcMessage):
    """The common fields of Accept and Confirm: where the receiver may write to (A.2.3).

    Fields:
      first_contact: the F bit; the server sets up a new link group.  Confirm has it from version 2
        on.  Version 1 reserves the bit there (A.2.4): Linux sets it, and its servers never read it.
      gid, mac, qp_number: the sender's end of the link: 16 and 6 bytes, 24 bits, not zero.
      rkey, rmb_address: the RToken of its RMB, 32 and 64 bits.
      rmbe_index: the element of the RMB that belongs to this connection, 1..255.
      alert_token: the token in all CDC messages to the sender, 32 bits.
      buffer_size_code: n; an element has 16 KiB << n.  n is at most 5 in the RFC, and 15 in Linux.
      qp_mtu: enumerated path MTU, 4 bits; see ``known_mtu``.
      initial_psn: the first packet sequence number that the sender will use, 24 bits.
      v2: the additional part of version 2.
    """

    first_contact: Annotated[bool, Bits(7, 0x08)] = False
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
    v2: V2Answer | None = None

    @property
    def buffer_size(self) -> int:
        """Size of one element of the sender's RMB, bytes."""
        return RMBE_SIZE_UNIT << self.buffer_size_code

    @property
    def known_mtu(self) -> QpMtu | None:
        """The QP MTU; None: the value is reserved, and a first contact is declined (C.6)."""
        try:
            return QpMtu(self.qp_mtu)
        except ValueError:
            return None

    def _check(self) -> None:
        if self.version == 0:  # inlined `ClcMessage._check`
            raise ValueError("there is no version 0")
        if self.qp_number == 0:
            raise ValueError("QP number 0")
        if self.gid == _NO_GID:
            raise ValueError("a GID of zeros")
        if self.rmbe_index == 0:
            raise ValueError("RMBE index 0")
        size = RMBE_SIZE_UNIT << self.buffer_size_code
        if self.rmb_address + self.rmbe_index * size > _END_OF_MEMORY:
            raise ValueError("an RMBE beyond the end of memory")
        if self.v2 is not None:
            self._check_v2(self.v2)

    def _check_v2(self, v2: V2Answer) -> None:
        if self.version == 1:
            raise ValueError("version 1 ends with the credentials")
        if (v2.first is not None) != self.first_contact:
            raise ValueError("first contact without `FirstContact`, or the reverse")
        if v2.gids and (self.TYPE is not MessageType.CONFIRM or not self.first_contact):
            raise ValueError("GIDs in a message that has no field for them")
        if len(v2.gids) > _MAX_GIDS:
            raise ValueError(f"{len(v2.gids)} GIDs")

    def encode(self) -> bytes:
        """The message on the wire: 68 bytes, and the additional part of version 2."""
        return self._framed(b"" if self.v2 is None else self.v2.encode_for(self.TYPE))

    @classmethod
    def decode_untrusted(cls, raw: bytes) -> Self:
        """As `ClcMessage.decode_untrusted`."""
        version = min(raw[7] >> 4, 2)
        if len(raw) == _ACCEPT_SIZE:
            return cls.read_untrusted(raw, version)
        more = raw[cls.LAYOUT.size : -len(EYE_CATCHER)]
        return cls.read_untrusted(raw, version, v2=V2Answer.decode_untrusted(more, cls.TYPE))


_PER_CONNECTION: Final = slice(45, 50)  # RMBE index and alert token
_INDEX_AND_TOKEN: Final = struct.Struct(">BI")


def encode_credentials(
    kind: type[Accept | Confirm], link: tuple[Any, ...], *, rmbe_index: int, alert_token: int
) -> bytes:
    """An Accept or Confirm of version 1, for a connection of an existing link and RMB.

    Parameters:
      link: the values that all connections of the link and the RMB share: `peer_id`,
        `first_contact`, `gid`, `mac`, `qp_number`, `rkey`, `buffer_size_code`, `qp_mtu`,
        `rmb_address`, `initial_psn` (`Credentials`).

    Raises:
      ValueError: a value of ``link`` does not fit its field.
      struct.error: another value does not fit its field.
    """
    message = bytearray(_link_credentials(kind is Accept, link))
    message[_PER_CONNECTION] = _INDEX_AND_TOKEN.pack(rmbe_index, alert_token)
    return bytes(message)


@functools.lru_cache(_CACHED_LINKS)
def _link_credentials(is_accept: bool, link: tuple[Any, ...]) -> bytes:
    """The message for the first element of an RMB.  Cached, because the checks and the packing of
    all fields take longer than the rest of the message."""
    peer_id, first_contact, gid, mac, qp_number, rkey, size_code, qp_mtu, rmb_address, psn = link
    message = (Accept if is_accept else Confirm)(
        peer_id=peer_id,
        first_contact=first_contact,
        gid=gid,
        mac=mac,
        qp_number=qp_number,
        rkey=rkey,
        rmbe_index=1,
        alert_token=0,
        buffer_size_code=size_code,
        qp_mtu=qp_mtu,
        rmb_address=rmb_address,
        initial_psn=psn,
    )
    return message.encode()


@laid_out(64)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Accept(Credentials):
    """SMC Accept, figure 28: 68 bytes; 108 or 160 in version 2."""

    TYPE: ClassVar[MessageType] = MessageType.ACCEPT


@laid_out(64)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Confirm(Credentials):
    """SMC Confirm, figure 29: 68 bytes; 108, or from 164 on, in version 2."""

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM

    first_contact: Annotated[bool, Bits(7, 0x08, 2)] = False

    def _check(self) -> None:
        Credentials._check(self)
        if self.first_contact and self.version == 1:
            raise ValueError("a first-contact flag in a Confirm of version 1")


@laid_out(24)
@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Decline(ClcMessage):
    """SMC Decline, figure 30: 28 bytes; 44 in version 2.

    Fields:
      out_of_sync: the S bit; the receiver must clean up its link group.
      diagnosis: 32 bits, defined by each implementation.
      more_diagnosis: four more words in the 44-byte form, else None.
      system: in the 44-byte form the sender's operating system, as in `FirstContact`.
    """

    TYPE: ClassVar[MessageType] = MessageType.DECLINE

    out_of_sync: Annotated[bool, Bits(7, 0x08)] = False
    diagnosis: Annotated[int, Span(16, 4)]
    more_diagnosis: tuple[int, int, int, int] | None = None
    system: Annotated[int, Bits(20, 0xF0)] = 0

    def _check(self) -> None:
        ClcMessage._check(self)
        more = self.more_diagnosis
        if more is not None and any(not 0 <= word < 1 << 32 for word in more):
            raise ValueError("more_diagnosis is four words of 32 bits")
        if more is None and self.system:
            raise ValueError("the 28-byte form has no field for the system")

    def encode(self) -> bytes:
        """The 28 or 44 bytes on the wire."""
        more = self.more_diagnosis
        return self._framed(b"" if more is None else _DIAGNOSIS.pack(*more))

    @classmethod
    def decode_untrusted(cls, raw: bytes) -> Self:
        """As `ClcMessage.decode_untrusted`."""
        if len(raw) == _DECLINE_SIZES[0]:
            return cls.read_untrusted(raw[:20] + bytes(4))  # the 28-byte form has no system
        more = _DIAGNOSIS.unpack_from(raw, cls.LAYOUT.size)
        return cls.read_untrusted(raw, more_diagnosis=more)


Message: TypeAlias = Proposal | Accept | Confirm | Decline

_CLASSES: dict[int, type[Message]] = {cls.TYPE: cls for cls in (Proposal, Accept, Confirm, Decline)}


def message_length_untrusted(header: bytes | bytearray | memoryview) -> int:
    """The length in bytes of a message, header included, from its first :data:`HEADER_SIZE` bytes.

    Parameters:
      header: at least 8 bytes; further bytes are ignored.

    Raises:
      ProtocolError: too few bytes, no eye catcher, an unknown type, version 0, or a length that
        this type cannot have.  So bytes that are not a CLC message are refused before anything
        beyond the header is read from the stream.
    """
    if len(header) < HEADER_SIZE:
        raise ProtocolError(f"CLC header of {len(header)} bytes")
    return _length_untrusted(bytes(header[:HEADER_SIZE]))


@functools.lru_cache(_CACHED_HEADERS)
def _length_untrusted(header: bytes) -> int:
    """Cached, because there are few different headers, and each is checked twice."""
    eye_catcher, kind, length = _HEADER.unpack_from(header)
    version = header[7] >> 4
    if eye_catcher != EYE_CATCHER:
        raise ProtocolError("no CLC message: it does not start with the eye catcher")
    if version == 0:
        raise ProtocolError("CLC message of version 0")
    fits = _SIZES.get(kind)
    if fits is None:
        raise ProtocolError(f"CLC message of unknown type {kind}")
    if length not in fits and (version == 1 or length not in _V2_SIZES[kind]):
        raise ProtocolError(f"CLC {MessageType(kind).name} of {length} bytes")
    return int(length)


def decode_untrusted(data: bytes | bytearray | memoryview) -> Message:
    """Decode one CLC message; ``encode`` of the value gives the same bytes except reserved bits.

    Parameters:
      data: exactly the message.

    Raises:
      ProtocolError: see the docstring of this module.
    """
    raw = bytes(data)
    length = message_length_untrusted(raw)
    if len(raw) != length:
        raise ProtocolError(f"CLC message of {len(raw)} bytes with length {length}")
    if raw[-4:] != EYE_CATCHER:
        raise ProtocolError("CLC message without the eye catcher at its end")
    cls = _CLASSES[raw[4]]
    try:
        return cls.decode_untrusted(raw)
    except ProtocolError as error:
        raise ProtocolError(f"CLC {cls.TYPE.name}: {error}") from None


def _check_start_untrusted(data: bytearray) -> None:
    """Check the first bytes of a message, fewer than a header.

    Raises:
      ProtocolError: no CLC message of any version starts with these bytes.
    """
    if not EYE_CATCHER.startswith(data[: len(EYE_CATCHER)]):
        raise ProtocolError("no CLC message: it does not start with the eye catcher")
    if len(data) <= len(EYE_CATCHER):
        return
    kind, length = data[4], data[5:7]
    starts = _LENGTH_STARTS.get(kind)
    if starts is None:
        raise ProtocolError(f"CLC message of unknown type {kind}")
    size = int.from_bytes(length, "big")
    if len(length) == 1 and size not in starts:
        raise ProtocolError(f"CLC {MessageType(kind).name} of {size << 8} bytes or more")
    if len(length) == 2 and size not in _SIZES[kind] and size not in _V2_SIZES[kind]:
        raise ProtocolError(f"CLC {MessageType(kind).name} of {size} bytes")


class ClcReader:
    """Collects CLC messages, one after the other, from pieces of a TCP stream.

    Attributes:
      wanted: the most bytes that may be read now; never 0.
      nothing_follows: True if nothing was read yet, or `whole_untrusted` found the last message and
        no byte behind it.
    """

    __slots__ = ("_data", "nothing_follows", "wanted")

    def __init__(self) -> None:
        self._data = bytearray()
        self.wanted: int = HEADER_SIZE
        self.nothing_follows: bool = True

    @property
    def halfway(self) -> bool:
        """True if a part of a message was received."""
        return bool(self._data)

    def whole_untrusted(self, data: bytes, awaited: frozenset[int]) -> bytes | None:
        """The message with which ``data`` begins, without adding it; None if `feed_untrusted` has
        to be used, because the message is incomplete or invalid, or a part of it was added before.

        Args:
          data: the next bytes of the stream, any number.
          awaited: as for `feed_untrusted`.
        """
        if self._data or len(data) < HEADER_SIZE or data[4] not in awaited:
            return None
        length, size = _length_untrusted(data[:HEADER_SIZE]), len(data)
        self.nothing_follows = size <= length
        if size == length:
            return data
        return data[:length] if size > length else None

    def feed_untrusted(self, piece: bytes, awaited: frozenset[int] = _TYPES) -> bytes | None:
        """Add at least 1 and at most `wanted` bytes; return the message if it is complete.

        The eye catcher at the end is checked here while a message is incomplete;
        `decode_untrusted` checks it in a complete one.

        Args:
          piece: the bytes.
          awaited: types of the messages that are allowed now.

        Raises:
          ProtocolError: the bytes do not belong to a CLC message of an awaited type (RFC 7609,
            C.6).
        """
        data = self._data
        if not data and not awaited:
            raise ProtocolError("a CLC message before the answer to the last one")
        self.nothing_follows = False  # not known yet
        data += piece
        self.wanted -= len(piece)
        size = len(data)
        if size > HEADER_SIZE and not self.wanted:
            message = bytes(data)
            data.clear()
            self.wanted = HEADER_SIZE
            return message
        if size < HEADER_SIZE:
            _check_start_untrusted(data)
        elif size == HEADER_SIZE:
            self.wanted = message_length_untrusted(data) - HEADER_SIZE
        elif self.wanted < len(EYE_CATCHER) and not EYE_CATCHER.startswith(
            data[self.wanted - len(EYE_CATCHER) :]
        ):
            raise ProtocolError("CLC message without the eye catcher at its end")
        if len(EYE_CATCHER) < size <= HEADER_SIZE and data[4] not in awaited:
            raise ProtocolError(f"unexpected SMC {MessageType(data[4]).name.title()}")
        return None
