"""What a capture, metrics or a log can listen to.  Costs one comparison when nobody listens."""

from __future__ import annotations

from typing import Protocol

from .reasons import Fallback

__all__ = ["Observer"]


class Observer(Protocol):
    """Receives events of one stack, on the Trio thread; must neither block nor raise."""

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """A CLC message was sent or received."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """An LLC message was sent or received."""

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """A CDC message was sent or received."""

    def rdma_write(self, link: object, address: int, rkey: int, length: int) -> None:
        """An RDMA write of ``length`` bytes was posted."""

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """A state machine changed its state."""

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """A connection became SMC-R (None) or stays TCP."""
