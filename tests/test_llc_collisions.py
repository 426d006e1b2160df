"""LLC messages that meet an exchange under way (RFC 7609, 3.5.5.3): each row of the three lists.

Every test runs in no time at all unless it says otherwise: nothing waits for a time-out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from tests.link_group_rules import known, registered
from tests.llc_wire import Stage
from tests.rendezvous_pair import SIZE, World, exchange
from trio_smc.rendezvous import llc, own_rmbs

BIG = 4 * SIZE


@pytest.fixture
def world() -> Iterator[World]:
    with World(tells_death=False) as world:
        yield world


def in_add_link(world: World) -> Stage:
    """Two links; the server has sent ADD LINK for a third one."""
    stage = Stage(world, (3, 3), down=1)
    stage.server.rnics[2].port_up()
    assert stage.server.group.exchanges.state == "ADD_LINK"
    return stage


def in_delete_link(world: World) -> Stage:
    """Three links; the server has sent DELETE LINK for the third."""
    stage = Stage(world, (3, 3))
    stage.server.group.delete_link(3, orderly=False)
    assert stage.server.group.exchanges.state == "DELETE_LINK"
    return stage


def in_confirm_rkey(world: World) -> Stage:
    """Two links; the server has sent CONFIRM RKEY."""
    stage = Stage(world, (2, 2))
    stage.server.group.request_element(BIG, lambda _: None)
    assert stage.server.group.exchanges.state == "CHANGE_RKEYS"
    return stage


STAGES = pytest.mark.parametrize(
    ("begin", "blocked"),
    [
        pytest.param(in_add_link, r"C1 ADD_LINK \d reply", marks=pytest.mark.rfc("3.5.5.3.1/1")),
        pytest.param(
            in_delete_link, "C1 DELETE_LINK 3 reply", marks=pytest.mark.rfc("3.5.5.3.2/1")
        ),
        pytest.param(
            in_confirm_rkey, "C1 CONFIRM_RKEY reply", marks=pytest.mark.rfc("3.5.5.3.3/1")
        ),
    ],
)


@pytest.mark.rfc("3.5.5.3/1", "A.3.8/1")
@STAGES
@pytest.mark.parametrize("place", [0, 1])
def test_test_link_is_answered_at_once(
    world: World, begin: Callable[[World], Stage], blocked: str, place: int
) -> None:
    stage = begin(world)
    stage.wire.tests = True
    stage.wire.lose(blocked)  # so that the exchange is under way all the time
    stage.end(place).group.links[1].send_llc(llc.TestLink(user_data=b"are you there..."))
    world.settle()
    assert f"{'SC'[place]}1 TEST_LINK reply" in stage.log
    assert stage.server.group.exchanges.state != "IDLE"


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(in_add_link, marks=pytest.mark.rfc("3.5.5.3.1/4")),
        pytest.param(in_delete_link, marks=pytest.mark.rfc("3.5.5.3.2/4")),
        pytest.param(in_confirm_rkey, marks=pytest.mark.rfc("3.5.5.3.3/6")),
    ],
)
@pytest.mark.rfc("3.5.5.3/1")
@pytest.mark.parametrize("place", [0, 1])
def test_delete_link_for_the_group_ends_it_at_once(
    world: World, begin: Callable[[World], Stage], place: int
) -> None:
    stage = begin(world)
    stage.end(place).group.terminate()
    world.settle()
    assert stage.is_over()


@pytest.mark.parametrize(
    ("begin", "after", "number"),
    [
        pytest.param(
            in_add_link, r"C3 CONFIRM_LINK reply", 2, marks=pytest.mark.rfc("3.5.5.3.1/3")
        ),
        pytest.param(
            in_delete_link, "C1 DELETE_LINK 3 reply", 2, marks=pytest.mark.rfc("3.5.5.3.2/3")
        ),
        pytest.param(
            in_confirm_rkey, "C1 CONFIRM_RKEY reply", 2, marks=pytest.mark.rfc("3.5.5.3.3/4")
        ),
    ],
)
@pytest.mark.rfc("3.5.5.3/1", "3.5.5.3/2")
@pytest.mark.parametrize("orderly", [False, True])
def test_a_clients_delete_link_waits(
    world: World, begin: Callable[[World], Stage], after: str, number: int, orderly: bool
) -> None:
    stage = begin(world)
    stage.client.group.delete_link(number, orderly=orderly)
    world.settle()
    asked = stage.log.index(f"C1 DELETE_LINK {number}")
    over = stage.log.index(after)
    assert asked < over < stage.log.index(f"S1 DELETE_LINK {number}")
    assert number not in stage.links()
    assert stage.works()


@pytest.mark.rfc("3.5.5.3.1/2", "3.5.5.3/1")
def test_both_sides_have_a_new_rnic_at_once(world: World) -> None:
    """The server ignores the client's ADD LINK, and the client takes the server's for an answer."""
    stage = Stage(world, (1, 2), down=1)
    stage.server.rnics[1].port_up()
    stage.client.add_rnic()
    world.settle()
    assert stage.log[:2] == ["S1 ADD_LINK 3", "C1 ADD_LINK 0"]
    assert [each for each in stage.log if "S1 ADD_LINK " in each] == ["S1 ADD_LINK 3"]
    assert stage.server.group.kind == stage.client.group.kind == "symmetric"


@pytest.mark.parametrize(
    ("begin", "after"),
    [
        pytest.param(
            in_delete_link, "C1 DELETE_LINK 3 reply", marks=pytest.mark.rfc("3.5.5.3.2/2")
        ),
        pytest.param(
            in_confirm_rkey, "C1 CONFIRM_RKEY reply", marks=pytest.mark.rfc("3.5.5.3.3/2")
        ),
    ],
)
def test_a_clients_add_link_waits(
    world: World, begin: Callable[[World], Stage], after: str
) -> None:
    stage = begin(world)
    stage.server.add_rnic()
    stage.client.add_rnic()
    world.settle()
    noticed = stage.log.index("C1 ADD_LINK 0")
    over = stage.log.index(after)
    added = next(place for place, each in enumerate(stage.log) if each.startswith("S1 ADD_LINK "))
    assert noticed < over < added
    assert stage.server.group.kind == "symmetric"


@pytest.mark.rfc("3.5.5.3.3/3", "3.5.5.3.1/5", "3.5.5.3/3")
def test_the_servers_add_link_crosses_the_clients_confirm_rkey(world: World) -> None:
    stage = Stage(world, (3, 3), down=1)
    done: list[object] = []
    stage.client.group.request_element(BIG, done.append)
    stage.server.rnics[2].port_up()
    world.pass_time(1.0)
    assert "S1 CONFIRM_RKEY reply negative" in stage.log
    confirmed = stage.log.index("C3 CONFIRM_LINK reply")
    assert "C1 CONFIRM_RKEY" in stage.log[confirmed:]
    assert done[0] is not None
    for one, other in ((stage.client, stage.server), (stage.server, stage.client)):
        assert registered(one.group) == known(other.group)


@pytest.mark.rfc("3.5.5.3.3/5", "3.5.5.3.2/5", "3.5.5.3/3")
def test_the_servers_delete_link_crosses_the_clients_confirm_rkey(world: World) -> None:
    stage = Stage(world, (2, 2))
    done: list[object] = []
    stage.client.group.request_element(BIG, done.append)
    stage.server.group.delete_link(2, orderly=False)
    world.pass_time(1.0)
    assert "S1 CONFIRM_RKEY reply negative" in stage.log
    deleted = stage.log.index("C1 DELETE_LINK 2 reply")
    assert "C1 CONFIRM_RKEY" in stage.log[deleted:]
    assert done[0] is not None
    for one, other in ((stage.client, stage.server), (stage.server, stage.client)):
        assert registered(one.group) == known(other.group)


@pytest.mark.rfc("3.5.5.3/2", "3.5.5.3/3")
def test_one_exchange_at_a_time(world: World) -> None:
    """The server wants three things in the same moment."""
    stage = Stage(world, (3, 3))
    stage.server.group.request_element(BIG, lambda _: None)
    stage.server.group.delete_link(3, orderly=False)
    stage.server.group.delete_link(2, orderly=False)
    world.settle()
    requests = [each for each in stage.log if each.startswith("S")]
    replies = [each for each in stage.log if each.startswith("C")]
    assert stage.log[:6] == [each for pair in zip(requests, replies, strict=True) for each in pair]
    assert {each.split(" ", 1)[1] for each in requests} == {
        "CONFIRM_RKEY", "DELETE_LINK 3", "DELETE_LINK 2"
    }  # fmt: skip


@pytest.mark.rfc("C.7/1", "C.7/3")
@pytest.mark.parametrize("begin", [in_add_link, in_delete_link, in_confirm_rkey])
def test_a_reply_ends_its_timer(world: World, begin: Callable[[World], Stage]) -> None:
    stage = begin(world)
    world.pass_time(10.0)
    links = stage.links()
    assert len(links) >= 2
    assert stage.server.group.exchanges.state == stage.client.group.exchanges.state == "IDLE"
    assert stage.works()


# --- and what goes with it -----------------------------------------------------------------------


@pytest.mark.rfc("2.2/3", "3.5.5.2/1", "3.5.5.2/2")
def test_every_link_leads_to_every_rmb(world: World) -> None:
    stage = Stage(world, (4, 4), down=1)
    for size in (SIZE, BIG, BIG, 1 << 14):
        world.connect(stage.client, stage.server, size=size)
    stage.server.rnics[3].port_up()
    world.settle()
    assert len(stage.links()) == 4
    for one, other in ((stage.client, stage.server), (stage.server, stage.client)):
        tokens = registered(one.group)
        assert tokens == known(other.group)
        for rmb in tokens:
            assert sorted(number for number, _, _ in rmb) == stage.links()


@pytest.mark.rfc("2.2.2/11")
def test_an_asymmetric_link_does_not_count(world: World) -> None:
    """With two links, one of them asymmetric, there is room for a second symmetric one."""
    stage = Stage(world, (1, 2), connect=False)

    def two(message: llc.ConfirmLink) -> llc.Message:
        return llc.ConfirmLink(
            reply=True, no_eye_catcher=message.no_eye_catcher, mac=message.mac, gid=message.gid,
            qp_number=message.qp_number, link_number=message.link_number,
            link_user_id=message.link_user_id, max_links=2,
        )  # fmt: skip

    stage.wire.change("C1 CONFIRM_LINK reply", two)
    world.finish()
    assert stage.server.group.setup.max_links == 2
    assert stage.server.group.kind == "asymmetric"
    stage.client.add_rnic()
    world.settle()
    assert stage.server.group.kind == "symmetric"
    assert len(stage.links()) == 2


@pytest.mark.rfc("2.2.2/2", "2.2.2/3", "2.2.2/4", "2.2.2/6", "2.2.2/7", "A.3.1/5")
@pytest.mark.parametrize("limit", [2, 3, 8])
def test_a_clients_limit_does_not_exceed_its_servers(world: World, limit: int) -> None:
    stage = Stage(world, (4, 4), connect=False)
    seen: list[llc.ConfirmLink] = []

    def lower(message: llc.ConfirmLink) -> llc.Message:
        seen.append(message)
        return dataclasses.replace(message, max_links=limit)

    def note(message: llc.ConfirmLink) -> llc.Message:
        seen.append(message)
        return message

    stage.wire.change("S1 CONFIRM_LINK", lower)
    stage.wire.change("C1 CONFIRM_LINK reply", note)
    world.finish()
    request, reply = seen
    assert 2 <= request.max_links <= 8
    assert 2 <= reply.max_links <= limit
    assert stage.client.group.setup.max_links == stage.server.group.setup.max_links == limit
    world.settle()
    assert len(stage.links()) == min(limit, 4)


@pytest.mark.rfc("3.5.3/2", "3.5.3/3")
def test_two_groups_share_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without room for RMBs opens a second group with the same client."""
    monkeypatch.setattr(own_rmbs, "MAX_RMBS", 2)
    client, server = world.side(rnics=2), world.side(rnics=2)
    for _ in range(3):
        world.connect(client, server, size=BIG)
    for side in (client, server):
        first, second = side.groups
        assert not {link.qp.qp_num for link in first.links.values()} & {
            link.qp.qp_num for link in second.links.values()
        }
        assert not set(first.own_rmbs.pool.rmbs) & set(second.own_rmbs.pool.rmbs)
        memories = [rmb.memory for group in side.groups for rmb in group.own_rmbs.pool.rmbs]
        assert len(memories) == len(set(map(id, memories)))


