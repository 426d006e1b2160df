"""RKeys of groups with several links: CONFIRM RKEY and its CONTINUATION, the RToken pairs of ADD
LINK, replies to DELETE RKEY, and invalid messages (RFC 7609, 3.5.5.2, A.3.5-A.3.7, C.7.1)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rendezvous.links.rkey_links import add_link, exchange_rtokens, knows_all_rmbs
from tests.rendezvous.rendezvous_pair import SIZE, Call, Side, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath import rmb as rmb_module
from trio_smc.datapath.rmb import MAX_RMBS, Rmbe
from trio_smc.rendezvous.links import own_rmbs
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.links.peer_rmbs import PeerRmbs, RToken
from trio_smc.rendezvous.links.rkeys import confirm_rkey_messages
from trio_smc.wire import llc

BIG = 4 * SIZE
"""Bytes of an element that fills an RMB."""
SMALL = 1 << 14


def all_messages(side: Side) -> list[Any]:
    return messages(side, object)


def with_links(world: World, count: int, **sides: Any) -> tuple[Side, Side, Call]:
    """Make two sides with a connection and ``count`` links."""
    client, server = world.side(**sides), world.side(**sides)
    call = world.connect(client, server)
    for number in range(2, count + 1):
        add_link(client.group, server.group, number)
    return client, server, call


def elements(side: Side, count: int, size: int = BIG) -> list[Rmbe | None]:
    """Request ``count`` elements at once.  `World.settle` puts them into the returned list."""
    done: list[Rmbe | None] = []
    for _ in range(count):
        side.group.request_element(size, done.append)
    return done


# --- the messages -----------------------------------------------------------------------------


@pytest.mark.rfc("A.3.5/6", "A.3.6/1")
@pytest.mark.parametrize("links", range(1, 9))
def test_a_continuation_follows_exactly_when_two_slots_are_not_enough(links: int) -> None:
    """NumTkns does not count the link that carries the message; the first CONTINUATION counts down
    from NumTkns - 2."""
    tokens = {number: RToken(number << 8, number << 32) for number in range(1, links + 1)}
    first, *more = confirm_rkey_messages(tokens, 1)
    assert isinstance(first, llc.ConfirmRkey)
    assert (first.other_tokens, first.rkey, first.address) == (links - 1, 0x100, 1 << 32)
    assert bool(more) is (first.other_tokens > 2)
    counts = [each.tokens_left for each in more if isinstance(each, llc.ConfirmRkeyContinuation)]
    assert counts == [[], [], [], [1], [2], [3], [4, 1], [5, 2]][links - 1]


@pytest.mark.rfc("A.3.5/1")
@given(
    st.dictionaries(
        st.integers(1, 255),
        st.builds(RToken, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)),
        min_size=1,
    ),
    st.data(),
)
def test_every_set_of_links_arrives_complete(
    tokens: dict[int, RToken], data: st.DataObject
) -> None:
    number = data.draw(st.sampled_from(sorted(tokens)))
    got = {}
    for message in confirm_rkey_messages(tokens, number):
        read = llc.decode_untrusted(message.encode())
        assert isinstance(read, llc.ConfirmRkey | llc.ConfirmRkeyContinuation)
        if isinstance(read, llc.ConfirmRkey):
            got[number] = RToken(read.rkey, read.address)
        for other in read.others:
            assert other.link_number not in got
            got[other.link_number] = RToken(other.rkey, other.address)
    assert got == tokens


# --- the peer's RMBs ----------------------------------------------------------------------------


def test_a_refused_set_of_tokens_leaves_nothing_behind() -> None:
    peer = PeerRmbs()
    one = peer.learn_untrusted({1: RToken(1, 1), 2: RToken(2, 1)})
    two = peer.learn_untrusted({1: RToken(3, 3)})
    with pytest.raises(ProtocolError, match="announced as those of one"):
        peer.learn_untrusted({1: RToken(3, 3), 2: RToken(2, 1), 3: RToken(9, 9)})
    with pytest.raises(ProtocolError, match="changed"):
        peer.learn_untrusted({3: RToken(9, 9), 1: RToken(3, 4)})
    with pytest.raises(ProtocolError, match="one RKey"):
        peer.add_token_untrusted(two, 2, RToken(2, 7))
    assert peer.find(3, 9) is None
    assert (one.tokens, two.tokens) == ({1: RToken(1, 1), 2: RToken(2, 1)}, {1: RToken(3, 3)})
    assert peer.learn_untrusted({1: RToken(3, 3), 2: RToken(4, 4)}) is two  # one more link
    assert len(peer) == 2


def test_the_end_of_a_link_removes_its_tokens() -> None:
    peer = PeerRmbs()
    both = peer.learn_untrusted({1: RToken(1, 1), 2: RToken(2, 1)})
    peer.learn_untrusted({2: RToken(5, 5)})
    both.elements[1] = user = _User()
    assert peer.covers(1)
    assert not peer.covers(1, unused=True)  # no connection writes into the second RMB
    peer.drop_link(2)
    assert (len(peer), peer.find(2, 2), peer.find(2, 5)) == (1, None, None)
    assert peer.find(1, 1) is both
    assert not peer.covers(2)
    assert both.elements == {1: user}
    peer.learn_untrusted({2: RToken(5, 6)})  # a new link with that number has new tokens


class _User:
    def rmbe_conflict(self) -> bool:
        raise AssertionError("the element was not taken")


# --- CONFIRM RKEY -------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.5.2/1", "3.5.5.2.1/1", "A.3.5/1", "A.3.5/2", "A.3.6/2")
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("links", [1, 2, 3, 4, 6, 8])
def test_a_new_rmb_is_announced_on_all_links(end: int, links: int) -> None:
    """Figure 12: the peer echoes each message (A.3.5, A.3.6)."""
    with World() as world:
        client, server, _ = with_links(world, links)
        side, peer = (client, server) if end == 0 else (server, client)
        side.record()
        done = elements(side, 1)
        world.settle()
        more = -(-max(0, links - 3) // 3)
        out = ["out CONFIRM_RKEY", *["out CONFIRM_RKEY_CONTINUATION"] * more]
        back = ["in CONFIRM_RKEY reply", *["in CONFIRM_RKEY_CONTINUATION reply"] * more]
        assert sorted(transcript(side)) == sorted(out + back)
        assert transcript(side)[0] == out[0]
        assert not any(each.negative for each in all_messages(side))
        assert knows_all_rmbs(side.group, peer.group)
        assert knows_all_rmbs(peer.group, side.group)
        (rmb,) = side.group.own_rmbs.pool.rmbs[1:]
        assert len(side.group.own_rmbs.tokens(rmb)) == links
        assert [each is not None and each.rmb for each in done] == [rmb]


@pytest.mark.rfc("3.5.5.2.1/2", "3.5.5.2.1/3")
def test_a_connection_waits_until_the_peer_knows_its_rmb_on_all_links() -> None:
    """3.5.5.2.1: the echo of the last CONTINUATION counts, not that of CONFIRM RKEY."""
    with World() as world:
        client, server, _ = with_links(world, 5)
        held: list[tuple[PlainQueuePair, bytes]] = []

        def hold(qp: PlainQueuePair, message: bytes) -> list[bytes]:
            last = message[0] == llc.MessageType.CONFIRM_RKEY_CONTINUATION and message[3] & 0x80
            if last and qp.rnic is client.rnic:
                held.append((qp, message))
                return []
            return [message]

        world.fabric.tamper = hold
        call = world.call(client, server, size=BIG)
        world.settle()
        assert call.server.state == "PREPARING"
        assert len(held) == 1
        world.fabric.tamper = None
        held[0][0].post_send(0, held[0][1])
        world.settle()
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("A.3.5/3", "A.3.5/4", "3.5.5.3.1/5")
@pytest.mark.parametrize("end", [0, 1])
def test_links_that_change_meanwhile_are_in_the_second_try(end: int) -> None:
    """3.5.5.3.1: after a negative reply with the C bit, the side computes the RKey set again."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        side, peer = (client, server) if end == 0 else (server, client)
        peer.group.exchanges.begin("add_link", peer.group.links[1])
        done = elements(side, 1)
        side.record()
        world.settle()
        (reply,) = [each for each in all_messages(side) if each.reply]
        assert (reply.negative, reply.retry) == (True, True)
        assert done == []
        add_link(client.group, server.group, 3)
        peer.group.exchanges.machine.send("refused")
        side.record()
        world.pass_time(1.0)
        assert [each.other_tokens for each in all_messages(side)] == [2, 2]
        assert len(done) == 1
        assert knows_all_rmbs(side.group, peer.group)


