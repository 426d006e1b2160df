"""A client's DELETE LINK: it asks its server to delete a link (RFC 7609, 3.5.5.1.4)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from trio_smc.rendezvous import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["DeletionRequests", "Wanted"]

LOGGER = logging.getLogger("trio_smc.link_group")


_PATIENCE: Final = 3
"""Reply time-outs that a client gives its server, which may first wait for the end of an exchange
of its own (3.5.5.3.1), and then for its connections to leave the link."""


class Wanted(NamedTuple):
    """A link that is to go.

    Fields:
      number: the link's.
      reason: a 32-bit reason code (A.3.4).
      orderly: connections leave it while it still works.
    """

    number: int
    reason: int
    orderly: bool


class _Asked(NamedTuple):
    """A client's DELETE LINK that waits for the server's."""

    wanted: Wanted
    link: Link
    timer: Timer


class DeletionRequests:
    """What the client of one group has asked its server to delete.

    Attributes:
      asked: by link number, what the server has not answered yet.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.asked: dict[int, _Asked] = {}

    def ask(self, number: int, reason: int, *, orderly: bool = False) -> None:
        """Send DELETE LINK; the server's will follow."""
        links = self._group.links
        link = links.for_llc(avoid=links.get(number))
        if link is not None and number not in self.asked:
            self._send(link, Wanted(number, reason, orderly))

    def _send(self, link: Link, wanted: Wanted) -> None:
        number = wanted.number
        timer = self._group.timers.call_later(
            _PATIENCE * self._group.reply_timeout, lambda: self._not_deleted(number)
        )
        self.asked[number] = _Asked(wanted, link, timer)
        link.send_llc(
            llc.DeleteLink(orderly=wanted.orderly, link_number=number, reason=wanted.reason)
        )

    def _not_deleted(self, number: int) -> None:
        wanted, link, _ = self.asked[number]
        LOGGER.info("%r: DELETE LINK was not answered", link)
        if number != link.number and self._group.usable_links() == [link]:
            # Linux answers only when all it has sent over the lost link has failed, which over
            # soft-RoCE may be never; and it drops requests that come in the middle of another
            # exchange.  The last link took our message, so it works: no connection is to die of
            # it, and TEST LINK watches it (4.5.3).  Ask again.
            self._send(link, wanted)
            return
        # C.7.1: the link it was sent over is not usable either; `link_lost` asks again.
        link.machine.send("failed")

    def wanted(self, number: int) -> Wanted | None:
        """What was asked for link ``number``, if the server's DELETE LINK has not come yet."""
        asked = self.asked.get(number)
        return None if asked is None else asked.wanted

    def forget(self, number: int) -> bool:
        """Wait no longer; whether anything was asked."""
        asked = self.asked.pop(number, None)
        if asked is not None:
            asked.timer.cancel()
        return asked is not None

    def link_lost(self, link: Link) -> None:
        """What was sent over ``link``, which has failed, may not have arrived: ask again."""
        for wanted in [asked.wanted for asked in self.asked.values() if asked.link is link]:
            self.forget(wanted.number)
            self.ask(wanted.number, wanted.reason, orderly=wanted.orderly)

    def close(self) -> None:
        """The group is gone."""
        for number in list(self.asked):
            self.forget(number)
