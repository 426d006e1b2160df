"""A connection that changes its link (RFC 7609, 4.6): two cores back to back."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.campaigns import datapath as campaign
from tests.datapath.datapath_pair import SEND_QUEUE, Cdc, FakeChannel, Pair, Write, receive_cdc
from tests.peers import open_pair
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.sender import Sender
from trio_smc.failover.replay import hold, stay
from trio_smc.wire import cdc
from trio_smc.wire.cdc import (
    ABNORMAL_CLOSE,
    CONNECTION_CLOSED,
    FAILOVER_VALIDATION,
    SENDING_DONE,
    URGENT_PENDING,
    URGENT_PRESENT,
    WRITER_BLOCKED,
)

F, P, U, B = FAILOVER_VALIDATION, URGENT_PENDING, URGENT_PRESENT, WRITER_BLOCKED
D, C, A = SENDING_DONE, CONNECTION_CLOSED, ABNORMAL_CLOSE
SIZE = 1024


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("core", (SIZE, SIZE)) as pair:
        yield pair


def view(data: bytes) -> memoryview:
    return memoryview(data)


def send(pair: Pair, data: bytes) -> None:
    assert pair.a.send(view(data)) == len(data)


def validation(sequence: int) -> Cdc:
    return Cdc(sequence, (0, 0), (0, 0), F)


# --- what is sent ----------------------------------------------------------------------------


@pytest.mark.rfc("4.6.1/1", "4.6.1/3", "4.6.1/7", "4.6.2/1", "4.6.2/2", "2.3/5", "2.3/6", "A.4/3")
@pytest.mark.rfc("4.6.1/1", "4.6.1/3", "4.6.1/7", "4.6.2/1", "4.6.2/2", "2.3/6")
def test_validation_then_the_writes_then_one_message(pair: Pair) -> None:
    send(pair, b"a" * 100)
    pair.settle()
    pair.b.send(view(b"x" * 7))
    pair.ba.deliver()
    pair.a.receiver.receive(7)
    send(pair, b"b" * 50)
    send(pair, b"c" * 10)
    pair.fail_link(0)
    assert pair.ab.log == [
        validation(1),
        Write(100, 149),
        Write(150, 159),
        Cdc(4, producer=(160, 0), consumer=(7, 0)),
    ]
    pair.settle()
    assert pair.b.receiver.receive(1000) == b"a" * 100 + b"b" * 50 + b"c" * 10
    assert (pair.a.failovers, pair.b.failovers) == (1, 0)
    assert pair.a.statistics().failovers == 1
    assert pair.a.sender.unacknowledged == 0


@pytest.mark.rfc("4.6.2/1")
def test_nothing_lost_nothing_repeated(pair: Pair) -> None:
    send(pair, b"a")
    pair.settle()
    pair.fail_link(0)
    assert pair.ab.log == [validation(1)]
    send(pair, b"b")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"ab"


def test_data_that_arrived_without_completion_is_read_once(pair: Pair) -> None:
    send(pair, b"abc")
    pair.ab.deliver()  # but not completed
    assert pair.b.receiver.receive(2) == b"ab"
    pair.fail_link(0)
    pair.settle()
    assert pair.b.receiver.receive(10) == b"c"
    assert pair.b.receiver.bytes_received == 3


@pytest.mark.rfc("4.6.2/1")
def test_a_replay_does_not_overwrite_newer_bytes(pair: Pair) -> None:
    """The peer has read a part of a write, and newer data is in the place of that part."""
    pair.close()
    whole = Pair((100, 100), chunks=False)
    data = bytes(range(150))
    assert whole.a.send(view(data)) == 100
    whole.ab.deliver()
    assert whole.b.receiver.receive(60) == data[:60]
    whole.ba.deliver()
    assert whole.a.send(view(data[100:])) == 50
    whole.ab.deliver()  # nothing is completed: the record starts with byte 0
    whole.fail_link(0)
    writes = [entry for entry in whole.ab.log if isinstance(entry, Write)]
    assert writes == [Write(60, 99), Write(0, 49)]
    whole.ab.deliver(2)  # the validation message and the first write
    assert whole.b.receiver.peek(100) == data[60:150]
    whole.settle()
    assert whole.b.receiver.receive(100) == data[60:]
    whole.close()


def test_writes_whose_message_was_put_off_are_announced() -> None:
    pair = Pair(merge=True)
    send(pair, b"abc")
    pair.fail_link(0)
    assert [entry.flags for entry in pair.ab.log if isinstance(entry, Cdc)] == [F, 0]
    pair.settle()
    assert pair.b.receiver.receive(10) == b"abc"
    pair.close()


@pytest.mark.rfc("4.6.2/2")
def test_the_sequence_number_wraps_during_a_move(pair: Pair) -> None:
    for _ in range(0xFFFF):
        send(pair, b".")
        pair.ab.deliver()
        pair.b.receiver.receive(1)
        pair.ba.deliver()
        pair.ab.complete()
        pair.ba.complete()
    send(pair, b"over")
    pair.fail_link(0)
    assert [entry.sequence for entry in pair.ab.log if isinstance(entry, Cdc)] == [0xFFFF, 1]
    pair.settle()
    assert pair.b.receiver.receive(10) == b"over"
    pair.fail_link(0)
    send(pair, b"and out")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"and out"


@pytest.mark.parametrize("lost", [0x7FFE, 0x7FFF])
def test_more_losses_than_sequence_numbers_end_the_connection(lost: int) -> None:
    """The peer would take such a number for an older one."""
    pair = Pair((1 << 16, 1 << 16))
    for count in (SEND_QUEUE, lost - SEND_QUEUE - 1):  # the replay takes a number, too
        for _ in range(count):
            send(pair, b".")
        pair.fail_link(0)
    if lost == 0x7FFE:
        pair.settle()
        assert len(pair.b.receiver.receive(1 << 16)) == pair.a.sender.bytes_sent
    else:
        assert pair.a.state == "CLOSED"
        assert pair.a.error is not None
        assert pair.a.error.errno == errno.ECONNRESET
        assert "reset_tcp" in pair.hosts[0].calls
    pair.close()


# --- links with little room ------------------------------------------------------------------


def narrow(pair: Pair, side: int = 0) -> FakeChannel:
    """The next link: full, until `make_room` gives it room for one round at a time."""
    old = pair.next_channel(side)
    old.queue.clear()
    pair.channels[side].slots = 0
    pair.channels[side].work = 3
    return old


def make_room(pair: Pair) -> None:
    """Give the next link room for one round at a time."""
    pair.ab.slots = SEND_QUEUE
    pair.ab.complete()


@pytest.mark.rfc("2.3/6", "4.6.2/1")
def test_a_replay_waits_for_room_and_nothing_overtakes_it(pair: Pair) -> None:
    for letter in b"abc":
        send(pair, bytes([letter]) * 200)
    narrow(pair)
    pair.move(0)
    assert pair.ab.log == []
    assert pair.ab.waiting != []
    assert not pair.a.sender.can_send
    assert pair.a.send(view(b"later")) == 0
    woken: list[bool] = []
    pair.a.on_writable = lambda: woken.append(True)
    pair.b.send(view(b"x" * 600))
    pair.ba.deliver()
    pair.a.receiver.receive(600)  # owes a consumer cursor
    assert pair.ab.log == []
    make_room(pair)
    pair.settle()
    messages = [entry for entry in pair.ab.log if isinstance(entry, Cdc)]
    assert [entry.flags for entry in messages] == [F] * 4 + [0]
    assert messages[-1] == Cdc(4, producer=(600, 0), consumer=(600, 0))
    assert woken
    assert pair.b.receiver.receive(1000) == b"a" * 200 + b"b" * 200 + b"c" * 200
    send(pair, b"later")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"later"


@pytest.mark.rfc("4.6.2/1")
def test_a_second_failure_starts_over(pair: Pair) -> None:
    for letter in b"abc":
        send(pair, bytes([letter]) * 200)
    narrow(pair)
    pair.move(0)
    make_room(pair)  # for the validation message
    pair.ab.deliver()
    pair.ab.complete()  # for the first write, and the validation message again
    first = pair.fail_link(0)
    assert [entry for entry in first.log if isinstance(entry, Write)] == [Write(0, 199)]
    assert pair.ab.log == [
        validation(0),
        Write(0, 199),
        Write(200, 399),
        Write(400, 599),
        Cdc(4, producer=(600, 0), consumer=(0, 0)),
    ]
    first.complete()
    assert pair.a.sender.unacknowledged == 600
    pair.settle()
    assert pair.b.receiver.receive(1000) == b"a" * 200 + b"b" * 200 + b"c" * 200
    assert pair.a.failovers == 2


def test_no_link_left_during_a_replay(pair: Pair) -> None:
    send(pair, b"abc")
    narrow(pair)
    pair.move(0)
    pair.a.links_lost()
    assert pair.a.state == "CLOSED"
    assert pair.hosts[0].calls == ["reset_tcp", "closed"]
    make_room(pair)
    assert pair.ab.log == []
    pair.fail_link(0)
    assert pair.ab.log == []


# --- completions -----------------------------------------------------------------------------


def test_late_completions_of_the_old_link_are_ignored() -> None:
    """They do not release memory that the new link still has to read."""
    pair = Pair(copy_limit=0)
    buffer = bytearray(b"x" * 1000)
    assert pair.a.send(memoryview(buffer)) == 1000
    pair.ab.deliver()
    old = pair.next_channel(0)
    pair.move(0)
    assert old.complete() == 1
    assert (pair.a.sender.borrowed, pair.a.sender.unacknowledged, pair.a.sequence_sent) == (
        1000,
        1000,
        0,
    )
    pair.settle()
    assert (pair.a.sender.borrowed, pair.a.sender.unacknowledged, pair.a.sequence_sent) == (0, 0, 2)
    assert pair.b.receiver.receive(2000) == bytes(buffer)
    pair.close()


def test_copies_made_during_a_replay_are_replayed() -> None:
    pair = Pair(copy_limit=0)
    buffer = bytearray(b"x" * 1000)
    assert pair.a.send(memoryview(buffer)) == 1000
    narrow(pair)
    pair.move(0)
    pair.a.sender.keep_copies()
    buffer[:] = b"!" * 1000
    make_room(pair)
    pair.settle()
    assert pair.b.receiver.receive(2000) == b"x" * 1000
    pair.close()


# --- flags -----------------------------------------------------------------------------------


def test_a_blocked_writer_stays_blocked(pair: Pair) -> None:
    assert pair.a.send(view(b"x" * 2000)) == SIZE
    pair.fail_link(0)
    last = pair.ab.log[-1]
    assert isinstance(last, Cdc)
    assert last.flags == B
    pair.settle()
    woken: list[bool] = []
    pair.a.on_writable = lambda: woken.append(True)
    pair.b.receiver.receive(SIZE // 4 + 1)
    pair.settle()
    assert woken


@pytest.mark.parametrize("arrived", [False, True])
def test_urgent_data_is_announced_again_once(pair: Pair, arrived: bool) -> None:
    assert pair.a.send_urgent(view(b"ab!")) == 3
    if arrived:
        pair.ab.deliver()
        assert pair.b.receiver.receive_urgent() == ord("!")
    pair.fail_link(0)
    assert [entry.flags for entry in pair.ab.log if isinstance(entry, Cdc)] == [F, P | U]
    pair.settle()
    assert pair.b.receiver.receive_urgent() == (None if arrived else ord("!"))
    assert not pair.a.sender.can_send
    assert pair.b.receiver.receive(10) == b"ab"
    pair.settle()
    send(pair, b"after")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"after"


def test_urgent_data_read_during_a_replay_blocks_no_sender(pair: Pair) -> None:
    assert pair.a.send_urgent(view(b"ab!")) == 3
    pair.ab.deliver()
    narrow(pair)
    pair.move(0)
    assert pair.b.receiver.receive(2) == b"ab"
    pair.ba.deliver()
    make_room(pair)
    pair.settle()
    send(pair, b"after")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"after"


def test_urgent_data_that_waits_for_a_window_stays_pending(pair: Pair) -> None:
    send(pair, b"x" * SIZE)
    assert pair.a.send_urgent(view(b"!")) == 0
    pair.fail_link(0)
    pair.settle()
    assert pair.b.receiver.urgent == "pending"
    pair.b.receiver.receive(SIZE)
    pair.settle()
    assert pair.a.send_urgent(view(b"!")) == 1
    pair.settle()
    assert pair.b.receiver.receive_urgent() == ord("!")


def test_a_request_for_updates_is_answered_on_the_new_link(pair: Pair) -> None:
    send(pair, b"abc")
    pair.ab.deliver()
    pair.ba.slots = 0
    pair.b.receiver.receive(1)
    request = cdc.pack(2, pair.b.alert_token, 0, 3, 0, 0, cdc.UPDATE_REQUESTED)
    receive_cdc(pair.b, request)
    assert pair.ba.log == []
    pair.fail_link(1)
    assert pair.ba.log == [validation(0), Cdc(1, producer=(0, 0), consumer=(1, 0))]
    pair.b.receiver.receive(1)
    assert pair.ba.log[-1] == Cdc(2, producer=(0, 0), consumer=(2, 0))


def test_the_end_of_the_data_is_announced_again(pair: Pair) -> None:
    pair.a.shutdown_write()
    pair.fail_link(0)
    assert pair.ab.log == [validation(0), Cdc(2, (0, 0), (0, 0), endings=D)]
    pair.settle()
    assert pair.b.receiver.at_eof


def test_a_close_that_waits_for_its_data_survives(pair: Pair) -> None:
    send(pair, b"last words")
    pair.a.close()
    assert pair.a.close_pending
    pair.fail_link(0)
    pair.settle()
    assert pair.b.receiver.receive(20) == b"last words"
    assert pair.b.receiver.at_eof
    pair.b.close()
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert [host.calls for host in pair.hosts] == [["close_tcp", "closed"]] * 2


@pytest.mark.parametrize("arrived", [False, True])
def test_a_last_message_lost_with_its_link_is_sent_again(pair: Pair, arrived: bool) -> None:
    pair.a.close()
    pair.settle()
    pair.b.close()
    if arrived:
        pair.ba.deliver()
    assert pair.b.state == "CLOSED"
    assert pair.hosts[1].calls == ["close_tcp"], "the RMBE is not free before it arrives"
    pair.fail_link(1)
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert [host.calls for host in pair.hosts] == [["close_tcp", "closed"]] * 2


def test_nothing_follows_a_last_word_that_has_arrived(pair: Pair) -> None:
    pair.a.close()
    pair.settle()
    pair.fail_link(0)
    assert pair.ab.log == []
    assert pair.a.channel is pair.ab


def test_an_abort_lost_with_its_link_is_sent_again(pair: Pair) -> None:
    send(pair, b"of no interest")
    pair.a.abort()
    pair.fail_link(0)
    assert pair.ab.log == [validation(0), Cdc(3, (14, 0), (0, 0), endings=A)]
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert pair.b.error is not None
    assert pair.b.error.errno == errno.ECONNRESET


def test_nothing_moves_before_the_peer_is_known_and_after_the_end() -> None:
    pair = Pair(connect=False)
    pair.fail_link(0)
    assert pair.ab.log == []
    assert pair.a.failovers == 0
    pair.know(0)
    pair.a.withdraw()
    pair.fail_link(0)
    assert pair.ab.log == []
    pair.close()


# --- the receiver's check --------------------------------------------------------------------


def receive_messages(pair: Pair, count: int) -> None:
    """B receives ``count`` CDC messages without changes, with sequence numbers from 1."""
    for number in range(1, count + 1):
        receive_cdc(pair.b, cdc.pack(number, 0xA1, 0, 0, 0, 0))


@pytest.mark.rfc("4.6.1/2", "4.6.1/6", "2.3/5")
@pytest.mark.rfc("4.6.1/2", "4.6.1/6")
@pytest.mark.parametrize("received", [0, 1, 0x7FFF])
def test_a_hole_resets_the_connection(pair: Pair, received: int) -> None:
    """SR is less than SS in serial arithmetic: data was acknowledged that never arrived (4.6.1)."""
    receive_messages(pair, received)
    pair.ab.queue.append(("cdc", cdc.pack((received + 1) & 0xFFFF, 0xA1, 0, 0, 0, 0, F), 0))
    with pytest.raises(cdc.MessageMissing, match="lost"):
        pair.ab.deliver()
    assert pair.b.state == "PEERABORTWAIT"
    assert pair.hosts[1].calls == ["reset_tcp"]
    assert pair.b.error is not None
    assert isinstance(pair.b.error.__cause__, ProtocolError)
    pair.settle()
    assert pair.a.error is not None
    assert pair.a.error.errno == errno.ECONNRESET


@pytest.mark.rfc("4.6.1/4", "4.6.1/5")
@pytest.mark.rfc("4.6.1/4", "4.6.1/5")
@pytest.mark.parametrize(("received", "sent"), [(0, 0), (5, 5), (6, 5), (0, 0xFFFF), (3, 0xFFF0)])
def test_no_hole_changes_nothing(pair: Pair, received: int, sent: int) -> None:
    receive_messages(pair, received)
    nonsense = cdc.pack(sent, 0xA1, 9, 999, 9, 999, F | B | P | U, C | A | D)
    receive_cdc(pair.b, nonsense)
    assert pair.b.state == "ACTIVE"
    assert (pair.b.sequence_received, pair.b.receiver.bytes_received, pair.b.receiver.urgent) == (
        received,
        0,
        "none",
    )


@pytest.mark.rfc("4.6.1/5")
def test_a_validation_message_may_overtake_validated_messages(pair: Pair) -> None:
    """The old link delivered everything, but the receiver has not polled it yet."""
    send(pair, b"abc")
    old = pair.ab
    kept = list(old.queue)
    old.queue.clear()
    assert old.complete() == 1
    pair.fail_link(0)

    _, message, _ = pair.ab.queue.popleft()
    assert isinstance(message, bytes)
    with pytest.raises(cdc.MessageMissing):
        receive_cdc(pair.b, message)
    assert pair.b.state == "ACTIVE", "not before all links were polled"
    old.queue.extend(kept)
    old.deliver()
    receive_cdc(pair.b, message)
    assert pair.b.state == "ACTIVE"
    assert pair.b.receiver.receive(10) == b"abc"


@pytest.mark.rfc("4.6.1/1", "4.6.1/6")
@pytest.mark.rfc("4.6.1/6", "2.3/5")
def test_an_acknowledged_write_that_never_arrived_is_found_out(pair: Pair) -> None:
    send(pair, b"abc")
    _, message, _ = pair.ab.queue.pop()
    pair.ab.complete()  # as if it had arrived
    assert pair.a.sequence_sent == 1
    pair.fail_link(0)
    with pytest.raises(cdc.MessageMissing, match="message 1 is missing after 0"):
        pair.ab.deliver()
    assert message
    assert pair.b.state == "PEERABORTWAIT"
    # Over one more link, the number is known.
    token = pair.b.alert_token
    receive_cdc(pair.b, cdc.pack(1, token, 0, 0, 0, 0, cdc.FAILOVER_VALIDATION))


@pytest.mark.parametrize("buffer", [bytes, bytearray])
@pytest.mark.parametrize("arrives", [False, True])
def test_a_message_of_unknown_fate_counts_as_posted(arrives: bool, buffer: type) -> None:
    """The link ended with an immediate delivery. The peer may have received it, and may announce it
    before this side polls."""
    pair = Pair(merge=True)
    pair.ab.instant, pair.ab.doubt, pair.ab.arrives = True, 1, arrives
    pair.ba.instant = True
    data = buffer(b"abc")
    assert pair.a.send(memoryview(data)) == 3
    if buffer is bytearray:
        data[:] = b"xyz"  # the memory belongs to the sender again
    assert (pair.a.sequence_sent, pair.a.sender.unacknowledged) == (0, 3)
    pair.ab.deliver()
    assert pair.b.receiver.receive(10) == (b"abc" if arrives else b"")
    assert pair.b.send(view(b"answer")) == 6
    pair.ba.deliver()
    assert pair.a.receiver.receive(10) == b"answer"
    pair.settle()
    assert pair.b.receiver.receive(10) == (b"" if arrives else b"abc")
    assert pair.states() == ("ACTIVE", "ACTIVE")
    assert pair.a.sender.unacknowledged == 0
    pair.close()


@pytest.mark.parametrize("arrives", [False, True])
def test_a_cursor_of_unknown_fate_is_announced_again(arrives: bool) -> None:
    pair = Pair((SIZE, SIZE))
    send(pair, bytes(SIZE))
    pair.settle()
    pair.ba.instant, pair.ba.doubt, pair.ba.arrives = True, 1, arrives
    assert len(pair.b.receiver.receive(SIZE)) == SIZE
    assert pair.ba.dead
    pair.settle()
    assert pair.a.sender.window == SIZE
    pair.close()


# --- a link that is left while it works ------------------------------------------------------


@pytest.mark.rfc("2.3/4")
def test_writes_in_flight_arrive_before_the_link_is_left(pair: Pair) -> None:
    send(pair, b"abc")
    ready: list[bool] = []
    hold(pair.a, lambda: ready.append(True))
    assert not pair.a.sender.can_send
    assert pair.a.send(view(b"def")) == 0
    assert ready == []
    pair.settle()
    assert ready == [True]
    assert pair.a.channel is pair.ab
    old = pair.next_channel(0)
    pair.move(0)
    assert pair.ab.log == [validation(1)]
    assert old.uncompleted == old.queue
    send(pair, b"def")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"abcdef"


def test_a_hold_with_nothing_in_flight_is_ready_at_once(pair: Pair) -> None:
    ready: list[bool] = []
    hold(pair.a, lambda: ready.append(True))
    assert ready == [True]
    pair.b.send(view(b"x" * 600))
    pair.ba.deliver()
    pair.a.receiver.receive(600)
    assert pair.ab.log == [], "the cursor waits for the other link"
    pair.next_channel(0)
    pair.move(0)
    assert pair.ab.log == [validation(0), Cdc(1, (0, 0), (600, 0))]


def test_a_connection_may_stay_where_it_is(pair: Pair) -> None:
    send(pair, b"abc")
    stay(pair.a)
    hold(pair.a, lambda: stay(pair.a))
    pair.b.send(view(b"x" * 600))
    pair.ba.deliver()
    pair.a.receiver.receive(600)
    assert len(pair.ab.log) == 2, "held"
    pair.settle()
    assert pair.ab.log[2:] == [Cdc(2, (3, 0), (600, 0))]
    send(pair, b"def")
    pair.settle()
    assert pair.b.receiver.receive(10) == b"abcdef"
    assert pair.a.failovers == 0


def test_a_hold_ends_after_deferred_writes() -> None:
    pair = Pair(merge=True)
    send(pair, b"abc")
    ready: list[bool] = []
    pair.ab.slots = 0
    hold(pair.a, lambda: ready.append(True))
    pair.settle()
    assert ready == []
    make_room(pair)
    pair.settle()
    assert ready == [True]
    assert pair.b.receiver.receive(10) == b"abc"
    pair.close()


def test_a_link_that_fails_while_it_is_left(pair: Pair) -> None:
    send(pair, b"abc")
    ready: list[bool] = []
    hold(pair.a, lambda: ready.append(True))
    old = pair.fail_link(0)
    old.complete()
    pair.settle()
    assert ready == [], "the move came first"
    assert pair.b.receiver.receive(10) == b"abc"


def test_a_held_connection_that_ends_releases_its_holder(pair: Pair) -> None:
    send(pair, b"abc")
    ready: list[bool] = []
    hold(pair.a, lambda: ready.append(True))
    pair.a.links_lost()
    assert ready == [True]


@pytest.mark.parametrize("over", [False, True])
def test_a_link_that_is_left_during_the_replay_onto_it(pair: Pair, over: bool) -> None:
    send(pair, b"abc")
    narrow(pair)
    pair.move(0)
    ready: list[bool] = []
    hold(pair.a, lambda: ready.append(True))
    assert ready == []
    if over:
        pair.a.links_lost()
    else:
        make_room(pair)
        pair.settle()
        assert pair.b.receiver.receive(10) == b"abc"
        assert not pair.a.sender.can_send
    assert ready == [True]


# --- the campaign ----------------------------------------------------------------------------


def test_random_moves(seed: int) -> None:
    result = campaign.run(150, seed)
    assert result.failures > 100
    assert result.departures > 100


@pytest.mark.pure  # a method of a compiled class is not replaced
def test_the_campaign_notices_a_replay_of_consumed_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replay(self: Sender, start: int = 0) -> Iterator[tuple[int, memoryview]]:
        for _, end, data in self._record:
            if end > start:
                first = end - len(data)
                yield max(first, start), data[max(0, start - first) :]

    # One schedule in a thousand shows the fault: too few for a search within a test.
    seed, case = 11, 588
    campaign.run(1, seed, only=case)
    monkeypatch.setattr(Sender, "replay", replay)
    with pytest.raises(AssertionError, match=r"wrong bytes|unread changed"):
        campaign.run(1, seed, only=case)
