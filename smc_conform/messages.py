"""Messages of SMC-R as the suite packs and reads them: by tables of fields, and by nothing else.

The codecs of `trio_smc` are part of what is judged, and they refuse to encode values that are
forbidden.  So the suite has its own tables, from the figures of RFC 7609, appendix A.  A message is
packed from values for any of its fields, right or wrong, and the tables also list the fields for
the checks that put a wrong value into each of them.

A field is named by the message and its own name: ``pack(ACCEPT, gid=..., qp_number=7)``.  Fields
that are not given are zero, except the fixed ones: type, length, eye catchers, version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

__all__ = [
    "ACCEPT",
    "ADD_LINK",
    "ADD_LINK_CONTINUATION",
    "CDC",
    "CLC_KINDS",
    "CONFIRM",
    "CONFIRM_LINK",
    "CONFIRM_RKEY",
    "CONFIRM_RKEY_CONTINUATION",
    "DECLINE",
    "DELETE_LINK",
    "DELETE_RKEY",
    "EYE_CATCHER",
    "LLC_KINDS",
    "PROPOSAL",
    "REQUEST_ADD_LINK",
    "TEST_LINK",
    "Field",
    "Layout",
    "Message",
    "pack",
    "read",
    "with_bytes",
]

EYE_CATCHER: Final = bytes.fromhex("E2D4C3D9")
"""The first and the last four bytes of a CLC message: "SMCR" in EBCDIC (A.2)."""
MESSAGE_SIZE: Final = 44
"""Bytes of each LLC and CDC message (A.3, A.4)."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Attributes:
      at: the offset of its first byte.
      size: bytes.
      mask: the bits of its single byte, or 0: all bits of all bytes.
      raw: the value is bytes, and not an integer.
    """

    at: int
    size: int = 1
    mask: int = 0
    raw: bool = False

    def write(self, data: bytearray, value: int | bytes) -> None:
        """Put the value into the message.  Bits that do not fit are cut off."""
        if isinstance(value, bytes):
            data[self.at : self.at + self.size] = value.ljust(self.size, b"\0")[: self.size]
        elif self.mask:
            shift = (self.mask & -self.mask).bit_length() - 1
            kept = data[self.at] & ~self.mask
            data[self.at] = kept | (int(value) << shift & self.mask)
        else:
            whole = int(value) & ((1 << 8 * self.size) - 1)
            data[self.at : self.at + self.size] = whole.to_bytes(self.size, "big")

    def read(self, data: bytes) -> Any:
        """The value in a message."""
        piece = data[self.at : self.at + self.size]
        if self.raw:
            return piece
        value = int.from_bytes(piece, "big")
        if self.mask:
            return (value & self.mask) >> ((self.mask & -self.mask).bit_length() - 1)
        return value


def _raw(at: int, size: int) -> Field:
    return Field(at, size, raw=True)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A kind of message: its name in the RFC, type, size in bytes and fields."""

    name: str
    kind: int
    size: int
    fields: Mapping[str, Field]

    def reserved(self) -> bytes:
        """A mask of the bits that belong to no field, which a sender leaves zero (A.2 to A.4)."""
        mask = bytearray(b"\xff" * self.size)
        for field in self.fields.values():
            for at in range(field.at, field.at + field.size):
                mask[at] &= ~field.mask & 0xFF if field.mask else 0
        return bytes(mask)


_CLC_HEAD: Final = {
    "eye_catcher": _raw(0, 4),
    "type": Field(4),
    "length": Field(5, 2),
    "version": Field(7, 1, 0xF0),
    "peer_id": _raw(8, 8),
}


def _clc(name: str, kind: int, size: int, **fields: Field) -> Layout:
    trailer = {"trailer": _raw(size - 4, 4)}
    return Layout(name, kind, size, MappingProxyType({**_CLC_HEAD, **fields, **trailer}))


_CREDENTIALS: Final = {
    "gid": _raw(16, 16),
    "mac": _raw(32, 6),
    "qp_number": Field(38, 3),
    "rkey": Field(41, 4),
    "rmbe_index": Field(45),
    "alert_token": Field(46, 4),
    "size_code": Field(50, 1, 0xF0),
    "qp_mtu": Field(50, 1, 0x0F),
    "rmb_address": Field(52, 8),
    "psn": Field(61, 3),
}

