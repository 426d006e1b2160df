"""Connection Layer Control messages (RFC 7609, A.2): the handshake on the TCP connection.

Each message is a value with ``encode() -> bytes``; :func:`decode_untrusted` makes a value from the
bytes of a peer.  A constructor raises ValueError for a value that may not be sent.  Reserved bits
are sent as zero and ignored when received (A.2).

After a Decline the application's bytes follow at once, so no byte beyond a message may be read
from the TCP connection.  :class:`ClcReader` reads :data:`HEADER_SIZE` bytes, decodes the length and
then reads exactly the rest.  It checks eye catcher, type and length as each byte arrives.  So it
never waits for the rest of data that is not a CLC message.

Theory of operation: error or Decline?  RFC 7609, C.6 ends the TCP connection for everything that
is not a well-formed message, and wants a Decline only for reserved values of enumerations, since
a peer that uses them may just be newer.  So

- ProtocolError: wrong eye catcher at either end, unknown type, version 0, a length that the type
  does not allow or that its parts do not add up to; an IPv4 mask beyond 32 or an IPv6 prefix
  beyond 128 bits, more than 8 prefixes; in Accept and Confirm an RMBE index of 0 (they count from
  1), QP number 0 (never a reliably connected QP), a GID of zeros, and an RMBE that would end
  beyond 2**64: none of these is a possible target of a write.
- Decoded, so that the negotiation can decline: a reserved QP MTU (``known_mtu`` is None; it matters
  on first contact only), a Proposal that does not offer SMC-R (``offers_smc_r``), and each value
  that is a matter of policy, such as a buffer size above the RFC's 512 KiB.

A newer version nibble is decoded; the answer has ``answer_version``, the lower of both (A.2).

Version 2
---------
Version 2 (as in Linux 6.12) adds a part to each message of the RFC, the field ``v2``: `V2Offer` in
a Proposal, `V2Answer` in Accept and Confirm.  With None the messages are the RFC's.  One Proposal
may offer both versions.  The negotiation creates:

- client: ``Proposal(version=2, flags=..., v2=V2Offer(...))``; `proposal_flags` makes the flags;
- server: ``Accept(version=2, v2=V2Answer(...))`` if it chose version 2, and with ``first_contact``
  a `FirstContact` in it: the accepted release, limits and features, and True if its route is
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
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Self, TypeAlias

from trio_smc._base.errors import ProtocolError
from trio_smc.wire.fields import EID_SIZE, MAX_EIDS, RMBE_SIZE_UNIT, Value, eid_name

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
    "message_length_untrusted",
    "proposal_flags",
]


EYE_CATCHER = bytes.fromhex("E2D4C3D9")
"""First and last four bytes of every CLC message: "SMCR" in EBCDIC."""
VERSION = 1
"""The version of SMC-R that we speak, the only one RFC 7609 defines."""
HEADER_SIZE = 8
"""Bytes to read before a message's length is known."""
MAX_MESSAGE_SIZE = 1024
"""The longest message we read, bytes.  With all that SMC-R can add a Proposal has 524."""
MAX_PREFIXES = 8
"""IPv6 prefixes in a Proposal, at most (A.2.2)."""
LINUX = 2
"""The operating system that we say we are (version 2)."""

