"""Brings up the first link of a group: CONFIRM LINK (RFC 7609, 3.5.1.5).

Theory of operation
-------------------
First contact, seen from the server: before SMC Accept, `LinkGroup.open_first_link` makes a queue
pair in INIT. On SMC Confirm, `connect_first` connects it and sends CONFIRM LINK. The reply makes
the link active. Then the server sends ADD LINK (`add_link`), and the group is formed with or
without a second link. The client does the same from its side: on SMC Accept, `connect_first` takes
the queue pair to RTR. When CONFIRM LINK arrives, the client takes the queue pair to RTS and
replies. Then it answers the server's ADD LINK, and the group is formed.

RMB elements begin with an eye catcher (4.2) on both sides, or on neither. Linux has none, and
announces this in two bits of CONFIRM LINK that the RFC reserves. A peer that follows the RFC does
not know these bits, so they count only if both CONFIRM LINKs have them. The first elements are made
before CONFIRM LINK. If necessary they get their eye catchers afterwards, before any data arrives.

If a first contact fails, one side declines. `our_turn` is true if this is the side: if this side
had to send the next LLC message, or if its last message is not known to have arrived. Otherwise the
peer notices the failure first (C.7).
"""

from __future__ import annotations

import errno
import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.resources import is_lack
from trio_smc.rendezvous.links.link import Link, PeerQueuePair
from trio_smc.rendezvous.links.link_set import FIRST_LINK
from trio_smc.rendezvous.terms import LINK_LIMIT
from trio_smc.rnic.verbs import RnicError
from trio_smc.wire import llc

if TYPE_CHECKING:
    from trio_smc.rendezvous.links.context import Exchange, Group
    from trio_smc.rendezvous.links.rkeys import Rkeys

__all__ = [
    "FirstContact",
    "GroupFailure",
    "LinkSetup",
]


LOGGER = logging.getLogger("trio_smc.link_group")

_LEAST_LINKS: Final = 2
"""The smallest link limit (RFC 7609, 3.5.1.5)."""


class GroupFailure(Enum):
    """The reason of a failed first contact."""

    LINK_LOST = auto()
    """The new link has failed."""
    LACK = auto()
    """This side lacks resources for the link, or to write to the peer's RMB."""
    TIMED_OUT = auto()
    PROTOCOL_ERROR = auto()


class FirstContact(Protocol):
    """The negotiation that forms the group; it is notified once of the outcome."""

    def group_formed(self) -> None:
        """Data may flow."""

    def group_failed(self, failure: GroupFailure, error: ProtocolError | None) -> None:
        """The link could not be confirmed; ``error``: the peer's violation, or None."""


