"""Bytes through two cores: windows, wraps, cursor updates, room, copies, merged messages."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.campaigns import datapath as campaign
from tests.datapath.datapath_pair import Cdc, FakeChannel, Pair, Write, receive_cdc
from trio_smc.datapath.connection import Connection
from trio_smc.wire.cdc import UPDATE_REQUESTED, URGENT_PENDING, WRITER_BLOCKED, pack

RING = 16384


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def make(pairs: list[Pair], *args: Any, **kwargs: Any) -> Pair:
    pairs.append(Pair(*args, **kwargs))
    return pairs[-1]


def writes(channel: FakeChannel) -> list[Write]:
    return [entry for entry in channel.log if isinstance(entry, Write)]


def cdcs(channel: FakeChannel) -> list[Cdc]:
    return [entry for entry in channel.log if isinstance(entry, Cdc)]


# --- whole transfers -------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1))
def test_no_byte_is_lost_moved_or_doubled(seed: int) -> None:
    """Random rings, layouts, sizes, delays and endings; both directions at once."""
    campaign.run_case(random.Random(seed))


def test_a_short_campaign(seed: int) -> None:
    result = campaign.run(cases=200, seed=seed)
    assert result.bytes_moved > 1_000_000
    assert result.wraps > 100
    assert result.stalls > 100


@pytest.mark.rfc("4.3/2", "4.3/5", "A.4/3", "A.4/7")
@pytest.mark.parametrize("eye_catcher", [False, True])
def test_a_ring_full_at_a_time_for_more_than_65536_wraps(
    pairs: list[Pair], eye_catcher: bool
) -> None:
    """The 16-bit wrap sequence number itself wraps, and so does the CDC sequence number."""
    pair = make(pairs, (12, 12), (eye_catcher, eye_catcher), chunks=False)
    usable = pair.b.rmbe.usable
    block = memoryview(bytes(range(usable)))
    sequences = []
    for _ in range(65536 + 100):
        assert pair.a.send(block) == usable
        pair.ab.deliver()
        assert pair.b.receiver.receive(usable) == block
        pair.ba.deliver()
        sequences += [int.from_bytes(message[2:4], "big") for message in pair.ab.raw]
        pair.ab.log.clear()
        pair.ab.raw.clear()
        pair.ab.complete()
        pair.ba.complete()
    assert pair.b.receiver.bytes_received == usable * (65536 + 100)
    assert pair.b.stale_cdcs == 0
    assert sequences == [number & 0xFFFF for number in range(1, 65536 + 101)]


# --- the sender ------------------------------------------------------------------------------


def test_sends_are_cut_into_quarters_of_the_ring(pairs: list[Pair]) -> None:
    pair = make(pairs)
    assert pair.a.send(memoryview(bytes(RING))) == RING
    assert [write.last - write.first + 1 for write in writes(pair.ab)] == [RING // 4] * 4
    assert [entry.producer for entry in cdcs(pair.ab)] == [
        (4096, 0),
        (8192, 0),
        (12288, 0),
        (0, 1),
    ]
    assert all(entry.flags == 0 for entry in cdcs(pair.ab)), "nothing more waits"


@pytest.mark.rfc("A.4/12")
def test_b_is_set_only_if_more_data_waits(pairs: list[Pair]) -> None:
    pair = make(pairs)
    assert pair.a.send(memoryview(bytes(RING))) == RING
    assert pair.a.send(memoryview(b"x")) == 0
    assert pair.a.send(memoryview(b"x")) == 0
    assert [entry.flags for entry in cdcs(pair.ab)] == [0, 0, 0, 0, WRITER_BLOCKED]
    assert pair.a.sender.window_stalls == 2
    assert not pair.a.sender.can_send


def test_blocked_is_cleared_by_the_next_message_after_the_window_opened(
    pairs: list[Pair],
) -> None:
    pair = make(pairs)
    assert pair.a.send(memoryview(bytes(RING + 1))) == RING
    pair.ab.deliver()
    pair.b.receiver.receive(RING)
    pair.ba.deliver()
    assert pair.a.sender.can_send
    assert pair.b.send(memoryview(bytes(RING))) == RING
    pair.ba.deliver()
    pair.a.receiver.receive(RING)  # a cursor update of A's own
    assert [entry.flags for entry in cdcs(pair.ab)][-2:] == [WRITER_BLOCKED, 0]


def test_b_is_set_with_data_that_is_delivered_at_once(pairs: list[Pair]) -> None:
    pair = make(pairs)
    pair.ab.instant = True
    assert pair.a.send(memoryview(bytes(RING + 1))) == RING
    assert [entry.flags for entry in cdcs(pair.ab)] == [0, 0, 0, WRITER_BLOCKED]
    assert (pair.a.sender.writes, pair.a.sender.unacknowledged) == (4, 0)
    pair.ab.deliver()
    assert pair.b.receiver.writer_waits


def test_bytes_are_sent_like_a_view_of_them(pairs: list[Pair], rng: random.Random) -> None:
    """`Sender.send` accepts both, with the same writes, counters and replay."""
    plain, usual = make(pairs, (4096, 4096)), make(pairs, (4096, 4096))
    for _ in range(400):
        data = rng.randbytes(rng.choice((1, 44, 700, 1024, 1025, 4096)))
        instant = rng.random() < 0.9
        for pair in (plain, usual):
            pair.ab.instant = instant
        sent = plain.a.sender.send(data)
        assert usual.a.send(memoryview(data)) == sent
        assert plain.ab.log == usual.ab.log
        assert plain.a.counters() == usual.a.counters()
        assert plain.a.sender.unacknowledged == usual.a.sender.unacknowledged
        assert list(plain.a.sender.replay()) == list(usual.a.sender.replay())
        if rng.random() < 0.6:
            most = rng.randrange(1, 4096)
            taken = []
            for pair in (plain, usual):
                pair.ab.deliver()
                pair.ab.complete()
                taken.append(pair.b.receiver.receive(most))
                pair.ba.deliver()
                pair.ba.complete()
            assert taken[0] == taken[1]


def test_a_completion_covers_everything_before_it(pairs: list[Pair]) -> None:
    pair = make(pairs, (65536, 65536), copy_limit=100)
    for piece in (b"1" * 50, bytearray(b"2" * 200), bytearray(b"3" * 200), b"4" * 50):
        pair.a.send(memoryview(piece))
    assert not pair.a.sender.complete(2)
    assert (pair.a.sender.delivered, pair.a.sender.borrowed) == (250, 200)
    assert pair.a.sender.complete(3)
    for _ in range(2):
        pair.a.send(memoryview(b"5"))
    pair.a.sender.complete(6)
    assert (pair.a.sender.delivered, list(pair.a.sender.replay())) == (502, [])


def test_more_data_than_the_link_has_room_for(pairs: list[Pair]) -> None:
    pair = make(pairs)
    pair.ab.room = -1
    assert pair.a.send(memoryview(b"x")) == 0
    assert pair.ab.waiting == [pair.a]
    pair.ab.room = RING
    pair.ab.complete()
    assert pair.a.send(memoryview(b"x")) == 1


def test_a_blocked_writer_continues_at_a_quarter_of_the_ring(pairs: list[Pair]) -> None:
    """The peer reads byte by byte; the writer does not send byte by byte (4.5.1)."""
    pair = make(pairs)
    data = memoryview(bytes(2 * RING))
    sent = pair.a.send(data)
    pair.ab.deliver()
    woken: list[int] = []
    pair.a.on_writable = lambda: woken.append(
        pair.b.receiver.bytes_received - pair.b.receiver.readable
    )
    for _ in range(RING // 4 + 10):
        assert pair.b.receiver.receive(1) == b"\0"
        pair.ba.deliver()
        if not woken:
            assert pair.a.send(data[sent:]) == 0
    assert woken == [RING // 4]
    assert pair.a.send(data[sent:]) == RING // 4 + 10


@pytest.mark.parametrize("read", [1, 3, 5])
@pytest.mark.parametrize("before", [0, 100])
def test_a_blocked_writer_with_little_left_continues_earlier(
    pairs: list[Pair], before: int, read: int
) -> None:
    pair = make(pairs)
    pair.a.send(memoryview(bytes(before)))
    pair.settle()
    pair.b.receiver.receive(max(1, before))
    pair.b.messenger.request_cdc()
    pair.settle()
    data = memoryview(bytes(RING + 5))
    sent = pair.a.send(data)
    assert sent == RING
    pair.ab.deliver()
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    for taken in range(read, 5 + read, read):
        pair.b.receiver.receive(read)
        pair.ba.deliver()
        assert woken == (["writer"] if taken >= 5 else [])
    assert pair.a.send(data[sent:]) == 5


def test_delivery_alone_does_not_wake_a_blocked_writer(pairs: list[Pair]) -> None:
    """A writer that wakes too early would find the window still closed."""
    pair = make(pairs)
    data = memoryview(bytes(2 * RING))
    sent = pair.a.send(data)
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    pair.ab.deliver()
    pair.ab.complete()
    assert not pair.a.unsent
    assert woken == []
    pair.b.receiver.receive(RING)
    pair.ba.deliver()
    assert woken == ["writer"]
    assert pair.a.send(data[sent:]) == RING


def test_a_blocked_writer_that_closes_is_woken_by_the_last_delivery(pairs: list[Pair]) -> None:
    pair = make(pairs)
    pair.a.send(memoryview(bytes(2 * RING)))
    pair.a.close()
    assert pair.a.ending
    woken: list[str] = []

    def again() -> None:
        woken.append("writer")
        pair.a.on_writable = again

    again()
    while pair.a.ending:
        before = len(woken)
        assert pair.ab.deliver() + pair.ab.complete()
        assert len(woken) > before


@pytest.mark.rfc("4.2/4")
def test_a_write_where_the_ring_wraps_is_two(pairs: list[Pair]) -> None:
    pair = make(pairs, (16384, 10_000), (False, True), chunks=False)
    pair.a.send(memoryview(bytes(9000)))
    pair.settle()
    pair.b.receiver.receive(9000)
    pair.settle()
    pair.a.send(memoryview(bytes(996)))
    pair.a.send(memoryview(bytes(1)))
    assert writes(pair.ab)[1:] == [Write(9004, 9999), Write(4, 4)]
    pair.a.send(memoryview(bytes(2)))
    pair.settle()
    pair.b.receiver.receive(9000)
    pair.a.send(memoryview(b"x" * 8000))
    pair.settle()
    assert pair.b.receiver.receive(9000) == b"x" * 8000
    pair.settle()
    pair.a.send(memoryview(b"0123456789" * 300))
    assert writes(pair.ab)[-2:] == [Write(8007, 9999), Write(4, 1010)]
    pair.settle()
    assert pair.b.receiver.receive(9000) == b"0123456789" * 300


@pytest.mark.parametrize("room", [1, 7, 100])
def test_a_send_is_limited_by_the_room_of_the_link(pairs: list[Pair], room: int) -> None:
    pair = make(pairs)
    pair.ab.room = room
    pair.ab.slots = 3
    assert pair.a.send(memoryview(bytes(1000))) == min(1000, 3 * room)
    assert pair.ab.waiting == [pair.a]
    assert not pair.a.sender.can_send
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    pair.ab.deliver()
    assert woken == []
    pair.ab.complete()
    assert woken == ["writer"]
    assert pair.a.sender.can_send


def test_a_message_without_room_is_requested_once(
    pairs: list[Pair],
) -> None:
    pair = make(pairs)
    pair.b.send(memoryview(bytes(100)))
    pair.a.send(memoryview(bytes(RING)))
    pair.ab.deliver()
    pair.ba.slots = 0
    for _ in range(4):
        pair.b.receiver.receive(RING // 4)
    assert len(cdcs(pair.ba)) == 1
    assert pair.ba.waiting == [pair.b]
    pair.ba.slots = 100
    pair.ba.complete()
    assert cdcs(pair.ba)[1:] == [Cdc(2, producer=(100, 0), consumer=(0, 1))]


def test_a_send_limit_bounds_unacknowledged_bytes(pairs: list[Pair]) -> None:
    pair = make(pairs)
    pair.a.sender.send_limit = 100
    data = memoryview(bytes(250))
    assert pair.a.send(data) == 100
    assert pair.a.sender.unacknowledged == 100
    assert pair.a.send(data[100:]) == 0
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    pair.ab.deliver()
    pair.ab.complete()
    assert woken == ["writer"]
    assert pair.a.send(data[100:]) == 100


def test_a_writer_that_waits_for_any_window_is_woken(pairs: list[Pair]) -> None:
    """The ring is full, but nothing was refused, so B was not set."""
    pair = make(pairs)
    pair.a.send(memoryview(bytes(RING)))
    pair.ab.deliver()
    pair.ab.complete()
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    pair.b.receiver.receive(RING // 2)
    pair.ba.deliver()
    assert woken == ["writer"]
    assert pair.a.sender.can_send


def test_an_empty_send_posts_nothing(pairs: list[Pair]) -> None:
    pair = make(pairs)
    assert pair.a.send(memoryview(b"")) == 0
    assert pair.ab.log == []


# --- replay and memory -----------------------------------------------------------------------


def test_everything_posted_can_be_replayed_until_it_is_complete(pairs: list[Pair]) -> None:
    pair = make(pairs)
    data = bytes(range(256)) * 40
    pair.a.send(memoryview(data)[:5000])
    pair.a.send(memoryview(data)[5000:])
    assert b"".join(bytes(piece) for _, piece in pair.a.sender.replay()) == data
    for count, piece in pair.a.sender.replay():
        assert bytes(piece) == data[count : count + len(piece)]
    pair.ab.deliver()
    pair.ab.complete(1)
    assert pair.a.sequence_sent == 1
    assert [count for count, _ in pair.a.sender.replay()] == [4096, 5000, 9096]
    assert pair.a.sender.unacknowledged == len(data) - 4096
    pair.ab.complete()
    assert list(pair.a.sender.replay()) == []
    assert (pair.a.sender.unacknowledged, pair.a.sequence_sent) == (0, 4)


def test_small_changeable_buffers_are_copied_and_large_ones_borrowed(pairs: list[Pair]) -> None:
    pair = make(pairs, (65536, 65536), copy_limit=100)
    small, large = bytearray(b"s" * 100), bytearray(b"l" * 200)
    pair.a.send(memoryview(small))
    assert pair.a.sender.borrowed == 0
    pair.a.send(memoryview(b"i" * 300))
    assert pair.a.sender.borrowed == 0, "bytes cannot change"
    pair.a.send(memoryview(large))
    assert pair.a.sender.borrowed == 200
    small[:] = b"?" * 100
    woken: list[str] = []
    pair.a.on_writable = lambda: woken.append("writer")
    pair.ab.deliver()
    pair.ab.complete(2)
    assert (pair.a.sender.borrowed, woken) == (200, [])
    pair.ab.complete()
    assert (pair.a.sender.borrowed, woken) == (0, ["writer"])
    assert pair.b.receiver.receive(1000) == b"s" * 100 + b"i" * 300 + b"l" * 200


def test_a_cancelled_sender_gets_its_buffer_back(pairs: list[Pair]) -> None:
    pair = make(pairs, (65536, 65536), copy_limit=100)
    large = bytearray(b"l" * 500)
    pair.a.send(memoryview(large))
    pair.a.sender.keep_copies()
    assert pair.a.sender.borrowed == 0
    large[:] = b"?" * 500
    assert [bytes(piece) for _, piece in pair.a.sender.replay()] == [b"l" * 500]
    pair.ab.deliver()
    pair.ab.complete()
    assert pair.a.sender.unacknowledged == 0


def test_a_closed_connection_is_in_no_reference_cycle(pairs: list[Pair]) -> None:
    """10,000 connections in a row must not wait for the garbage collector."""
    pair = make(pairs)
    pair.a.send(memoryview(b"hello"))
    pair.settle()
    pair.b.receiver.receive(5)
    pair.a.close()
    pair.settle()
    pair.b.close()
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    kept = (pair.a.rmbe, pair.b.rmbe)  # an RMB and its elements refer to each other
    names = {id(pair.a), id(pair.b)}
    for host, connection in zip(pair.hosts, pair.connections, strict=True):
        host.connection = connection  # as a real host
    gc.collect()
    gc.disable()
    try:
        pair.ab.peer = pair.ba.peer = None
        pair.hosts.clear()
        del pair.a, pair.b, host, connection
        left = [
            each for each in gc.get_objects() if isinstance(each, Connection) and id(each) in names
        ]
        assert left == []
    finally:
        gc.enable()
    assert len(kept) == 2


# --- the receiver ----------------------------------------------------------------------------


@pytest.mark.rfc("4.5.1/1")
@pytest.mark.parametrize(
    ("written", "read", "announced"),
    [
        # 4.5.1's examples: a 64 KiB buffer, the sender's window, what the update would give.
        (14, 14, False),  # a: window 50K: no need
        (34, 1, False),  # b: window 30K, 31K after the update: no need
        (34, 34, True),  # c: window 30K, 64K after the update
        (33, 6, False),  # under half, but not 10 %
        (33, 7, True),  # 10 % is 6.4K
        (32, 32, False),  # exactly half is not less than half
    ],
)
def test_cursor_updates_follow_the_rules(
    pairs: list[Pair], written: int, read: int, announced: bool
) -> None:
    pair = make(pairs, (65536, 65536))
    assert pair.a.send(memoryview(bytes(written * 1024))) == written * 1024
    pair.ab.deliver()
    assert len(pair.b.receiver.receive(read * 1024)) == read * 1024
    assert bool(cdcs(pair.ba)) is announced
    if announced:
        pair.ba.deliver()
        assert pair.a.sender.window == 65536 - (written - read) * 1024


@pytest.mark.rfc("4.5.1/1")
@pytest.mark.parametrize(("read", "announced"), [(999, False), (1000, True)])
def test_ten_percent_is_enough(pairs: list[Pair], read: int, announced: bool) -> None:
    pair = make(pairs, (10_000, 10_000))
    pair.a.send(memoryview(bytes(6000)))
    pair.ab.deliver()
    pair.b.receiver.receive(read)
    assert bool(cdcs(pair.ba)) is announced


def forge(pair: Pair, flags: int, count: int, sequence: int = 1) -> None:
    """Deliver a CDC message to B that A has not sent."""
    receive_cdc(pair.b, pack(sequence, 0xA1, 0, count, 0, 0, flags))


@pytest.mark.rfc("4.5.1/3", "4.5.1/4", "A.4/12", "A.4/13")
@pytest.mark.parametrize("flag", [WRITER_BLOCKED, UPDATE_REQUESTED, URGENT_PENDING])
def test_any_consumption_is_announced_to_a_peer_that_waits_for_it(
    pairs: list[Pair], flag: int
) -> None:
    pair = make(pairs)
    forge(pair, flag, 10)
    assert cdcs(pair.ba) == [], "nothing was consumed"
    for n in (1, 2):
        pair.b.receiver.receive(1)
        assert [entry.consumer for entry in cdcs(pair.ba)] == [(i + 1, 0) for i in range(n)]
    forge(pair, 0, 10, sequence=2)
    pair.b.receiver.receive(1)
    assert len(cdcs(pair.ba)) == 2, "the flag is gone"


@pytest.mark.rfc("4.5.1/3")
@pytest.mark.parametrize("occasion", ["the scheduler sleeps", "the reader waits", "a tenth"])
def test_a_small_consumption_is_announced_to_a_blocked_writer_later(
    pairs: list[Pair], occasion: str
) -> None:
    pair = make(pairs, merge=True)
    forge(pair, WRITER_BLOCKED, RING // 2)
    pair.b.receiver.receive(1)
    pair.b.receiver.receive(2)
    assert cdcs(pair.ba) == []
    assert len(pair.flushes) == 1
    if occasion == "the scheduler sleeps":
        pair.flush()
        announced = 3
    elif occasion == "the reader waits":
        pair.b.messenger.flush_before_wait()
        announced = 3
    else:
        announced = RING // 10 + 3
        pair.b.receiver.receive(RING // 10)
    assert [entry.consumer for entry in cdcs(pair.ba)] == [(announced, 0)]
    pair.flush()
    pair.b.messenger.flush_before_wait()
    assert len(cdcs(pair.ba)) == 1, "nothing new to announce"
    pair.b.receiver.receive(1)
    assert len(pair.flushes) == 1, "consumption is announced again"


@pytest.mark.rfc("4.5.1/3", "A.4/12")
@pytest.mark.parametrize("consumed", [1, RING // 4])
def test_bytes_consumed_before_the_writer_was_blocked_are_announced(
    pairs: list[Pair], consumed: int
) -> None:
    """The reader may process its data for a long time before it calls again."""
    pair = make(pairs, merge=True)
    forge(pair, 0, RING // 2)
    pair.b.receiver.receive(consumed)
    assert cdcs(pair.ba) == [], "the window is open"
    forge(pair, WRITER_BLOCKED, RING // 2, sequence=2)
    assert bool(cdcs(pair.ba)) is (consumed >= RING / 10)
    pair.flush()
    assert [entry.consumer for entry in cdcs(pair.ba)] == [(consumed, 0)]
    forge(pair, WRITER_BLOCKED, RING // 2, sequence=3)
    pair.flush()
    assert len(cdcs(pair.ba)) == 1, "nothing new to announce"


@pytest.mark.parametrize("flag", [UPDATE_REQUESTED, URGENT_PENDING])
def test_other_waiting_peers_get_an_update_at_once(pairs: list[Pair], flag: int) -> None:
    pair = make(pairs, merge=True)
    forge(pair, flag | WRITER_BLOCKED, 10)
    pair.b.receiver.receive(1)
    assert [entry.consumer for entry in cdcs(pair.ba)] == [(1, 0)]


def test_a_small_consumption_is_not_announced_if_unblocked(pairs: list[Pair]) -> None:
    pair = make(pairs, merge=True)
    forge(pair, WRITER_BLOCKED, 10)
    pair.b.receiver.receive(1)
    forge(pair, 0, 10, sequence=2)
    pair.flush()
    pair.b.messenger.flush_before_wait()
    assert cdcs(pair.ba) == []


@pytest.mark.rfc("4.5.1/4", "A.4/13")
def test_a_requested_update_that_is_due_is_sent_at_once(pairs: list[Pair]) -> None:
    pair = make(pairs)
    forge(pair, 0, 10)
    pair.b.receiver.receive(4)
    assert cdcs(pair.ba) == []
    forge(pair, UPDATE_REQUESTED, 10, sequence=2)
    assert [entry.consumer for entry in cdcs(pair.ba)] == [(4, 0)]
    forge(pair, UPDATE_REQUESTED, 10, sequence=3)
    assert len(cdcs(pair.ba)) == 1, "nothing new to announce"


@pytest.mark.rfc("4.5.1/5")
def test_updates_are_not_requested(pairs: list[Pair]) -> None:
    """R is for diagnosis: no writer sets it, not even one that is stuck or has urgent data."""
    pair = make(pairs)
    data = memoryview(bytes(3 * RING))
    sent = 0
    while sent < len(data):
        sent += pair.a.send(data[sent:])
        pair.a.send(data[sent:])
        if sent < len(data):
            assert pair.a.send_urgent(memoryview(b"!")) == 0
            pair.a.sender.withdraw_urgent()
        pair.settle()
        while pair.b.receiver.readable:
            pair.b.receiver.receive(RING // 3)
            pair.settle()
    assert pair.a.send_urgent(memoryview(b"!")) == 1
    pair.a.close()
    pair.settle()
    flags_sent = [entry.flags for entry in cdcs(pair.ab) + cdcs(pair.ba)]
    assert {WRITER_BLOCKED, WRITER_BLOCKED | URGENT_PENDING} <= set(flags_sent)
    assert not any(flags & UPDATE_REQUESTED for flags in flags_sent)


@pytest.mark.rfc("4.4.1/3")
@pytest.mark.parametrize("eye_catcher", [False, True])
def test_the_owner_of_an_element_only_reads_it(pairs: list[Pair], eye_catcher: bool) -> None:
    """4.4.1: until the connection is closed, no call of the owner changes the element's first bytes
    and the bytes that the peer wrote."""
    pair = make(pairs, (64, 64), (eye_catcher, eye_catcher), chunks=False)
    memory = pair.memories[1].view
    expected = bytearray(memory)
    first, usable = pair.b.rmbe.first, pair.b.rmbe.usable

    def write(start: int, text: bytes) -> None:
        for offset, byte in enumerate(text, start):
            expected[first + offset % usable] = byte
        assert pair.a.send(memoryview(text)) == len(text)
        pair.settle()
        assert memory == expected

    write(0, b"a" * 50)
    assert pair.b.receiver.peek(10) == b"a" * 10
    assert pair.b.receiver.receive(20) == b"a" * 20
    assert pair.b.receiver.receive_into(bytearray(40)) == 30
    pair.settle()
    write(50, b"b" * 30)
    assert pair.b.receiver.receive(64) == b"b" * 30
    assert pair.b.send(memoryview(b"answer")) == 6
    pair.settle()
    assert pair.a.receiver.receive(64) == b"answer"
    write(80, b"unread")
    pair.b.close()
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert memory == expected


@pytest.mark.rfc("4.2/4")
def test_receive_receive_into_and_peek_agree_across_the_wrap(
    pairs: list[Pair], rng: random.Random
) -> None:
    pair = make(pairs, (64, 64), (True, True))
    for _ in range(500):
        block = rng.randbytes(rng.randrange(1, 61))
        offset = 0
        while offset < len(block):
            offset += pair.a.send(memoryview(block)[offset:])
            pair.settle()
            wanted = rng.randrange(1, 70)
            seen = pair.b.receiver.peek(wanted)
            assert len(seen) == min(wanted, pair.b.receiver.readable)
            if rng.random() < 0.5:
                got = pair.b.receiver.receive(wanted)
            else:
                buffer = bytearray(wanted)
                got = bytes(buffer[: pair.b.receiver.receive_into(buffer)])
            assert got == seen
            assert block.startswith(got) or not got
            block = block[len(got) :]
            offset -= len(got)
            pair.settle()
        while block:
            got = pair.b.receiver.receive(100)
            assert got
            assert block.startswith(got)
            block = block[len(got) :]
            pair.settle()


def test_a_receive_needs_a_positive_size(pairs: list[Pair]) -> None:
    pair = make(pairs)
    for call in (pair.a.receiver.receive, pair.a.receiver.peek):
        with pytest.raises(ValueError, match="positive"):
            call(0)
    with pytest.raises(ValueError, match="positive"):
        pair.a.receiver.receive_into(bytearray())


@pytest.mark.rfc("4.5.2/1")
def test_a_reader_is_woken_once_by_data(pairs: list[Pair]) -> None:
    pair = make(pairs)
    woken: list[int] = []
    pair.b.on_readable = lambda: woken.append(pair.b.receiver.readable)
    pair.a.send(memoryview(b"one"))
    pair.a.send(memoryview(b"two"))
    pair.ab.deliver()
    assert woken == [3]
    assert pair.b.receiver.readable == 6


# --- one message for many sends --------------------------------------------------------------


def test_merged_sends_are_announced_before_the_scheduler_sleeps(pairs: list[Pair]) -> None:
    pair = make(pairs, merge=True)
    for _ in range(10):
        assert pair.a.send(memoryview(b"0123456789")) == 10
    assert cdcs(pair.ab) == []
    assert len(pair.flushes) == 1
    assert pair.a.sender.unacknowledged == 100
    pair.flush()
    assert cdcs(pair.ab) == [Cdc(1, producer=(100, 0), consumer=(0, 0))]
    assert pair.a.messenger.coalesced == 9
    pair.settle()
    assert pair.b.receiver.receive(1000) == b"0123456789" * 10
    assert pair.a.sender.unacknowledged == 0


def test_a_chunk_and_a_full_window_are_announced_at_once(pairs: list[Pair]) -> None:
    pair = make(pairs, merge=True)
    pair.a.send(memoryview(b"x"))
    pair.a.send(memoryview(bytes(RING // 4)))
    assert [entry.producer for entry in cdcs(pair.ab)] == [(RING // 4 + 1, 0)]
    pair.flush()
    assert len(cdcs(pair.ab)) == 1, "the deferred message was sent already"
    pair.a.send(memoryview(bytes(RING)))
    assert cdcs(pair.ab)[-1].flags == WRITER_BLOCKED


def test_many_small_writes_are_announced_when_they_fill_a_chunk(pairs: list[Pair]) -> None:
    pair = make(pairs, merge=True)
    for _ in range(5):
        pair.a.send(memoryview(bytes(1000)))
    assert [entry.producer for entry in cdcs(pair.ab)] == [(5000, 0)]


def test_merging_never_fills_a_link_with_writes_without_a_completion(
    pairs: list[Pair],
) -> None:
    pair = make(pairs, merge=True)
    pair.ab.work = 8  # writes and messages together, each given back by a completion
    for _ in range(20):
        pair.a.send(memoryview(b"x"))
    assert pair.ab.capacity() == 0
    assert pair.a.sender.bytes_sent == 6, "the last of three free requests is for the message"
    assert [entry.producer for entry in cdcs(pair.ab)] == [(6, 0)]
    pair.settle()
    assert pair.ab.capacity() > 0


def test_an_ending_waits_for_deferred_messages(pairs: list[Pair]) -> None:
    pair = make(pairs, merge=True)
    pair.a.send(memoryview(b"last words"))
    pair.a.close()
    assert pair.a.state == "ACTIVE"
    pair.settle()
    assert pair.states() == ("PEERCLOSEWAIT1", "APPCLOSEWAIT1")
    assert pair.b.receiver.receive(100) == b"last words"
    assert pair.b.receiver.at_eof


def test_a_write_that_fills_the_ring_and_leaves_data_is_a_stall(pairs: list[Pair]) -> None:
    """The writer does not try again before there is room: a reader that is too slow must show."""
    pair = make(pairs)
    assert pair.a.send(memoryview(bytes(2 * RING))) == RING
    assert pair.a.sender.window_stalls == 1
    pair.settle()
    pair.b.receiver.receive(RING)
    pair.settle()
    assert pair.a.send(memoryview(bytes(RING))) == RING
    assert pair.a.sender.window_stalls == 1, "nothing was left"


def test_statistics_count(pairs: list[Pair]) -> None:
    pair = make(pairs)
    pair.a.send(memoryview(bytes(RING + 1)))
    pair.settle()
    pair.b.receiver.receive(100)
    pair.settle()
    a, b = pair.a.statistics(), pair.b.statistics()
    assert (a.bytes_sent, a.writes, a.cdcs_sent, a.window_stalls) == (RING, 4, 4, 1)
    assert (b.bytes_received, b.cdcs_received, b.cdcs_sent) == (RING, 4, 1)
    assert (a.cdcs_received, a.stale_cdcs, b.stale_cdcs) == (1, 0, 0)