_HEADER = struct.Struct(">4sBHB")  # eye catcher, type, length, version and flags
_PROPOSAL = struct.Struct(">4sBHB8s16s6sH")  # the last is the offset to the prefix area, figure 26
_AREA = struct.Struct(">4sB2xB")  # IPv4 subnet, its length, number of IPv6 prefixes, figure 27
_PREFIX = struct.Struct(">16sB")
_ACCEPT = struct.Struct(">4sBHB8s16s6s3sIBIBxQx3s")  # and Confirm, figures 28 and 29
_DECLINE = struct.Struct(">4sBHB8sIB3x")  # figure 30; version 2 has the operating system
_DIAGNOSIS = struct.Struct(">4I")
# Version 2.  In a Proposal, before the prefix area: the offset of the extension from there on.
_V2_AREA = struct.Struct(">10xH28x")
_V2_OFFSETS_FROM = _PROPOSAL.size + 12
# The extension: numbers of EIDs and of SMC-D's GIDs, release, offset of what SMC-D adds, GID,
# limits (connections, links), features.  EIDs follow.
_V2_OFFER = struct.Struct(">BBxBxxH16sBBH12x")
_V2_ANSWER = struct.Struct(">32s8x")  # EID
# Direct, system and release, host, limits, features.
_V2_FIRST = struct.Struct(">BB2x32sBBH12x")
_V2_GIDS = struct.Struct(">B3x")  # how many

_MIN_PROPOSAL_SIZE = 52
_ACCEPT_SIZE = _ACCEPT.size + len(EYE_CATCHER)
_V2_ACCEPT_SIZE = _ACCEPT_SIZE + _V2_ANSWER.size
_V2_FIRST_ACCEPT_SIZE = _V2_ACCEPT_SIZE + _V2_FIRST.size
_V2_FIRST_CONFIRM_SIZE = _V2_FIRST_ACCEPT_SIZE + _V2_GIDS.size
_DECLINE_SIZES = (28, 44)

_CACHED_PROPOSALS = 64  # how many encoded and decoded Proposals are cached
_FIRST_CONTACT = _OUT_OF_SYNC = 0x08  # in byte 7; in Confirm from version 2 on
# Version 2 and newer: the two low bits of a Proposal's flags are the offer of version 1, the two
# above them that of version 2.  (1 is SMC-D.)
_OFFER_MASK, _SMC_R, _NOTHING, _BOTH = 0x03, 0, 2, 3
_NO_GID = bytes(16)
_DIRECT = 0x80
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


@contextmanager
def _decoding_untrusted(kind: MessageType) -> Iterator[None]:
    """Turn ValueError of a constructor into ProtocolError, because the values were received."""
    try:
        yield
    except ValueError as error:
        raise ProtocolError(f"CLC {kind.name}: {error}") from None


