"""Links that have just ended: SMC Accept and Confirm may still name them (RFC 7609, 3.5.2)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trio_smc._base.errors import ProtocolError
from trio_smc.rendezvous.links.group import GroupConnections
from trio_smc.rendezvous.links.link_set import GONE_LINKS, Links
from trio_smc.rendezvous.links.peer_rmbs import PeerRmbs, RToken

A, B = RToken(0x11, 0x1000), RToken(0x22, 0x2000)


def link(number: int, *, confirmed: bool = True) -> Any:
    peer = SimpleNamespace(gid=bytes(16), mac=bytes(6), qp_number=100 + number)
    state = "ACTIVE" if confirmed else "CONFIRMING"
    return SimpleNamespace(
        number=number, peer=peer, state=state, confirmed=confirmed, usable=confirmed, load=0,
        users={},
    )  # fmt: skip


def find(links: Links, number: int) -> Any:
    return links.find(bytes(16), bytes(6), 100 + number)


def test_a_link_is_found_after_its_end() -> None:
    links = Links()
    one = links[1] = link(1)
    links[2] = link(2, confirmed=False)
    assert find(links, 1) is one
    assert find(links, 2) is None
    links.remove(one)
    assert 1 not in links
    assert find(links, 1) is one


def test_the_oldest_gone_link_is_forgotten() -> None:
    links = Links()
    for number in range(1, GONE_LINKS + 2):
        links[number] = link(number)
        links.remove(links[number])
    assert find(links, 1) is None
    assert find(links, 2) is not None


def test_links_without_a_peer_displace_no_other_link() -> None:
    """If a client has no further RNIC, it rejects each offered link, which never gets a peer."""
    links = Links()
    one = links[1] = link(1)
    links.remove(one)
    for number in range(2, GONE_LINKS + 2):
        links[number] = offered = link(number)
        offered.peer = None
        links.remove(offered)
        assert number not in links
    assert find(links, 1) is one


def test_a_link_that_was_replaced_is_not_forgotten_twice() -> None:
    links = Links()
    old, new = link(1), link(1)
    links[1] = new
    links.remove(old)
    assert links[1] is new


def test_rtokens_of_a_gone_link_still_name_their_rmb() -> None:
    rmbs = PeerRmbs()
    rmb = rmbs.learn_untrusted({1: A, 2: B})
    rmbs.drop_link(1)
    assert rmbs.find(1, A.rkey) is None
    assert rmb.tokens == {2: B}
    assert rmbs.find_named(1, A) is rmb
    assert rmbs.find_named(1, RToken(A.rkey, 0x9000)) is None
    assert rmbs.find_named(2, B) is rmb
    assert rmbs.find_named(2, RToken(B.rkey, 0x9000)) is None
    rmbs.remove(rmb)
    assert rmbs.find_named(1, A) is None


def test_rtokens_are_not_remembered_for_ever() -> None:
    rmbs = PeerRmbs()
    rmb = rmbs.learn_untrusted({200: B, 1: A})
    rmbs.drop_link(1)
    for number in range(2, GONE_LINKS + 1):
        rmbs.drop_link(number)
    assert rmbs.find_named(1, A) is rmb
    rmbs.drop_link(GONE_LINKS + 1)
    assert rmbs.find_named(1, A) is None


def test_an_rmb_without_any_link_is_gone() -> None:
    rmbs = PeerRmbs()
    rmbs.learn_untrusted({1: A})
    rmbs.drop_link(1)
    assert rmbs.find_named(1, A) is None
    rmbs.learn_untrusted({1: A, 2: B})
    with pytest.raises(ProtocolError):
        rmbs.learn_untrusted({1: RToken(A.rkey, 0x9000)})


def test_an_unknown_rmb_is_not_learned_on_a_removed_link() -> None:
    gone = link(1)
    group: Any = SimpleNamespace(peer_rmbs=PeerRmbs(), links=Links())
    connections = GroupConnections(group, lambda: None)
    user: Any = object()
    peer: Any = SimpleNamespace(rkey=A.rkey, rmb_address=A.address, rmbe_index=1, buffer_size=16384)
    with pytest.raises(ProtocolError, match="gone"):
        connections.attach_untrusted(user, peer, gone)
    assert not len(group.peer_rmbs)
    group.links[1] = gone
    assert connections.attach_untrusted(user, peer, gone) == (gone, A.address, A.rkey)
    assert len(group.peer_rmbs) == 1
