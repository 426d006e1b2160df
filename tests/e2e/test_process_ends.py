"""A process that ends without closing its streams: its peer observes what TCP would show it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

import trio_smc
from tests.e2e import process_end
from tests.e2e.process_end import GREETING, HOST, sent
from tests.e2e.test_careless import clear_directory
from tests.timing import PATIENCE
from trio_smc import Config, SmcStream

TRANSPORTS = ("ours", "enabled")
HOWS = (
    "SIGTERM", "SIGHUP", "SIGINT", "SIGKILL", "SIGSEGV", "_exit", "exec", "exit", "error", "abort",
)  # fmt: skip


SENDS = 1400
"""More messages than a ring or a Unix socket takes, and fewer than that and a send queue."""


class Server:
    """Records what the streams of a plain handler observe."""

    def __init__(self) -> None:
        self.outcome: list[Any] = []
        self.over = trio.Event()
        self.goes_on: trio.Event | None = None
        """The handler waits for it after the greeting."""
        self.blocks: Callable[[], object] = lambda: None
        """The handler calls it after the greeting."""
        self.unread = b""
        """The handler sends it behind the greeting; the client does not read it."""
        self.modes: set[str] = set()

    async def handler(self, stream: SmcStream) -> None:
        """Exchange a greeting, read to the end, and send what has no reader."""
        self.modes.add(stream.mode)
        received = b""
        outcome: list[Any] = []
        try:
            await stream.receive_some(len(GREETING))
            await stream.send_all(GREETING + self.unread)
            self.blocks()
            if self.goes_on is not None:
                await self.goes_on.wait()
            while data := await stream.receive_some():
                received += data
            outcome.append("end")
        except trio.BrokenResourceError as error:
            outcome.append(type(error.__cause__))
        for _ in range(3):
            try:
                await stream.send_all(b"x")
                outcome.append("sent")
            except trio.BrokenResourceError as error:
                outcome.append(type(error.__cause__))
            await trio.sleep(0.01)  # TCP's reset is under way
        self.outcome = [received, *outcome]
        self.over.set()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[int]:
    async with (
        trio_smc.open_stack(Config(tcp_option="off", learn_short=False)),
        trio.open_nursery() as nursery,
    ):
        [listener] = await nursery.start(
            lambda **kw: trio_smc.serve(server.handler, 0, host=HOST, **kw)
        )
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()
    await clear_directory()


def command(transport: str, how: str, sends: int, size: int, port: int) -> list[str]:
    numbers = [str(number) for number in (sends, size, port)]
    return [sys.executable, "-m", process_end.__name__, transport, how, *numbers]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """A process for which a blocked loop can wait."""
    return subprocess.Popen(arguments)


@asynccontextmanager
async def running(arguments: list[str], *, stdin: int | None = None) -> AsyncIterator[trio.Process]:
    """A process with a pipe from its standard output; it is killed at the end, if it still runs."""
    process = await trio.lowlevel.open_process(arguments, stdin=stdin, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()


async def observe(
    transport: str, how: str, sends: int, size: int, *, unread: bytes = b""
) -> tuple[list[Any], int]:
    """The outcome of a server with such a client, and the client's exit status."""
    server = Server()
    server.unread = unread
    async with serving(server) as port:
        with trio.fail_after(2 * PATIENCE):
            client = await trio.run_process(
                command(transport, how, sends, size, port), check=False, stderr=subprocess.DEVNULL
            )
            await server.over.wait()
    assert server.modes == {"tcp" if transport == "tcp" else "smc-r"}
    return server.outcome, client.returncode


@pytest.mark.parametrize("how", HOWS)
async def test_all_data_and_the_end_arrive_as_over_tcp(how: str) -> None:
    """They arrive even if the process does not notice its own end; the exit status is the same."""
    reference, code = await observe("tcp", how, 20, 1000)
    assert reference[0] == b"".join(sent(number, 1000) for number in range(20))
    assert reference[1:] == ["end", "sent", BrokenPipeError, BrokenPipeError]
    for transport in TRANSPORTS:
        found, found_code = await observe(transport, how, 20, 1000)
        assert len(found[0]) == len(reference[0]), (transport, found[1:])
        assert (found, found_code) == (reference, code), transport


