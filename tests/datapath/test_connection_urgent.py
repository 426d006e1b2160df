"""Urgent data in the connection core (RFC 7609, 4.7.5, 4.7.6): two cores back to back.

Figures 20 and 21 are in test_connection_figures, dishonest peers in test_connection_hostile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.datapath.datapath_pair import Cdc, FakeChannel, Pair, Write
from tests.peers import open_pair
from trio_smc.datapath.connection import Connection
from trio_smc.failover.replay import move
from trio_smc.wire.cdc import (
    FAILOVER_VALIDATION,
    SENDING_DONE,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
)

RING = 64
P, U, B = URGENT_PENDING, URGENT_PRESENT, WRITER_BLOCKED
F = FAILOVER_VALIDATION


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("core", (RING, RING), chunks=False) as pair:
        yield pair


def view(data: bytes) -> memoryview:
    return memoryview(data)


def flags(channel: FakeChannel) -> list[int]:
    return [entry.flags for entry in channel.log if isinstance(entry, Cdc)]


def urgent(connection: Connection) -> bytes | None:
    byte = connection.receiver.receive_urgent()
    return None if byte is None else bytes([byte])


def test_the_byte_is_taken_out_of_the_stream(pair: Pair) -> None:
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.settle()
    assert pair.b.receiver.urgent == "present"
    assert (pair.b.receiver.readable, pair.b.receiver.peek(100)) == (3, b"abc")
    assert pair.b.receiver.receive(1) == b"a"
    buffer = bytearray(100)
    assert pair.b.receiver.receive_into(buffer) == 2
    assert urgent(pair.b) == b"!"
    assert (pair.b.receiver.urgent, urgent(pair.b)) == ("none", None), "never returned twice"
    pair.settle()
    assert pair.a.send(view(b"def")) == 3
    pair.settle()
    assert pair.b.receiver.receive(100) == b"def"


def test_the_byte_stays_in_the_stream(pair: Pair) -> None:
    pair.b.receiver.urgent_inline = True
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.settle()
    assert pair.b.receiver.urgent == "present"
    assert pair.b.receiver.receive_urgent() is None
    assert pair.b.receiver.receive(3) == b"abc"
    assert pair.b.receiver.urgent == "present"
    pair.settle()
    assert pair.a.send(view(b"d")) == 0
    assert pair.b.receiver.receive(100) == b"!"
    assert pair.b.receiver.urgent == "none"
    assert [entry.consumer for entry in pair.ba.log if isinstance(entry, Cdc)] == [(3, 0), (4, 0)]
    pair.settle()
    assert pair.a.send(view(b"d")) == 1


@pytest.mark.rfc("4.7.5/3")
@pytest.mark.parametrize("inline", [False, True])
def test_a_byte_alone(pair: Pair, inline: bool) -> None:
    pair.b.receiver.urgent_inline = inline
    assert pair.a.send_urgent(view(b"!")) == 1
    pair.ab.deliver()
    if inline:
        assert pair.ba.log == []
        assert pair.b.receiver.receive(9) == b"!"
    else:
        # The byte was copied, and no data is before it: announced at once (4.7.5, step 3).
        assert pair.ba.log == [Cdc(1, producer=(0, 0), consumer=(1, 0))]
        assert pair.b.receiver.receive(9) == b""
        assert urgent(pair.b) == b"!"
    assert len(pair.ba.log) == 1
    assert not pair.b.unread


@pytest.mark.parametrize("before", range(RING - 3, RING + 3))
@pytest.mark.parametrize("eye_catcher", [False, True])
def test_the_byte_at_the_rings_end(before: int, eye_catcher: bool) -> None:
    """Also as the ring's first byte, when the cursor behind it has wrapped or not."""
    pair = Pair((RING, RING), (eye_catcher, eye_catcher))
    sent = 0
    while sent < before:
        sent += pair.a.send(view(bytes(min(16, before - sent))))
        pair.settle()
        pair.b.receiver.receive(RING)
        pair.settle()
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.settle()
    assert urgent(pair.b) == b"!"
    assert pair.b.receiver.receive(RING) == b"abc"
    pair.settle()
    assert pair.a.sender.can_send
    pair.close()


