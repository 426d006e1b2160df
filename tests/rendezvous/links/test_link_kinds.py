"""Kinds of link groups, and the events that change a group: RNICs appear and fail, links are
deleted or lost.  The link on which a connection sends (RFC 7609, 2.2, 2.3, 3.5.5.1, C.8)."""

from __future__ import annotations

import pytest

from tests.rendezvous.links.test_add_link import ADDED, REJECTED, paths
from tests.rendezvous.rendezvous_pair import SIZE, Side, World, exchange
from tests.rendezvous.transcripts import messages, transcript
from trio_smc.config.config import Config
from trio_smc.rendezvous.links.link_set import Links
from trio_smc.streams.group_views import LinkGroupView
from trio_smc.wire import llc

NOTICE = "out ADD_LINK"
DELETED = ["in DELETE_LINK", "out DELETE_LINK reply"]


def states(side: Side) -> list[str]:
    """The states that the side's link group has entered."""
    return [
        names[1] for kind, subject, names in side.recorder.events
        if kind == "state" and subject == "LinkGroup"
    ]  # fmt: skip


# --- RNICs that appear ----------------------------------------------------------------------------


@pytest.mark.rfc(
    "2.2.1/3",
    "2.2.1/5",
    "2.2.1/6",
    "3.5.5.1.1/1",
    "3.5.5.1.2/1",
    "3.5.5.1.2/2",
    "A.3.4/5",
    "C.8/3",
    "C.8/4",
    "3.5.5.1/1",
)
def test_single_becomes_asymmetric_becomes_symmetric() -> None:
    """2.2.2, figure 6: the sides add the symmetric link before they delete the asymmetric one."""
    with World() as world:
        client, server = world.side(), world.side()
        call = world.connect(client, server)
        client.record()
        server.record()
        server.add_rnic()
        world.settle()
        assert transcript(client) == ADDED
        assert states(client) == states(server) == ["ASYMMETRIC"]
        client.record()
        server.record()
        client.add_rnic()
        world.settle()
        assert transcript(client) == [NOTICE, *ADDED, *DELETED]
        (deletion,) = [each for each in messages(client, llc.DeleteLink) if not each.reply]
        assert (deletion.orderly, deletion.reason) == (True, 0x00050000)
        assert states(client) == states(server) == ["SYMMETRIC"]
        assert paths(client) == {1: "memory0", 4: "memory1"}
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("3.5.5.1.2/1", "A.3.2/1", "2.2.3/4")
def test_the_clients_notice_names_its_new_rnic_only() -> None:
    """3.5.5.1.2, A.3.2: number, MTU and PSN have no meaning in a notice."""
    with World() as world:
        client, server = world.side(), world.side(rnics=2)
        world.connect(client, server)
        client.record()
        rnic = client.add_rnic()
        notice = messages(client, llc.AddLink)[0]
        assert notice == llc.AddLink(mac=rnic.mac, gid=rnic.gid)
        world.settle()
        assert server.group.kind == "symmetric"


@pytest.mark.rfc("3.5.5.1.2/4")
def test_an_unanswered_notice_is_no_error() -> None:
    with World() as world:
        client, server = world.side(), world.side(rnics=2)
        call = world.connect(client, server)
        client.record()
        ends = client.group.links[1].qp
        world.fabric.tamper = lambda qp, m: (
            [] if qp is ends and m[0] == llc.MessageType.ADD_LINK else [m]
        )
        client.add_rnic()
        world.settle()
        assert transcript(client) == [NOTICE]
        assert client.group.exchanges.state == "IDLE"
        done: list[object] = []
        client.group.request_element(4 * SIZE, done.append)
        world.settle()
        assert done[0] is not None
        world.pass_time(30.0)
        assert client.group.links[1].state == "ACTIVE"
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("2.2.2/2", "2.2.2/8", "2.2.2/9", "3.5.5.1.1/4", "3.5.5.1.2/3")
def test_at_the_maximum_no_side_requests_or_offers() -> None:
    """2.2.2, 3.5.5.1.1, 3.5.5.1.2."""
    with World() as world:
        client, server = world.side(rnics=8), world.side(rnics=8)
        world.connect(client, server)
        client.record()
        client.add_rnic()
        server.add_rnic()
        world.pass_time(1.0)
        assert transcript(client) == []
        # If the client nevertheless requests a link, the server does not answer.
        link = client.group.links.oldest()
        assert link is not None
        link.send_llc(llc.AddLink(mac=bytes(6), gid=bytes(range(16))))
        world.pass_time(1.0)
        assert transcript(client) == [NOTICE]
        assert len(server.group.links) == 8


@pytest.mark.rfc("2.2.2/10", "3.5.5.1.1/2")
def test_a_symmetric_group_grows_by_an_rnic_at_each_end() -> None:
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        client.record()
        server.add_rnic()
        world.settle()
        assert transcript(client) == REJECTED  # an asymmetric link would not help
        client.add_rnic()
        world.settle()
        assert len(server.group.links) == len(client.group.links) == 3
        assert server.group.kind == "symmetric"