_Sizes: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class _Part(Value):
    """A message, or a part of one, whose fields have sizes."""

    # Names of fields, with their sizes in bytes or in bits.
    SIZES: ClassVar[_Sizes] = ()
    BITS: ClassVar[_Sizes] = ()

    def __post_init__(self) -> None:
        for name, size in self.SIZES:
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} has {len(getattr(self, name))} bytes instead of {size}")
        for name, bits in self.BITS:
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ValueError(f"{name} is {getattr(self, name)}, beyond {bits} bits")
        self._check()

    def _check(self) -> None:
        """Raise ValueError for values that this class forbids."""


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class ClcMessage(_Part):
    """Base class of all CLC messages.

    Fields:
      peer_id: the sender's: 2 bytes instance, 6 bytes RoCE MAC (A.2.1).
      version: the version nibble, 1..15.
    """

    TYPE: ClassVar[MessageType]
    SIZES: ClassVar[_Sizes] = (("peer_id", 8),)
    BITS: ClassVar[_Sizes] = (("version", 4),)

    peer_id: bytes
    version: int = VERSION

    def _check(self) -> None:
        if self.version == 0:
            raise ValueError("there is no version 0")

    @property
    def answer_version(self) -> int:
        """The version of our answer: the lowest common one (A.2)."""
        return min(VERSION, self.version)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Ipv6Prefix(Value):
    """One IPv6 prefix of a Proposal (figure 27): 16 bytes, and how many bits of them count."""

    prefix: bytes
    length: int

    def __post_init__(self) -> None:
        if len(self.prefix) != 16:
            raise ValueError(f"an IPv6 prefix has 16 bytes, not {len(self.prefix)}")
        if not 0 <= self.length <= 128:
            raise ValueError(f"IPv6 prefix of {self.length} bits")


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class V2Offer(_Part):
    """The offer of version 2 in a Proposal.

    Fields:
      eids: all EIDs of the client, 32 bytes each, 1 to 8 (a peer may send none).
      gid: of its RNIC, a RoCE version 2 GID, 16 bytes.
      release: 0 or 1; 4 bits.
      max_connections, max_links: of a link group, from release 1 on; else 0.
      features: from release 1 on, a mask of 16 bits.
    """

    SIZES: ClassVar[_Sizes] = (("gid", 16),)
    BITS: ClassVar[_Sizes] = (
        ("release", 4),
        ("max_connections", 8),
        ("max_links", 8),
        ("features", 16),
    )

    eids: tuple[bytes, ...]
    gid: bytes
    release: int
    max_connections: int = 0
    max_links: int = 0
    features: int = 0

    def _check(self) -> None:
        if len(self.eids) > MAX_EIDS:
            raise ValueError(f"{len(self.eids)} EIDs")
        if any(len(eid) != EID_SIZE for eid in self.eids):
            raise ValueError(f"an EID has {EID_SIZE} bytes")

    def encode(self) -> bytes:
        """The extension at a Proposal's end."""
        limits = self.max_connections, self.max_links, self.features
        head = _V2_OFFER.pack(len(self.eids), 0, self.release << 4, 0, self.gid, *limits)
        return head + b"".join(self.eids)

    @classmethod
    def read_untrusted(cls, data: bytes) -> V2Offer:
        """Decode the rest of a Proposal, trailer excluded, from the extension on.

        Raises:
          ProtocolError: the parts do not add up to the length, or there are too many EIDs.
        """
        if len(data) < _V2_OFFER.size:
            raise ProtocolError("CLC PROPOSAL: no room for what version 2 adds")
        count, _, release, smc_d, gid, connections, links, features = _V2_OFFER.unpack_from(data)
        end = _V2_OFFER.size + EID_SIZE * count
        if end > len(data) or (end < len(data) and not smc_d):
            raise ProtocolError(f"CLC PROPOSAL: {count} EIDs in {len(data)} bytes")
        with _decoding_untrusted(MessageType.PROPOSAL):
            return cls(
                eids=tuple(data[at : at + EID_SIZE] for at in range(_V2_OFFER.size, end, EID_SIZE)),
                gid=gid,
                release=release >> 4,
                max_connections=connections,
                max_links=links,
                features=features,
            )


