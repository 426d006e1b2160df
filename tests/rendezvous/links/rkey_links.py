"""Further links for a group of two stacks, without ADD LINK, so that a test chooses the numbers."""

from __future__ import annotations

from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.links.link import Link, PeerQueuePair
from trio_smc.wire import llc

__all__ = ["add_link", "exchange_rtokens", "knows_all_rmbs", "seen_by_peer"]


def seen_by_peer(link: Link) -> PeerQueuePair:
    """The data of this end of a link that the other end receives."""
    rnic = link.rnic
    return PeerQueuePair(
        gid=rnic.gid, mac=rnic.mac, qp_number=link.qp.qp_num, mtu=rnic.mtu, psn=link.psn
    )


def add_link(
    client: LinkGroup, server: LinkGroup, number: int, *, old: int = 1
) -> tuple[Link, Link]:
    """Add a link that is ACTIVE at both ends, and exchange its RKeys over link ``old``."""
    ends = []
    for group in (client, server):
        link = Link(group, number, group.rnic)
        group.rkeys.register_on(link)
        ends.append(link)
    mine, other = ends
    mine.connect(seen_by_peer(other))
    other.connect(seen_by_peer(mine))
    mine.ready_to_send()
    exchange_rtokens(client, server, old=old, ends=(mine, other))
    for group, link in zip((client, server), ends, strict=True):
        group.links[number] = link
        link.machine.send("confirmed")
    return mine, other


def exchange_rtokens(
    client: LinkGroup, server: LinkGroup, *, old: int, ends: tuple[Link, Link]
) -> int:
    """Exchange ADD LINK CONTINUATION, the server first, until both counts are 0 (A.3.3).

    Returns the number of messages of each side.
    """
    sides = [(server, client, ends[1], ends[0]), (client, server, ends[0], ends[1])]
    left = [group.rkeys.pairs_for(group.links[old], link) for group, _, link, _ in sides]
    rounds = 0
    while True:
        rounds += 1
        for place, (group, peer, link, peer_link) in enumerate(sides):
            message = llc.AddLinkContinuation(
                link_number=link.number, tokens_left=len(left[place]), pairs=tuple(left[place][:2])
            )
            left[place] = left[place][2:]
            read = llc.decode_untrusted(message.encode())
            assert isinstance(read, llc.AddLinkContinuation)
            peer.rkeys.learn_pairs_untrusted(peer.links[old], peer_link, read.pairs)
            assert group.links[old].number == old
        if not any(left):
            return rounds


def knows_all_rmbs(group: LinkGroup, peer: LinkGroup) -> bool:
    """True if ``peer`` knows exactly the RMBs of ``group``, with the same RTokens."""
    own = [group.own_rmbs.tokens(rmb) for rmb in group.own_rmbs.known_to_peer()]
    assert all(set(tokens) == set(group.links) for tokens in own)
    known = []
    for tokens in own:
        rmbs = {peer.peer_rmbs.find(number, token.rkey) for number, token in tokens.items()}
        if len(rmbs) != 1 or None in rmbs:
            return False
        (rmb,) = rmbs
        assert rmb is not None
        if rmb.tokens != tokens:
            return False
        known.append(rmb)
    return len(peer.peer_rmbs) == len(set(known)) == len(own)