@pytest.mark.parametrize(
    ("how", "unread"),
    [*((how, b"x") for how in HOWS), ("SIGKILL", bytes(100_000))],
    ids=[*HOWS, "SIGKILL, much"],
)
async def test_unread_data_makes_the_end_a_reset_as_over_tcp(how: str, unread: bytes) -> None:
    """All data still arrives; TCP drops what was in the send buffer of the process."""
    reference, code = await observe("tcp", how, 20, 1000, unread=unread)
    ends = [ConnectionResetError, *[BrokenPipeError] * 3]
    assert reference[1:] == ends
    for transport in TRANSPORTS:
        found, found_code = await observe(transport, how, 20, 1000, unread=unread)
        assert found[0] == b"".join(sent(number, 1000) for number in range(20)), transport
        assert (found[1:], found_code) == (ends, code), transport


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", process_end.CLOSES)
async def test_a_process_that_has_closed_does_not_wait_for_its_peer(
    how: str, transport: str
) -> None:
    """Its peer reads the data and the end later, and sees TCP's errors when it sends."""
    observed = []
    for each in ("tcp", transport):
        server = Server()
        async with serving(server) as port:
            with trio.fail_after(2 * PATIENCE):
                server.goes_on = trio.Event()
                client = await trio.run_process(command(each, how, 20, 1000, port))
                assert not server.over.is_set()
                server.goes_on.set()
                await server.over.wait()
        assert server.modes == {"tcp" if each == "tcp" else "smc-r"}
        observed.append((server.outcome, client.returncode))
    assert observed[0] == observed[1]
    assert len(observed[0][0][0]) == 20_000


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_process_that_has_closed_does_not_wait_for_a_blocked_loop(transport: str) -> None:
    """Its peer answers no message about the end of the link group."""
    server = Server()
    async with serving(server) as port:
        with start(command(transport, "aclose", 20, 1000, port)) as client:
            server.blocks = partial(client.wait, PATIENCE)
            with trio.fail_after(2 * PATIENCE):
                await server.over.wait()
        assert client.returncode == 0
    assert server.modes == {"smc-r"}
    assert len(server.outcome[0]) == 20_000
    assert server.outcome[1:] == ["end", "sent", BrokenPipeError, BrokenPipeError]


@pytest.mark.parametrize(("sends", "size"), [(0, 1), (1, 1), (300, 40), (3, 500_000)])
async def test_data_that_was_not_announced_is_found(sends: int, size: int) -> None:
    """With amortised checkpoints many sends of one pass share a CDC message."""
    outcome, code = await observe("enabled", "SIGKILL", sends, size)
    assert code == -signal.SIGKILL
    assert outcome[0] == b"".join(sent(number, size) for number in range(sends))
    assert outcome[1:] == ["end", "sent", BrokenPipeError, BrokenPipeError]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_signal_ends_a_blocked_loop_at_once(transport: str, name: str) -> None:
    server = Server()
    number = getattr(signal, name)
    async with (
        serving(server) as port,
        running(command(transport, "block", 5, 1000, port)) as client,
    ):
        assert client.stdout is not None
        with trio.fail_after(2 * PATIENCE):
            await client.stdout.receive_some()
            client.send_signal(number)
            assert await client.wait() == -number
            await server.over.wait()
    assert server.outcome[0] == b"".join(sent(each, 1000) for each in range(5))
    assert server.outcome[1] == "end"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_data_that_waits_in_a_send_queue_leaves_no_gap(transport: str) -> None:
    """The server stands still, so that the client's link cannot announce all data."""
    async with running(
        [sys.executable, "-c", STANDING, str(SENDS)], stdin=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        with trio.fail_after(3 * PATIENCE):
            port = int(await read_line(server.stdout))
            async with running(command(transport, "block", SENDS, 10, port)) as client:
                assert client.stdout is not None
                await read_line(server.stdout)  # the server is connected and idle
                await client.stdout.receive_some()
            await server.stdin.send_all(b"\n")
            received, ending = (await read_line(server.stdout)).split()
            await server.wait()
    await clear_directory()
    assert (int(received), ending) == (10 * SENDS, b"end") or ending == b"ConnectionResetError"


async def read_line(pipe: trio.abc.ReceiveStream) -> bytes:
    """One line, which may come in pieces."""
    line = b""
    while not line.endswith(b"\n"):
        piece = await pipe.receive_some(1)
        assert piece
        line += piece
    return line


STANDING = """
import os, sys, trio, trio_smc

async def main():
    [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
    print(listener.socket.getsockname()[1], flush=True)
    async with listener, await listener.accept() as stream:
        await stream.receive_some(5)
        await stream.send_all(b"hello")
        await trio.sleep(0)
        print("stands", flush=True)
        os.read(0, 1)
        expected = b"".join(bytes([n % 251]) * 10 for n in range(int(sys.argv[1])))
        received, ending = b"", b"end"
        try:
            while data := await stream.receive_some():
                received += data
        except trio.BrokenResourceError as error:
            ending = type(error.__cause__).__name__.encode()
        assert expected.startswith(received)
        print(len(received), ending.decode(), flush=True)

trio.run(main)
"""
