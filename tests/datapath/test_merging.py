"""Merged small writes, bounded sends, user timeout: on two cores, without a clock."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator

import pytest

from tests.campaigns import datapath as campaign
from tests.datapath.datapath_pair import Cdc, Pair, Write
from tests.peers import open_pair
from trio_smc.datapath.connection import Connection
from trio_smc.streams.socket_options import MIN_SEND_BUFFER

RING = 16384
CHUNK = RING // 4


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("core", (RING, RING)) as pair:
        yield pair


def send(pair: Pair, size: int) -> int:
    return pair.a.send(memoryview(bytes(size)))


def announced_counts(pair: Pair) -> list[int]:
    """Bytes that each CDC message of A announced, counted from the beginning."""
    return [
        entry.producer[1] * RING + entry.producer[0]
        for entry in pair.ab.log
        if isinstance(entry, Cdc)
    ]


Later = list[Callable[[], None]]


def never(flush: Callable[[], None]) -> None:
    """A timer that never fires."""


def test_corked_writes_are_announced_when_the_cork_is_removed(pair: Pair) -> None:
    later: Later = []
    pair.a.sender.merge_messages(later.append, corked=True)
    for _ in range(3):
        assert send(pair, 10) == 10
    assert announced_counts(pair) == []
    assert pair.ab.log == [Write(0, 9), Write(10, 19), Write(20, 29)]
    assert len(later) == 1
    pair.a.sender.merge_messages(None)
    assert announced_counts(pair) == [30]
    later[0]()
    assert announced_counts(pair) == [30], "a late timer announces nothing again"
    assert send(pair, 1) == 1
    assert announced_counts(pair) == [30, 31]


def test_corked_writes_are_announced_after_the_time_limit(pair: Pair) -> None:
    later: Later = []
    pair.a.sender.merge_messages(later.append, corked=True)
    send(pair, 10)
    later.pop()()
    assert announced_counts(pair) == [10]
    send(pair, 10)
    assert announced_counts(pair) == [10]
    later.pop()()
    assert announced_counts(pair) == [10, 20]


def test_a_cork_does_not_hold_a_chunk(pair: Pair) -> None:
    pair.a.sender.merge_messages(never, corked=True)
    assert send(pair, CHUNK - 1) == CHUNK - 1
    assert announced_counts(pair) == []
    assert send(pair, 5) == 5
    assert announced_counts(pair) == [CHUNK + 4]
    assert send(pair, RING) == RING - CHUNK - 4
    assert announced_counts(pair)[-1] == RING, "the window is full and more data waits"


def test_a_cork_does_not_make_a_buffer_borrowed() -> None:
    with open_pair("core", (RING, RING), copy_limit=16) as pair:
        pair.a.sender.merge_messages(never, corked=True)
        assert pair.a.send(memoryview(bytearray(b"x" * 100))) == 100
        assert pair.a.sender.borrowed == 0


@pytest.mark.parametrize("end", ["shutdown_write", "close"])
def test_an_end_announces_corked_writes(pair: Pair, end: str) -> None:
    pair.a.sender.merge_messages(never, corked=True)
    pair.a.send(memoryview(b"last words"))
    getattr(pair.a, end)()
    pair.settle()
    assert pair.b.receiver.receive(100) == b"last words"
    assert pair.b.receiver.at_eof


def test_a_corked_send_within_a_limit_continues(pair: Pair) -> None:
    """Only a message makes room in the send buffer: with the limit used up it cannot wait."""
    pair.a.sender.merge_messages(never, corked=True)
    pair.a.limit_unacknowledged(100)
    assert send(pair, 150) == 100
    assert announced_counts(pair) == []
    assert send(pair, 50) == 0
    assert announced_counts(pair) == [100]
    pair.settle()
    assert send(pair, 50) == 50


def test_without_nodelay_a_small_write_waits_for_the_delivery_of_the_one_before(
    pair: Pair,
) -> None:
    later: Later = []

    def nagle(flush: Callable[[], None]) -> None:
        if pair.a.sender.announced_is_delivered:
            flush()
        else:
            later.append(flush)

    pair.a.sender.merge_messages(nagle, when_delivered=True)
    send(pair, 10)
    assert announced_counts(pair) == [10], "no data is in flight, so at once"
    send(pair, 10)
    send(pair, 10)
    assert announced_counts(pair) == [10]
    pair.ab.deliver()
    assert announced_counts(pair) == [10]
    pair.ab.complete()
    assert announced_counts(pair) == [10, 30]
    send(pair, 10)
    assert len(later) == 2
    later[-1]()
    assert announced_counts(pair) == [10, 30, 40], "the time is over"
    pair.settle()
    assert pair.b.receiver.readable == 40


def test_unacknowledged_bytes_are_bounded(pair: Pair) -> None:
    pair.a.limit_unacknowledged(MIN_SEND_BUFFER)
    woken: list[int] = []
    assert send(pair, RING) == MIN_SEND_BUFFER
    pair.a.on_writable = lambda: woken.append(1)
    assert (pair.a.sender.can_send, pair.a.starved) == (False, True)
    pair.ab.deliver()
    pair.ab.complete()
    assert woken == [1]
    assert (pair.a.sender.can_send, pair.a.starved) == (True, False)
    assert send(pair, RING) == MIN_SEND_BUFFER
    pair.a.on_writable = lambda: woken.append(2)
    pair.a.limit_unacknowledged(None)
    assert woken == [1, 2], "a waiting writer wakes"
    assert send(pair, RING) == RING - 2 * MIN_SEND_BUFFER


def test_a_user_timeout_is_an_abort_of_its_own_kind(pair: Pair) -> None:
    send(pair, 10)
    pair.a.user_timeout()
    with pytest.raises(TimeoutError) as caught:
        pair.a.send(memoryview(b"x"))
    assert caught.value.errno == errno.ETIMEDOUT
    pair.settle()
    assert len(pair.b.receiver.receive(100)) == 10
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(100)


def _without_timer(end: Connection) -> Callable[[Callable[[], None]], None]:
    """No timer is needed: data in flight arrives, and its completion starts the next message."""

    def later(flush: Callable[[], None]) -> None:
        if end.sender.announced_is_delivered:
            flush()

    return later


def test_random_transfers_under_every_combination(rng: random.Random, full: bool) -> None:
    """Corks, Nagle's algorithm and send limits lose, repeat and move no byte, and no task hangs."""
    for _ in range(2000 if full else 150):
        sizes = (int(2 ** rng.uniform(4, 14)), int(2 ** rng.uniform(4, 14)))
        pair = Pair(sizes, copy_limit=rng.choice([0, 16, 65536]))
        later = pair.flushes.append
        for end in pair.connections:
            way = rng.choice(["cork", "nagle", "at once"])
            if way == "cork":
                end.sender.merge_messages(later, corked=True)
            elif way == "nagle":
                end.sender.merge_messages(_without_timer(end), when_delivered=True)
            if rng.random() < 0.5:
                end.limit_unacknowledged(rng.randint(1, 5000))
        try:
            campaign.run_transfers(pair, rng, sizes)
        finally:
            pair.close()


