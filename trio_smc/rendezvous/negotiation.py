"""CLC negotiation (RFC 7609, 3.5): what the client's and the server's side have in common.

A negotiation is a core without sockets, tasks or clocks.  Whole CLC messages and the news of
the link group come in; `outgoing` holds the messages to send, in order; `outcome` is set once.
Which message or event does what in which state is declared in `states.clc`.

Theory of operation: how two sides that share one byte stream agree where CLC messages end
------------------------------------------------------------------------------------------
After a Decline the application's bytes follow at once, in both directions, and nobody parses
them
(RFC 7609, C.6).  So each side must know of every CLC message that may still come:

- CLC messages alternate, and a Decline only takes the place of one that the peer waits for
(C.1).
  So whatever came before our answer was sent is a protocol error: a runner looks whether
  anything did, and only then sends.  Before our last message it also stops reading
  (`has_last_word`), for what comes after a Decline is the application's.
- While LLC messages flow (first contact only) either side may decline, and Declines must not
  cross.  Only the side whose turn it is, because the next LLC message is its own or its last one
  was not seen to arrive, sends one (C.7: the sender learns of a failure first); the other side
  waits for it (LINK_LOST), and resets the TCP connection if it does not come.
- Past the point of no return (C.3) a failure can only reset the TCP connection.

What remains is a link that dies between the delivery of an LLC message and its acknowledgement:
then both sides believe that it is their turn.  The RFC has no answer to that.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous.links.add_link import AddressWait
from trio_smc.rendezvous.links.first_contact import GroupFailure
from trio_smc.rendezvous.links.group import GroupConnection, LinkGroup
from trio_smc.rendezvous.links.link import Link, PeerQueuePair
from trio_smc.rendezvous.links.peer_rmbs import RToken
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states.engine import Machine, Table
from trio_smc.wire import clc
from trio_smc.wire.sizes import rmbe_size_code

__all__ = [
    "Established",
    "Failed",
    "FellBack",
    "Negotiation",
    "NegotiationHost",
    "RdmaConnection",
]


class RdmaConnection(GroupConnection, Protocol):
    """A connection as its negotiation sees it."""

    @property
    def alert_token(self) -> int:
        """What the peer's CDC messages carry."""

    @property
    def state(self) -> str:
        """Its state (`trio_smc.states.connection`)."""

    def peer_known(
        self, *, alert_token: int, element_size: int, eye_catcher: bool, channel: Link,
        address: int, rkey: int,
    ) -> None:  # fmt: skip
        """Where the peer's RMB element is."""

    def established(self) -> None:
        """The rendezvous is complete."""

    def abort(self) -> None:
        """Reset it: its rendezvous is complete, but nobody wants it any more."""

    def withdraw(self) -> None:
        """The rendezvous failed after the element was given out; TCP is not touched."""


class NegotiationHost(Protocol):
    """What a negotiation wants of the stack it belongs to."""

    peer_id: bytes
    observer: Observer | None

    def find_client_group(self, accept: clc.Accept) -> LinkGroup | None:
        """The client-role group that an SMC Accept names (RFC 7609, 3.5.2.2)."""

    def find_server_group(self, peer_id: bytes, rnic: Rnic, size: int) -> LinkGroup | None:
        """A server-role group with this peer that has room for an element of ``size`` bytes,
        or else one that is just forming."""

    def new_group(self, *, client: bool, peer_id: bytes, rnic: Rnic) -> LinkGroup:
        """A link group that is about to be formed."""

    def open_connection(self, group: LinkGroup, rmbe: Rmbe) -> RdmaConnection:
        """A connection that owns ``rmbe``, registered with the group by its alert token."""


@dataclass(frozen=True, slots=True)
class Established:
    """The connection speaks SMC-R."""

    connection: RdmaConnection
    group: LinkGroup


@dataclass(frozen=True, slots=True)
class FellBack:
    """The connection stays on TCP."""

    fallback: Fallback


@dataclass(frozen=True, slots=True)
class Failed:
    """The TCP connection must end; ``error`` is for the user."""

    error: OSError


LOGGER = logging.getLogger("trio_smc.clc")


