"""Impossible CDC messages: they raise a typed error and abort only their own connection."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Iterator

import pytest

from tests.datapath.datapath_pair import Cdc, Pair, arrive, receive_cdc
from tests.peers import open_pair
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.connection import Connection
from trio_smc.wire import cdc

RING = 16384
TOKEN = 0xA1  # of B, which is attacked
ABORTED = ("PEERABORTWAIT", "PROCESSABORT")


@pytest.fixture(params=[False, True], ids=["linux", "rfc"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two open connections; A has sent 1000 bytes and B 500, all read and announced."""
    with open_pair("core", (RING, RING), (request.param, request.param)) as pair:
        pair.a.send(memoryview(bytes(1000)))
        pair.settle()
        pair.b.receiver.receive(1000)
        pair.b.send(memoryview(bytes(500)))
        pair.settle()
        pair.a.receiver.receive(500)
        pair.a.send(memoryview(b"x"))
        pair.settle()
        pair.b.receiver.receive(1)
        pair.ab.log.clear()
        pair.ba.log.clear()
        yield pair


def message(
    pair: Pair,
    *,
    producer: tuple[int, int] = (0, 1001),
    consumer: tuple[int, int] = (0, 500),
    sequence: int = 3,
    flags: int = 0,
    endings: int = 0,
) -> bytes:
    """A message to B; by default (wrap, bytes in the ring) have their present values."""
    first = pair.b.rmbe.first
    return cdc.pack(
        sequence,
        TOKEN,
        producer[0],
        producer[1] + first,
        consumer[0],
        consumer[1] + first,
        flags,
        endings,
    )


@pytest.mark.rfc("4.3/1")
def test_the_message_as_it_stands_is_accepted(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair))
    assert pair.b.state == "ACTIVE"
    assert (pair.b.receiver.readable, pair.b.sender.window) == (0, pair.a.rmbe.usable)
    assert pair.b.cdcs_received == 3


