"""Every edge of the connection's table, taken by a real core with a simulated peer.

Each row brings a connection into a state, raises one event, and lists the effects: the state, the
flags of CDC messages, the end of TCP, the application's error. A last check compares the edges
taken with the table: no edge with an effect is left out.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.datapath.datapath_pair import (
    CLOSE_TIMEOUT,
    Cdc,
    FakeChannel,
    FakeHost,
    Write,
    receive_cdc,
)
from trio_smc._base.errors import ProtocolError
from trio_smc.datapath.connection import Connection
from trio_smc.datapath.cursor import to_wire
from trio_smc.datapath.rmb import Rmb
from trio_smc.rnic.memory import Memory
from trio_smc.states.engine import Edge
from trio_smc.states.tables import CONNECTION
from trio_smc.wire import cdc

D, C, A = cdc.SENDING_DONE, cdc.CONNECTION_CLOSED, cdc.ABNORMAL_CLOSE
SIZE = 16384


class Lone:
    """A connection under test, and the messages of its peer."""

    def __init__(self) -> None:
        self.memory = Memory(SIZE)
        self.host = FakeHost()
        self.channel = FakeChannel()
        self.it = Connection(
            alert_token=1,
            rmbe=Rmb(self.memory, SIZE, 1, eye_catcher=False).elements[0],
            host=self.host,
            close_timeout=CLOSE_TIMEOUT,
        )
        self.sequence = 0
        self.written = 0
        self.taken = 0
        self.edges: list[tuple[str, str, Edge]] = []

    def know(self) -> None:
        self.it.peer_known(
            alert_token=2,
            element_size=SIZE,
            eye_catcher=False,
            channel=self.channel,
            address=0,
            rkey=0,
        )

    def open(self) -> None:
        self.know()
        self.raise_("established")
        self.peer()  # before its first CDC message, `reset_tcp` does not reset at once

    def peer(self, endings: int = 0, data: bytes = b"", flags: int = 0) -> None:
        """A CDC message of the peer, with ``data`` written before it."""
        start = self.written % SIZE
        self.memory.view[start : start + len(data)] = data
        self.written += len(data)
        self.sequence += 1
        receive_cdc(
            self.it,
            cdc.pack(
                self.sequence,
                1,
                *to_wire(self.written, SIZE, 0),
                *to_wire(self.taken, SIZE, 0),
                flags,
                endings,
            ),
        )

    def complete(self) -> None:
        while self.channel.uncompleted:
            connection, sequence = self.channel.uncompleted.popleft()
            connection.on_cdc_complete(sequence)

    def fire(self) -> None:
        self.host.timer = None
        self.it.on_timer()

    def raise_(self, event: str) -> None:
        """Raise ``event``, and record the edge that it takes."""
        state = self.it.state
        for edge in CONNECTION.edges[state, event]:
            if all(bool(getattr(self.it, g.name)) is not g.negated for g in edge.guards):
                self.edges.append((state, event, edge))
                break
        else:
            pytest.fail(f"the table has no edge for {event} in {state}")
        doings: dict[str, Callable[[], object]] = {
            "established": self.it.established,
            "shutdown_wr": self.it.shutdown_write,
            "close": self.it.close,
            "abort": self.it.abort,
            "all_sent": self.complete,
            "abort_sent": self.complete,
            "peer_done": lambda: self.peer(D),
            "peer_closed": lambda: self.peer(C),
            "peer_abort": lambda: self.peer(A),
            "close_timeout": self.fire,
            "abort_timeout": self.fire,
            "links_lost": self.it.links_lost,
            "rmbe_conflict": self.it.rmbe_conflict,
        }
        doings[event]()


def send(lone: Lone) -> None:
    assert lone.it.send(memoryview(b"unsent")) == 6


def read(lone: Lone) -> None:
    assert lone.it.receiver.receive(100) == b"unread"


STEPS: dict[str, Callable[[Lone], None]] = {
    "know": Lone.know,
    "open": Lone.open,
    "data": lambda lone: lone.peer(data=b"unread"),
    "send": send,
    "complete": Lone.complete,
    "D": lambda lone: lone.peer(D),
    "C": lambda lone: lone.peer(C),
    "data+D": lambda lone: lone.peer(D, b"unread"),
    "data+C": lambda lone: lone.peer(C, b"unread"),
    "A": lambda lone: lone.peer(A),
    "shut": lambda lone: lone.it.shutdown_write(),
    "close": lambda lone: lone.it.close(),
    "abort": lambda lone: lone.it.abort(),
    "read": read,
}


class Row(NamedTuple):
    """``before`` are STEPS; the other fields are the effects of ``event``."""

    before: str
    event: str
    state: str
    sent: str = ""  # flags of the CDC messages that the event sent: "D", "C", "A"
    tcp: str = ""  # "RST", "FIN"
    error: int = 0
    timer: bool | None = None  # True if a timer runs then; None: as before, none in CLOSED


ABORTED, RESET, PIPE = errno.ECONNABORTED, errno.ECONNRESET, errno.EPIPE
PW1, PW2, AW1, AW2 = "PEERCLOSEWAIT1", "PEERCLOSEWAIT2", "APPCLOSEWAIT1", "APPCLOSEWAIT2"
APPFIN, PEERFIN = "APPFINCLOSEWAIT", "PEERFINCLOSEWAIT"
PEERABORT, PROCESS = "PEERABORTWAIT", "PROCESSABORT"

ROWS = [
    # --- INIT
    Row("know", "established", "ACTIVE"),
    Row("", "close", "CLOSED", tcp="FIN"),
    Row("know", "close", PEERABORT, "A", "RST", timer=True),
    Row("", "abort", "CLOSED", tcp="RST", error=ABORTED),
    Row("know", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("know", "peer_done", AW1),
    Row("", "peer_closed", AW1),
    Row("know", "peer_abort", PROCESS, "A", "", RESET, True),
    Row("know", "links_lost", "CLOSED", tcp="RST", error=RESET),
    Row("know", "rmbe_conflict", "CLOSED", tcp="RST", error=ABORTED),
    # --- ACTIVE
    Row("open", "shutdown_wr", PW1, "D"),
    Row("open send", "shutdown_wr", "ACTIVE"),
    Row("open data", "close", PEERABORT, "A", "RST", timer=True),
    Row("open send", "close", "ACTIVE", timer=True),
    Row("open", "close", PW1, "C", timer=True),
    Row("open send close data", "all_sent", PEERABORT, "A", "RST", timer=True),
    Row("open send close", "all_sent", PW1, "C", timer=True),
    Row("open send shut", "all_sent", PW1, "D"),
    Row("open send shut close", "all_sent", PW1, "C", timer=True),
    Row("open", "peer_done", AW1),
    Row("open send", "peer_closed", PROCESS, "A", "RST", PIPE, True),
    Row("open", "peer_closed", AW1),
    Row("open data", "peer_abort", PROCESS, "A", "", RESET, True),
    Row("open", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("open send close", "close_timeout", PEERABORT, "A", "RST", timer=True),
    Row("open", "links_lost", "CLOSED", "", "RST", RESET),
    Row("open", "rmbe_conflict", "CLOSED", "", "RST", RESET),
    # --- PEERCLOSEWAIT1
    Row("open shut data", "close", PEERABORT, "A", "RST", timer=True),
    Row("open shut", "close", PW1, "C", timer=True),
    Row("open shut", "peer_done", PW2),
    Row("open close", "peer_closed", "CLOSED", "", "FIN"),
    Row("open shut", "peer_closed", APPFIN),
    Row("open close", "peer_abort", "CLOSED", "", "FIN", RESET),
    Row("open shut", "peer_abort", PROCESS, "A", "", RESET, True),
    Row("open close", "abort", PEERABORT, "", "RST", ABORTED, True),
    Row("open shut", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("open close", "close_timeout", "CLOSED", "", "RST"),
    Row("open close", "links_lost", "CLOSED", "", "RST"),
    Row("open close complete", "links_lost", "CLOSED", "", "FIN"),
    Row("open shut", "links_lost", "CLOSED", "", "RST", RESET),
    Row("open shut", "rmbe_conflict", "CLOSED", "", "RST", RESET),
    # --- PEERCLOSEWAIT2
    Row("open shut data+D", "close", PEERABORT, "A", "RST", timer=True),
    Row("open shut D", "close", PW2, "C", timer=True),
    Row("open shut D close", "peer_closed", "CLOSED", "", "FIN"),
    Row("open shut D", "peer_closed", APPFIN),
    Row("open shut D close", "peer_abort", "CLOSED", "", "FIN"),
    Row("open shut D", "peer_abort", PROCESS, "A", "", 0, True),
    Row("open shut D close", "abort", PEERABORT, "", "RST", ABORTED, True),
    Row("open shut D", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("open shut D close", "close_timeout", "CLOSED", "", "RST"),
    Row("open shut D close", "links_lost", "CLOSED", "", "RST"),
    Row("open shut D close complete", "links_lost", "CLOSED", "", "FIN"),
    Row("open shut D", "links_lost", "CLOSED", "", "RST", 0),
    Row("open shut D", "rmbe_conflict", "CLOSED", "", "RST", 0),
    # --- APPFINCLOSEWAIT
    Row("open shut C", "close", "CLOSED", "C", "FIN"),
    Row("open shut data+C", "close", PROCESS, "A", "RST", timer=True),
    Row("open shut C", "peer_abort", PROCESS, "A", "", 0, True),
    Row("open shut C", "abort", PROCESS, "A", "RST", ABORTED, True),
    Row("open shut C", "links_lost", "CLOSED", "", "RST", 0),
    Row("open shut C", "rmbe_conflict", "CLOSED", "", "RST", 0),
    # --- APPCLOSEWAIT1
    Row("know D", "established", AW1),
    Row("open D", "shutdown_wr", AW2, "D"),
    Row("open D send", "shutdown_wr", AW1),
    Row("C", "close", "CLOSED", "", "RST"),
    Row("open data+C", "close", PROCESS, "A", "RST", timer=True),
    Row("open data+D", "close", PEERABORT, "A", "RST", timer=True),
    Row("open D send", "close", AW1, timer=True),
    Row("open C", "close", "CLOSED", "C", "FIN"),
    Row("open D", "close", PEERFIN, "C", timer=True),
    Row("open D send close", "all_sent", PEERFIN, "C", timer=True),
    Row("open D send shut", "all_sent", AW2, "D"),
    Row("open D send", "peer_closed", PROCESS, "A", "RST", PIPE, True),
    Row("open D", "peer_closed", AW1),
    Row("open D", "peer_abort", PROCESS, "A", "", PIPE, True),
    Row("C", "abort", "CLOSED", "", "RST", ABORTED),
    Row("open C", "abort", PROCESS, "A", "RST", ABORTED, True),
    Row("open D", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("open D send close", "close_timeout", PEERABORT, "A", "RST", ABORTED, True),
    Row("open D", "links_lost", "CLOSED", "", "RST", PIPE),
    Row("open C", "links_lost", "CLOSED", "", "RST", 0),
    Row("open D", "rmbe_conflict", "CLOSED", "", "RST", PIPE),
    # --- APPCLOSEWAIT2
    Row("open data+C shut", "close", PROCESS, "A", "RST", timer=True),
    Row("open data+D shut", "close", PEERABORT, "A", "RST", timer=True),
    Row("open C shut", "close", "CLOSED", "C", "FIN"),
    Row("open D shut", "close", PEERFIN, "C", timer=True),
    Row("open D shut", "peer_closed", AW2),
    Row("open D shut", "peer_abort", PROCESS, "A", "", 0, True),
    Row("open C shut", "abort", PROCESS, "A", "RST", ABORTED, True),
    Row("open D shut", "abort", PEERABORT, "A", "RST", ABORTED, True),
    Row("open D shut", "links_lost", "CLOSED", "", "RST", 0),
    Row("open C shut", "links_lost", "CLOSED", "", "RST", 0),
    Row("open D shut", "rmbe_conflict", "CLOSED", "", "RST", 0),
    # --- PEERFINCLOSEWAIT
    Row("open D close", "peer_closed", "CLOSED", "", "FIN"),
    Row("open D close", "peer_abort", "CLOSED", "", "FIN"),
    Row("open D close", "abort", PEERABORT, "", "RST", timer=True),
    Row("open D close", "close_timeout", "CLOSED", "", "RST"),
    Row("open D close", "links_lost", "CLOSED", "", "RST"),
    Row("open D close", "rmbe_conflict", "CLOSED", "", "RST"),
    # --- PEERABORTWAIT: TCP was reset on the way in
    Row("open abort", "peer_closed", "CLOSED", error=ABORTED),
    Row("open abort", "peer_abort", "CLOSED", error=ABORTED),
    Row("open abort", "abort_timeout", "CLOSED", error=ABORTED),
    Row("open abort", "links_lost", "CLOSED", error=ABORTED),
    Row("open abort", "rmbe_conflict", "CLOSED", error=ABORTED),
    # --- PROCESSABORT
    Row("know A", "established", PROCESS, error=RESET),
    Row("open A", "abort_sent", "CLOSED", "", "FIN", RESET),
    Row("open C abort", "abort_sent", "CLOSED", "", "", ABORTED),
    Row("open A", "abort_timeout", "CLOSED", "", "RST", RESET),
    Row("open A", "links_lost", "CLOSED", "", "FIN", RESET),
    Row("open A", "rmbe_conflict", "CLOSED", "", "RST", RESET),
]

# Edges that only a machine without its core can take.
UNREACHABLE = {
    # Data that is not delivered when C comes is a loss: the connection is in PROCESSABORT then.
    ("APPCLOSEWAIT1", "all_sent", "CLOSED"),
}


@contextmanager
def lone_connection() -> Iterator[Lone]:
    lone = Lone()
    try:
        yield lone
    finally:
        lone.memory.close()


def flags_since(channel: FakeChannel, start: int) -> str:
    names = {D: "D", C: "C", A: "A"}
    announced = 0
    text = ""
    for entry in channel.log[:start]:
        announced |= entry.endings if isinstance(entry, Cdc) else 0
    for entry in channel.log[start:]:
        assert isinstance(entry, Cdc), f"{entry}: endings write no data"
        text += "".join(name for flag, name in names.items() if entry.endings & ~announced & flag)
        announced |= entry.endings
    return text


@pytest.mark.rfc("4.8.1/2", "4.8.1/7", "4.8.2/11")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.before}/{row.event}")
def test_an_edge(row: Row) -> None:
    with lone_connection() as lone:
        take(row, lone)


def take(row: Row, lone: Lone) -> None:
    for step in row.before.split():
        STEPS[step](lone)
    before = lone.it.state
    posted, calls = len(lone.channel.log), len(lone.host.calls)
    error, timer = lone.it.error, lone.host.timer
    if row.event in ("close_timeout", "abort_timeout"):
        assert timer == CLOSE_TIMEOUT, "no timer runs that could raise this"
    woken: list[str] = []
    lone.it.on_readable = lambda: woken.append("reader")
    lone.it.on_writable = lambda: woken.append("writer")

    lone.raise_(row.event)

    assert lone.it.state == row.state
    assert flags_since(lone.channel, posted) == row.sent
    new = lone.host.calls[calls:]
    names = {"RST": "reset_tcp", "FIN": "close_tcp"}
    assert [call for call in new if call != "closed"] == ([names[row.tcp]] if row.tcp else [])
    if row.state == "CLOSED":
        lone.complete()  # the RMBE is free when the last message has arrived
    assert ("closed" in lone.host.calls) is (row.state == "CLOSED")
    assert (lone.it.error.errno if lone.it.error else 0) == row.error
    if error is not None:
        assert lone.it.error is error, "the first error stays"
    if row.state == "CLOSED":
        assert lone.host.timer is None
    elif row.timer is None:
        assert lone.host.timer == timer
    else:
        assert (lone.host.timer is not None) is row.timer
    if row.state != before:
        assert sorted(woken) == ["reader", "writer"], "every waiter wakes"
        assert (before, row.event) in {(old, event) for old, _, event in lone.host.states}
    if row.state == "CLOSED":
        assert lone.it.used is None or lone.it.used >= lone.it.receiver.bytes_received


def test_every_edge_of_the_table_has_a_row() -> None:
    taken: set[tuple[str, str, Edge]] = set()
    for row in ROWS:
        with lone_connection() as lone:
            take(row, lone)
            taken.update(lone.edges[-1:])
    wanted = {
        (state, event, edge)
        for (state, event), edges in CONNECTION.edges.items()
        for edge in edges
        if not edge.ignored
    }
    left = {(state, event, edge.target) for state, event, edge in wanted - taken}
    assert left == UNREACHABLE


EVENTS = {
    "established": "established", "shutdown_wr": "shutdown_wr", "close": "close",
    "abort": "abort", "D": "peer_done", "C": "peer_closed", "A": "peer_abort",
}  # fmt: skip


def test_repeats_change_nothing() -> None:
    """If the table ignores an event, the core sends, reports and fails nothing."""
    tried = 0
    for before in sorted({row.before for row in ROWS}):
        for event in EVENTS.values():
            with lone_connection() as lone:
                for step in before.split():
                    STEPS[step](lone)
                edges = CONNECTION.edges[lone.it.state, event]
                if len(edges) > 1 or not edges[0].ignored:
                    continue
                if event == "established" and not lone.it.peer_rmbe_known:
                    continue  # the rendezvous is not complete without it
                lone.complete()
                state, posted = lone.it.state, len(lone.channel.log)
                calls, error = list(lone.host.calls), lone.it.error
                lone.raise_(event)
                where = f"{before}: {event} in {state}"
                assert lone.it.state == state, where
                assert len(lone.channel.log) == posted, where
                assert lone.host.calls == calls, where
                assert lone.it.error is error, where
                tried += 1
    assert tried > 70


# --- what the table cannot say ---------------------------------------------------------------


@pytest.mark.rfc("A.4/16", "A.4/17")
def test_nothing_follows_c() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.it.close()
        posted = len(lone.channel.log)
        lone.peer(data=b"late", flags=cdc.WRITER_BLOCKED | cdc.UPDATE_REQUESTED)
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))
        lone.it.abort()
        lone.complete()
        assert len(lone.channel.log) == posted
        assert lone.it.state == PEERABORT


@pytest.mark.rfc("A.4/18")
def test_nothing_follows_a() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(data=b"not read")
        lone.it.abort()
        posted = len(lone.channel.log)
        lone.peer(data=b"late", flags=cdc.WRITER_BLOCKED | cdc.UPDATE_REQUESTED)
        assert lone.it.receiver.receive(100) == b"not read"
        with pytest.raises(ConnectionAbortedError):
            lone.it.receiver.receive(100)
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))
        lone.it.shutdown_write()
        lone.it.close()
        lone.complete()
        lone.peer(D)
        lone.peer(A)
        lone.it.abort()
        assert lone.it.state == "CLOSED"
        assert len(lone.channel.log) == posted


@pytest.mark.rfc("4.8.1/11")
@pytest.mark.parametrize("urgent", [False, True])
def test_sending_to_a_peer_that_has_closed_is_an_abort(urgent: bool) -> None:
    """TCP accepts the data as well, and learns only from the answer that there is no reader."""
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(C, b"unread")
        assert not lone.it.sender.can_send
        send = lone.it.send_urgent if urgent else lone.it.send
        assert send(memoryview(b"this is not read")) == 16
        assert lone.it.state == PROCESS
        assert [entry for entry in lone.channel.log if isinstance(entry, Write)] == []
        assert flags_since(lone.channel, 0) == "A"
        for _ in range(2):
            with pytest.raises(BrokenPipeError):
                send(memoryview(b"x"))
        read(lone)
        assert lone.it.receiver.at_eof


def test_a_closed_peer_takes_no_more_than_fits() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(C)
        assert lone.it.send(memoryview(bytes(SIZE + 1))) == SIZE
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))


def test_data_before_d_is_read_and_then_the_end_of_stream() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(D, b"last words")
        assert (lone.it.receiver.readable, lone.it.receiver.at_eof) == (10, False)
        assert lone.it.receiver.receive(4) == b"last"
        assert lone.it.receiver.receive(100) == b" words"
        assert lone.it.receiver.at_eof
        assert lone.it.receiver.receive(100) == b""


@pytest.mark.parametrize("read_before", [b"", b"my ", b"these are my "])
def test_data_that_arrived_before_the_links_were_lost_is_still_read(read_before: bytes) -> None:
    """The peer closes and exits at once: nothing is lost and nothing is an error to a reader."""
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(C, read_before + b"last words")
        if read_before:
            assert lone.it.receiver.receive(len(read_before)) == read_before
        lone.it.links_lost()
        assert lone.it.state == "CLOSED"
        assert lone.host.calls[-1] == "closed"
        lone.memory.view[:30] = bytes(30)  # the RMBE serves another connection
        assert lone.it.receiver.peek(4) == b"last"
        assert lone.it.receiver.receive(4) == b"last"
        buffer = bytearray(100)
        assert lone.it.receiver.receive_into(buffer) == 6
        assert bytes(buffer[:6]) == b" words"
        assert lone.it.receiver.at_eof
        assert lone.it.receiver.receive(1) == b""
        assert lone.it.send(memoryview(b"x")) == 1  # as over TCP, for which the peer has closed
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))


def test_data_after_close_is_dropped_with_the_ring() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.it.close()
        lone.peer(data=b"this is not read")
        assert lone.it.state == PW1
        lone.peer(C)
        assert lone.it.state == "CLOSED"
        assert lone.it.receiver.readable == 0


@pytest.mark.rfc("4.8.2/9", "4.8.2/10", "A.4/19")
@pytest.mark.parametrize("first", ["receive", "send", "SO_ERROR"])
def test_data_received_before_an_abort_is_read_and_then_one_call_fails(first: str) -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(data=b"unread")
        lone.peer(A)
        lone.complete()
        assert lone.it.state == "CLOSED"
        lone.memory.view[:30] = bytes(30)  # the RMBE serves another connection
        if first == "SO_ERROR":
            assert isinstance(lone.it.receiver.take_error(), ConnectionResetError)
        elif first == "send":
            with pytest.raises(ConnectionResetError):
                lone.it.send(memoryview(b"x"))
        read(lone)
        if first == "receive":
            with pytest.raises(ConnectionResetError):
                lone.it.receiver.receive(100)
        assert lone.it.receiver.at_eof
        assert lone.it.receiver.receive(100) == b""
        assert lone.it.receiver.take_error() is None
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))


@pytest.mark.parametrize("shut", [False, True])
def test_an_abort_after_the_end_of_the_data_is_no_error_for_the_reader(shut: bool) -> None:
    """TCP's RST after FIN: sends get EPIPE. If this side has ended, too, there is no error."""
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(D, b"unread")
        if shut:
            lone.it.shutdown_write()
        lone.peer(A)
        read(lone)
        assert lone.it.receiver.at_eof
        error = lone.it.receiver.take_error()
        assert (None if error is None else error.errno) == (None if shut else PIPE)
        assert lone.it.receiver.take_error() is None
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))