# --- a link that needs no completions ----------------------------------------------------------


@pytest.fixture
def instant() -> Iterator[Pair]:
    made = Pair((RING, RING), merge=True)
    made.ab.instant = True
    yield made
    made.close()


def test_only_the_first_two_sends_since_a_wait_are_announced_at_once(instant: Pair) -> None:
    for begin in (0, 40):
        for size in (10, 20):
            send(instant, 10)
            assert announced_counts(instant)[-1] == begin + size
        send(instant, 10)
        send(instant, 10)
        assert announced_counts(instant)[-1] == begin + 20, "they share a message"
        instant.a.messenger.flush_before_wait()
        assert announced_counts(instant)[-1] == begin + 40, (
            "a task that waits may wait for the answer"
        )
    assert instant.a.sender.unacknowledged == 0
    assert instant.ab.complete() == 0


def test_after_a_message_deferred_nearly_alone_the_next_is_immediate(instant: Pair) -> None:
    """A writer that yields after each send gains nothing from deferred messages."""
    messenger = instant.a.messenger
    for _ in range(2):
        send(instant, 10)
    for _ in range(2):
        send(instant, 10)
        assert messenger.cdc_requested
        messenger.flush()
        for _ in range(2):
            send(instant, 10)
            assert not messenger.cdc_requested
    for _ in range(5):
        send(instant, 10)
    assert messenger.cdc_requested
    messenger.flush()
    send(instant, 10)
    assert messenger.cdc_requested, "the deferral has merged messages"
    messenger.flush()


