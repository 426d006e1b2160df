"""Figures 22 and 23 of RFC 7609 edge by edge: two cores back to back, with checks of both ends.

Each test has the number of its arrow, or of its paragraph of 4.8.1 and 4.8.2. The effects of every
edge on one core are in test_connection_endings; here the two cores must agree.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.datapath.datapath_pair import CLOSE_TIMEOUT, Cdc, FakeChannel, Pair, Write
from tests.peers import open_pair
from trio_smc.datapath.connection import Connection
from trio_smc.wire.cdc import ABNORMAL_CLOSE, CONNECTION_CLOSED, SENDING_DONE

D, C, A = SENDING_DONE, CONNECTION_CLOSED, ABNORMAL_CLOSE
RING = 16384
PW1, PW2, AW1, AW2 = "PEERCLOSEWAIT1", "PEERCLOSEWAIT2", "APPCLOSEWAIT1", "APPCLOSEWAIT2"
APPFIN, PEERFIN = "APPFINCLOSEWAIT", "PEERFINCLOSEWAIT"
PEERABORT, PROCESS = "PEERABORTWAIT", "PROCESSABORT"
FIN, RST = ["close_tcp", "closed"], ["reset_tcp", "closed"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair("core", (RING, RING)) as pair:
        yield pair


def send(connection: Connection, data: bytes) -> None:
    assert connection.send(memoryview(data)) == len(data)


def flags(channel: FakeChannel) -> list[int]:
    """Connection flags of the messages posted."""
    return [entry.endings for entry in channel.log if isinstance(entry, Cdc)]


def ended(pair: Pair, a: list[str] = FIN, b: list[str] = FIN) -> None:
    """Check that both are CLOSED, after these calls to their hosts, without a timer."""
    assert pair.states() == ("CLOSED", "CLOSED")
    assert [host.calls for host in pair.hosts] == [a, b]
    assert [host.timer for host in pair.hosts] == [None, None]


def fire(pair: Pair, side: int) -> None:
    assert pair.hosts[side].timer == CLOSE_TIMEOUT
    pair.hosts[side].timer = None
    pair.connections[side].on_timer()


# --- figure 22 -------------------------------------------------------------------------------


@pytest.mark.rfc("4.8.1/1")
def test_fig22_1_and_2_from_closed_to_active() -> None:
    pair = Pair((RING, RING), connect=False)
    assert pair.states() == ("INIT", "INIT")
    pair.know(0)
    pair.know(1)
    pair.a.established()
    pair.b.established()
    assert pair.states() == ("ACTIVE", "ACTIVE")
    assert pair.a.sender.can_send
    pair.close()


@pytest.mark.rfc("4.8.1/6")
def test_fig22_active_close_3a_by_close(pair: Pair) -> None:
    pair.a.close()
    assert pair.a.state == PW1
    assert flags(pair.ab) == [C]
    assert pair.hosts[0].timer == CLOSE_TIMEOUT


@pytest.mark.rfc("4.8.1/6")
def test_fig22_active_close_3a_by_shutdown(pair: Pair) -> None:
    pair.a.shutdown_write()
    assert pair.a.state == PW1
    assert flags(pair.ab) == [D]
    assert pair.hosts[0].timer is None, "a half-closed side may wait without limit"
    send(pair.b, b"still")
    pair.settle()
    assert pair.a.receiver.receive(9) == b"still"


@pytest.mark.rfc("4.8.1/5", "4.8.1/6")
@pytest.mark.parametrize("how", ["close", "shutdown_write"])
def test_fig22_active_close_3a_pending_until_the_data_is_sent(pair: Pair, how: str) -> None:
    send(pair.a, b"under way")
    getattr(pair.a, how)()
    assert pair.a.state == "ACTIVE"
    assert flags(pair.ab) == [0]
    pair.settle()
    assert pair.a.state == PW1
    assert flags(pair.ab) == [0, C if how == "close" else D]
    assert pair.b.receiver.receive(99) == b"under way"
    assert pair.b.receiver.at_eof


@pytest.mark.rfc("4.8.1/4")
def test_fig22_active_close_3a_with_unread_data_is_abnormal(pair: Pair) -> None:
    send(pair.b, b"this is not read")
    pair.settle()
    pair.a.close()
    assert pair.a.state == PEERABORT
    pair.settle()
    ended(pair, RST, FIN)
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)


@pytest.mark.rfc("4.8.1/7")
def test_fig22_active_close_3b(pair: Pair) -> None:
    pair.a.shutdown_write()
    pair.settle()
    send(pair.b, b"last")
    pair.b.shutdown_write()
    pair.settle()
    assert pair.states() == (PW2, AW2)
    assert pair.a.receiver.receive(9) == b"last"
    assert pair.a.receiver.at_eof


@pytest.mark.rfc("4.8.1/2", "4.8.1/3", "4.8.1/8", "4.4.2/1")
@pytest.mark.parametrize("state", [PW1, PW2])
def test_fig22_active_close_3c(pair: Pair, state: str) -> None:
    """The application has closed, too: to CLOSED at once."""
    if state == PW2:
        pair.a.shutdown_write()
        pair.b.shutdown_write()
        pair.settle()
    pair.a.close()
    pair.settle()
    assert pair.a.state == state
    pair.b.close()
    assert pair.hosts[0].calls == [], "the element is in use until the peer is done"
    pair.settle()
    ended(pair)


@pytest.mark.rfc("4.8.1/9")
@pytest.mark.parametrize("state", [PW1, PW2])
def test_fig22_active_close_3c_and_3d_by_way_of_app_fin_close_wait(pair: Pair, state: str) -> None:
    pair.a.shutdown_write()
    pair.settle()
    if state == PW2:
        pair.b.shutdown_write()
        pair.settle()
    assert pair.a.state == state
    pair.b.close()
    pair.settle()
    assert pair.states() == (APPFIN, PEERFIN)
    assert pair.a.receiver.at_eof
    assert pair.hosts[0].timer is None
    pair.a.close()
    assert pair.a.state == "CLOSED"
    pair.settle()
    ended(pair)


@pytest.mark.rfc("4.8.1/10")
@pytest.mark.parametrize("how", ["close", "shutdown_write"])
def test_fig22_passive_close_4a(pair: Pair, how: str) -> None:
    woken: list[str] = []
    pair.b.on_readable = lambda: woken.append("reader")
    getattr(pair.a, how)()
    pair.settle()
    assert pair.b.state == AW1
    assert woken == ["reader"]
    assert pair.b.receiver.at_eof


@pytest.mark.rfc("4.8.1/11")
def test_fig22_passive_close_4a_with_data_to_be_written_is_a_reset(pair: Pair) -> None:
    send(pair.b, b"not delivered")
    pair.a.close()
    pair.ab.deliver()
    assert pair.b.state == PROCESS
    assert pair.hosts[1].calls == ["reset_tcp"]
    pair.settle()
    ended(pair, FIN, RST)
    with pytest.raises(BrokenPipeError):
        pair.b.send(memoryview(b"x"))
    assert pair.b.receiver.at_eof


@pytest.mark.rfc("4.8.1/11")
@pytest.mark.parametrize("half", [False, True])
def test_fig22_passive_close_4a_with_delivered_data_that_has_crossed_c_is_a_reset(
    pair: Pair, half: bool
) -> None:
    """The data has arrived and is complete, but the peer had not read it when it closed."""
    if half:
        pair.a.shutdown_write()
        pair.settle()
    pair.a.close()
    send(pair.b, b"crosses C")
    pair.ba.deliver()
    pair.ba.complete()
    assert not pair.b.unsent
    pair.settle()
    with pytest.raises(BrokenPipeError):
        pair.b.send(memoryview(b"x"))
    assert pair.b.receiver.at_eof
    assert pair.states() == ("CLOSED", "CLOSED")


@pytest.mark.rfc("4.8.1/11")
def test_fig22_passive_close_4a_while_a_task_waits_to_send_is_a_reset(pair: Pair) -> None:
    """The link has no room: nothing is in flight, and there is data to be written."""
    pair.ba.room = 0
    pair.b.on_writable = lambda: None
    assert pair.b.send(memoryview(b"waits")) == 0
    pair.a.close()
    pair.ab.deliver()
    assert pair.b.state == PROCESS
    with pytest.raises(BrokenPipeError):
        pair.b.send(memoryview(b"waits"))
    assert pair.b.receiver.at_eof
    pair.ba.room = 1 << 20
    pair.ba.complete()
    pair.settle()
    ended(pair, FIN, RST)


@pytest.mark.rfc("4.8.1/12")
def test_fig22_passive_close_4b(pair: Pair) -> None:
    pair.a.shutdown_write()
    pair.settle()
    send(pair.b, b"more")
    pair.b.shutdown_write()
    assert pair.b.state == AW1, "pending"
    pair.settle()
    assert pair.states() == (PW2, AW2)
    assert flags(pair.ba) == [0, D]


@pytest.mark.rfc("4.8.1/13")
@pytest.mark.parametrize("state", [AW1, AW2])
def test_fig22_passive_close_4c_to_closed(pair: Pair, state: str) -> None:
    """The peer has sent C already."""
    pair.a.close()
    pair.settle()
    if state == AW2:
        pair.b.shutdown_write()
        pair.settle()
    assert pair.b.state == state
    pair.b.close()
    assert pair.b.state == "CLOSED"
    pair.settle()
    ended(pair)
    assert flags(pair.ba) == ([C] if state == AW1 else [D, D | C])


@pytest.mark.rfc("4.8.1/13", "4.8.1/14")
@pytest.mark.parametrize("state", [AW1, AW2])
def test_fig22_passive_close_4c_and_4d_by_way_of_peer_fin_close_wait(
    pair: Pair, state: str
) -> None:
    pair.a.shutdown_write()
    pair.settle()
    if state == AW2:
        pair.b.shutdown_write()
        pair.settle()
    assert pair.b.state == state
    pair.b.close()
    assert pair.b.state == PEERFIN
    assert pair.hosts[1].timer == CLOSE_TIMEOUT
    pair.settle()
    assert pair.a.state == APPFIN
    pair.a.close()
    pair.settle()
    ended(pair)


@pytest.mark.rfc("4.8.1/18")
def test_fig22_both_close_at_once(pair: Pair) -> None:
    """The last note of 4.8.1: both follow path 3."""
    pair.a.close()
    pair.b.close()
    assert pair.states() == (PW1, PW1)
    pair.settle()
    ended(pair)


@pytest.mark.parametrize("first", ["a", "b"])
def test_fig22_both_shut_down_at_once(pair: Pair, first: str) -> None:
    pair.a.shutdown_write()
    pair.b.shutdown_write()
    assert pair.states() == (PW1, PW1)
    pair.settle()
    assert pair.states() == (PW2, PW2)
    one, other = (pair.a, pair.b) if first == "a" else (pair.b, pair.a)
    one.close()
    pair.settle()
    assert (one.state, other.state) == (PW2, APPFIN)
    other.close()
    pair.settle()
    ended(pair)


@pytest.mark.rfc("4.8.1/15", "4.8.1/16", "4.8.1/17")
@pytest.mark.parametrize("state", [PW1, PW2, PEERFIN])
def test_fig22_the_timer_of_a_side_that_waits_for_ever(pair: Pair, state: str) -> None:
    """4.8.1, note on stranded states: no CDC message; a TCP reset notifies the peer."""
    if state == PW2:
        pair.a.shutdown_write()
        pair.settle()
    if state != PW1:
        pair.b.shutdown_write()
        pair.settle()
    pair.a.close()
    pair.settle()
    assert pair.a.state == state
    posted = len(pair.ab.log)
    fire(pair, 0)
    assert pair.a.state == "CLOSED"
    assert pair.hosts[0].calls == RST
    assert len(pair.ab.log) == posted
    pair.b.tcp_reset()
    pair.settle()
    assert pair.b.state == "CLOSED"
    assert pair.hosts[1].calls == RST
    assert (pair.b.error.errno if pair.b.error else None) == (errno.EPIPE if state == PW1 else None)


@pytest.mark.rfc("4.8.2/1")
def test_fig22_a_close_that_never_gets_its_data_across(pair: Pair) -> None:
    """4.8.2, second bullet: the termination has stalled."""
    send(pair.a, b"x" * RING)
    pair.a.close()
    fire(pair, 0)
    assert pair.a.state == PEERABORT
    pair.settle()
    ended(pair, RST, FIN)
    assert pair.b.receiver.receive(RING) == b"x" * RING
    with pytest.raises(ConnectionResetError):
        pair.b.receiver.receive(1)


@pytest.mark.rfc("4.4.2/1", "4.8.1/3")
def test_fig22_the_element_goes_back_when_both_are_done(pair: Pair) -> None:
    send(pair.b, b"first")
    pair.settle()
    assert pair.a.receiver.receive(9) == b"first"
    pair.a.shutdown_write()
    pair.settle()
    for _ in range(3):
        send(pair.b, b"the peer may still write")
        pair.settle()
        assert pair.a.receiver.receive(99) == b"the peer may still write"
        assert "closed" not in pair.hosts[0].calls + pair.hosts[1].calls
    pair.b.close()
    pair.settle()
    assert "closed" not in pair.hosts[0].calls + pair.hosts[1].calls
    pair.a.close()
    pair.settle()
    ended(pair)


# --- figure 23 -------------------------------------------------------------------------------

# How the two get into a state in which C was not sent by a: steps, and then a's state.
WAYS = {
    "ACTIVE": "",
    PW1: "a.shutdown_write",
    PW2: "a.shutdown_write b.shutdown_write",
    APPFIN: "a.shutdown_write b.close",
    AW1: "b.shutdown_write",
    "APPCLOSEWAIT1 after C": "b.close",
    AW2: "b.shutdown_write a.shutdown_write",
    "APPCLOSEWAIT2 after C": "b.close a.shutdown_write",
}
ANNOUNCED = {AW1 + " after C", AW2 + " after C", APPFIN}


def lead(pair: Pair, state: str) -> None:
    for step in WAYS[state].split():
        side, call = step.split(".")
        getattr(getattr(pair, side), call)()
        pair.settle()
    assert pair.a.state == state.partition(" ")[0]


@pytest.mark.rfc("4.8.2/3", "4.8.2/5", "4.8.2/6")
@pytest.mark.parametrize("state", [state for state in WAYS if state not in ANNOUNCED])
def test_fig23_active_abort_1a_and_1b(pair: Pair, state: str) -> None:
    lead(pair, state)
    pair.a.abort()
    assert pair.a.state == PEERABORT
    assert flags(pair.ab)[-1] & A
    # Until B has sent a CDC message, B may not have read SMC Confirm, which RST would discard.
    assert pair.hosts[0].calls == (["reset_tcp"] if pair.a.cdcs_received else [])
    assert pair.hosts[0].timer == CLOSE_TIMEOUT
    if pair.a.receiver.peer_done:
        assert pair.a.receiver.receive(1) == b""
    else:
        with pytest.raises(ConnectionAbortedError):
            pair.a.receiver.receive(1)
    pair.settle()
    ended(pair, RST, FIN)


@pytest.mark.parametrize("no_more_writes", [True, False])
def test_a_peer_that_resets_tcp_before_any_cdc_message_does_not_answer(
    pair: Pair, no_more_writes: bool
) -> None:
    """On RoCE its RDMA writes may still arrive, so the RMBE is kept for the time-out."""
    pair.a.abort()
    pair.a.tcp_reset(no_more_writes=no_more_writes)
    assert pair.a.state == ("CLOSED" if no_more_writes else PEERABORT)
    assert pair.hosts[0].calls == (["reset_tcp", "closed"] if no_more_writes else [])


@pytest.mark.parametrize("state", sorted(ANNOUNCED))
def test_fig23_active_abort_1a_of_a_peer_that_is_done(pair: Pair, state: str) -> None:
    """This side does not wait for an answer, because the peer has sent C."""
    lead(pair, state)
    pair.a.abort()
    assert pair.a.state == PROCESS
    pair.settle()
    ended(pair, RST, FIN)


@pytest.mark.rfc("4.8.2/4")
def test_fig23_active_abort_1a_ignores_later_messages(pair: Pair) -> None:
    pair.a.abort()
    send(pair.b, b"new data")
    pair.b.shutdown_write()
    pair.ba.deliver()
    assert pair.a.state == PEERABORT
    assert pair.a.receiver.bytes_received == 0
    pair.settle()
    ended(pair, RST, FIN)


@pytest.mark.rfc("4.8.2/7")
def test_fig23_active_abort_timer(pair: Pair) -> None:
    """4.8.2 (1): after a time the element is free, even without an answer of the peer."""
    pair.a.abort()
    fire(pair, 0)
    assert pair.a.state == "CLOSED"
    assert pair.hosts[0].calls == RST


@pytest.mark.rfc("4.8.2/9", "4.8.2/11")
@pytest.mark.parametrize("state", [state for state in WAYS if state not in ANNOUNCED])
def test_fig23_passive_abort_2a_and_2b(pair: Pair, state: str) -> None:
    lead(pair, state)
    if state in ("ACTIVE", PW1):
        send(pair.b, b"unread")
    pair.ba.deliver()
    pair.b.abort()
    pair.ba.deliver()
    assert pair.a.state == PROCESS
    assert pair.a.error is not None or state in (PW2, AW2)
    if state in ("ACTIVE", PW1):
        assert pair.a.receiver.receive(9) == b"unread"
    if pair.a.receiver.peer_done:
        assert pair.a.receiver.receive(1) == b""
    else:
        with pytest.raises(ConnectionResetError):
            pair.a.receiver.receive(1)
    assert flags(pair.ab)[-1] & A
    assert pair.hosts[0].calls == [], "the peer resets TCP itself"
    pair.settle()
    ended(pair, FIN, RST)


@pytest.mark.rfc("4.8.2/9")
def test_fig23_passive_abort_2a_wakes_all_tasks(pair: Pair) -> None:
    woken: list[str] = []
    pair.b.on_readable = lambda: woken.append("reader")
    pair.b.on_writable = lambda: woken.append("writer")
    pair.b.on_urgent = lambda: woken.append("urgent")
    pair.a.abort()
    pair.settle()
    assert sorted(woken) == ["reader", "urgent", "writer"]


@pytest.mark.rfc("4.8.2/10")
def test_fig23_passive_abort_2a_purges_unsent_data_only(pair: Pair) -> None:
    send(pair.b, b"to be sent")
    send(pair.a, b"to be read")
    pair.ab.deliver()
    pair.a.abort()
    pair.ab.deliver()
    assert pair.b.receiver.receive(99) == b"to be read"
    assert not pair.b.unsent
    assert list(pair.b.sender.replay()) == []


@pytest.mark.rfc("4.8.2/11")
def test_fig23_passive_abort_2b_waits_for_no_application(pair: Pair) -> None:
    pair.a.abort()
    pair.settle()
    ended(pair, RST, FIN)
    assert pair.b.error, "its application has not called yet"


def test_fig23_passive_abort_timer(pair: Pair) -> None:
    """A send that never completes does not keep the element either."""
    pair.a.abort()
    pair.ab.deliver()
    assert pair.b.state == PROCESS
    fire(pair, 1)
    assert pair.b.state == "CLOSED"
    assert pair.hosts[1].calls == RST


@pytest.mark.rfc("4.8.2/12")
def test_fig23_tcp_reset_starts_an_abort(pair: Pair) -> None:
    """The end of 4.8.2."""
    pair.a.tcp_reset()
    assert pair.a.state == PEERABORT
    assert flags(pair.ab) == [A]
    assert pair.a.error
    assert pair.a.error.errno == errno.ECONNRESET
    pair.settle()
    ended(pair, RST, FIN)


@pytest.mark.rfc("4.8.2/12")
def test_fig23_tcp_reset_after_the_peers_abort_changes_nothing(pair: Pair) -> None:
    pair.a.abort()
    pair.ab.deliver()
    pair.b.tcp_reset()
    assert pair.b.state == PROCESS
    assert flags(pair.ba) == [A]
    pair.settle()
    ended(pair, RST, FIN)


def test_fig23_tcp_reset_on_both_sides(pair: Pair) -> None:
    """A host between the two resets TCP: both sides abort."""
    pair.a.tcp_reset()
    pair.b.tcp_reset()
    assert pair.states() == (PEERABORT, PEERABORT)
    pair.settle()
    ended(pair, RST, RST)


@pytest.mark.rfc("4.8.2/13")
def test_fig23_both_abort_at_once(pair: Pair) -> None:
    """The end of 4.8.2: each side takes the other's A for the answer, and sends no other one."""
    pair.a.abort()
    pair.b.abort()
    assert pair.states() == (PEERABORT, PEERABORT)
    pair.settle()
    ended(pair, RST, RST)
    assert flags(pair.ab) == flags(pair.ba) == [A]


