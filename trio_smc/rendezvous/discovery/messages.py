"""The messages of same-host discovery: their bytes, and taking one from a Unix connection.

One message is one packet of a Unix SOCK_SEQPACKET connection::

    bytes 0-3    b"TSMC"
    byte  4      lowest version the sender speaks
    byte  5      highest version the sender speaks
    byte  6      kind
    byte  7      REFUSED: why; ANNOUNCE and ACCEPTED: 1 when its sender takes SMC-R or nothing;
                 otherwise 0
    bytes 8-43   the TCP connection: source address (16, IPv4 as ::ffff:a.b.c.d), source
                 port (2), destination address (16), destination port (2); big-endian, as its
                 client sees it; PROVE: of the TCP connections to come, both ports zero
    bytes 44-61  LISTENING only: port to connect to (2), nonce (16)
    bytes 44-47  ANNOUNCE: a number of the sender's; ACCEPTED and REFUSED: that of the ANNOUNCE

The number tells announcements of the same addresses apart: an answer may arrive after its
announcement was withdrawn and the next one made.  Versions before 4 have none.

Who connects to that port gets a TCP proof, and then the end: the nonce, and the TCP connection in
the form of bytes 8-43 as the server sees it.

A REFUSED of eight bytes is about everything that was said on its Unix connection.  The first
eight bytes, and such a REFUSED, are the same in every version for ever, so that two programs with
no version in common can tell each other so.  A later version may append bytes, which earlier ones
skip.
"""

from __future__ import annotations

import functools
import logging
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc.host.descriptors import receive_bytes

__all__ = [
    "HIGHEST_VERSION",
    "LOWEST_VERSION",
    "MAX_SIZE",
    "NONCE_SIZE",
    "PROOF_SIZE",
    "Kind",
    "Message",
    "accepted",
    "announce",
    "decode_untrusted",
    "four_tuple",
    "listening",
    "packed_number",
    "parties",
    "proof",
    "prove",
    "refused",
    "take",
    "withdraw",
]


LOWEST_VERSION = 2
HIGHEST_VERSION = 4  # 3: PROVE and LISTENING; 4: numbers of announcements
MAX_SIZE = 512
"""Bytes to receive at most; what a longer packet has beyond is cut off."""

_log = logging.getLogger(__name__)

_REMEMBERED = 256  # addresses packed last
_MAGIC = b"TSMC"
_HEAD = struct.Struct(">4sBBBB")
_FOUR_TUPLE = struct.Struct(">16sH16sH")
_PROBE = struct.Struct(">H16s")
_NUMBER = struct.Struct(">L")
_MAPPED = bytes(10) + b"\xff\xff"


class Kind(IntEnum):
    """What a message says of a TCP connection."""

    ANNOUNCE = 1
    """Client: I am about to open it and speak SMC-R."""
    ACCEPTED = 3
    """Server: I accepted it; send SMC Proposal, or WITHDRAW."""
    WITHDRAW = 4
    """Client: it is plain TCP, or was never opened."""
    REFUSED = 5
    """Server: it is plain TCP, with the reason; or its network does not have that address."""
    PROVE = 6
    """Client in another network namespace: let me see that this address leads to you."""
    LISTENING = 7
    """Server: connect to this port of that address, and read."""


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


class Message(NamedTuple):
    """A decoded message.

    Fields:
      kind: what it says; None when its sender speaks no version that we do.
      reason: of REFUSED, else None.
      connection: the `four_tuple`; b"" in a REFUSED of everything.
      required: an ANNOUNCE or ACCEPTED of who takes SMC-R or nothing.
      number: of the announcement, packed; b"" from who knows none.
      port, nonce: of LISTENING.
    """

    kind: Kind | None
    reason: FallbackReason | None = None
    connection: bytes = b""
    required: bool = False
    number: bytes = b""
    port: int = 0
    nonce: bytes = b""