NOW = (0, 1001), (0, 500)  # producer, consumer
LIES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "producer behind the element": ((0, RING), NOW[1]),
    "producer far behind the element": ((0, 0xFFFF_0000), NOW[1]),
    "producer back by one": ((0, 1000), NOW[1]),
    "producer beyond the window": ((1, 1002), NOW[1]),  # granted: up to 1:1001 or 1:1000
    "producer two rings on": ((2, 1001), NOW[1]),
    "producer a wrap back": ((0xFFFF, 1001), NOW[1]),
    "consumer behind the element": (NOW[0], (0, RING)),
    "consumer back": (NOW[0], (0, 499)),
    "consumer beyond what was sent": (NOW[0], (0, 501)),
    "consumer a ring on": (NOW[0], (1, 500)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_impossible_message_aborts_the_connection(
    pair: Pair, lie: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    woken: list[str] = []
    pair.b.on_readable = lambda: woken.append("reader")
    pair.b.on_writable = lambda: woken.append("writer")
    with pytest.raises(ProtocolError, match="cursor"):
        receive_cdc(pair.b, message(pair, producer=lie[0], consumer=lie[1]))
    assert pair.b.state in ABORTED
    assert sorted(woken) == ["reader", "writer"]
    assert [entry.endings for entry in pair.ba.log if isinstance(entry, Cdc)] == [
        cdc.ABNORMAL_CLOSE
    ]
    assert pair.hosts[1].calls == ["reset_tcp"]
    assert pair.hosts[1].timer is not None
    with pytest.raises(ConnectionResetError) as caught:
        pair.b.receiver.receive(1)
    assert isinstance(caught.value.__cause__, ProtocolError)
    with pytest.raises(BrokenPipeError):
        pair.b.send(memoryview(b"x"))
    # The peer is notified, and ends as well if it is honest.
    pair.settle()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert pair.a.error
    assert pair.a.error.errno == errno.ECONNRESET


@pytest.mark.rfc("A.4/8")
def test_the_whole_window_may_be_used_and_no_byte_more(pair: Pair) -> None:
    usable = pair.b.rmbe.usable
    # B has announced 1000 of the 1001 bytes that it has read.
    wrap, offset = divmod(1000 + usable, usable)
    receive_cdc(pair.b, message(pair, producer=(wrap, offset)))
    assert pair.b.receiver.readable == usable - 1
    with pytest.raises(ProtocolError, match="cursor"):
        receive_cdc(pair.b, message(pair, sequence=4, producer=(wrap, offset + 1)))


def test_a_cursor_in_the_eye_catcher_is_refused(pair: Pair) -> None:
    wanted = "outside" if pair.b.rmbe.first else "not within"  # without one, it lies behind us
    with pytest.raises(ProtocolError, match=wanted):
        receive_cdc(pair.b, cdc.pack(3, TOKEN, 0, 3, 0, 500 + pair.b.rmbe.first))


@pytest.mark.rfc("A.4/4")
@pytest.mark.parametrize(
    ("sequence", "stale"),
    [(1, True), (2, False), (3, False), (0x8001, False), (0x8002, True), (0xFFFF, True)],
)
def test_a_stale_sequence_number_is_discarded_and_counted(
    pair: Pair, sequence: int, stale: bool
) -> None:
    """Serial arithmetic over 16 bits; B has seen 2, and the same again is accepted."""
    receive_cdc(
        pair.b, message(pair, sequence=sequence, producer=(0, 1101), endings=cdc.SENDING_DONE)
    )
    assert pair.b.stale_cdcs == stale
    assert pair.b.receiver.readable == (0 if stale else 100)
    assert pair.b.state == ("ACTIVE" if stale else "APPCLOSEWAIT1")


@pytest.mark.rfc("4.3/2", "A.4/5")
def test_the_sequence_number_wraps_to_zero(pair: Pair) -> None:
    for sequence in (0x7000, 0xE000, 0xFFFF, 0, 1):
        receive_cdc(pair.b, message(pair, sequence=sequence))
    assert pair.b.stale_cdcs == 0
    assert pair.b.sequence_received == 1


@pytest.mark.parametrize("ending", [cdc.SENDING_DONE, cdc.CONNECTION_CLOSED])
def test_data_after_the_end_of_the_stream_is_an_error(pair: Pair, ending: int) -> None:
    receive_cdc(pair.b, message(pair, producer=(0, 1011), endings=ending))
    assert pair.b.receiver.readable == 10
    with pytest.raises(ProtocolError, match="after the end of its stream"):
        receive_cdc(pair.b, message(pair, sequence=4, producer=(0, 1012), endings=ending))
    assert pair.b.state in ABORTED


def test_repeated_and_late_endings_change_nothing(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair, endings=cdc.CONNECTION_CLOSED))
    states = list(pair.hosts[1].states)
    for sequence, endings in ((4, cdc.CONNECTION_CLOSED), (5, cdc.SENDING_DONE), (6, 0)):
        receive_cdc(pair.b, message(pair, sequence=sequence, endings=endings))
    assert pair.hosts[1].states == states
    assert pair.b.state == "APPCLOSEWAIT1"


def test_nothing_reaches_an_aborted_connection(pair: Pair) -> None:
    pair.b.abort()
    # Data and cursors, even impossible ones, are ignored now (4.8.2, 1A).
    receive_cdc(pair.b, message(pair, producer=(7, 7), endings=cdc.SENDING_DONE))
    assert pair.b.state == "PEERABORTWAIT"
    receive_cdc(pair.b, message(pair, sequence=4, endings=cdc.ABNORMAL_CLOSE))
    assert pair.b.state == "CLOSED"
    receive_cdc(pair.b, message(pair, sequence=5, producer=(7, 7)))
    assert pair.hosts[1].calls == ["reset_tcp"]
    pair.ba.deliver()
    pair.ba.complete()
    receive_cdc(pair.b, message(pair, sequence=6, producer=(7, 7)))
    assert pair.b.stale_cdcs == 1
    assert pair.hosts[1].calls == ["reset_tcp", "closed"]


def test_all_flags_at_once_are_an_abort(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair, producer=(0, 1011), flags=0xF7, endings=0xFF))
    assert pair.b.state == "PROCESSABORT"
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)


BOTH = cdc.URGENT_PENDING | cdc.URGENT_PRESENT


def read_what_arrived(pair: Pair) -> None:
    """Read data that the peer announced validly before A, or with it."""
    if readable := pair.b.receiver.readable:
        assert len(pair.b.receiver.receive(readable)) == readable


