"""Connections leave a link that is to be deleted, while it still works (RFC 7609, 3.5.5.1.3).

They get as long as an LLC reply.  Those that have not left by then are moved as if it had failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["LinkLeaving"]

LOGGER = logging.getLogger("trio_smc.link_group")


class LinkLeaving:
    """The links of one group that connections are leaving."""

    def __init__(self, group: LinkGroup, left: Callable[[int], None]) -> None:
        """`left`: called with the number of a link that nobody uses any more."""
        self._group = group
        self._left = left
        self._leaving: dict[int, Timer] = {}

    def begin(self, number: int, *, orderly: bool) -> None:
        """Let connections leave a link, if there is one to leave and one to go to.

        orderly: while it still works; else it fails at once.
        """
        link = self._group.links.get(number)
        if number in self._leaving:
            return
        if link is None or not link.usable or self._group.links.least_loaded(but=link) is None:
            self._left(number)  # there is nothing to leave, or nowhere to go
        elif orderly:
            link.machine.send("leave")
            self._leaving[number] = self._group.timers.call_later(
                self._group.config.llc_timeout, lambda: self._timed_out(number)
            )
            self._group.mover.link_leaving(link, lambda: self._has_left(number))
        else:
            link.machine.send("failed")
            self._left(number)

    def _timed_out(self, number: int) -> None:
        link = self._group.links.get(number)
        if link is not None:
            LOGGER.info("%r: its connections do not leave", link)
            self._group.mover.link_lost(link)
        self._has_left(number)

    def _has_left(self, number: int) -> None:
        if self.stop(number):
            self._left(number)

    def stop(self, number: int) -> bool:
        """Wait no longer for a link; whether anybody did."""
        timer = self._leaving.pop(number, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def close(self) -> None:
        """The group is gone."""
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()