@pytest.mark.rfc("A.3.5/5")
@pytest.mark.parametrize("end", [0, 1])
def test_a_negative_reply_without_retry_waits_for_the_next_occasion(end: int) -> None:
    """A.3.5: the peer had no room for another RMB.  The next connection that needs an RMB tries
    again."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        side, peer = (client, server) if end == 0 else (server, client)
        for number in range(MAX_RMBS - 1):
            peer.group.peer_rmbs.learn_untrusted({1: RToken(number, 0)})
        done = elements(side, 1)
        side.record()
        world.pass_time(20.0)
        replies = messages(side, llc.ConfirmRkey)
        assert [(each.reply, each.negative, each.retry) for each in replies] == [
            (True, True, False)
        ]
        assert done == [None]
        known = peer.group.peer_rmbs.find(1, 0)
        assert known is not None
        peer.group.peer_rmbs.remove(known)
        done = elements(side, 1)
        world.settle()
        assert done[0] is not None


def test_a_continuation_that_runs_into_a_change_is_tried_again() -> None:
    """CONTINUATION has no C bit, so the side repeats the exchange after any negative reply."""
    with World() as world:
        client, server, _ = with_links(world, 4)
        done = elements(client, 1)
        client.record()
        world.until(lambda: server.group.rkeys.awaits_continuation)
        server.group.exchanges.begin("add_link", server.group.links[1])
        world.settle()
        assert [each.negative for each in all_messages(client) if each.reply] == [False, True]
        assert not server.group.rkeys.awaits_continuation
        assert len(server.group.peer_rmbs) == 1
        server.group.exchanges.machine.send("refused")
        world.pass_time(1.0)
        assert done[0] is not None
        assert knows_all_rmbs(client.group, server.group)


def test_a_peer_that_is_always_changing_gets_no_endless_requests() -> None:
    with World() as world:
        client, server, _ = with_links(world, 1)
        server.group.exchanges.begin("add_link", server.group.links[1])
        server.group.exchanges.stop_reply_timer()
        done = elements(client, 1)
        client.record()
        world.pass_time(30.0)
        assert transcript(client).count("in CONFIRM_RKEY reply") == 4
        assert done == [None]
        assert len(client.group.own_rmbs) == 1


def test_each_try_waits_longer_than_the_one_before() -> None:
    """A change of links may take long, so requests become rarer."""
    with World() as world:
        client, server, _ = with_links(world, 1)
        server.group.exchanges.begin("add_link", server.group.links[1])
        server.group.exchanges.stop_reply_timer()
        tries: list[float] = []

        def note(qp: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == llc.MessageType.CONFIRM_RKEY and qp.rnic is client.rnic:
                tries.append(world.clock.now)
            return [message]

        world.fabric.tamper = note
        elements(client, 1)
        world.pass_time(30.0)
        first, second, third = (after - before for before, after in itertools.pairwise(tries))
        assert 0 < first < second < third


def test_a_link_added_while_the_reply_was_in_flight_is_announced() -> None:
    """The reply is on its way over link 1 while the sides add a link over link 2."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        done = elements(client, 1)
        world.until(lambda: len(server.group.peer_rmbs) == 2)
        add_link(client.group, server.group, 3, old=2)
        assert not knows_all_rmbs(client.group, server.group)
        world.settle()
        assert len(done) == 1
        assert knows_all_rmbs(client.group, server.group)


