"""The positions of all fields of CLC, LLC and CDC messages.  All other bits are reserved.

The tables are typed from the figures of RFC 7609, appendix A, and for version 2 from messages of
kernels, independently of the codecs.  A sender sets bits without a field to zero, and a receiver
ignores them (A.2).  The same holds for unused slots of a list (A.3: "padded out with zeros").

The table of ADD LINK follows real messages, which have two bytes between MAC and GID that figure 32
does not show.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = [
    "EXCEPTIONS", "KERNELS", "reserved_bits", "with_all_set", "without_reserved", "wrongly_set",
]  # fmt: skip


class Field(NamedTuple):
    """A field of ``size`` bytes from ``offset`` on; in each byte, the bits of ``mask`` belong to
    the field."""

    name: str
    offset: int
    size: int = 1
    mask: int = 0xFF


_CLC_HEADER = (Field("eye catcher", 0, 4), Field("type", 4), Field("length", 5, 2),
               Field("version", 7, mask=0xF0), Field("peer ID", 8, 8))  # fmt: skip
_PROPOSAL = (*_CLC_HEADER, Field("GID", 16, 16), Field("MAC", 32, 6), Field("offset", 38, 2))
_CREDENTIALS = (
    *_CLC_HEADER, Field("GID", 16, 16), Field("MAC", 32, 6), Field("QP number", 38, 3),
    Field("RKey", 41, 4), Field("RMBE index", 45), Field("alert token", 46, 4),
    Field("buffer size, MTU", 50), Field("RMB address", 52, 8), Field("initial PSN", 61, 3),
)  # fmt: skip
_DECLINE = (*_CLC_HEADER, Field("S", 7, mask=0x08), Field("diagnosis", 16, 4))
_F = Field("F", 7, mask=0x08)
_TYPE = Field("SMC-D: type", 7, mask=0x03)  # version 2: 0 is SMC-R

_EXTENSION = (  # of a Proposal of version 2, from its first byte
    Field("number of EIDs", 0), Field("SMC-D: number of GIDs", 1),
    Field("release", 3, mask=0xF0), Field("SMC-D: SEID", 3, mask=0x01),
    Field("SMC-D: offset", 6, 2), Field("GID", 8, 16), Field("max connections", 24),
    Field("max links", 25), Field("features", 26, 2),
)  # fmt: skip
_FIRST = (  # of Accept and Confirm of version 2, first contact
    Field("direct", 104, mask=0x80), Field("system, release", 105), Field("host", 108, 32),
    Field("max connections", 140), Field("max links", 141), Field("features", 142, 2),
    Field("vendor options", 144, 4),
)  # fmt: skip

_R = Field("R", 3, mask=0x80)
_END = (Field("MAC", 4, 6), Field("GID", 10, 16), Field("QP number", 26, 3),
        Field("link number", 29))  # fmt: skip
_LLC: dict[int, tuple[Field, ...]] = {
    0x01: (_R, *_END, Field("link user ID", 30, 4), Field("max links", 34)),
    0x02: (_R, Field("Z", 3, mask=0x40), Field("MAC", 4, 6), Field("GID", 12, 16),
           Field("QP number", 28, 3), Field("link number", 31), Field("MTU", 32, mask=0x0F),
           Field("initial PSN", 33, 3)),
    0x03: (_R, Field("link number", 4), Field("RTokens left", 5)),
    0x04: (_R, Field("A", 3, mask=0x40), Field("O", 3, mask=0x20), Field("link number", 4),
           Field("reason", 5, 4)),
    0x05: (_R, Field("number of GIDs", 24)),
    0x06: (_R, Field("Z", 3, mask=0x20), Field("C", 3, mask=0x10), Field("other RTokens", 4),
           Field("RKey", 5, 4), Field("address", 9, 8)),
    0x07: (_R, Field("user data", 4, 16)),
    0x08: (_R, Field("Z", 3, mask=0x20), Field("RTokens left", 4)),
    0x09: (_R, Field("Z", 3, mask=0x20), Field("count", 4), Field("error mask, unknown", 5)),
}  # fmt: skip

_CDC = (
    Field("type", 0), Field("length", 1), Field("sequence number", 2, 2),
    Field("alert token", 4, 4), Field("producer wrap", 10, 2), Field("producer cursor", 12, 4),
    Field("consumer wrap", 18, 2), Field("consumer cursor", 20, 4),
    Field("B, P, U, R, F", 24, mask=0xF8), Field("D, C, A", 25, mask=0xE0),
)  # fmt: skip

UNUSED = ("SMC-D", "vendor options")
"""Prefixes of the names of fields that trio_smc does not use, and sends as zeros."""

# (kind, type, byte): the bits, and the reason.
Exceptions: TypeAlias = dict[tuple[str, int, int], tuple[int, str]]

EXCEPTIONS: Exceptions = {
    ("llc", 0x01, 3): (
        0x03,
        "CONFIRM LINK: RMB elements have no eye catcher. Linux insists on these bits.",
    ),
}
"""Reserved bits that trio_smc sets and reads."""

KERNELS: Exceptions = EXCEPTIONS | {
    ("clc", 0x03, 7): (0x08, "Confirm of version 1: Linux repeats the F bit of Accept there."),
}
"""Reserved bits that kernels set."""


def reserved_bits(kind: str, data: bytes, *, count_unused: bool = False) -> bytes:
    """A mask of the reserved bits for each byte of a message.

    Args:
      kind: "clc", "llc" or "cdc".
      data: a well-formed message.
      count_unused: True if the fields of `UNUSED` count as reserved.
    """
    fields = {"clc": _clc_fields, "llc": _llc_fields, "cdc": _cdc_fields}[kind](data)
    mask = bytearray(b"\xff" * len(data))
    for field in fields:
        if not (count_unused and field.name.startswith(UNUSED)):
            for at in range(field.offset, field.offset + field.size):
                mask[at] &= ~field.mask
    return bytes(mask)


def excepted(exceptions: Exceptions, kind: str, data: bytes) -> dict[int, int]:
    """The reserved bits of a message that may be set, by byte."""
    number = {"clc": data[4], "llc": data[0] & 0x1F, "cdc": 0}[kind]
    first = not (kind == "clc" and data[7] >> 4 > 1)
    return {
        at: bits
        for (of, type_, at), (bits, _) in exceptions.items()
        if (of, type_) == (kind, number) and first
    }


def with_all_set(kind: str, data: bytes) -> bytes:
    """The message with all reserved bits set except those of `EXCEPTIONS`."""
    made = bytearray(had | mask for had, mask in zip(data, reserved_bits(kind, data), strict=True))
    for at, bits in excepted(EXCEPTIONS, kind, data).items():
        made[at] = made[at] & ~bits | data[at] & bits
    return bytes(made)


def without_reserved(kind: str, data: bytes) -> bytes:
    """The message with all reserved bits clear except those of `EXCEPTIONS`."""
    kept = excepted(EXCEPTIONS, kind, data)
    return bytes(
        had & (~mask | kept.get(at, 0))
        for at, (had, mask) in enumerate(zip(data, reserved_bits(kind, data), strict=True))
    )


def wrongly_set(exceptions: Exceptions, kind: str, data: bytes) -> dict[int, int]:
    """The reserved bits that are set in a message, by byte.  The fields of `UNUSED` count as
    reserved."""
    mask = bytearray(reserved_bits(kind, data, count_unused=True))
    for at, bits in excepted(exceptions, kind, data).items():
        mask[at] &= ~bits
    return {at: had & bits for at, (had, bits) in enumerate(zip(data, mask, strict=True))
            if had & bits}  # fmt: skip


def _cdc_fields(_: bytes) -> list[Field]:
    return list(_CDC)


def _slots(name: str, offset: int, size: int, count: int) -> list[Field]:
    return [Field(name, offset, size * count)] if count else []


def _clc_fields(data: bytes) -> list[Field]:
    kind, version, size = data[4], data[7] >> 4, len(data)
    fields = [Field("eye catcher", size - 4, 4)]
    if kind == 1:
        return fields + _proposal_fields(data, version)
    if kind == 4:
        fields += _DECLINE
        if size == 44:
            fields += Field("system", 20, mask=0xF0), Field("more diagnosis", 24, 16)
        return fields
    fields += _CREDENTIALS
    if kind == 2 or version > 1:
        fields.append(_F)
    if version > 1:
        fields.append(_TYPE)
    if size > 68:
        fields.append(Field("EID", 64, 32))
    if size > 108:
        fields += _FIRST
        if kind == 3:
            fields.append(Field("number of GIDs", 156))
            fields += _slots("GIDs", 160, 16, data[156])
    return fields


def _proposal_fields(data: bytes, version: int) -> list[Field]:
    fields = list(_PROPOSAL)
    offers_1 = version == 1 or data[7] & 0x03 != 2
    offers_2 = version > 1 and data[7] >> 2 & 0x03 in (0, 3)
    if version > 1:
        fields.append(Field("flags", 7, mask=0x0F))
    growth = int.from_bytes(data[38:40], "big")
    if offers_1:
        at = 40 + growth
        fields += Field("subnet", at, 4), Field("mask length", at + 4), Field("prefixes", at + 7)
        fields += _slots("IPv6 prefixes", at + 8, 17, data[at + 7])
    if version > 1 and (not offers_1 or growth >= 40):
        fields += Field("SMC-D: GID, CHID", 40, 10), Field("offset of the extension", 50, 2)
        fields.append(Field("vendor options", 52, 8))
        at = 52 + int.from_bytes(data[50:52], "big")
        if offers_2 and at > 52:
            fields += [Field(n, at + first, size, mask) for n, first, size, mask in _EXTENSION]
            fields += _slots("EIDs", at + 40, 32, data[at])
    return fields


def _llc_fields(data: bytes) -> list[Field]:
    kind, version = data[0] & 0x1F, 2 if data[0] & 0x20 else 1
    fields = [Field("type", 0), Field("length", 1, version), *_LLC[kind]]
    if kind == 0x01 and version == 2:
        fields.append(Field("max connections", 35))
    elif kind == 0x02 and version == 1:
        fields.append(Field("reason", 2, mask=0x0F))
    elif kind == 0x02 and len(data) > 44:
        fields += Field("direct", 44, mask=0x80), Field("target GID", 46, 16)
        fields.append(Field("number of RTokens", 70, 2))
        fields += _slots("RTokens", 72, 16, (len(data) - 72) // 16)
    elif kind == 0x03:
        fields += _slots("RTokens", 8, 16, min(data[5], 2))
    elif kind == 0x05:
        fields += _slots("GIDs", 28, 16, data[24])
    elif kind == 0x06:
        fields += _slots("RTokens", 17, 13, min(data[4], 2))
    elif kind == 0x08:
        fields += _slots("RTokens", 5, 13, min(data[4], 3))
    elif kind == 0x09:
        fields += _slots("RKeys", 8, 4, data[4])
    return fields
