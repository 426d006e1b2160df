"""The server's side of a rendezvous (RFC 7609, 3.5.1, 3.5.2); see `negotiation`."""

from __future__ import annotations

from collections.abc import Callable

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous import clc
from trio_smc.rendezvous.link_group import LinkGroup
from trio_smc.rendezvous.negotiation import Negotiation, NegotiationHost
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.clc_server import CLC_SERVER

__all__ = ["ServerNegotiation"]


class ServerNegotiation(Negotiation):
    """Answers an SMC Proposal; the model of `states.clc_server`.

    Args:
      host: the stack.
      rnic: the RNIC that serves the connection's route; None only if ``admit`` refuses.
      admit: looks at the Proposal and returns why it is refused, or None; subnet and prefix
        are checked there (RFC 7609, 3.5.1.2).
      receive_buffer: bytes wanted of the connection's RMB element.
    """

    def __init__(
        self,
        *,
        host: NegotiationHost,
        rnic: Rnic | None,
        admit: Callable[[clc.Proposal], FallbackReason | None],
        receive_buffer: int,
    ) -> None:
        super().__init__(CLC_SERVER, host, receive_buffer)
        self._rnic = rnic
        self._admit = admit
        self._proposal: clc.Proposal | None = None
        self._refusal: FallbackReason | None = None
        self._named_link = False

    @property
    def awaits_clc(self) -> bool:
        """Whether the CLC timer must run (C.5)."""
        return self.machine.state in ("LISTENING", "ACCEPTED")

    def group_settled(self) -> None:
        """The group that was forming is formed, or gone."""
        self.machine.send("group_settled")

    # --- guards ------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        """Whether the Proposal is declined at once."""
        return self._refusal is not None

    @property
    def group_usable(self) -> bool:
        """Whether this peer has a link group that takes the connection."""
        group = self._find_group()
        return group is not None and group.usable

    @property
    def group_forming(self) -> bool:
        """Whether another connection is just forming one."""
        group = self._find_group()
        return group is not None and group.state == "FORMING"

    @property
    def known_link(self) -> bool:
        """Whether SMC Confirm names an active link of the group (3.5.2.3)."""
        return self._named_link

    # --- actions -----------------------------------------------------------------------------

    def take_element(self) -> None:
        """3.5.2.1: an element of the existing group's RMBs, or of a new one."""
        if self.group is None:
            self.group = self._find_group()
        super().take_element()

    def wait_for_group(self) -> None:
        """One first contact at a time with a peer: what it forms will serve this one too."""
        group = self._find_group()
        if group is None:
            raise RuntimeError("no group is forming")
        group.when_settled(self.group_settled)

    def form_group(self) -> None:
        """3.5.1.2: a queue pair in INIT, and an RMB, before SMC Accept."""
        proposal = self._proposal
        if proposal is None or self._rnic is None:
            raise RuntimeError("no Proposal was admitted")
        if self._form_group(proposal.peer_id, self._rnic):
            super().take_element()

    def send_accept(self) -> None:
        """3.5.1.2, 3.5.2.1."""
        self._send(clc.Accept(first_contact=self.first_contact, **self._credentials()))

    def connect_link(self) -> None:
        """3.5.1.4: to RTS, and CONFIRM LINK."""
        if self._peer is None:
            raise RuntimeError("no SMC Confirm was received")
        try:
            self._connect_first(self._peer)
        except RnicError:
            if self.group is not None:
                self.group.links[1].machine.send("failed")

    def decline_refused(self) -> None:
        """C.1."""
        self._send_decline(self._refusal or FallbackReason.DECLINED)

    # --- messages ----------------------------------------------------------------------------

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        state = self.machine.state
        if isinstance(message, clc.Decline) and state in ("ACCEPTED", "CONFIRMING_LINK"):
            self._on_decline(message)
        elif isinstance(message, clc.Proposal) and state == "LISTENING":
            self._proposal = message
            self._version = message.answer_version
            self._refusal = self._admit(message)
            self.machine.send("proposal")
        elif isinstance(message, clc.Confirm) and state == "ACCEPTED":
            self._peer = message
            self._name_link_untrusted(message)
            self.machine.send("confirm")
        else:
            raise ProtocolError(f"SMC {type(message).__name__} out of turn")

    def _on_decline(self, message: clc.Decline) -> None:
        self._decline = message
        group, out_of_sync = self.group, message.out_of_sync and not self.first_contact
        self.machine.send("decline")
        if out_of_sync and group is not None:
            # C.4: the client has lost the link that this side still believes in.
            group.terminate()

    def _name_link_untrusted(self, confirm: clc.Confirm) -> None:
        group = self.group
        if group is None or self.first_contact:
            return
        link = group.find_link(confirm.gid, confirm.mac, confirm.qp_number)
        if link is None:
            return
        self._check_element_untrusted(link, confirm)
        self._named_link = True
        self._link = link

    def _find_group(self) -> LinkGroup | None:
        if self._proposal is None or self._rnic is None:
            return None
        return self._host.find_server_group(self._proposal.peer_id, self._rnic)