def closed_at_once(pair: Pair) -> None:
    """B's element is free as soon as B's answer has arrived; no timer runs."""
    pair.ba.deliver()
    pair.ba.complete()
    assert pair.b.state == "CLOSED"
    assert pair.hosts[1].calls.count("closed") == 1
    assert pair.hosts[1].timer is None
    assert pair.b.used is None, (
        "the number of written bytes is unknown, so the whole element is zeroed"
    )


@pytest.mark.rfc("4.8.2/9", "4.8.2/10", "4.8.2/11", "A.4/18", "A.4/19", "A.4/20")
@pytest.mark.parametrize("endings", [0x20, 0x60, 0xA0, 0xFF])
@pytest.mark.parametrize("flags", [0, cdc.URGENT_PRESENT, BOTH, 0xF7])
@pytest.mark.parametrize("lie", [NOW, *LIES.values()], ids=["the truth", *LIES.keys()])
def test_an_abort_counts_with_any_other_field(
    pair: Pair, lie: tuple[tuple[int, int], tuple[int, int]], flags: int, endings: int
) -> None:
    """4.8.2 (2A, 2B), A.4: A announces that the peer is completely done."""
    woken: list[str] = []
    pair.b.on_readable = lambda: woken.append("reader")
    pair.b.on_writable = lambda: woken.append("writer")
    receive_cdc(
        pair.b, message(pair, producer=lie[0], consumer=lie[1], flags=flags, endings=endings)
    )
    assert pair.b.state == "PROCESSABORT"
    assert sorted(woken) == ["reader", "writer"]
    answers = [entry.endings for entry in pair.ba.log if isinstance(entry, Cdc)]
    assert answers == [cdc.ABNORMAL_CLOSE]
    assert "reset_tcp" not in pair.hosts[1].calls, "the peer resets TCP itself"
    for call in (pair.b.receiver.receive_urgent, lambda: pair.b.receiver.receive(1)):
        with pytest.raises(ConnectionResetError):
            call()
    with pytest.raises(BrokenPipeError):
        pair.b.send(memoryview(b"x"))
    closed_at_once(pair)


def done(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair, endings=cdc.SENDING_DONE))


def urgent(pair: Pair) -> None:
    """An urgent byte that is neither read nor acknowledged."""
    receive_cdc(pair.b, message(pair, producer=(0, 1011), flags=BOTH))


def overwritten(pair: Pair) -> None:
    rmbe = pair.b.rmbe
    rmbe.rmb.memory.view[rmbe.offset : rmbe.offset + 4] = b"lost"


def half_closed(pair: Pair) -> None:
    pair.b.shutdown_write()
    pair.ba.deliver()
    pair.ba.complete()


def closed_by_peer(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair, endings=cdc.CONNECTION_CLOSED))


def half_closed_by_both(pair: Pair) -> None:
    done(pair)
    half_closed(pair)


def finished(pair: Pair) -> None:
    half_closed(pair)
    closed_by_peer(pair)


