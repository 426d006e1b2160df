"""Rules for both sides of a link group when no message is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.rendezvous.links.link_group_world import GroupWorld, Stream
from trio_smc.rendezvous.links.group import LinkGroup
from trio_smc.rendezvous.links.link import Link
from trio_smc.rnic.verbs import QpState
from trio_smc.wire.cdc import CDC_TYPE

__all__ = ["check_agreement", "is_sound", "kind_of", "known", "partners", "registered"]


def kind_of(group: LinkGroup) -> str:
    """ "single", "asymmetric" or "symmetric"."""
    return str(group.links.kind)


def is_sound(world: GroupWorld) -> bool:
    """True if there are groups, and all are symmetric, with working links and no exchange.

    A link on a drained RNIC will be deleted, so it does not count as one that is left.
    """
    groups = [group for side in world.sides for group in side.groups]
    if not groups or any(kind_of(group) != "symmetric" for group in groups):
        return False
    if any(group.exchanges.state != "IDLE" or group.deletion.requests.pending for group in groups):
        return False
    for side in world.sides:
        drained = side.stack.rnic_set.is_drained
        if any(drained(link.rnic) for group in side.groups for link in group.links.values()):
            return False
    ours = {_ends(group) for group in groups if group.client}
    if ours != {_ends(group) for group in groups if not group.client}:
        return False
    for qp in world.queue_pairs():
        peer = qp.peer()
        if peer is None or qp.state is not QpState.RTS or not qp.reaches(peer):
            return False
        if any(work.message is not None and work.message[0] != CDC_TYPE for work in qp.work):
            return False
    return not any(
        done.status or (done.data is not None and done.data[0] != CDC_TYPE)
        for side in world.sides
        for rnic in side.rnics
        for done in rnic.done
    )


def partners(world: GroupWorld) -> list[tuple[LinkGroup, LinkGroup]]:
    """The two sides of each link group, the client's first.

    Raises AssertionError if only one side has a group.
    """
    groups = [group for side in world.sides for group in side.groups]
    halves = {_ends(group): group for group in groups if not group.client}
    pairs = []
    for group in groups:
        if group.client:
            other = halves.pop(_ends(group), None)
            if other is None:
                theirs = [_links(each) for each in groups if not each.client]
                raise AssertionError(f"the client has links {_links(group)}, the server {theirs}")
            pairs.append((group, other))
    assert not halves, f"only the server has links {[_links(each) for each in halves.values()]}"
    return pairs


def _ends(group: LinkGroup) -> frozenset[tuple[int, int, int]]:
    """Number and queue pairs of each link, the client's queue pair first."""
    found = []
    for link in group.links.values():
        assert link.peer is not None, f"{link!r} has no peer"
        pair = (link.qp.qp_num, link.peer.qp_number)
        found.append((link.number, *(pair if group.client else pair[::-1])))
    return frozenset(found)


def _links(group: LinkGroup) -> list[str]:
    return [
        f"{link!r} {link.qp.qp_num:#x}-{link.peer.qp_number if link.peer else 0:#x}"
        for link in group.links.values()
    ]


def check_agreement(world: GroupWorld) -> None:
    """Raise AssertionError unless both sides have the same links, RTokens and connections."""
    pairs = partners(world)
    for pair in pairs:
        for group in pair:
            _check_links(group)
        kinds = [kind_of(group) for group in pair]
        assert kinds[0] == kinds[1], f"the client's group is {kinds[0]}, the server's {kinds[1]}"
        for group, other in (pair, pair[::-1]):
            ours, theirs = registered(group), known(other)
            assert ours == theirs, (
                f"{group!r} has registered {sorted(map(sorted, ours - theirs))}, unknown to the"
                f" peer; the peer knows {sorted(map(sorted, theirs - ours))}, not registered"
            )
    for stream in world.streams:
        _check_stream(stream, pairs)
    _check_held(world)


def _check_links(group: LinkGroup) -> None:
    assert group.state in ("SINGLE", "ASYMMETRIC", "SYMMETRIC"), group
    assert group.exchanges.state == "IDLE", f"{group!r} is in {group.exchanges.state}"
    for number, link in group.links.items():
        assert number == link.number
        assert link.state in ("ACTIVE", "TESTING"), link
        assert link.qp.state is QpState.RTS, link


def registered(group: LinkGroup) -> set[frozenset[tuple[int, int, int]]]:
    """The RTokens (link number, RKey, address) of each own RMB."""
    return {
        frozenset((number, *token) for number, token in group.own_rmbs.tokens(rmb).items())
        for rmb in group.own_rmbs
    }


def known(group: LinkGroup) -> set[frozenset[tuple[int, int, int]]]:
    """The RTokens of each RMB of the peer."""
    return {
        frozenset((number, token.rkey, token.address) for number, token in rmb.tokens.items())
        for rmb in group.peer_rmbs
    }


def _check_stream(stream: Stream, pairs: Sequence[tuple[LinkGroup, LinkGroup]]) -> None:
    alive = [stream.alive(0), stream.alive(1)]
    if not any(alive) or any(stream.closed):
        return
    assert alive == [True, True], f"only one end is usable: {alive}"
    ends = [stream.connection(0), stream.connection(1)]
    for place, mine in enumerate(ends):
        other = ends[1 - place]
        assert mine is not None
        assert other is not None
        link: Any = mine.channel
        assert isinstance(link, Link), f"{mine!r} sends on {link!r}"
        assert link.state in ("ACTIVE", "TESTING"), f"{mine!r} sends on {link!r}"
        pair = next(pair for pair in pairs if pair[place] is link.group)
        region = pair[1 - place].own_rmbs.tokens(other.rmbe.rmb)[link.number]
        writes_to = (mine.sender.address - mine.messenger.peer_first, mine.messenger.rkey)
        right = (region.address + other.rmbe.offset, region.rkey)
        assert writes_to == right, f"{mine!r} writes to {writes_to}, not {right}"


def _check_held(world: GroupWorld) -> None:
    """Check that no resource is open that neither a group nor a connection uses."""
    groups = [group for side in world.sides for group in side.groups]
    links = sum(len(group.links) for group in groups)
    rmbs = [group.own_rmbs.tokens(rmb) for group in groups for rmb in group.own_rmbs]
    expected = {
        "memory": len(rmbs), "pd": links, "region": sum(map(len, rmbs)), "qp": links,
    }  # fmt: skip
    assert world.fabric.held == expected, f"open: {world.fabric.held}, in use: {expected}"