@pytest.mark.rfc("4.8.2/8", "A.4/17")
@pytest.mark.parametrize("state", [PW1, PW2, PEERFIN])
def test_fig23_not_after_c(pair: Pair, state: str) -> None:
    """ "Any state (before setting PeerConnectionClosed indicator in peer's RMBE)": nothing can
    follow C, so an abort after it is TCP's alone."""
    if state == PW2:
        pair.a.shutdown_write()
        pair.settle()
    if state != PW1:
        pair.b.shutdown_write()
        pair.settle()
    pair.a.close()
    pair.settle()
    assert pair.a.state == state
    posted = len(pair.ab.log)
    pair.a.abort()
    assert pair.a.state == PEERABORT
    assert len(pair.ab.log) == posted
    assert pair.hosts[0].calls == ["reset_tcp"]
    pair.b.tcp_reset()
    pair.settle()
    ended(pair, RST, RST)


@pytest.mark.parametrize("first", ["close", "abort"])
def test_fig23_close_against_abort(pair: Pair, first: str) -> None:
    """C and A cross: each is the other's answer."""
    pair.a.close()
    pair.b.abort()
    channels = (pair.ab, pair.ba) if first == "close" else (pair.ba, pair.ab)
    for channel in channels:
        channel.deliver()
    pair.settle()
    ended(pair, FIN, RST)
    assert (flags(pair.ab), flags(pair.ba)) == ([C], [A])


