"""What all LLC messages have (RFC 7609, A.3)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from trio_smc.rendezvous._wire import Bits, Layout

__all__ = ["HEAD", "MESSAGE_SIZE", "LlcMessage", "MessageType"]

MESSAGE_SIZE = 44
"""Bytes in an LLC message, always: it fits where a CDC message fits."""

HEAD = 2  # type and length


class MessageType(IntEnum):
    """First byte of an LLC message.  There is no type 5."""

    CONFIRM_LINK = 1
    ADD_LINK = 2
    ADD_LINK_CONTINUATION = 3
    DELETE_LINK = 4
    CONFIRM_RKEY = 6
    TEST_LINK = 7
    CONFIRM_RKEY_CONTINUATION = 8
    DELETE_RKEY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class LlcMessage:
    """What all LLC messages have.

    Fields:
      reply: the R bit; clear in a request.
      reserved: the message's reserved bits as a peer set them, at their offsets, without
        trailing zero bytes; b"" from us.
    """

    TYPE: ClassVar[MessageType]
    LAYOUT: ClassVar[Layout]

    reply: Annotated[bool, Bits(3, 0x80)] = False
    reserved: bytes = b""

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)

    def encode(self) -> bytes:
        """The 44 bytes on the wire."""
        return self.LAYOUT.pack(self, bytes((self.TYPE, MESSAGE_SIZE)))