def test_data_that_the_abort_itself_announces_is_read() -> None:
    """The peer's link may have had no room for an earlier message."""
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(A, b"unread")
        read(lone)
        with pytest.raises(ConnectionResetError):
            lone.it.receiver.receive(1)


@pytest.mark.parametrize("way", ["a new link", "urgent data"])
def test_data_that_only_the_abort_announces_may_be_missing(way: str) -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        if way == "a new link":
            lone.sequence -= 1  # the number of the last message that arrived
            lone.peer(flags=cdc.FAILOVER_VALIDATION)
        lone.peer(A, b"unread", cdc.URGENT_PRESENT if way == "urgent data" else 0)
        with pytest.raises(ConnectionResetError):
            lone.it.receiver.receive(1)


def test_the_final_message_waits_for_room_and_the_rmbe_with_it() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(C)
        lone.channel.room = 0
        lone.it.close()
        assert lone.it.state == "CLOSED"
        assert "closed" not in lone.host.calls
        assert lone.channel.log == []
        lone.channel.room = 1 << 20
        assert lone.channel.waiting == [lone.it]
        lone.it.on_room()
        assert [entry.endings for entry in lone.channel.log if isinstance(entry, Cdc)] == [C]
        assert lone.host.calls == ["close_tcp"], "it may be lost with its link"
        lone.complete()
        assert lone.host.calls == ["close_tcp", "closed"]


