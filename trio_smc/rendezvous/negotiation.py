"""The part of the CLC handshake that both sides share (RFC 7609, 3.5).

The handshake turns a TCP connection into SMC-R. A negotiation has no sockets, tasks or clocks. It
receives whole CLC messages and the events of the link group. `outgoing` holds the messages to send,
in order. `outcome` is set once: the connection uses SMC-R, stays on TCP, or must end. `states.clc`
declares the states; this module has the actions that both sides share, and the protocols for the
stack and the connection.

Some attributes are set while the handshake proceeds, and are read only afterwards: the peer's
message when it has arrived, the link group when it is chosen or begins to form, and `_LocalEnd`
when an RMB element is taken.

Theory of operation: how two sides that share one byte stream agree where CLC messages end
------------------------------------------------------------------------------------------
After a Decline the application's bytes follow at once, in both directions, and must not be parsed
(RFC 7609, C.6). So each side must know which CLC messages may still come:

- CLC messages alternate, and a Decline only replaces a message that the peer waits for (C.1). So
  bytes that arrive before this side has sent its answer are a protocol error: before it sends, the
  runner (`handshake`) checks that there are none. Before this side's last message, the runner also
  stops reading (`has_final_message`), because bytes after a Decline belong to the application.
- While LLC messages are exchanged (first contact only), either side may decline, and Declines must
  not cross. Only the side whose turn it is sends a Decline: the side that has to send the next LLC
  message, or whose last LLC message is not known to have arrived (C.7: the sender notices a failure
  first). The other side waits for the Decline (LINK_LOST), and resets the TCP connection if no
  Decline comes.
- After the point of no return (C.3) a failure can only reset the TCP connection.

One case remains: if a link fails between the delivery of an LLC message and its acknowledgement,
both sides believe that it is their turn. The RFC does not cover this case.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from trio_smc._base.errors import HandshakeCut, ProtocolError
from trio_smc._base.observer import Observer
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc._base.timers import Timer
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous.links.first_contact import GroupFailure
from trio_smc.rendezvous.links.group import GroupConnection, LinkGroup
from trio_smc.rendezvous.links.link import AddressWait, Link, PeerQueuePair
from trio_smc.rendezvous.links.peer_rmbs import RToken
from trio_smc.rendezvous.terms import VERSION_1, Offer, Terms
from trio_smc.rnic.verbs import Rnic, RnicError
from trio_smc.states import USABLE
from trio_smc.states.engine import Machine, Table
from trio_smc.wire import clc
from trio_smc.wire.fields import rmbe_size_code

__all__ = [
    "Established",
    "Failed",
    "FellBack",
    "Negotiation",
    "NegotiationHost",
    "RdmaConnection",
]


LOGGER = logging.getLogger("trio_smc.clc")

_GIDS = 2  # in Confirm: that of the first link, and that of another RNIC.  Chosen
_ENDED = frozenset({"ESTABLISHED", "FALLEN_BACK", "FAILED"})
_FINAL = frozenset({"DECLINING", "CONFIRMED"})
_NONE: frozenset[clc.MessageType] = frozenset()
_WAITING = frozenset({"WAITING", "PREPARING", "CONFIRMING_LINK"})
"""States with a wait that is cancelled when the state is left."""
_EVENT_OF = {
    GroupFailure.LINK_LOST: "group_failed",
    GroupFailure.LACK: "group_failed",
    GroupFailure.TIMED_OUT: "llc_timeout",
    GroupFailure.PROTOCOL_ERROR: "llc_error",
}


class RdmaConnection(GroupConnection, Protocol):
    """A connection, as seen by its negotiation."""

    @property
    def alert_token(self) -> int:
        """Names the connection in the peer's CDC messages."""

    @property
    def state(self) -> str:
        """The state (`trio_smc.states.connection`)."""

    def peer_known(
        self, *, alert_token: int, element_size: int, eye_catcher: bool, channel: Link,
        address: int, rkey: int,
    ) -> None:  # fmt: skip
        """Note the peer's RMB element."""

    def established(self) -> None:
        """The rendezvous is complete."""

    def ended_before_established(self) -> bool:
        """The link group has ended: True if data or an ending has arrived for the user."""

    def abort(self) -> None:
        """Reset the connection: the rendezvous is complete, but the caller has given up."""

    def withdraw(self) -> None:
        """End the connection without TCP: the rendezvous failed after the element was taken."""