@pytest.mark.rfc("2.3/2", "2.3/3", "4.6/1", "3.5.5.1.4/1")
@pytest.mark.parametrize("place", [0, 1])
def test_connections_move_before_the_peer_is_told(world: World, place: int) -> None:
    stage = Stage(world, (2, 2))
    side, connection = stage.end(place), stage.call.connections[place]
    peer = stage.call.connections[1 - place]
    assert (connection.channel, peer.channel) == (
        side.group.links[1],
        stage.end(1 - place).group.links[1],
    )
    side.record()
    side.group.links[1].qp.to_err()
    connection.send(memoryview(b"into the void"))
    world.settle()
    events = [
        "moved" if what == "state" and names[2] == "move" else "told"
        for what, who, names in side.recorder.events
        if (what == "state" and who == "Connection")
        or (what == "llc" and who == "out" and names[0] == llc.MessageType.DELETE_LINK)
    ]
    assert events[:2] == ["moved", "told"]
    assert peer.receive(100) == b"into the void"
    assert stage.works()


@pytest.mark.rfc("3.5.5.1.3/1", "3.5.5.1.4/2", "3.5.5.1.4/3", "2.3/2")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("orderly", [False, True])
def test_connections_of_a_deleted_link_move(world: World, place: int, orderly: bool) -> None:
    stage = Stage(world, (2, 2))
    for connection, text in zip(stage.call.connections, (b"one", b"two"), strict=True):
        connection.send(memoryview(text))
    stage.end(place).group.delete_link(1, orderly=orderly)
    world.settle()
    assert stage.links() == [2]
    for connection, text in zip(stage.call.connections, (b"two", b"one"), strict=True):
        assert connection.channel is not None
        assert connection.channel.number == 2
        assert connection.receive(100) == text
    assert stage.works()


