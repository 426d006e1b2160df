"""A link group: what two peers share after their first contact (RFC 7609, 2.2, 3.5).

Theory of operation
-------------------
A link group is a core without sockets, tasks or clocks: messages, completions and timers come
in as calls, and what it wants of the world it asks of its `GroupHost`.  Its parts:

- `links` by number, what they make the group, which of them is least loaded (`links`);
- how links come up (`link_setup`, `link_adding`) and go (`link_deletion`), taking turns with
  RKeys (`rkeys`) in `exchanges`;
- this side's RMBs (`own_rmbs`), the peer's (`rtokens`), the connections (`group_connections`).

A link that fails is handled in this order: its connections move to another link, its queue pair
is closed, then it is forgotten and the peer is told over another link; without another link the
group ends (4.8.3).  Its life as a whole is told in `group_life`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from trio_smc._base.config import Config
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.rmb import Rmbe
from trio_smc.rendezvous import llc
from trio_smc.rendezvous.exchanges import Exchanges
from trio_smc.rendezvous.group_connections import GroupConnections
from trio_smc.rendezvous.group_host import GroupConnection, GroupHost, Mover
from trio_smc.rendezvous.group_life import GroupLife
from trio_smc.rendezvous.idle_links import IdleLinks
from trio_smc.rendezvous.link import Link
from trio_smc.rendezvous.link_adding import LinkAdding
from trio_smc.rendezvous.link_deletion import LinkDeletion
from trio_smc.rendezvous.link_seeking import LinkSeeking
from trio_smc.rendezvous.link_setup import FirstContact, GroupFailure, LinkSetup
from trio_smc.rendezvous.links import Kind, Links
from trio_smc.rendezvous.llc_dispatch import dispatch_untrusted
from trio_smc.rendezvous.own_rmbs import OwnRmbs
from trio_smc.rendezvous.rkeys import Rkeys
from trio_smc.rendezvous.rtokens import ElementUser, PeerRmbs, RToken
from trio_smc.rendezvous.timers import Timers
from trio_smc.rnic.verbs import Rnic
from trio_smc.states.link_group import USABLE

__all__ = ["GroupConnection", "GroupHost", "LinkGroup", "Mover"]

LOGGER = logging.getLogger("trio_smc.link_group")


class LinkGroup:
    """One link group of this stack with one peer in one role.

    Attributes:
      client: whether this side was the TCP client at first contact.
      peer_id: the peer's 8-byte peer ID.
      rnic: the RNIC of the first link; decides whether the group is of software or RoCE kind.
      links: by number.
      connections: by our alert token; closing ones included.
      setup, adding, seeking, deletion, rkeys, exchanges: what LLC messages do.
      members: which connection uses what.
      mover: moves connections between links.
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
        self.links = Links()
        self.members = GroupConnections(self)
        self.connections = self.members.by_token
        self.peer_rmbs = PeerRmbs()
        self.exchanges = Exchanges(self)
        self.own_rmbs = OwnRmbs(self)
        self.rkeys = Rkeys(self)
        self.setup = LinkSetup(self)
        self.adding = LinkAdding(self)
        self.seeking = LinkSeeking(self)
        self.idle_links = IdleLinks(self)
        self.deletion = LinkDeletion(self)
        self.first_contact: FirstContact | None = None
        self.life = GroupLife(self)
        self.machine = self.life.machine
        self.mover = host.new_mover(self)

    def __repr__(self) -> str:
        role = "client" if self.client else "server"
        return f"<LinkGroup {self.state} as {role} of {self.peer_id.hex()}>"

    @property
    def state(self) -> str:
        """The group's state (`trio_smc.states.link_group`)."""
        return self.machine.state

    @property
    def kind(self) -> Kind:
        """Single, asymmetric or symmetric, by the links there are now (2.2.2)."""
        return self.links.kind

    @property
    def usable(self) -> bool:
        """Whether connections may use the group."""
        return self.machine.state in USABLE and self.links.any_usable

    def takes(self, size: int) -> bool:
        """Whether a new connection with an RMB element of ``size`` bytes may use the group."""
        return self.usable and self.own_rmbs.has_room(size)

    # --- links -------------------------------------------------------------------------------

    def usable_links(self) -> list[Link]:
        """Links that may carry more connections."""
        return self.links.usable()

    def least_loaded_link(self, but: Link | None = None) -> Link | None:
        """The usable link, and not ``but``, on which the fewest connections send."""
        return self.links.least_loaded(but)

    def any_active_link(self, but: Link | None = None) -> Link | None:
        """A usable link, and not ``but``: the oldest."""
        return next((link for link in self.links.usable() if link is not but), None)

    def find_link(self, gid: bytes, mac: bytes, qp_number: int) -> Link | None:
        """The link whose peer end is this one, also if it has just gone (3.5.2.2, 3.5.2.3)."""
        return self.links.find(gid, mac, qp_number)

    def usable_rnics(self) -> list[Rnic]:
        """This side's RNICs that links may use."""
        return self.host.companions(self.rnic)

    def delete_link(
        self, number: int, *, orderly: bool = True,
        reason: int = llc.DeleteLinkReason.OPERATOR,
    ) -> None:  # fmt: skip
        """Delete one link; a client asks its server to (RFC 7609, 3.5.5.1.3, 3.5.5.1.4).

        ``reason`` is a 32-bit reason code for the peer.  A group without links ends, and its
        connections with an error.
        """
        self.deletion.delete_link(number, reason, orderly=orderly)

    def rnic_available(self, rnic: Rnic) -> None:
        """An RNIC of the group's kind can carry links now (3.5.5.1.1, 3.5.5.1.2, C.8)."""
        used = any(link.rnic is rnic for link in self.links.usable())
        if self.machine.state in USABLE and (not used or self.deletion.links_to_go):
            self.seeking.seek()

    def rnic_unavailable(self, rnic: Rnic) -> None:
        """An operator takes the RNIC out: its links go in order (3.5.5.1.3)."""
        for link in [link for link in self.links.values() if link.rnic is rnic]:
            if self.any_active_link(but=link) is not None:
                # The path is what goes; the links that are left may be completed anew.
                self.delete_link(link.number, reason=llc.DeleteLinkReason.LOST_PATH)
            else:
                self.seeking.replace(link)

    def rnic_lost(self, rnic: Rnic) -> None:
        """The RNIC's port went down: so did its links."""
        for link in [link for link in self.links.values() if link.rnic is rnic]:
            link.machine.send("failed")

    def link_ready(self, link: Link) -> None:
        """A further link was confirmed."""
        self.mover.link_ready(link)
        self.idle_links.watch()
        self.machine.send("links_changed")

    def forget_link(self, link: Link) -> None:
        """Free what the link had, registrations first."""
        self.rkeys.forget_link(link.number)
        link.close()
        self.links.forget(link)

    def link_down(self, link: Link) -> None:
        """A link has failed; its connections have moved if they could."""
        if self.machine.state == "GONE" or self.adding.failed(link):
            return
        if self.machine.state == "FORMING":
            self.machine.send("links_lost")
            return
        self.forget_link(link)
        if self.links.for_llc() is None:
            self.machine.send("links_lost")
            return
        if self.machine.state in USABLE and not self.deletion.told_to_delete(link.number):
            # Before anything begins anew: a link offered on the same RNIC would be rejected.
            self.delete_link(link.number, orderly=False, reason=link.reason)
        self.exchanges.link_lost(link)
        self.deletion.link_lost(link)
        self.machine.send("links_changed")

    def remove_link(self, number: int) -> None:
        """Both sides agree that the link goes; unknown numbers are of links that have failed."""
        link = self.links.get(number)
        if link is None:
            return
        self.forget_link(link)
        if self.links.for_llc() is None:
            self.machine.send("links_lost")
            return
        self.exchanges.link_lost(link)
        self.deletion.link_lost(link)
        self.machine.send("links_changed")

    # --- connections -------------------------------------------------------------------------

    def new_token(self) -> int:
        """An alert token that names no connection and was not used lately (4 bytes, not 0)."""
        return self.members.new_token()

    def request_element(self, size: int, done: Callable[[Rmbe | None], None]) -> None:
        """Take an RMB element of ``size`` bytes; ``done(None)`` when none can be had.

        A new RMB is told to the peer first (RFC 7609, 3.5.5.2.1), so ``done`` may come later.
        """
        self.own_rmbs.request(size, done)

    def add_connection(self, token: int, connection: GroupConnection) -> None:
        """Route CDC messages with ``token`` to ``connection``."""
        self.connections[token] = connection
        self.life.stop_timer()

    def remove_connection(self, token: int, user: ElementUser) -> None:
        """Forget a closed connection; late messages for it are dropped and counted."""
        self.members.remove(token, user)
        if not self.connections and self.machine.state in USABLE:
            self.life.start_idle_timer()

    def place(self, connection: GroupConnection, link: Link) -> None:
        """From now on ``connection`` sends on ``link``; `Link.users` has it."""
        self.members.place(connection, link)

    def peer_element_on(self, connection: ElementUser, link: Link) -> tuple[int, int]:
        """Address and RKey of the connection's element at the peer on ``link``.

        Raises KeyError when the peer gave no RToken for it there.
        """
        return self.members.peer_element_on(connection, link)

    @property
    def test_interval(self) -> float:
        """Seconds after which an idle link is tested: one test serves all connections (4.5.3)."""
        return self.members.test_interval

    def keep_alive(self, user: ElementUser, seconds: float | None) -> None:
        """Test idle links this often while ``user`` is open; None: it asks for nothing."""
        self.members.keep_alive(user, seconds)

    def knows_rmb(self, link: Link, rkey: int, address: int) -> bool:
        """Whether the peer's RMB with this RToken on ``link`` was confirmed."""
        return self.peer_rmbs.find_named(link.number, RToken(rkey, address)) is not None

    # --- the group's life ----------------------------------------------------------------------

    def open_first_link(self) -> Link:
        """Make the first link, in INIT.  Raises RnicError."""
        link = Link(self, self.links.next_number(), self.rnic)
        self.rkeys.register_on(link)
        self.links[link.number] = link
        return link

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the group is formed or gone."""
        self.life.when_settled(callback)

    def on_llc_untrusted(self, link: Link, data: bytes) -> None:
        """One LLC message from the peer; what breaks the rules costs the link (C.7.1)."""
        try:
            dispatch_untrusted(self, link, data)
        except ProtocolError as error:
            LOGGER.warning("%r: protocol error: %s", link, error)
            self.setup.failure, self.setup.error = GroupFailure.PROTOCOL_ERROR, error
            link.reason = llc.DeleteLinkReason.PROTOCOL_VIOLATION
            link.machine.send("failed")

    @property
    def reply_timeout(self) -> float:
        """Seconds that we wait for an LLC message: longer at first contact, so that a write
        time-out and a Decline fit in (C.7)."""
        forming = self.machine.state == "FORMING"
        return self.config.first_contact_timeout if forming else self.config.llc_timeout

    def terminate(self, reason: llc.DeleteLinkReason = llc.DeleteLinkReason.PROGRAM) -> None:
        """End the group in order; its connections end with an error (RFC 7609, 3.5.4)."""
        self.life.reason = reason
        self.machine.send("terminate")