def test_the_final_message_is_given_up_with_the_links() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(C)
        lone.channel.room = 0
        lone.it.close()
        lone.it.links_lost()
        assert lone.channel.log == []
        assert lone.host.calls == ["close_tcp", "closed"]


@pytest.mark.parametrize("way", ["abort", "close"])
def test_the_final_message_is_given_up_with_the_peer(way: str) -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.channel.room = 0
        STEPS[way](lone)
        lone.fire()
        assert lone.it.state == "CLOSED"
        assert lone.host.calls == ["reset_tcp", "closed"]
        lone.channel.room = 1 << 20
        lone.it.on_room()
        assert lone.channel.log == []
        assert lone.host.calls == ["reset_tcp", "closed"]


@pytest.mark.rfc("4.4.1/2")
@pytest.mark.parametrize(
    ("before", "used"),
    [
        ("open data+C read close", 6),  # C promises that every write was announced
        ("open data close", None),
        ("open data+D A complete", None),
        ("open close data C", 6),
        ("open close abort data C", None),  # data is not followed after an abort
        ("open close data A", None),
        ("", None),
    ],
)
def test_how_much_of_the_ring_has_to_be_zeroed(before: str, used: int | None) -> None:
    with lone_connection() as lone:
        for step in before.split():
            STEPS[step](lone)
        assert lone.it.used == used