@pytest.mark.rfc("C.7.1/time-outs/16", "C.7.1/time-outs/17")
@pytest.mark.parametrize("end", [0, 1])
def test_a_confirm_rkey_without_reply_fails_its_link_and_begins_again(end: int) -> None:
    """C.7.1, 2.3: the link of the request fails, and the waiting connection continues."""
    with World(announces_end=False) as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        side, peer = (client, server) if end == 0 else (server, client)
        assert len(side.group.links) == 2
        done = elements(side, 1)
        link = side.group.rkey_exchanges.carrier
        assert link is not None
        world.fabric.tamper = lambda qp, m: (
            [] if qp is link.qp and m[0] == llc.MessageType.CONFIRM_RKEY else [m]
        )
        world.pass_time(1.9)
        assert (done, link.state) == ([], "ACTIVE")
        world.pass_time(0.2)
        assert link.state == "DOWN"
        world.pass_time(5.0)
        assert done[0] is not None
        assert link.number not in peer.group.links
        assert knows_all_rmbs(side.group, peer.group)


@pytest.mark.rfc("C.7.1/messages/8")
def test_a_link_without_an_rkey_has_failed() -> None:
    """C.7.1: the receiver treats each link without an RKey as a failed one."""
    with World(announces_end=False) as world:
        client, server, _ = with_links(world, 2)
        link = client.group.links[1]
        link.send_llc(llc.ConfirmRkey(other_tokens=0, rkey=0x77, address=0x88))
        # The test sent the message directly, so the reply does not matter.
        world.fabric.tamper = lambda qp, m: [m] if qp.rnic is client.rnic else []
        failed = server.group.links[2]
        world.until(lambda: failed.state == "DOWN")
        assert server.group.links[1].state == "ACTIVE"
        assert server.group.peer_rmbs.find(1, 0x77) is not None


