"""When a link group wants one more link (RFC 7609, 3.5.5.1.1, 3.5.5.1.2, C.8).

The server offers a link as soon as the first one is confirmed, and later whenever an RNIC comes
at either end, a link is lost, or C.8's timer is due; after each new link it looks whether it has
one more RNIC.  A client only tells its server of an RNIC.  How the link is added then is told in
`add_link`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous.links.link_set import LinkGroupKind

if TYPE_CHECKING:
    from trio_smc._base.timers import Timer
    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.link import Link

__all__ = ["LinkDemand"]


_FIRST_RETRY: Final = 10.0
_LAST_RETRY: Final = 320.0
"""Seconds until a failed link is tried again (C.8): doubled each time.  A rejection waits the
longest at once, as the client tells when it has another RNIC (3.5.5.1.2), unless it has told so:
then what was in its way may pass."""


class LinkDemand:
    """Whether one link group wants another link.

    Attributes:
      wanted: whether it does now.
      spared: whether an idle link was deleted and not added again since: two links that share no
        RNIC are enough then.
      notified: whether this client has told its server of an RNIC.
    """

    def __init__(self, group: Group, exchange: Exchange) -> None:
        self._group = group
        self._exchange = exchange
        self.wanted: bool = False
        self.spared = False
        self.notified: bool = False
        self._delay = _FIRST_RETRY
        self._timer: Timer | None = None
        self._news = False
        self._paused = False
        self._client_notified = False
        self._replaced: Link | None = None

    def want(self, *, news: bool = True) -> None:
        """Add a link, or tell the server of an RNIC, now or when the exchange under way is over.

        Args:
          news: an RNIC came, or time passed: what was rejected before may work now.
        """
        if news:
            self._paused = False
        elif self._paused:
            self.retry_later()
            return
        elif self.spared and self._group.links.kind is LinkGroupKind.SYMMETRIC:
            return
        self.wanted = True
        self._news |= news
        self._exchange.start_queued()

    def take_news(self) -> bool:
        """The link is about to be added; whether there is news (`want`)."""
        self.wanted = False
        news, self._news = self._news, False
        return news

    def on_client_notice(self) -> None:
        """The client has an RNIC for a further link (3.5.5.1.2)."""
        if not self._client_notified:
            self._client_notified = True
            self._delay = _FIRST_RETRY
            self.close()
        self.want()

    def pause(self) -> None:
        """An operator deleted a link: do not add another one before something has changed."""
        self._paused = True
        self.wanted = self._news
        self._delay = _LAST_RETRY
        self.retry_later()

    def replace(self, link: Link) -> None:
        """Add a link in the place of the only one, whose RNIC is taken out; it goes then."""
        self._replaced = link
        self.want()

    def on_join_failed(self) -> None:
        """The client could not connect its end of the link that the server offers: tell of the RNIC
        later (3.5.5.1.2), soon again when the server offered by itself, as something is new there.
        """
        if not self.notified:
            self.close()
            self._delay = _FIRST_RETRY
        self.notified = False
        self.retry_failed()

    def retry_later(self) -> None:
        """C.8: when there is no redundancy; a client's timer is for its notice (C.7.1)."""
        if self._group.links.kind is LinkGroupKind.SINGLE:
            self.retry_failed()

    def retry_failed(self) -> None:
        """C.7.1: a link could not be confirmed, be there others or not."""
        if self._timer is None:
            self._timer = self._group.timers.call_later(self._delay, self._retry)
            self._delay = min(2 * self._delay, _LAST_RETRY)

    def _retry(self) -> None:
        self._timer = None
        self.want()

    def on_rejected(self) -> None:
        """The client has no RNIC for another link: the same again would be rejected again."""
        if not self._client_notified:
            self._delay = _LAST_RETRY
        self.wanted = self._news

    def on_link_added(self) -> None:
        """There is one more link; one whose RNIC is to be taken out can go."""
        self.close()
        self._delay = _FIRST_RETRY
        self._client_notified = False
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.rnic not in self._group.usable_rnics():
            self._group.rnic_unavailable(replaced.rnic)

    def close(self) -> None:
        """No retry is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
