"""Each example server survives clients that reset, are killed, or do not speak its protocol."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 4 * PATIENCE
RESET = trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
UPGRADE = (
    b"GET /example HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
GREETINGS = {
    "echo_server": b"hello",
    "tls": b"hello",
    "anyio_echo": b"hello\n",
    "web": b"GET /hello/me HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "websocket": UPGRADE,
    "demo_peer": b"U" + (2).to_bytes(8, "big") + b"xx",
}
"""A request of each server's protocol, after which the server answers."""
ROLES = {"echo_server": ("0",), "demo_peer": ("serve", "smc")}
KILLED = """
import os, signal, sys, trio, trio_smc
async def main():
    stream = await trio_smc.open_stream("localhost", int(sys.argv[1]))
    assert stream.mode == "smc-r", stream.fallback
    await stream.send_all(bytes.fromhex(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


@dataclass
class Server:
    """A running example, and what it has printed so far."""

    process: trio.Process
    port: int
    ca: str
    output: bytearray


@contextlib.asynccontextmanager
async def serving(name: str) -> AsyncIterator[Server]:
    """Run an example's server, and stop it by Ctrl-C."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-u", "-m", f"examples.{name}", *ROLES.get(name, ("serve",))], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    output = bytearray()
    try:
        async with trio.open_nursery() as nursery:
            started = trio.Event()

            async def read() -> None:
                assert process.stdout is not None
                async for piece in process.stdout:
                    output.extend(piece)
                    if b"\n" in output:
                        started.set()
                started.set()

            nursery.start_soon(read)
            with trio.fail_after(LIMIT):
                await started.wait()
                words = bytes(output).replace(b"}", b" ").split()
                port = next((int(each) for each in words if each.isdigit()), None)
                assert port is not None, bytes(output)
                ca = bytes(words[-1]).decode()
                yield Server(process, port, ca, output)
                process.send_signal(signal.SIGINT)
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await process.stdin.aclose()
        await process.stdout.aclose()
        sys.stdout.write(output.decode())


async def connected(server: Server, tls: bool) -> trio.abc.Stream:
    """A TCP connection to the server, with TLS on top if the server has it."""
    stream = await trio.open_tcp_stream("localhost", server.port)
    if not tls:
        return stream
    context = ssl.create_default_context(cafile=server.ca)
    secure = trio.SSLStream(stream, context, server_hostname="localhost")
    await secure.do_handshake()
    return secure


async def reset(stream: trio.abc.Stream) -> None:
    """End the connection by RST."""
    transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    assert isinstance(transport, trio.SocketStream)
    transport.setsockopt(*RESET)
    await trio.aclose_forcefully(transport)


@pytest.mark.parametrize("name", GREETINGS)
async def test_an_example_server_survives(name: str) -> None:
    tls = name in ("tls", "anyio_echo", "web")
    greeting = GREETINGS[name]
    async with serving(name) as server:
        for secure in {False, tls}:
            for data in (b"", greeting, greeting[:-1], b"\xff" * 5000, greeting * 2000):
                for end in (reset, trio.aclose_forcefully):
                    stream = await connected(server, secure)
                    with contextlib.suppress(trio.BrokenResourceError):
                        with trio.move_on_after(0.3):  # a server may stop to read
                            await stream.send_all(data)
                        if data == greeting:
                            with trio.move_on_after(1):  # without TLS there is no answer
                                await stream.receive_some()
                    await end(stream)
        words = [sys.executable, "-c", KILLED, str(server.port), (greeting * 100).hex()]
        done = await trio.run_process(words, check=False)
        assert done.returncode == -signal.SIGKILL
        stream = await connected(server, tls)
        await stream.send_all(greeting)
        assert await stream.receive_some()
        await trio.aclose_forcefully(stream)
        assert server.process.poll() is None
    async with trio_smc.open_stack():
        pass  # removes the socket that the killed client has left
    assert b"Traceback" not in server.output, server.output.decode()
    assert server.process.returncode in (0, 130), server.output.decode()
