"""SMC Proposal, the only CLC message of variable length (RFC 7609, A.2.2)."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous._clc_base import EYE_CATCHER, HEAD, ClcMessage, MessageType
from trio_smc.rendezvous._wire import Bits, Span, laid_out

__all__ = [
    "MAX_MESSAGE_SIZE",
    "MAX_PREFIXES",
    "MIN_PROPOSAL_SIZE",
    "Ipv6Prefix",
    "Proposal",
    "decode_proposal_untrusted",
]

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
