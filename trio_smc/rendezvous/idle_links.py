"""Links that no connection uses: the server deletes them after a while (RFC 7609, 3.5.5.1.3).

Two links without a common RNIC always stay, for redundancy.  A link that went for this reason is
added again when connections use all that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous import llc
from trio_smc.states.link_group import USABLE

if TYPE_CHECKING:
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["IdleLinks"]

_REDUNDANT: Final = 2
"""Symmetric links that are never deleted for being idle."""


class IdleLinks:
    """When links of one group are deleted because nothing uses them.

    Attributes:
      spared: whether one was deleted and not added again since.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._timer: Timer | None = None
        self.spared = False

    def watch(self) -> None:
        """Look after the time that an idle group has, too; server only."""
        group = self._group
        if self._timer is None and not group.client and self._more_than_needed():
            self._timer = group.timers.call_later(group.config.link_group_idle, self._look)

    def _more_than_needed(self) -> bool:
        return len(self._group.links.symmetric()) > _REDUNDANT

    def _look(self) -> None:
        self._timer = None
        group = self._group
        if group.state not in USABLE:
            return
        oldest = group.timers.now() - group.config.link_group_idle
        for link in reversed(group.links.symmetric()[_REDUNDANT:]):
            if not link.users and link.empty_since <= oldest:
                self.spared = True
                group.delete_link(link.number, reason=llc.DeleteLinkReason.PROGRAM)
                break  # one at a time: the next look finds the next one
        self.watch()

    def connection_placed(self) -> None:
        """All links are in use: one more would be."""
        if self.spared and all(link.users for link in self._group.links.usable()):
            self.spared = False
            self._group.seeking.seek(news=False)

    def close(self) -> None:
        """The group is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
