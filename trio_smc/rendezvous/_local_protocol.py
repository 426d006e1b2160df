"""The messages of same-host discovery, as bytes (no I/O).

One message is one packet of a Unix SOCK_SEQPACKET connection::

    bytes 0-3    b"TSMC"
    byte  4      lowest version the sender speaks
    byte  5      highest version the sender speaks
    byte  6      kind
    byte  7      REFUSED: why; otherwise 0
    bytes 8-43   ANNOUNCE: the TCP connection: source address (16, IPv4 as ::ffff:a.b.c.d),
                 source port (2), destination address (16), destination port (2); big-endian

The first eight bytes and REFUSED are the same in every version for ever, so that two programs
with no version in common can tell each other so.  A later version may append bytes, which
earlier ones skip.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason

__all__ = [
    "ACCEPTED",
    "GO",
    "HEARD",
    "HIGHEST_VERSION",
    "LOWEST_VERSION",
    "MAX_SIZE",
    "Kind",
    "Message",
    "announce",
    "decode_untrusted",
    "four_tuple",
    "refused",
]

LOWEST_VERSION = 1
HIGHEST_VERSION = 1
MAX_SIZE = 512
"""Bytes to receive at most; what a longer packet has beyond is cut off."""

_MAGIC = b"TSMC"
_HEAD = struct.Struct(">4sBBBB")
_FOUR_TUPLE = struct.Struct(">16sH16sH")
_MAPPED = bytes(10) + b"\xff\xff"


class Kind(IntEnum):
    """What a message says."""

    ANNOUNCE = 1
    """Client: I am about to open this TCP connection and speak SMC-R."""
    HEARD = 2
    """Server: connect now."""
    ACCEPTED = 3
    """Server: the connection was accepted by me; say GO and SMC-R starts."""
    GO = 4
    """Client: SMC-R it is."""
    REFUSED = 5
    """Server: not here, with the reason."""


_REASONS = {
    1: FallbackReason.LOCAL_VERSION_MISMATCH,
    2: FallbackReason.OTHER_USER,
    3: FallbackReason.HANDSHAKE_LIMIT,
    4: FallbackReason.DIRECTORY_UNUSABLE,
    5: FallbackReason.NO_RNIC,
    6: FallbackReason.RNIC_DOWN,
    7: FallbackReason.OUT_OF_RESOURCES,
    8: FallbackReason.NOT_PERMITTED,
    9: FallbackReason.SHORT_CONNECTIONS,
}
_REASON_CODES = {reason: code for code, reason in _REASONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A decoded message.

    Fields:
      kind: what it says; None when its sender speaks no version that we do.
      reason: of REFUSED, else None.
      connection: of ANNOUNCE the `four_tuple`, else b"".
    """

    kind: Kind | None
    reason: FallbackReason | None = None
    connection: bytes = b""


def four_tuple(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """The 36 bytes that name a TCP connection from `source` to `destination`.

    Addresses are text; scopes are ignored and IPv4 is the same as IPv4-mapped IPv6, so that both
    ends of a connection arrive at the same bytes.

    Raises:
      OSError: an address is none.
    """
    return _FOUR_TUPLE.pack(_packed(source[0]), source[1], _packed(destination[0]), destination[1])


def announce(connection: bytes) -> bytes:
    """An ANNOUNCE of the `four_tuple`."""
    return _HEAD.pack(_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, Kind.ANNOUNCE, 0) + connection


def refused(reason: FallbackReason) -> bytes:
    """A REFUSED; reasons without a code arrive as PEER_NOT_CAPABLE."""
    code = _REASON_CODES.get(reason, 0)
    return _HEAD.pack(_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, Kind.REFUSED, code)


def _constant(kind: Kind) -> bytes:
    return _HEAD.pack(_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, kind, 0)


HEARD = _constant(Kind.HEARD)
ACCEPTED = _constant(Kind.ACCEPTED)
GO = _constant(Kind.GO)


def decode_untrusted(data: bytes) -> Message:
    """What a peer's packet says.

    Raises:
      ProtocolError: it is no message of this protocol.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"same-host discovery: {len(data)} bytes are no message")
    magic, lowest, highest, code, detail = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 1 <= lowest <= highest:
        raise ProtocolError(f"same-host discovery: {data[:8].hex()} starts no message")
    if code == Kind.REFUSED:
        reason = _REASONS.get(detail, FallbackReason.PEER_NOT_CAPABLE)
        return Message(kind=Kind.REFUSED, reason=reason)
    if lowest > HIGHEST_VERSION or highest < LOWEST_VERSION:
        return Message(kind=None)
    if code not in Kind.__members__.values():
        raise ProtocolError(f"same-host discovery: kind {code}")
    kind = Kind(code)
    if kind is not Kind.ANNOUNCE:
        return Message(kind=kind)
    connection = data[_HEAD.size : _HEAD.size + _FOUR_TUPLE.size]
    if len(connection) < _FOUR_TUPLE.size:
        raise ProtocolError("same-host discovery: an announcement is cut short")
    return Message(kind=kind, connection=connection)


def _packed(address: str) -> bytes:
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return _MAPPED + socket.inet_pton(socket.AF_INET, address)
