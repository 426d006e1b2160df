"""Handshakes over real sockets.  A proxy on the TCP path damages CLC messages, and peers written in
the test are slow, send too much, send nothing, or close (RFC 7609, C.1, C.5, C.6).

A proxy makes same-host discovery impossible, so both sides are configured to assume SMC-R.  In this
mode a server recognises CLC by the first four bytes alone, the eye catcher, so the proxy does not
change these.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, cast

import pytest
import trio
import trio.testing

from tests.api.api_peers import ASSUME, GID, HOST, MAC, PEER_ID, address_of, check_talk
from tests.timing import PATIENCE
from trio_smc import Mode, SmcListener, SmcStream, Stack, open_stack
from trio_smc._base.reasons import Fallback, FallbackReason
from trio_smc._base.timers import Timers
from trio_smc.host.addresses import interface_prefixes
from trio_smc.rendezvous.handshake import run_negotiation
from trio_smc.rendezvous.negotiation import Failed, FellBack
from trio_smc.rnic.spinner import Spinner
from trio_smc.states.engine import Machine
from trio_smc.states.tables import CLC_CLIENT
from trio_smc.wire import clc

# Short, but long enough for a machine that is busy with other things.
QUICK = replace(
    ASSUME, handshake_timeout=1.5, first_contact_timeout=1.5, llc_timeout=1.5, shutdown_timeout=5
)
# A first contact that stalls delays the next one until its time-out.
PATIENT = replace(QUICK, handshake_timeout=20)
FROM_CLIENT, FROM_SERVER = b"client's application " * 50, b"server's application " * 50

Damage = Callable[[random.Random, bytes], bytes]


def _flip(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        raw[rng.randrange(4, len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _set(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    raw[rng.randrange(4, len(raw))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(raw)


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(4, len(data))]


def _extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 60))


def _double(_: random.Random, data: bytes) -> bytes:
    return data + data


def _lose(_rng: random.Random, _data: bytes) -> bytes:
    return b""


def _relabel(rng: random.Random, data: bytes) -> bytes:
    """Change the length or the type, so that it does not match the message."""
    raw = bytearray(data)
    raw[4] = rng.randrange(6)
    raw[5:7] = (len(raw) + rng.choice((0, 0, 1, -1, 17))).to_bytes(2, "big")
    return bytes(raw)


DAMAGES: dict[str, Damage] = {
    "flip": _flip,
    "set": _set,
    "truncate": _truncate,
    "extend": _extend,
    "double": _double,
    "lose": _lose,
    "relabel": _relabel,
}
ENDINGS = ("go on", "go on", "go on", "fin", "rst", "silent")


class Proxy:
    """Carries TCP connections to a listener; the n-th CLC message of one side is damaged."""

    def __init__(self, target: SmcListener, rng: random.Random) -> None:
        self.target = address_of(target)
        self.rng = rng
        self.sender = rng.randrange(2)
        self.place = 0 if self.sender else rng.randrange(2)
        self.kind = rng.choice(list(DAMAGES))
        self.ending = rng.choice(ENDINGS)
        self.pieces = rng.choice((1 << 16, 1 << 16, 1))
        if self.kind in ("double", "extend"):
            # Extra bytes arrive together with the message.  Later they might follow an answer, and
            # behind a Decline they would belong to the application.
            self.pieces = 1 << 16
        self.name = f"{self.kind} then {self.ending}"

    async def carry(self, client: trio.SocketStream) -> None:
        """Carry one connection until both directions have ended."""
        async with client:
            server = await trio.open_tcp_stream(*self.target)
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._direction, client, server, 0, nursery.cancel_scope)
                nursery.start_soon(self._direction, server, client, 1, nursery.cancel_scope)

    async def _direction(
        self,
        source: trio.SocketStream,
        sink: trio.SocketStream,
        sender: int,
        scope: trio.CancelScope,
    ) -> None:
        try:
            for number in range(2 - sender):
                message = await _read_message(source)
                if message is None:
                    break
                hit = (sender, number) == (self.sender, self.place)
                if hit and not self._is_the_applications(message):
                    message = DAMAGES[self.kind](self.rng, message)
                for place in range(0, len(message), self.pieces):
                    await sink.send_all(message[place : place + self.pieces])
                if hit and self.ending != "go on":
                    await self._end(sink, scope)
            while data := await source.receive_some():
                await sink.send_all(data)
            await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # After a reset, the proxy carries no more bytes.
            for stream in (source, sink):
                reset(stream)
            scope.cancel()

    def _is_the_applications(self, message: bytes) -> bool:
        # Bytes behind a Decline belong to the application by definition.
        return message[4] == clc.MessageType.DECLINE and self.kind in ("double", "extend")

    async def _end(self, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        if self.ending == "fin":
            await sink.send_eof()
            await trio.sleep_forever()
        elif self.ending == "silent":
            await trio.sleep_forever()
        reset(sink)
        scope.cancel()


def reset(stream: trio.SocketStream) -> None:
    """Close with RST."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def _read_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        if not piece:
            break
        data += piece
    return data


