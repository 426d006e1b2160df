"""Peers for tests of the public API: plain TCP peers, and peers that send CLC messages by hand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import trio

import trio_smc
from tests.timing import PATIENCE
from trio_smc import Config, SmcListener, SmcStream, Stack
from trio_smc.wire import clc

HOST = "127.0.0.1"
QUICK = Config(receive_buffer=16384, close_timeout=2 * PATIENCE, shutdown_timeout=20)
ASSUME = Config(receive_buffer=16384, discovery="assume")
PEER_ID = b"\x00\x01\x02\x00\x00\x00\x00\x09"
GID = bytes.fromhex("fd534d43520000000102030405060708")
MAC = b"\x02\x00\x00\x00\x00\x09"


@contextlib.asynccontextmanager
async def plain_server(host: str = HOST, *, port: int = 0) -> AsyncIterator[trio.SocketListener]:
    """A plain TCP listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with trio.socket.socket(family) as sock:
        await sock.bind((host, port))
        sock.listen()
        yield trio.SocketListener(sock)


def address_of(listener: SmcListener | trio.SocketListener) -> tuple[str, int]:
    """The address and port to connect to."""
    host, port = listener.socket.getsockname()[:2]
    return {"0.0.0.0": HOST, "::": "::1"}.get(host, host), port


async def plain_client(listener: SmcListener | trio.SocketListener) -> trio.SocketStream:
    """A plain TCP connection to a listener."""
    return await trio.open_tcp_stream(*address_of(listener))


async def connect(
    stack: Stack, listener: SmcListener, config: Config | None = None
) -> tuple[SmcStream, SmcStream]:
    """Both ends of a new connection, client first. Other accepted connections are closed."""
    with trio.fail_after(PATIENCE):
        stream = await stack.open_stream(*address_of(listener), config=config)
        while True:
            accepted = await listener.accept()
            with contextlib.suppress(OSError):  # raised if the connection was reset
                if accepted.socket.getpeername()[:2] == stream.socket.getsockname()[:2]:
                    return stream, accepted
            await accepted.aclose()


async def close_all(*streams: trio.abc.AsyncResource) -> None:
    """Close streams, each in a task of its own."""
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.aclose)


async def check_talk(one: trio.abc.Stream, other: trio.abc.Stream) -> None:
    """Check that a few bytes arrive in each direction."""
    for sender, receiver in ((one, other), (other, one)):
        await sender.send_all(b"some bytes")
        received = b""
        with trio.fail_after(PATIENCE):
            while len(received) < 10:
                received += await receiver.receive_some()
        assert received == b"some bytes"


async def check_serves(stack: Stack, listener: SmcListener, config: Config | None = None) -> None:
    """Check that the listener accepts an SMC-R connection."""
    stream, accepted = await connect(stack, listener, config)
    assert (stream.fallback, accepted.fallback) == (None, None)
    await check_talk(stream, accepted)
    await close_all(stream, accepted)


async def wait_until_freed(stack: Stack) -> None:
    """Wait until the stack has no connection, closing ones included."""
    with trio.fail_after(PATIENCE):
        while stack.statistics().open_connections:  # noqa: ASYNC110  # a counter has no event
            await trio.sleep(0.001)


# --- CLC messages ------------------------------------------------------------------------------


async def read_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Receive exactly ``count`` bytes."""
    data = b""
    with trio.fail_after(PATIENCE):
        while len(data) < count:
            piece = await stream.receive_some(count - len(data))
            assert piece, f"the stream ended after {data!r}"
            data += piece
    return data


async def read_clc(stream: trio.abc.ReceiveStream) -> clc.Message:
    """Receive the next CLC message."""
    header = await read_exactly(stream, clc.HEADER_SIZE)
    rest = clc.message_length_untrusted(header) - len(header)
    return clc.decode_untrusted(header + await read_exactly(stream, rest))


async def read_to_end(stream: trio.abc.ReceiveStream) -> bytes | OSError:
    """Receive all bytes.  Returns the error instead if the connection is reset."""
    data = b""
    with trio.fail_after(PATIENCE):
        try:
            while piece := await stream.receive_some():
                data += piece
        except trio.BrokenResourceError as error:
            return error.__cause__ if isinstance(error.__cause__, OSError) else OSError()
    return data


def proposal(**changes: object) -> clc.Proposal:
    """A Proposal over the loopback network."""
    fields: dict[str, object] = {
        "peer_id": PEER_ID, "gid": GID, "mac": MAC, "ipv4_subnet": bytes((127, 0, 0, 0)),
        "ipv4_mask_length": 8,
    }  # fmt: skip
    return clc.Proposal(**(fields | changes))  # type: ignore[arg-type]


def accept(**changes: object) -> clc.Accept:
    """An Accept of a peer that does not exist."""
    fields: dict[str, object] = {
        "peer_id": PEER_ID, "gid": GID, "mac": MAC, "qp_number": 7, "rkey": 8, "rmbe_index": 1,
        "alert_token": 9, "buffer_size_code": 0, "qp_mtu": 5, "rmb_address": 4096,
        "initial_psn": 1, "first_contact": True,
    }  # fmt: skip
    return clc.Accept(**(fields | changes))  # type: ignore[arg-type]


def decline(diagnosis: int) -> clc.Decline:
    """A Decline with this diagnosis word."""
    return clc.Decline(peer_id=PEER_ID, diagnosis=diagnosis)


@dataclass
class Outcome:
    """The result of `open_stream`: a stream or an error."""

    stream: SmcStream | None = None
    error: OSError | None = None


async def open_to(
    peer: Callable[[trio.SocketStream], Awaitable[None]], config: Config = ASSUME
) -> Outcome:
    """Call `open_stream` to a server whose connection ``peer`` handles.

    The connection is closed when ``peer`` and the client have finished.  A peer that checks the
    end of the stream waits for it.
    """
    outcome = Outcome()
    async with plain_server() as listener, trio_smc.open_stack(config) as stack:

        async def serve() -> None:
            async with await listener.accept() as stream:
                await peer(stream)

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                try:
                    outcome.stream = await stack.open_stream(*address_of(listener))
                except OSError as error:
                    outcome.error = error
                else:
                    await outcome.stream.send_all(b"application")
                    await outcome.stream.aclose()
    return outcome
