"""ADD LINK CONTINUATION: what both sides say of their RMBs on a link that is being added
(RFC 7609, 3.5.1.6, 3.5.5.2.3, A.3.3).

Messages go to and fro on the link that the exchange uses, the server's first, each with up to two
RTokens and the number of those that are still to come, until neither side has one left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.link import Link
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["LinkTelling"]

_PAIRS: Final = 2  # RTokens in one message (A.3.3)


class LinkTelling:
    """The RTokens of one new link at a time: which are still to be told, and to be heard."""

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self._own: list[llc.RTokenPair] = []
        self._peer_left: int | None = None

    def begin(self) -> None:
        """A link is being added: nothing was told or heard of it."""
        self._own = []
        self._peer_left = None

    def start(self, carrier: Link, new: Link) -> None:
        """Send the server's first message."""
        self._own = self._group.rkeys.pairs_for(carrier, new)
        self._tell(carrier, new)

    def _tell(self, carrier: Link, new: Link) -> None:
        pairs, left = tuple(self._own[:_PAIRS]), len(self._own)
        del self._own[:_PAIRS]
        carrier.send_llc(
            llc.AddLinkContinuation(
                reply=self._group.client, link_number=new.number, tokens_left=left, pairs=pairs
            ),
            self._group.setup.past_return,
        )

    def on_continuation_untrusted(self, link: Link, message: llc.AddLinkContinuation) -> None:
        """RTokens of the peer's RMBs on the new link.

        Raises ProtocolError when none can come now, or they do not fit the announced number.
        """
        group, exchanges, new = self._group, self._group.exchanges, self._group.adding.new
        if message.reply is group.client or message.link_number != group.adding.number:
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        if new is None and exchanges.state == "DELETE_LINK":
            return  # given up meanwhile
        if (
            new is None
            or exchanges.state != "ADD_LINK_CONTINUATION"
            or link is not exchanges.carrier
        ):
            raise ProtocolError("ADD LINK CONTINUATION out of turn")
        first = self._peer_left is None
        self._learn_untrusted(link, new, message)
        if group.client:
            if first:
                self._own = group.rkeys.pairs_for(link, new)
            self._tell(link, new)
            if link.state == "DOWN":
                return
        if self._own or self._peer_left:
            exchanges.machine.send("continued")
            if not group.client:
                self._tell(link, new)
        elif not group.rkeys.covers(new):
            raise ProtocolError("no RToken for an RMB in use")
        else:
            group.adding.rkeys_told(new)

    def _learn_untrusted(self, link: Link, new: Link, message: llc.AddLinkContinuation) -> None:
        expected, left = self._peer_left, message.tokens_left
        # Fewer: an RMB went meanwhile; whether any is missing is looked at when all are told.
        if expected is not None and left > expected:
            raise ProtocolError(f"{left} RTokens are left instead of {expected}")
        self._peer_left = max(0, left - _PAIRS)
        self._group.rkeys.learn_pairs_untrusted(link, new, message.pairs)