async def _read_message(stream: trio.abc.ReceiveStream) -> bytes | None:
    """The next CLC message of an honest side, or None at its end."""
    header = await _read_exactly(stream, 8)
    if len(header) < 8:
        return None
    return header + await _read_exactly(stream, int.from_bytes(header[5:7], "big") - 8)


async def talk(stream: SmcStream, text: bytes, got: bytearray) -> None:
    """An application: sends its text and reads to the end."""
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(text)
            await stream.send_eof()
            async for data in stream:
                got += data


@contextlib.asynccontextmanager
async def _one_client(
    carry: Callable[[trio.SocketStream], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """Open a port, and call ``carry`` with the first connection."""
    with trio.socket.socket() as sock:
        await sock.bind((HOST, 0))
        sock.listen()
        async with trio.open_nursery() as nursery:

            async def serve_one() -> None:
                client, _ = await sock.accept()
                await carry(trio.SocketStream(client))

            nursery.start_soon(serve_one)
            yield sock.getsockname()
            nursery.cancel_scope.cancel()


async def _one_damaged_handshake(client: Stack, proxy: Proxy) -> tuple[str, bytes]:
    """The outcome of the client's side, and the bytes that its application received."""
    got = bytearray()
    async with _one_client(proxy.carry) as (host, port):
        with trio.fail_after(PATIENCE):
            try:
                stream = await client.open_stream(host, port)
            except OSError:
                return "failed", b""
            mode = stream.mode.value
            # An SMC-R connection with damaged terms need not end by itself.
            with trio.move_on_after(1):
                await talk(stream, FROM_CLIENT, got)
    return mode, bytes(got)


@pytest.mark.rfc("3.2/1")
@pytest.mark.timeout(150)
async def test_damaged_handshakes_through_a_proxy(
    rng: random.Random, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No byte of CLC reaches an application, and the listener continues to serve."""
    cases = 3000 if full else 300
    at_server: list[bytearray] = []
    outcomes: Counter[tuple[str, str]] = Counter()

    async def application(stream: SmcStream) -> None:
        got = bytearray()
        at_server.append(got)
        with trio.move_on_after(2):
            await talk(stream, FROM_SERVER, got)

    limit = trio.CapacityLimiter(16)
    async with (
        open_stack(QUICK) as server,
        open_stack(QUICK) as client,
        open_stack(PATIENT) as healthy,
        trio.open_nursery() as nursery,
    ):
        listeners = await nursery.start(server.serve, application, 0)
        listener = next(each for each in listeners if each.socket.family == socket.AF_INET)
        case_seed = rng.getrandbits(64)

        async def one(number: int) -> None:
            async with limit:
                proxy = Proxy(listener, random.Random(f"{case_seed}/{number}"))
                mode, got = await _one_damaged_handshake(client, proxy)
            outcomes[mode, proxy.ending] += 1
            note = f"case {number}: {proxy.name}, {mode}"
            assert clc.EYE_CATCHER not in got, note
            if mode == "tcp":
                assert FROM_SERVER.startswith(got), note

        async with trio.open_nursery() as handshakes:
            for number in range(cases):
                handshakes.start_soon(one, number)
        # The listener serves a healthy client as before.
        for _ in range(5):
            stream = await healthy.open_stream(*address_of(listener))
            assert stream.fallback is None
            got = bytearray()
            await talk(stream, FROM_CLIENT, got)
            assert got == FROM_SERVER
        nursery.cancel_scope.cancel()
    for got in at_server:
        assert clc.EYE_CATCHER not in got
    assert len({mode for mode, _ in outcomes}) == 3, outcomes
    tracebacks = [each.getMessage() for each in caplog.records if each.exc_info]
    assert not tracebacks
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


# --- peers by hand --------------------------------------------------------------------------------


def proposal() -> bytes:
    prefix = next(each for each in interface_prefixes(HOST) if each.is_ipv4)
    return clc.Proposal(
        peer_id=PEER_ID, gid=GID, mac=MAC, ipv4_subnet=prefix.network,
        ipv4_mask_length=prefix.length,
    ).encode()  # fmt: skip


def decline() -> bytes:
    return clc.Decline(peer_id=PEER_ID, diagnosis=0x03030000).encode()


@contextlib.asynccontextmanager
async def a_listener() -> AsyncIterator[tuple[Stack, SmcListener]]:
    async with open_stack(QUICK) as stack:
        listeners = await stack.open_listeners(0, host=HOST)
        yield stack, listeners[0]
        # The listener continues to serve.
        stream = await stack.open_stream(*address_of(listeners[0]))
        assert stream.mode is Mode.SMC_R
        accepted = await listeners[0].accept()
        await check_talk(stream, accepted)
        await stream.aclose()
        await accepted.aclose()


async def expect_reset(stream: trio.SocketStream) -> bytes:
    """The bytes that arrived before the peer reset or ended the connection."""
    data = b""
    with trio.fail_after(PATIENCE), contextlib.suppress(trio.BrokenResourceError):
        while piece := await stream.receive_some():
            data += piece
    return data


async def test_a_decline_and_the_applications_bytes_in_one_segment() -> None:
    async with a_listener() as (_, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        await raw.send_all(proposal())
        accept = await _read_message(raw)
        assert accept is not None
        assert (accept[4], accept[7]) == (clc.MessageType.ACCEPT, 0x18)
        await raw.send_all(decline() + b"application data")
        stream = await listener.accept()
        assert stream.mode is Mode.TCP
        assert stream.fallback is not None
        assert stream.fallback.peer_code == 0x03030000
        assert await stream.receive_some() == b"application data"
        await stream.send_all(b"answer")
        assert await raw.receive_some() == b"answer"
        await raw.aclose()
        await stream.aclose()


async def test_a_decline_in_lieu_of_a_proposal() -> None:
    async with a_listener() as (_, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        await raw.send_all(decline() + b"application data")
        stream = await listener.accept()
        assert stream.mode is Mode.TCP
        assert await stream.receive_some() == b"application data"
        await raw.aclose()
        await stream.aclose()


@contextlib.asynccontextmanager
async def a_server_by_hand(
    behave: Callable[[trio.SocketStream], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    async def carry(stream: trio.SocketStream) -> None:
        async with stream:
            assert await _read_message(stream) is not None
            await behave(stream)

    async with _one_client(carry) as address:
        yield address


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_a_server_declines_and_speaks_first(pieces: int) -> None:
    data = decline() + b"220 ready\r\n"

    async def behave(stream: trio.SocketStream) -> None:
        for place in range(0, len(data), pieces):
            await stream.send_all(data[place : place + pieces])
        assert await stream.receive_some() == b"EHLO"

    async with open_stack(QUICK) as stack, a_server_by_hand(behave) as address:
        stream = await stack.open_stream(*address)
        assert stream.mode is Mode.TCP
        assert await _read_exactly(stream, 11) == b"220 ready\r\n"
        await stream.send_all(b"EHLO")
        assert await stream.receive_some() == b""
        await stream.aclose()


@pytest.mark.rfc("C.6/1")
@pytest.mark.parametrize(
    "data",
    [b"220 ready\r\n", b"\0" * 100, clc.EYE_CATCHER + b"\2\0\x44", clc.EYE_CATCHER + b"\7" * 100],
    ids=["banner", "zeros", "part", "unknown"],
)
async def test_a_server_that_answers_something_else(data: bytes) -> None:
    """C.6: the client gets an OSError, and never a stream that contains the bytes."""

    async def behave(stream: trio.SocketStream) -> None:
        await stream.send_all(data)
        await stream.send_eof()
        await expect_reset(stream)

    async with open_stack(QUICK) as stack, a_server_by_hand(behave) as address:
        with pytest.raises(ConnectionResetError):
            await stack.open_stream(*address)


@pytest.mark.parametrize("how", ["fin", "rst", "silence", "drip"])
async def test_a_server_that_closes_or_is_silent(how: str) -> None:
    async def behave(stream: trio.SocketStream) -> None:
        if how == "rst":
            reset(stream)
        elif how == "silence":
            await expect_reset(stream)
        elif how == "drip":
            # One byte each 0.3 s: the header alone takes longer than the deadline.
            with contextlib.suppress(trio.BrokenResourceError):
                for byte in clc.EYE_CATCHER + b"\2\0\x44\x18" + bytes(60):
                    await stream.send_all(bytes((byte,)))
                    await trio.sleep(0.3)

    number = TimeoutError if how in ("silence", "drip") else ConnectionResetError
    async with open_stack(QUICK) as stack, a_server_by_hand(behave) as address:
        with trio.fail_after(PATIENCE), pytest.raises(number):
            await stack.open_stream(*address)


@pytest.mark.parametrize("tail", [b"GET / HTTP/1.1\r\n\r\n", b"x", decline()])
async def test_a_proposal_followed_at_once_by_something(tail: bytes) -> None:
    """C.1, C.6: the peer did not wait for the answer."""
    async with a_listener() as (stack, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        await raw.send_all(proposal() + tail)
        answer = await expect_reset(raw)
        # The server sent nothing, or a whole SMC Accept, before it noticed the other bytes.
        assert len(answer) in (0, 68)
        assert stack.statistics().handshakes_failed == 1
        await raw.aclose()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("state", ["part", "LISTENING", "ACCEPTED", "CONFIRMING_LINK"])
async def test_a_client_that_closes(state: str, how: str) -> None:
    """In each state of the server, no byte reaches an application.

    The application gets the connection, as over TCP, unless a part of a message was consumed or the
    link has failed.
    """
    async with a_listener() as (stack, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        if state == "part":
            await raw.send_all(proposal()[:30])
        else:
            await raw.send_all(proposal())
        if state in ("ACCEPTED", "CONFIRMING_LINK"):
            accept = await _read_message(raw)
            assert accept is not None
            if state == "CONFIRMING_LINK":
                other = clc.decode_untrusted(accept)
                assert isinstance(other, clc.Accept)
                # A queue pair of the server's own RNIC that will never answer.
                values = {each.name: getattr(other, each.name) for each in fields(clc.Confirm)}
                values |= {"peer_id": PEER_ID, "first_contact": False}
                await raw.send_all(clc.Confirm(**values).encode())
        if how == "rst":
            reset(raw)
        else:
            await raw.aclose()
        with trio.fail_after(PATIENCE):
            if state in ("LISTENING", "ACCEPTED"):
                stream = await listener.accept()
                assert stream.fallback is not None
                assert stream.fallback.reason is FallbackReason.ENDED_IN_HANDSHAKE
                if how == "rst":
                    with pytest.raises(trio.BrokenResourceError):
                        await stream.receive_some()
                else:
                    assert await stream.receive_some() == b""
                await stream.aclose()
            # A group ends in several passes of the scheduler if its memory takes long to free.
            while not stack.statistics().handshakes_failed or stack.link_groups:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_slow_clients_delay_no_other_client() -> None:
    """One deadline holds for a whole message, and the server serves other clients meanwhile."""
    async with a_listener() as (stack, listener):
        data = proposal()

        async def drip() -> None:
            raw = await trio.open_tcp_stream(*address_of(listener))
            async with raw:
                with contextlib.suppress(trio.BrokenResourceError):
                    for byte in data:
                        await raw.send_all(bytes((byte,)))
                        await trio.sleep(0.1)
                assert await expect_reset(raw) == b""

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(drip)
            await trio.sleep(0.3)
            stream = await stack.open_stream(*address_of(listener))
            assert stream.mode is Mode.SMC_R
            accepted = await listener.accept()
            await check_talk(stream, accepted)
            await stream.aclose()
            await accepted.aclose()
        assert stack.statistics().handshakes_failed == 20


async def test_whole_handshakes_byte_by_byte(rng: random.Random) -> None:
    """Both directions deliver single bytes.  The handshake succeeds, but takes longer."""
    async with open_stack(QUICK) as server, open_stack(QUICK) as client:
        (listener,) = await server.open_listeners(0, host=HOST)
        proxy = Proxy(listener, rng)
        proxy.place, proxy.pieces, proxy.ending = 99, 1, "go on"
        async with _one_client(proxy.carry) as address:
            stream = await client.open_stream(*address)
            assert stream.mode is Mode.SMC_R
            accepted = await listener.accept()
            await check_talk(stream, accepted)
            await stream.aclose()
            await accepted.aclose()


class _LateNegotiation:
    """A negotiation that proceeds at the moment of its time-out."""

    outgoing: ClassVar[list[bytes]] = []
    outcome: object = None
    has_final_message = False
    state = "PROPOSED"
    changed: Callable[[], None]
    machine = Machine(CLC_CLIENT, cast(Any, None))

    @property
    def awaits_clc(self) -> bool:
        return self.state == "PROPOSED"

    def advance(self, outcome: object) -> None:
        self.state = "CONFIRMING_LINK"
        self.changed()
        self.outcome = outcome

    def timed_out(self) -> None:
        assert self.state == "PROPOSED", "a time-out of an earlier state"
        self.outcome = Failed(TimeoutError("in time"))

    def tcp_lost(self) -> None:
        pass


async def test_an_answer_in_the_moment_of_the_time_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two tasks that wake at the same time run in random order.  An answer counts if it has arrived
    when the task of the handshake runs."""
    outcomes: Counter[str] = Counter()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sock = trio.socket.from_stdlib_socket(ours)
        for _ in range(200):
            negotiation = _LateNegotiation()
            answer = FellBack(Fallback.local(FallbackReason.LINK_FAILED))
            deadline = trio.current_time() + 1.0
            async with trio.open_nursery() as nursery:

                async def advance(negotiation: _LateNegotiation = negotiation) -> None:
                    await trio.sleep_until(deadline)  # noqa: B023
                    if negotiation.outcome is None:
                        negotiation.advance(answer)  # noqa: B023

                async def run_timers(timers: Timers) -> None:
                    await trio.sleep_until(deadline)  # noqa: B023
                    timers.run_due()

                timers = Timers(trio.current_time, lambda: None)
                nursery.start_soon(advance)
                nursery.start_soon(run_timers, timers)
                try:
                    core, spinner = cast(Any, negotiation), Spinner(0.0, bool)
                    await run_negotiation(core, sock, 1.0, timers, spinner)
                    outcomes["answer"] += 1
                except TimeoutError:
                    outcomes["time-out"] += 1
    assert outcomes == {"answer": 200}