PROPOSAL: Final = _clc(
    "SMC Proposal", 1, 52,
    gid=_raw(16, 16), mac=_raw(32, 6), area_offset=Field(38, 2), subnet=_raw(40, 4),
    mask_length=Field(44), prefix_count=Field(47),
)  # fmt: skip
"""Figure 26, without IPv6 prefixes."""
ACCEPT: Final = _clc("SMC Accept", 2, 68, first_contact=Field(7, 1, 0x08), **_CREDENTIALS)
"""Figure 28."""
CONFIRM: Final = _clc("SMC Confirm", 3, 68, **_CREDENTIALS)
"""Figure 29."""
DECLINE: Final = _clc(
    "SMC Decline", 4, 28, out_of_sync=Field(7, 1, 0x08), diagnosis=Field(16, 4)
)  # fmt: skip
"""Figure 30."""


def _llc(name: str, kind: int, **fields: Field) -> Layout:
    head = {"type": Field(0), "length": Field(1), "reply": Field(3, 1, 0x80)}
    return Layout(name, kind, MESSAGE_SIZE, MappingProxyType({**head, **fields}))


CONFIRM_LINK: Final = _llc(
    "CONFIRM LINK", 1,
    no_eye_catcher=Field(3, 1, 0x03), mac=_raw(4, 6), gid=_raw(10, 16), qp_number=Field(26, 3),
    link_number=Field(29), link_user_id=Field(30, 4), max_links=Field(34),
)  # fmt: skip
"""Figure 31, with the two bits that Linux uses: the sender's elements have no eye catcher."""
ADD_LINK: Final = _llc(
    "ADD LINK", 2,
    reason=Field(2, 1, 0x0F), rejected=Field(3, 1, 0x40), mac=_raw(4, 6), gid=_raw(12, 16),
    qp_number=Field(28, 3), link_number=Field(31), qp_mtu=Field(32, 1, 0x0F), psn=Field(33, 3),
)  # fmt: skip
"""Figure 32, with the two bytes between MAC and GID that peers send and expect."""
ADD_LINK_CONTINUATION: Final = _llc(
    "ADD LINK CONTINUATION", 3,
    link_number=Field(4), tokens_left=Field(5),
    reference_rkey=Field(8, 4), new_rkey=Field(12, 4), new_address=Field(16, 8),
    reference_rkey_2=Field(24, 4), new_rkey_2=Field(28, 4), new_address_2=Field(32, 8),
)  # fmt: skip
"""Figures 33 and 34."""
DELETE_LINK: Final = _llc(
    "DELETE LINK", 4,
    all_links=Field(3, 1, 0x40), orderly=Field(3, 1, 0x20), link_number=Field(4),
    reason=Field(5, 4),
)  # fmt: skip
"""Figure 35."""
REQUEST_ADD_LINK: Final = _llc("REQUEST ADD LINK", 5)
"""Version 2 only."""
CONFIRM_RKEY: Final = _llc(
    "CONFIRM RKEY", 6,
    negative=Field(3, 1, 0x20), retry=Field(3, 1, 0x10), other_tokens=Field(4),
    rkey=Field(5, 4), address=Field(9, 8),
    link_1=Field(17), rkey_1=Field(18, 4), address_1=Field(22, 8),
    link_2=Field(30), rkey_2=Field(31, 4), address_2=Field(35, 8),
)  # fmt: skip
"""Figures 36 and 37."""
TEST_LINK: Final = _llc("TEST LINK", 7, user_data=_raw(4, 16))
"""Figure 40."""
CONFIRM_RKEY_CONTINUATION: Final = _llc(
    "CONFIRM RKEY CONTINUATION", 8,
    negative=Field(3, 1, 0x20), tokens_left=Field(4),
    link_1=Field(5), rkey_1=Field(6, 4), address_1=Field(10, 8),
    link_2=Field(18), rkey_2=Field(19, 4), address_2=Field(23, 8),
    link_3=Field(31), rkey_3=Field(32, 4), address_3=Field(36, 8),
)  # fmt: skip
"""Figure 38."""
DELETE_RKEY: Final = _llc(
    "DELETE RKEY", 9,
    negative=Field(3, 1, 0x20), count=Field(4), error_mask=Field(5),
    **{f"rkey_{place}": Field(4 + 4 * place, 4) for place in range(1, 9)},
)  # fmt: skip
"""Figure 39."""
CDC: Final = Layout(
    "CDC", 0xFE, MESSAGE_SIZE,
    MappingProxyType({
        "type": Field(0), "length": Field(1), "sequence": Field(2, 2), "alert_token": Field(4, 4),
        "producer_wrap": Field(10, 2), "producer": Field(12, 4),
        "consumer_wrap": Field(18, 2), "consumer": Field(20, 4),
        "writer_blocked": Field(24, 1, 0x80), "urgent_pending": Field(24, 1, 0x40),
        "urgent_present": Field(24, 1, 0x20), "update_requested": Field(24, 1, 0x10),
        "failover_validation": Field(24, 1, 0x08),
        "done": Field(25, 1, 0x80), "closed": Field(25, 1, 0x40), "aborted": Field(25, 1, 0x20),
    }),
)  # fmt: skip
"""Figure 41."""