@pytest.mark.rfc("C.8/1", "C.8/2")
def test_c8_the_server_tries_again_when_its_timer_is_due() -> None:
    """C.8: the server waits longest after a rejection, because the client can send a request."""
    with World() as world:
        client, server = world.side(), world.side(Config(link_group_idle=10_000))
        world.connect(client, server)
        client.record()
        world.pass_time(319.0)
        assert REJECTED[0] not in transcript(client)
        world.pass_time(2.0)
        assert transcript(client)[-2:] == REJECTED
        client.record()
        world.pass_time(700.0)
        assert [each for each in transcript(client) if "ADD_LINK" in each] == REJECTED * 2


# --- links that end -------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.4/2", "3.5.5.1.3/5")
@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("end", [0, 1])
def test_an_operator_deletes_a_link(end: int, orderly: bool) -> None:
    """3.5.5.1.3, 3.5.5.1.4: the sides do not add the link again at once."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        (client, server)[end].group.delete_link(2, orderly=orderly)
        world.settle()
        assert server.group.state == client.group.state == "SINGLE"
        assert list(server.group.links) == list(client.group.links) == [1]
        assert sum(world.fabric.held[each] for each in ("qp", "pd")) == 4
        world.pass_time(300.0)
        assert server.group.state == "SINGLE"
        world.pass_time(100.0)
        assert server.group.state == client.group.state == "SYMMETRIC"


@pytest.mark.rfc("3.5.5.1.3/2", "A.3.4/1", "A.3.4/4", "A.3.4/5", "2.3/9", "2.2.4/1")
@pytest.mark.parametrize("end", [0, 1])
def test_a_lost_link_is_deleted_at_both_ends_and_replaced(end: int) -> None:
    """Figures 10 and 11; 3.5.5.1.3: the server uses a new number (2.2.4)."""
    with World(announces_end=False) as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        side = (client, server)[end]
        side.record()
        side.group.links[2].machine.send("failed")
        assert side.group.state == "SINGLE"
        world.settle()
        (request, *_) = messages(side, llc.DeleteLink)
        assert (request.link_number, request.orderly, request.reason) == (2, False, 0x00010000)
        assert list(server.group.links) == list(client.group.links) == [1, 3]
        assert server.group.kind == "symmetric"


@pytest.mark.parametrize("end", [0, 1])
def test_a_port_that_goes_down_ends_its_links(end: int) -> None:
    """The group stays as redundant as possible, and gets its second path back with the port."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        rnic = (client, server)[end].rnics[1]
        rnic.port_down()
        world.settle()
        assert server.group.kind == client.group.kind == "asymmetric"
        rnic.port_up()
        world.settle()
        assert server.group.kind == client.group.kind == "symmetric"
        assert len(server.group.links) == 2


@pytest.mark.rfc("3.5.5.1.4/2", "A.3.4/4", "2.3/9")
@pytest.mark.parametrize("end", [0, 1])
def test_links_leave_a_drained_rnic_in_order(end: int) -> None:
    """3.5.5.1.3: the side sends an orderly DELETE LINK.  With one path at that end, the remaining
    group is asymmetric."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        side = (client, server)[end]
        side.record()
        rnics = side.stack.rnic_set
        rnics.drain(side.rnics[0])
        world.settle()
        assert all(each.orderly for each in messages(side, llc.DeleteLink) if not each.reply)
        assert set(paths(side).values()) == {"memory1"}
        assert server.group.kind == "asymmetric"
        rnics.undrain(side.rnics[0])
        world.settle()
        assert server.group.kind == client.group.kind == "symmetric"


def test_the_only_link_of_a_drained_rnic_goes_when_another_one_is_there() -> None:
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        server.rnics[1].port_down()
        client.rnics[1].port_down()
        world.connect(client, server)
        assert server.group.kind == "single"
        server.stack.rnic_set.drain(server.rnics[0])
        world.settle()
        assert paths(server) == {1: "memory0"}  # the RNIC keeps the only link
        server.rnics[1].port_up()
        world.settle()
        assert list(paths(server).values()) == ["memory1"]


@pytest.mark.rfc("2.2.4/2")
def test_numbers_are_used_again_only_when_all_were() -> None:
    """2.2.4."""
    links = Links()
    assert [links.next_number() for _ in range(255)] == list(range(1, 256))
    links[1] = links[3] = None  # type: ignore[assignment]  # only the keys count
    assert [links.next_number() for _ in range(3)] == [2, 4, 5]


# --- the link on which a connection sends ---------------------------------------------------------


def test_new_connections_send_on_the_least_loaded_link() -> None:
    """2.3: each side chooses the link for its own direction."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        calls = [world.connect(client, server) for _ in range(7)]
        for side in (client, server):
            assert sorted(link.load for link in side.group.links.values()) == [2, 2, 3]
            view = LinkGroupView(side.group, side.stack.check_not_forked)
            assert [each.connections for each in view.links] == [3, 2, 2]
        for call in calls:
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")
            call.client.connection.close()
            call.server.connection.close()
        world.settle()
        assert [link.load for link in server.group.links.values()] == [0, 0, 0]