def four_tuple(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """The 36 bytes that name a TCP connection from `source` to `destination`.

    Addresses are text; scopes are ignored and IPv4 is the same as IPv4-mapped IPv6, so that both
    ends of a connection arrive at the same bytes.

    Raises:
      OSError: an address is none.
    """
    return _FOUR_TUPLE.pack(_packed(source[0]), source[1], _packed(destination[0]), destination[1])


def parties(connection: bytes) -> tuple[str, str]:
    """The two addresses of a `four_tuple`: source, destination."""
    source, _, destination, _ = _FOUR_TUPLE.unpack(connection)
    return _text(source), _text(destination)


def _head(kind: Kind, detail: int = 0) -> bytes:
    return _HEAD.pack(_MAGIC, LOWEST_VERSION, HIGHEST_VERSION, kind, detail)


# By whether SMC-R is required.
_ANNOUNCE = tuple(_head(Kind.ANNOUNCE, required) for required in (False, True))
_ACCEPTED = tuple(_head(Kind.ACCEPTED, required) for required in (False, True))
_WITHDRAW = _head(Kind.WITHDRAW)
# How the messages begin that are exchanged for every connection.
_USUAL = {
    _ANNOUNCE[False]: (Kind.ANNOUNCE, False),
    _ANNOUNCE[True]: (Kind.ANNOUNCE, True),
    _ACCEPTED[False]: (Kind.ACCEPTED, False),
    _ACCEPTED[True]: (Kind.ACCEPTED, True),
    _WITHDRAW: (Kind.WITHDRAW, False),
}
_SIZE = _HEAD.size + _FOUR_TUPLE.size
_NUMBERED_SIZE = _SIZE + _NUMBER.size
NONCE_SIZE = 16
PROOF_SIZE = NONCE_SIZE + _FOUR_TUPLE.size
"""Bytes of a TCP proof."""


def packed_number(number: int) -> bytes:
    """The number of an announcement, as messages have it."""
    return _NUMBER.pack(number & 0xFFFFFFFF)


def announce(connection: bytes, number: bytes = b"", *, required: bool = False) -> bytes:
    """An ANNOUNCE of the `four_tuple`; ``number``: packed."""
    return _ANNOUNCE[required] + connection + number


def accepted(connection: bytes, number: bytes = b"", *, required: bool = False) -> bytes:
    """An ACCEPTED of the `four_tuple`, in answer to the ANNOUNCE with that number."""
    return _ACCEPTED[required] + connection + number


def withdraw(connection: bytes) -> bytes:
    """A WITHDRAW of the `four_tuple`."""
    return _WITHDRAW + connection


def prove(connection: bytes) -> bytes:
    """A PROVE of the `four_tuple` without ports."""
    return _head(Kind.PROVE) + connection


def listening(connection: bytes, port: int, nonce: bytes) -> bytes:
    """A LISTENING, in answer to the PROVE of that `four_tuple`."""
    return _head(Kind.LISTENING) + connection + _PROBE.pack(port, nonce)


def proof(nonce: bytes, source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """A TCP proof for a connection from `source` to `destination`."""
    return nonce + four_tuple(source, destination)


def refused(reason: FallbackReason, connection: bytes = b"", number: bytes = b"") -> bytes:
    """A REFUSED; reasons without a code arrive as PEER_NOT_CAPABLE."""
    return _head(Kind.REFUSED, _REASON_CODES.get(reason, 0)) + connection + number


def decode_untrusted(data: bytes) -> Message:
    """What a peer's packet says.

    Raises:
      ProtocolError: it is no message of this protocol.
    """
    usual = _USUAL.get(data[:8])
    if usual is not None and len(data) >= _SIZE:
        return Message(usual[0], None, data[8:_SIZE], usual[1], _number(data))
    if len(data) < _HEAD.size:
        raise ProtocolError(f"same-host discovery: {len(data)} bytes are no message")
    magic, lowest, highest, code, detail = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 1 <= lowest <= highest:
        raise ProtocolError(f"same-host discovery: {data[:8].hex()} starts no message")
    whole = len(data) >= _SIZE
    connection = data[_HEAD.size : _SIZE] if whole else b""
    if code == Kind.REFUSED:
        reason = _REASONS.get(detail, FallbackReason.PEER_NOT_CAPABLE)
        return Message(Kind.REFUSED, reason, connection, number=_number(data))
    if lowest > HIGHEST_VERSION or highest < LOWEST_VERSION:
        return Message(None)
    if code not in Kind.__members__.values():
        raise ProtocolError(f"same-host discovery: kind {code}")
    if not whole:
        raise ProtocolError("same-host discovery: a message is cut short")
    if code == Kind.LISTENING:
        if len(data) < _SIZE + _PROBE.size:
            raise ProtocolError("same-host discovery: a message is cut short")
        port, nonce = _PROBE.unpack_from(data, _SIZE)
        return Message(Kind.LISTENING, None, connection, port=port, nonce=nonce)
    wanted = code in (Kind.ANNOUNCE, Kind.ACCEPTED) and bool(detail & 1)
    return Message(Kind(code), None, connection, wanted, _number(data))


def _number(data: bytes) -> bytes:
    return data[_SIZE:_NUMBERED_SIZE] if len(data) >= _NUMBERED_SIZE else b""


@functools.lru_cache(_REMEMBERED)
def _packed(address: str) -> bytes:
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return _MAPPED + socket.inet_pton(socket.AF_INET, address)


def _text(packed: bytes) -> str:
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed)


def take(connection: socket.socket) -> Message | None:
    """The packet that has arrived; None when the peer is gone or sent none of our messages.

    After None give the connection to `Closer.discard`: a descriptor may wait in it.

    Raises:
      BlockingIOError: nothing has arrived, or cannot be taken for lack of memory.
    """
    try:
        data = receive_bytes(connection, MAX_SIZE)
        return decode_untrusted(data) if data else None
    except BlockingIOError:
        raise
    except (OSError, ProtocolError) as error:
        if isinstance(error, OSError) and is_lack(error):
            raise BlockingIOError(error.errno, str(error)) from error
        _log.debug("same-host discovery: a peer is ignored: %s", error)
        return None