@pytest.mark.rfc("4.8.2/2")
def test_fig23_abort_with_a_full_link(pair: Pair) -> None:
    """This side sends A later, and keeps the element, if the link has no room."""
    pair.ab.room = 0
    pair.a.abort()
    pair.settle()
    assert pair.states() == (PEERABORT, "ACTIVE")
    pair.ab.room = 1 << 20
    pair.ab.complete()
    pair.settle()
    ended(pair, RST, FIN)


@pytest.mark.rfc("4.8.2/2")
def test_fig23_abort_with_writes_under_way(pair: Pair) -> None:
    """The writes arrive before A, so none reaches an element that was given back."""
    send(pair.a, b"x" * 1000)
    pair.a.abort()
    while pair.ab.queue:
        assert pair.hosts[1].calls == []
        pair.ab.deliver(1)
    assert pair.b.state == PROCESS
    pair.settle()
    ended(pair, RST, FIN)
    assert isinstance(pair.ab.log[0], Write)


# --- 4.8.3 and 4.4.2 -------------------------------------------------------------------------


@pytest.mark.parametrize("state", WAYS)
def test_no_link_is_left(pair: Pair, state: str) -> None:
    """4.8.3: TCP is reset and no send is possible; completely received data can still be read."""
    lead(pair, state)
    for connection in (pair.a, pair.b):
        connection.links_lost()
    assert pair.states() == ("CLOSED", "CLOSED")
    assert pair.hosts[0].calls == RST
    # If B's C has arrived, and B waits for A, RST would show A an abort that TCP would not.
    assert pair.hosts[1].calls == (FIN if state.endswith("after C") else RST)
    ended_by_peer, ended = pair.a.receiver.peer_done, pair.a.write_closed
    if (ended_by_peer and ended) or pair.a.got_closed:
        assert pair.a.error is None
    else:
        assert pair.a.error
        assert pair.a.error.errno == (errno.EPIPE if ended_by_peer else errno.ECONNRESET)


@pytest.mark.rfc("4.4.2/3")
@pytest.mark.parametrize("state", WAYS)
def test_the_peer_gave_the_element_to_another(pair: Pair, state: str) -> None:
    """4.4.2: the peer gets no write and no message any more."""
    lead(pair, state)
    posted = len(pair.ab.log)
    pair.a.rmbe_conflict()
    assert pair.a.state == "CLOSED"
    assert pair.hosts[0].calls == RST
    assert len(pair.ab.log) == posted


@pytest.mark.rfc("4.4.2/4")
def test_the_peer_gave_the_element_to_another_and_data_is_unread(pair: Pair) -> None:
    """4.4.2: the element is free, so the data is copied."""
    send(pair.b, b"not read")
    pair.settle()
    assert pair.a.receiver.readable == 8
    woken: list[str] = []
    pair.a.on_readable = lambda: woken.append("reader")
    pair.a.rmbe_conflict()
    assert woken == ["reader"]
    pair.memories[0].view[:8] = bytes(8)
    assert pair.a.receiver.receive(100) == b"not read"
    with pytest.raises(ConnectionResetError):
        pair.a.receiver.receive(100)
    assert pair.hosts[0].calls == RST