class LinkSetup:
    """Brings up the first link of one group, and has the agreed limits.

    Attributes:
      may_fall_back: True if a failure may still lead to TCP (RFC 7609, C.3).
      our_turn: True if this side has to decline after such a failure (C.2, C.7).
      max_links: the largest number of links (3.5.1.5). In version 2 the sides agree on it by CLC.
      failure, error: the reason of a failed first contact.
    """

    def __init__(self, group: Group, exchange: Exchange, rkeys: Rkeys) -> None:
        self._group = group
        self._exchange = exchange
        self._rkeys = rkeys
        self.may_fall_back: bool = True
        self.our_turn: bool = not group.client
        self.max_links: int = group.terms.max_links
        self.failure: GroupFailure = GroupFailure.LINK_LOST
        self.error: ProtocolError | None = None
        self._rkey = 0  # of the peer's first RMB

    def connect_first(self, peer: PeerQueuePair, rkey: int) -> Link:
        """Connect the first link; a server also sends CONFIRM LINK.

        Args:
          peer: the peer's end.
          rkey: the RKey of the RMB that the peer's CLC message names.

        Raises:
          RnicError: the link cannot be connected, or this side lacks resources (`is_lack`) to reach
            the peer.
        """
        link = self._group.links[FIRST_LINK]
        self._rkey = rkey
        link.connect(peer)
        if link.qp.lacks_resources():  # CONFIRM LINK would wait for the resources
            raise RnicError(errno.ENOMEM, "no resources to reach the peer's queue pair")
        self._exchange.begin("confirm_link", link)
        if not self._group.client:
            link.send_llc(self.confirm_link(link, reply=False), self._end_our_turn)
        return link

    def _end_our_turn(self) -> None:
        self.our_turn = False

    def first_link_failed(self, link: Link, error: RnicError) -> None:
        """The first link's queue pair could not be connected."""
        LOGGER.info("%r: %s", self._group, error)
        if is_lack(error):
            self.failure = GroupFailure.LACK
        link.machine.send("failed")

    def give_up(self) -> None:
        """End the group: the expected message did not arrive on the new link (RFC 7609, C.7.1)."""
        self.failure = GroupFailure.TIMED_OUT
        self._group.machine.send("links_lost")

    def confirm_link(self, link: Link, *, reply: bool) -> llc.ConfirmLink:
        """CONFIRM LINK for ``link``, or its reply (A.3.1)."""
        terms = self._group.terms
        return llc.ConfirmLink(
            reply=reply,
            no_eye_catcher=not self._group.own_rmbs.eye_catcher,
            mac=link.rnic.mac,
            gid=link.rnic.gid,
            qp_number=link.qp.qp_num,
            link_number=link.number,
            link_user_id=link.user_id,
            max_links=self.max_links,
            max_connections=terms.max_connections or 0 if terms.release else 0,
        )

    def check_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        """Raise ProtocolError if CONFIRM LINK is unexpected or names other queue pairs (C.7.1)."""
        peer = link.peer
        if peer is None or link.state != "CONFIRMING" or message.reply is self._group.client:
            raise ProtocolError("unexpected CONFIRM LINK")
        named = (message.gid, message.mac, message.qp_number)
        if named != (peer.gid, peer.mac, peer.qp_number):
            raise ProtocolError("CONFIRM LINK names another queue pair than was agreed")

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> bool:
        """Process CONFIRM LINK on the first link, or its reply; True if the link is active."""
        try:
            self.check_confirm_link_untrusted(link, message)
        except ProtocolError as error:
            if not self._group.client or link.state != "CONFIRMING" or message.reply:
                raise
            # C.7.1 requires SMC Decline instead of the reply.
            LOGGER.warning("%r: %s", link, error)
            self.our_turn = True
            link.machine.send("failed")
            return False
        if not self._group.client and message.link_number != link.number:
            raise ProtocolError("CONFIRM LINK reply for another link")
        self.our_turn = True
        link.peer_user_id = message.link_user_id
        if not message.no_eye_catcher:
            self._group.own_rmbs.enable_eye_catchers()
        if self._group.terms.version == 1:
            # 3.5.1.5: the lower limit counts, but at least 2; 0 means that the peer sets none.
            self.max_links = max(_LEAST_LINKS, min(message.max_links or LINK_LIMIT, LINK_LIMIT))
        if self._group.client:
            self._renumber(link, message.link_number)
        try:
            link.check_reach(self._rkey)
            if self._group.client:
                link.ready_to_send()
        except RnicError as error:
            self.first_link_failed(link, error)
            return False
        if self._group.client:
            link.send_llc(self.confirm_link(link, reply=True), self._end_our_turn)
        if link.state != "CONFIRMING":
            return False  # the reply could not be sent
        link.machine.send("confirmed")
        self._exchange.done()
        return True

    def _renumber(self, link: Link, number: int) -> None:
        # The server assigns the number of the first link (3.5.1.5); old servers begin with 0.
        del self._group.links[link.number]
        self._rkeys.renumber(link.number, number)
        link.number = number
        self._group.links[number] = link

    def commit_to_smc(self) -> None:
        """The point of no return (C.3): from now on a failure can only reset the TCP connection."""
        self.may_fall_back = False

    def assume_peer_turn(self) -> None:
        """Leave the Decline to the peer, if a message of this side may still arrive there.

        Called when the group is terminated without a failure of the link.
        """
        if any(link.unacknowledged for link in self._group.links.values()):
            self.our_turn = False