@pytest.mark.rfc("3.5.1.6.4/2", "C.7/5")
def test_after_a_decline_nothing_is_left_and_the_next_connection_tries_again(world: World) -> None:
    stage = Stage(world, (2, 2), connect=False)
    stage.wire.fail("C1 CONFIRM_LINK reply")
    world.finish()
    assert stage.call.states == ("FALLEN_BACK", "FALLEN_BACK")
    assert not any(world.fabric.held.values())
    stage.log.clear()
    call = world.connect(stage.client, stage.server)
    assert call.states == ("ESTABLISHED", "ESTABLISHED")
    assert stage.log[0] == "S1 CONFIRM_LINK"
    assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("A.3.1/4", "2.2.4/3")
def test_link_user_ids_are_unique_in_a_stack(world: World) -> None:
    one, other = world.side(rnics=8), world.side(rnics=8)
    world.connect(one, other)
    world.connect(other, one)
    for side in (one, other):
        names = [link.user_id for group in side.groups for link in group.links.values()]
        assert len(names) == len(set(names)) == 16


@pytest.mark.rfc("A.3.2/4")
@pytest.mark.parametrize("place", [0, 1])
def test_the_smaller_mtu_counts_on_the_second_link(world: World, place: int) -> None:
    stage = Stage(world, (1, 1))
    stage.end(1 - place).add_rnic()
    rnic = stage.end(place).add_rnic()
    world.settle()
    assert stage.server.group.kind == "symmetric"
    assert {qp.mtu for side in world.sides for qp in side.rnics[1].qps.values()} == {5}
    rnic.port_down()
    world.settle()
    rnic.mtu = 3
    rnic.port_up()
    world.settle()
    assert {qp.mtu for side in world.sides for qp in side.rnics[1].qps.values()} == {3}
