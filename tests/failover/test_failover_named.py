"""Failures that a failover must survive, by name (RFC 7609, 2.3, 4.6).

Each test has two whole stacks, one connection and one failure.  `tests.campaigns.failover` combines
these failures between two processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rendezvous.links.llc_wire import Stage
from tests.rendezvous.rendezvous_pair import World, exchange
from tests.rnic.memory_rnic import Fate, PlainQueuePair
from trio_smc.datapath.connection import Connection
from trio_smc.failover import replay
from trio_smc.rendezvous.links.link import Link

BOTH_ENDS = pytest.mark.parametrize("place", [0, 1])
SURVIVABLE = pytest.mark.parametrize("fate", [Fate.LOST, Fate.UNACKNOWLEDGED])
DATA = b"a few bytes that matter"


@pytest.fixture
def world() -> Iterator[World]:
    with World(announces_end=False) as world:
        yield world


def ends(stage: Stage, place: int) -> tuple[Connection, Connection]:
    """This end's connection, and the peer's."""
    return stage.call.connections[place], stage.call.connections[1 - place]


def queue_pair(connection: Connection) -> PlainQueuePair:
    """The queue pair of the link that the connection uses."""
    link = connection.channel
    assert isinstance(link, Link)
    assert isinstance(link.qp, PlainQueuePair)
    return link.qp


def strike(connection: Connection, fate: Fate, *, write: bool = False) -> None:
    """Execute the connection's next write, or its next message, with this fate."""
    qp = queue_pair(connection)
    while (qp.work[0].message is None) is not write:
        qp.execute()
    qp.execute(fate)


@BOTH_ENDS
@SURVIVABLE
@pytest.mark.parametrize("write", [False, True], ids=["message", "write"])
@pytest.mark.rfc("2.3/2", "4.6.1/1", "4.6.2/1")
def test_a_message_a_write_or_its_completion_is_lost(
    world: World, place: int, fate: Fate, write: bool
) -> None:
    stage = Stage(world, (2, 2))
    here, there = ends(stage, place)
    here.send(memoryview(DATA))
    strike(here, fate, write=write)
    world.settle()
    assert there.receiver.receive(100) == DATA
    assert here.failovers == 1
    assert here.sender.unacknowledged == 0
    assert stage.works()


@BOTH_ENDS
@pytest.mark.rfc("2.3/5", "4.6.1/6")
def test_a_message_counts_as_arrived_and_did_not(world: World, place: int) -> None:
    """Such a loss cannot be repaired: the connection is reset, and the other one continues."""
    stage = Stage(world, (2, 2))
    other = world.connect(stage.client, stage.server)
    here, there = ends(stage, place)
    here.send(memoryview(DATA))
    qp = queue_pair(here)
    strike(here, Fate.UNPLACED)
    stage.end(place).stack.pump.drain()
    qp.to_err()
    world.settle()
    for connection in (here, there):
        with pytest.raises(OSError, match=r"reset|abort"):
            connection.receiver.receive(1)
    assert exchange(world, other, (b"ping", b"pong")) == (b"pong", b"ping")


@BOTH_ENDS
@pytest.mark.rfc("2.3/5", "4.6.1/6")
def test_lost_data_is_missed_after_two_failovers(world: World, place: int) -> None:
    """Two validation messages wait on two links: messages behind one of them must not be processed
    while the other one is checked."""
    stage = Stage(world, (3, 3))
    here, there = ends(stage, place)
    pump, peer = stage.end(place).stack.pump, stage.end(1 - place)
    here.send(memoryview(DATA))
    first = queue_pair(here)
    strike(here, Fate.UNPLACED)
    pump.drain()
    first.to_err()
    pump.drain()
    second = queue_pair(here)
    second.execute()  # the validation message
    second.to_err()
    pump.drain()
    third = queue_pair(here)
    assert len({first, second, third}) == 3
    here.send(memoryview(b"and more"))  # behind the validation message
    while third.work:
        third.execute()
    [link] = [link for link in peer.group.links.values() if link.qp is third.peer()]
    peer.stack.pump.drain_queue_pair(link.rnic, link.qp)
    world.settle()
    for connection in (here, there):
        with pytest.raises(OSError, match=r"reset|abort"):
            connection.receiver.receive(1)


@pytest.mark.rfc("2.3/2", "2.3/6")
def test_all_rnics_fail_in_turn(world: World) -> None:
    stage = Stage(world, (2, 2))
    for _ in range(2):
        for place in (0, 1):
            for rnic in stage.end(place).rnics:
                for connection in stage.call.connections:
                    connection.send(memoryview(DATA))
                rnic.port_down()
                world.settle()
                assert [each.receiver.receive(100) for each in stage.call.connections] == [
                    DATA,
                    DATA,
                ]
                rnic.port_up()
                world.settle()
                assert stage.client.group.kind == stage.server.group.kind == "symmetric"
    assert stage.works()


