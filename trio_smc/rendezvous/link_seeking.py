"""When a link group wants one more link (RFC 7609, 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, C.8).

The server offers a link as soon as the first one is confirmed, and later whenever an RNIC comes
at either end, a link is lost, or C.8's timer is due; after each new link it looks whether it has
one more RNIC.  A client only tells its server of an RNIC.  How the link is added then is told in
`link_adding`, and which RNICs it joins in `link_choice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_smc.rendezvous import llc
from trio_smc.rendezvous.link_choice import server_rnic
from trio_smc.rendezvous.links import Kind

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["LinkSeeking"]

_FIRST_RETRY: Final = 10.0
_LAST_RETRY: Final = 320.0
"""Seconds until a failed link is tried again (C.8): doubled each time.  A rejection waits the
longest at once, as the client tells when it has another RNIC (3.5.5.1.2), unless it has told so:
then what was in its way may pass."""


class LinkSeeking:
    """When one link group begins ADD LINK."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._delay = _FIRST_RETRY
        self._timer: Timer | None = None
        self._wanted = False
        self._news = False
        self._held = False
        self._asked = False
        self._notified = False
        self._replaced: Link | None = None

    def seek(self, *, news: bool = True) -> None:
        """Add a link, or tell the server of an RNIC, now or when the exchange under way is over.

        Args:
          news: an RNIC came, or time passed: what was rejected before may work now.
        """
        if news:
            self._held = False
        elif self._held:
            self.retry_later()
            return
        elif self._group.idle_links.spared and self._group.links.kind is Kind.SYMMETRIC:
            return
        self._wanted = True
        self._news |= news
        self._group.exchanges.look()

    def asked(self) -> None:
        """The client has an RNIC for a further link (3.5.5.1.2)."""
        if not self._asked:
            self._asked = True
            self._delay = _FIRST_RETRY
            self.close()
        self.seek()

    def hold(self) -> None:
        """An operator deleted a link: do not add another one before something has changed."""
        self._held = True
        self._wanted = self._news
        self._delay = _LAST_RETRY
        self.retry_later()

    def start(self) -> bool:
        """Begin ADD LINK, if one is wanted and can be had."""
        group = self._group
        if not self._wanted:
            return False
        self._wanted = False
        news, self._news = self._news, False
        if group.client:
            self._send_notice()
            return False
        carrier = group.any_active_link()
        rnic = server_rnic(group.links, group.usable_rnics(), group.setup.max_links, news=news)
        if (
            carrier is None
            or rnic is None
            or not group.adding.make(group.links.next_number(), rnic)
        ):
            if group.links.kind is Kind.SINGLE:
                self.retry_later()
            return False
        group.adding.offer(carrier, rnic)
        group.exchanges.begin("add_link", carrier)
        return True

    def offer_second(self, carrier: Link) -> None:
        """The server's ADD LINK at first contact, with one RNIC too (3.5.1.6)."""
        group = self._group
        rnics = [carrier.rnic, *group.usable_rnics()]
        rnic = server_rnic(group.links, rnics, group.setup.max_links, news=True) or carrier.rnic
        # The client waits for ADD LINK; one without a queue pair is as good as none.
        group.adding.make(group.links.next_number(), rnic)
        group.adding.offer(carrier, rnic)

    def replace(self, link: Link) -> None:
        """Add a link in the place of the only one, whose RNIC is taken out; it goes then."""
        self._replaced = link
        self.seek()

    def not_joined(self) -> None:
        """The client could not connect its end of the link that the server offers: tell of the RNIC
        later (3.5.5.1.2), soon again when the server offered by itself, as something is new there.
        """
        if not self._notified:
            self.close()
            self._delay = _FIRST_RETRY
        self._notified = False
        self.retry_failed()

    def retry_later(self) -> None:
        """C.8: when there is no redundancy; a client's timer is for its notice (C.7.1)."""
        if self._group.links.kind is Kind.SINGLE:
            self.retry_failed()

    def retry_failed(self) -> None:
        """C.7.1: a link could not be confirmed, be there others or not."""
        if self._timer is None:
            self._timer = self._group.timers.call_later(self._delay, self._retry)
            self._delay = min(2 * self._delay, _LAST_RETRY)

    def _retry(self) -> None:
        self._timer = None
        self.seek()

    def _send_notice(self) -> None:
        """The client's ADD LINK: it has an RNIC for one more link (3.5.5.1.2)."""
        group = self._group
        links = group.links
        carrier = group.any_active_link()
        unused = links.unused(group.usable_rnics())
        if carrier is not None and unused and len(links.symmetric()) < group.setup.max_links:
            self._notified = True
            carrier.send_llc(llc.AddLink(mac=unused[0].mac, gid=unused[0].gid))
        elif group.deletion.links_to_go:
            self._wanted = True  # the RNIC that came back may have a link that is still to go

    def rejected(self) -> None:
        """The client has no RNIC for another link: the same again would be rejected again."""
        if not self._asked:
            self._delay = _LAST_RETRY
        self._wanted = self._news

    def added(self) -> None:
        """There is one more link; one whose RNIC is to be taken out can go."""
        self.close()
        self._delay = _FIRST_RETRY
        self._asked = False
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.rnic not in self._group.usable_rnics():
            self._group.rnic_unavailable(replaced.rnic)

    def close(self) -> None:
        """No retry is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
