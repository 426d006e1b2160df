"""Clients under `discovery="assume"` that end the connection early, or send no CLC message.

Unless a CLC message has begun, the application gets the connection like any TCP connection."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import trio

from tests.api.api_peers import ASSUME, HOST, address_of, proposal
from tests.timing import PATIENCE
from trio_smc import Mode, SmcListener, Stack, open_stack
from trio_smc._base.reasons import FallbackReason
from trio_smc.wire import clc

# Longer than any wait of these tests, so that the received bytes decide, not the time.
LATER = replace(ASSUME, handshake_timeout=10 * PATIENCE)


@contextlib.asynccontextmanager
async def open_listener() -> AsyncIterator[tuple[Stack, SmcListener]]:
    async with open_stack(LATER) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        yield stack, listener


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def wait_until_acknowledged(stream: trio.SocketStream) -> None:
    """Wait until the peer's kernel has acknowledged the data, so that a reset comes later."""
    with trio.fail_after(PATIENCE):
        while fcntl.ioctl(stream.socket.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4):
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("how", ["eof", "close"])
async def test_a_client_that_ends_before_an_eye_catcher_is_handed_over(
    count: int, how: str
) -> None:
    async with open_listener() as (stack, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        name = raw.socket.getsockname()
        if count:
            await raw.send_all(clc.EYE_CATCHER[:count])
        await (raw.send_eof() if how == "eof" else raw.aclose())
        with trio.fail_after(PATIENCE):
            stream = await listener.accept()
            assert stream.mode is Mode.TCP
            assert stream.fallback is not None
            assert stream.fallback.reason is FallbackReason.PEER_NOT_CAPABLE
            assert stream.socket.getpeername()[:2] == name[:2]
            data = b""
            while piece := await stream.receive_some():
                data += piece
            assert data == clc.EYE_CATCHER[:count]
            if how == "eof":
                await stream.send_all(b"answer")
                assert await raw.receive_some() == b"answer"
        assert stack.statistics().handshakes_failed == 0
        await stream.aclose()
        await raw.aclose()


@pytest.mark.parametrize("count", range(4))
async def test_a_client_that_resets_before_an_eye_catcher_is_handed_over(count: int) -> None:
    """The application reads the data, and then gets the error, like over TCP."""
    async with open_listener() as (stack, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        if count:
            await raw.send_all(clc.EYE_CATCHER[:count])
            await wait_until_acknowledged(raw)
        reset(raw)
        with trio.fail_after(PATIENCE):
            stream = await listener.accept()
            if count:
                assert await stream.receive_some() == clc.EYE_CATCHER[:count]
            with pytest.raises(trio.BrokenResourceError) as caught:
                await stream.receive_some()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.ECONNRESET
        assert stack.statistics().handshakes_failed == 0
        await stream.aclose()


@pytest.mark.parametrize("count", range(4))
async def test_a_client_that_sends_something_else_is_handed_over(count: int) -> None:
    async with open_listener() as (_, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        for byte in clc.EYE_CATCHER[:count]:
            await raw.send_all(bytes((byte,)))
            await wait_until_acknowledged(raw)
        await raw.send_all(b"!")
        with trio.fail_after(PATIENCE):
            stream = await listener.accept()
            assert stream.mode is Mode.TCP
            data = b""
            while len(data) <= count:
                data += await stream.receive_some()
        assert data == clc.EYE_CATCHER[:count] + b"!"
        await stream.aclose()
        await raw.aclose()


@pytest.mark.parametrize("count", range(1, 4))
async def test_an_urgent_byte_within_an_eye_catcher_is_handed_over(count: int) -> None:
    """`recv` stops before an urgent byte, and the socket stays readable.  The server must not
    spin."""
    async with open_listener() as (_, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        await raw.send_all(clc.EYE_CATCHER[:count])
        await wait_until_acknowledged(raw)
        await raw.socket.send(b"!", socket.MSG_OOB)
        await raw.send_all(clc.EYE_CATCHER[count:])
        with trio.fail_after(PATIENCE):
            stream = await listener.accept()
            assert stream.mode is Mode.TCP
            data = b""
            while len(data) < len(clc.EYE_CATCHER):
                data += await stream.receive_some()
        assert data == clc.EYE_CATCHER
        await stream.aclose()
        await raw.aclose()


@pytest.mark.rfc("C.6/1", "C.6/2")
@pytest.mark.parametrize("count", range(4, 8))
@pytest.mark.parametrize("how", ["eof", "reset", "something else"])
async def test_part_of_a_header_ends_the_connection(count: int, how: str) -> None:
    """After a complete eye catcher, the bytes are CLC, and never reach an application."""
    header = proposal().encode()[:8]
    async with open_listener() as (stack, listener):
        raw = await trio.open_tcp_stream(*address_of(listener))
        for byte in header[:count]:
            await raw.send_all(bytes((byte,)))
            await wait_until_acknowledged(raw)
        if how == "eof":
            await raw.send_eof()
        elif how == "reset":
            reset(raw)
        else:
            await raw.send_all({4: b"\x05", 5: b"\x05", 6: b"\x00", 7: b"\x00"}[count])
        with trio.fail_after(PATIENCE):
            if how != "reset":
                with contextlib.suppress(trio.BrokenResourceError):
                    assert await raw.receive_some() == b""
            while not stack.statistics().handshakes_failed:  # noqa: ASYNC110 (a counter)
                await trio.sleep(0.001)
        with trio.move_on_after(0), pytest.raises(trio.Cancelled):
            await listener.accept()
        await raw.aclose()
