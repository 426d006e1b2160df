"""The client's side of a rendezvous (RFC 7609, 3.5.1, 3.5.2); see `negotiation`."""

from __future__ import annotations

from trio_smc._base.errors import ProtocolError
from trio_smc._base.reasons import FallbackReason
from trio_smc.rendezvous.negotiation import LOGGER, Negotiation, NegotiationHost
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.tables import CLC_CLIENT
from trio_smc.wire import clc

__all__ = ["ClientNegotiation"]

_AWAITS_CLC = frozenset({"PROPOSED", "LINK_LOST"})


class ClientNegotiation(Negotiation):
    """Proposes SMC-R; the model of `states.clc`.

    Args:
      host: the stack.
      rnic: the RNIC that serves the connection's route; None only if it is declined at once.
      proposal: what is sent; its GID and MAC are those of ``rnic``.
      receive_buffer: bytes wanted of the connection's RMB element.
    """

    _is_client = True

    def __init__(
        self, *, host: NegotiationHost, rnic: Rnic | None, proposal: clc.Proposal | None,
        receive_buffer: int,
    ) -> None:  # fmt: skip
        super().__init__(CLC_CLIENT, host, receive_buffer)
        self._rnic = rnic
        self._proposal = proposal

    def start(self) -> None:
        """Send SMC Proposal."""
        self.machine.send("propose")

    def decline(self, reason: FallbackReason) -> None:
        """Send SMC Decline in its place."""
        self._unable = reason
        self.machine.send("unable")

    @property
    def awaits_clc(self) -> bool:
        """Whether the CLC timer must run (C.5)."""
        return self.machine.state in _AWAITS_CLC

    @property
    def known_link(self) -> bool:
        """Whether SMC Accept names a link that this side has (3.5.2.2)."""
        return self._peers_link is not None

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        if isinstance(message, clc.Decline):
            self._decline = message
            self._cause = ProtocolError("SMC Decline out of turn")
            self.machine.send("decline")
            return
        if not isinstance(message, clc.Accept) or self.machine.state != "PROPOSED":
            raise ProtocolError(f"SMC {type(message).__name__} out of turn")
        self._peer = message
        self.first_contact = message.first_contact
        if not message.first_contact:
            self.group = self._host.find_client_group(message)
            if self.group is not None:
                self._peers_link = self.group.find_link(message.gid, message.mac, message.qp_number)
                if self._peers_link is not None and not self.peer_element_known:
                    # 3.5.5.2.1: it is confirmed before SMC Accept may name it.
                    raise ProtocolError(f"RKey 0x{message.rkey:08x} was never confirmed")
        self.machine.send("accept")

    def send_proposal(self) -> None:
        """3.5.1.2: no RoCE resource is committed yet."""
        if self._proposal is None:
            raise RuntimeError("there is nothing to propose")
        self._send(self._proposal)

    def form_group(self) -> None:
        """3.5.1.3: a queue pair in RTR, and an RMB, before SMC Confirm."""
        peer = self._peer
        if peer is None or self._rnic is None or not self._form_group(peer.peer_id, self._rnic):
            return
        self._when_address_known(peer.gid, self._connect)

    def _connect(self) -> None:
        peer, group = self._peer, self.group
        if peer is None or group is None:
            raise RuntimeError("no SMC Accept was received")
        self._unable = FallbackReason.LINK_FAILED
        if group.state != "FORMING":  # it has failed while the address was looked for
            self.machine.send("unable")
            return
        try:
            self._connect_first(peer)
        except RnicError as error:
            LOGGER.info("%r: %s", group, error)
            self.machine.send("unable")
            return
        self._unable = FallbackReason.OUT_OF_RESOURCES
        self.take_element()

    def send_confirm(self) -> None:
        """3.5.1.3, 3.5.2.2."""
        self._send(clc.Confirm(first_contact=self.first_contact, **self._credentials()))

    def decline_out_of_sync(self) -> None:
        """C.4: the server reuses a link group that is gone here."""
        self._send_decline(FallbackReason.OUT_OF_SYNC, out_of_sync=True)