@BOTH_ENDS
@SURVIVABLE
@pytest.mark.parametrize("posted", [0, 1, 2], ids=["validation", "write", "message"])
@pytest.mark.rfc("2.3/2", "4.6.2/1")
def test_a_failure_during_the_failover(world: World, place: int, fate: Fate, posted: int) -> None:
    """Each request of the replay fails in turn, on the new link."""
    stage = Stage(world, (3, 3))
    here, there = ends(stage, place)
    here.send(memoryview(DATA))
    strike(here, fate)
    stage.end(place).stack.pump.drain()
    second = queue_pair(here)
    assert here.failovers == 1
    for _ in range(posted):
        second.execute()
    second.execute(fate)
    world.settle()
    assert here.failovers == 2
    assert there.receiver.receive(100) == DATA
    assert stage.works()


@pytest.mark.parametrize(
    "lost",
    [
        r"S\d ADD_LINK \d",
        r"C\d ADD_LINK \d reply",
        r"S\d ADD_LINK_CONTINUATION",
        r"C\d ADD_LINK_CONTINUATION reply",
        r"S3 CONFIRM_LINK",
        r"C3 CONFIRM_LINK reply",
    ],
)
@pytest.mark.rfc("2.3/2", "C.7.1/time-outs/6")
def test_a_failure_while_a_link_is_added(world: World, lost: str) -> None:
    """The link that carries the exchange fails, or the new one; data is under way."""
    stage = Stage(world, (3, 3), down=1)
    for connection in stage.call.connections:
        connection.send(memoryview(DATA))
    stage.wire.fail(lost)
    stage.server.rnics[2].port_up()
    world.settle()
    assert [each.receiver.receive(100) for each in stage.call.connections] == [DATA, DATA]
    assert stage.works()
    world.pass_time(30.0)  # C.8
    assert len(stage.links()) == 3
    assert stage.client.group.kind == stage.server.group.kind == "symmetric"
    assert stage.works()


@BOTH_ENDS
@SURVIVABLE
@pytest.mark.rfc("2.3/2")
def test_a_failure_while_urgent_data_is_pending(world: World, place: int, fate: Fate) -> None:
    stage = Stage(world, (2, 2))
    here, there = ends(stage, place)
    assert here.send_urgent(memoryview(b"ab!")) == 3
    strike(here, fate)
    world.settle()
    assert there.receiver.receive_urgent() == ord("!")
    assert there.receiver.receive(100) == b"ab"
    assert there.receiver.receive_urgent() is None
    assert here.failovers == 1
    world.settle()  # the sender writes nothing behind urgent data that was not read yet
    assert stage.works()


@BOTH_ENDS
@SURVIVABLE
@pytest.mark.parametrize("ending", [0, 1], ids=["data", "end"])
@pytest.mark.rfc("2.3/2")
def test_a_failure_while_closing(world: World, place: int, fate: Fate, ending: int) -> None:
    """The message that announces the last data, or the one that announces the end."""
    stage = Stage(world, (2, 2))
    here, there = ends(stage, place)
    here.send(memoryview(DATA))
    here.close()
    qp = queue_pair(here)
    for _ in range(ending):
        while qp.work[0].message is None:
            qp.execute()
        qp.execute()
        stage.end(place).stack.pump.drain()
    strike(here, fate)
    world.settle()
    assert here.failovers == 1
    assert there.receiver.receive(100) == DATA
    there.close()
    world.settle()
    assert (here.state, there.state) == ("CLOSED", "CLOSED")
    assert [tcp.cut for tcp in stage.call.tcp] == ["fin", "fin"]


@pytest.mark.rfc("2.2.2/10", "2.3/1")
def test_a_restored_rnic_gets_its_link_and_its_share(world: World) -> None:
    """The asymmetric link ends, and the load of the links is even again."""
    stage = Stage(world, (2, 2))
    calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(5))]
    sides = (stage.client, stage.server)
    stage.server.rnics[1].port_down()
    world.settle()
    for side in sides:
        assert side.group.kind == "asymmetric"
        assert sum(link.load for link in side.group.links.values()) == len(calls)
    stage.server.rnics[1].port_up()
    world.settle()
    for side in sides:
        assert side.group.kind == "symmetric"
        assert [link.load for link in side.group.links.values()] == [3, 3]
    for call in calls:
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


def leaving(world: World, place: int) -> tuple[Stage, Link, list[Connection], list[Link]]:
    """A link that two connections leave, both with data in flight, and a list of the reported
    links."""
    stage = Stage(world, (2, 2))
    calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(3))]
    connections = [call.connections[place] for call in calls]
    link, reports = connections[0].channel, list[Link]()
    assert isinstance(link, Link)
    both = [connection for connection in connections if connection.channel is link]
    assert len(both) == 2
    for connection in both:
        connection.send(memoryview(DATA))
    link.machine.send("leave")
    stage.end(place).group.mover.link_leaving(link, lambda: reports.append(link))
    return stage, link, both, reports