def proposal_flags(*, v1: bool, v2: bool) -> int:
    """``Proposal.flags`` of a client of version 2 that offers SMC-R in these versions."""
    return (_SMC_R if v2 else _NOTHING) << 2 | (_SMC_R if v1 else _NOTHING)


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Proposal(ClcMessage):
    """SMC Proposal, figure 26: 52 bytes for IPv4, 17 more for every IPv6 prefix.

    Linux sends version nibble 2 and 40 more bytes before the prefixes even when it offers version
    1 only: 92 bytes for IPv4.

    Fields:
      gid, mac: the client's preferred RNIC, 16 and 6 bytes.
      flags: the 4 low bits of byte 7, from version 2 on; 0 in version 1, which reserves them.
      ipv4_subnet: the subnet *number*, address & mask, 4 bytes; zeros on IPv6.  (The RFC's prose
        says mask; its use in 3.5.1.2 and every known peer mean the subnet.)
      ipv4_mask_length: bits of it, 0..32; 0 on IPv6.
      ipv6_prefixes: at most 8; empty on IPv4.
      v2: the offer of SMC-R version 2.  None if version and flags announce no offer, or if the
        announced offer is missing.
    """

    TYPE: ClassVar[MessageType] = MessageType.PROPOSAL
    SIZES: ClassVar[_Sizes] = (("peer_id", 8), ("gid", 16), ("mac", 6), ("ipv4_subnet", 4))
    BITS: ClassVar[_Sizes] = (("version", 4), ("flags", 4))

    gid: bytes
    mac: bytes
    flags: int = 0
    ipv4_subnet: bytes = bytes(4)
    ipv4_mask_length: int = 0
    ipv6_prefixes: tuple[Ipv6Prefix, ...] = ()
    v2: V2Offer | None = None

    @property
    def offers_smc_r(self) -> bool:
        """True if SMC-R version 1 is offered; a newer client may offer SMC-D or nothing instead."""
        return self.version == 1 or self.flags & _OFFER_MASK in (_SMC_R, _BOTH)

    def _check(self) -> None:
        ClcMessage._check(self)
        if not 0 <= self.ipv4_mask_length <= 32:
            raise ValueError(f"IPv4 mask of {self.ipv4_mask_length} bits")
        if len(self.ipv6_prefixes) > MAX_PREFIXES:
            raise ValueError(f"{len(self.ipv6_prefixes)} IPv6 prefixes")
        if self.version == 1 and self.flags:
            raise ValueError(f"flags {self.flags} where version 1 has none")
        area = self.ipv4_subnet, self.ipv4_mask_length, self.ipv6_prefixes
        if not _has_prefixes(self.version, self.flags) and area != (bytes(4), 0, ()):
            raise ValueError("prefixes without a version-1 offer")
        if self.v2 is not None and not _offers_v2(self.version, self.flags):
            raise ValueError("v2 where version and flags offer none")

    def encode(self) -> bytes:
        """The message on the wire."""
        return _encoded(self)

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Proposal:
        """Decode a Proposal whose header and trailer were checked.

        Raises:
          ProtocolError: the parts do not add up to the length, or have forbidden values.
        """
        return _decoded_untrusted(raw)


def _has_prefixes(version: int, flags: int) -> bool:
    return version == 1 or flags & _OFFER_MASK != _NOTHING


def _offers_v2(version: int, flags: int) -> bool:
    return version > 1 and flags >> 2 & _OFFER_MASK in (_SMC_R, _BOTH)


@functools.lru_cache(_CACHED_PROPOSALS)
def _encoded(m: Proposal) -> bytes:
    """Cached, because a client sends the same Proposal for all its connections."""
    prefixes = b""
    if _has_prefixes(m.version, m.flags):
        prefixes = _AREA.pack(m.ipv4_subnet, m.ipv4_mask_length, len(m.ipv6_prefixes))
        prefixes += b"".join(_PREFIX.pack(each.prefix, each.length) for each in m.ipv6_prefixes)
    area, offer = b"", b"" if m.v2 is None else m.v2.encode()
    if m.version > 1:
        at = _PROPOSAL.size + _V2_AREA.size + len(prefixes)
        area = _V2_AREA.pack(at - _V2_OFFSETS_FROM if offer else 0)
    body = area + prefixes + offer + EYE_CATCHER
    return (
        _PROPOSAL.pack(
            EYE_CATCHER,
            m.TYPE,
            _PROPOSAL.size + len(body),
            m.version << 4 | m.flags,
            m.peer_id,
            m.gid,
            m.mac,
            len(area) if prefixes else 0,
        )
        + body
    )


