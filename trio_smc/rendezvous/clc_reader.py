"""Cutting CLC messages out of a byte stream without taking a byte too many.

After a Decline the application's bytes follow at once, so nothing beyond a message may be taken
from the TCP connection: `ClcReader` says how many bytes are its own for certain.
"""

from __future__ import annotations

from trio_smc.rendezvous import clc

__all__ = ["ClcReader"]


class ClcReader:
    """Collects one message after the other.

    Attributes:
      wanted: how many bytes may be taken now, at most; never 0.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self.wanted = clc.HEADER_SIZE

    @property
    def halfway(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._data)

    def feed_untrusted(self, piece: bytes) -> bytes | None:
        """Take 1 to `wanted` bytes; returns a message when it is complete.

        Raises:
          ProtocolError: the header is none of a CLC message (RFC 7609, C.6).
        """
        data = self._data
        data += piece
        self.wanted -= len(piece)
        if self.wanted:
            return None
        if len(data) == clc.HEADER_SIZE:
            self.wanted = clc.message_length_untrusted(data) - clc.HEADER_SIZE
            return None
        message = bytes(data)
        data.clear()
        self.wanted = clc.HEADER_SIZE
        return message