@BOTH_ENDS
@pytest.mark.rfc("2.3/2")
def test_a_link_is_left_when_its_last_connection_has_gone(world: World, place: int) -> None:
    stage, link, (first, second), reports = leaving(world, place)
    pump, qp = stage.end(place).stack.pump, link.qp
    assert isinstance(qp, PlainQueuePair)
    qp.execute()
    qp.execute()  # the write and the message of the first
    pump.drain()
    assert first.channel is not link
    assert second.channel is link
    assert not reports
    world.settle()
    assert second.channel is not link
    assert reports == [link]


@BOTH_ENDS
@pytest.mark.rfc("4.8.3/2")
def test_no_callback_if_an_abandoned_link_stays(world: World, place: int) -> None:
    stage, link, both, reports = leaving(world, place)
    link.machine.send("stay")
    stage.end(place).group.mover.link_stays(link)
    both[0].abort()
    world.settle()
    assert both[1].channel is link
    assert not reports
    peers = stage.end(1 - place).connections
    assert [each.receiver.receive(100) for each in peers if each.receiver.bytes_received] == [DATA]


@BOTH_ENDS
@pytest.mark.parametrize("ends_first", [False, True], ids=["worth it", "not any more"])
def test_a_move_for_even_loads_that_is_not_worth_it_any_more(
    world: World, place: int, ends_first: bool
) -> None:
    """A connection with data in flight is to move, and meanwhile a connection ends."""
    stage = Stage(world, (2, 2))
    calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(5))]
    connections = [call.connections[place] for call in calls]
    link = connections[0].channel
    assert isinstance(link, Link)
    many = [connection for connection in connections if connection.channel is link]
    for connection in [each for each in connections if each.channel is not link][1:]:
        connection.abort()
    world.settle()
    group = stage.end(place).group
    [other] = [each for each in group.links.values() if each is not link]
    assert (link.load, other.load) == (3, 1)
    many[-1].send(memoryview(DATA))
    group.mover.link_ready(other)
    assert many[-1].channel is link, "not before its data has arrived"
    if ends_first:
        many[0].tcp_reset()
        many[0].links_lost()
        assert link.load == 2
    world.settle()
    assert many[-1].channel is (link if ends_first else other)
    many[-1].send(memoryview(DATA))
    world.settle()
    peers = stage.end(1 - place).connections
    readers = [each.receiver for each in peers if each.receiver.readable]
    assert [reader.receive(100) for reader in readers] == [DATA + DATA]


@BOTH_ENDS
def test_a_link_fails_while_one_of_its_connections_ends(world: World, place: int) -> None:
    """That connection is not moved any more; the others continue."""
    stage = Stage(world, (2, 2))
    calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(3))]
    ending, link = stage.call.connections[place], stage.call.connections[place].channel
    assert isinstance(link, Link)
    others = [call for call in calls[1:] if call.connections[place].channel is link]
    assert others
    ending.send(memoryview(DATA))

    def fail() -> None:
        link.machine.send("failed")

    replay.hold(ending, fail)
    record = stage.end(place).record()
    ending.links_lost()
    assert (ending.state, link.state) == ("CLOSED", "DOWN")
    moves = [what for kind, _, what in record.events if kind == "state" and what[2] == "move"]
    assert len(moves) == len(others)
    world.settle()
    for call in others:
        assert call.connections[place].failovers
        assert exchange(world, call, (b"ping", b"pong")) == (b"pong", b"ping")


@BOTH_ENDS
def test_a_new_link_without_a_link_to_relieve(world: World, place: int) -> None:
    """The other connections have moved meanwhile, or the link itself has gone."""
    stage = Stage(world, (2, 2))
    group = stage.end(place).group
    connection = stage.call.connections[place]
    busy = connection.channel
    [idle] = [each for each in group.links.values() if each is not busy]
    idle.machine.send("leave")
    for link in group.links.values():
        group.mover.link_ready(link)
    assert connection.channel is busy
    assert stage.works()


@BOTH_ENDS
@pytest.mark.parametrize("closed", [0, 1, 2, 3])
def test_the_last_link_ends_connections_that_the_peer_has_not_closed(
    world: World, place: int, closed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Only these are counted in the warning; without them there is none."""
    stage = Stage(world, (1, 1))
    calls = [stage.call, *(world.connect(stage.client, stage.server) for _ in range(2))]
    for call in calls[:closed]:
        call.connections[1 - place].close()
    world.settle()
    queue_pair(stage.call.connections[place]).to_err()
    stage.end(place).stack.pump.drain()
    warnings = [each.getMessage() for each in caplog.records if "no other link" in each.msg]
    left = len(calls) - closed
    assert [each.split(" (")[-1] for each in warnings] == [f"connections lost: {left})"][: left > 0]
