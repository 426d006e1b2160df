"""Which connections may use SMC-R: the lists of the configuration, load, and short connections.

A refusal by this module is handled like a connection without an RNIC. So discovery reports the
reason, and a Proposal that still arrives is declined with the same reason.

Short connections (`Config.learn_short`): to set up an SMC-R connection takes a round trip and a few
hundred microseconds more than TCP. A connection that carries one small request never gains as much.
After `SHORT_AFTER` such connections in a row with one peer and port, the next ones are TCP for
`RETRY_AFTER` seconds. Then one connection uses SMC-R, and its size decides about the next ones. A
peer on this host that requires SMC-R announces this with each connection. Such a connection stays
SMC-R, and its size is ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from trio_smc._base.reasons import FallbackReason

if TYPE_CHECKING:
    from trio_smc.config.config import Config
    from trio_smc.rnic.verbs import Rnic

__all__ = [
    "RETRY_AFTER",
    "SHORT_AFTER",
    "SHORT_SIZE",
    "Peer",
    "Route",
    "RouteHost",
    "ShortConnections",
    "choose_route",
]

Peer = tuple[str, int]
"""The peer's address, and the port of the service, which may be on either side."""

SHORT_SIZE: Final = 64 * 1024
"""Bytes of both directions together. A connection with less is short. Chosen."""
SHORT_AFTER: Final = 16
"""Short connections in a row after which the next ones are TCP. Chosen; docs/decisions.md has the
gain for connections of 200 bytes."""
RETRY_AFTER: Final = 300.0
"""Seconds until a connection tries SMC-R again. Chosen."""
_MAX_PEERS: Final = 4096
"""Peers with a record. Chosen: a bound on memory; the oldest record is dropped."""


class RouteHost(Protocol):
    """The stack, as seen by `choose_route`."""

    @property
    def short_connections(self) -> ShortConnections:
        """The peers whose connections are short."""

    def rnic_for(self, local: str, remote: str, *, near: bool = False) -> Rnic | FallbackReason:
        """The RNIC that serves a connection between two addresses, or the reason for TCP.

        Args:
          near: the peer is on this host, whatever its address says.
        """

    def is_usable(self, rnic: Rnic) -> bool:
        """True if an RNIC that `rnic_for` returned still serves new connections."""


class Route(NamedTuple):
    """The RNIC of a connection, or the reason for TCP; decided once for each connection.

    Attributes:
      rnic: the RNIC that serves the connection, or the reason for TCP.
      local: this side's address, for which the RNIC was chosen.
    """

    rnic: Rnic | FallbackReason
    local: str

    @property
    def reason(self) -> FallbackReason | None:
        """The reason for TCP; None if an RNIC serves the connection."""
        return self.rnic if isinstance(self.rnic, FallbackReason) else None

    def is_usable(self, stack: RouteHost) -> bool:
        """False if the RNIC has failed, or is drained, since the decision."""
        return isinstance(self.rnic, FallbackReason) or stack.is_usable(self.rnic)


def choose_route(
    stack: RouteHost,
    config: Config,
    local: str,
    peer: Peer,
    *names: Peer,
    at_limit: bool = False,
    near: bool = False,
    required: bool = False,
) -> Route:
    """Decide which RNIC serves a connection, or why the connection is TCP.

    Args:
      local: this side's address.
      peer: the peer's address and the port of the service.
      names: further (host, port) pairs to compare with the lists of ``config``.
      at_limit: too many handshakes are under way.
      near: the peer is on this host, perhaps in another network namespace.
      required: the peer requires SMC-R, so short connections do not matter.
    """
    rnic: Rnic | FallbackReason
    if not config.permits(peer, *names):
        rnic = FallbackReason.NOT_PERMITTED
    elif at_limit:
        rnic = FallbackReason.HANDSHAKE_LIMIT
    elif config.learns_short and not required and stack.short_connections.avoids(peer):
        rnic = FallbackReason.SHORT_CONNECTIONS
    else:
        rnic = stack.rnic_for(local, peer[0], near=near)
    return Route(rnic, local)


class _Record:
    __slots__ = ("short_in_a_row", "avoided_until")

    def __init__(self) -> None:
        self.short_in_a_row = 0
        self.avoided_until = 0.0


class ShortConnections:
    """The peers of one stack whose connections are short; a bounded number.

    Args:
      clock: seconds of a steady clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: OrderedDict[Peer, _Record] = OrderedDict()
        self._open: dict[object, Peer] = {}

    def avoids(self, peer: Peer) -> bool:
        """True if a new connection is TCP. Changes nothing."""
        record = self._records.get(peer)
        if record is None or record.short_in_a_row < SHORT_AFTER:
            return False
        return self._clock() < record.avoided_until

    def clear(self) -> None:
        """Forget all peers: another process, with other settings, may now have the port."""
        self._records.clear()

    def opened(self, connection: object, peer: Peer) -> None:
        """Note a new SMC-R connection. If it is a new try, further connections are TCP
        meanwhile."""
        self._open[connection] = peer
        record = self._records.get(peer)
        if record is not None and record.short_in_a_row >= SHORT_AFTER:
            record.avoided_until = self._clock() + RETRY_AFTER

    def closed(self, connection: object, size: int) -> None:
        """Note that a connection has ended, with ``size`` bytes in both directions together."""
        peer = self._open.pop(connection, None)
        if peer is None:
            return
        if size >= SHORT_SIZE:
            self._records.pop(peer, None)
            return
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        record.short_in_a_row += 1
        if record.short_in_a_row == SHORT_AFTER:
            record.avoided_until = self._clock() + RETRY_AFTER
        if len(self._records) > _MAX_PEERS:
            self._records.popitem(last=False)