def test_a_second_urgent_byte_waits_and_takes_the_place_of_the_first(pair: Pair) -> None:
    assert pair.a.send_urgent(view(b"ab1")) == 3
    assert pair.a.send_urgent(view(b"2")) == 0, "the first is not acknowledged"
    pair.settle()
    assert flags(pair.ab) == [P | U], "and another is not announced before"
    woken: list[int] = []
    pair.a.on_writable = lambda: woken.append(1)
    assert pair.b.receiver.receive(100) == b"ab"
    pair.settle()
    assert woken == [1]
    assert pair.a.send_urgent(view(b"2")) == 1
    pair.settle()
    assert urgent(pair.b) == b"2", "like TCP's urgent pointer, it has only the last one"
    assert urgent(pair.b) is None
    assert flags(pair.ab) == [P | U, P | U]


def test_urgent_data_on_a_link_that_delivers_at_once(pair: Pair) -> None:
    pair.ab.instant = True
    assert pair.a.send(view(b"plain")) == 5
    assert pair.a.send_urgent(view(b"ab!")) == 3
    pair.settle()
    assert flags(pair.ab)[:2] == [0, P | U]
    assert urgent(pair.b) == b"!"
    assert pair.b.receiver.receive(100) == b"plainab"


@pytest.mark.rfc("4.7.5/4")
def test_unread_data_before_it_has_to_be_read_first(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * 30)) == 30
    pair.settle()
    assert pair.a.send_urgent(view(b"!")) == 1
    pair.settle()
    assert urgent(pair.b) == b"!"
    assert pair.ba.log == []
    assert pair.a.send(view(b"y")) == 0
    assert pair.b.receiver.receive(29) == b"x" * 29
    pair.settle()
    assert pair.a.send(view(b"y")) == 0
    assert pair.b.receiver.receive(29) == b"x"
    pair.settle()
    assert pair.a.sender.can_send
    assert pair.a.sender.window == RING


def test_a_window_too_small_for_all_of_it(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * 60)) == 60
    pair.settle()
    pair.ab.log.clear()
    assert pair.a.send_urgent(view(b"abcdefg!")) == 4
    assert pair.ab.log == [Write(60, 63), Cdc(2, (0, 1), (0, 0), flags=B | P)]
    pair.ab.deliver()
    assert pair.b.receiver.urgent == "pending"
    assert pair.b.receiver.receive(100) == b"x" * 60 + b"abcd"
    pair.settle()
    assert pair.a.send_urgent(view(b"efg!")) == 4
    pair.settle()
    assert (pair.b.receiver.receive(100), urgent(pair.b)) == (b"efg", b"!")
    assert flags(pair.ab) == [B | P, P | U]


def test_waiting_urgent_data_can_be_withdrawn(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * RING)) == RING
    assert pair.a.send_urgent(view(b"!")) == 0
    pair.settle()
    assert pair.b.receiver.urgent == "pending"
    pair.a.sender.withdraw_urgent()
    pair.settle()
    assert pair.b.receiver.urgent == "none"
    assert flags(pair.ab) == [0, B | P, B]
    pair.a.sender.withdraw_urgent()
    assert len(flags(pair.ab)) == 3
    pair.b.receiver.receive(RING)
    pair.settle()
    assert pair.a.send(view(b"y")) == 1
    assert flags(pair.ab)[-1] == 0


def test_flags_are_cleared_in_the_next_message_of_any_kind(pair: Pair) -> None:
    """Some peers take P and U without new data for the announcement of another byte."""
    pair.b.send(view(b"x" * 60))
    pair.settle()
    assert pair.a.send_urgent(view(b"a!")) == 2
    assert pair.a.receiver.receive(60) == b"x" * 60
    pair.settle()
    assert flags(pair.ab) == [P | U, 0]
    assert pair.b.receiver.urgent == "present"
    assert pair.b.receiver.receive(9) == b"a"
    pair.settle()
    assert pair.a.sender.can_send, "the mark is announced although the flags are cleared"