@pytest.mark.rfc("2.3/1", "3.5.2/13")
def test_the_two_sides_choose_their_links_independently() -> None:
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        first = world.connect(client, server)
        link = client.group.links[1]
        client.group.connections.move(first.client.connection, client.group.links[2])
        second = world.connect(client, server)
        assert second.client.connection in link.users
        assert second.server.connection in server.group.links[2].users
        assert exchange(world, second, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("3.5.5.2.1/1")
@pytest.mark.parametrize("end", [0, 1])
def test_a_new_rmb_is_confirmed_on_all_links(end: int) -> None:
    """3.5.5.2.1."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        world.connect(client, server)
        group, peer = ((client.group, server.group), (server.group, client.group))[end]
        done: list[object] = []
        group.request_element(4 * SIZE, done.append)
        world.settle()
        assert done
        tokens = group.own_rmbs.tokens(group.own_rmbs.pool.rmbs[-1])
        assert sorted(tokens) == [1, 2, 3]
        known = peer.peer_rmbs.find(2, tokens[2].rkey)
        assert known is not None
        assert known.tokens == tokens


# --- whole groups ---------------------------------------------------------------------------------


@pytest.mark.rfc("3.5.4/3", "3.5.4/5", "A.3.4/3")
@pytest.mark.parametrize("end", [0, 1])
def test_terminate_ends_all_links(end: int) -> None:
    """3.5.4."""
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        world.connect(client, server)
        (client, server)[end].group.terminate()
        world.settle()
        assert not client.groups
        assert not server.groups
        assert not any(world.fabric.held.values())


@pytest.mark.rfc("C.7.1/time-outs/14")
@pytest.mark.parametrize("end", [0, 1])
def test_delete_link_for_all_is_sent_again_over_another_link(end: int) -> None:
    """C.7.1, DELETE LINK (entire link group)."""
    with World(announces_end=False) as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        side, peer = (client, server) if end == 0 else (server, client)
        lost = side.group.links[1].qp
        world.fabric.tamper = lambda qp, m: None if qp is lost else [m]
        side.group.terminate()
        world.settle()
        assert not side.groups
        assert not peer.groups


@pytest.mark.rfc("4.8.3/2")
def test_the_loss_of_all_links_ends_the_group() -> None:
    """4.8.3."""
    with World() as world:
        client, server = world.side(rnics=2), world.side(rnics=2)
        world.connect(client, server)
        for rnic in server.rnics:
            rnic.port_down()
        world.pass_time(70.0)
        assert not client.groups
        assert not server.groups


# --- links without connections --------------------------------------------------------------------


def test_unused_links_are_deleted_and_added_again() -> None:
    """3.5.5.1.3: two links remain, and DELETE LINK gives inactivity as the reason."""
    with World() as world:
        client, server = world.side(rnics=4), world.side(rnics=4)
        calls = [world.connect(client, server)]
        client.record()
        world.pass_time(599.0)
        assert len(server.group.links) == 4
        world.pass_time(1300.0)
        requests = [each for each in messages(client, llc.DeleteLink) if not each.reply]
        assert [(each.link_number, each.orderly, each.reason) for each in requests] == [
            (4, True, 0x00030000),
            (3, True, 0x00030000),
        ]
        assert list(client.group.links) == list(server.group.links) == [1, 2]
        world.pass_time(1000.0)
        assert server.group.kind == "symmetric"
        calls.append(world.connect(client, server))
        assert len(server.group.links) == 4
        for call in calls:
            assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@pytest.mark.rfc("3.5.5.1.4/4")
def test_a_client_does_not_request_links_for_idle_ones() -> None:
    with World() as world:
        client = world.side(Config(link_group_idle=1), rnics=4)
        server = world.side(Config(link_group_idle=100_000), rnics=4)
        world.connect(client, server)
        client.record()
        world.pass_time(3000.0)
        assert messages(client, llc.DeleteLink) == []
        assert len(client.group.links) == 4


def test_links_in_use_stay() -> None:
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        for _ in range(3):
            world.connect(client, server)
        world.pass_time(3000.0)
        assert len(server.group.links) == len(client.group.links) == 3


def test_a_lost_link_is_replaced_although_idle_ones_went() -> None:
    with World() as world:
        client, server = world.side(rnics=3), world.side(rnics=3)
        world.connect(client, server)
        world.pass_time(700.0)
        assert list(server.group.links) == [1, 2]
        server.group.links[2].machine.send("failed")
        world.settle()
        assert server.group.kind == client.group.kind == "symmetric"
