"""The server's side of the CLC handshake: answers SMC Proposal (RFC 7609, 3.5.1, 3.5.2).

`trio_smc.rendezvous.negotiation` has the part that both sides share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.negotiation import Negotiation, NegotiationHost, known
from trio_smc.rendezvous.terms import Terms, check_confirm, proposed
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.tables import CLC_SERVER
from trio_smc.wire import clc

__all__ = ["ServerNegotiation"]


class ServerNegotiation(Negotiation, table=CLC_SERVER):
    """Answers an SMC Proposal; the model of `states.clc`.

    Args:
      host: the stack.
      admit: checks the Proposal, with subnet and prefix (RFC 7609, 3.5.1.2), and returns the RNIC
        for the connection's route and the terms, or the reason of a refusal.
      receive_buffer: smallest size of the connection's RMB element, in bytes.
    """

    AWAITS_CLC = frozenset({"LISTENING", "ACCEPTED", "LINK_LOST"})
    EXPECTED: ClassVar[dict[str, frozenset[clc.MessageType]]] = {
        "LISTENING": frozenset({clc.MessageType.PROPOSAL, clc.MessageType.DECLINE}),
        "ACCEPTED": frozenset({clc.MessageType.CONFIRM, clc.MessageType.DECLINE}),
        "CONFIRMING_LINK": frozenset({clc.MessageType.DECLINE}),
        "LINK_LOST": frozenset({clc.MessageType.DECLINE}),
    }

    _proposal: clc.Proposal  # set before the event ``proposal``
    _rnic: Rnic  # set if the Proposal was not refused

    def __init__(
        self,
        *,
        host: NegotiationHost,
        admit: Callable[[clc.Proposal], tuple[Rnic, Terms] | FallbackReason],
        receive_buffer: int,
    ) -> None:
        super().__init__(CLC_SERVER, host, receive_buffer)
        self._admit = admit
        self._found: LinkGroup | None = None  # set before the event whose guard reads it
        self._named_link = self._ended_early = False

    def group_settled(self) -> None:
        """Continue, because the group that was forming is formed, or has failed."""
        self._found = self._find_group()
        self.machine.send("group_settled")

    # --- guards ------------------------------------------------------------------------------

    @property
    def group_usable(self) -> bool:
        """True if a link group with this peer has room for the connection."""
        # `find_server_group` returns a group without room only while it is forming.
        return self._found is not None and self._found.state != "FORMING"

    @property
    def group_forming(self) -> bool:
        """True if another connection is forming a group with this peer."""
        return self._found is not None and self._found.state == "FORMING"

    @property
    def group_lost(self) -> bool:
        """True if the group that was chosen has ended since."""
        return not self.first_contact and self._group is not None and not self._group.usable

    @property
    def known_link(self) -> bool:
        """True if SMC Confirm names an active link of the group and a known RMB (3.5.2.3)."""
        return self._named_link and self.usable_connection

    @property
    def ended_early(self) -> bool:
        """True if the group has ended after the client had sent SMC Confirm."""
        return self._ended_early

    # --- actions -----------------------------------------------------------------------------

    def take_element(self) -> None:
        """Request an element of the existing group's RMBs, or of a new RMB (3.5.2.1)."""
        self._group = self._found
        super().take_element()

    def wait_for_group(self) -> None:
        """Wait for the first contact of another connection: both will share the link group."""
        group = known(self._found)
        group.when_settled(self.group_settled)
        if self._wait is None:
            # A first contact that takes this long may never end.
            self._wait = group.timers.call_later(group.config.llc_timeout, self._wait_expired)

    def _wait_expired(self) -> None:
        self.machine.send("wait_expired")

    def start_over(self) -> None:
        """Choose again between a group and a first contact, because the chosen group has ended."""
        self._group = None
        self.group_settled()

    def form_group(self) -> None:
        """Make a link group, with a queue pair in INIT and an RMB, before SMC Accept (3.5.1.2)."""
        if self._form_group(
            client=False, peer_id=self._proposal.peer_id, rnic=self._rnic,
            proposed=proposed(self._proposal, self._terms),
        ):  # fmt: skip
            super().take_element()

    def send_accept(self) -> None:
        """Send SMC Accept (3.5.1.2, 3.5.2.1)."""
        self._send_credentials(clc.Accept)

    def connect_link(self) -> None:
        """Take the queue pair to RTS and send CONFIRM LINK (3.5.1.4)."""
        self._when_address_known(self._connect)

    def _connect(self, group: LinkGroup) -> None:
        if group.state != "FORMING":
            return  # the group failed, and the negotiation was notified
        try:
            self._connect_first(group)
        except RnicError as error:
            group.setup.first_link_failed(known(self._first_link), error)

    # --- messages ----------------------------------------------------------------------------

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        state = self.machine.state
        if isinstance(message, clc.Decline):
            self._on_decline(message)
        elif isinstance(message, clc.Proposal) and state == "LISTENING":
            self._proposal = message
            if message.version > 1 and self._host.offer is not None:
                self._decline_version = 2
            admitted = self._admit(message)
            if isinstance(admitted, FallbackReason):
                self._refusal = admitted
            else:
                self._rnic, self._terms = admitted
                self._speaks_v2 = self._terms.version > 1
                self._found = self._find_group()
            self.machine.send("proposal")
        elif isinstance(message, clc.Confirm) and state == "ACCEPTED":
            self._on_confirm_untrusted(message)
        else:
            raise ProtocolError(f"unexpected SMC {type(message).__name__}")

    def _on_confirm_untrusted(self, confirm: clc.Confirm) -> None:
        # Linux sends no peer ID in a Proposal that offers version 2 only.
        lacks_peer_id = self._terms.version > 1 and not any(self._proposal.peer_id)
        if confirm.peer_id != self._proposal.peer_id and not lacks_peer_id:
            raise ProtocolError("SMC Confirm of another peer than SMC Proposal")
        if self._terms.version > 1 and confirm.first_contact is not self.first_contact:
            raise ProtocolError("SMC Confirm of another kind of contact than SMC Accept")
        self._peer = confirm
        self._refusal = check_confirm(confirm, self._terms)
        group = self._group
        if lacks_peer_id and group is not None and self.first_contact:
            group.peer_id = confirm.peer_id
        if group is not None and not self.first_contact:
            link = group.find_link(confirm.gid, confirm.mac, confirm.qp_number)
            if link is None:
                # SMC Confirm may come before the CONFIRM LINK reply is polled, which activates the
                # link.
                group.mover.catch_up()
                link = group.find_link(confirm.gid, confirm.mac, confirm.qp_number)
            self._cause = ProtocolError("SMC Confirm names no active link")
            if link is not None:
                group.found_by_client()
                self._peers_link = link
                self._named_link = self.peer_element_known
                self._ended_early = (
                    not group.usable and known(self._end).connection.ended_before_established()
                )
                self._cause = ProtocolError(f"RKey 0x{confirm.rkey:08x} was never confirmed")
        self.machine.send("confirm")

    def _on_decline(self, message: clc.Decline) -> None:
        group, accepted = self._group, self.machine.state == "ACCEPTED"
        self._declined(message)
        if message.out_of_sync and accepted and group is not None and not self.first_contact:
            group.test_links(message.peer_id)

    def _find_group(self) -> LinkGroup | None:
        return self._host.find_server_group(
            proposed(self._proposal, self._terms), self._terms, self._rnic, self._receive_buffer
        )
