"""Deleting one link of a group: DELETE LINK and its reply (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

The server deletes, in an exchange of its own; a client asks it to, or is asked and must agree.
DELETE LINK for the whole group is the affair of `states.link_group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_smc.rendezvous import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup
    from trio_smc.rendezvous.timers import Timer

__all__ = ["LinkDeletion"]


class LinkDeletion:
    """How single links of one group go."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._timer: Timer | None = None

    def on_delete_link_untrusted(self, link: Link, message: llc.DeleteLink) -> None:
        number = message.link_number
        if message.reply:
            self._on_delete_reply(number)
        elif message.all_links:
            self._group.machine.send("delete_all")
        elif number not in self._group.links:
            link.send_llc(
                llc.DeleteLink(
                    reply=True, link_number=number, reason=llc.DeleteLinkReason.UNKNOWN_LINK
                )
            )
        elif self._group.client:
            # The client must agree (3.5.5.1.3); the link is gone once the reply is out.
            link.send_llc(
                llc.DeleteLink(reply=True, link_number=number, reason=message.reason),
                lambda: self._link_deleted(number),
            )
        else:
            # 3.5.5.1.4: the server answers with a DELETE LINK of its own.
            self.delete_link(number, message.reason)

    def delete_link(self, number: int, reason: int = llc.DeleteLinkReason.OPERATOR) -> None:
        """Delete one link; a client asks its server to (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

        ``reason`` is a 32-bit reason code for the peer.  A group without links ends, and its
        connections with an error.
        """
        if not self._group.client:
            self._group.exchanges.delete_link(number, reason)
            return
        link = self._group.any_active_link()
        if link is None or self._timer is not None:
            return
        link.send_llc(llc.DeleteLink(orderly=True, link_number=number, reason=reason))
        if link.state != "DOWN":
            self._timer = self._group.timers.call_later(
                self._group.config.llc_timeout, lambda: self._not_deleted(link)
            )

    def send_delete_link(self, link: Link, number: int, reason: int) -> None:
        """The server's request, when its turn among the exchanges has come."""
        link.send_llc(llc.DeleteLink(link_number=number, reason=reason))

    def _not_deleted(self, link: Link) -> None:
        # C.7.1, DELETE LINK from client: the link it was sent over is not usable either.
        self._timer = None
        link.machine.send("failed")

    def _on_delete_reply(self, number: int) -> None:
        # 3.5.5.1.3: only now the server frees what the link had.
        if not self._group.client and self._group.exchanges.state == "DELETE_LINK":
            if number != self._group.exchanges.deleting:
                return  # not what was asked for
            self._group.exchanges.done()
            if number == self._group.setup.offered:
                self._group.setup.add_link_settled()
            else:
                self._link_deleted(number)

    def _link_deleted(self, number: int) -> None:
        link = self._group.links.get(number)
        if link is not None:
            link.machine.send("delete")
            self._group.link_down(link)

    def close(self) -> None:
        """The group is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
