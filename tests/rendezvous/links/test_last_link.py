"""A side deletes a link while another link fails: it processes the messages that have arrived, and
keeps the last link (RFC 7609, 4.6.1, 4.8.3).  Messages over TCP may be faster (3.5.2.3, 4.4.2)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import World
from trio_smc.datapath.connection import Connection
from trio_smc.rendezvous.links.link import Link
from trio_smc.rendezvous.negotiation import Established
from trio_smc.wire import clc, llc


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


def rnics_in_use(stage: Stage, place: int) -> set[str]:
    """Names of one end's RNICs with links."""
    return {link.rnic.name for link in stage.end(place).group.links.values()}


def channel(connection: Connection) -> Link:
    """The link on which the connection sends."""
    link = connection.channel
    assert isinstance(link, Link)
    return link


# --- the link to be deleted becomes the last one ----------------------------------------------


@pytest.mark.rfc("4.8.3/2", "3.5.5.1.3/1", "2.3/2")
@pytest.mark.parametrize(
    ("drained", "lost"),
    [
        (0, "C1 DELETE_LINK 2"),
        (0, "S1 DELETE_LINK 2"),
        (0, "C1 DELETE_LINK 2 reply"),
        (1, "S1 DELETE_LINK 2"),
        (1, "C1 DELETE_LINK 2 reply"),
    ],
)
def test_a_link_that_was_to_go_stays_when_the_other_one_fails(
    world: World, drained: int, lost: str
) -> None:
    """The link that carries DELETE LINK fails, so the peers reach each other over link 2 only."""
    stage = Stage(world, (2, 2))
    groups = [stage.end(place).group for place in (0, 1)]
    stage.wire.fail(f"{lost}$")
    side = stage.end(drained)
    side.stack.rnic_set.drain(side.rnics[1])
    world.settle()
    assert lost in stage.log
    assert [stage.end(place).group for place in (0, 1)] == groups, "a group was lost"
    assert stage.works()
    # A new link replaces the failed one, so the deletion can end.
    assert rnics_in_use(stage, drained) == {"memory0"}
    assert 2 not in stage.links()
    side.stack.rnic_set.undrain(side.rnics[1])
    world.settle()
    assert groups[0].kind == groups[1].kind == "symmetric"
    assert stage.works()


@pytest.mark.rfc("4.8.3/2")
@pytest.mark.parametrize("place", [0, 1])
def test_connections_that_leave_a_link_stay_when_the_other_one_fails(
    world: World, place: int
) -> None:
    stage = Stage(world, (2, 2))
    side, connection = stage.end(place), stage.call.connections[place]
    leaving = channel(connection)
    [other] = [link for link in side.group.links.values() if link is not leaving]
    connection.send(memoryview(b"under way"))
    side.stack.rnic_set.drain(leaving.rnic)
    world.until(lambda: leaving.state == "LEAVING")
    other.qp.to_err()
    world.settle()
    peer = stage.call.connections[1 - place]
    assert peer.receiver.receive(100) == b"under way"
    assert stage.works()
    side.stack.rnic_set.undrain(leaving.rnic)
    world.settle()
    assert stage.works()
    # The abandoned link blocks nothing: the group has two links again.
    assert stage.client.group.kind == stage.server.group.kind == "symmetric"


@pytest.mark.rfc("4.8.3/2")
def test_a_deleted_link_does_not_save_the_group(world: World) -> None:
    """The server has already freed the link when the other link fails, so no link is left."""
    stage = Stage(world, (2, 2))
    stage.server.group.delete_link(2)
    world.until(lambda: list(stage.server.group.links) == [1])
    for side in (stage.client, stage.server):
        side.group.links[1].qp.to_err()
    world.settle()
    assert stage.is_over()


# --- messages that are still in a receive ring --------------------------------------------------


