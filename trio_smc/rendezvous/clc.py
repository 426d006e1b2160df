"""Connection Layer Control messages (RFC 7609, A.2): the handshake on the TCP connection.

Every message is a frozen value with ``encode() -> bytes``; :func:`decode_untrusted` makes one out
of what a peer sent.  Because application data may follow a message at once, a reader first takes
:data:`HEADER_SIZE` bytes, asks :func:`message_length_untrusted`, and then takes exactly the rest.
A field's annotation says where it lies (byte offsets from the start of the message, big-endian);
``trio_smc.rendezvous._wire`` explains how.  A constructor raises ValueError for a value that may
not be sent.

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

import struct
from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar, TypeAlias

from trio_smc._base.config import rmbe_size_of
from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous._clc_base import (
    EYE_CATCHER,
    HEAD,
    HEADER_SIZE,
    VERSION,
    ClcMessage,
    MessageType,
)
from trio_smc.rendezvous._proposal import (
    MAX_MESSAGE_SIZE,
    MAX_PREFIXES,
    MIN_PROPOSAL_SIZE,
    Ipv6Prefix,
    Proposal,
    decode_proposal_untrusted,
)
from trio_smc.rendezvous._wire import Bits, Span, laid_out

__all__ = [
    "EYE_CATCHER",
    "HEADER_SIZE",
    "MAX_MESSAGE_SIZE",
    "MAX_PREFIXES",
    "VERSION",
    "Accept",
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