@pytest.mark.parametrize("size", [1000, 4096, 40_000, 64 * 1024, 100_000])
def test_the_announcement_of_few_bytes_only_is_deferred(size: int) -> None:
    """A large ring must not make the peer wait for a large part of it."""
    ring = 4 << 20
    with open_pair("core", (ring, ring), merge=True) as pair:
        pair.ab.instant = True
        for _ in range(2):
            send(pair, 10)  # announced at once
        for _ in range((1 << 20) // size):
            assert send(pair, size) == size
            produced, announced = pair.a.messenger.produced, pair.a.messenger.announced
            assert produced - announced < 64 * 1024
            assert announced == produced or size < 64 * 1024
        assert pair.a.messenger.coalesced or size * 2 > 64 * 1024


def test_nothing_is_deferred_while_the_peer_sleeps(instant: Pair) -> None:
    """The peer's reader waits, and this side may need long to prepare the next write."""
    for _ in range(4):
        send(instant, 10)
    assert announced_counts(instant)[-1] == 20
    instant.ab.asleep[0] = 1
    send(instant, 10)
    assert announced_counts(instant)[-1] == 50
    instant.ab.asleep[0] = 0
    send(instant, 10)
    assert announced_counts(instant)[-1] == 50


@pytest.mark.parametrize("merging", ["cork", "until delivered", "more"])
def test_a_sleeping_peer_does_not_cancel_requested_merging(instant: Pair, merging: str) -> None:
    instant.ab.asleep[0] = 1
    sender = instant.a.sender
    if merging != "more":
        sender.merge_messages(never, corked=merging == "cork", when_delivered=merging != "cork")
    for _ in range(3):
        if merging == "more":
            sender.send_more(memoryview(bytes(10)), never)
        else:
            send(instant, 10)
    assert announced_counts(instant) == []


def test_a_cork_holds_also_for_a_task_that_waits(instant: Pair) -> None:
    instant.a.sender.merge_messages(never, corked=True)
    for _ in range(2):
        send(instant, 10)
        instant.a.messenger.flush_before_wait()
    assert announced_counts(instant) == []
    instant.a.sender.merge_messages(None)
    assert announced_counts(instant) == [20]


def test_a_limit_does_not_delay_data_that_arrives_at_once(instant: Pair) -> None:
    instant.a.limit_unacknowledged(10)
    assert send(instant, 95) == 30, "the third piece is deferred"
    woken: list[bool] = []
    instant.a.on_writable = lambda: woken.append(True)
    instant.a.messenger.flush_before_wait()
    assert woken
    instant.a.sender.merge_messages(None)
    assert send(instant, 65) == 65
    assert instant.a.sender.unacknowledged == 0


def test_borrowed_memory_is_given_back_when_a_later_message_arrives_at_once() -> None:
    """A piece was written on a link with immediate delivery, and its message deferred. The next
    data fills a chunk, so its message announces the piece as well."""
    pair = Pair((65536, 65536), copy_limit=100, merge=True)
    pair.ab.instant = True
    for _ in range(2):
        assert pair.a.send(memoryview(b"1")) == 1
    buffer = bytearray(b"2" * 200)
    assert pair.a.send(memoryview(buffer)) == 200
    assert (pair.a.sender.borrowed, pair.a.sender.unacknowledged) == (200, 200)
    assert pair.a.send(memoryview(b"3" * 16384)) == 16384
    assert (pair.a.sender.borrowed, pair.a.sender.unacknowledged) == (0, 0)
    buffer[:] = bytes(200)
    pair.fail_link(0)
    pair.settle()
    assert pair.b.receiver.receive(1 << 16) == b"11" + b"2" * 200 + b"3" * 16384
    pair.close()


def test_changeable_memory_that_is_written_at_once_is_not_borrowed(instant: Pair) -> None:
    instant.a.sender.merge_messages(None)
    data = bytearray(b"written at once")
    assert instant.a.send(memoryview(data)) == len(data)
    assert not instant.a.sender.borrowed
    data[:] = bytes(len(data))
    instant.settle()
    assert instant.b.receiver.receive(100) == b"written at once"
