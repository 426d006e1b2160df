"""A link group: what two peers share after their first contact (RFC 7609, 2.2, 3.5).

Theory of operation
-------------------
A link group is a core without sockets, tasks or clocks: messages, completions and timers come
in as calls, and what it wants of the world it asks of its `GroupHost`.  It owns the links, the
RMBs of this side with their registrations on every link, what is known of the peer's RMBs, and
the connections by alert token.

How its links come up and how single ones go is told in `link_setup` and `link_deletion`; the
exchanges of LLC messages take turns in `exchanges`.

LinkGroup is the model of `states.link_group`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from trio_smc._base.config import Config
from trio_smc._base.errors import ProtocolError
from trio_smc._base.observer import Observer
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.exchanges import Exchanges
from trio_smc.rendezvous.link import Link, LinkConnection
from trio_smc.rendezvous.link_deletion import LinkDeletion
from trio_smc.rendezvous.link_setup import FIRST_LINK, FirstContact, GroupFailure, LinkSetup
from trio_smc.rendezvous.own_rmbs import OwnRmbs
from trio_smc.rendezvous.rkeys import Rkeys
from trio_smc.rendezvous.rtokens import ElementUser, PeerRmb, PeerRmbs, RToken
from trio_smc.rendezvous.timers import Timer, Timers
from trio_smc.rnic.verbs import QueuePair, Rnic
from trio_smc.states.engine import Machine
from trio_smc.states.link_group import LINK_GROUP

__all__ = ["GroupConnection", "GroupHost", "LinkGroup"]

LOGGER = logging.getLogger("trio_smc.link_group")

_CLIENT_IDLE_EXTRA: Final = 10.0
"""The server ends idle groups (3.5.4); a client does so only when its server did not."""


class GroupHost(Protocol):
    """What a link group wants of the stack it belongs to."""

    observer: Observer | None

    def register(self, rnic: Rnic, qp: QueuePair, link: Link) -> None:
        """Send a queue pair's completions to ``link.on_completion``."""

    def unregister(self, rnic: Rnic, qp: QueuePair) -> None:
        """Stop doing so."""

    def group_gone(self, group: LinkGroup) -> None:
        """The group has freed everything."""

    def count_unknown_token(self) -> None:
        """A CDC message named no connection; it was dropped."""


class GroupConnection(LinkConnection, ElementUser, Protocol):
    """A connection as its link group sees it."""

    def links_lost(self) -> None:
        """No link is left, or the group was terminated."""


