"""The events of a stack, for captures, metrics and logs.

Without an observer each event costs one comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .reasons import Fallback

__all__ = [
    "BaseObserver",
    "LinkEnd",
    "LinkEnds",
    "Observer",
    "ObserverGroup",
    "link_ends",
    "tcp_names",
]

LOGGER = logging.getLogger("trio_smc")


class Observer(Protocol):
    """Receives the events of one stack, on the Trio thread; must not block.

    An exception of an observer is logged and has no other effect.  The objects identify
    connections, links and groups.  An observer must not call them, or keep them longer than needed.
    """

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """A CLC message was sent or received (RFC 7609, A.2)."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """An LLC message was sent or received (A.3)."""

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """A CDC message was sent or received (A.4)."""

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """An RDMA write of ``data`` was posted; the bytes are valid only during the call."""

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """A state machine changed its state.  If ``event`` is "move", a connection moved from the
        link ``old`` to the link ``new`` ("link 1", "link 2"; RFC 7609, 4.6)."""

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """A connection uses SMC-R (``fallback`` is None) or TCP.  ``connection`` is None if it was
        refused because it cannot use SMC-R."""


class BaseObserver:
    """An `Observer` without effect.  A subclass defines only the methods that it needs."""

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        """No-op."""

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        """No-op."""

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        """No-op."""

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        """No-op."""

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        """No-op."""

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        """No-op."""


class Observed(Protocol):
    """A stack, as its observers see it."""

    @property
    def peer_id(self) -> bytes:
        """The peer ID of the stack, 8 bytes."""

    def add_observer(self, observer: Observer) -> None:
        """Notify this observer, too."""

    def remove_observer(self, observer: Observer) -> None:
        """Stop notifying this observer."""


class ObserverGroup:
    """Several observers as one.  An exception of one is logged, and the others are notified."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers

    def clc(self, connection: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _notify(observer.clc, connection, outgoing, message)

    def llc(self, link: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _notify(observer.llc, link, outgoing, message)

    def cdc(self, link: object, outgoing: bool, message: bytes) -> None:
        for observer in self.observers:
            _notify(observer.cdc, link, outgoing, message)

    def rdma_write(self, link: object, address: int, rkey: int, data: memoryview) -> None:
        for observer in self.observers:
            _notify(observer.rdma_write, link, address, rkey, data)

    def state(self, subject: object, old: str, new: str, event: str) -> None:
        for observer in self.observers:
            _notify(observer.state, subject, old, new, event)

    def mode(self, connection: object, fallback: Fallback | None) -> None:
        for observer in self.observers:
            _notify(observer.mode, connection, fallback)


class LinkEnd(NamedTuple):
    """One queue pair of a link: GID (16 bytes), MAC (6 bytes), number and initial PSN (24 bits)."""

    gid: bytes
    mac: bytes
    qp_number: int
    psn: int


class LinkEnds(NamedTuple):
    """Both ends of a link, and the path MTU in bytes."""

    local: LinkEnd
    peer: LinkEnd
    mtu: int


def link_ends(link: Any) -> LinkEnds | None:
    """The ends of a link that was passed to an observer, as needed for frames.

    None: the peer's end is not known yet (RFC 7609, 3.5.1.3).
    """
    peer = link.peer
    if peer is None:
        return None
    rnic = link.rnic
    return LinkEnds(
        LinkEnd(rnic.gid, rnic.mac, link.qp.qp_num, link.psn),
        LinkEnd(peer.gid, peer.mac, peer.qp_number, peer.psn),
        128 << min(peer.mtu, rnic.mtu),
    )


def tcp_names(connection: Any) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """The local and the remote (host, port) of a connection that was passed to `Observer.clc`.

    None: the TCP connection has ended, or there is none.
    """
    sock = connection.sock
    try:
        local, remote = sock.getsockname(), sock.getpeername()
    except (AttributeError, OSError):
        return None
    return (local[0], local[1]), (remote[0], remote[1])


def _notify(method: Callable[..., None], *news: Any) -> None:
    try:
        method(*news)
    except Exception:
        LOGGER.exception("an observer failed")
