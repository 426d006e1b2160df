"""Rules of groups with several links, for links, RMBs and connections (RFC 7609, 2.2, 2.3,
3.5.5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rendezvous.links.link_group_rules import known, registered
from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import SIZE, World, exchange
from tests.rnic.memory_rnic import DEPTH, PlainQueuePair
from tests.wire import vectors
from trio_smc.rendezvous.links import own_rmbs
from trio_smc.rendezvous.links.link import Link
from trio_smc.rnic.verbs import WcOpcode
from trio_smc.wire import cdc, llc

BIG = 4 * SIZE


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


@pytest.mark.rfc("2.2/3", "3.5.5.2/1", "3.5.5.2/2", "2.1/2")
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
    """With a limit of two, an asymmetric link leaves room for a second symmetric one."""
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


@pytest.mark.rfc("3.5.3/2", "3.5.3/3", "3.5.1.3/1", "3.5.2/7", "3.5.3/4", "3.5.3/5")
def test_two_groups_share_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without room for RMBs opens a second group with the same client."""
    monkeypatch.setattr(own_rmbs, "MAX_RMBS", 2)
    client, server = world.side(rnics=2), world.side(rnics=2)
    for _ in range(3):
        world.connect(client, server, size=BIG)
    for side in (client, server):
        first, second = side.groups
        assert [link.state for link in second.links.values()] == ["ACTIVE", "ACTIVE"]
        assert not {link.qp.qp_num for link in first.links.values()} & {
            link.qp.qp_num for link in second.links.values()
        }
        assert not set(first.own_rmbs.pool.rmbs) & set(second.own_rmbs.pool.rmbs)
        memories = [rmb.memory for group in side.groups for rmb in group.own_rmbs.pool.rmbs]
        assert len(memories) == len(set(map(id, memories)))


@pytest.mark.rfc("2.3/2", "2.3/3", "4.6/1", "3.5.5.1.4/1")
@pytest.mark.parametrize("place", [0, 1])
def test_connections_move_before_the_peer_is_notified(world: World, place: int) -> None:
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
        "moved" if kind == "state" and names[2] == "move" else "notified"
        for kind, subject, names in side.recorder.events
        if (kind == "state" and subject == "Connection")
        or (kind == "llc" and subject == "out" and names[0] == llc.MessageType.DELETE_LINK)
    ]
    assert events[:2] == ["moved", "notified"]
    assert peer.receiver.receive(100) == b"into the void"
    assert stage.works()


@pytest.mark.rfc("3.5.5.1.4/2", "3.5.5.1.4/3")
@pytest.mark.parametrize("orderly", [False, True])
def test_a_client_requests_a_deletion_at_once_or_in_order(world: World, orderly: bool) -> None:
    """If the deletion is orderly, the server waits until its writes have arrived; otherwise it ends
    the link at once."""
    stage = Stage(world, (2, 2))
    connection = stage.call.server.connection
    assert isinstance(connection.channel, Link)
    link = connection.channel
    stage.client.group.delete_link(link.number, orderly=orderly)
    world.until(lambda: any("DELETE_LINK" in name for name in stage.log))
    connection.send(memoryview(b"on its way"))
    request = llc.DeleteLink(orderly=orderly, link_number=link.number, reason=0x00020000)
    (other,) = [each for each in stage.server.group.links.values() if each is not link]
    stage.server.group.on_llc_untrusted(other, request.encode())
    assert link.state == ("LEAVING" if orderly else "DOWN")
    assert (link.qp.state.value == "RTS") is orderly
    world.settle()
    assert stage.links() == [other.number]
    assert stage.call.client.connection.receiver.receive(100) == b"on its way"
    assert stage.works()


@pytest.mark.rfc("3.5.5.1.3/1", "3.5.5.1.4/2", "2.3/2")
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
        assert connection.receiver.receive(100) == text
    assert stage.works()


class _Poster:
    """A connection that fills a link."""

    def on_room(self) -> None:
        pass

    def on_cdc_complete(self, sequence: int) -> None:
        pass


def test_a_link_full_of_data_has_room_for_llc_messages(world: World) -> None:
    client, server = world.side(), world.side()
    call = world.connect(client, server)
    link = client.group.links[1]
    poster: Any = _Poster()
    posted = 0
    while link.capacity():
        link.post_cdc(poster, vectors.CDC["no flags"][1])
        posted += 1
    assert 0 < posted < DEPTH
    for _ in range(32):
        link.send_llc(llc.OptionalMessage(data=b"\x8f\x2c".ljust(44, b"\0")))
    assert link.state == "ACTIVE"
    assert isinstance(link.qp, PlainQueuePair)
    assert len(link.qp.work) == posted + 32
    world.settle()
    assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("named", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(("size", "length"), [(1, 44), (43, 44), (44, 43), (45, 44)])
def test_a_cdc_message_that_cannot_be_read_costs_the_connection_that_it_names(
    world: World, size: int, length: int, named: bool
) -> None:
    client, server = world.side(), world.side()
    call, other = world.connect(client, server), world.connect(client, server)
    connection = call.connections[1]
    token = connection.alert_token if named else 0
    message = bytearray(cdc.pack(1, token, 0, 0, 0, 0) + b"\0")[:size]
    message[1:2] = bytes((length,))[: size - 1]
    link = server.group.links[1]
    link.on_completion((link.qp.qp_num, int(WcOpcode.RECV), 0, 0, bytes(message)))
    hit = named and size > 1
    assert connection.state == ("PEERABORTWAIT" if hit else "ACTIVE")
    assert server.stack.groups.statistics().unknown_tokens == (not hit)
    assert exchange(world, other, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.parametrize("orderly", [False, True])
def test_the_pump_removes_a_closed_queue_pair(world: World, orderly: bool) -> None:
    stage = Stage(world, (2, 2))
    gone = [side.group.links[2] for side in (stage.client, stage.server)]
    stage.server.group.delete_link(2, orderly=orderly)
    world.settle()
    for side, link in zip((stage.client, stage.server), gone, strict=True):
        lane = side.stack.pump.dispatcher.lane(link.rnic)
        assert link.qp.qp_num not in lane.sinks
        assert link.qp.qp_num not in lane.queue_pairs
        (kept,) = side.group.links.values()
        assert kept.qp.qp_num in side.stack.pump.dispatcher.lane(kept.rnic).sinks


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


def test_a_link_that_leaves_as_soon_as_it_comes_is_replaced(world: World) -> None:
    """An operator drains the RNIC while the link is being added, and undrains it at once."""
    stage = Stage(world, (2, 2), down=1)
    rnics = stage.client.stack.rnic_set
    taken = next(each for each in stage.client.rnics if each is not stage.client.group.rnic)

    def flap() -> None:
        rnics.drain(taken)
        rnics.undrain(taken)

    stage.wire.watch("S1 ADD_LINK_CONTINUATION", flap)
    stage.server.rnics[-1].port_up()
    world.pass_time(70.0)
    assert "C1 DELETE_LINK 2" in stage.log or "C1 DELETE_LINK 1" in stage.log
    assert len(stage.links()) == 2
    assert stage.server.group.kind == stage.client.group.kind == "symmetric"
    assert stage.works()
