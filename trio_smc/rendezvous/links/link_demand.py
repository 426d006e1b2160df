"""Decides when a link group needs one more link (RFC 7609, 3.5.5.1.1, 3.5.5.1.2, C.8).

The server offers a link as soon as the first one is confirmed, and later whenever an RNIC is added
at either end, a link is lost, or C.8's timer expires. After each new link the server checks whether
it has an RNIC for one more. A client only notifies its server of an RNIC. `add_link` adds the link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous.links.link_set import LinkGroupKind

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer
    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.link import Link

__all__ = ["FIRST_RETRY", "LinkDemand"]


FIRST_RETRY: Final = 10.0
_LAST_RETRY: Final = 320.0
"""Seconds until a failed link is tried again (C.8): from the first value, doubled each time, to the
last. Chosen; docs/decisions.md, "when a failed second link is tried again". After a rejection the
delay is the longest at once, because a client that gets an RNIC notifies the server (3.5.5.1.2). If
the client has notified the server already, the cause of the rejection may be temporary."""


class LinkDemand:
    """Decides whether one link group needs another link.

    Attributes:
      wanted: True if the group needs a link now.
      idle_link_deleted: True if an idle link was deleted and not added again. Two links that share
        no RNIC are then enough.
      notified: True if this client has notified its server of an RNIC.
    """

    def __init__(self, group: Group, exchange: Exchange) -> None:
        self._group = group
        self._exchange = exchange
        self.wanted: bool = False
        self.idle_link_deleted = False
        self.notified: bool = False
        self._delay = FIRST_RETRY
        self._timer: Timer | None = None
        self._news = False
        self._paused = False
        self._client_notified = False
        self._replaced: Link | None = None

    def want(self, *, news: bool = True) -> None:
        """Add a link, or notify the server of an RNIC, now or after the exchange under way.

        Args:
          news: True if an RNIC was added or a timer has expired, so that a link that was rejected
            before may work now.
        """
        if news:
            self._paused = False
        elif self._paused:
            self.retry_later()
            return
        elif self.idle_link_deleted and self._group.links.kind is LinkGroupKind.SYMMETRIC:
            return
        self.wanted = True
        self._news |= news
        self._exchange.start_queued()

    def take_news(self) -> bool:
        """Reset `wanted`, and return True if a call of `want` had ``news`` since the last reset."""
        self.wanted = False
        news, self._news = self._news, False
        return news

    def on_client_notice(self) -> None:
        """The client has notified this server of an RNIC for a further link (3.5.5.1.2)."""
        if not self._client_notified:
            self._client_notified = True
            self._delay = FIRST_RETRY
            self.close()
        self.want()

    def pause(self) -> None:
        """Add no link before there is news (`want`), because an operator has deleted one."""
        self._paused = True
        self.wanted = self._news
        self._delay = _LAST_RETRY
        self.retry_later()

    def replace(self, link: Link) -> None:
        """Add a link that replaces the only link, whose RNIC is being removed."""
        self._replaced = link
        self.want()

    def on_join_failed(self) -> None:
        """The client could not connect its end of the server's new link: notify the server later.

        If the server offered the link without a notice of this client, the delay starts again at
        the shortest, because something has changed at the server (3.5.5.1.2).
        """
        if not self.notified:
            self.close()
            self._delay = FIRST_RETRY
        self.notified = False
        self.retry_failed()

    def retry_later(self) -> None:
        """Try again later if there is no redundancy (C.8); a client repeats its notice (C.7.1)."""
        if self._group.links.kind is LinkGroupKind.SINGLE:
            self.retry_failed()

    def retry_failed(self) -> None:
        """Try again later, because a link could not be confirmed (C.7.1)."""
        if self._timer is None:
            self._timer = self._group.timers.call_later(self._delay, self._retry)
            self._delay = min(2 * self._delay, _LAST_RETRY)

    def _retry(self) -> None:
        self._timer = None
        self.want()

    def on_rejected(self) -> None:
        """The client has rejected a link, for which it has no RNIC, and would reject it again."""
        if not self._client_notified:
            self._delay = _LAST_RETRY
        self.wanted = self._news

    def on_link_added(self) -> None:
        """A link was added, so a link whose RNIC is being removed can be deleted."""
        self.close()
        self._delay = FIRST_RETRY
        self._client_notified = False
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.rnic not in self._group.usable_rnics():
            self._group.rnic_unavailable(replaced.rnic)

    def close(self) -> None:
        """Cancel the timer of the next try."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