class LinkGroup:
    """One link group of this stack with one peer in one role.

    Attributes:
      client: whether this side was the TCP client at first contact.
      peer_id: the peer's 8-byte peer ID.
      rnic: the RNIC of the first link; decides whether the group is of software or RoCE kind.
      links: by number.
      connections: by our alert token; closing ones included.
      setup, deletion, exchanges: what LLC messages do.
    """

    def __init__(
        self, *, client: bool, peer_id: bytes, rnic: Rnic, config: Config, timers: Timers,
        host: GroupHost,
    ) -> None:  # fmt: skip
        self.client = client
        self.peer_id = peer_id
        self.rnic = rnic
        self.config = config
        self.timers = timers
        self.host = host
        self.links: dict[int, Link] = {}
        self.connections: dict[int, GroupConnection] = {}
        self.peer_rmbs = PeerRmbs()
        self.exchanges = Exchanges(self)
        self.own_rmbs = OwnRmbs(self)
        self.rkeys = Rkeys(self)
        self.setup = LinkSetup(self)
        self.deletion = LinkDeletion(self)
        self.first_contact: FirstContact | None = None
        self.machine = Machine(LINK_GROUP, self)
        self._next_token = secrets.randbits(32)
        self._timer: Timer | None = None
        self._error: ProtocolError | None = None
        self._reason = llc.DeleteLinkReason.PROGRAM
        self._settled: list[Callable[[], None]] = []
        self._peer_elements: dict[ElementUser, tuple[PeerRmb, int]] = {}
        self._keepalive: dict[ElementUser, float] = {}

    def __repr__(self) -> str:
        role = "client" if self.client else "server"
        return f"<LinkGroup {self.state} as {role} of {self.peer_id.hex()}>"

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""
        return self.machine.state

    @property
    def usable(self) -> bool:
        """Whether connections may use the group."""
        return self.machine.state == "SINGLE" and self.any_active_link() is not None

    def takes(self, size: int) -> bool:
        """Whether a new connection with an RMB element of ``size`` bytes may use the group."""
        return self.usable and self.own_rmbs.has_room(size)

    def any_active_link(self, but: Link | None = None) -> Link | None:
        """A link, and not ``but``, that can carry LLC messages and connections."""
        for link in self.links.values():
            if link is not but and link.state in ("ACTIVE", "TESTING"):
                return link
        return None

    def find_link(self, gid: bytes, mac: bytes, qp_number: int) -> Link | None:
        """The active link whose peer end is this one (RFC 7609, 3.5.2.2, 3.5.2.3)."""
        for link in self.links.values():
            peer = link.peer
            if (
                link.state in ("ACTIVE", "TESTING")
                and peer is not None
                and (peer.gid, peer.mac, peer.qp_number) == (gid, mac, qp_number)
            ):
                return link
        return None

    # --- connections -------------------------------------------------------------------------

    def new_token(self) -> int:
        """An alert token that names no connection and was not used lately (4 bytes, not 0)."""
        while True:
            self._next_token = (self._next_token + 1) & 0xFFFFFFFF
            if self._next_token and self._next_token not in self.connections:
                return self._next_token

    def request_element(self, size: int, done: Callable[[Rmbe | None], None]) -> None:
        """Take an RMB element of ``size`` bytes; ``done(None)`` when none can be had.

        A new RMB is told to the peer first (RFC 7609, 3.5.5.2.1), so ``done`` may come later.
        """
        self.own_rmbs.request(size, done)

    def add_connection(self, token: int, connection: GroupConnection) -> None:
        """Route CDC messages with ``token`` to ``connection``."""
        self.connections[token] = connection
        self._stop_timer()

    def remove_connection(self, token: int, user: ElementUser) -> None:
        """Forget a closed connection; late messages for it are dropped and counted."""
        del self.connections[token]
        self._keepalive.pop(user, None)
        element = self._peer_elements.pop(user, None)
        if element is not None and element[0].elements.get(element[1]) is user:
            del element[0].elements[element[1]]
        if not self.connections and self.machine.state == "SINGLE":
            self.start_idle_timer()

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested: one test serves all connections (4.5.3)."""
        return min([self.config.test_link_interval, *self._keepalive.values()])

    def keep_alive(self, user: ElementUser, seconds: float | None) -> None:
        """Test idle links this often while ``user`` is open; None: it asks for nothing."""
        before = self.test_interval
        if seconds is None:
            self._keepalive.pop(user, None)
        else:
            self._keepalive[user] = seconds
        if self.test_interval < before:
            for link in self.links.values():
                link.test_interval_shortened()

    def knows_rmb(self, link: Link, rkey: int, address: int) -> bool:
        """Whether the peer's RMB with this RToken on ``link`` was confirmed."""
        rmb = self.peer_rmbs.find(link.number, rkey)
        return rmb is not None and rmb.tokens[link.number].address == address

    def take_peer_element(
        self, link: Link, *, rkey: int, address: int, index: int, user: ElementUser
    ) -> None:
        """Give ``user`` the peer's RMB element that SMC Accept or SMC Confirm names.

        The RMB is known (`knows_rmb`), except at first contact, where the CLC message itself
        brings its RToken.  A connection that holds the element already is reset (4.4.2).
        """
        rmb = self.peer_rmbs.find(link.number, rkey)
        if rmb is None:
            rmb = self.peer_rmbs.learn_untrusted({link.number: RToken(rkey, address)})
        holder = rmb.elements.get(index)
        rmb.elements[index] = user
        self._peer_elements[user] = (rmb, index)
        if holder is not None:
            LOGGER.warning("%r: the peer reuses RMB element %d", self, index)
            holder.rmbe_conflict()

    # --- first contact ---------------------------------------------------------------------

    def open_first_link(self) -> Link:
        """Make the first link, in INIT.  Raises RnicError."""
        link = Link(self, FIRST_LINK, self.rnic)
        self.rkeys.register_on(link)
        self.links[link.number] = link
        return link

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the group is formed or gone."""
        self._settled.append(callback)

    # --- LLC messages ------------------------------------------------------------------------

    def on_llc_untrusted(self, link: Link, data: bytes) -> None:
        """One LLC message from the peer; what breaks the rules costs the link (C.7.1)."""
        try:
            self._dispatch_untrusted(link, llc.decode_untrusted(data))
        except ProtocolError as error:
            LOGGER.warning("%r: protocol error: %s", link, error)
            self.setup.failure, self._error = GroupFailure.PROTOCOL_ERROR, error
            link.machine.send("failed")

    def _dispatch_untrusted(self, link: Link, message: llc.Message) -> None:
        if link.state == "CONFIRMING" and not _may_come_first(message):
            raise ProtocolError(f"{type(message).__name__} before CONFIRM LINK")
        match message:
            case llc.ConfirmLink():
                self.setup.on_confirm_link_untrusted(link, message)
            case llc.TestLink(reply=True):
                link.on_test_reply_untrusted(message)
            case llc.TestLink():
                link.send_llc(llc.TestLink(reply=True, user_data=message.user_data))
            case llc.AddLink():
                self.setup.on_add_link_untrusted(link, message)
            case llc.DeleteLink():
                self.deletion.on_delete_link_untrusted(link, message)
            case llc.ConfirmRkey() | llc.ConfirmRkeyContinuation() | llc.DeleteRkey():
                if message.reply:
                    self.exchanges.on_reply_untrusted(link, message)
                else:
                    self.rkeys.on_request_untrusted(link, message)
            case llc.OptionalMessage():
                pass  # A.3: silently discarded
            case _:
                raise ProtocolError(f"{type(message).__name__} out of turn")

    # --- endings ---------------------------------------------------------------------------

    def link_down(self, link: Link) -> None:
        """A link failed or was deleted."""
        # A link that fails is told of before it is DOWN.
        if self.state == "FORMING" or self.any_active_link(but=link) is None:
            self.machine.send("links_lost")

    def terminate(self, reason: llc.DeleteLinkReason = llc.DeleteLinkReason.PROGRAM) -> None:
        """End the group in order; its connections end with an error (RFC 7609, 3.5.4)."""
        self._reason = reason
        self.machine.send("terminate")

    # --- actions and guards of states.link_group ---------------------------------------------

    def start_idle_timer(self) -> None:
        """Keep a group without connections for a while (3.5.4)."""
        self._stop_timer()
        if not self.connections:
            extra = _CLIENT_IDLE_EXTRA if self.client else 0.0
            self._timer = self.timers.call_later(
                self.config.link_group_idle + extra, self._idle_too_long
            )

    def _idle_too_long(self) -> None:
        if self.own_rmbs.busy:
            # A connection is just coming, or not: the peer's reply decides, or its time.
            self._timer = self.timers.call_later(self.config.llc_timeout, self._idle_too_long)
        else:
            self.terminate()

    def start_termination_timer(self) -> None:
        """Do not wait for ever for a peer that is gone."""
        self._stop_timer()
        self._timer = self.timers.call_later(self.config.llc_timeout, self._termination_timed_out)

    def tell_formed(self) -> None:
        """Data may flow."""
        contact, self.first_contact = self.first_contact, None
        if contact is not None:
            contact.group_formed()

    def leave_turn(self) -> None:
        """See `LinkSetup.leave_turn`."""
        self.setup.leave_turn()

    def tell_failed(self) -> None:
        """The negotiation decides between Decline and reset."""
        contact, self.first_contact = self.first_contact, None
        if contact is not None:
            contact.group_failed(self.setup.failure, self._error)

    def send_delete_all(self) -> None:
        """DELETE LINK for the whole group; the server's needs no answer (3.5.4)."""
        link = self.any_active_link()
        if link is not None:
            message = llc.DeleteLink(all_links=True, orderly=True, reason=self._reason)
            link.send_llc(message, None if self.client else self._delete_sent)

    def _delete_sent(self) -> None:
        self.machine.send("delete_sent")

    def _termination_timed_out(self) -> None:
        self.machine.send("termination_timeout")

    def end_connections(self) -> None:
        """4.8.3: no link is left for them."""
        for connection in list(self.connections.values()):
            connection.links_lost()

    def free_resources(self) -> None:
        """Queue pairs, registrations and memory."""
        self._stop_timer()
        self.deletion.close()
        self.own_rmbs.close_regions()
        for link in self.links.values():
            link.close()
        self.setup.close()
        # Who is told now finds a group that cannot be used any more.
        self.exchanges.end()
        for connection in list(self.connections.values()):
            connection.links_lost()
        self.own_rmbs.close()

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Tell observers, whoever waited, and at the end the stack."""
        if self.host.observer is not None:
            self.host.observer.state(self, old, new, event)
        if new in ("SINGLE", "GONE"):
            settled, self._settled = self._settled, []
            for callback in settled:
                callback()
        if new == "GONE":
            self.host.group_gone(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _may_come_first(message: llc.Message) -> bool:
    """Whether a message may come on a link that is not confirmed (3.5.1.5, 3.5.5.3.1, A.3)."""
    return isinstance(message, (llc.ConfirmLink, llc.OptionalMessage)) or (
        isinstance(message, llc.DeleteLink) and message.all_links
    )