def test_urgent_data_is_not_deferred_with_other_messages() -> None:
    pair = Pair((RING, RING), merge=True)
    assert pair.a.send(view(b"abc")) == 3
    assert pair.ab.raw == []
    assert pair.a.send_urgent(view(b"!")) == 1
    assert flags(pair.ab) == [P | U]
    pair.flush()
    assert flags(pair.ab) == [P | U]
    pair.settle()
    assert (pair.b.receiver.receive(9), urgent(pair.b)) == (b"abc", b"!")
    pair.close()


def test_a_link_without_room(pair: Pair) -> None:
    pair.ab.room = 0
    assert pair.a.send_urgent(view(b"abc!")) == 0
    assert pair.ab.log == []
    pair.ab.room = 100
    pair.ab.complete()
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.settle()
    assert flags(pair.ab) == [P, P | U]
    assert (pair.b.receiver.receive(9), urgent(pair.b)) == (b"abc", b"!")


def test_the_acknowledgement_waits_for_room(pair: Pair) -> None:
    pair.ba.room = 0
    assert pair.a.send_urgent(view(b"!")) == 1
    pair.settle()
    assert pair.ba.log == []
    assert not pair.a.sender.can_send
    pair.ba.room = 100
    pair.ba.complete()
    pair.settle()
    assert pair.a.sender.can_send


def test_a_limit_of_unacknowledged_bytes_cuts_it_too(pair: Pair) -> None:
    pair.a.limit_unacknowledged(3)
    assert pair.a.send_urgent(view(b"abcd!")) == 3
    pair.settle()
    assert pair.b.receiver.urgent == "pending"
    assert pair.a.send_urgent(view(b"d!")) == 2
    pair.settle()
    assert (pair.b.receiver.receive(9), urgent(pair.b)) == (b"abcd", b"!")


def test_no_data_is_no_urgent_data(pair: Pair) -> None:
    with pytest.raises(ValueError, match="one byte"):
        pair.a.send_urgent(view(b""))


def test_both_ways_at_once(pair: Pair) -> None:
    assert pair.a.send_urgent(view(b"a!")) == 2
    assert pair.b.send_urgent(view(b"b?")) == 2
    pair.settle()
    assert (pair.a.receiver.receive(9), pair.b.receiver.receive(9)) == (b"b", b"a")
    assert (urgent(pair.a), urgent(pair.b)) == (b"?", b"!")
    pair.settle()
    assert pair.a.sender.can_send
    assert pair.b.sender.can_send


@pytest.mark.rfc("4.7.5/2", "4.7.6/2")
def test_the_waiter_is_called_for_each_change(pair: Pair) -> None:
    woken: list[str] = []

    def wake() -> None:
        woken.append(pair.b.receiver.urgent)
        pair.b.on_urgent = wake

    pair.b.on_urgent = wake
    pair.a.send(view(b"x" * RING))
    pair.settle()
    assert woken == [], "not for ordinary data"
    pair.a.send_urgent(view(b"!"))
    pair.settle()
    assert woken == ["pending"]
    pair.b.receiver.receive(RING)
    pair.settle()
    pair.a.send_urgent(view(b"!"))
    pair.settle()
    assert woken == ["pending", "present"]


# --- endings ---------------------------------------------------------------------------------


def test_urgent_data_and_the_end_in_one_go(pair: Pair) -> None:
    """Closing waits for the data, not for its acknowledgement: C is no RDMA write."""
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.a.close()
    pair.ab.deliver()
    pair.ab.complete()
    assert pair.a.state == "PEERCLOSEWAIT1"
    pair.settle()
    assert pair.b.receiver.receive(9) == b"abc"
    assert pair.b.receiver.at_eof
    assert pair.b.receiver.urgent == "present"
    assert urgent(pair.b) == b"!"
    assert pair.b.receiver.urgent_over
    pair.b.close()
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert pair.b.error is None


