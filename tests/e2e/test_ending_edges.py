"""The edges of figures 22 and 23 between two real processes, timers included.

The close timer is a minute unless a test is about it: both ends are CLOSED long before that, so no
timer was needed.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import trio

from tests.e2e.actor import End, join, open_ends
from tests.streams.stream_pairs import SMALL_RING
from tests.timing import SLOWER
from trio_smc import SoftRnic

SLOW = {"receive_buffer": SMALL_RING, "close_timeout": 60, "shutdown_timeout": 10}
SOON = 0.3 * SLOWER
QUICK = {**SLOW, "close_timeout": SOON}
BROKEN_BY_PEER = ("BrokenResourceError", errno.ECONNRESET)
NO_READER = ("BrokenResourceError", errno.EPIPE)
CLOSED = ("ClosedResourceError", None)


WAYS = (0, 1)


class Ends:
    """The two processes."""

    def __init__(self, here: End, there: End) -> None:
        self.here = here
        self.there = there

    @contextlib.asynccontextmanager
    async def joined(self, way: int) -> AsyncIterator[tuple[End, End]]:
        """(a, b): a in this process or in the other; at the end all must be closed and free."""
        port = await self.here.listen()
        a, b = [(self.here, self.there), (self.there, self.here)][way]
        await join(self.there, self.here, port)
        yield a, b
        for end in (a, b):
            await end.reach(state="CLOSED")
            await end.all_free()
            assert not await end.tcp_open()
            await end.aclose()

    async def new(self) -> tuple[End, End]:
        """A connection; here listens."""
        await join(self.there, self.here, await self.here.listen())
        return self.here, self.there


@pytest.fixture
async def slow() -> AsyncIterator[Ends]:
    async with open_ends(**SLOW) as (here, there):
        yield Ends(here, there)


@pytest.fixture
async def quick() -> AsyncIterator[Ends]:
    async with open_ends(**QUICK) as (here, there):
        yield Ends(here, there)


async def both(a: End, b: End, op: str) -> None:
    """Run both at the same time, as far as two processes can."""
    async with trio.open_nursery() as nursery:
        for end in (a, b):
            nursery.start_soon(getattr(end, op))


# --- figure 22 ---------------------------------------------------------------------------------


async def test_active_and_passive_close(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await a.send(size=100)
            await a.aclose()
            assert await a.state() == "PEERCLOSEWAIT1"
            await b.reach(state="APPCLOSEWAIT1")
            assert await a.elements() == await b.elements() == 1, "either side may still be read"
            assert await b.read_all() == 100
            assert await a.tcp_open()
            await b.aclose()


async def test_both_close_at_once(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await both(a, b, "aclose")


async def test_half_close_then_both_close(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await a.send(size=10)
            await a.send_eof()
            assert await a.state() == "PEERCLOSEWAIT1"
            assert await b.read_all() == 10
            assert await b.state() == "APPCLOSEWAIT1"
            await b.send(size=20)
            await b.aclose()
            assert await b.state() == "PEERFINCLOSEWAIT"
            assert await a.read_all() == 20
            assert await a.state() == "APPFINCLOSEWAIT"
            assert await a.elements() == await b.elements() == 1
            await a.aclose()


async def test_the_half_closer_closes_first(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await a.send_eof()
            await b.reach(state="APPCLOSEWAIT1")
            await a.aclose()
            assert await a.state() == "PEERCLOSEWAIT1"
            assert await b.read_all() == 0
            await b.aclose()


@pytest.mark.parametrize("first", [0, 1])
async def test_half_close_on_both_sides(slow: Ends, first: int) -> None:
    for way in WAYS:
        async with slow.joined(way) as ends:
            a, b = ends
            await a.send_eof()
            await b.reach(state="APPCLOSEWAIT1")
            await b.send_eof()
            assert await b.state() == "APPCLOSEWAIT2"
            await a.reach(state="PEERCLOSEWAIT2")
            await ends[first].aclose()
            await ends[1 - first].reach(state=["APPCLOSEWAIT2", "APPFINCLOSEWAIT"][first])
            await ends[1 - first].aclose()


async def test_both_half_close_at_once(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await both(a, b, "send_eof")
            for end in (a, b):
                assert await end.read_all() == 0
            await both(a, b, "aclose")


@pytest.mark.rfc("4.8.1/4")
async def test_close_with_unread_data(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await b.send(size=1)
            await a.arrived(size=1)
            await a.aclose()
            assert await b.receive() == BROKEN_BY_PEER
            assert await b.receive() == 0
            assert await b.send() == NO_READER


async def test_half_close_then_close_with_unread_data(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await a.send_eof()
            assert await b.read_all() == 0
            await b.send(size=1)
            await a.arrived(size=1)
            await a.aclose()
            assert await b.receive() == 0, "the end came before the reset"
            assert await b.send() == NO_READER


async def test_data_that_comes_after_the_close_has_no_reader(slow: Ends) -> None:
    """The peer's close is no half close: a further write is an abort (APPCLOSEWAIT1, C)."""
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await a.aclose()
            await b.reach(state="APPCLOSEWAIT1")
            assert await b.send() is None
            assert await b.send() == NO_READER
            assert await b.receive() == 0