def confirm(count: int, *numbers: int) -> llc.ConfirmRkey:
    """CONFIRM RKEY that announces ``count`` other links, and contains those with ``numbers``."""
    return llc.ConfirmRkey(other_tokens=count, rkey=0x99, address=1, others=tokens(*numbers))


def more(count: int, *numbers: int) -> llc.ConfirmRkeyContinuation:
    return llc.ConfirmRkeyContinuation(tokens_left=count, others=tokens(*numbers))


def tokens(*numbers: int) -> tuple[llc.LinkRToken, ...]:
    return tuple(llc.LinkRToken(link_number=each, rkey=0x99, address=1) for each in numbers)


@pytest.mark.parametrize(
    "received",
    [
        [more(0)],
        [more(1, 2)],
        [confirm(3, 2, 3), confirm(3, 2, 3)],
        [confirm(4, 2, 3), more(1, 4)],
        [confirm(3, 2, 3), more(2, 4, 5)],
        [confirm(3, 2, 3), more(0)],
        [confirm(3, 2, 3), more(1, 2)],
        [confirm(3, 2, 3), more(1, 1)],
        [confirm(3, 2, 3), more(1, 4), more(1, 5)],
        [confirm(2, 2, 2)],
        [confirm(1, 1)],
    ],
    ids=lambda received: " ".join(str(tuple(each.encode()[:5]))[1:-1] for each in received),
)
@pytest.mark.parametrize("end", [0, 1])
def test_parts_that_do_not_fit_together_cost_the_link(end: int, received: list[Any]) -> None:
    """C.7.1, out of sync: the receiver discards all parts of such messages."""
    with World() as world:
        client, server, _ = with_links(world, 5)
        side = (client, server)[end]
        link = side.group.links[1]
        for message in received[:-1]:
            side.group.on_llc_untrusted(link, message.encode())
        assert link.state == "ACTIVE"
        with pytest.raises(ProtocolError):
            side.group.rkey_exchanges.on_request_untrusted(link, received[-1])
        side.group.on_llc_untrusted(link, received[-1].encode())
        assert link.state == "DOWN"
        side.group.rkeys.drop_link(1)
        assert not side.group.rkeys.awaits_continuation


def test_a_continuation_on_another_link_is_out_of_order() -> None:
    with World() as world:
        _, server, _ = with_links(world, 4)
        group = server.group
        group.on_llc_untrusted(group.links[1], confirm(3, 2, 3).encode())
        group.on_llc_untrusted(group.links[2], more(1, 4).encode())
        assert [group.links[number].state for number in (1, 3)] == ["ACTIVE", "ACTIVE"]
        assert 2 not in group.links or group.links[2].state == "DOWN"


