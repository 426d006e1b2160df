"""The client's side of the CLC handshake: proposes SMC-R (RFC 7609, 3.5.1, 3.5.2).

`trio_smc.rendezvous.negotiation` has the part that both sides share.
"""

from __future__ import annotations

from typing import ClassVar

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc._base.resources import is_lack
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.negotiation import LOGGER, Negotiation, NegotiationHost
from trio_smc.rendezvous.terms import Terms, check_accept
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.tables import CLC_CLIENT
from trio_smc.wire import clc

__all__ = ["ClientNegotiation"]


class ClientNegotiation(Negotiation, table=CLC_CLIENT):
    """Proposes SMC-R; the model of `states.clc`. It starts with `propose` or `decline`.

    Args:
      host: the stack.
      receive_buffer: smallest size of the connection's RMB element, in bytes.
    """

    AWAITS_CLC = frozenset({"PROPOSED", "LINK_LOST"})
    EXPECTED: ClassVar[dict[str, frozenset[clc.MessageType]]] = {
        "PROPOSED": frozenset({clc.MessageType.ACCEPT, clc.MessageType.DECLINE}),
        "CONFIRMING_LINK": frozenset({clc.MessageType.DECLINE}),
        "LINK_LOST": frozenset({clc.MessageType.DECLINE}),
    }

    _rnic: Rnic  # both are set by `propose`
    _proposal: clc.Proposal

    def __init__(self, *, host: NegotiationHost, receive_buffer: int) -> None:
        super().__init__(CLC_CLIENT, host, receive_buffer)

    def propose(self, rnic: Rnic, proposal: clc.Proposal) -> None:
        """Send SMC Proposal.

        Args:
          rnic: the RNIC that serves the connection's route.
          proposal: the message, with GID and MAC of ``rnic``.
        """
        self._rnic, self._proposal = rnic, proposal
        self._speaks_v2 = proposal.v2 is not None
        self.machine.send("propose")

    def decline(self, reason: FallbackReason) -> None:
        """Send SMC Decline instead of SMC Proposal."""
        self._unable = reason
        self.machine.send("unable")

    @property
    def known_link(self) -> bool:
        """True if SMC Accept names a link of this side (3.5.2.2)."""
        return self._peers_link is not None

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        if isinstance(message, clc.Decline):
            self._declined(message)
            return
        if not isinstance(message, clc.Accept) or self.machine.state != "PROPOSED":
            raise ProtocolError(f"unexpected SMC {type(message).__name__}")
        self._peer = message
        self.first_contact: bool = message.first_contact
        self._decline_version = 1 if message.v2 is None else 2
        first = message.v2 is not None and message.first_contact
        direct = self._rnic.is_direct(message.gid) if first else None
        terms = check_accept(message, self._proposal, direct)
        if isinstance(terms, Terms):
            self._terms = terms
        else:
            self._refusal = terms
        if not message.first_contact and not self.refused:
            found = self._host.find_client_link(message)
            if found is not None:
                self._group, self._peers_link = found
                if self._group.drained:
                    self._refusal = FallbackReason.RNIC_DOWN
                if not self.peer_element_known:
                    # 3.5.5.2.1: an RKey is confirmed before SMC Accept may name it.
                    raise ProtocolError(f"RKey 0x{message.rkey:08x} was never confirmed")
        self.machine.send("accept")

    def send_proposal(self) -> None:
        """Send SMC Proposal (3.5.1.2). No RNIC resource is taken before the answer."""
        self._send(self._proposal)

    def form_group(self) -> None:
        """Make a link group, with a queue pair in RTR, before SMC Confirm (3.5.1.3)."""
        if self._form_group(client=True, peer_id=self._peer.peer_id, rnic=self._rnic):
            self._when_address_known(self._connect)

    def _connect(self, group: LinkGroup) -> None:
        self._unable = FallbackReason.LINK_FAILED
        if group.state != "FORMING":  # the group failed while the address was resolved
            self.machine.send("unable")
            return
        try:
            self._connect_first(group)
        except RnicError as error:
            LOGGER.info("%r: %s", group, error)
            if is_lack(error):
                self._unable = FallbackReason.OUT_OF_RESOURCES
            self.machine.send("unable")
            return
        self._unable = FallbackReason.OUT_OF_RESOURCES
        self.take_element()

    def send_confirm(self) -> None:
        """Send SMC Confirm (3.5.1.3, 3.5.2.2)."""
        self._send_credentials(clc.Confirm)

    def decline_out_of_sync(self) -> None:
        """Decline, because the server names a link group that this side no longer has (C.4)."""
        self._send_decline(FallbackReason.OUT_OF_SYNC, out_of_sync=True)
