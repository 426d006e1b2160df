"""Adding links: the choice of RNICs, the messages, and lost messages
(RFC 7609, 2.2.2, 3.5.1.6, 3.5.5.1.1, 3.5.5.2.3, C.8)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, Side, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from tests.rnic.memory_rnic import PlainQueuePair
from trio_smc.config.config import Config
from trio_smc.rendezvous.negotiation import Established, Failed
from trio_smc.rnic.verbs import RnicError
from trio_smc.wire import llc

ADD_LINK = llc.MessageType.ADD_LINK
CONTINUATION = llc.MessageType.ADD_LINK_CONTINUATION
CONFIRM_LINK = llc.MessageType.CONFIRM_LINK
ADDED = [
    "in ADD_LINK",
    "out ADD_LINK reply",
    "in ADD_LINK_CONTINUATION",
    "out ADD_LINK_CONTINUATION reply",
    "in CONFIRM_LINK",
    "out CONFIRM_LINK reply",
]
REJECTED = ["in ADD_LINK", "out ADD_LINK reply"]


def paths(side: Side) -> dict[int, str]:
    """The RNIC of each link."""
    return {number: link.rnic.name for number, link in side.group.links.items()}


def lose_once(
    kind: llc.MessageType, *, reply: bool, skip: int = 0
) -> Callable[[PlainQueuePair, bytes], list[bytes]]:
    """Lose the first such message after ``skip`` others; the sender's request still succeeds."""
    left = [skip]

    def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
        if message[0] == kind and bool(message[3] & 0x80) is reply:
            left[0] -= 1
            return [] if left[0] == -1 else [message]
        return [message]

    return tamper


# --- choice of RNICs ------------------------------------------------------------------------------


@pytest.mark.rfc(
    "2.2/1",
    "2.2/2",
    "2.2.1/1",
    "2.2.1/2",
    "2.2.1/3",
    "2.2.1/4",
    "2.2.2/1",
    "2.2.2/2",
    "3.5.1.6/2",
    "3.5.1.6/3",
    "3.5.1.6.1/2",
    "3.5.1.6.1/3",
    "3.5.1.6.1/4",
    "2.2.1/7",
)
@pytest.mark.parametrize(
    ("rnics", "kind", "client_paths", "server_paths"),
    [
        ((1, 1), "single", [0], [0]),
        ((1, 2), "asymmetric", [0, 0], [0, 1]),
        ((2, 1), "asymmetric", [0, 1], [0, 0]),
        ((2, 2), "symmetric", [0, 1], [0, 1]),
        ((2, 3), "symmetric", [0, 1], [0, 1]),
        ((3, 2), "symmetric", [0, 1], [0, 1]),
        ((3, 3), "symmetric", [0, 1, 2], [0, 1, 2]),
        ((8, 8), "symmetric", list(range(8)), list(range(8))),
        ((9, 9), "symmetric", list(range(8)), list(range(8))),
    ],
)
def test_a_first_contact_makes_the_links_that_the_rnics_allow(
    rnics: tuple[int, int], kind: str, client_paths: list[int], server_paths: list[int]
) -> None:
    """3.5.1.6, 3.5.1.6.1, 2.2.2: no links are parallel, and there are at most 8."""
    with World() as world:
        client, server = (world.side(rnics=count) for count in rnics)
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        for side, places in ((client, client_paths), (server, server_paths)):
            assert side.group.kind == kind
            assert side.group.state == kind.upper()
            assert list(paths(side).values()) == [f"memory{place}" for place in places]
            assert all(link.state == "ACTIVE" for link in side.group.links.values())
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        world.pass_time(2000.0)
        assert server.group.kind == kind


