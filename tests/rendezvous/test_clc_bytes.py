"""Bytes that do not belong to a CLC message, at each place and in each phase of the handshake
(RFC 7609, C.6): the connection ends as soon as they arrive, not after the time-out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.rendezvous.rendezvous_pair import Call, World
from trio_smc.wire import clc

PHASES = {
    # The end that receives the bytes, its state, and the message types that it waits for.
    "server waits for Proposal": (1, "LISTENING", {1, 4}),
    "client waits for Accept": (0, "PROPOSED", {2, 4}),
    "server waits for Confirm": (1, "ACCEPTED", {3, 4}),
    "server waits for LLC": (1, "CONFIRMING_LINK", {4}),
    "client waits for LLC": (0, "CONFIRMING_LINK", {4}),
}
SIZES = {1: 52, 2: 68, 3: 68, 4: 28}


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


def in_phase(world: World, phase: str) -> tuple[Call, Callable[[bytes], None]]:
    """A call whose end waits in this phase, and a function that sends bytes to that end."""
    place, state, _ = PHASES[phase]
    client, server = world.side(), world.side()
    call = world.call(client, server)
    if state == "CONFIRMING_LINK":
        world.fabric.tamper = lambda _, message: []
    else:
        call.tcp[1 - place].tamper = lambda data: data if data[4] + 1 in PHASES[phase][2] else b""
    if state == "PROPOSED":
        call.tcp[1].tamper = lambda _: b""
    elif state == "ACCEPTED":
        call.tcp[0].tamper = lambda data: data if data[4] == 1 else b""
    elif state == "LISTENING":
        call.tcp[0].tamper = lambda _: b""
    world.settle()
    assert call.ends[place].state == state
    sender = call.tcp[1 - place]

    def send(data: bytes) -> None:
        sender.tamper = lambda same: same
        sender.send(data)
        world.settle()

    return call, send


@pytest.mark.rfc("C.6/1", "C.6/2", "C.6/5")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("good", range(8))
def test_a_wrong_byte_ends_the_connection_as_it_arrives(
    world: World, phase: str, good: int
) -> None:
    """``good`` bytes of a valid header, and then a byte that fits no message."""
    place, _, types = PHASES[phase]
    kind = min(types)
    header = clc.EYE_CATCHER + bytes((kind, 0, SIZES[kind], 0x10))
    call, send = in_phase(world, phase)
    wrong = bytes(({6: 0x10, 7: 0}.get(good, header[good] ^ 0xFF),))  # a length, a version
    before = world.clock.now
    for byte in header[:good]:
        send(bytes((byte,)))
        assert call.ends[place].outcome is None
    send(wrong)
    assert call.ends[place].state == "FAILED"
    assert "protocol error" in str(call.ends[place].error)
    assert call.tcp[place].cut == "rst"
    assert world.clock.now == before


@pytest.mark.rfc("C.6/1", "C.6/5")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [*range(8), 0x7F, 0x80, 0xE2, 0xFF])
def test_a_type_out_of_turn_ends_the_connection_as_it_arrives(
    world: World, phase: str, kind: int
) -> None:
    place, _, types = PHASES[phase]
    call, send = in_phase(world, phase)
    send(clc.EYE_CATCHER + bytes((kind,)))
    assert (call.ends[place].state == "FAILED") is (kind not in types)


@pytest.mark.rfc("C.6/2", "C.6/5", "A.2/3")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("place", range(3))
def test_a_wrong_end_ends_the_connection_as_it_arrives(
    world: World, phase: str, place: int
) -> None:
    """A Decline whose last eye catcher has a wrong byte; no further byte arrives."""
    end = PHASES[phase][0]
    call, send = in_phase(world, phase)
    decline = clc.Decline(peer_id=bytes(8), diagnosis=1).encode()
    send(decline[: 24 + place])
    assert call.ends[end].outcome is None
    send(b"x")
    assert call.ends[end].state == "FAILED"


@pytest.mark.rfc("C.1/1", "C.6/3")
@pytest.mark.parametrize("phase", PHASES)
def test_a_message_may_come_byte_by_byte(world: World, phase: str) -> None:
    """Bytes behind a Decline belong to the application."""
    place = PHASES[phase][0]
    call, send = in_phase(world, phase)
    for byte in clc.Decline(peer_id=bytes(8), diagnosis=1).encode() + b"data":
        send(bytes((byte,)))
    assert call.ends[place].state == "FALLEN_BACK"
    assert call.tcp[place].receive(100) == b"data"


@pytest.mark.rfc("C.1/2", "C.6/1")
@pytest.mark.parametrize("data", [b"x", clc.EYE_CATCHER])
def test_nothing_may_come_while_this_side_prepares_its_answer(world: World, data: bytes) -> None:
    """The server delays its answer to a second connection because of a slow first contact."""
    client, server = world.side(), world.side()
    first = world.call(client, server)
    world.until(lambda: first.server.state == "ACCEPTED")
    first.tcp[0].tamper = lambda _: b""
    world.settle()
    second = world.call(client, server)
    world.settle()
    assert second.server.state == "WAITING"
    second.tcp[0].send(data)
    world.settle()
    assert second.server.state == "FAILED"
    assert first.server.state == "ACCEPTED"