CLC_KINDS: Final = {each.kind: each for each in (PROPOSAL, ACCEPT, CONFIRM, DECLINE)}
LLC_KINDS: Final = {
    each.kind: each
    for each in (
        CONFIRM_LINK, ADD_LINK, ADD_LINK_CONTINUATION, DELETE_LINK, REQUEST_ADD_LINK, CONFIRM_RKEY,
        TEST_LINK, CONFIRM_RKEY_CONTINUATION, DELETE_RKEY,
    )
}  # fmt: skip


def pack(layout: Layout, **values: int | bytes) -> bytes:
    """A message with these values; every other field is zero, except the fixed ones.

    A wrong value for a fixed field (``type``, ``length``, ``version``, ``eye_catcher``,
    ``trailer``) takes the place of the right one.
    """
    data = bytearray(layout.size)
    fixed: dict[str, int | bytes] = {"type": layout.kind, "length": layout.size}
    if "eye_catcher" in layout.fields:
        fixed |= {"eye_catcher": EYE_CATCHER, "trailer": EYE_CATCHER, "version": 1}
    for name, value in {**fixed, **values}.items():
        layout.fields[name].write(data, value)
    return bytes(data)


class Message:
    """A received message: its bytes, and its fields as attributes.

    Attributes:
      layout: its kind; None if the type is unknown.
      raw: the bytes.
    """

    __slots__ = ("layout", "raw")

    def __init__(self, layout: Layout | None, raw: bytes) -> None:
        self.layout = layout
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        if self.layout is None or name not in self.layout.fields:
            raise AttributeError(f"{self.name} has no field {name}")
        return self.layout.fields[name].read(self.raw)

    def __repr__(self) -> str:
        return f"<{describe(self)}>"

    @property
    def name(self) -> str:
        """The name of the message in the RFC."""
        if self.layout is not None:
            return self.layout.name
        return f"a message of type 0x{self.raw[:1].hex()}"

    def reserved_bits(self) -> bytes:
        """The bits that belong to no field; zeros if the sender respects the RFC."""
        assert self.layout is not None
        return bytes(a & b for a, b in zip(self.raw, self.layout.reserved(), strict=False))


def read(raw: bytes, *, clc: bool = False) -> Message:
    """A message of the implementation under test.

    Args:
      clc: from the TCP connection; otherwise from a link.
    """
    if clc:
        return Message(CLC_KINDS.get(raw[4]) if len(raw) > 4 else None, raw)
    if raw[:1] == b"\xfe":
        return Message(CDC, raw)
    kind = raw[0] if raw else -1
    # Version 2 marks the types of LLC messages with 0x20.
    return Message(LLC_KINDS.get(kind) or LLC_KINDS.get(kind ^ 0x20), raw)


def with_bytes(message: bytes, at: int, value: bytes) -> bytes:
    """The message with other bytes from this offset on."""
    return message[:at] + value + message[at + len(value) :]


_FLAGS: Final = {
    "writer_blocked": "B", "urgent_pending": "P", "urgent_present": "U", "update_requested": "R",
    "failover_validation": "F", "done": "D", "closed": "C", "aborted": "A",
}  # fmt: skip


def describe(message: Message) -> str:
    """One line for a ladder."""
    layout = message.layout
    if layout is None:
        return message.name
    if layout is CDC:
        flags = "".join(letter for name, letter in _FLAGS.items() if getattr(message, name))
        return (
            f"CDC {message.sequence} producer {message.producer_wrap}:{message.producer} "
            f"consumer {message.consumer_wrap}:{message.consumer}{' ' + flags if flags else ''}"
        )
    fields = layout.fields
    words = [layout.name]
    if layout is DECLINE:
        words.append(f"0x{message.diagnosis:08x}")
    if "reply" in fields and message.reply:
        words.append("reply")
    words += [
        name.replace("_", " ")
        for name in ("first_contact", "out_of_sync", "rejected", "negative", "retry", "all_links")
        if name in fields and getattr(message, name)
    ]
    if "link_number" in fields:
        words.append(f"link {message.link_number}")
    if "qp_number" in fields:
        words.append(f"QP 0x{message.qp_number:06x}")
    return " ".join(words)