@functools.lru_cache(_CACHED_PROPOSALS)
def _decoded_untrusted(raw: bytes) -> Proposal:
    """Cached, because a peer sends the same Proposal for all its connections."""
    *_, last, peer_id, gid, mac, skip = _PROPOSAL.unpack_from(raw)
    version = last >> 4
    flags = last & 0x0F if version > 1 else 0
    data, end = raw[:-4], _PROPOSAL.size
    parts: dict[str, Any] = {}
    if _has_prefixes(version, flags):
        # A reader that trusts this offset, or the number of prefixes, reads beyond the message
        # (CVE-2024-49571).
        parts, end = _prefixes_untrusted(data, _PROPOSAL.size + skip)
    if version == 1 and end < len(data):
        raise ProtocolError(f"CLC PROPOSAL: {len(data) - end} bytes behind the prefixes")
    if _offers_v2(version, flags) and (not parts or skip >= _V2_AREA.size):
        if len(data) < _PROPOSAL.size + _V2_AREA.size:
            raise ProtocolError("CLC PROPOSAL: no room for version 2")
        [offset] = _V2_AREA.unpack_from(data, _PROPOSAL.size)
        if offset:
            at, end = _V2_OFFSETS_FROM + offset, max(end, _PROPOSAL.size + _V2_AREA.size)
            if at < end:
                raise ProtocolError(f"CLC PROPOSAL: version 2 at byte {at}, before {end}")
            parts["v2"] = V2Offer.read_untrusted(data[at:])
    with _decoding_untrusted(MessageType.PROPOSAL):
        return Proposal(peer_id=peer_id, version=version, gid=gid, mac=mac, flags=flags, **parts)


