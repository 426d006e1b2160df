"""Links coming up: CONFIRM LINK on the first, ADD LINK for a second (RFC 7609, 3.5.1.5, 3.5.1.6).

Theory of operation
-------------------
First contact, seen from the server: `LinkGroup.open_first_link` (INIT) before SMC Accept;
`connect_first` on SMC Confirm, which sends CONFIRM LINK; its reply makes the link active; then
ADD LINK is tried, and whatever the answer the group is formed.  The client mirrors this:
`connect_first` (RTR) on SMC Accept, RTS and the CONFIRM LINK reply when the request arrives, then
the server's ADD LINK is answered and the group is formed.

When a first contact fails, `our_turn` tells whether the negotiation may decline: the next LLC
message was ours to send, or ours was not seen to arrive.  Otherwise the peer knows first (C.7).
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.link import Link, PeerQueuePair
from trio_smc.rnic.verbs import RnicError

if TYPE_CHECKING:
    from trio_smc.rendezvous.link_group import LinkGroup

__all__ = ["FIRST_LINK", "FirstContact", "GroupFailure", "LinkSetup"]

LOGGER = logging.getLogger("trio_smc.link_group")

FIRST_LINK: Final = 1
_MAX_LINKS: Final = 2
"""The link limit that CONFIRM LINK announces (RFC 7609, 3.5.1.5); the least allowed."""


class GroupFailure(Enum):
    """Why a first contact failed."""

    LINK_LOST = auto()
    TIMED_OUT = auto()
    PROTOCOL_ERROR = auto()


class FirstContact(Protocol):
    """The negotiation that is forming the group; told once how it ended."""

    def group_formed(self) -> None:
        """Data may flow."""

    def group_failed(self, failure: GroupFailure, error: ProtocolError | None) -> None:
        """The link could not be confirmed; ``error`` is what the peer did wrong."""


class LinkSetup:
    """How the links of one group come up.

    Attributes:
      may_fall_back: whether a failure may still become TCP (RFC 7609, C.3).
      our_turn: whether such a failure is ours to tell the peer (C.2, C.7).
      peer_eye_catcher: whether the peer's RMB elements start with an eye catcher.
      max_links: how many links the group may have (3.5.1.5).
      offered: number of the link that our ADD LINK offered; -1: none.
      failure: why the first contact failed, once it has.
    """

    def __init__(self, group: LinkGroup) -> None:
        self._group = group
        self.may_fall_back = True
        self.our_turn = not group.client
        self.peer_eye_catcher = True
        self.max_links = _MAX_LINKS
        self.offered = -1
        self.failure = GroupFailure.LINK_LOST
        self._spare: Link | None = None

    def connect_first(self, peer: PeerQueuePair) -> None:
        """Connect the first link; the server's sends CONFIRM LINK.  Raises RnicError."""
        link = self._group.links[FIRST_LINK]
        link.connect(peer)
        self._group.exchanges.begin("confirm_link", link)
        if not self._group.client:
            link.send_llc(self._confirm_link(link, reply=False), self._turn_over)

    def _turn_over(self) -> None:
        self.our_turn = False

    def first_link_failed(self, error: RnicError) -> None:
        """The first link's queue pair could not be connected."""
        LOGGER.info("%r: %s", self._group, error)
        self._group.links[FIRST_LINK].machine.send("failed")

    def first_contact_timed_out(self) -> None:
        """Nothing more came on the new link (RFC 7609, C.7.1)."""
        self.failure = GroupFailure.TIMED_OUT
        self._group.machine.send("links_lost")

    def add_link_settled(self) -> None:
        """A second link was refused, or given up (RFC 7609, 3.5.1.6, C.8)."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()
        if self._group.state == "FORMING":
            self._group.machine.send("formed")

    def _confirm_link(self, link: Link, *, reply: bool) -> llc.ConfirmLink:
        return llc.ConfirmLink(
            reply=reply,
            no_eye_catcher=not self._group.config.rmbe_eye_catcher,
            mac=link.rnic.mac,
            gid=link.rnic.gid,
            qp_number=link.qp.qp_num,
            link_number=link.number,
            link_user_id=link.user_id,
            max_links=_MAX_LINKS,
        )

    def on_confirm_link_untrusted(self, link: Link, message: llc.ConfirmLink) -> None:
        peer = link.peer
        if peer is None or link.state != "CONFIRMING" or message.reply is self._group.client:
            raise ProtocolError("CONFIRM LINK out of turn")
        named = (message.gid, message.mac, message.qp_number)
        if named != (peer.gid, peer.mac, peer.qp_number):
            error = ProtocolError("CONFIRM LINK names another queue pair than the CLC message")
            if not self._group.client:
                raise error
            # C.7.1 wants a Decline for this one, in place of the reply.
            LOGGER.warning("%r: %s", link, error)
            self.our_turn = True
            link.machine.send("failed")
            return
        if not self._group.client and message.link_number != link.number:
            raise ProtocolError("CONFIRM LINK reply for another link")
        self.our_turn = True
        link.peer_user_id = message.link_user_id
        self.peer_eye_catcher = not message.no_eye_catcher
        # 3.5.1.5: the lower limit counts; 0 means the server's, 2 is the least.
        self.max_links = max(2, min(message.max_links or _MAX_LINKS, _MAX_LINKS))
        if self._group.client:
            self._renumber(link, message.link_number)
            try:
                link.ready_to_send()
            except RnicError as error:
                self.first_link_failed(error)
                return
            link.send_llc(self._confirm_link(link, reply=True), self._turn_over)
        if link.state != "CONFIRMING":
            return  # the reply could not be sent
        link.machine.send("confirmed")
        self._group.exchanges.done()
        self._group.exchanges.begin("add_link", link)
        if not self._group.client:
            self._send_add_link(link)

    def _renumber(self, link: Link, number: int) -> None:
        # The client learns its first link's number here (3.5.1.5); old servers count from 0.
        del self._group.links[link.number]
        self._group.rkeys.renumber(link.number, number)
        link.number = number
        self._group.links[number] = link

    def _send_add_link(self, link: Link) -> None:
        self.offered = number = link.number + 1
        try:
            self._spare = spare = Link(self._group, number, self._group.rnic)
        except RnicError as error:
            # The client waits for ADD LINK; one without a queue pair is as good as none.
            LOGGER.info("%r: no queue pair for a second link: %s", self._group, error)
            request = llc.AddLink(mac=link.rnic.mac, gid=link.rnic.gid, link_number=number)
        else:
            request = llc.AddLink(
                mac=spare.rnic.mac,
                gid=spare.rnic.gid,
                qp_number=spare.qp.qp_num,
                link_number=number,
                qp_mtu=spare.rnic.mtu,
                initial_psn=spare.psn,
            )
        link.send_llc(request, self._past_return)

    def _past_return(self) -> None:
        self.may_fall_back = False  # RFC 7609, C.3

    def on_add_link_untrusted(self, link: Link, message: llc.AddLink) -> None:
        if self._group.client:
            if message.reply:
                raise ProtocolError("ADD LINK reply from the server")
            self._reject_link(link, message)
        elif message.reply:
            self._on_add_link_reply_untrusted(link, message)
        # else: a client's notice of a new RNIC; with one RNIC here no link can come of it.

    def _reject_link(self, link: Link, message: llc.AddLink) -> None:
        """3.5.1.6.1: with one RNIC a second link would be a parallel one."""
        self.our_turn = True
        reason = llc.AddLinkReason.NO_ALTERNATE_PATH
        if not 1 <= message.qp_mtu <= 5 and message.qp_number:
            reason = llc.AddLinkReason.INVALID_MTU
        link.send_llc(
            llc.AddLink(
                reply=True, rejected=True, reason=reason, mac=link.rnic.mac,
                gid=link.rnic.gid, link_number=message.link_number,
            )
        )  # fmt: skip
        if link.state == "DOWN":
            return
        self._past_return()
        if self._group.exchanges.state == "ADD_LINK":
            self._group.exchanges.done()
            self.add_link_settled()

    def _on_add_link_reply_untrusted(self, link: Link, message: llc.AddLink) -> None:
        if message.link_number != self.offered:
            raise ProtocolError("ADD LINK reply without a request")
        self._past_return()
        waiting = self._group.exchanges.state == "ADD_LINK"
        if waiting:
            self._group.exchanges.done()
        if not message.rejected:
            # The new link is given up before it carries anything; that must be agreed upon
            # before data may flow (C.7.1).
            self._group.deletion.delete_link(self.offered, llc.DeleteLinkReason.LOST_PATH)
        elif waiting:
            self.add_link_settled()

    def leave_turn(self) -> None:
        """The group was terminated, nothing failed: a message on its way may arrive yet, and with
        it the peer's turn."""
        if any(link.unacknowledged for link in self._group.links.values()):
            self.our_turn = False

    def close(self) -> None:
        """Free the link that was offered."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()
