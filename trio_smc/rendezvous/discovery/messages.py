"""The messages of same-host discovery: their bytes, and receiving one from a Unix socket.

One message is one datagram::

    bytes 0-3    b"TSMC"
    byte  4      lowest version the sender speaks
    byte  5      highest version the sender speaks
    byte  6      kind
    byte  7      REFUSED: why; ACCEPTED: 1 if the server takes SMC-R or nothing; otherwise 0
    bytes 8-15   ACCEPTED and NOT_MINE: the token, random
    byte  16     ACCEPTED: the version of the server's software RNIC
    bytes 8-43   PROVE and LISTENING: the TCP connections to come: source address (16, IPv4 as
                 ::ffff:a.b.c.d), source port (2), destination address (16), destination port (2);
                 big-endian, as the client sees them; both ports are zero
    bytes 44-59  PROVE: the name of the socket that waits for the answer
    bytes 44-61  LISTENING: port to connect to (2), nonce (16)

A client that connects to that port receives a TCP proof, and then the end: the nonce, and the TCP
connection in the form of bytes 8-43 as the server sees it.

The first eight bytes, and the meaning of ACCEPTED and REFUSED, stay the same in every version.  So
a client that has no version in common with the server still knows what the server expects, and
that the versions are the reason.  A later version may append bytes, which earlier ones skip.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.host.descriptors import Closer, receive_with_sender

__all__ = [
    "HIGHEST_VERSION",
    "LOWEST_VERSION",
    "MAX_SIZE",
    "NAME_SIZE",
    "NONCE_SIZE",
    "PROOF_SIZE",
    "REASONS",
    "TOKEN_SIZE",
    "Kind",
    "Message",
    "accepted",
    "decode_untrusted",
    "four_tuple",
    "listening",
    "not_mine",
    "parties",
    "proof",
    "prove",
    "receive",
    "refused",
]


LOWEST_VERSION: Final = 5
HIGHEST_VERSION: Final = 5
MAX_SIZE: Final = 512
"""Bytes to receive at most; what a longer datagram has beyond is cut off."""

_log = logging.getLogger(__name__)

_REMEMBERED: Final = 256  # addresses packed last
_MAGIC: Final = b"TSMC"
_HEAD: Final = struct.Struct(">4sBBBB")
_FOUR_TUPLE: Final = struct.Struct(">16sH16sH")
_PROBE: Final = struct.Struct(">H16s")
_MAPPED: Final = bytes(10) + b"\xff\xff"
TOKEN_SIZE: Final = 8
NAME_SIZE: Final = 16
NONCE_SIZE: Final = 16
PROOF_SIZE: Final = NONCE_SIZE + _FOUR_TUPLE.size
"""Bytes of a TCP proof."""
_TOKEN_END: Final = _HEAD.size + TOKEN_SIZE
_TUPLE_END: Final = _HEAD.size + _FOUR_TUPLE.size


class Kind(IntEnum):
    """The kinds of messages about a TCP connection."""

    ACCEPTED = 3
    """Server: I accepted it, and expect a CLC message."""
    REFUSED = 5
    """Server: it is plain TCP, with the reason; or its network does not have that address."""
    PROVE = 6
    """Client in another network namespace: show that this address leads to you."""
    LISTENING = 7
    """Server: connect to this port of that address, and read."""
    NOT_MINE = 8
    """Client: the connection that you accepted is not the announced one."""


REASONS = {
    1: FallbackReason.LOCAL_VERSION_MISMATCH,
    2: FallbackReason.OTHER_USER,
    3: FallbackReason.HANDSHAKE_LIMIT,
    4: FallbackReason.DIRECTORY_UNUSABLE,
    5: FallbackReason.NO_RNIC,
    6: FallbackReason.RNIC_DOWN,
    7: FallbackReason.OUT_OF_RESOURCES,
    8: FallbackReason.NOT_PERMITTED,
    9: FallbackReason.SHORT_CONNECTIONS,
    10: FallbackReason.PATH_NOT_PROVEN,
    11: FallbackReason.DIRECTORY_FULL,
}
_REASON_CODES = {reason: code for code, reason in REASONS.items()}


class Message(NamedTuple):
    """A decoded message.

    Fields:
      kind: of the message.
      is_common: False if its sender speaks no version that this side speaks; ``kind`` is ACCEPTED
        or REFUSED then, and nothing else is known.
      reason: of REFUSED, else None.
      required: an ACCEPTED of a server that takes SMC-R or nothing.
      token: of ACCEPTED and NOT_MINE.
      rnic_version: of ACCEPTED, the server's software RNIC.
      connection: the `four_tuple` of PROVE and LISTENING.
      name: of PROVE.
      port, nonce: of LISTENING.
    """

    kind: Kind
    is_common: bool = True
    reason: FallbackReason | None = None
    required: bool = False
    token: bytes = b""
    rnic_version: int = 0
    connection: bytes = b""
    name: bytes = b""
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


_ACCEPTED: Final = tuple(_head(Kind.ACCEPTED, required) for required in (False, True))


def accepted(token: bytes, rnic_version: int, *, required: bool = False) -> bytes:
    """An ACCEPTED; ``required``: this side takes SMC-R or nothing."""
    return b"%b%b%c" % (_ACCEPTED[required], token, rnic_version)


def refused(reason: FallbackReason) -> bytes:
    """A REFUSED; reasons without a code arrive as PEER_NOT_CAPABLE."""
    return _head(Kind.REFUSED, _REASON_CODES.get(reason, 0))


def not_mine(token: bytes) -> bytes:
    """A NOT_MINE, in answer to the ACCEPTED with that token."""
    return _head(Kind.NOT_MINE) + token


def prove(connection: bytes, name: bytes) -> bytes:
    """A PROVE of the `four_tuple` without ports; the answer goes to ``name``."""
    return _head(Kind.PROVE) + connection + name


def listening(connection: bytes, port: int, nonce: bytes) -> bytes:
    """A LISTENING, in answer to the PROVE of that `four_tuple`."""
    return _head(Kind.LISTENING) + connection + _PROBE.pack(port, nonce)


def proof(nonce: bytes, source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """A TCP proof for a connection from `source` to `destination`."""
    return nonce + four_tuple(source, destination)


def decode_untrusted(data: bytes) -> Message:
    """Decode a peer's datagram.

    Raises:
      ProtocolError: the bytes are not a message of this protocol.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"same-host discovery: {len(data)} bytes are no message")
    magic, lowest, highest, code, detail = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 1 <= lowest <= highest:
        raise ProtocolError(f"same-host discovery: {data[:8].hex()} starts no message")
    is_common = lowest <= HIGHEST_VERSION and highest >= LOWEST_VERSION
    if code == Kind.ACCEPTED and is_common:
        _check_length(data, _TOKEN_END + 1)
        token = data[_HEAD.size : _TOKEN_END]
        return Message(Kind.ACCEPTED, True, None, bool(detail & 1), token, data[_TOKEN_END])
    if code == Kind.REFUSED:
        reason = REASONS.get(detail, FallbackReason.PEER_NOT_CAPABLE)
        return Message(Kind.REFUSED, is_common, reason)
    if not is_common:
        if code == Kind.ACCEPTED:
            return Message(Kind.ACCEPTED, is_common=False)
        raise ProtocolError(f"same-host discovery: versions {lowest} to {highest}")
    if code == Kind.NOT_MINE:
        _check_length(data, _TOKEN_END)
        return Message(Kind.NOT_MINE, token=data[_HEAD.size : _TOKEN_END])
    connection = data[_HEAD.size : _TUPLE_END]
    if code == Kind.PROVE:
        _check_length(data, _TUPLE_END + NAME_SIZE)
        name = data[_TUPLE_END : _TUPLE_END + NAME_SIZE]
        return Message(Kind.PROVE, connection=connection, name=name)
    if code == Kind.LISTENING:
        _check_length(data, _TUPLE_END + _PROBE.size)
        port, nonce = _PROBE.unpack_from(data, _TUPLE_END)
        return Message(Kind.LISTENING, connection=connection, port=port, nonce=nonce)
    raise ProtocolError(f"same-host discovery: kind {code}")


def _check_length(data: bytes, least: int) -> None:
    """Raise ProtocolError if a message is cut short."""
    if len(data) < least:
        raise ProtocolError("same-host discovery: a message is cut short")


@functools.lru_cache(_REMEMBERED)
def _packed(address: str) -> bytes:
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return _MAPPED + socket.inet_pton(socket.AF_INET, address)


def _text(packed: bytes) -> str:
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed)


def receive(sock: socket.socket, closer: Closer) -> tuple[Message | None, int | None]:
    """Receive one datagram; returns the message, None if it is not one, and the sending user.

    sock: as for `receive_with_sender`; it must not block.

    Raises:
      BlockingIOError: nothing has arrived, or this process lacks memory.
    """
    try:
        data, sender = receive_with_sender(sock, MAX_SIZE, closer)
    except BlockingIOError:
        raise
    except OSError as error:
        raise BlockingIOError(error.errno, str(error)) from error
    if not data and sender is None:  # shut down, and empty
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    try:
        return decode_untrusted(data), sender
    except ProtocolError as error:
        _log.debug("a datagram is ignored: %s", error)
        return None, sender
