"""A link group, which two peers share after their first contact (RFC 7609, 2.2, 3.5).

Theory of operation
-------------------
A link group is a core without sockets, tasks or clocks: messages, completions and timers arrive as
calls, and the group calls its `GroupHost`. Its parts:

- the links by number (`link`, `link_set`), with the choice of a link for a new connection;
- the LLC exchanges, which `exchanges` runs one after the other: the first link (`first_contact`),
  the decision on further links (`link_demand`), their addition (`add_link`) and deletion
  (`delete_link`), and RKeys (`rkeys`);
- this side's RMBs (`own_rmbs`) and the peer's (`peer_rmbs`);
- the connections, each with its link and the peer's element that it writes into
  (`GroupConnections`).

When a link fails (`link_failing`, `link_down`), its connections move to another link
(`failover.mover`), its queue pair is closed, the link is removed from the group, and the peer is
notified over another link. Without another link the group ends (4.8.3).

When a group ends, its links and RKeys are closed at once. Its connections and then its RMBs are
closed a few in each pass of the scheduler: each connection has a TCP connection to end and a task
to wake, and an RMB has many pages.

Each side chooses the link that its connections send on (2.3).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from trio_smc._base.errors import ProtocolError
from trio_smc._base.timers import Timer, Timers
from trio_smc.config.config import Config
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous.links.context import GroupConnection
from trio_smc.rendezvous.links.delete_link import IdleLinks
from trio_smc.rendezvous.links.exchanges import Exchanges
from trio_smc.rendezvous.links.first_contact import FirstContact, GroupFailure
from trio_smc.rendezvous.links.link import Link, LinkHost, Mover
from trio_smc.rendezvous.links.link_set import LinkGroupKind, Links
from trio_smc.rendezvous.links.own_rmbs import OwnRmbs
from trio_smc.rendezvous.links.peer_rmbs import ElementUser, PeerRmb, PeerRmbs, RToken
from trio_smc.rendezvous.links.rkeys import Rkeys
from trio_smc.rendezvous.terms import VERSION_1, Terms
from trio_smc.rnic.verbs import Rnic
from trio_smc.states import USABLE
from trio_smc.states.engine import Machine
from trio_smc.states.tables import LINK_GROUP
from trio_smc.wire import llc

if TYPE_CHECKING:
    from trio_smc._base.statistics import Agreed
    from trio_smc.rendezvous.links.add_link import LinkAdding
    from trio_smc.rendezvous.links.context import Group
    from trio_smc.rendezvous.links.delete_link import LinkDeletion
    from trio_smc.rendezvous.links.first_contact import LinkSetup
    from trio_smc.rendezvous.links.link_demand import LinkDemand
    from trio_smc.rendezvous.links.rkeys import RkeyExchanges
    from trio_smc.wire import clc

__all__ = [
    "GroupConnection",
    "GroupConnections",
    "GroupHost",
    "LinkGroup",
    "Mover",
]


LOGGER = logging.getLogger("trio_smc.link_group")

_TURN: Final = 0.001
"""Seconds after which the end of a group leaves the rest to the scheduler's next pass. Chosen;
docs/decisions.md, "many ends at once", has the longest delays with this value."""
_CLIENT_IDLE_EXTRA: Final = 10.0
"""Seconds that a client waits longer than its server before it ends an idle group. The server
should end idle groups (3.5.4). Chosen."""


_MOST_OUT_OF_SYNC: Final = 3
"""Out-of-sync Declines in a row after which a group gets no more connections. More than one,
because another process with the client's peer ID and GID declines, too. Chosen."""


class GroupHost(LinkHost, Protocol):
    """The stack, as seen by its link groups."""

    def companions(self, rnic: Rnic) -> list[Rnic]:
        """RNICs that may carry links now beside a link on ``rnic``, the preferred one first.

        All are of the same kind and network (RFC 7609, 2.2, 5.1). ``rnic`` is one of them if it is
        usable now.
        """

    def new_mover(self, group: LinkGroup) -> Mover:
        """Make the object that moves the connections of ``group`` between its links."""

    def group_gone(self, group: LinkGroup) -> None:
        """The group has freed everything."""