@pytest.mark.rfc("4.6.1/2")
@pytest.mark.parametrize("place", [0, 1])
def test_a_link_deleted_in_order_delivers_received_data(world: World, place: int) -> None:
    """The peer counts the data as delivered, and does not send it again (`Mover.link_ends`)."""
    stage = Stage(world, (2, 2))
    here, there = stage.call.connections[place], stage.call.connections[1 - place]
    link = channel(there)
    there.send(memoryview(b"the last it brought"))
    world.fabric.deliver()
    assert here.receiver.receive(100) == b""
    stage.end(place).group.remove_link(link.number)
    assert here.receiver.receive(100) == b"the last it brought"


@pytest.mark.rfc("4.6.1/2")
@pytest.mark.parametrize("place", [0, 1])
def test_a_group_deleted_in_order_delivers_data_and_ends(world: World, place: int) -> None:
    """DELETE LINK travels on one link, and can overtake the peer's last messages on another."""
    stage = Stage(world, (2, 2))
    here, there = stage.call.connections[place], stage.call.connections[1 - place]
    there.send(memoryview(b"the last it brought"))
    there.close()
    world.fabric.deliver()
    stage.end(1 - place).stack.pump.drain()  # the data has arrived, so C is sent
    world.fabric.deliver()
    assert here.receiver.receive(100) == b""
    stage.end(place).group.delete_all(llc.DeleteLinkReason.PROGRAM)
    world.settle()
    assert here.receiver.receive(100) == b"the last it brought"
    assert here.receiver.at_eof
    assert here.error is None


@pytest.mark.parametrize("place", [0, 1])
def test_an_element_reused_before_its_final_messages_arrived(world: World, place: int) -> None:
    """SMC Accept and Confirm travel over TCP, and may arrive before the last CDC message of the
    connection that had the element before.  That connection ends in order and is not reset."""
    stage = Stage(world, (2, 2))
    here, there = stage.call.connections[place], stage.call.connections[1 - place]
    here.close()
    world.settle()
    there.close()
    world.fabric.deliver()  # the receiver has not processed the message yet
    stage.end(1 - place).stack.pump.drain()
    assert there.state == "CLOSED"
    assert here.state != "CLOSED"

    connections = stage.end(place).group.connections
    tokens = stage.end(1 - place).group.own_rmbs.tokens(there.rmbe.rmb)
    number, token = next(iter(tokens.items()))
    again: Any = SimpleNamespace(
        rkey=token.rkey, rmb_address=token.address, rmbe_index=there.rmbe.index,
        buffer_size=there.rmbe.size,
    )  # fmt: skip
    connections.attach_untrusted(here, again, stage.end(place).group.links[number])
    assert here.state == "CLOSED"
    assert [tcp.cut for tcp in stage.call.tcp] == ["fin", "fin"]


@pytest.mark.parametrize("alone", [False, True], ids=["as-accept", "the-only-one"])
def test_confirm_overtakes_the_reply_to_confirm_link(world: World, alone: bool) -> None:
    """The client may use the new link before the server has received the reply."""
    stage = Stage(world, (2, 2), down=1)
    # One connection on each link, so the new link is the least loaded.
    world.connect(stage.client, stage.server)
    stage.server.rnics[1].port_up()
    links, theirs = stage.client.group.links, stage.server.group.links
    world.until(lambda: 3 in links and links[3].state == "ACTIVE")
    world.fabric.deliver()  # no side polls
    assert stage.server.group.exchanges.state == "ADD_LINK_CONFIRM"
    if alone:
        for number in (1, 2):
            links[number].machine.send("leave")
    stage.client.record()
    call = world.call(stage.client, stage.server)
    while any(end.step(world.clock.now) for end in call.ends) or world.tcp_changes:
        while world.tcp_changes:
            world.tcp_changes.popleft().process_change()
    assert [type(end.outcome) for end in call.ends] == [Established, Established]
    _, accept, confirm = [
        clc.decode_untrusted(each[2]) for each in stage.client.recorder.events if each[0] == "clc"
    ]
    assert isinstance(accept, clc.Accept)
    assert isinstance(confirm, clc.Confirm)
    [named] = [link for link in theirs.values() if link.qp.qp_num == accept.qp_number]
    assert confirm.qp_number == links[3 if alone else named.number].qp.qp_num
