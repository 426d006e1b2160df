"""Reserved bits in whole conversations of two stacks, in both versions.  No sent message has a
reserved bit, and a receiver ignores all of them (RFC 7609, A.2, A.3, A.4).
`tests.wire.test_reserved_bits` has the same checks for single messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rendezvous.rendezvous_pair import SIZE, Call, Side, World, exchange
from tests.rendezvous.transcripts import line
from tests.rnic.memory_rnic import Fate, PlainQueuePair
from tests.wire.layouts import EXCEPTIONS, with_all_set, wrongly_set
from trio_smc._base.reasons import FallbackReason
from trio_smc.config.config import Config
from trio_smc.rendezvous.links.link import Link
from trio_smc.wire import cdc

HELLO = (b"ping", b"pong")
CONFIGS = {1: Config(link_group_idle=10_000), 2: Config(ueids=("TEST",), link_group_idle=10_000)}
LLC = ["CONFIRM_LINK", "ADD_LINK", "DELETE_LINK", "CONFIRM_RKEY", "DELETE_RKEY", "TEST_LINK"]
SEEN = {
    1: [*LLC, "ADD_LINK_CONTINUATION", "CONFIRM_RKEY_CONTINUATION"],
    2: [*LLC, "REQUEST_ADD_LINK"],
}
ONE_WAY = {"REQUEST_ADD_LINK"}  # ADD LINK is the answer


def set_reserved_bits(_: PlainQueuePair, message: bytes) -> list[bytes]:
    kind = "cdc" if message[0] == cdc.CDC_TYPE else "llc"
    return [with_all_set(kind, message)]


def connect(
    world: World, client: Side, server: Side, *, reserved_set: bool, **options: Any
) -> Call:
    call = world.call(client, server, **options)
    if reserved_set:
        for tcp in call.tcp:
            tcp.tamper = lambda data: with_all_set("clc", data)
    world.settle()
    return call


def exchange_all_messages(world: World, version: int, *, reserved_set: bool) -> tuple[Side, Side]:
    """Exchange messages of all types, and check that each operation works.

    reserved_set: True to set all reserved bits of each message on its way.
    """
    count = 4 if version == 1 else 2
    client, server = (
        world.side(CONFIGS[version], rnics=count, routable=version == 2) for _ in range(2)
    )
    client.record()
    server.record()
    if reserved_set:
        world.fabric.tamper = set_reserved_bits
    refused = connect(
        world, client, server, reserved_set=reserved_set, refusal=FallbackReason.NO_RNIC
    )
    assert refused.states == ("FALLEN_BACK", "FALLEN_BACK")
    refused.tcp[0].end("fin")
    calls = [connect(world, client, server, reserved_set=reserved_set) for _ in range(4)]
    assert {call.states for call in calls} == {("ESTABLISHED", "ESTABLISHED")}
    assert client.group.terms.version == server.group.terms.version == version
    for call in calls:
        assert exchange(world, call, HELLO) == HELLO[::-1]
    send_much(world, calls[0])
    change_group(world, client, server, calls[0])
    for call in calls:
        assert exchange(world, call, HELLO) == HELLO[::-1]
    end_all(world, calls)
    server.group.terminate()
    world.settle()
    assert not client.groups
    assert not server.groups
    return client, server


def send_much(world: World, call: Call) -> None:
    """Send urgent data, and more data than a ring holds, so that the writer is blocked."""
    here, there = call.connections
    here.send_urgent(memoryview(b"ab!"))
    world.settle()
    assert (there.receiver.receive(10), there.receiver.receive_urgent()) == (b"ab", ord("!"))
    world.settle()
    got = bytearray()
    rest = memoryview(bytes(range(256)) * (2 * SIZE // 256))
    while len(got) < 2 * SIZE:
        rest = rest[here.send(rest) :]
        world.settle()
        got += there.receiver.receive(SIZE)
        world.settle()
    assert got == bytes(range(256)) * (2 * SIZE // 256)


def change_group(world: World, client: Side, server: Side, call: Call) -> None:
    """Make and delete RMBs and links, and let the sides test silent links."""
    elements: list[Any] = []
    for side in (client, server):
        side.group.request_element(4 * SIZE, elements.append)
        world.settle()
        side.group.own_rmbs.release(elements[-1], 0)
    world.pass_time(1000.0)

    # A link fails while it carries a message, another one is deleted in order, new ones are added.
    here, there = call.connections
    link = here.channel
    assert isinstance(link, Link)
    assert isinstance(link.qp, PlainQueuePair)
    here.send(memoryview(b"matters"))
    while link.qp.work:
        link.qp.execute(Fate.LOST)
    world.settle()
    assert there.receiver.receive(10) == b"matters"
    server.group.delete_link(max(server.group.links))
    world.settle()
    for side in (client, server):
        side.add_rnic()
        world.settle()
    world.pass_time(400.0)


def end_all(world: World, calls: list[Call]) -> None:
    """End three connections, each in another way."""
    here, there = calls[0].connections
    calls[0].client.connection.shutdown_write()
    world.settle()
    assert there.receiver.at_eof
    there.close()
    here.close()
    calls[1].client.connection.abort()
    calls[2].server.connection.close()
    world.settle()
    calls[2].client.connection.close()
    world.settle()
    assert [call.client.connection.state for call in calls[:3]] == ["CLOSED"] * 3


def sent(*sides: Side) -> set[str]:
    """Check the reserved bits of all messages that these sides have sent; returns their names."""
    names: set[str] = set()
    for side in sides:
        for kind, way, data in side.recorder.messages():
            if way == "out":
                assert wrongly_set(EXCEPTIONS, kind, data) == {}, line((kind, way, data))
                names.add(line((kind, way, data)).removeprefix("out "))
    return names


@pytest.mark.rfc("A.2/1", "A.3/1")
@pytest.mark.parametrize("version", [1, 2])
def test_no_reserved_bit_is_set_in_a_conversation(version: int) -> None:
    with World(announces_end=False) as world:
        plain = sent(*exchange_all_messages(world, version, reserved_set=False))
        wanted = {"PROPOSAL", "ACCEPT", "CONFIRM", "DECLINE", "CDC", *SEEN[version]}
        wanted |= {f"{name} reply" for name in SEEN[version] if name not in ONE_WAY}
        assert plain == wanted


@pytest.mark.rfc("A.2/1", "A.2/2")
@pytest.mark.parametrize("version", [1, 2])
def test_with_all_reserved_bits_set_a_conversation_goes_the_same_way(version: int) -> None:
    """No reply repeats a reserved bit of its request."""
    with World(announces_end=False) as world:
        sides = exchange_all_messages(world, version, reserved_set=True)
        received = [(kind, data) for side in sides for kind, way, data in side.recorder.messages()
                    if way == "in"]  # fmt: skip
        assert all(wrongly_set(EXCEPTIONS, kind, data) for kind, data in received if kind != "clc")
        sent(*sides)