def test_a_peer_that_waits_for_each_echo_may_stop_after_a_negative_one() -> None:
    with World() as world:
        _, server, _ = with_links(world, 4)
        group, link = server.group, server.group.links[1]
        group.exchanges.begin("add_link", link)
        group.on_llc_untrusted(link, confirm(3, 2, 3).encode())
        group.exchanges.machine.send("refused")
        server.record()
        group.on_llc_untrusted(link, confirm(3, 2, 3).encode())
        group.on_llc_untrusted(link, more(1, 4).encode())
        assert [each.negative for each in all_messages(server)] == [False, False]
        rmb = group.peer_rmbs.find(4, 0x99)
        assert rmb is not None
        assert sorted(rmb.tokens) == [1, 2, 3, 4]


def test_rkeys_that_contradict_others_get_a_negative_reply() -> None:
    with World() as world:
        client, server, _ = with_links(world, 2)
        known = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[0])
        server.record()
        link = server.group.links[1]
        wrong = llc.LinkRToken(link_number=2, rkey=known[2].rkey, address=known[2].address + 1)
        server.group.on_llc_untrusted(
            link, llc.ConfirmRkey(other_tokens=1, rkey=1, address=1, others=(wrong,)).encode()
        )
        (reply,) = all_messages(server)
        assert (reply.reply, reply.negative, reply.retry) == (True, True, False)
        assert server.group.peer_rmbs.find(1, 1) is None
        assert link.state == "ACTIVE"


def test_an_echo_of_the_wrong_kind_costs_the_link() -> None:
    with World() as world:
        client, _, _ = with_links(world, 4)
        elements(client, 1)
        link = client.group.links[1]
        with pytest.raises(ProtocolError, match="without a request"):
            client.group.rkey_exchanges.on_reply_untrusted(
                link, llc.DeleteRkey(reply=True, rkeys=(1,))
            )


def test_an_echo_that_comes_over_another_link_costs_that_link() -> None:
    """A.3.5: the reply travels over the link of its request."""
    with World() as world:
        client, _, _ = with_links(world, 2)
        elements(client, 1)
        request = client.group.rkey_exchanges.request
        assert request is not None
        carrier = client.group.rkey_exchanges.carrier
        [other] = [link for link in client.group.links.values() if link is not carrier]
        echo = llc.ConfirmRkey(reply=True, other_tokens=0, rkey=1, address=1)
        with pytest.raises(ProtocolError, match="without a request"):
            client.group.rkey_exchanges.on_reply_untrusted(other, echo)
        world.settle()
        assert request.agreed, "the reply over the right link did not count"


# --- ADD LINK CONTINUATION ----------------------------------------------------------------------