class LinkGroup:
    """One link group of this stack with one peer in one role; the model of `states.link_group`.

    Attributes:
      client: True if this side was the TCP client at first contact.
      peer_id: the peer's 8-byte peer ID. A server has zeros until SMC Confirm, if the Proposal has
        no peer ID.
      terms, agreed: the agreement of the two sides, and the part of it that users see.
      proposed: on a server, how the first Proposal named the client (`terms.proposed`).
      rnic: the RNIC of the first link. All links of a group have RNICs of one kind.
      links: the links by number.
      connections: the connections by this side's alert token, with those that are closing.
      own_rmbs, peer_rmbs, rkeys: the memory that each side may write into, and its RKeys.
      exchanges: the LLC exchanges, with their parts `setup`, `demand`, `adding`, `deletion` and
        `rkey_exchanges`.
      mover: moves connections between links.
      drained: True if an operator takes the group out of service: no new connection uses it.
    """

    def __init__(
        self, *, client: bool, peer_id: bytes, rnic: Rnic, config: Config, timers: Timers,
        host: GroupHost, terms: Terms = VERSION_1, proposed: tuple[bytes, bytes] = (b"", b""),
    ) -> None:  # fmt: skip
        self.client = client
        self.peer_id = peer_id
        self.terms = terms
        self.agreed: Agreed = terms.agreed  # made once, because each connection is counted by it
        self.proposed = proposed
        self.rnic = rnic
        self.config = config
        self.timers = timers
        self.host = host
        self.links: Links = Links()
        self.peer_rmbs: PeerRmbs = PeerRmbs()
        self.own_rmbs: OwnRmbs = OwnRmbs(self)
        self.rkeys: Rkeys = Rkeys(self, self.own_rmbs)
        exchanges = Exchanges(self, self.rkeys)
        self.exchanges: Exchanges = exchanges
        self.setup: LinkSetup = exchanges.setup
        self.demand: LinkDemand = exchanges.demand
        self.adding: LinkAdding = exchanges.adding
        self.deletion: LinkDeletion = exchanges.deletion
        self.rkey_exchanges: RkeyExchanges = exchanges.rkey_exchanges
        self.idle_links: IdleLinks = IdleLinks(self, self.demand, self.deletion)
        self.connections: GroupConnections = GroupConnections(
            self, self.idle_links.connection_placed
        )
        self.first_contact: FirstContact | None = None
        self.machine: Machine = Machine(LINK_GROUP, self)
        self._requested = 0
        self.drained = False
        self._out_of_sync = 0  # Declines in a row of clients that do not know the group
        # A link has failed, and perhaps something that the peer had posted on it was not received.
        self._lost_messages = False
        self._all_received = False  # the peer's process has ended, and nothing was lost
        self._end_reason: int = llc.DeleteLinkReason.PROGRAM
        self._timer: Timer | None = None
        self._idle_since = 0.0  # while there are no connections
        self._ending: Timer | None = None
        self._termination_link: Link | None = None
        self._when_settled: list[Callable[[], None]] = []
        self.mover: Mover = host.new_mover(self)

    def __repr__(self) -> str:
        role = "client" if self.client else "server"
        return f"<LinkGroup {self.state} as {role} of {self.peer_id.hex()}>"

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""
        return self.machine.state

    @property
    def kind(self) -> LinkGroupKind:
        """Single, asymmetric or symmetric, by the current links (2.2.2)."""
        return self.links.kind

    @property
    def usable(self) -> bool:
        """True if connections may use the group."""
        if self.machine.state in USABLE:
            for link in self.links.values():
                if link.usable:
                    return True
        return False

    @property
    def forming(self) -> bool:
        """True during the first contact."""
        return self.machine.state == "FORMING"

    def can_take(self, size: int) -> bool:
        """True if a new connection with an RMB element of ``size`` bytes may use the group."""
        most = self.terms.max_connections
        if most is not None and len(self.connections) + self._requested >= most:
            return False
        if self.drained or self._out_of_sync >= _MOST_OUT_OF_SYNC:
            return False
        for link in self.links.values():
            if link.needs_test:
                return False
        return self.usable and self.own_rmbs.has_room(size)

    def belongs_to(self, proposed: tuple[bytes, bytes]) -> bool:
        """True if the client that a Proposal names has formed the group (`terms.proposed`).

        The Proposal may name an RNIC whose link has just failed, or is not added yet. The peer ID
        of a software RNIC has enough random bits to identify a process without a GID; but a
        Proposal of version 2 alone may have no peer ID.
        """
        peer_id, gid = proposed
        if self.proposed[0] != peer_id:
            return False
        known = gid == self.proposed[1] or self.links.reached_recently(gid)
        return known or (self.rnic.kind == "software" and any(peer_id))

    def test_links(self, peer_id: bytes) -> None:
        """Test the links, because a client with this peer ID does not know the group (C.4).

        A link whose test is not answered fails.  If it is answered, and the client declines again
        and again, the client has the group under another peer ID, because its first SMC Accept was
        damaged.  Then the group keeps its connections, and further ones begin with a first contact.
        """
        if peer_id == self.peer_id:
            self._out_of_sync += 1
            for link in self.links.usable():
                link.test_now()

    def found_by_client(self) -> None:
        """The client has confirmed a further connection, so it knows the group."""
        self._out_of_sync = 0

    # --- links -------------------------------------------------------------------------------

    def find_link(self, gid: bytes, mac: bytes, qp_number: int) -> Link | None:
        """The link with this peer end, even if it was just removed (3.5.2.2, 3.5.2.3)."""
        return self.links.find(gid, mac if self.terms.version == 1 else None, qp_number)

    def usable_rnics(self) -> list[Rnic]:
        """This side's RNICs that links may use."""
        rnics = self.host.companions(self.rnic)
        return rnics if self.terms.version == 1 else [rnic for rnic in rnics if rnic.routable]

    def delete_link(
        self, number: int, *, orderly: bool = True,
        reason: int = llc.DeleteLinkReason.OPERATOR,
    ) -> None:  # fmt: skip
        """Delete one link; a client requests it from its server (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

        A group without links ends, and its connections end with an error.

        Args:
          orderly: True if connections leave the link while it still works.
          reason: a 32-bit reason code for the peer.
        """
        self.deletion.delete_link(number, reason, orderly=orderly)

    def rnic_available(self, rnic: Rnic) -> None:
        """An RNIC of the group's kind can carry links now (3.5.5.1.1, 3.5.5.1.2, C.8)."""
        used = any(link.rnic is rnic for link in self.links.usable())
        if self.machine.state in USABLE and (not used or self.deletion.has_pending):
            self.demand.want()

    def rnic_unavailable(self, rnic: Rnic) -> None:
        """An operator removes the RNIC: delete its links orderly (3.5.5.1.3)."""
        for link in [link for link in self.links.values() if link.rnic is rnic]:
            if self.links.oldest(but=link) is not None:
                # With LOST_PATH, links over other RNICs may still be added (`LinkDemand.pause`).
                self.delete_link(link.number, reason=llc.DeleteLinkReason.LOST_PATH)
            else:
                self.demand.replace(link)

    def rnic_lost(self, rnic: Rnic) -> None:
        """Fail the links on an RNIC, because its port went down."""
        for link in [link for link in self.links.values() if link.rnic is rnic]:
            link.machine.send("failed")

    def link_ready(self, link: Link) -> None:
        """A further link was confirmed."""
        self.mover.link_ready(link)
        self.idle_links.watch()
        self.machine.send("links_changed")

    def free_link(self, link: Link) -> None:
        """Free the resources of a link, its registrations first."""
        self.rkeys.drop_link(link.number)
        link.close()
        self.links.remove(link)

    # --- calls of a link (`link.LinkOwner`) ----------------------------------------------------

    def link_failing(self, link: Link) -> None:
        """Cancel the deletion of the last other link, and move this link's connections."""
        self.deletion.keep_last_link(link)
        self.mover.link_lost(link)

    def link_down(self, link: Link) -> None:
        """A link has failed; its connections have moved if another link was usable."""
        if self.machine.state == "GONE" or self.adding.new_link_failed(link):
            return
        if self.machine.state == "FORMING":
            self.machine.send("links_lost")
            return
        self.free_link(link)
        self._lost_messages = self._lost_messages or not link.qp.received_all
        if self.links.for_llc() is None:
            self._all_received = not self._lost_messages
            self.machine.send("links_lost")
            return
        if self.machine.state in USABLE and not self.deletion.server_deletes(link.number):
            # Before a new link: the peer would reject a link on the same RNIC.
            self.delete_link(link.number, orderly=False, reason=link.reason)
        self.exchanges.link_lost(link)
        self.deletion.link_lost(link)
        self.machine.send("links_changed")

    def remove_link(self, number: int) -> None:
        """Remove a link, because both sides have agreed; no-op if it was removed when it failed."""
        link = self.links.get(number)
        if link is None:
            return
        self.free_link(link)
        if self.links.for_llc() is None:
            self.machine.send("links_lost")
            return
        self.exchanges.link_lost(link)
        self.deletion.link_lost(link)
        self.machine.send("links_changed")

    # --- connections -------------------------------------------------------------------------

    def request_element(
        self, size: int, done: Callable[[Rmbe | None], None], over: Link | None = None
    ) -> None:
        """Call ``done`` with an RMB element of ``size`` bytes, or with None if there is none.

        ``done`` may be called later, because a new RMB is announced to the peer first (RFC 7609,
        3.5.5.2.1), over the link ``over``, which the connection will use (A.3.5).
        """
        rmbe = self.own_rmbs.take_free(size)
        if rmbe is not None:
            done(rmbe)
            return
        self._requested += 1

        def taken(rmbe: Rmbe | None) -> None:
            self._requested -= 1
            done(rmbe)

        self.own_rmbs.request(size, taken, over)

    def add_connection(self, token: int, connection: GroupConnection) -> None:
        """Route CDC messages with ``token`` to ``connection``."""
        self.connections[token] = connection

    def remove_connection(self, token: int, user: ElementUser) -> None:
        """Remove a closed connection; late messages for it are dropped and counted."""
        self.connections.remove(token, user)
        if not self.connections and self.machine.state in USABLE:
            self.start_idle_timer()

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested: one test serves all connections (4.5.3)."""
        return self.connections.test_interval

    def keep_alive(self, user: ElementUser, seconds: float | None) -> None:
        """Test links that are idle for this time while ``user`` is open; None: no longer."""
        self.connections.keep_alive(user, seconds)

    def knows_rmb(self, link: Link, rkey: int, address: int) -> bool:
        """True if the peer has announced an RMB with this RToken on ``link``."""
        return self.peer_rmbs.find_named(link.number, (rkey, address)) is not None

    # --- the group's life ----------------------------------------------------------------------

    def open_first_link(self) -> Link:
        """Make the first link, in INIT.  Raises RnicError."""
        link = Link(self, self.links.next_number(), self.rnic)
        self.rkeys.register_on(link)
        self.links[link.number] = link
        return link

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the group is formed or gone."""
        self._when_settled.append(callback)

    def on_llc_untrusted(self, link: Link, data: bytes) -> None:
        """Process one LLC message of the peer; a violation of the rules fails the link (C.7.1)."""
        try:
            self.exchanges.dispatch_untrusted(link, data)
        except ProtocolError as error:
            LOGGER.warning("%r: protocol error: %s", link, error)
            self.setup.failure, self.setup.error = GroupFailure.PROTOCOL_ERROR, error
            link.reason = llc.DeleteLinkReason.PROTOCOL_VIOLATION
            link.machine.send("failed")

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for an LLC message.

        Longer at first contact, so that the RNIC's time-out of a send and an SMC Decline come first
        (C.7).
        """
        forming = self.machine.state == "FORMING"
        return self.config.first_contact_timeout if forming else self.config.llc_timeout

    def terminate(self) -> None:
        """End the group by DELETE LINK; its connections end with an error (RFC 7609, 3.5.4)."""
        self._end_reason = llc.DeleteLinkReason.PROGRAM
        self.machine.send("terminate")

    def delete_all(self, reason: int) -> None:
        """Process the peer's DELETE LINK for the whole group.

        The server's own DELETE LINK then repeats the client's reason (3.5.4, A.3.4).

        The peer counts what it has sent before as delivered, such as the end of a connection.  It
        may still wait on another link, because the order of messages holds for one link only.
        """
        self.mover.catch_up()
        self._end_reason = reason
        self.machine.send("delete_all")

    # --- guards ------------------------------------------------------------------------------

    @property
    def is_single(self) -> bool:
        """True if the group has one link."""
        return self.links.kind is LinkGroupKind.SINGLE

    @property
    def is_asymmetric(self) -> bool:
        """True if there are two links that share an RNIC."""
        return self.links.kind is LinkGroupKind.ASYMMETRIC

    @property
    def is_symmetric(self) -> bool:
        """True if there are links that share no RNIC."""
        return self.links.kind is LinkGroupKind.SYMMETRIC

    @property
    def has_spare_link(self) -> bool:
        """True if DELETE LINK could be sent again over another link."""
        link = self.links.for_llc(avoid=self._termination_link)
        return link is not None and link is not self._termination_link

    # --- actions: links come and go ------------------------------------------------------------

    def report_formed(self) -> None:
        """Notify the negotiation: data may flow."""
        contact, self.first_contact = self.first_contact, None
        if contact is not None:
            contact.group_formed()

    def seek_links(self) -> None:
        """Let the server add links up to the maximum; a client does so only for a new RNIC."""
        if not self.client:
            self.demand.want(news=False)

    def delete_asymmetric_link(self) -> None:
        """Delete asymmetric links, because there are symmetric ones now."""
        if not self.client:
            for link in self.links.asymmetric():
                self.delete_link(link.number, reason=llc.DeleteLinkReason.ASYMMETRIC_NOT_NEEDED)

    # --- actions: idle groups ------------------------------------------------------------------

    def start_idle_timer(self) -> None:
        """Start the timer that ends a group without connections (3.5.4).

        A timer that runs since an earlier call stays, because mostly a connection comes before it
        fires.
        """
        self._idle_since = self.timers.now()
        if self._timer is None:
            self._call_later(self._idle_patience, self._idle_too_long)

    @property
    def _idle_patience(self) -> float:
        return self.config.link_group_idle + (_CLIENT_IDLE_EXTRA if self.client else 0.0)

    def _idle_too_long(self) -> None:
        self._timer = None
        rest = self._idle_since + self._idle_patience - self.timers.now()
        if self.connections:
            return  # the end of the last one starts the timer again
        if rest > 0.0:
            self._call_later(rest, self._idle_too_long)
        elif self.own_rmbs.busy:
            # The reply to a CONFIRM RKEY, or its time-out, decides whether a connection comes.
            self._call_later(self.config.llc_timeout, self._idle_too_long)
        else:
            self.terminate()

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self.timers.call_later(seconds, callback)

    def stop_timer(self) -> None:
        """Stop the timer: the group is in use, or has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- actions: the end ----------------------------------------------------------------------

    def report_failed(self) -> None:
        """Notify the negotiation, which sends SMC Decline or resets the TCP connection."""
        contact, self.first_contact = self.first_contact, None
        if contact is not None:
            contact.group_failed(self.setup.failure, self.setup.error)

    def end_connections(self) -> None:
        """End all connections: no link is left for them (4.8.3)."""
        if self._ending is None:
            self._end_some(self.timers.now() + _TURN)

    def _end_some(self, until: float) -> None:
        self._ending = None
        for _ in self._end_steps():
            if self.timers.now() >= until:
                self._ending = self.timers.call_later(
                    0.0, lambda: self._end_some(self.timers.now() + _TURN)
                )
                return

    def _end_steps(self) -> Iterator[None]:
        """End one connection, or free one RMB of a group that is gone, at each step."""
        for connection in list(self.connections.values()):
            connection.links_lost(all_received=self._all_received)
            yield
        if self.machine.state == "GONE":
            self.mover.close()
            while self.own_rmbs.free_one():
                yield
            self.host.group_gone(self)

    def give_up(self) -> None:
        """End the group without a message to the peer."""
        self.machine.send("links_lost")

    def end_now(self) -> None:
        """End the group without a message to the peer, and free everything before returning."""
        self.give_up()
        if self._ending is not None:
            self._ending.cancel()
            self._end_some(math.inf)

    def send_delete_all(self) -> None:
        """Send DELETE LINK for the whole group. That of a server needs no answer (3.5.4)."""
        self._termination_link = link = self.links.for_llc()
        if link is not None:
            message = llc.DeleteLink(all_links=True, orderly=True, reason=self._end_reason)
            link.send_llc(message, None if self.client else self._delete_sent)

    def _delete_sent(self) -> None:
        self.timers.in_turn(lambda: self.machine.send("delete_sent"))

    def start_termination_timer(self) -> None:
        """Limit the wait for an answer to DELETE LINK, because the peer may be gone."""
        self.stop_timer()
        self._call_later(self.config.llc_timeout, self._termination_timed_out)

    def _termination_timed_out(self) -> None:
        self.machine.send("termination_timeout")

    def fail_termination_link(self) -> None:
        """Fail the link that carried DELETE LINK, because the peer did not answer."""
        if self._termination_link is not None:
            self._termination_link.machine.send("failed")

    def free_resources(self) -> None:
        """Free queue pairs and registrations, then connections, and memory last."""
        self.stop_timer()
        self.deletion.close()
        self.adding.close()
        self.demand.close()
        self.idle_links.close()
        self.own_rmbs.close_regions()
        for link in self.links.values():
            link.close()
        # Last, because callbacks must find a group that is no longer usable.
        self.exchanges.end()
        self.end_connections()

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Notify observers, waiting callbacks, and finally the stack; record the change."""
        role = "as client of" if self.client else "as server of"
        what = f"{role} {self.peer_id.hex()}"
        self.host.journal.changed("link_group", what, old, new, event)
        if self.host.observer is not None:
            self.host.observer.state(self, old, new, event)
        if new in USABLE or new == "GONE":
            settled, self._when_settled = self._when_settled, []
            for callback in settled:
                callback()
        if new == "GONE":
            self.end_connections()
        elif old == "FORMING":
            self.exchanges.start_queued()


# No named tuples, because each new connection makes both.
Attachment = tuple[Link, int, int]
"""The link of a connection; address and RKey of the peer's element on it."""
_PeerElement = tuple[PeerRmb, int, int]
"""The RMB of an element; the element's index and its size in bytes."""