@pytest.mark.rfc("4.8.2/11", "A.4/19")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize(
    ("before", "state"),
    [
        (done, "APPCLOSEWAIT1"),
        (closed_by_peer, "APPCLOSEWAIT1"),
        (urgent, "ACTIVE"),
        (overwritten, "ACTIVE"),
        (half_closed, "PEERCLOSEWAIT1"),
        (half_closed_by_both, "APPCLOSEWAIT2"),
        (finished, "APPFINCLOSEWAIT"),
    ],
)
def test_an_abort_counts_in_each_state(
    pair: Pair,
    before: Callable[[Pair], None],
    state: str,
    lie: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    before(pair)
    assert pair.b.state == state
    receive_cdc(
        pair.b,
        message(pair, sequence=9, producer=lie[0], consumer=lie[1], endings=cdc.ABNORMAL_CLOSE),
    )
    assert pair.b.state == "PROCESSABORT"
    if pair.b.receiver.peer_done:
        assert pair.b.receiver.receive(1) == b"", "the end came before"
    else:
        read_what_arrived(pair)
        with pytest.raises(ConnectionResetError):
            pair.b.receiver.receive(1)
    closed_at_once(pair)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_abort_counts_after_our_own_end(
    pair: Pair, lie: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Figure 23: after C this side sends no answer, and the element is free."""
    pair.b.close()
    pair.ba.deliver()
    pair.ba.complete()
    receive_cdc(
        pair.b,
        message(pair, sequence=9, producer=lie[0], consumer=lie[1], endings=cdc.ABNORMAL_CLOSE),
    )
    answers = [entry.endings for entry in pair.ba.log if isinstance(entry, Cdc)]
    assert answers == [cdc.CONNECTION_CLOSED]
    closed_at_once(pair)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_abort_counts_before_the_rendezvous_is_over(
    lie: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    pair = Pair(connect=False)
    pair.know(1)
    receive_cdc(
        pair.b,
        message(pair, sequence=1, producer=lie[0], consumer=lie[1], endings=cdc.ABNORMAL_CLOSE),
    )
    assert pair.b.state == "PROCESSABORT"
    pair.b.established()
    read_what_arrived(pair)
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)
    pair.ba.peer = pair.b  # A has not begun, and gets no answer
    pair.ba.queue.clear()
    pair.ba.complete()
    assert pair.hosts[1].calls.count("closed") == 1
    pair.close()


@pytest.mark.rfc("A.4/19")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_abort_counts_although_its_turn_comes_later(
    pair: Pair, lie: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """If many connections end together, an ending is deferred: no message behind A undoes it."""
    put_off: list[Callable[[], None]] = []
    pair.b.in_turn = lambda callback, _: put_off.append(callback)
    receive_cdc(pair.b, message(pair, endings=cdc.ABNORMAL_CLOSE))
    for sequence, endings in enumerate((0, cdc.SENDING_DONE, cdc.ABNORMAL_CLOSE), 4):
        receive_cdc(
            pair.b,
            message(pair, sequence=sequence, producer=lie[0], consumer=lie[1], endings=endings),
        )
    assert pair.b.state == "ACTIVE"
    [callback] = put_off
    callback()
    assert pair.b.state == "PROCESSABORT"
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)
    closed_at_once(pair)


@pytest.mark.rfc("A.4/4", "A.4/14")
def test_an_abort_in_a_message_that_does_not_count_is_none(pair: Pair) -> None:
    """A.4: an old message is discarded, and of a failover validation only the sequence counts."""
    receive_cdc(pair.b, message(pair, sequence=1, endings=cdc.ABNORMAL_CLOSE))
    validation = message(
        pair, sequence=2, flags=cdc.FAILOVER_VALIDATION, endings=cdc.ABNORMAL_CLOSE
    )
    receive_cdc(pair.b, validation)
    assert (pair.b.state, pair.b.stale_cdcs) == ("ACTIVE", 1)


@pytest.mark.parametrize("ending", [cdc.SENDING_DONE, cdc.CONNECTION_CLOSED])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_end_with_impossible_cursors_is_not_accepted(
    pair: Pair, lie: tuple[tuple[int, int], tuple[int, int]], ending: int
) -> None:
    """D and C promise that all data was told, and the cursors are what was told: no application
    may take what it has for all there is."""
    with pytest.raises(ProtocolError, match="cursor"):
        receive_cdc(pair.b, message(pair, producer=lie[0], consumer=lie[1], endings=ending))
    assert pair.b.state == "PEERABORTWAIT"
    assert not pair.b.receiver.at_eof
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)


@pytest.mark.parametrize("new", [1, 2, 500])
def test_urgent_flags_have_no_other_effect(pair: Pair, new: int) -> None:
    receive_cdc(pair.b, message(pair, producer=(0, 1001 + new), flags=BOTH))
    assert pair.b.receiver.urgent == "present"
    assert pair.b.state == "ACTIVE"
    assert (
        len(pair.b.receiver.receive(1000)) == new - 1
        if new > 1
        else pair.b.receiver.receive(1) == b""
    )
    assert pair.b.receiver.receive_urgent() == 0
    assert not pair.b.unread


def test_urgent_data_where_all_was_read_is_an_error(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="urgent"):
        receive_cdc(pair.b, message(pair, flags=cdc.URGENT_PRESENT))
    assert pair.b.state in ABORTED
    assert pair.b.receiver.urgent == "none"


def test_urgent_data_before_any_data_is_an_error() -> None:
    fresh = Pair()
    with pytest.raises(ProtocolError, match="urgent"):
        receive_cdc(fresh.b, cdc.pack(1, TOKEN, 0, 0, 0, 0, BOTH))
    assert fresh.b.state in ABORTED
    fresh.close()


def test_the_last_unread_byte_may_become_urgent_later(pair: Pair) -> None:
    """U without new data, for a byte that was not read yet."""
    receive_cdc(pair.b, message(pair, producer=(0, 1011)))
    assert pair.b.receiver.readable == 10
    receive_cdc(pair.b, message(pair, producer=(0, 1011), sequence=4, flags=BOTH))
    assert (pair.b.receiver.urgent, pair.b.receiver.readable) == ("present", 9)
    assert len(pair.b.receiver.receive(100)) == 9
    assert not pair.b.unread


def test_a_repeated_mark_changes_nothing(pair: Pair) -> None:
    """Some peers leave P and U set until the mark was reached, or until they send again."""
    receive_cdc(pair.b, message(pair, producer=(0, 1002), flags=BOTH))
    assert pair.b.receiver.receive_urgent() == 0
    for sequence in (4, 5):
        receive_cdc(pair.b, message(pair, producer=(0, 1002), sequence=sequence, flags=BOTH))
        assert pair.b.receiver.urgent == "none"
    assert len(pair.ba.log) == 1, "the mark was told"
    assert pair.b.state == "ACTIVE"


@pytest.mark.rfc("4.7.5/6")
def test_data_behind_an_unacknowledged_urgent_byte_is_an_error(pair: Pair) -> None:
    receive_cdc(pair.b, message(pair, producer=(0, 1011), flags=BOTH))
    with pytest.raises(ProtocolError, match="urgent"):
        receive_cdc(pair.b, message(pair, producer=(0, 1012), sequence=4))
    assert pair.b.state in ABORTED
    assert pair.b.receiver.receive_urgent() == 0
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive_urgent()


def test_p_for_ever_harms_only_the_peer(pair: Pair) -> None:
    for sequence in range(3, 50):
        flags = cdc.URGENT_PENDING
        receive_cdc(pair.b, message(pair, sequence=sequence, flags=flags))
        assert pair.b.receiver.urgent == "pending"
    assert pair.ba.log == []
    receive_cdc(pair.b, message(pair, sequence=50))
    assert pair.b.receiver.urgent == "none"


# --- failover validation ---------------------------------------------------------------------


@pytest.mark.rfc("4.6.1/4", "A.4/14")
def test_a_validation_message_is_only_compared(pair: Pair) -> None:
    """Ruling on 4.6.1: its cursors and flags mean nothing."""
    receive_cdc(
        pair.b,
        message(
            pair,
            sequence=2,
            producer=(9, 9),
            consumer=(9, 9),
            flags=cdc.FAILOVER_VALIDATION | cdc.WRITER_BLOCKED,
            endings=0xFF,
        ),
    )
    assert pair.b.state == "ACTIVE"
    assert (pair.b.sequence_received, pair.b.receiver.readable) == (2, 0)
    assert pair.ba.log == []


@pytest.mark.rfc("A.4/15")
@pytest.mark.parametrize(("sequence", "lost"), [(1, False), (2, False), (3, True), (0, False)])
def test_a_message_missing_after_a_failover_is_a_loss(
    pair: Pair, sequence: int, lost: bool
) -> None:
    bad = message(pair, sequence=sequence, flags=cdc.FAILOVER_VALIDATION)
    if lost:
        with pytest.raises(ProtocolError, match="lost"):
            arrive(pair.b, bad)
        assert pair.b.state in ABORTED
        assert pair.hosts[1].calls == ["reset_tcp"]
    else:
        receive_cdc(pair.b, bad)
        assert pair.b.state == "ACTIVE"


@pytest.mark.parametrize("endings", [cdc.SENDING_DONE, cdc.CONNECTION_CLOSED])
@pytest.mark.parametrize("fault", ["message missing", "cursor invalid"])
def test_an_end_after_a_loss_is_not_the_end_of_the_data(
    pair: Pair, fault: str, endings: int
) -> None:
    """The data before the end has not arrived, so the reader gets an error, as over TCP."""
    if fault == "message missing":
        bad = message(pair, sequence=4, flags=cdc.FAILOVER_VALIDATION)
    else:
        bad = message(pair, sequence=4, producer=(0, RING))
    with pytest.raises(ProtocolError):
        arrive(pair.b, bad)
    receive_cdc(pair.b, message(pair, sequence=5, producer=(0, 1100), endings=endings))
    receiver = pair.b.receiver
    assert not receiver.at_eof
    with pytest.raises(ConnectionResetError):
        receiver.receive(100)


def test_after_a_failover_a_cursor_may_lie_behind(pair: Pair) -> None:
    """Linux says so when it tells what it has read before it has written again (4.6.2)."""
    receive_cdc(pair.b, message(pair, sequence=2, flags=cdc.FAILOVER_VALIDATION))
    woken: list[str] = []
    pair.b.on_readable = lambda: woken.append("reader")
    old = (0, 700)
    receive_cdc(pair.b, message(pair, producer=old, flags=cdc.URGENT_PRESENT | cdc.WRITER_BLOCKED))
    receive_cdc(pair.b, message(pair, producer=old, sequence=4))
    receiver = pair.b.receiver
    assert pair.b.state == "ACTIVE"
    assert (receiver.received, receiver.readable, receiver.urgent_mark, woken) == (1001, 0, 0, [])
    receive_cdc(pair.b, message(pair, producer=(0, 1004), sequence=5))
    assert (receiver.received, receiver.readable, woken) == (1004, 3, ["reader"])


@pytest.mark.parametrize("validated", [True, False])
def test_a_cursor_lies_behind_by_a_ring_at_most_and_only_after_a_failover(
    pair: Pair, validated: bool
) -> None:
    if validated:
        receive_cdc(pair.b, message(pair, sequence=2, flags=cdc.FAILOVER_VALIDATION))
        back = 1001 - pair.b.rmbe.usable - 1
    else:
        back = 1000
    wrap, offset = divmod(back, pair.b.rmbe.usable)
    with pytest.raises(ProtocolError, match="cursor"):
        receive_cdc(pair.b, message(pair, producer=(wrap & 0xFFFF, offset)))
    assert pair.b.state in ABORTED


@pytest.mark.parametrize(("more_than_a_ring", "true"), [(0, True), (1, False)])
def test_a_cursor_that_lies_behind_by_a_ring(pair: Pair, more_than_a_ring: int, true: bool) -> None:
    receiver, usable = pair.b.receiver, pair.b.rmbe.usable
    while receiver.received < 2 * usable:
        pair.a.send(memoryview(bytes(8000)))
        pair.settle()
        receiver.receive(8000)
    received, last = receiver.received, pair.b.sequence_received
    receive_cdc(pair.b, message(pair, sequence=last, flags=cdc.FAILOVER_VALIDATION))
    behind = message(
        pair,
        sequence=last + 1,
        producer=divmod(received - usable - more_than_a_ring, usable),
        consumer=(0, 500),
    )
    if true:
        receive_cdc(pair.b, behind)
        assert (pair.b.state, receiver.received) == ("ACTIVE", received)
    else:
        with pytest.raises(ProtocolError, match="cursor"):
            receive_cdc(pair.b, behind)
        assert pair.b.state in ABORTED


def test_no_cursor_lies_before_the_first_byte(pair: Pair) -> None:
    """Not even after a failover: 1001 bytes were sent in all."""
    receive_cdc(pair.b, message(pair, sequence=2, flags=cdc.FAILOVER_VALIDATION))
    with pytest.raises(ProtocolError, match="cursor"):
        receive_cdc(pair.b, message(pair, producer=(0xFFFF, pair.b.rmbe.usable - 1)))
    assert pair.b.state in ABORTED


# --- the eye catcher -------------------------------------------------------------------------


@pytest.mark.rfc("4.2/3", "4.4.1/4", "4.4.1/5")
@pytest.mark.parametrize("noticed_by", ["message", "abort", "receive", "peek", "receive_into"])
def test_an_overwritten_eye_catcher_resets_the_connection(
    noticed_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair((RING, RING), (True, True))
    try:
        pair.a.send(memoryview(b"0123456789"))
        pair.settle()
        pair.memories[1].view[2] ^= 0xFF
        if noticed_by == "message":
            pair.a.send(memoryview(b"more"))
            with pytest.raises(ProtocolError, match="eye catcher"):
                pair.ab.deliver()
        elif noticed_by == "abort":
            pair.a.abort()
            pair.settle()
        else:
            call = getattr(pair.b.receiver, noticed_by)
            argument = bytearray(5) if noticed_by == "receive_into" else 5
            caplog.set_level(logging.WARNING, "trio_smc")
            with pytest.raises(ConnectionResetError) as caught:
                call(argument)
            assert "eye catcher" in str(caught.value.__cause__)
            assert "eye catcher" in caplog.text
        for _ in range(2):  # the data cannot be trusted: every read fails
            with pytest.raises(ConnectionResetError):
                pair.b.receiver.receive(5)
        assert pair.b.state == ("CLOSED" if noticed_by == "abort" else "PEERABORTWAIT")
        pair.settle()
        assert pair.states() == ("CLOSED", "CLOSED")
    finally:
        pair.close()


# --- before the rendezvous is complete -------------------------------------------------------


@pytest.mark.parametrize("consumer", [(1, 0), (0, 1), (0, 5)])
def test_a_consumer_cursor_before_anything_was_sent_is_an_error(consumer: tuple[int, int]) -> None:
    pair = Pair((RING, RING), connect=False)
    try:
        with pytest.raises(ProtocolError, match="before anything was sent"):
            receive_cdc(pair.b, cdc.pack(1, TOKEN, 0, 0, *consumer))
        assert pair.b.state == "CLOSED"
        assert pair.hosts[1].calls == ["reset_tcp", "closed"]
    finally:
        pair.close()


# --- anything at all -------------------------------------------------------------------------


def mutated(rng: random.Random, good: bytes) -> bytes:
    """Random bytes, or the good message with some fields or bits changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return bytes([0xFE, 44]) + rng.randbytes(42)
    data = bytearray(good)
    if kind == 1:
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(44)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        start, size = rng.choice([(2, 2), (10, 2), (12, 4), (18, 2), (20, 4), (24, 1), (25, 1)])
        data[start : start + size] = rng.randbytes(size)
    else:
        start, size = rng.choice([(12, 4), (20, 4)])
        near = int.from_bytes(data[start : start + size], "big") + rng.randint(-5, 5)
        data[start : start + size] = (near % (1 << 32)).to_bytes(4, "big")
    return bytes(data)


def check_sane(connection: Connection) -> None:
    assert 0 <= connection.receiver.readable <= connection.rmbe.usable
    assert connection.sender.window >= 0
    if connection.state == "ACTIVE":
        assert connection.error is None


def test_mutated_messages_end_at_most_their_own_connection(rng: random.Random) -> None:
    aborted = survived = 0
    for _ in range(400):
        victim, bystander = Pair((4096, 4096)), Pair((4096, 4096))
        often = rng.choice([0.05, 0.5])
        try:
            for step in range(12):
                for pair in (victim, bystander):
                    text = memoryview(bytes([step]) * rng.randint(1, 3000))
                    if pair.a.state == "ACTIVE":
                        pair.a.send(text)
                if victim.ab.raw and rng.random() < often:
                    try:
                        arrive(victim.b, mutated(rng, victim.ab.raw[-1]))
                    except ProtocolError:
                        assert victim.b.state in (*ABORTED, "CLOSED")
                try:
                    victim.settle()
                except ProtocolError:
                    # The mutated message was believed.  It contradicts a later true message, or the
                    # answer to it contradicts what the other end has sent.
                    assert any(state in (*ABORTED, "CLOSED") for state in victim.states())
                victim.ab.queue.clear()
                bystander.settle()
                check_sane(victim.b)
                if victim.b.error is None:
                    victim.b.receiver.receive(2000)
                bystander.b.receiver.receive(2000)
            assert bystander.states() == ("ACTIVE", "ACTIVE")
            aborted += victim.b.error is not None
            survived += victim.b.error is None
        finally:
            victim.close()
            bystander.close()
    assert aborted > 100
    assert survived > 50