@pytest.mark.rfc(
    "2.2.3/1",
    "2.2.4/1",
    "2.2.4/3",
    "3.5.1.6/4",
    "3.5.1.6/5",
    "3.5.1.6.1/5",
    "3.5.1.6.2/2",
    "3.5.1.6.2/3",
    "3.5.1.6.3/1",
    "3.5.5.2.3/1",
    "3.5.5.2.3/2",
    "A.3.1/1",
    "A.3.1/2",
    "A.3.1/3",
    "A.3.2/2",
    "A.3.2/5",
    "A.3.3/1",
    "A.3.3/5",
)
def test_a_second_link_at_first_contact_follows_figure_9() -> None:
    """All values that the figure names are checked."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        client.record()
        world.connect(client, server)
        assert transcript(client) == ["in CONFIRM_LINK", "out CONFIRM_LINK reply", *ADDED]
        request, reply = messages(client, llc.AddLink)
        ends = client.group.links[2], server.group.links[2]
        for message, link, rnic in (
            (request, ends[1], server.rnics[1]),
            (reply, ends[0], client.rnics[1]),
        ):
            assert (message.mac, message.gid) == (rnic.mac, rnic.gid)
            assert (message.qp_number, message.link_number) == (link.qp.qp_num, 2)
            assert (message.qp_mtu, message.initial_psn) == (5, link.psn)
        continuations = messages(client, llc.AddLinkContinuation)
        for part, side in zip(continuations, (server, client), strict=True):
            (rmb,) = side.group.own_rmbs.pool.rmbs
            tokens = side.group.own_rmbs.tokens(rmb)
            assert (part.link_number, part.tokens_left) == (2, 1)
            assert part.pairs == (
                llc.RTokenPair(
                    reference_rkey=tokens[1].rkey,
                    new_rkey=tokens[2].rkey,
                    new_address=tokens[2].address,
                ),
            )
        confirms = messages(client, llc.ConfirmLink)[2:]
        for confirm, link in zip(confirms, ends[::-1], strict=True):
            assert (confirm.gid, confirm.qp_number) == (link.rnic.gid, link.qp.qp_num)
            assert (confirm.link_number, confirm.link_user_id) == (2, link.user_id)
        assert (ends[0].peer_user_id, ends[1].peer_user_id) == (ends[1].user_id, ends[0].user_id)


@pytest.mark.rfc("3.5.1.6/1", "3.5.1.1/5")
def test_no_data_before_the_second_link() -> None:
    """3.5.1.6: the connection is not established while ADD LINK is under way."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        call = world.call(client, server)
        world.until(lambda: server.groups and server.group.exchanges.state == "ADD_LINK_CONFIRM")
        assert (call.client.outcome, call.server.outcome) == (None, None)
        world.until(lambda: call.server.outcome is not None)
        assert server.group.links[2].state == "ACTIVE"


@pytest.mark.rfc("2.2.2/3", "2.2.2/5", "2.2.2/7", "A.3.1/5")
@pytest.mark.parametrize(("limit", "links"), [(2, 2), (3, 3), (1, 2), (0, 4)])
def test_the_lower_link_limit_counts(limit: int, links: int) -> None:
    """2.2.2, 3.5.1.5: the limit is at least 2, and 0 stands for the server's limit."""
    with World() as world:
        client, server = world.side(rnics=4), world.side(rnics=4)

        def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == CONFIRM_LINK and message[3] & 0x80:
                return [message[:34] + bytes((limit,)) + message[35:]]
            return [message]

        world.fabric.tamper = tamper
        world.connect(client, server)
        assert len(server.group.links) == links