@pytest.mark.rfc("4.8.1/11")
async def test_the_peer_closes_while_data_waits_to_be_written(slow: Ends) -> None:
    """4A: the data is in the peer's memory, but the message that announces it is not."""
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await b.hold_for_ever()
            await b.setsockopt(level=socket.IPPROTO_TCP, option=socket.TCP_CORK, value=1)
            await b.send(size=10)
            await a.aclose()
            assert await b.receive() == 0
            assert await b.send() == NO_READER


async def test_a_blocked_writer_gets_the_reset(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await b.start(what="send", size=10 * SMALL_RING)
            await a.arrived(size=SMALL_RING)
            await a.aclose()
            assert await b.finished() == BROKEN_BY_PEER


# --- figure 23 ---------------------------------------------------------------------------------

STATES = {
    "ACTIVE/ACTIVE": [],
    "PEERCLOSEWAIT1 D/APPCLOSEWAIT1": ["a.send_eof"],
    "PEERCLOSEWAIT1 C/APPCLOSEWAIT1": ["a.aclose"],
    "PEERCLOSEWAIT2/APPCLOSEWAIT2": ["a.send_eof", "b.send_eof"],
    "PEERCLOSEWAIT2 C/APPCLOSEWAIT2 C": ["a.send_eof", "b.send_eof", "a.aclose"],
    "APPFINCLOSEWAIT/PEERFINCLOSEWAIT": ["a.send_eof", "b.aclose"],
    "APPFINCLOSEWAIT/PEERFINCLOSEWAIT after D": ["a.send_eof", "b.send_eof", "b.aclose"],
}
"""The steps that bring a and b into each stable pair of states of two live ends."""


@pytest.mark.parametrize("aborting", [0, 1], ids=["a", "b"])
async def test_abort_in_every_state(slow: Ends, aborting: int) -> None:
    for states, steps in STATES.items():
        for way in WAYS:
            async with slow.joined(way) as ends:
                for step in steps:
                    end, op = step.split(".")
                    await getattr(ends["ab".index(end)], op)()
                for each, state in zip(ends, states.split("/"), strict=True):
                    await each.reach(state=state.split()[0])
                await ends[aborting].abort()
                assert await ends[aborting].receive() == CLOSED
                other = ends[1 - aborting]
                await other.reach(state="CLOSED")
                aborted, aborter = "ba"[aborting], "ab"[aborting]
                if f"{aborted}.aclose" in steps:
                    assert await other.receive() == CLOSED, states
                elif f"{aborter}.aclose" in steps or f"{aborter}.send_eof" in steps:
                    # The end arrived before, and all data that was sent before the end can be read.
                    assert await other.receive() == 0, states
                    if f"{aborted}.send_eof" not in steps:
                        assert await other.send() == NO_READER, states
                else:
                    assert await other.receive() == BROKEN_BY_PEER, states


async def test_abort_with_full_rings(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            for end in (a, b):
                await end.start(what="send", size=10 * SMALL_RING)
            for end in (a, b):
                await end.arrived(size=SMALL_RING)
            await a.abort()
            assert await a.finished() == CLOSED
            assert await b.finished() == BROKEN_BY_PEER


async def test_both_abort_at_once(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await both(a, b, "abort")


async def test_close_against_abort(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b), trio.open_nursery() as nursery:
            nursery.start_soon(a.aclose)
            nursery.start_soon(b.abort)


# --- the TCP connection ------------------------------------------------------------------------


@pytest.mark.rfc("4.8.2/12")
async def test_tcp_rst_is_an_abort(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await b.start(what="receive")
            await a.tcp_reset()
            assert await b.finished() == BROKEN_BY_PEER
            assert await a.receive() == BROKEN_BY_PEER


async def test_tcp_fin_is_no_end(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            for one, other in ((a, b), (b, a)):
                await one.tcp_fin()
                for sender, receiver in ((one, other), (other, one)):
                    await sender.send(size=10)
                    assert await receiver.receive() == 10
                assert await other.state() == "ACTIVE"
            await a.aclose()
            assert await b.receive() == 0
            await b.aclose()


async def test_data_on_the_tcp_connection_is_an_abort(slow: Ends) -> None:
    for way in WAYS:
        async with slow.joined(way) as (a, b):
            await b.start(what="receive")
            await a.tcp_data()
            assert await b.finished() == BROKEN_BY_PEER
            assert await a.receive() == BROKEN_BY_PEER


# --- timers ------------------------------------------------------------------------------------


@pytest.mark.rfc("4.8.1/15", "4.8.1/17")
async def test_close_timer_a_peer_that_never_closes(quick: Ends) -> None:
    """4.8.1, last but one note: RST only, as C was sent."""
    for way in WAYS:
        async with quick.joined(way) as (a, b):
            start = trio.current_time()
            assert await a.aclose_into() == "PEERCLOSEWAIT1"
            await a.reach(state="CLOSED")
            assert trio.current_time() - start >= SOON
            await a.all_free()
            # b reads the end first: it came long before the reset.
            await b.reach(state="CLOSED")
            assert await b.send() == NO_READER
            assert await b.receive() == 0


@pytest.mark.rfc("4.8.1/15", "4.8.1/17")
async def test_close_timer_after_a_half_close_of_the_peer(quick: Ends) -> None:
    for way in WAYS:
        async with quick.joined(way) as (a, b):
            await b.send_eof()
            await a.reach(state="APPCLOSEWAIT1")
            assert await a.aclose_into() == "PEERFINCLOSEWAIT"
            await a.reach(state="CLOSED")
            await b.reach(state="CLOSED")
            assert await b.receive() == 0, "the end came before the reset"


async def test_a_half_close_has_no_timer(quick: Ends) -> None:
    for way in WAYS:
        async with quick.joined(way) as (a, b):
            await a.send_eof()
            assert await b.read_all() == 0
            await trio.sleep(3 * SOON)
            await b.send(size=10)
            assert await a.receive() == 10
            await b.aclose()
            await a.aclose()


@pytest.mark.rfc("4.8.2/7")
async def test_abort_timer(quick: Ends) -> None:
    """4.8.2, 1: the peer is stopped, so its answer arrives after the wait for it has ended."""
    here, there = await quick.new()
    there.stop()
    try:
        start = trio.current_time()
        assert await here.abort_into() == ("PEERABORTWAIT", 1)
        await here.all_free()
        assert await here.state() == "CLOSED"
        assert trio.current_time() - start >= SOON
    finally:
        there.go_on()
    assert await there.receive() == BROKEN_BY_PEER
    await there.aclose()
    await there.all_free()
    while not await here.unknown_tokens():  # noqa: ASYNC110
        await trio.sleep(0.001)  # no event to wait for


async def test_close_timer_with_data_that_does_not_arrive(quick: Ends) -> None:
    """4.8.2, second bullet: the close is pending, C was never sent, so A may be."""
    here, there = await quick.new()
    there.stop()
    try:
        await here.clog()
        start = trio.current_time()
        await here.start(what="aclose")
        assert await here.state() == "ACTIVE"
        await here.reach(state="PEERABORTWAIT")
        assert trio.current_time() - start >= SOON
        assert await here.finished() is None, "aclose does not raise"
        await here.all_free()
    finally:
        there.go_on()
    while isinstance(outcome := await there.receive(), int):
        assert outcome
    assert outcome == BROKEN_BY_PEER
    await there.aclose()
    await there.all_free()


async def test_linger_bounds_the_wait_of_a_close(slow: Ends) -> None:
    """The rest is finished in the background: the peer gets all of it."""
    here, there = await slow.new()
    there.stop()
    try:
        await here.clog()
        value = list(struct.pack("ii", 1, 1))
        await here.setsockopt(level=socket.SOL_SOCKET, option=socket.SO_LINGER, value=value)
        start = trio.current_time()
        await here.aclose()
        assert trio.current_time() - start >= 1
        assert await here.state() == "ACTIVE"
        assert await here.elements() == 1
    finally:
        there.go_on()
    # The bytes that a ring or a Unix socket holds.
    assert await there.read_all() > (200 if SoftRnic.variant == "socket" else 1000)
    await there.aclose()
    for end in (here, there):
        await end.all_free()


async def test_user_timeout_with_a_peer_that_stopped(slow: Ends) -> None:
    here, there = await slow.new()
    option = {"level": socket.IPPROTO_TCP, "option": socket.TCP_USER_TIMEOUT, "value": 300}
    there.stop()
    try:
        await here.setsockopt(**option)
        await here.clog()
        assert await here.receive() == ("BrokenResourceError", errno.ETIMEDOUT)
        await here.aclose()
    finally:
        there.go_on()
    while isinstance(outcome := await there.receive(), int):
        assert outcome
    assert outcome == BROKEN_BY_PEER
    await there.aclose()
    for end in (here, there):
        await end.all_free()


async def test_keepalive_keeps_a_peer_that_stopped() -> None:
    """As over TCP: on one host the kernel reports the end of a process."""
    settings = {**SLOW, "test_link_interval": 60, "test_link_timeout": 0.2}
    async with open_ends(**settings) as (here, there):
        port = await here.listen()
        await join(there, here, port)
        for level, option in (
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        ):
            await here.setsockopt(level=level, option=option, value=1)
        there.stop()
        try:
            await trio.sleep(3.5)  # two intervals, and the time for the answer
            assert await here.state() == "ACTIVE"
        finally:
            there.go_on()
        await there.aclose()
        assert await here.receive() == 0
        await here.aclose()
        for end in (here, there):
            await end.all_free()