def _prefixes_untrusted(data: bytes, at: int) -> tuple[dict[str, Any], int]:
    """The fields of the prefix area at byte ``at``, and the offset of its end."""
    if at + _AREA.size > len(data):
        raise ProtocolError(f"CLC PROPOSAL: no room for a prefix area at byte {at}")
    subnet, mask_length, count = _AREA.unpack_from(data, at)
    start = at + _AREA.size
    end = start + _PREFIX.size * count
    if end > len(data):
        raise ProtocolError(f"CLC PROPOSAL: {count} IPv6 prefixes in {len(data) - start} bytes")
    with _decoding_untrusted(MessageType.PROPOSAL):
        prefixes = tuple(
            Ipv6Prefix(prefix=prefix, length=length)
            for prefix, length in _PREFIX.iter_unpack(data[start:end])
        )
    return {
        "ipv4_subnet": subnet,
        "ipv4_mask_length": mask_length,
        "ipv6_prefixes": prefixes,
    }, end


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


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class FirstContact(_Part):
    """The additional part of Accept and Confirm of version 2 on first contact.

    Fields:
      direct: no gateway is between the RNICs; the server announces its route, and that of the
        client must be the same.
      release: the agreed one, 4 bits.
      max_connections, max_links: of the link group, from release 1 on; else 0.
      features: a subset of the Proposal's, from release 1 on, a mask of 16 bits.
      system: operating system: 1 z/OS, 2 Linux, 3 AIX; 4 bits.
      host: its name in ASCII, padded with blanks, 32 bytes; see ``host_name``.
    """

    SIZES: ClassVar[_Sizes] = (("host", 32),)
    BITS: ClassVar[_Sizes] = (
        *(("release", 4), ("max_connections", 8), ("max_links", 8), ("features", 16)),
        ("system", 4),
    )

    direct: bool
    release: int
    max_connections: int = 0
    max_links: int = 0
    features: int = 0
    system: int = LINUX
    host: bytes = b" " * 32

    @property
    def host_name(self) -> str:
        """The peer's name as printable ASCII; all other bytes are escaped."""
        return eid_name(self.host)

    def encode(self) -> bytes:
        """The 52 bytes after the EID."""
        limits = self.max_connections, self.max_links, self.features
        direct = _DIRECT if self.direct else 0
        return _V2_FIRST.pack(direct, self.system << 4 | self.release, self.host, *limits)

    @classmethod
    def read_untrusted(cls, data: bytes) -> FirstContact:
        """Decode the 52 bytes."""
        direct, kinds, host, connections, links, features = _V2_FIRST.unpack(data)
        return cls(
            direct=direct & _DIRECT != 0,
            release=kinds & 0x0F,
            max_connections=connections,
            max_links=links,
            features=features,
            system=kinds >> 4,
            host=host,
        )


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class V2Answer(_Part):
    """The additional part of Accept and Confirm in version 2.

    Fields:
      eid: the agreed one, 32 bytes.
      first: only on first contact, else None.
      gids: in a Confirm on first contact the GIDs of the client's RNICs, 16 bytes each, the link's
        own first.
    """

    SIZES: ClassVar[_Sizes] = (("eid", EID_SIZE),)

    eid: bytes
    first: FirstContact | None = None
    gids: tuple[bytes, ...] = ()

    def _check(self) -> None:
        if any(len(gid) != len(_NO_GID) or gid == _NO_GID for gid in self.gids):
            raise ValueError("a GID has 16 bytes, which are not all zero")

    def encode(self, kind: MessageType) -> bytes:
        """The bytes after the credentials in an Accept or a Confirm."""
        parts = [_V2_ANSWER.pack(self.eid)]
        if self.first is not None:
            parts.append(self.first.encode())
            if kind is MessageType.CONFIRM:
                parts += _V2_GIDS.pack(len(self.gids)), *self.gids
        return b"".join(parts)

    @classmethod
    def read_untrusted(cls, data: bytes, kind: int) -> V2Answer:
        """Decode the bytes after the credentials.

        Raises:
          ProtocolError: the parts do not add up to the length, or a GID has only zeros.
        """
        [eid] = _V2_ANSWER.unpack_from(data)
        data = data[_V2_ANSWER.size :]
        if not data:
            return cls(eid=eid)
        first, data = FirstContact.read_untrusted(data[: _V2_FIRST.size]), data[_V2_FIRST.size :]
        if kind == MessageType.ACCEPT:
            return cls(eid=eid, first=first)
        [count] = _V2_GIDS.unpack_from(data)
        starts = range(_V2_GIDS.size, len(data), len(_NO_GID))
        if count != len(starts):
            raise ProtocolError(f"CLC CONFIRM: {count} GIDs in {len(data)} bytes")
        gids = tuple(data[at : at + len(_NO_GID)] for at in starts)
        with _decoding_untrusted(MessageType.CONFIRM):
            return cls(eid=eid, first=first, gids=gids)


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Credentials(ClcMessage):
    """The common part of Accept and Confirm: the target of writes to the sender (A.2.3).

    Fields:
      first_contact: the F bit; the server sets up a new link group.  Confirm has it from version 2
        on.  Version 1 reserves the bit there (A.2.4): Linux sets it, and its servers never read it.
      gid, mac, qp_number: the sender's end of the link: 16 and 6 bytes, 24 bits, not zero.
      rkey, rmb_address: the RToken of its RMB, 32 and 64 bits.
      rmbe_index: the element of the RMB that belongs to this connection, 1..255.
      alert_token: the token in all CDC messages to the sender, 32 bits.
      buffer_size_code: n; an element has 16 KiB << n.  The RFC ends at 5, Linux at 15.
      qp_mtu: enumerated path MTU, 4 bits; see ``known_mtu``.
      initial_psn: the first packet sequence number the sender will use, 24 bits.
      v2: the additional part of version 2.
    """

    SIZES: ClassVar[_Sizes] = (("peer_id", 8), ("gid", 16), ("mac", 6))
    BITS: ClassVar[_Sizes] = (
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
    v2: V2Answer | None = None

    @property
    def buffer_size(self) -> int:
        """Size of one element of the sender's RMB, bytes."""
        return RMBE_SIZE_UNIT << self.buffer_size_code

    @property
    def known_mtu(self) -> QpMtu | None:
        """The QP MTU; None is a reserved value: Decline, on first contact (C.6)."""
        try:
            return QpMtu(self.qp_mtu)
        except ValueError:
            return None

    def _check(self) -> None:
        ClcMessage._check(self)
        if self.qp_number == 0:
            raise ValueError("QP number 0")
        if self.gid == _NO_GID:
            raise ValueError("a GID of zeros")
        if self.rmbe_index == 0:
            raise ValueError("RMBE index 0")
        if self.rmb_address + self.rmbe_index * self.buffer_size > _END_OF_MEMORY:
            raise ValueError("an RMBE beyond the end of memory")
        if self.first_contact and not self._has_first_contact(self.version):
            raise ValueError("a first-contact flag in a Confirm of version 1")
        if self.v2 is not None:
            self._check_v2(self.v2)

    @classmethod
    def _has_first_contact(cls, version: int) -> bool:
        """True if a message of this version has the F bit."""
        return version > 1 or cls.TYPE is not MessageType.CONFIRM

    def _check_v2(self, v2: V2Answer) -> None:
        if self.version == 1:
            raise ValueError("version 1 ends with the credentials")
        if (v2.first is not None) != self.first_contact:
            raise ValueError("first contact with, and only with, what version 2 adds to it")
        if v2.gids and (self.TYPE is not MessageType.CONFIRM or not self.first_contact):
            raise ValueError("GIDs in a message that has none")
        if len(v2.gids) > _MAX_GIDS:
            raise ValueError(f"{len(v2.gids)} GIDs")

    def encode(self) -> bytes:
        """The message on the wire: 68 bytes, and the additional part of version 2."""
        more = EYE_CATCHER if self.v2 is None else self.v2.encode(self.TYPE) + EYE_CATCHER
        return (
            _ACCEPT.pack(
                EYE_CATCHER,
                self.TYPE,
                _ACCEPT.size + len(more),
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
            + more
        )

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Self:
        """Decode a message whose header and trailer were checked.

        Raises:
          ProtocolError: the values are not a possible target of a write, or the additional part of
            version 2 has a wrong length.
        """
        *_, last, peer_id, gid, mac, qp, rkey, index, token, codes, address, psn = (
            _ACCEPT.unpack_from(raw)
        )
        more = raw[_ACCEPT.size : -len(EYE_CATCHER)]
        try:
            return cls.of(
                peer_id,
                last >> 4,
                last & _FIRST_CONTACT != 0 and cls._has_first_contact(last >> 4),
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
                V2Answer.read_untrusted(more, cls.TYPE) if more else None,
            )
        except ValueError as error:
            raise ProtocolError(f"CLC {cls.TYPE.name}: {error}") from None

    @classmethod
    def of(
        cls,
        peer_id: bytes,
        version: int,
        first_contact: bool,
        gid: bytes,
        mac: bytes,
        qp_number: int,
        rkey: int,
        rmbe_index: int,
        alert_token: int,
        buffer_size_code: int,
        qp_mtu: int,
        rmb_address: int,
        initial_psn: int,
        v2: V2Answer | None,
    ) -> Self:
        """Create a message from values that fit their fields: our own, or read by a struct.

        Each connection needs two messages, so this skips the size checks of ``__init__``.

        Raises ValueError: the values are not a possible target of a write.
        """
        made = object.__new__(cls)
        made.peer_id = peer_id
        made.version = version
        made.first_contact = first_contact
        made.gid = gid
        made.mac = mac
        made.qp_number = qp_number
        made.rkey = rkey
        made.rmbe_index = rmbe_index
        made.alert_token = alert_token
        made.buffer_size_code = buffer_size_code
        made.qp_mtu = qp_mtu
        made.rmb_address = rmb_address
        made.initial_psn = initial_psn
        made.v2 = v2
        made._check()
        return made


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Accept(Credentials):
    """SMC Accept, figure 28: 68 bytes; 108 or 160 in version 2."""

    TYPE: ClassVar[MessageType] = MessageType.ACCEPT


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Confirm(Credentials):
    """SMC Confirm, figure 29: 68 bytes; 108, or from 164 on, in version 2."""

    TYPE: ClassVar[MessageType] = MessageType.CONFIRM


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
    BITS: ClassVar[_Sizes] = (("version", 4), ("diagnosis", 32), ("system", 4))

    out_of_sync: bool = False
    diagnosis: int
    more_diagnosis: tuple[int, int, int, int] | None = None
    system: int = 0

    def _check(self) -> None:
        ClcMessage._check(self)
        more = self.more_diagnosis
        if more is not None and any(not 0 <= word < 1 << 32 for word in more):
            raise ValueError("more_diagnosis is four words of 32 bits")
        if more is None and self.system:
            raise ValueError("28 bytes do not tell the system")

    def encode(self) -> bytes:
        """The 28 or 44 bytes on the wire."""
        more = b"" if self.more_diagnosis is None else _DIAGNOSIS.pack(*self.more_diagnosis)
        length = _DECLINE_SIZES[bool(more)]
        last = self.version << 4 | (_OUT_OF_SYNC if self.out_of_sync else 0)
        told = self.peer_id, self.diagnosis, self.system << 4
        return _DECLINE.pack(EYE_CATCHER, self.TYPE, length, last, *told) + more + EYE_CATCHER

    @classmethod
    def read_untrusted(cls, raw: bytes) -> Decline:
        """Decode a Decline whose header and trailer were checked."""
        *_, length, last, peer_id, diagnosis, system = _DECLINE.unpack_from(raw)
        newer = length > _DECLINE_SIZES[0]
        return cls(
            peer_id=peer_id,
            version=last >> 4,
            out_of_sync=last & _OUT_OF_SYNC != 0,
            diagnosis=diagnosis,
            more_diagnosis=_DIAGNOSIS.unpack_from(raw, _DECLINE.size) if newer else None,
            system=system >> 4 if newer else 0,
        )


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
    eye_catcher, kind, length, last = _HEADER.unpack_from(header)
    if eye_catcher != EYE_CATCHER:
        raise ProtocolError("no CLC message: it does not start with the eye catcher")
    if last >> 4 == 0:
        raise ProtocolError("CLC message of version 0")
    fits = _SIZES.get(kind)
    if fits is None:
        raise ProtocolError(f"CLC message of unknown type {kind}")
    if length not in fits and (last >> 4 == 1 or length not in _V2_SIZES[kind]):
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
    return _CLASSES[raw[4]].read_untrusted(raw)


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
    """Collects one message after another from a TCP connection.

    Attributes:
      wanted: the most bytes that may be read now; never 0.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self.wanted: int = HEADER_SIZE

    @property
    def halfway(self) -> bool:
        """True if a part of a message was received."""
        return bool(self._data)

    def feed_untrusted(self, piece: bytes, awaited: frozenset[int] = _TYPES) -> bytes | None:
        """Add 1 to `wanted` bytes; returns the message if they complete it.

        The eye catcher at the end is checked here while a message is incomplete;
        `decode_untrusted` checks it in a complete one.

        Args:
          piece: the bytes.
          awaited: types of the messages that are allowed now.

        Raises:
          ProtocolError: no CLC message, or none of an awaited type, begins or ends with these
            bytes (RFC 7609, C.6).
        """
        data = self._data
        if not data and not awaited:
            raise ProtocolError("a CLC message that did not wait for an answer")
        data += piece
        self.wanted -= len(piece)
        size = len(data)
        if size < HEADER_SIZE:
            _check_start_untrusted(data)
        elif size == HEADER_SIZE:
            self.wanted = message_length_untrusted(data) - HEADER_SIZE
        elif not self.wanted:
            message = bytes(data)
            data.clear()
            self.wanted = HEADER_SIZE
            return message
        elif self.wanted < len(EYE_CATCHER) and not EYE_CATCHER.startswith(
            data[self.wanted - len(EYE_CATCHER) :]
        ):
            raise ProtocolError("CLC message without the eye catcher at its end")
        if len(EYE_CATCHER) < size <= HEADER_SIZE and data[4] not in awaited:
            raise ProtocolError(f"SMC {MessageType(data[4]).name.title()} out of turn")
        return None