@pytest.mark.rfc("A.3.3/1", "A.3.3/2", "A.3.3/3", "A.3.3/4", "3.5.5.2.3/1", "2.1/7")
@pytest.mark.parametrize("counts", [(1, 1), (3, 8), (8, 3), (5, 1), (1, 6)])
def test_all_rtokens_are_exchanged_for_any_numbers_of_them(counts: tuple[int, int]) -> None:
    """3.5.5.2.3, A.3.3: a message has two RTokens; a side that has sent all sends empty ones."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=1)
        world.connect(client, server)
        for side, count in zip((client, server), counts, strict=True):
            while len(side.group.own_rmbs.pool.rmbs) < count:
                side.group.request_element(4 * SIZE, lambda _: None)
                world.settle()
        # The sides may have made further RMBs in advance.
        counts = (len(client.group.own_rmbs.pool.rmbs), len(server.group.own_rmbs.pool.rmbs))
        client.record()
        server.add_rnic()
        world.settle()
        continuations = messages(client, llc.AddLinkContinuation)
        left = [message.tokens_left for message in continuations]
        rounds = max((count + 1) // 2 for count in counts)
        assert left[::2] == [max(0, counts[1] - 2 * each) for each in range(rounds)]
        assert left[1::2] == [max(0, counts[0] - 2 * each) for each in range(rounds)]
        assert server.group.kind == client.group.kind == "symmetric"
        for group, peer in ((client.group, server.group), (server.group, client.group)):
            for rmb in group.own_rmbs.pool.rmbs:
                tokens = group.own_rmbs.tokens(rmb)
                known = peer.peer_rmbs.find(3, tokens[3].rkey)
                assert known is not None
                assert known.tokens == tokens


@pytest.mark.rfc("3.5.5.1.1/3")
def test_data_flows_while_a_later_link_is_added() -> None:
    """3.5.5.1.1: only at first contact, data has to wait for ADD LINK."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=1)
        call = world.connect(client, server)
        server.add_rnic()
        seen = set()
        for _ in range(200):
            seen.add(server.group.exchanges.state)
            call.client.connection.send(memoryview(b"x"))
            if not world.step():
                break
            call.server.connection.receiver.receive(100)
        assert {"ADD_LINK", "ADD_LINK_CONTINUATION", "ADD_LINK_CONFIRM", "DELETE_LINK"} <= seen
        assert server.group.kind == "symmetric"


# --- rejections -----------------------------------------------------------------------------------


@pytest.mark.rfc("2.2.1/1", "3.5.1.6.1/1", "3.5.1.6.1/6", "A.3.2/3")
def test_a_parallel_link_is_rejected() -> None:
    """3.5.1.6.1, A.3.2: the reason is NO_ALTERNATE_PATH."""
    with World() as world:
        client, server = world.side(), world.side()
        client.record()
        world.connect(client, server)
        _, reply = messages(client, llc.AddLink)
        assert (reply.rejected, reply.reason) == (True, llc.AddLinkReason.NO_ALTERNATE_PATH)
        assert [len(side.rnic.qps) for side in (client, server)] == [1, 1]


@pytest.mark.rfc("C.7.1/messages/2", "A.3.2/3")
def test_an_undefined_mtu_is_rejected() -> None:
    """C.7.1: the rejection has reason 2."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)

        def tamper(_: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == ADD_LINK and not message[3] & 0x80:
                return [message[:32] + b"\x09" + message[33:]]
            return [message]

        world.fabric.tamper = tamper
        client.record()
        call = world.connect(client, server)
        _, reply = messages(client, llc.AddLink)
        assert (reply.rejected, reply.reason) == (True, llc.AddLinkReason.INVALID_MTU)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert server.group.kind == "single"


@pytest.mark.rfc("C.8/1", "C.8/2")
def test_without_a_queue_pair_the_server_continues_with_one_link() -> None:
    """3.5.1.6.2, C.8: the server tries again later."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        server.rnics[1].most_qps = 0
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert server.group.kind == "single"
        server.rnics[1].most_qps = None
        world.pass_time(321.0)
        assert server.group.kind == client.group.kind == "symmetric"


def test_a_client_without_a_queue_pair_rejects() -> None:
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        client.rnics[1].most_qps = 0
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert server.group.kind == "single"
        client.rnics[1].most_qps = None
        world.pass_time(321.0)
        assert server.group.kind == client.group.kind == "symmetric"


