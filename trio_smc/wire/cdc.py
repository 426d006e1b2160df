"""Connection Data Control messages, by which a connection announces its cursors and its state.

A CDC message has 44 bytes and follows every RDMA write (RFC 7609, A.4), so this codec is on the hot
path.  The data path uses :func:`pack` and :func:`unpack_untrusted`, each of which is one ``struct``
call on plain integers.  Captures and tests use :class:`CdcMessage`, a message as a value, which
:func:`decode_untrusted` returns.

========  ==========================================================================
offset    field (big-endian)
========  ==========================================================================
0         type, 0xFE
1         length, 44
2-3       sequence number: the first is 1; wraps to 0
4-7       alert token of the *receiver*
10-11     producer cursor wrap sequence number
12-15     producer cursor, bytes
18-19     consumer cursor wrap sequence number
20-23     consumer cursor, bytes
24        producer flags: WRITER_BLOCKED ... FAILOVER_VALIDATION
25        connection flags: SENDING_DONE, CONNECTION_CLOSED, ABNORMAL_CLOSE
========  ==========================================================================

Bytes 8-9, 16-17 and 26-43 and the flag bits without a name are reserved.  ``trio_smc.datapath``,
and not the codec, checks that the cursors are in the ring and that a connection has the token.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from trio_smc._base.errors import ProtocolError

__all__ = [
    "ABNORMAL_CLOSE",
    "CDC_SIZE",
    "CDC_TYPE",
    "CONNECTION_CLOSED",
    "FAILOVER_VALIDATION",
    "HEADER",
    "LAYOUT",
    "SENDING_DONE",
    "UPDATE_REQUESTED",
    "URGENT_PENDING",
    "URGENT_PRESENT",
    "WRITER_BLOCKED",
    "CdcItems",
    "CdcMessage",
    "MessageMissing",
    "decode_untrusted",
    "pack",
    "unpack_untrusted",
]


CDC_TYPE = 0xFE
"""First byte of every CDC message; no LLC message starts with it (RFC 7609, A.3)."""
CDC_SIZE = 44
"""Bytes of every CDC message."""
HEADER = CDC_TYPE << 8 | CDC_SIZE
"""Type and length as the first item of :data:`LAYOUT`."""

LAYOUT = struct.Struct(">HHI2xHI2xHIBB18x")
"""Header, sequence, alert token, producer wrap, producer cursor, consumer wrap, consumer cursor,
producer flags, connection flags.  Reserved bytes are sent as zero and ignored on receipt."""

# Producer flags, byte 24.
WRITER_BLOCKED = 0x80  # B
URGENT_PENDING = 0x40  # P
URGENT_PRESENT = 0x20  # U
UPDATE_REQUESTED = 0x10  # R: the receiver is to send its consumer cursor at once
FAILOVER_VALIDATION = 0x08  # F: only token and sequence number have a meaning (4.6.1)

# Connection flags, byte 25.
SENDING_DONE = 0x80  # D
CONNECTION_CLOSED = 0x40  # C
ABNORMAL_CLOSE = 0x20  # A

CdcItems: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]
"""The items of :data:`LAYOUT`: a CDC message on the receive path."""

_pack = LAYOUT.pack
_unpack = LAYOUT.unpack


class MessageMissing(ProtocolError):
    """A failover validation message names a message that has not been received yet (4.6.1).

    Messages of different links have no order.  So the missing message may be on another link that
    has not been polled yet.
    """


def pack(
    sequence: int,
    alert_token: int,
    producer_wrap: int,
    producer_cursor: int,
    consumer_wrap: int,
    consumer_cursor: int,
    producer_flags: int = 0,
    connection_flags: int = 0,
) -> bytes:
    """The 44 bytes of one CDC message.

    Parameters:
      sequence: 16 bits.
      alert_token: the receiver's token for this connection, 32 bits.
      producer_wrap, consumer_wrap: 16 bits.
      producer_cursor, consumer_cursor: bytes from the start of the RMBE, 32 bits.
      producer_flags, connection_flags: 8 bits each.

    Raises:
      struct.error: a value does not fit its field.
    """
    return _pack(
        HEADER,
        sequence,
        alert_token,
        producer_wrap,
        producer_cursor,
        consumer_wrap,
        consumer_cursor,
        producer_flags,
        connection_flags,
    )


def unpack_untrusted(data: bytes | bytearray | memoryview) -> CdcItems:
    """Decode one CDC message into the nine items of :data:`LAYOUT`, ``HEADER`` first.

    Reserved bytes are ignored, as RFC 7609, A.4 requires; reserved flag bits stay in the flags.

    Raises:
      ProtocolError: the message is not 44 bytes long, or its type or length is not that of CDC.
    """
    try:
        items: CdcItems = _unpack(data)
    except struct.error:
        raise ProtocolError(f"CDC message of {len(data)} bytes instead of {CDC_SIZE}") from None
    if items[0] != HEADER:
        raise ProtocolError(
            f"CDC message with type {items[0] >> 8:#04x} and length byte {items[0] & 0xFF}"
        )
    return items


class CdcMessage(NamedTuple):
    """One CDC message as a value (RFC 7609, A.4, figure 41); fields as in :func:`pack`."""

    sequence: int
    alert_token: int
    producer_wrap: int = 0
    producer_cursor: int = 0
    consumer_wrap: int = 0
    consumer_cursor: int = 0
    producer_flags: int = 0
    connection_flags: int = 0

    def encode(self) -> bytes:
        """The 44 bytes on the wire.

        Raises:
          struct.error: an integer does not fit its field.
        """
        return _pack(HEADER, *self)


def decode_untrusted(data: bytes | bytearray | memoryview) -> CdcMessage:
    """Decode one CDC message; ``encode`` of the value gives the same bytes except reserved ones.

    Parameters:
      data: exactly the message, 44 bytes.

    Raises:
      ProtocolError: the message is not 44 bytes long, or its type or length is not that of CDC.
    """
    return CdcMessage(*unpack_untrusted(data)[1:])