def test_a_window_update_in_flight_does_not_turn_the_peers_close_into_a_loss() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.peer(data=b"x" * (SIZE - 1), flags=cdc.WRITER_BLOCKED)
        assert len(lone.it.receiver.receive(SIZE)) == SIZE - 1
        assert len(lone.channel.uncompleted) == 1
        lone.peer(C)
        assert lone.it.state == AW1
        assert lone.it.error is None


def test_data_the_peer_has_taken_is_not_unsent_when_it_closes() -> None:
    """The peer's C may arrive before the completion of this side's last message."""
    with lone_connection() as lone:
        STEPS["open"](lone)
        send(lone)
        lone.taken = 6
        lone.peer(C)
        assert lone.it.state == AW1
        assert lone.it.error is None
        lone.complete()
        lone.it.close()
        assert lone.it.state == "CLOSED"


def test_a_tcp_reset_is_an_abort_by_the_peer() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.it.tcp_reset()
        assert lone.it.state == PEERABORT
        assert lone.it.error
        assert lone.it.error.errno == RESET
        lone.peer(A)
        assert lone.it.state == "CLOSED"


@pytest.mark.parametrize("before", ["open data+C", "open data+C shut", "open shut data+C"])
def test_a_tcp_reset_after_the_peers_close_drops_nothing(before: str) -> None:
    """The peer has given up waiting, or has ended: this side answers, and its data can be read."""
    with lone_connection() as lone:
        for step in before.split():
            STEPS[step](lone)
        lone.it.tcp_reset()
        assert lone.it.state == PROCESS
        lone.complete()
        assert lone.it.state == "CLOSED"
        assert flags_since(lone.channel, 0) in ("A", "DA")
        read(lone)
        assert lone.it.receiver.at_eof
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))