@pytest.mark.parametrize("failures", [1, 2, 4])
def test_a_client_that_cannot_connect_its_end_notifies_again(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """C.7.1, C.8, 3.5.5.1.2: the client sends a notice after 10 s, and both sides try again."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        start = world.clock.now
        tries: list[float] = []
        to_rtr = PlainQueuePair.to_rtr

        def unreachable(qp: PlainQueuePair, **peer: Any) -> None:
            if qp.rnic is client.rnics[1]:
                tries.append(world.clock.now - start)
                if len(tries) <= failures:
                    raise RnicError(errno.ETIMEDOUT, "no answer for the address")
            to_rtr(qp, **peer)

        monkeypatch.setattr(PlainQueuePair, "to_rtr", unreachable)
        call = world.connect(client, server)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        assert paths(client) == paths(server) == {1: "memory0"}
        world.pass_time(60.0)
        assert tries == [0.0, 10.0, 20.0, 30.0, 40.0][: failures + 1]
        assert server.group.kind == client.group.kind == "symmetric"
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("rejections", [1, 3])
def test_a_client_that_notified_and_then_rejects_gets_another_offer(
    monkeypatch: pytest.MonkeyPatch, rejections: int
) -> None:
    """3.5.5.1.2, C.8: a client that has notified has an RNIC, so its next reply may differ.  The
    server offers again, because Linux notifies only once."""
    with World() as world:
        client, server = world.side(rnics=2), world.side()
        client.rnics[1].port_down()
        world.connect(client, server)
        client.group.demand.close()
        monkeypatch.setattr(client.group.demand, "retry_failed", lambda: None)
        client.rnics[1].most_qps = 0
        client.record()
        client.rnics[1].port_up()
        world.settle()
        for retry in range(rejections):
            offers = [each for each in messages(client, llc.AddLink) if each.link_number]
            assert [each.rejected for each in offers] == [False, True] * (retry + 1)
            if retry + 1 == rejections:
                client.rnics[1].most_qps = None
            world.pass_time(10.0 * 2**retry - 0.1)
            assert server.group.kind == "single"
            world.pass_time(0.1)
        assert server.group.kind == client.group.kind == "asymmetric"


@pytest.mark.parametrize("tries", [1, 3])
def test_a_server_without_queue_pairs_offers_a_link_when_it_has_one(tries: int) -> None:
    """3.5.5.1.2, C.8: a client sends one notice for an RNIC, so the server must try again."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        client.rnics[1].port_down()
        world.connect(client, server)
        assert server.group.kind == client.group.kind == "asymmetric"
        for rnic in server.rnics:
            rnic.most_qps = 0
        client.rnics[1].port_up()
        world.settle()
        for retry in range(tries):
            assert server.group.kind == client.group.kind == "asymmetric"
            if retry + 1 == tries:
                for rnic in server.rnics:
                    rnic.most_qps = None
            world.pass_time(10.0 * 2**retry)
        assert server.group.kind == client.group.kind == "symmetric"


# --- lost messages --------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.1.6.2/1", "3.5.1.6.2/4", "C.7.1/time-outs/2", "C.7.1/time-outs/8")
@pytest.mark.parametrize(
    ("kind", "reply", "skip"),
    [(CONTINUATION, True, 0), (CONFIRM_LINK, False, 1), (CONFIRM_LINK, True, 1)],
)
def test_a_second_link_that_fails_at_first_contact_is_withdrawn(
    kind: llc.MessageType, reply: bool, skip: int
) -> None:
    """3.5.1.6.2, C.7.1: the client acknowledges DELETE LINK over the first link before data may
    flow."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        call = world.call(client, server)
        server.record()
        world.fabric.tamper = lose_once(kind, reply=reply, skip=skip)
        assert world.finish() == pytest.approx(5.0)
        assert call.states == ("ESTABLISHED", "ESTABLISHED")
        lines = transcript(server)
        assert "out DELETE_LINK" in lines
        assert lines.index("out DELETE_LINK") < lines.index("in DELETE_LINK reply")
        assert paths(server) == paths(client) == {1: "memory0"}
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        world.fabric.tamper = None
        world.pass_time(11.0)  # the server tries again (C.8)
        assert server.group.kind == client.group.kind == "symmetric"
        assert list(server.group.links) == [1, 3]  # 2.2.4: number 2 is not used again


@pytest.mark.rfc("3.5.1.6.2/5", "C.7.1/time-outs/2")
def test_no_data_before_the_withdrawal_is_acknowledged() -> None:
    """C.7.1, CONFIRM LINK on the second link at first contact."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        call = world.call(client, server)
        lost = lose_once(CONFIRM_LINK, reply=False, skip=1)

        def tamper(qp: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == llc.MessageType.DELETE_LINK and message[3] & 0x80:
                return []
            return lost(qp, message)

        world.fabric.tamper = tamper
        world.pass_time(9.0)
        assert call.states[1] == "CONFIRMING_LINK"
        world.finish()
        assert isinstance(call.server.outcome, Failed)
        assert not server.groups


@pytest.mark.rfc("C.7.1/time-outs/4", "C.7.1/time-outs/5", "3.5.1.6.2/1")
@pytest.mark.parametrize(
    ("kind", "reply"), [(ADD_LINK, False), (ADD_LINK, True), (CONTINUATION, False)]
)
def test_add_link_that_is_lost_at_first_contact(kind: llc.MessageType, reply: bool) -> None:
    """C.7.1: the client breaks the connection; the server continues with one link (3.5.1.6.2)."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        call = world.call(client, server)
        world.fabric.tamper = lose_once(kind, reply=reply)
        assert world.finish() == pytest.approx(5.0)
        assert call.client.error.errno == errno.ETIMEDOUT
        assert isinstance(call.server.outcome, (Established, Failed))
        assert not client.groups
        world.pass_time(70.0)
        assert not server.groups


@pytest.mark.rfc("C.7.1/time-outs/6")
@pytest.mark.parametrize(
    ("kind", "reply"),
    [(ADD_LINK, False), (ADD_LINK, True), (CONTINUATION, False), (CONTINUATION, True)],
)
def test_a_later_add_link_that_is_not_answered_costs_its_carrier(
    kind: llc.MessageType, reply: bool
) -> None:
    """C.7.1: the link that carried the message fails, and another link carries the next try."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=2)
        world.connect(client, server)
        world.fabric.tamper = lose_once(kind, reply=reply)
        server.add_rnic()
        world.pass_time(30.0)
        assert 1 not in server.group.links
        assert 1 not in client.group.links
        assert list(client.group.links) == list(server.group.links)
        assert len(server.group.links) == 3
        assert server.group.kind == client.group.kind == "symmetric"


@pytest.mark.rfc("C.7.1/time-outs/3")
@pytest.mark.parametrize("reply", [False, True])
def test_a_later_link_that_cannot_be_confirmed_is_withdrawn(reply: bool) -> None:
    """C.7.1, CONFIRM LINK (not first contact): the other links are not affected."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=2)
        call = world.connect(client, server)
        world.fabric.tamper = lose_once(CONFIRM_LINK, reply=reply)
        server.add_rnic()
        world.pass_time(10.0)
        assert list(server.group.links) == list(client.group.links) == [1, 2]
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
        assert server.group.exchanges.state == client.group.exchanges.state == "IDLE"


def test_a_server_that_no_client_answers_keeps_its_link() -> None:
    """Old kernels never answer ADD LINK, so tries by the timer of C.8 must not end the link."""
    with World() as world:
        client, server = world.side(), world.side(Config(link_group_idle=10_000))
        call = world.connect(client, server)
        server.group.adding.peer_answers = False
        world.fabric.tamper = lambda _, m: [] if m[0] == ADD_LINK else [m]
        world.pass_time(1000.0)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def test_a_reply_that_comes_too_late_withdraws_the_link() -> None:
    """The server has given the link up, so it sends DELETE LINK when the client's reply comes."""
    with World() as world:
        client, server = world.side(Config(llc_timeout=5), rnics=2), world.side()
        call = world.connect(client, server)
        server.group.adding.peer_answers = False
        late: list[bytes] = []

        def tamper(qp: PlainQueuePair, message: bytes) -> list[bytes]:
            if message[0] == ADD_LINK and message[3] & 0x80:
                late.append(message)
                return []
            return [message]

        world.fabric.tamper = tamper
        server.add_rnic()
        world.pass_time(2.1)
        world.fabric.tamper = None
        assert (server.group.exchanges.state, client.group.exchanges.state) == (
            "IDLE",
            "ADD_LINK_CONTINUATION",
        )
        server.group.on_llc_untrusted(server.group.links.oldest(), late[0])  # type: ignore[arg-type]
        world.settle()
        assert client.group.exchanges.state == "IDLE"
        assert list(client.group.links) == list(server.group.links)
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
