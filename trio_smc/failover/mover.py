"""Moving the connections of one link group when a link fails, is deleted, or is added.

Theory of operation
-------------------
Each side chooses the link on which it sends. The peer learns of a change only from the failover
validation message (RFC 7609, 4.6). So each side moves its own connections when it learns of the
failure. `failover.replay` describes how one connection moves.

A link fails. First its queue pair goes to ERR. From then on the queue pair writes nothing, so no
old write can overwrite a write of the new link. The queue pair also acknowledges nothing more to
the peer. Then all completions are drained, for two reasons. A CDC message that the peer counts as
delivered (SS of 4.6.1) must be counted as received here (SR) before the peer's validation message
arrives over another link. And a completed request of our own need not be sent again. After that the
connections move.

A link is deleted while it works. Its connections stop posting there. Each of them moves as soon as
none of its requests is in flight. If the link becomes the only usable one meanwhile, its
connections stay.

A link is added. It takes over the smallest number of connections that makes the loads even. Loads
that differ by one are even: no connection moves for a difference of one.

A message that a lost link delivered may hold back messages of other links for a while: see
`validation`.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from trio_smc.datapath.connection import Connection
from trio_smc.failover import replay
from trio_smc.failover.validation import Validation
from trio_smc.rnic.verbs import QueuePair, Rnic, RnicError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rendezvous.links.group import GroupConnections
    from trio_smc.rendezvous.links.link import Link, LinkHost
    from trio_smc.rendezvous.links.link_set import Links

__all__ = ["GroupMover", "MovedGroup"]

LOGGER = logging.getLogger("trio_smc.failover")


class MovedGroup(Protocol):
    """The link group, as seen by the mover of its connections."""

    links: Links
    connections: GroupConnections

    @property
    def host(self) -> LinkHost:
        """The stack. Its observer is notified of each move."""


class GroupMover:
    """Moves the connections of one group (`rendezvous.links.link.Mover`).

    Args:
      group: the link group.
      drain: polls a queue pair and dispatches its completions (`rnic.pump.Pump`).
    """

    def __init__(self, group: MovedGroup, drain: Callable[[Rnic, QueuePair], None]) -> None:
        self._group = group
        self._drain = drain
        self._departures: dict[Link, _Departure] = {}
        self._validation = Validation(self.catch_up)
        self._ending: list[Link] = []

    # --- rendezvous.links.link.Mover ----------------------------------------------------------

    def link_lost(self, link: Link) -> None:
        """The link is failing: drain it, and move its connections now.

        If no other link is left, no connection moves, and the group ends them (4.8.3).
        """
        self._departures.pop(link, None)
        self.link_ends(link)
        connections = _connections(link)
        if self._group.links.for_llc(avoid=link) in (None, link):
            # A connection that the peer has closed ends without this, too.
            lost = [each for each in connections if not each.peer_has_ended]
            if lost and not link.qp.received_all:
                LOGGER.warning("%r: no other link is left (connections lost: %d)", link, len(lost))
            return
        for connection in connections:
            self._move(connection, link)

    def link_leaving(self, link: Link, done: Callable[[], None]) -> None:
        """The link still works and will be deleted: move its connections first.

        Args:
          done: called once, as soon as the link has no request of a connection in flight.
        """
        connections = _connections(link)
        if not connections or not any(other is not link for other in self._group.links.usable()):
            done()
            return
        departure = self._departures[link] = _Departure(connections, done)
        for connection in connections:
            replay.hold(connection, partial(self._left, link, departure, connection))

    def link_ready(self, link: Link) -> None:
        """A link became ACTIVE: move its share of the connections to it.

        An asymmetric link gets none. It shares an RNIC with the link that it would relieve, and it
        is deleted as soon as the group is symmetric again (2.2.2).
        """
        loads = {each: each.load for each in self._group.links.usable()}
        movable = {each: _connections(each) for each in loads if each is not link}
        if link not in loads or not movable or link in self._group.links.asymmetric():
            return
        while True:
            donor = max(movable, key=loads.__getitem__)
            if loads[donor] - loads[link] < 2 or not movable[donor]:
                return
            loads[donor] -= 1
            loads[link] += 1
            connection = movable[donor].pop()
            replay.hold(connection, partial(self._rebalance, connection, donor, link))

    def link_ends(self, link: Link) -> None:
        """Drain the link: the peer counts the messages on it as delivered."""
        with contextlib.suppress(RnicError):
            link.qp.to_err()
        # The group may have removed the link already. If a validation message on this link names a
        # message of another link, `catch_up` has to drain both.
        self._ending.append(link)
        try:
            self._drain(link.rnic, link.qp)
        finally:
            self._ending.remove(link)

    def link_stays(self, link: Link) -> None:
        """The link is the only usable one: its connections stay."""
        departure = self._departures.pop(link, None)
        for connection in departure.waiting if departure is not None else ():
            if connection.channel is link:
                replay.stay(connection)

    def catch_up(self) -> None:
        """Drain all links: the peer counts the messages on them as delivered."""
        for link in [*self._group.links.values(), *self._ending]:
            self._drain(link.rnic, link.qp)

    def message_missing(self, link: Link, message: bytes) -> None:
        """A failover validation message on ``link`` names a message that has not been received.

        Another link may have delivered that message (4.6.1).
        """
        self._validation.missing(link, message)

    def close(self) -> None:
        """The group has ended."""
        self._departures.clear()

    # --- moving -------------------------------------------------------------------------------

    def _left(self, link: Link, departure: _Departure, connection: Connection) -> None:
        """The connection no longer has a request in flight on ``link``."""
        if connection.channel is link:
            if link.usable:
                replay.stay(connection)  # the link was kept
            else:
                self._move(connection, link)
        departure.waiting.discard(connection)
        if not departure.waiting and self._departures.get(link) is departure:
            del self._departures[link]
            departure.done()

    def _rebalance(self, connection: Connection, old: Link, new: Link) -> None:
        """Move a connection without requests in flight, if the loads are still uneven."""
        if connection.channel is not old:
            return
        if old.usable and (not new.usable or old.load - new.load < 2):
            replay.stay(connection)
        else:
            self._move(connection, old, new)

    def _move(self, connection: Connection, old: Link, new: Link | None = None) -> None:
        """Let the connection send on ``new``, or else on the least loaded link except ``old``.

        If there is no such link, the connection ends. A connection that is ending already does not
        move.
        """
        if connection.channel is None:
            return
        group = self._group
        if new is None or not new.usable:
            new = group.connections.link_for(connection, but=old)
        if new is None:
            connection.links_lost()
            return
        LOGGER.info(
            "%r continues on link %d instead of link %d", connection, new.number, old.number
        )
        replay.move(connection, *group.connections.move(connection, new))
        observer = group.host.observer
        if observer is not None:
            observer.state(connection, f"link {old.number}", f"link {new.number}", "move")


class _Departure:
    """The connections that a link has to lose before it is deleted."""

    __slots__ = ("done", "waiting")

    def __init__(self, connections: list[Connection], done: Callable[[], None]) -> None:
        self.waiting = set(connections)
        self.done = done


def _connections(link: Link) -> list[Connection]:
    return [user for user in link.users if isinstance(user, Connection)]