def test_pairs_of_a_link_that_is_not_added_are_forgotten() -> None:
    with World() as world:
        client, server, call = with_links(world, 2)
        before = world.fabric.held["region"]
        new = [Link(side.group, 3, side.rnic) for side in (client, server)]
        for side, link in zip((client, server), new, strict=True):
            side.group.rkeys.register_on(link)
        elements(client, 3)  # RMBs made at this time are registered on the new link, too
        exchange_rtokens(client.group, server.group, old=2, ends=(new[0], new[1]))
        assert server.group.peer_rmbs.covers(3)
        for side, link in zip((client, server), new, strict=True):
            side.group.rkeys.drop_link(3)
            side.group.rkeys.drop_link(3)
            link.close()
        world.settle()
        assert not server.group.peer_rmbs.covers(3)
        assert world.fabric.held["region"] == before + 2 * (len(client.group.own_rmbs) - 1)
        assert knows_all_rmbs(client.group, server.group)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_a_pair_for_an_rmb_that_was_just_deleted_is_ignored() -> None:
    """The reply to DELETE RKEY may still be on its way over another link."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        old, new = client.group.links[1], client.group.links[2]
        pair = llc.RTokenPair(reference_rkey=0xDEAD, new_rkey=1, new_address=1)
        server.group.rkeys.learn_pairs_untrusted(old, new, [pair])
        assert server.group.peer_rmbs.find(2, 1) is None
        known = client.group.own_rmbs.tokens(client.group.own_rmbs.pool.rmbs[0])
        changed = llc.RTokenPair(reference_rkey=known[1].rkey, new_rkey=1, new_address=1)
        with pytest.raises(ProtocolError, match="changed"):
            server.group.rkeys.learn_pairs_untrusted(old, new, [changed])


@pytest.mark.rfc("3.5.5.2/2", "3.5.5.2.3/1", "A.3.3/5", "2.1/2", "2.1/7")
@settings(max_examples=15)
@given(
    links=st.lists(st.integers(2, 255), min_size=1, max_size=7, unique=True),
    counts=st.tuples(*[st.sampled_from([0, 1, 2, 3, 7, 254]) | st.integers(0, 254)] * 2),
    data=st.data(),
)
def test_both_sides_have_equal_tables(
    links: list[int], counts: tuple[int, int], data: st.DataObject
) -> None:
    """3.5.5.2.3, A.3.3: the sides make different numbers of RMBs before and after each link."""
    with pytest.MonkeyPatch.context() as patch, World() as world:
        patch.setattr(rmb_module, "ROCE_RMB_SIZE", SMALL)  # one element in each RMB
        client, server = world.side(), world.side()
        world.connect(client, server, size=SMALL)
        sides = (client, server)
        left = list(counts)
        for number in links:
            for place, side in enumerate(sides):
                count = data.draw(st.integers(0, left[place]))
                left[place] -= count
                elements(side, count, SMALL)
            world.settle()
            old = data.draw(st.sampled_from(sorted(client.group.links)))
            add_link(client.group, server.group, number, old=old)
            if data.draw(st.booleans()) and len(client.group.links) > 2:
                remove_link(client, server, data.draw(st.sampled_from(sorted(client.group.links))))
        for place, side in enumerate(sides):
            elements(side, left[place], SMALL)
        world.settle()
        for place, side in enumerate(sides):
            spare = 1
            assert 0 <= len(side.group.own_rmbs) - 1 - counts[place] <= spare
            assert len(side.group.own_rmbs) <= MAX_RMBS
            assert knows_all_rmbs(side.group, sides[1 - place].group)


@pytest.mark.rfc("3.5.1.6.3/1", "3.5.5.2.3/2", "A.3.3/5")
@settings(max_examples=20)
@given(
    counts=st.tuples(*[st.sampled_from([0, 1, 2, 3, 254]) | st.integers(0, 254)] * 2),
    rnics=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=8),
    data=st.data(),
)
def test_links_added_and_deleted_keep_both_sides_equal(
    counts: tuple[int, int], rnics: list[int], data: st.DataObject
) -> None:
    """The same with ADD LINK and DELETE LINK: RNICs appear on one side or on both."""
    with pytest.MonkeyPatch.context() as patch, World() as world:
        patch.setattr(rmb_module, "ROCE_RMB_SIZE", SMALL)  # one element in each RMB
        client, server = sides = world.side(), world.side()
        call = world.connect(client, server, size=SMALL)
        left = list(counts)
        for which in rnics:
            for place, side in enumerate(sides):
                count = data.draw(st.integers(0, left[place]))
                left[place] -= count
                elements(side, count, SMALL)
            # Otherwise the sides announce the RMBs while they add the link.
            if data.draw(st.booleans()):
                world.settle()
            before = set(client.group.links)
            server.record()
            for place in (0, 1) if which == 2 else (which,):
                sides[place].add_rnic()
            world.settle()
            added = set(client.group.links) - before
            assert len(client.group.links) <= 9
            if len(before) == 1 and which == 2:
                assert added
            continuations = [
                each for each in transcript(server) if each == "out ADD_LINK_CONTINUATION"
            ]
            assert len(continuations) >= len(added)
            if len(client.group.links) > 1 and data.draw(st.booleans()):
                server.group.delete_link(data.draw(st.sampled_from(sorted(server.group.links))))
                world.settle()
            for place, side in enumerate(sides):
                assert set(side.group.links) == set(sides[1 - place].group.links)
                assert knows_all_rmbs(side.group, sides[1 - place].group)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize(("here", "there"), [(0, 0), (1, 0), (0, 1), (5, 2), (2, 5), (254, 0)])
@pytest.mark.rfc("A.3.3/1", "A.3.3/2", "A.3.3/3")
def test_the_longer_list_decides_the_number_of_continuations(here: int, there: int) -> None:
    """Figure 15, A.3.3: the server sends first, each message has two RTokens, and the side with the
    shorter list ends with empty messages."""
    with pytest.MonkeyPatch.context() as patch, World() as world:
        patch.setattr(rmb_module, "ROCE_RMB_SIZE", SMALL)
        patch.setattr(own_rmbs, "BURST_GAP", 0.0)  # no spares
        client, server = world.side(), world.side()
        world.connect(client, server, size=SMALL)
        elements(client, here, SMALL)
        elements(server, there, SMALL)
        world.settle()
        server.record()
        for side in (client, server):
            side.add_rnic()
        world.settle()
        continuations = messages(server, llc.AddLinkContinuation)
        rounds = -(-(1 + max(here, there)) // 2)
        assert [each.reply for each in continuations] == [False, True] * rounds
        for count, mine in ((1 + there, continuations[::2]), (1 + here, continuations[1::2])):
            counts = [max(0, count - 2 * each) for each in range(rounds)]
            assert [each.tokens_left for each in mine] == counts
            assert [len(each.pairs) for each in mine] == [min(2, each) for each in counts]
        assert knows_all_rmbs(client.group, server.group)
        assert knows_all_rmbs(server.group, client.group)


def remove_link(client: Side, server: Side, number: int) -> None:
    for side in (client, server):
        link = side.group.links.pop(number)
        side.group.rkeys.drop_link(number)
        link.close()


# --- DELETE RKEY of the peer ----------------------------------------------------------------------


@pytest.mark.rfc("A.3.7/2", "A.3.7/3", "C.7.1/messages/9", "3.5.5.2.2/4")
@pytest.mark.parametrize("link_number", [1, 3])
def test_the_error_mask_names_the_unknown_rmbs(link_number: int) -> None:
    """A.3.7: b'01010000' means the second and the fourth RKey.  An RKey of one link names the RMB
    for all links."""
    with World() as world:
        client, server, _ = with_links(world, 3)
        elements(client, 3)
        world.settle()
        rmbs = client.group.own_rmbs.pool.rmbs[1:4]
        first, second, third = (client.group.own_rmbs.tokens(rmb)[link_number].rkey for rmb in rmbs)
        elsewhere = client.group.own_rmbs.tokens(rmbs[2])[2].rkey
        server.record()
        link = server.group.links[link_number]
        for rkeys in ((first, elsewhere, second, first), (third,), ()):
            server.group.on_llc_untrusted(link, llc.DeleteRkey(rkeys=rkeys).encode())
        replies = all_messages(server)
        assert [each.negative for each in replies] == [True, False, False]
        assert [each.error_mask for each in replies] == [0b01010000, 0, 0]
        assert replies[0].rkeys == (first, elsewhere, second, first)
        assert all(server.group.peer_rmbs.find(number, first) is None for number in (1, 2, 3))


def test_connections_that_write_into_a_deleted_rmb_are_reset() -> None:
    """No connection writes into the deleted RMB again; connections with other RMBs continue."""
    with World() as world:
        client, server, _ = with_links(world, 2)
        calls = [world.connect(client, server, size=BIG) for _ in range(2)]
        rmb = calls[0].client.connection.rmbe.rmb
        rkey = client.group.own_rmbs.tokens(rmb)[1].rkey
        client.group.links[1].send_llc(llc.DeleteRkey(rkeys=(rkey,)))
        world.until(lambda: calls[0].server.connection.state == "CLOSED")
        assert server.group.links[1].state == "ACTIVE"
        assert calls[1].server.connection.state != "CLOSED"