class GroupConnections(dict[int, GroupConnection]):
    """The connections of one link group by this side's alert token, with those that are closing."""

    def __init__(self, group: Group, placed: Callable[[], None]) -> None:
        """``placed``: called after a connection has got a link."""
        super().__init__()
        self._group = group
        self._placed = placed
        self._next_token = secrets.randbits(32)
        self._peer_elements: dict[ElementUser, _PeerElement] = {}
        self._keepalive: dict[ElementUser, float] = {}
        self._link_of: dict[ElementUser, Link] = {}

    def new_token(self) -> int:
        """An alert token that no connection has: 4 bytes, not 0. Tokens repeat only after 2**32."""
        while True:
            self._next_token = (self._next_token + 1) & 0xFFFFFFFF
            if self._next_token and self._next_token not in self:
                return self._next_token

    def remove(self, token: int, user: ElementUser) -> None:
        """Remove a closed connection; late messages for it are dropped and counted."""
        connection = self.pop(token)
        self._keepalive.pop(user, None)
        self._leave(connection)
        element = self._peer_elements.pop(user, None)
        if element is not None:
            rmb, index, _ = element
            if rmb.elements.get(index) is user:
                del rmb.elements[index]

    # --- links -----------------------------------------------------------------------------

    def attach_untrusted(
        self, connection: GroupConnection, peer: clc.Accept | clc.Confirm, named: Link
    ) -> Attachment:
        """Give a new connection the peer's element and a link to send on.

        This side chooses the link (2.3); it need not be the one that ``peer`` names.

        Args:
          peer: the CLC message that names the element.
          named: the link that ``peer`` names, which may have just been removed.

        Raises:
          ProtocolError: there are too many RMBs, the RToken contradicts known ones, or the RMB is
            unknown and its link is gone.
        """
        self._take_peer_element_untrusted(connection, peer, named)
        link = self.link_for(connection)
        if link is None:
            if self._group.links.get(named.number) is not named:
                raise ProtocolError("no link is left that reaches the peer's RMB")
            link = named  # a failing link: this connection moves or ends with the others on it
        return self.move(connection, link)

    def move(self, connection: GroupConnection, link: Link) -> Attachment:
        """Let ``connection`` send on ``link``, a link that `link_for` returned."""
        rmb, index, size = self._peer_elements[connection]
        token = rmb.tokens[link.number]
        self._place(connection, link)
        return link, token.address + (index - 1) * size, token.rkey

    def _place(self, connection: GroupConnection, link: Link) -> None:
        self._leave(connection)
        self._link_of[connection] = link
        link.users[connection] = None
        self._placed()

    def _leave(self, connection: GroupConnection) -> None:
        link = self._link_of.pop(connection, None)
        if link is not None:
            link.users.pop(connection, None)
            if not link.users:
                link.empty_since = self._group.timers.now()

    def link_for(self, connection: GroupConnection, but: Link | None = None) -> Link | None:
        """The least loaded usable link on which the peer's element can be reached."""
        return self._group.links.least_loaded(but, self._peer_elements[connection][0].tokens)

    # --- the peer's elements ---------------------------------------------------------------

    def _take_peer_element_untrusted(
        self, user: GroupConnection, peer: clc.Accept | clc.Confirm, link: Link
    ) -> None:
        """Note the peer's element that ``user`` writes into (RFC 7609, A.2.2, A.2.3)."""
        index, rkey, address = peer.rmbe_index, peer.rkey, peer.rmb_address
        rmbs = self._group.peer_rmbs
        rmb = rmbs.find_named(link.number, (rkey, address))
        if rmb is not None and index in rmb.elements:
            # The CLC message came over TCP before the last CDC messages of the element's last user,
            # which may still wait on a link.
            self._group.mover.catch_up()
            rmb = rmbs.find_named(link.number, (rkey, address))
        if rmb is None:
            if self._group.links.get(link.number) is not link:
                raise ProtocolError("an unknown RMB on a link that is gone")
            rmb = rmbs.learn_untrusted({link.number: RToken(rkey, address)})
        previous_user = rmb.elements.get(index)
        rmb.elements[index] = user
        self._peer_elements[user] = rmb, index, peer.buffer_size
        if previous_user is not None and previous_user.rmbe_conflict():
            LOGGER.warning("%r: the peer reuses RMB element %d", self._group, index)

    # --- TEST LINK -------------------------------------------------------------------------

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested: one test serves all connections (4.5.3)."""
        return min([self._group.config.test_link_interval, *self._keepalive.values()])

    def keep_alive(self, user: ElementUser, seconds: float | None) -> None:
        """Test links that are idle for this time while ``user`` is open; None: no longer."""
        before = self.test_interval
        if seconds is None:
            self._keepalive.pop(user, None)
        else:
            self._keepalive[user] = seconds
        if self.test_interval < before:
            for link in self._group.links.values():
                link.test_interval_shortened()