_OVER = frozenset({"ESTABLISHED", "FALLEN_BACK", "FAILED"})
_LAST_WORD = frozenset({"DECLINING", "CONFIRMED"})
_CONNECTING = frozenset({"PREPARING", "CONFIRMING_LINK"})
"""Where the client and the server connect the first link, each in one of them."""
_EVENT_OF = {
    GroupFailure.LINK_LOST: "group_failed",
    GroupFailure.TIMED_OUT: "llc_timeout",
    GroupFailure.PROTOCOL_ERROR: "llc_error",
}


class Negotiation:
    """One rendezvous; see `ClientNegotiation` and `ServerNegotiation`.

    Attributes:
      outgoing: CLC messages that must be sent; whoever sends first looks whether bytes of the
        peer are unread, which is a `protocol_error`, then clears it, sends and calls `sent`.
      outcome: None while under way.
      changed: called whenever `outgoing` or `outcome` may have changed.
    """

    def __init__(self, table: Table, host: NegotiationHost, receive_buffer: int) -> None:
        self.machine = Machine(table, self)
        self.outgoing: list[bytes] = []
        self.outcome: Established | FellBack | Failed | None = None
        self.changed: Callable[[], None] = lambda: None
        self.group: LinkGroup | None = None
        self.sock: object | None = None  # for observers: whose rendezvous this is
        self.first_contact = False
        self._host = host
        self._receive_buffer = receive_buffer
        self._connection: RdmaConnection | None = None
        self._rmbe: Rmbe | None = None
        self._link: Link | None = None
        # What the peer names: any link of an existing group (3.5.2.2, 3.5.2.3).
        self._peers_link: Link | None = None
        self._peer: clc.Accept | clc.Confirm | None = None
        self._decline: clc.Decline | None = None
        self._fallback: Fallback | None = None
        self._version = 1
        self._unable = FallbackReason.OUT_OF_RESOURCES
        self._cause: Exception | None = None
        self._address: AddressWait | None = None

    # --- what comes in ---------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state (`trio_smc.states.clc`)."""
        return self.machine.state

    @property
    def has_last_word(self) -> bool:
        """Whether `outgoing` is our last CLC message.

        Before it is sent reading must stop: what the peer sends after it is the application's
        (Decline) or a violation (Confirm).
        """
        return self.machine.state in _LAST_WORD

    def receive_untrusted(self, data: bytes) -> None:
        """One whole CLC message from the peer; what it breaks ends the negotiation (C.6)."""
        observer = self._host.observer
        if observer is not None:
            observer.clc(self, False, data)
        try:
            if self.outgoing:
                raise ProtocolError("a CLC message that did not wait for an answer")
            self._dispatch_untrusted(clc.decode_untrusted(data))
        except ProtocolError as error:
            self.protocol_error(error)

    def sent(self) -> None:
        """All of `outgoing` was handed to TCP."""
        if self.has_last_word:
            self.machine.send("sent")

    def protocol_error(self, error: ProtocolError) -> None:
        """The peer's bytes are no CLC message that can come now."""
        self._cause = error
        self.machine.send("protocol_error")

    def timed_out(self) -> None:
        """The expected CLC message did not come (RFC 7609, C.5)."""
        self.machine.send("clc_timeout")

    def tcp_lost(self, cause: OSError | None = None) -> None:
        """The TCP connection ended."""
        self._cause = cause
        self.machine.send("tcp_lost")

    def group_formed(self) -> None:
        """The first contact succeeded."""
        self.machine.send("group_formed")

    def group_failed(self, failure: GroupFailure, error: ProtocolError | None) -> None:
        """The first contact failed."""
        if error is not None:
            self._cause = error
        self.machine.send(_EVENT_OF[failure])

    # --- guards ------------------------------------------------------------------------------

    @property
    def reserved_value(self) -> bool:
        """The peer's QP MTU is a reserved enumerated value (A.2.2); first contact only."""
        return self.first_contact and self._peer is not None and self._peer.known_mtu is None

    @property
    def may_decline(self) -> bool:
        """Whether it is for us to decline when the first contact fails (C.2, C.7)."""
        return self.may_fall_back and self.group is not None and self.group.setup.our_turn

    @property
    def may_fall_back(self) -> bool:
        """Whether the point of no return is still ahead (RFC 7609, C.3)."""
        return self.group is not None and self.group.setup.may_fall_back

    @property
    def peer_element_known(self) -> bool:
        """Whether the peer's RMB can be written to: its RKey came before (3.5.5.2.1)."""
        peer, group, link = self._peer, self.group, self._peers_link or self._link
        return (
            peer is not None
            and group is not None
            and link is not None
            and group.knows_rmb(link, peer.rkey, peer.rmb_address)
        )

    @property
    def usable_connection(self) -> bool:
        """Whether connection and link survived until our last message was sent."""
        connection = self._connection
        return (
            connection is not None
            and connection.state != "CLOSED"
            and self.group is not None
            and self.group.usable
        )

    # --- actions both sides have -----------------------------------------------------------

    def take_element(self) -> None:
        """Get an RMB element for the connection; `element_ready` or `unable` follows."""
        if self.group is None:
            raise RuntimeError("no link group was chosen")
        self.group.request_element(self._receive_buffer, self._element_taken)

    def decline_reserved_value(self) -> None:
        """C.6."""
        self._send_decline(FallbackReason.RESERVED_VALUE)

    def decline_unable(self) -> None:
        """C.1: lack of resources."""
        self._send_decline(self._unable)

    def decline_link_failed(self) -> None:
        """C.2: the path could not be confirmed."""
        self._send_decline(FallbackReason.LINK_FAILED)

    def fall_back(self) -> None:
        """Our Decline is out."""
        if self._fallback is None:
            raise RuntimeError("no SMC Decline was sent")
        self.outcome = FellBack(self._fallback)

    def note_decline(self) -> None:
        """The peer declined (C.1); no answer is sent."""
        decline = self._decline
        if decline is None:
            raise RuntimeError("no SMC Decline was received")
        self.outcome = FellBack(Fallback.from_peer(decline.diagnosis))

    def fail_timeout(self) -> None:
        """C.5, C.7: a handshake that does not end would not end over TCP either."""
        self._fail(errno.ETIMEDOUT, "the SMC-R handshake timed out")

    def fail_protocol(self) -> None:
        """C.6: no fallback after a protocol error."""
        self._fail(errno.ECONNRESET, f"SMC-R protocol error: {self._cause}")

    def fail_reset(self) -> None:
        """C.7.1: too late for a fallback."""
        self._fail(errno.ECONNRESET, "the link failed during the SMC-R handshake")

    def fail_tcp(self) -> None:
        """The TCP connection ended during the handshake."""
        self._fail(errno.ECONNRESET, "the connection ended during the SMC-R handshake")

    def abandon(self) -> None:
        """Give back what was taken; a half-made group is torn down (3.5.1.6.4)."""
        if self._connection is not None:
            self._connection.withdraw()
        elif self._rmbe is not None and self.group is not None:
            self.group.own_rmbs.release(self._rmbe, 0)
        self._connection = self._rmbe = None
        group = self.group
        if group is not None and self.first_contact and group.state == "FORMING":
            group.first_contact = None
            group.terminate()

    def introduce_peer(self) -> None:
        """Tell the connection where the peer's element is; see `peer_element_known`."""
        peer, group, link = self._peer, self.group, self._peers_link or self._link
        connection = self._connection
        if peer is None or group is None or link is None or connection is None:
            raise RuntimeError("the peer's element is not known yet")
        size = peer.buffer_size
        group.members.take_peer_element_untrusted(
            link, rkey=peer.rkey, address=peer.rmb_address, index=peer.rmbe_index, size=size,
            user=connection,
        )  # fmt: skip
        # 2.3: which link this side sends on is not the peer's affair.
        channel = group.members.link_for(connection)
        if channel is None:
            if group.links.get(link.number) is not link:
                raise ProtocolError("no link is left that reaches the peer's RMB")
            channel = link  # on its way out; its connections move or end with the others
        if self._link is not None and group.links.get(self._link.number) is not self._link:
            self._link = channel  # lost since it was chosen; Confirm names one that is left
        group.place(connection, channel)
        address, rkey = group.peer_element_on(connection, channel)
        connection.peer_known(
            alert_token=peer.alert_token,
            element_size=size,
            eye_catcher=group.setup.peer_eye_catcher,
            channel=channel,
            address=address,
            rkey=rkey,
        )

    def establish(self) -> None:
        """Open the connection to its user."""
        connection, group = self._connection, self.group
        if connection is None or group is None:
            raise RuntimeError("nothing to establish")
        connection.established()
        self.outcome = Established(connection, group)

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers and the runner; the peer's address matters in one state only."""
        if self._address is not None and old in _CONNECTING:
            self._address.cancel()
            self._address = None
        if new == "FAILED":
            self.outgoing.clear()  # nothing may follow, least of all a Decline
        if self._host.observer is not None:
            self._host.observer.state(self, old, new, event)
        self.changed()

    # --- helpers -----------------------------------------------------------------------------

    def _dispatch_untrusted(self, message: clc.Message) -> None:
        raise NotImplementedError

    def _element_taken(self, rmbe: Rmbe | None) -> None:
        group = self.group
        if rmbe is None or group is None:
            self.machine.send("unable")
            return
        link = self._link if self._link is not None else self._link_to_name(group)
        over = self.machine.state in _OVER  # the TCP connection ended meanwhile
        if over or link is None or not (self.first_contact or group.usable):
            group.own_rmbs.release(rmbe, 0)
            self.machine.send("unable")
            return
        self._link = link
        self._rmbe = rmbe
        self._connection = self._host.open_connection(group, rmbe)
        self.machine.send("element_ready")

    def _link_to_name(self, group: LinkGroup) -> Link | None:
        """The link that Accept names, in Confirm too: the server has it for sure."""
        named = self._peers_link
        return named if named is not None and named.usable else group.least_loaded_link()

    def _form_group(self, peer_id: bytes, rnic: Rnic) -> bool:
        group = self._host.new_group(client=self._is_client, peer_id=peer_id, rnic=rnic)
        self.first_contact = True
        self.group = group
        group.first_contact = self
        try:
            self._link = group.open_first_link()
        except RnicError as error:
            LOGGER.info("%r: %s", group, error)
            self.machine.send("unable")
            return False
        return True

    _is_client = False

    def _when_address_known(self, gid: bytes, then: Callable[[], None]) -> None:
        """Before the first link is connected to this GID of the peer's; see `address_wait`."""
        if self.group is None or self._link is None:
            raise RuntimeError("no link to connect")
        wait = AddressWait(self.group.timers)
        if not wait.begin(self._link.rnic, gid, then):
            self._address = wait

    def _connect_first(self, peer: clc.Accept | clc.Confirm) -> None:
        group = self.group
        if group is None:
            raise RuntimeError("no link group")
        link = group.setup.connect_first(
            PeerQueuePair(
                gid=peer.gid,
                mac=peer.mac,
                qp_number=peer.qp_number,
                mtu=peer.qp_mtu,
                psn=peer.initial_psn,
            )
        )
        # ADD LINK CONTINUATION will refer to it (3.5.1.6.3).
        group.peer_rmbs.learn_untrusted({link.number: RToken(peer.rkey, peer.rmb_address)})

    def _credentials(self) -> dict[str, Any]:
        group, link, rmbe, connection = self.group, self._link, self._rmbe, self._connection
        if group is None or link is None or rmbe is None or connection is None:
            raise RuntimeError("no element was taken")
        region = group.own_rmbs.region(rmbe.rmb, link)
        return {
            "version": self._version,
            "peer_id": self._host.peer_id,
            "gid": link.rnic.gid,
            "mac": link.rnic.mac,
            "qp_number": link.qp.qp_num,
            "rkey": region.rkey,
            "rmbe_index": rmbe.index,
            "alert_token": connection.alert_token,
            "buffer_size_code": rmbe_size_code(rmbe.size),
            "qp_mtu": link.rnic.mtu,
            "rmb_address": region.address,
            "initial_psn": link.psn,
        }

    def _send(self, message: clc.Message) -> None:
        data = message.encode()
        if self._host.observer is not None:
            self._host.observer.clc(self, True, data)
        self.outgoing.append(data)

    def _send_decline(self, reason: FallbackReason, *, out_of_sync: bool = False) -> None:
        """Give back everything and queue SMC Decline, our last message."""
        self.abandon()
        self._fallback = fallback = Fallback.local(reason)
        self._send(
            clc.Decline(
                version=self._version,
                peer_id=self._host.peer_id,
                out_of_sync=out_of_sync,
                diagnosis=fallback.code or 0,
            )
        )

    def _fail(self, number: int, text: str) -> None:
        error = OSError(number, text)
        error.__cause__ = self._cause
        self.outcome = Failed(error)
