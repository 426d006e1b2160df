"""The peers, links and connections of a capture, for ladder diagrams.

Theory of operation
-------------------
A ladder diagram has two vertical lines, one for each peer, and an arrow between them for each
message, in the order of time.  A captured frame contains only addresses and the number of the
receiver's queue pair.  `read_ladders` reads the messages in order, and notes what the peers learned
from them:

- an SMC Proposal starts a connection; Accept and Confirm contain both ends of its link, the alert
  tokens, and the RMB element of each side (RFC 7609, 3.5.1, 3.5.2);
- ADD LINK and its reply contain both ends of a new link, and CONFIRM LINK the link's number
  (3.5.1.6);
- CONFIRM RKEY and ADD LINK CONTINUATION contain the RTokens of RMBs on other links (3.5.5.2); in
  version 2 ADD LINK and its reply contain those of ADD LINK CONTINUATION.

With these notes, the queue pair of a frame identifies its link.  The link and the alert token
identify the connection of a CDC message.  The link, the RKey and the address identify the
connection of an RDMA write.  If the capture started after the messages above, some of this is
unknown.

The peer with the TCP clients is on the left, the peer with their servers on the right.  Two stacks
that connect to each other in both directions have two ladders.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from trio_smc.capture.dissection import End, Event, Seen, Write
from trio_smc.capture.frames import gid_address
from trio_smc.wire import cdc, clc, llc

__all__ = [
    "Connection",
    "Group",
    "Ladder",
    "Link",
    "Peer",
    "Rmb",
    "Row",
    "address_text",
    "read_ladders",
]


@dataclass(eq=False, slots=True)
class Peer:
    """One side of a ladder: its peer ID if that is known, and its addresses so far."""

    peer_id: bytes | None = None
    addresses: list[bytes] = field(default_factory=list)

    def add_address(self, address: bytes) -> None:
        """Note an address of the peer."""
        if address not in self.addresses:
            self.addresses.append(address)


@dataclass(eq=False, slots=True)
class Rmb:
    """A receive buffer (RMB).

    Attributes:
      addresses: the address of the RMB on each link.
      elements: the elements by their start in the RMB: their end, and their connection.
    """

    addresses: dict[Link, int] = field(default_factory=dict)
    elements: dict[int, tuple[int, Connection]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Link:
    """One link of a group."""

    group: Group
    number: int | None = None


@dataclass(eq=False, slots=True)
class Group:
    """A link group, with its links, alert tokens and RMBs.

    Attributes:
      tokens: connections by direction (True: to the server) and alert token.
      rmbs: RMBs by link, side (True: the server's) and RKey.
      confirmed: the RMB of the last CONFIRM RKEY, by side (True: the server's).
      added: ADD LINK messages without a reply so far, by link number.
    """

    client: Peer
    server: Peer
    links: list[Link] = field(default_factory=list)
    tokens: dict[tuple[bool, int], Connection] = field(default_factory=dict)
    rmbs: dict[tuple[Link, bool, int], Rmb] = field(default_factory=dict)
    confirmed: dict[bool, Rmb] = field(default_factory=dict)
    added: dict[int, llc.AddLink] = field(default_factory=dict)

    def link(self, number: int) -> Link | None:
        """The newest link with this number."""
        return next((each for each in reversed(self.links) if each.number == number), None)

    def rmb(self, link: Link, of_server: bool, rkey: int, address: int) -> Rmb:
        """The RMB with this RToken on ``link``.  An unknown RMB is created."""
        rmb = self.rmbs.get((link, of_server, rkey))
        if rmb is None or rmb.addresses[link] != address:
            rmb = Rmb()
            self.note_rtoken(rmb, link, of_server, rkey, address)
        return rmb

    def note_rtoken(self, rmb: Rmb, link: Link, of_server: bool, rkey: int, address: int) -> None:
        """Note the RToken of an RMB on ``link``."""
        rmb.addresses[link] = address
        self.rmbs[link, of_server, rkey] = rmb


@dataclass(eq=False, slots=True)
class Connection:
    """A TCP connection on which SMC-R was proposed.

    Attributes:
      number: the number of the connection, from 1, in the order of the Proposals.
    """

    number: int
    client: End
    server: End
    client_peer: Peer
    server_peer: Peer
    group: Group | None = None
    accept: clc.Accept | None = None


@dataclass(eq=False, slots=True)
class Row:
    """One message of a ladder.

    Attributes:
      time: nanoseconds since 1970.
      to_server: True if the client sent the message.
      link: the link; None for CLC messages, which TCP carries.
      connection: the connection; None if the message belongs to none, or if that is unknown.
      offset: the offset of an RDMA write in the RMB element; None if that is unknown.
    """

    time: int
    to_server: bool
    event: Event
    link: Link | None = None
    connection: Connection | None = None
    offset: int | None = None

    @property
    def link_number(self) -> int | None:
        """The number of the link, if known."""
        return None if self.link is None else self.link.number

    @property
    def group(self) -> Group | None:
        """The link group of the message.  Read it only after all messages were read, because a
        Proposal's group is known only after the Accept."""
        if self.link is not None:
            return self.link.group
        return None if self.connection is None else self.connection.group


@dataclass(eq=False, slots=True)
class Ladder:
    """All messages between a client's and a server's peer."""

    client: Peer
    server: Peer
    rows: list[Row] = field(default_factory=list)


def address_text(address: bytes) -> str:
    """An address in the usual text form."""
    return str(ipaddress.ip_address(address))


def read_ladders(seen: Iterable[Seen], connection: int | None = None) -> list[Ladder]:
    """The ladders of a capture, in the order of their first messages.

    Args:
      seen: the messages of the capture.
      connection: the number of a connection.  Then only the messages of this connection are
        included, and those messages of its link group that belong to no connection.
    """
    reader = _Reader()
    ladders: dict[tuple[int, int], Ladder] = {}
    for row in [reader.row(each) for each in seen]:
        if connection is not None and not _concerns(row, reader.connections, connection):
            continue
        group = row.group
        if group is not None:
            peers = group.client, group.server
        elif row.connection is not None:
            peers = row.connection.client_peer, row.connection.server_peer
        else:
            continue
        key = id(peers[0]), id(peers[1])
        ladders.setdefault(key, Ladder(*peers)).rows.append(row)
    return list(ladders.values())


def _concerns(row: Row, connections: list[Connection], number: int) -> bool:
    if row.connection is not None:
        return row.connection.number == number
    chosen = connections[number - 1] if 0 < number <= len(connections) else None
    return chosen is not None and row.group is not None and row.group is chosen.group


class _Reader:
    """Reads the messages of a capture in order.  `row` returns the row of one message."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self._by_ends: dict[frozenset[End], Connection] = {}
        self._peers: dict[bytes, Peer] = {}
        self._unnamed_peers: dict[End, Peer] = {}
        # The link of each queue pair (address and number), and True if it is the server's end.
        self._ends: dict[End, tuple[Link, bool]] = {}
        # For links that the capture does not introduce: one end has received a message, but the
        # other has not, so its queue pair is unknown.  By the addresses of the unknown end and of
        # the known end: the link, and True if the unknown end is the server's.
        self._half_known: dict[tuple[bytes, bytes], tuple[Link, bool]] = {}

    def row(self, seen: Seen) -> Row:
        """Read the next message."""
        return self._tcp_row(seen) if seen.tcp else self._link_row(seen)

    # --- CLC ---------------------------------------------------------------------------------

    def _tcp_row(self, seen: Seen) -> Row:
        key, event = frozenset((seen.source, seen.target)), seen.event
        connection = self._by_ends.get(key)
        if connection is None or isinstance(event, clc.Proposal):
            connection = self._by_ends[key] = self._new_connection(seen)
        to_server = seen.source == connection.client
        messages = clc.Proposal | clc.Accept | clc.Confirm | clc.Decline
        # In a Proposal for version 2 alone, Linux sends a peer ID of zeros.
        if isinstance(event, messages) and any(event.peer_id):
            peer = self._peers.setdefault(event.peer_id, Peer(event.peer_id))
            peer.add_address(seen.source.address)
            if to_server:
                connection.client_peer = peer
            else:
                connection.server_peer = peer
        if isinstance(event, clc.Accept):
            self._on_accept(connection, event)
        elif isinstance(event, clc.Confirm):
            self._on_confirm(connection, event)
        return Row(seen.time, to_server, event, connection=connection)

    def _new_connection(self, seen: Seen) -> Connection:
        # The first message usually comes from the client.  If the capture started during a
        # handshake, the first message may be an Accept, which comes from the server.
        from_server = isinstance(seen.event, clc.Accept)
        client, server = (seen.target, seen.source) if from_server else (seen.source, seen.target)
        peers = self._unnamed_peer(End(client.address, None)), self._unnamed_peer(server)
        connection = Connection(len(self.connections) + 1, client, server, *peers)
        self.connections.append(connection)
        return connection

    def _on_accept(self, connection: Connection, accept: clc.Accept) -> None:
        known = self._ends.get(End(gid_address(accept.gid), accept.qp_number))
        if known is not None and not accept.first_contact:
            connection.group = known[0].group
        else:
            connection.group = Group(connection.client_peer, connection.server_peer)
        connection.accept = accept

    def _on_confirm(self, connection: Connection, confirm: clc.Confirm) -> None:
        group, accept = connection.group, connection.accept
        if group is None or accept is None:
            return
        group.client = connection.client_peer
        server_end = End(gid_address(accept.gid), accept.qp_number)
        known = self._ends.get(server_end)
        if known is None or known[0].group is not group:
            self._new_link(
                group, End(gid_address(confirm.gid), confirm.qp_number), server_end, None
            )
        for of_server, credentials in ((True, accept), (False, confirm)):
            # Each message names the sender's end of any active link, so the links may differ.
            link, _ = self._ends.get(
                End(gid_address(credentials.gid), credentials.qp_number), self._ends[server_end]
            )
            group.tokens[of_server, credentials.alert_token] = connection
            rmb = group.rmb(link, of_server, credentials.rkey, credentials.rmb_address)
            begin = (credentials.rmbe_index - 1) * credentials.buffer_size
            rmb.elements[begin] = begin + credentials.buffer_size, connection

    # --- LLC, CDC and writes -------------------------------------------------------------------

    def _link_row(self, seen: Seen) -> Row:
        link, to_server = self._ends.get(seen.target) or self._unknown_link(seen)
        row = Row(seen.time, to_server, seen.event, link)
        group, event = link.group, seen.event
        if isinstance(event, cdc.CdcMessage):
            row.connection = group.tokens.get((to_server, event.alert_token))
        elif isinstance(event, Write):
            self._find_element(row, group, link, event)
        else:
            self._learn_links(group, link, event, to_server)
            _learn_rtokens(group, link, event, of_server=not to_server)
        return row

    def _find_element(self, row: Row, group: Group, link: Link, write: Write) -> None:
        rmb = group.rmbs.get((link, row.to_server, write.rkey))
        if rmb is None:
            return
        offset = write.address - rmb.addresses[link]
        for begin, (end, connection) in rmb.elements.items():
            if begin <= offset < end:
                row.connection, row.offset = connection, offset - begin

    def _learn_links(self, group: Group, link: Link, event: Event, to_server: bool) -> None:
        match event:
            case llc.ConfirmLink():
                link.number = event.link_number
            case llc.AddLink(reply=False) if not to_server:
                group.added[event.link_number] = event
            case llc.AddLink(reply=True, rejected=False) if to_server:
                request = group.added.pop(event.link_number, None)
                if request is not None:
                    client = End(gid_address(event.gid), event.qp_number)
                    server = End(gid_address(request.gid), request.qp_number)
                    self._new_link(group, client, server, event.link_number)
                    for message in (request, event):
                        if message.extension is not None:
                            pairs, of_server = message.extension.pairs, not message.reply
                            _learn_pairs(group, link, event.link_number, pairs, of_server=of_server)

    def _new_link(self, group: Group, client: End, server: End, number: int | None) -> None:
        link = Link(group, number)
        group.links.append(link)
        self._ends[client] = link, False
        self._ends[server] = link, True
        group.client.add_address(client.address)
        group.server.add_address(server.address)

    def _unknown_link(self, seen: Seen) -> tuple[Link, bool]:
        """The link and the direction of a message, if the capture does not introduce the link."""
        source, target = seen.source.address, seen.target.address
        half = self._half_known.pop((target, source), None)
        if half is None:
            # Only servers send requests to confirm or add links.  For all other messages the
            # first sender is shown as the client.
            from_server = isinstance(seen.event, llc.ConfirmLink | llc.AddLink) and (
                not seen.event.reply
            )
            one, other = self._unnamed_peer(End(source, None)), self._unnamed_peer(seen.target)
            peers = (other, one) if from_server else (one, other)
            group = Group(*peers)
            link = Link(group)
            group.links.append(link)
            half = link, not from_server
            self._half_known[source, target] = link, from_server
        self._ends[seen.target] = half
        return half

    def _unnamed_peer(self, end: End) -> Peer:
        peer = self._unnamed_peers.setdefault(end, Peer())
        peer.add_address(end.address)
        return peer


def _learn_rtokens(group: Group, link: Link, event: Event, *, of_server: bool) -> None:
    """Note the RTokens in a message.  ``of_server``: True if the server's RMBs have them."""
    match event:
        case llc.AddLinkContinuation():
            _learn_pairs(group, link, event.link_number, event.pairs, of_server=of_server)
        case llc.ConfirmRkey(reply=False):
            rmb = group.rmb(link, of_server, event.rkey, event.address)
            group.confirmed[of_server] = rmb
            _note_on_other_links(group, rmb, of_server, event.others)
        case llc.ConfirmRkeyContinuation(reply=False) if of_server in group.confirmed:
            _note_on_other_links(group, group.confirmed[of_server], of_server, event.others)
        case llc.DeleteRkey(reply=False):
            for rkey in event.rkeys:
                group.rmbs.pop((link, of_server, rkey), None)


def _learn_pairs(
    group: Group, carrier: Link, number: int, pairs: Iterable[llc.RTokenPair], *, of_server: bool
) -> None:
    new = group.link(number)
    for pair in pairs:
        rmb = group.rmbs.get((carrier, of_server, pair.reference_rkey))
        if rmb is not None and new is not None:
            group.note_rtoken(rmb, new, of_server, pair.new_rkey, pair.new_address)


def _note_on_other_links(
    group: Group, rmb: Rmb, of_server: bool, others: Iterable[llc.LinkRToken]
) -> None:
    for token in others:
        link = group.link(token.link_number)
        if link is not None:
            group.note_rtoken(rmb, link, of_server, token.rkey, token.address)