def test_an_end_while_urgent_data_waits(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * RING)) == RING
    assert pair.a.send_urgent(view(b"!")) == 0
    pair.settle()
    assert pair.b.receiver.urgent == "pending"
    woken: list[str] = []
    pair.b.on_urgent = lambda: woken.append(pair.b.receiver.urgent)
    pair.a.shutdown_write()
    pair.settle()
    assert woken == ["none"]
    assert pair.b.receiver.urgent_over
    assert pair.ab.log[-1] == Cdc(3, (0, 1), (0, 0), flags=B, endings=SENDING_DONE)


def test_an_abort_while_urgent_data_waits(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * RING)) == RING
    assert pair.a.send_urgent(view(b"!")) == 0
    pair.a.abort()
    pair.settle()
    assert flags(pair.ab)[-1] == 0
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive_urgent()
    with pytest.raises(ConnectionAbortedError):
        pair.a.send_urgent(view(b"!"))


def test_the_byte_survives_an_abort(pair: Pair) -> None:
    pair.a.send_urgent(view(b"!"))
    pair.settle()
    pair.a.abort()
    pair.settle()
    assert pair.b.receiver.receive_urgent() == ord("!")
    assert pair.b.receiver.urgent == "none"
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive_urgent()


def test_the_byte_survives_the_element(pair: Pair) -> None:
    """The peer closes and ends at once."""
    assert pair.a.send_urgent(view(b"abc!")) == 4
    pair.a.close()
    pair.settle()
    pair.b.links_lost()
    assert pair.b.state == "CLOSED"
    pair.memories[1].view[:RING] = bytes(RING)
    assert pair.b.receiver.receive(9) == b"abc"
    assert urgent(pair.b) == b"!"
    assert pair.b.receiver.at_eof


def test_an_unread_byte_of_the_stream_resets_on_close(pair: Pair) -> None:
    pair.a.send_urgent(view(b"a!"))
    pair.settle()
    pair.b.close()
    assert pair.b.state == "PEERABORTWAIT"


def test_an_urgent_byte_that_was_not_read_does_not_reset_on_close(pair: Pair) -> None:
    """The byte has left the stream, and the peer knows that: the same as over TCP."""
    pair.a.send_urgent(view(b"!"))
    pair.settle()
    pair.b.close()
    assert pair.b.state == "PEERCLOSEWAIT1"


def test_an_urgent_byte_after_close_has_no_reader(pair: Pair) -> None:
    pair.b.send(view(b"under way"))
    pair.b.close()
    assert pair.b.state == "ACTIVE"
    pair.a.send_urgent(view(b"!"))
    pair.ab.deliver()
    pair.ba.deliver()
    pair.ba.complete()
    assert pair.b.state == "PEERABORTWAIT"


# --- the rendezvous and other links ----------------------------------------------------------


def test_urgent_data_before_the_confirm_is_acknowledged_later() -> None:
    pair = Pair((RING, RING), connect=False)
    pair.know(0)
    pair.a.established()
    assert pair.a.send_urgent(view(b"!")) == 1
    pair.ab.deliver()
    assert pair.ba.log == []
    pair.know(1)
    pair.b.established()
    pair.settle()
    assert pair.a.sender.can_send
    assert urgent(pair.b) == b"!"
    pair.close()


@pytest.mark.parametrize("completed", [False, True])
def test_u_is_repeated_on_another_link_only_if_it_may_be_lost(pair: Pair, completed: bool) -> None:
    assert pair.a.send_urgent(view(b"a!")) == 2
    if completed:
        pair.ab.deliver()
        pair.ab.complete()
    other = FakeChannel(2)
    other.peer = pair.b
    move(pair.a, other, 0, 0)
    assert pair.a.send(view(b"later")) == 0
    pair.b.send(view(b"x" * 60))
    pair.ba.deliver()
    pair.a.receiver.receive(60)
    assert flags(other) == ([F, 0] if completed else [F, P | U, 0])
    assert not pair.a.sender.can_send