def test_after_a_tcp_reset_a_is_still_sent_to_a_peer_that_waits_for_it() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        send(lone)
        lone.channel.room = 0
        lone.peer(C)
        assert lone.it.state == PROCESS
        lone.it.tcp_reset()
        assert lone.it.state == PROCESS
        lone.channel.room = 1 << 20
        lone.it.on_room()
        assert [entry.endings for entry in lone.channel.log if isinstance(entry, Cdc)] == [0, A]


def test_a_protocol_error_is_the_cause_of_the_applications_error() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        exc = ProtocolError("data on the TCP connection")
        lone.it.protocol_error(exc)
        with pytest.raises(ConnectionResetError) as caught:
            lone.it.receiver.receive(1)
        assert caught.value.__cause__ is exc


@pytest.mark.parametrize("known", [False, True])
def test_a_fallback_releases_the_rmbe_and_keeps_tcp(known: bool) -> None:
    with lone_connection() as lone:
        if known:
            lone.know()
        lone.it.withdraw()
        assert lone.it.state == "CLOSED"
        assert lone.host.calls == ["closed"]
        assert lone.channel.log == []


def test_a_cdc_before_the_confirm_is_applied_and_readable_later() -> None:
    with lone_connection() as lone:
        lone.peer(data=b"early")
        assert lone.it.receiver.readable == 0
        assert lone.it.receiver.receive(10) == b""
        lone.peer(D)
        assert lone.it.state == AW1
        lone.know()
        assert (lone.it.receiver.readable, lone.it.receiver.at_eof) == (0, False)
        with pytest.raises(OSError, match="rendezvous") as caught:
            lone.it.send(memoryview(b"x"))
        assert caught.value.errno == errno.ENOTCONN
        lone.it.established()
        assert lone.it.receiver.receive(10) == b"early"
        assert lone.it.receiver.at_eof
        assert lone.it.send(memoryview(b"answer")) == 6


def test_writing_after_shutting_down_is_refused() -> None:
    with lone_connection() as lone:
        STEPS["open"](lone)
        lone.it.shutdown_write()
        assert lone.it.write_closed
        with pytest.raises(BrokenPipeError):
            lone.it.send(memoryview(b"x"))
        assert lone.it.state == PW1
        assert lone.it.error is None
