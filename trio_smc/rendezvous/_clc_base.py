"""What all CLC messages share: eye catcher, header, version (RFC 7609, A.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from trio_smc.rendezvous._wire import Bits, Layout, Span

__all__ = ["EYE_CATCHER", "HEAD", "HEADER_SIZE", "VERSION", "ClcMessage", "MessageType"]

EYE_CATCHER = bytes.fromhex("E2D4C3D9")
"""First and last four bytes of every CLC message: "SMCR" in EBCDIC."""
VERSION = 1
"""The version of SMC-R that we speak, the only one RFC 7609 defines."""
HEADER_SIZE = 8
"""Bytes to read before a message's length is known."""
HEAD = 7
"""Bytes of the header that are no field's: eye catcher, type, length."""


class MessageType(IntEnum):
    """Byte 4 of a CLC message."""

    PROPOSAL = 1
    ACCEPT = 2
    CONFIRM = 3
    DECLINE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClcMessage:
    """What all CLC messages have.

    Fields:
      peer_id: the sender's: 2 bytes instance, 6 bytes RoCE MAC (A.2.1).
      version: the version nibble, 1..15.
    """

    TYPE: ClassVar[MessageType]
    LAYOUT: ClassVar[Layout]

    peer_id: Annotated[bytes, Span(8, 8)]
    version: Annotated[int, Bits(7, 0xF0)] = VERSION

    def __post_init__(self) -> None:
        self.LAYOUT.check(self)
        if self.version == 0:
            raise ValueError("there is no version 0")
        self._check()

    def _check(self) -> None:
        """Raise ValueError for what only this type of message forbids."""

    @property
    def answer_version(self) -> int:
        """The version of our answer: the lowest common one (A.2)."""
        return min(VERSION, self.version)

    def _head(self, length: int) -> bytes:
        return EYE_CATCHER + bytes((self.TYPE,)) + length.to_bytes(2, "big")
