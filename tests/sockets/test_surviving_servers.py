"""A plain `trio.serve_tcp` server over SMC-R survives all clients that it survives over TCP.

The handler catches no exception, so any error that a client causes ends the server.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.timing import PATIENCE

SERVER = """
import sys, trio, trio_smc

async def shout(stream):
    async for data in stream:
        await stream.send_all(data.upper())
    if sys.argv[2] == "late":
        assert stream.socket.getpeername()[0] == "127.0.0.1"
        await stream.send_all(b"good bye")

async def serve():
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listener.socket.getsockname()[1], flush=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, shout, [listener])
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()

if sys.argv[1] != "tcp":
    trio_smc.enable(trio_smc.Config(require_smc=sys.argv[1] == "smc", learn_short=False))
trio.run(serve)
"""

DYING_CLIENT = """
import os, signal, sys, trio, trio_smc

async def connect():
    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(trio.open_tcp_stream, "127.0.0.1", int(sys.argv[2]))
        await trio.sleep(float(sys.argv[3]))
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] != "tcp":
    trio_smc.enable(trio_smc.Config(require_smc=sys.argv[1] == "smc", learn_short=False))
trio.run(connect)
"""


class Server:
    """A running `SERVER`.

    Attributes:
      transport: "tcp", "smc", or "either": then a connection may become TCP in its handshake.
    """

    def __init__(self, process: trio.Process, port: int, transport: str) -> None:
        self.process = process
        self.port = port
        self.transport = transport

    async def connect(self) -> trio.SocketStream:
        """Open a connection, and wait until the server's handler has answered."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"HELLO"
        return stream

    async def check(self) -> None:
        """Check that the server serves another client."""
        await (await self.connect()).aclose()
        assert self.process.poll() is None


@pytest.fixture(params=["tcp", "smc"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """Run the server over TCP, which shows the expected result, and over SMC-R."""
    transport, _, late = request.param.partition(" ")
    if transport != "tcp":
        trio_smc.enable(trio_smc.Config(require_smc=transport == "smc", learn_short=False))
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", SERVER, transport, late],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(PATIENCE):
            yield Server(process, int(await process.stdout.receive_some()), transport)
            await process.stdin.aclose()
            assert await process.wait() == 0
    finally:
        process.kill()
        await process.wait()
        await process.stdin.aclose()
        await process.stdout.aclose()
        trio_smc.disable()


@pytest.mark.parametrize("how", ["closes", "half-closes and closes", "forces a close"])
async def test_a_client_that_sends_and_closes_without_reading(server: Server, how: str) -> None:
    """The test stops the server, so that its answer cannot arrive before the close."""
    stream = await server.connect()
    server.process.send_signal(signal.SIGSTOP)
    await stream.send_all(b"unanswered")
    if how == "half-closes and closes":
        await stream.send_eof()
    if how == "forces a close":
        await trio.aclose_forcefully(stream)
    else:
        await stream.aclose()
    server.process.send_signal(signal.SIGCONT)
    await server.check()


async def test_a_client_that_half_closes_and_closes_with_unread_data(server: Server) -> None:
    """For a reader, a reset after the end of the stream is not an error."""
    stream = await server.connect()
    await stream.send_all(b"unread")
    assert await stream.receive_some(1) == b"U"
    await stream.send_eof()
    await stream.aclose()
    await server.check()


each_transport = pytest.mark.parametrize("server", ["tcp", "smc", "either"], indirect=True)


@each_transport
async def test_a_client_that_gives_up_while_it_connects(server: Server) -> None:
    """The deadlines end in all parts of the handshake.  Each handler reads the end of its stream,
    if there is a handler."""
    for number in range(150):
        with trio.move_on_after(number * 40e-6):
            await (await trio.open_tcp_stream("127.0.0.1", server.port)).aclose()
    await server.check()


@pytest.mark.parametrize(
    "server", ["tcp", "smc", "either", "tcp late", "either late"], indirect=True
)
async def test_a_client_that_is_killed_while_it_connects(
    server: Server, runtime_directory: Path
) -> None:
    """The kernel of a client that has not read a CLC message resets the connection.

    "late": the server answers when it has read the end.
    """
    for seconds in ("0.002", "0.005", "0.01", "0.02"):
        client = [sys.executable, "-c", DYING_CLIENT, server.transport, str(server.port), seconds]
        died = await trio.run_process(client, check=False)
        assert died.returncode == -signal.SIGKILL
    await server.check()
    # Names of the killed processes, which another process would remove only later.
    shutil.rmtree(runtime_directory / "trio-smc" / "announced", ignore_errors=True)