class NegotiationHost(Protocol):
    """The stack, as seen by a negotiation."""

    peer_id: bytes
    observer: Observer | None
    offer: Offer | None
    """This side's offer for version 2, or None."""

    def find_client_link(self, accept: clc.Accept) -> tuple[LinkGroup, Link] | None:
        """The link that an SMC Accept names, in a client-role group (RFC 7609, 3.5.2.2)."""

    def find_server_group(
        self, proposed: tuple[bytes, bytes], terms: Terms, rnic: Rnic, size: int
    ) -> LinkGroup | None:
        """A server-role group with this client (`terms.proposed`).

        The group has room for an element of ``size`` bytes, or is still forming.
        """

    def new_group(
        self, *, client: bool, peer_id: bytes, rnic: Rnic, terms: Terms,
        proposed: tuple[bytes, bytes],
    ) -> LinkGroup:  # fmt: skip
        """Make a link group in state FORMING."""

    def open_connection(self, group: LinkGroup, rmbe: Rmbe) -> RdmaConnection:
        """Make a connection that owns ``rmbe``, registered with the group by its alert token."""


@dataclass(frozen=True, slots=True)
class Established:
    """The connection uses SMC-R."""

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


@dataclass(slots=True)
class _LocalEnd:
    """This side's end of the connection, made when an RMB element is taken.

    Attributes:
      link: the link for Accept or Confirm; it may fail before the message is sent.
    """

    group: LinkGroup
    link: Link
    rmbe: Rmbe
    connection: RdmaConnection


_T = TypeVar("_T")
_C = TypeVar("_C", bound=clc.Credentials)


def known(value: _T | None) -> _T:
    """Return a value that an earlier action, or a guard of this transition, has set."""
    if value is None:
        raise RuntimeError("an action of the CLC handshake ran before the one it needs")
    return value


