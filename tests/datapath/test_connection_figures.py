"""Figures 16-21 of RFC 7609, 4.7, to the byte.

A 10,000-byte element with an eye catcher, so 9,996 bytes of ring; sends are not cut into chunks,
which the figures do not do. The figures' arithmetic is what counts; their printed slips are
noted where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.datapath.datapath_pair import Cdc, Pair, Write
from tests.peers import open_pair
from trio_smc.wire.cdc import URGENT_PENDING, URGENT_PRESENT, WRITER_BLOCKED

RECEIVE = 10_000  # "application has issued a recv for 10,000 bytes"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("core", (10_000, 10_000), (True, True), chunks=False) as pair:
        yield pair


def text(length: int) -> memoryview:
    """Bytes in which a lost or moved piece is noticed."""
    return memoryview(bytes(i * 7 % 251 for i in range(length)))


@pytest.mark.rfc("4.7.1/1", "4.7.1/2", "4.7.1/3", "4.3/3", "A.4/10")
def test_figure_16_send_with_an_open_window(pair: Pair) -> None:
    assert pair.a.send(text(1000)) == 1000
    assert pair.ab.log == [
        Write(4, 1003),
        Cdc(1, producer=(1004, 0), consumer=(4, 0)),
    ]
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == text(1000)
    assert pair.ba.log == [], "8,996 of 9,996 bytes of window are no reason for an update"


@pytest.mark.rfc("4.7.2/1", "4.5.1/2")
def test_figure_17_the_answer_carries_the_consumer_cursor(pair: Pair) -> None:
    assert pair.a.send(text(1000)) == 1000
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == text(1000)
    assert pair.b.send(text(500)) == 500
    # Row 3 prints A's consumer cursor as 0 and the text the producer cursor as 503: a cursor
    # starts at 4 and names the next byte.
    assert pair.ba.log == [
        Write(4, 503),
        Cdc(1, producer=(504, 0), consumer=(1004, 0)),
    ]
    assert pair.a.sender.window == 8996
    pair.ba.deliver()
    assert pair.a.sender.window == 9996
    assert pair.a.receiver.receive(RECEIVE) == text(500)
    assert len(pair.ab.log) == 2


@pytest.mark.rfc("4.7.3/1", "4.5.1/1")
def test_figure_18_an_update_when_half_the_window_is_gone(pair: Pair) -> None:
    assert pair.a.send(text(3000)) == 3000
    # The text says 3003 and 3003-7004 where the arithmetic gives 3004 and 3004-7003.
    assert pair.ab.log == [Write(4, 3003), Cdc(1, producer=(3004, 0), consumer=(4, 0))]
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == text(3000)
    assert pair.ba.log == []
    assert pair.a.send(text(4000)) == 4000
    assert pair.ab.log[2:] == [Write(3004, 7003), Cdc(2, producer=(7004, 0), consumer=(4, 0))]
    assert pair.a.sender.window == 2996
    pair.ab.deliver()
    assert pair.ba.log == [], "data that was not consumed opens no window"
    assert pair.b.receiver.receive(RECEIVE) == text(4000)
    assert pair.ba.log == [Cdc(1, producer=(4, 0), consumer=(7004, 0))]
    pair.ba.deliver()
    assert pair.a.sender.window == 9996
    assert len(pair.ab.log) == 4, "a cursor update needs no answer"


@pytest.mark.rfc(
    "4.7.4/1",
    "4.7.4/2",
    "4.7.4/3",
    "4.7.4/4",
    "4.7.4/5",
    "4.3/4",
    "4.3/5",
    "A.4/7",
    "A.4/8",
    "A.4/11",
)
def test_figure_19_full_windows_that_wrap(pair: Pair) -> None:
    # "Existing SMC-R connection": both cursors at 1004 with wrap 1, the window fully open.
    for length in (5500, 5496):
        assert pair.a.send(text(length)) == length
        pair.settle()
        assert pair.b.receiver.receive(RECEIVE) == text(length)
        pair.settle()
    assert pair.a.sender.window == 9996
    pair.ab.log.clear()
    pair.ba.log.clear()
    data = text(20_000)

    sent = pair.a.send(data)  # rows 1-3; row 1's range 1004-9999 is right, the text's 1003 not
    assert sent == 9996
    assert pair.ab.log == [
        Write(1004, 9999),
        Write(4, 1003),
        Cdc(3, producer=(1004, 2), consumer=(4, 0), flags=WRITER_BLOCKED),
    ]
    assert pair.a.send(data[sent:]) == 0, "the window is closed, and B knows it"
    assert len(pair.ab.log) == 3
    pair.ab.deliver()
    assert pair.b.receiver.readable == 9996, "the same cursor, but one more wrap: a full ring"
    assert pair.b.receiver.receive(RECEIVE) == data[:9996]
    assert pair.ba.log == [Cdc(3, producer=(4, 0), consumer=(1004, 2))]  # row 4

    pair.ba.deliver()
    assert pair.a.send(data[sent:]) == 9996  # rows 5-7
    sent += 9996
    assert pair.ab.log[3:] == [
        Write(1004, 9999),
        Write(4, 1003),
        Cdc(4, producer=(1004, 3), consumer=(4, 0), flags=WRITER_BLOCKED),
    ]
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == data[9996:19_992]
    assert pair.ba.log[1:] == [Cdc(4, producer=(4, 0), consumer=(1004, 3))]  # row 8

    pair.ba.deliver()
    assert pair.a.send(data[sent:]) == 8  # "the final 8 bytes ... 1004-1011 (not shown)"
    assert pair.ab.log[6:] == [Write(1004, 1011), Cdc(5, producer=(1012, 3), consumer=(4, 0))]
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == data[19_992:]
    assert len(pair.ba.log) == 2, "B is clear again and the window wide"


def at_1000(pair: Pair) -> None:
    """ "Existing SMC-R connection": both cursors at 1000 with wrap 1, the window fully open."""
    for length in (5500, 5492):
        assert pair.a.send(text(length)) == length
        pair.settle()
        assert pair.b.receiver.receive(RECEIVE) == text(length)
        pair.settle()
    # The second read was too small for an update by the rules of 4.5.1.
    pair.b.send(text(1))
    pair.settle()
    pair.a.receiver.receive(1)
    assert pair.a.sender.window == 9996
    pair.ab.log.clear()
    pair.ba.log.clear()


@pytest.mark.rfc("4.7.5/1", "4.7.5/3", "4.7.5/4", "4.7.5/5", "A.4/9")
def test_figure_20_urgent_data_with_an_open_window(pair: Pair) -> None:
    at_1000(pair)
    urgent, normal = text(500), text(1000)
    assert pair.a.send_urgent(urgent) == 500
    assert pair.ab.log == [  # rows 1 and 2
        Write(1000, 1499),
        Cdc(3, producer=(1500, 1), consumer=(5, 0), flags=URGENT_PENDING | URGENT_PRESENT),
    ]
    assert pair.a.send(normal) == 0, "not before the urgent byte is acknowledged"
    assert len(pair.ab.log) == 2, "nor is the writer blocked by the window"
    assert not pair.a.sender.can_send
    pair.ab.deliver()
    assert pair.b.receiver.urgent == "present"
    assert pair.b.receiver.receive(RECEIVE) == urgent[:499]
    assert pair.b.receiver.receive_urgent() == urgent[499]
    assert pair.ba.log == [Cdc(4, producer=(5, 0), consumer=(1500, 1))]  # row 3

    pair.ba.deliver()
    assert pair.a.send(normal) == 1000  # rows 4 and 5
    assert pair.ab.log[2:] == [
        Write(1500, 2499),
        Cdc(4, producer=(2500, 1), consumer=(5, 0)),
    ]
    pair.ab.deliver()
    assert pair.b.receiver.urgent == "none"
    assert pair.b.receiver.receive(RECEIVE) == normal
    assert len(pair.ba.log) == 1, "no need for a consumer cursor update"


@pytest.mark.rfc("4.7.6/1", "4.7.6/2", "4.7.6/3", "4.7.6/4", "A.4/9")
def test_figure_21_urgent_data_with_a_closed_window(pair: Pair) -> None:
    at_1000(pair)
    full, urgent, normal = text(9996), text(500), text(1000)
    assert pair.a.send(text(9997)) == 9996  # row 0
    assert pair.ab.log == [
        Write(1000, 9999),
        Write(4, 999),
        Cdc(3, producer=(1000, 2), consumer=(5, 0), flags=WRITER_BLOCKED),
    ]
    pair.ab.deliver()
    pair.ab.log.clear()

    assert pair.a.send_urgent(urgent) == 0
    both = WRITER_BLOCKED | URGENT_PENDING
    assert pair.ab.log == [Cdc(4, producer=(1000, 2), consumer=(5, 0), flags=both)]  # row 1
    assert pair.a.send_urgent(urgent) == 0
    assert len(pair.ab.log) == 1, "one announcement is enough"
    pair.ab.deliver()
    assert pair.b.receiver.urgent == "pending"
    assert pair.b.receiver.receive_urgent() is None
    assert pair.b.receiver.receive(RECEIVE) == full
    assert pair.ba.log == [Cdc(4, producer=(5, 0), consumer=(1000, 2))]  # row 2

    pair.ba.deliver()
    assert pair.a.send_urgent(urgent) == 500
    assert pair.ab.log[1:] == [  # rows 3 and 4
        Write(1000, 1499),
        Cdc(5, producer=(1500, 2), consumer=(5, 0), flags=URGENT_PENDING | URGENT_PRESENT),
    ]
    assert pair.a.send(normal) == 0
    pair.ab.deliver()
    assert pair.b.receiver.urgent == "present"
    assert pair.b.receiver.receive_urgent() == urgent[499]
    assert len(pair.ba.log) == 1, "the data before the urgent byte is still unread"
    assert pair.b.receiver.receive(RECEIVE) == urgent[:499]
    assert pair.ba.log[1:] == [Cdc(5, producer=(5, 0), consumer=(1500, 2))]  # row 5

    pair.ba.deliver()
    assert pair.a.send(normal) == 1000
    # Row 7 prints A's consumer cursor as 1000: it is 1500 since row 5.
    assert pair.ab.log[3:] == [
        Write(1500, 2499),
        Cdc(6, producer=(2500, 2), consumer=(5, 0)),
    ]
    pair.ab.deliver()
    assert pair.b.receiver.receive(RECEIVE) == normal


@pytest.mark.rfc("4.3/1", "A.4/1", "A.4/2", "A.4/6")
def test_the_messages_are_the_right_bytes(pair: Pair) -> None:
    """Row 2 of figure 16 and row 4 of figure 17 as they go over the link (A.4)."""
    pair.a.send(text(1000))
    pair.ab.deliver()
    pair.b.receiver.receive(RECEIVE)
    pair.b.send(text(500))
    assert pair.ab.raw == [
        bytes.fromhex(
            "fe 2c 0001 000000a1"  # type, length, sequence number, B's alert token
            "0000 0000 000003ec"  # reserved, producer wrap and cursor
            "0000 0000 00000004"  # reserved, consumer wrap and cursor
            "00 00"  # flags
        )
        + bytes(18)
    ]
    assert pair.ba.raw == [
        bytes.fromhex("fe2c0001000000a0 00000000000001f8 00000000000003ec 0000") + bytes(18)
    ]
