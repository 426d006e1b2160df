"""What a capture, metrics or a log can listen to.  Costs one comparison when nobody listens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from .reasons import Fallback

__all__ = ["Observer", "ObserverGroup"]

LOGGER = logging.getLogger("trio_smc")


class Observer(Protocol):
    """Receives the events of one stack, on the Trio thread; must not block.

    What an observer raises is logged and stops nothing.  Objects are for telling connections,
    links and groups apart; they must not be kept longer than needed nor called.
    """

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """A CLC message was sent or received (RFC 7609, A.2)."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """An LLC message was sent or received (A.3)."""

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """A CDC message was sent or received (A.4)."""

    def rdma_write(self, link: object, address: int, rkey: int, length: int) -> None:
        """An RDMA write of ``length`` bytes was posted."""

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """A state machine changed its state."""

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """A connection became SMC-R (None) or stays TCP; ``connection`` is None when it was
        refused for that."""


class ObserverGroup:
    """Several observers as one; an exception of one is logged and costs nobody anything."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _tell(observer.clc, connection, outgoing, message)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _tell(observer.llc, link, outgoing, message)

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _tell(observer.cdc, link, outgoing, message)

    def rdma_write(self, link: object, address: int, rkey: int, length: int) -> None:
        for observer in self.observers:
            _tell(observer.rdma_write, link, address, rkey, length)

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        for observer in self.observers:
            _tell(observer.state, subject, old, new, event)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        for observer in self.observers:
            _tell(observer.mode, connection, fallback)


def _tell(method: Callable[..., None], *news: Any) -> None:
    try:
        method(*news)
    except Exception:
        LOGGER.exception("an observer failed")