class Negotiation(ABC):
    """One rendezvous; see `ClientNegotiation` and `ServerNegotiation`.

    Attributes:
      outgoing: CLC messages to be sent. The runner first checks that there are no unread bytes of
        the peer, which would be a `protocol_error`. Then it clears the list, sends the messages and
        calls `sent`.
      outcome: None while the negotiation runs.
      has_final_message: True if `outgoing` is this side's last CLC message. Reading must stop
        before it is sent: after a Decline the peer's bytes belong to the application, and after a
        Confirm they are a violation.
      awaits_clc: True if the CLC timer must run (C.5).
      expected: types of CLC messages that the peer may send now (C.1, C.6).
      changed: called whenever `outgoing` or `outcome` may have changed.
    """

    AWAITS_CLC: ClassVar[frozenset[str]]
    """States in which the CLC timer must run (C.5)."""
    EXPECTED: ClassVar[dict[str, frozenset[clc.MessageType]]]
    """By state, the types of CLC messages that the peer may send. In other states none."""

    _OF_STATE: ClassVar[Mapping[str, tuple[bool, bool, frozenset[clc.MessageType]]]]
    """By state, `has_final_message`, `awaits_clc` and `expected`."""

    has_final_message: bool
    awaits_clc: bool
    expected: frozenset[clc.MessageType]
    _peer: clc.Accept | clc.Confirm  # set before the event of that message

    def __init_subclass__(cls, *, table: Table) -> None:
        cls._OF_STATE = {
            state: (state in _FINAL, state in cls.AWAITS_CLC, cls.EXPECTED.get(state, _NONE))
            for state in table.states
        }

    def __init__(self, table: Table, host: NegotiationHost, receive_buffer: int) -> None:
        self.machine: Machine = Machine(table, self)
        self._note_state(self.machine.state)
        self.outgoing: list[bytes] = []
        self.outcome: Established | FellBack | Failed | None = None
        self.changed: Callable[[], None] = lambda: None
        self.sock: object | None = None  # for observers: the TCP connection
        self.first_contact: bool = False
        self._host = host
        self._receive_buffer = receive_buffer
        self._group: LinkGroup | None = None
        # The link that the peer names: any link of an existing group (3.5.2.2, 3.5.2.3).
        self._peers_link: Link | None = None
        self._first_link: Link | None = None
        self._link: Link | None = None  # the link that this side's message names
        self._end: _LocalEnd | None = None
        self._fell_back: FellBack | None = None  # the outcome after a Decline
        self._terms = VERSION_1
        self._decline_version = 1  # the format of this side's Decline
        self._refusal: FallbackReason | None = None
        self._speaks_v2 = False  # this side's Proposal or Accept has version 2
        self._unable = FallbackReason.OUT_OF_RESOURCES
        self._cause: Exception | None = None
        self._wait: AddressWait | Timer | None = None

    # --- calls of the runner ---------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state (`trio_smc.states.clc`)."""
        return self.machine.state

    def receive_untrusted(self, data: bytes) -> None:
        """Process one whole CLC message; a violation ends the negotiation (C.6)."""
        observer = self._host.observer
        if observer is not None:
            observer.clc(self, False, data)
        try:
            if self.outgoing:
                raise ProtocolError("a CLC message before the answer to the last one")
            self._dispatch_untrusted(clc.decode_untrusted(data))
        except ProtocolError as error:
            self.protocol_error(error)

    def sent(self) -> None:
        """Note that all of `outgoing` was passed to TCP."""
        if self.has_final_message:
            self.machine.send("sent")

    def protocol_error(self, error: ProtocolError) -> None:
        """Fail, because the peer's bytes are not a CLC message that may come now."""
        self._cause = error
        self.machine.send("protocol_error")

    def timed_out(self) -> None:
        """Fail, because the expected CLC message did not come (RFC 7609, C.5)."""
        self.machine.send("clc_timeout")

    def tcp_lost(self, cause: OSError | None = None) -> None:
        """Fail, because the TCP connection ended.

        Messages that have arrived on links are processed first: for the peer the rendezvous may be
        complete, and the connection may have ended since.
        """
        if self._group is not None:
            self._group.mover.catch_up()
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
    def refused(self) -> bool:
        """True if the peer's message is declined at once."""
        return self._refusal is not None

    @property
    def reserved_value(self) -> bool:
        """True if the peer's QP MTU is a reserved enumerated value (A.2.2); first contact only."""
        return self.first_contact and self._peer.known_mtu is None

    @property
    def may_decline(self) -> bool:
        """True if this side declines after a failed first contact (C.2, C.7)."""
        return self.may_fall_back and self._group is not None and self._group.setup.our_turn

    @property
    def may_fall_back(self) -> bool:
        """True before the point of no return (RFC 7609, C.3)."""
        return self._group is not None and self._group.setup.may_fall_back

    @property
    def peer_element_known(self) -> bool:
        """True if the peer's RMB can be written to: its RKey was confirmed (3.5.5.2.1)."""
        peer, group, link = self._peer, self._group, self._peers_link
        return (
            group is not None
            and link is not None
            and group.knows_rmb(link, peer.rkey, peer.rmb_address)
        )

    @property
    def usable_connection(self) -> bool:
        """True if connection and group are usable after this side's last message was sent."""
        end = self._end
        return end is not None and end.connection.state != "CLOSED" and end.group.usable

    # --- actions of both sides -------------------------------------------------------------

    def take_element(self) -> None:
        """Request an RMB element; the event ``element_ready`` or ``unable`` follows."""
        group = known(self._group)
        self._link = None
        self._link = self._first_link or self._link_to_name(group)
        group.request_element(self._receive_buffer, self._element_taken, self._link)

    def decline_refused(self) -> None:
        """Decline a message that cannot be accepted (C.1)."""
        self._send_decline(self._refusal or FallbackReason.DECLINED)

    def decline_reserved_value(self) -> None:
        """Decline a reserved value (C.6)."""
        self._send_decline(FallbackReason.RESERVED_VALUE)

    def decline_unable(self) -> None:
        """Decline, mostly for lack of resources (C.1)."""
        self._send_decline(self._unable)

    def decline_link_failed(self) -> None:
        """Decline: the link could not be confirmed, or not used for lack of resources (C.2)."""
        lacking = known(self._group).setup.failure is GroupFailure.LACK
        self._send_decline(
            FallbackReason.OUT_OF_RESOURCES if lacking else FallbackReason.LINK_FAILED
        )

    def fall_back(self) -> None:
        """Stay on TCP: this side's Decline was sent."""
        self.outcome = self._fell_back

    def note_decline(self) -> None:
        """Stay on TCP: the peer declined (C.1). No answer is sent."""
        self.outcome = self._fell_back

    def fail_timeout(self) -> None:
        """Fail: a peer that does not answer would not answer over TCP either (C.5, C.7)."""
        self._fail(errno.ETIMEDOUT, "the SMC-R handshake timed out")

    def fail_protocol(self) -> None:
        """Fail: after a protocol error there is no fallback (C.6)."""
        self._fail(errno.ECONNRESET, f"SMC-R protocol error: {self._cause}")

    def fail_reset(self) -> None:
        """Fail: it is too late for a fallback (C.7.1)."""
        self._fail(errno.ECONNRESET, "the link failed during the SMC-R handshake")

    def fail_tcp(self) -> None:
        """Fail: the TCP connection ended during the handshake."""
        text = "the connection ended during the SMC-R handshake"
        self._fail(errno.ECONNRESET, text, HandshakeCut)

    def abandon(self) -> None:
        """Release the RMB element, and end a group that is still forming (3.5.1.6.4)."""
        end, self._end = self._end, None
        if end is not None:
            end.connection.withdraw()
        group = self._group
        if group is not None and self.first_contact and group.state == "FORMING":
            group.first_contact = None
            group.terminate()

    def attach_peer_element(self) -> None:
        """Pass the peer's RMB element to the connection; see `peer_element_known`."""
        peer, end = self._peer, known(self._end)
        group, connection, link = end.group, end.connection, self._peers_link or end.link
        channel, address, rkey = group.connections.attach_untrusted(connection, peer, link)
        if group.links.get(end.link.number) is not end.link:
            end.link = channel  # the chosen link has failed; Confirm names another one
        connection.peer_known(
            alert_token=peer.alert_token,
            element_size=peer.buffer_size,
            eye_catcher=group.own_rmbs.eye_catcher,
            channel=channel,
            address=address,
            rkey=rkey,
        )

    def establish(self) -> None:
        """Let the application send and receive."""
        end = known(self._end)
        end.connection.established()
        self.outcome = Established(end.connection, end.group)

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Cancel a wait, and notify observers and the runner."""
        self._note_state(new)
        if self._wait is not None and old in _WAITING:
            self._wait.cancel()
            self._wait = None
        if new == "FAILED":
            self.outgoing.clear()  # nothing may follow, not even a Decline
        if self._host.observer is not None:
            self._host.observer.state(self, old, new, event)
        self.changed()

    # --- helpers -----------------------------------------------------------------------------

    def _note_state(self, state: str) -> None:
        # Once for each state, because the runner reads these attributes several times in each.
        self.has_final_message, self.awaits_clc, self.expected = self._OF_STATE[state]

    @abstractmethod
    def _dispatch_untrusted(self, message: clc.Message) -> None:
        """Send the machine the event of this message.  Raises ProtocolError."""

    def _element_taken(self, rmbe: Rmbe | None) -> None:
        group = self._group
        if rmbe is None or group is None:
            self.machine.send("unable")
            return
        link = self._first_link or self._link_to_name(group)
        has_ended = self.machine.state in _ENDED  # the TCP connection ended meanwhile
        if has_ended or link is None:
            group.own_rmbs.release(rmbe, 0)
            self.machine.send("unable")
            return
        self._end = _LocalEnd(group, link, rmbe, self._host.open_connection(group, rmbe))
        self.machine.send("element_ready")

    def _link_to_name(self, group: LinkGroup) -> Link | None:
        """The link that this side's message names. Confirm names the same link as Accept."""
        if group.state not in USABLE:
            return None  # the group ended while an RMB was created
        named = self._peers_link or self._link
        return named if named is not None and named.usable else group.links.least_loaded()

    def _form_group(
        self, *, client: bool, peer_id: bytes, rnic: Rnic,
        proposed: tuple[bytes, bytes] = (b"", b""),
    ) -> bool:  # fmt: skip
        group = self._host.new_group(
            client=client, peer_id=peer_id, rnic=rnic, terms=self._terms, proposed=proposed
        )
        self.first_contact = True
        self._group = group
        group.first_contact = self
        try:
            self._first_link = group.open_first_link()
        except RnicError as error:
            LOGGER.info("%r: %s", group, error)
            self.machine.send("unable")
            return False
        return True

    def _when_address_known(self, connect: Callable[[LinkGroup], None]) -> None:
        """Connect the first link once the RNIC knows the address of the peer's GID."""
        group = known(self._group)
        wait = AddressWait(group.timers)
        if not wait.begin(group.rnic, self._peer.gid, lambda: connect(group)):
            self._wait = wait

    def _connect_first(self, group: LinkGroup) -> None:
        """Connect the first link.  Raises RnicError."""
        peer = self._peer
        link = group.setup.connect_first(
            PeerQueuePair(
                gid=peer.gid,
                mac=peer.mac,
                qp_number=peer.qp_number,
                mtu=peer.qp_mtu,
                psn=peer.initial_psn,
            ),
            peer.rkey,
        )
        # ADD LINK CONTINUATION will refer to this RToken (3.5.1.6.3).
        group.peer_rmbs.learn_untrusted({link.number: RToken(peer.rkey, peer.rmb_address)})

    def _send_credentials(self, kind: type[clc.Accept | clc.Confirm]) -> None:
        """Send SMC Accept or Confirm."""
        if self._terms.version > 1:
            self._send(self._credentials(kind))
            return
        end = known(self._end)
        link, rmbe, rnic = end.link, end.rmbe, end.link.rnic
        region = end.group.own_rmbs.region(rmbe.rmb, link)
        # A.2.4 reserves the bit in a Confirm.
        first_contact = self.first_contact and kind is clc.Accept
        shared = (
            self._host.peer_id, first_contact, rnic.gid, rnic.mac, link.qp.qp_num, region.rkey,
            rmbe_size_code(rmbe.size), rnic.mtu, region.address, link.psn,
        )  # fmt: skip
        token = end.connection.alert_token
        self._send_encoded(
            clc.encode_credentials(kind, shared, rmbe_index=rmbe.index, alert_token=token)
        )

    def _credentials(self, kind: type[_C]) -> _C:
        """SMC Accept or Confirm of version 2."""
        end = known(self._end)
        link, rmbe, rnic = end.link, end.rmbe, end.link.rnic
        region = end.group.own_rmbs.region(rmbe.rmb, link)
        v2 = None
        if self._host.offer is not None:
            gids = [rnic.gid, *(each.gid for each in end.group.usable_rnics() if each is not rnic)]
            v2 = self._terms.v2_part(
                gids[:_GIDS] if end.group.client and self.first_contact else (),
                first=self.first_contact, host=self._host.offer.host,
            )  # fmt: skip
        return kind(
            peer_id=self._host.peer_id,
            version=self._terms.version,
            first_contact=self.first_contact,
            gid=rnic.gid,
            mac=rnic.mac,
            qp_number=link.qp.qp_num,
            rkey=region.rkey,
            rmbe_index=rmbe.index,
            alert_token=end.connection.alert_token,
            buffer_size_code=rmbe_size_code(rmbe.size),
            qp_mtu=rnic.mtu,
            rmb_address=region.address,
            initial_psn=link.psn,
            v2=v2,
        )

    def _send(self, message: clc.Message) -> None:
        self._send_encoded(message.encode())

    def _send_encoded(self, data: bytes) -> None:
        if self._host.observer is not None:
            self._host.observer.clc(self, True, data)
        self.outgoing.append(data)

    def _send_decline(self, reason: FallbackReason, *, out_of_sync: bool = False) -> None:
        """Release everything and queue SMC Decline, this side's last message."""
        self.abandon()
        fallback = Fallback.local(reason)
        self._fell_back = FellBack(fallback)
        self._send(
            clc.Decline(
                version=self._decline_version,
                peer_id=self._host.peer_id,
                out_of_sync=out_of_sync,
                diagnosis=fallback.code or 0,
                more_diagnosis=(0, 0, 0, 0) if self._decline_version > 1 else None,
                system=clc.LINUX if self._decline_version > 1 else 0,
            )
        )

    def _declined(self, message: clc.Decline) -> None:
        """Process the peer's Decline."""
        fallback = Fallback.from_peer(message.diagnosis, ueids=self._speaks_v2)
        self._fell_back = FellBack(fallback)
        self._cause = ProtocolError("unexpected SMC Decline")
        self.machine.send("decline")

    def _fail(self, number: int, text: str, kind: type[OSError] = OSError) -> None:
        error = kind(number, text)
        error.__cause__ = self._cause
        self.outcome = Failed(error)
