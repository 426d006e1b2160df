"""Moving the connections of one link group: links that fail, that are left, that come.

Theory of operation
-------------------
Which link a connection sends on is this side's affair alone, and the peer notices it by nothing
but the failover validation message (RFC 7609, 4.6). So each side moves what it sends, when it
learns of the failure; how one connection moves is told in `failover.replay`.

A link that fails: its queue pair goes to ERR first. From then on it can write nothing, so nothing
old can land on what the new link writes, and the peer is not told any more that something has
arrived. Then all that has completed is taken: what the peer believes delivered (its SS) must be
counted here (as SR) before its validation message comes over another link, and the more of our
own work is known to be complete, the less has to be sent again. Only then connections move.

A link that is left while it works: its connections stop posting there and move one by one as
soon as nothing of theirs is in flight. When it becomes the only one in the meantime, it stays.

A link that comes takes over as few connections as make the loads even. A difference of one is
even: nothing is moved for it.

What a lost link still brought may hold back others' messages for a while: that is `validation`.
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
    """What a mover wants of the link group whose connections it moves."""

    links: Links
    connections: GroupConnections

    @property
    def host(self) -> LinkHost:
        """The stack, whose observer is told."""


class GroupMover:
    """Moves the connections of one group (`rendezvous.links.context.Mover`).

    Args:
      group: the link group.
      drain: takes and dispatches what has completed on a queue pair (`rnic.pump.Pump`).
    """

    def __init__(self, group: MovedGroup, drain: Callable[[Rnic, QueuePair], None]) -> None:
        self._group = group
        self._drain = drain
        self._departures: dict[Link, _Departure] = {}
        self._validation = Validation(self.catch_up)
        self._ending: list[Link] = []

    # --- rendezvous.links.context.Mover --------------------------------------------------------

    def link_lost(self, link: Link) -> None:
        """The link is failing: take what it still brought, and move its connections now.

        Without another link nothing is moved: the group ends its connections then (4.8.3).
        """
        self._departures.pop(link, None)
        self.link_ends(link)
        connections = _connections(link)
        if self._group.links.for_llc(avoid=link) in (None, link):
            if connections:
                LOGGER.warning(
                    "%r: no other link is left, %d connections end", link, len(connections)
                )
            return
        for connection in connections:
            self._move(connection, link)

    def link_leaving(self, link: Link, done: Callable[[], None]) -> None:
        """The link goes in order: move its connections off while it still works.

        Args:
          done: called once nothing of them is in flight there, at once if nothing is.
        """
        connections = _connections(link)
        if not connections or not any(other is not link for other in self._group.links.usable()):
            done()
            return
        departure = self._departures[link] = _Departure(connections, done)
        for connection in connections:
            replay.hold(connection, partial(self._left, link, departure, connection))

    def link_ready(self, link: Link) -> None:
        """A link became ACTIVE: it gets its share of the connections.

        Not an asymmetric one: it shares an RNIC with the link it would relieve, and goes as soon
        as the group is symmetric again (2.2.2).
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
        """Take what the link still brought: the peer counts it as delivered."""
        with contextlib.suppress(RnicError):
            link.qp.to_err()
        # The group may have forgotten it, but what is taken now may have to be judged by the rest.
        self._ending.append(link)
        try:
            self._drain(link.rnic, link.qp)
        finally:
            self._ending.remove(link)

    def link_stays(self, link: Link) -> None:
        """The link is the only one that is left: its connections need not go."""
        departure = self._departures.pop(link, None)
        for connection in departure.waiting if departure is not None else ():
            if connection.channel is link:
                replay.stay(connection)

    def catch_up(self) -> None:
        """Take what has arrived on all links: the peer knows of it already."""
        for link in [*self._group.links.values(), *self._ending]:
            self._drain(link.rnic, link.qp)

    def message_missing(self, link: Link, message: bytes) -> None:
        """A failover validation message on ``link`` misses one that another link may have brought
        (4.6.1)."""
        self._validation.missing(link, message)

    def close(self) -> None:
        """The group is gone."""
        self._departures.clear()

    # --- moving -------------------------------------------------------------------------------

    def _left(self, link: Link, departure: _Departure, connection: Connection) -> None:
        """Nothing of this connection is in flight on ``link`` any more."""
        if connection.channel is link:
            if link.usable:
                replay.stay(connection)  # it stays itself
            else:
                self._move(connection, link)
        departure.waiting.discard(connection)
        if not departure.waiting and self._departures.get(link) is departure:
            del self._departures[link]
            departure.done()

    def _rebalance(self, connection: Connection, old: Link, new: Link) -> None:
        """Nothing is in flight on the old link, and the move may not be worth it any more."""
        if connection.channel is not old:
            return
        if old.usable and (not new.usable or old.load - new.load < 2):
            replay.stay(connection)
        else:
            self._move(connection, old, new)

    def _move(self, connection: Connection, old: Link, new: Link | None = None) -> None:
        """Let it send on ``new`` or else on the least loaded link but ``old``; it ends when there
        is none.  Nothing for one that ends just now.
        """
        if connection.channel is None:
            return
        group = self._group
        if new is None or not new.usable:
            new = group.connections.link_for(connection, but=old)
        if new is None:
            connection.links_lost()
            return
        LOGGER.info("%r goes on over link %d instead of %d", connection, new.number, old.number)
        replay.move(connection, *group.connections.move(connection, new))
        observer = group.host.observer
        if observer is not None:
            observer.state(connection, f"link {old.number}", f"link {new.number}", "move")


class _Departure:
    """A link that is being left."""

    __slots__ = ("done", "waiting")

    def __init__(self, connections: list[Connection], done: Callable[[], None]) -> None:
        self.waiting = set(connections)
        self.done = done


def _connections(link: Link) -> list[Connection]:
    return [user for user in link.users if isinstance(user, Connection)]
