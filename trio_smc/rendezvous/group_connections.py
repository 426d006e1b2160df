"""The connections of one link group: by alert token, by peer's element, by sending link.

Which link a connection sends on is this side's affair alone (RFC 7609, 2.3); the peer chooses
its own.  A new connection goes to the link with the fewest.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, NamedTuple

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.rtokens import PeerRmb, RToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_smc.rendezvous.context import Group, GroupConnection
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.rtokens import ElementUser

__all__ = ["GroupConnections"]

LOGGER = logging.getLogger("trio_smc.link_group")


class _PeerElement(NamedTuple):
    rmb: PeerRmb
    number: int
    size: int


class GroupConnections:
    """The connections of one link group.

    Attributes:
      by_token: by our alert token; closing ones included.
    """

    def __init__(self, group: Group, placed: Callable[[], None]) -> None:
        """``placed``: called when a connection got a link."""
        self._group = group
        self._placed = placed
        self.by_token: dict[int, GroupConnection] = {}
        self._next_token = secrets.randbits(32)
        self._peer_elements: dict[ElementUser, _PeerElement] = {}
        self._keepalive: dict[ElementUser, float] = {}
        self._link_of: dict[ElementUser, Link] = {}

    def new_token(self) -> int:
        """An alert token that names no connection and was not used lately (4 bytes, not 0)."""
        while True:
            self._next_token = (self._next_token + 1) & 0xFFFFFFFF
            if self._next_token and self._next_token not in self.by_token:
                return self._next_token

    def remove(self, token: int, user: ElementUser) -> None:
        """Forget a closed connection; late messages for it are dropped and counted."""
        connection = self.by_token.pop(token)
        self._keepalive.pop(user, None)
        self._leave(connection)
        element = self._peer_elements.pop(user, None)
        if element is not None and element.rmb.elements.get(element.number) is user:
            del element.rmb.elements[element.number]

    # --- links -----------------------------------------------------------------------------

    def place(self, connection: GroupConnection, link: Link) -> None:
        """From now on ``connection`` sends on ``link``."""
        self._leave(connection)
        self._link_of[connection] = link
        link.users[connection] = None
        self._placed()

    def _leave(self, connection: GroupConnection) -> None:
        link = self._link_of.pop(connection, None)
        if link is not None:
            link.users.pop(connection, None)
            if not link.users:
                link.empty_since = self._group.timers.now()

    def link_for(self, connection: GroupConnection, but: Link | None = None) -> Link | None:
        """The least loaded usable link on which the peer's element can be reached."""
        rmb = self._peer_elements[connection].rmb
        links = [
            link
            for link in self._group.usable_links()
            if link is not but and link.number in rmb.tokens
        ]
        return min(links, key=_load, default=None)

    # --- the peer's elements ---------------------------------------------------------------

    def take_peer_element_untrusted(
        self, link: Link, *, rkey: int, address: int, index: int, size: int, user: ElementUser
    ) -> None:
        """Note which element of the peer's ``user`` writes into (RFC 7609, A.2.2, A.2.3).

        Args:
          link: which SMC Accept or Confirm names; it may have just gone.
          rkey, address: of the RMB on that link.
          index, size: of the element: from 1, bytes.

        Raises:
          ProtocolError: there are too many RMBs, or this one contradicts what is known, or nobody
            told of it and its link is gone.
        """
        rmbs = self._group.peer_rmbs
        token = RToken(rkey, address)
        rmb = rmbs.find_named(link.number, token)
        if rmb is not None and index in rmb.elements:
            # The last words of the element's last user may still wait on a link: TCP was quicker.
            self._group.mover.catch_up()
            rmb = rmbs.find_named(link.number, token)
        if rmb is None:
            if self._group.links.get(link.number) is not link:
                raise ProtocolError("an unknown RMB on a link that is gone")
            rmb = rmbs.learn_untrusted({link.number: token})
        holder = rmb.elements.get(index)
        rmb.elements[index] = user
        self._peer_elements[user] = _PeerElement(rmb, index, size)
        if holder is not None:
            LOGGER.warning("%r: the peer reuses RMB element %d", self._group, index)
            holder.rmbe_conflict()

    def peer_element_on(self, connection: ElementUser, link: Link) -> tuple[int, int]:
        """Address and RKey of the peer's element on ``link``; KeyError when it has none there."""
        rmb, index, size = self._peer_elements[connection]
        token = rmb.tokens[link.number]
        return token.address + (index - 1) * size, token.rkey

    # --- TEST LINK -------------------------------------------------------------------------

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested: one test serves all connections (4.5.3)."""
        return min([self._group.config.test_link_interval, *self._keepalive.values()])

    def keep_alive(self, user: ElementUser, seconds: float | None) -> None:
        """Test idle links this often while ``user`` is open; None: it asks for nothing."""
        before = self.test_interval
        if seconds is None:
            self._keepalive.pop(user, None)
        else:
            self._keepalive[user] = seconds
        if self.test_interval < before:
            for link in self._group.links.values():
                link.test_interval_shortened()


def _load(link: Link) -> int:
    return link.load
