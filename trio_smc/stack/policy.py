"""Who may use SMC-R, and who had better not: settings, load, and what was learned.

A reason found here counts as if there were no RNIC for the connection, so that each way of
discovery, and a Proposal that comes all the same, is answered as it has to be.

Learned TCP (`Config.learn_short`): setting a connection up costs a round trip and a few hundred
microseconds more than TCP does, which a connection that carries one small request never earns back.
After `SHORT_AFTER` such connections in a row with one peer and port, the next ones are TCP for
`RETRY_AFTER` seconds; then one tries again, and decides for another while. A peer on this host
that takes SMC-R or nothing says so with each connection, and nothing is learned of those.
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
"""A peer's address, and the port of the service, whichever side has it."""

SHORT_SIZE: Final = 64 * 1024
"""Bytes of both directions together, below which a connection was not worth its set-up."""
SHORT_AFTER: Final = 16
RETRY_AFTER: Final = 300.0
_MAX_PEERS: Final = 4096


class RouteHost(Protocol):
    """Who knows the RNICs, and what was learned."""

    @property
    def short_connections(self) -> ShortConnections:
        """Whose connections were not worth SMC-R."""

    def rnic_for(self, local: str, remote: str, *, near: bool = False) -> Rnic | FallbackReason:
        """The RNIC that serves a connection between two addresses, or why none does.

        ``near``: the peer is on this host, whatever its address says.
        """


class Route(NamedTuple):
    """How a connection can use SMC-R, or why not; decided once for each connection.

    Attributes:
      rnic: the RNIC that serves the connection, or the reason for TCP.
      local: this side's address, for which the RNIC was chosen.
    """

    rnic: Rnic | FallbackReason
    local: str

    @property
    def reason(self) -> FallbackReason | None:
        """Why the connection is TCP; None if an RNIC serves it."""
        return self.rnic if isinstance(self.rnic, FallbackReason) else None


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
    """Decide which RNIC serves a connection, or why it is TCP.

    Args:
      local: this side's address.
      peer: the peer's address and the port of the service.
      names: what else names the connection, for the lists of ``config``.
      at_limit: too many handshakes are under way.
      near: the peer is on this host, perhaps in another network namespace.
      required: the peer takes SMC-R or nothing, so what was learned of it does not count.
    """
    rnic: Rnic | FallbackReason
    if not config.permits(peer, *names):
        rnic = FallbackReason.NOT_PERMITTED
    elif at_limit:
        rnic = FallbackReason.HANDSHAKE_LIMIT
    elif config.learn_short and not required and stack.short_connections.avoids(peer):
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
    """What one stack learned about the peers it has connections with; bounded.

    Args:
      clock: seconds of any steady clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: OrderedDict[Peer, _Record] = OrderedDict()
        self._open: dict[object, Peer] = {}

    def avoids(self, peer: Peer) -> bool:
        """True if a new connection is to be TCP. Changes nothing."""
        record = self._records.get(peer)
        if record is None or record.short_in_a_row < SHORT_AFTER:
            return False
        return self._clock() < record.avoided_until

    def clear(self) -> None:
        """What was learned: another process may have a service by now, and other settings."""
        self._records.clear()

    def opened(self, connection: object, peer: Peer) -> None:
        """A connection is SMC-R; one that tries again keeps others from it until it has ended."""
        self._open[connection] = peer
        record = self._records.get(peer)
        if record is not None and record.short_in_a_row >= SHORT_AFTER:
            record.avoided_until = self._clock() + RETRY_AFTER

    def closed(self, connection: object, size: int) -> None:
        """It ended, and carried ``size`` bytes in both directions together."""
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
