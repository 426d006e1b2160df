"""The server's side of a rendezvous (RFC 7609, 3.5.1, 3.5.2); see `negotiation`."""

from __future__ import annotations

from collections.abc import Callable

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.timers import Timer
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.negotiation import Negotiation, NegotiationHost
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.tables import CLC_SERVER
from trio_smc.wire import clc

__all__ = ["ServerNegotiation"]

_AWAITS_CLC = frozenset({"LISTENING", "ACCEPTED", "LINK_LOST"})


class ServerNegotiation(Negotiation):
    """Answers an SMC Proposal; the model of `states.clc`.

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
        self._found: LinkGroup | None = None  # by the guard of the transition that uses it
        self._refusal: FallbackReason | None = None
        self._named_link = False
        self._patience: Timer | None = None

    @property
    def awaits_clc(self) -> bool:
        """Whether the CLC timer must run (C.5)."""
        return self.machine.state in _AWAITS_CLC

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
        self._found = group = self._find_group()
        # What is not forming takes the connection, else it had not been found.
        return group is not None and group.state != "FORMING"

    @property
    def group_forming(self) -> bool:
        """Whether another connection is just forming one."""
        group = self._find_group()
        return group is not None and group.state == "FORMING"

    @property
    def group_lost(self) -> bool:
        """Whether the existing group that was chosen ended meanwhile."""
        return not self.first_contact and self.group is not None and not self.group.usable

    @property
    def known_link(self) -> bool:
        """Whether SMC Confirm names an active link of the group and an RMB (3.5.2.3)."""
        return self._named_link and self.usable_connection

    # --- actions -----------------------------------------------------------------------------

    def take_element(self) -> None:
        """3.5.2.1: an element of the existing group's RMBs, or of a new one."""
        if self.group is None:
            self.group = self._found
        super().take_element()

    def wait_for_group(self) -> None:
        """One first contact at a time with a peer: what it forms will serve this one too."""
        group = self._find_group()
        if group is None:
            raise RuntimeError("no group is forming")
        group.when_settled(self.group_settled)
        if self._patience is None:
            # A first contact that takes this long may never end.
            self._patience = group.timers.call_later(group.config.llc_timeout, self._waited_enough)

    def _waited_enough(self) -> None:
        self.machine.send("waited_enough")

    def start_over(self) -> None:
        """Look for a group again: the one chosen is gone."""
        self.group = self._link = None
        self.machine.send("group_settled")

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
        self._when_address_known(self._peer.gid, self._connect)

    def _connect(self) -> None:
        peer, group, link = self._peer, self.group, self._link
        if peer is None or group is None or link is None or group.state != "FORMING":
            return  # it failed, and the negotiation was told
        try:
            self._connect_first(peer)
        except RnicError as error:
            group.setup.first_link_failed(link, error)

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Stop waiting for another connection's group."""
        if old == "WAITING" and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        super().state_changed(old, new, event)

    def decline_refused(self) -> None:
        """C.1."""
        self._send_decline(self._refusal or FallbackReason.DECLINED)

    # --- messages ----------------------------------------------------------------------------

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        state = self.machine.state
        if isinstance(message, clc.Decline):
            self._on_decline(message)
        elif isinstance(message, clc.Proposal) and state == "LISTENING":
            self._proposal = message
            self._version = message.answer_version
            self._refusal = self._admit(message)
            self.machine.send("proposal")
        elif isinstance(message, clc.Confirm) and state == "ACCEPTED":
            self._on_confirm_untrusted(message)
        else:
            raise ProtocolError(f"SMC {type(message).__name__} out of turn")

    def _on_confirm_untrusted(self, confirm: clc.Confirm) -> None:
        if self._proposal is None or confirm.peer_id != self._proposal.peer_id:
            raise ProtocolError("SMC Confirm of another peer than SMC Proposal")
        self._peer = confirm
        group = self.group
        if group is not None and not self.first_contact:
            link = group.find_link(confirm.gid, confirm.mac, confirm.qp_number)
            if link is None:
                # Its CONFIRM LINK reply may still wait on the link: TCP was quicker.
                group.mover.catch_up()
                link = group.find_link(confirm.gid, confirm.mac, confirm.qp_number)
            self._cause = ProtocolError("SMC Confirm names no active link")
            if link is not None:
                self._peers_link = link
                self._named_link = self.peer_element_known
                self._cause = ProtocolError(f"RKey 0x{confirm.rkey:08x} was never confirmed")
        self.machine.send("confirm")

    def _on_decline(self, message: clc.Decline) -> None:
        self._decline = message
        self._cause = ProtocolError("SMC Decline out of turn")
        group, accepted = self.group, self.machine.state == "ACCEPTED"
        self.machine.send("decline")
        if message.out_of_sync and accepted and group is not None and not self.first_contact:
            # C.4: the client has lost the link that this side still believes in.
            group.terminate()

    def _find_group(self) -> LinkGroup | None:
        if self._proposal is None or self._rnic is None:
            return None
        return self._host.find_server_group(
            self._proposal.peer_id, self._rnic, self._receive_buffer
        )
