"""Same-host discovery between several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

import trio_smc
from tests.rendezvous.discovery.world import (
    LONG,
    SHORT,
    agree,
    announce,
    bound,
    deadline_after,
    serving,
    short_path,
    sockets_below,
)
from tests.timing import PATIENCE
from trio_smc._base.reasons import FallbackReason, Origin
from trio_smc.rendezvous.discovery.same_host import Discovery

WORKER = Path(__file__).with_name("worker.py")


class Worker:
    """A process of `tests.rendezvous.discovery.worker`."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._text = b""

    async def line(self) -> str:
        assert self.process.stdout is not None
        with trio.fail_after(PATIENCE):
            while b"\n" not in self._text:
                more = await self.process.stdout.receive_some()
                assert more, "the worker ended"
                self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


@contextlib.asynccontextmanager
async def worker(
    private: Path,
    kind: str = "smc",
    port: int = 0,
    address: str = "127.0.0.1",
    inherited: socket.socket | None = None,
) -> AsyncIterator[tuple[Worker, int]]:
    command = [sys.executable, str(WORKER), str(private), address, str(port), kind]
    descriptors = () if inherited is None else (inherited.fileno(),)
    command += map(str, descriptors)
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[3])}
    async with trio.open_nursery() as nursery:

        async def start(task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=descriptors,
                check=False,
                task_status=task_status,
            )

        process: trio.Process = await nursery.start(start)
        try:
            made = Worker(process)
            yield made, int(await made.line())
        finally:
            if process.stdin is not None:
                await process.stdin.aclose()
            with trio.move_on_after(PATIENCE, shield=True):
                await process.wait()
            if process.stdout is not None:
                await process.stdout.aclose()
            nursery.cancel_scope.cancel()


async def call_worker(private: Path, port: int, wait: float = LONG) -> tuple[bool, bytes]:
    """Connect; returns True for an agreement on SMC-R, and the mode that the worker reports."""
    async with bound() as client:
        with await announce(private, client, ("127.0.0.1", port)) as announcement:
            await client.connect(("127.0.0.1", port))
            agreed = await announcement.accepted(deadline_after(wait)) is None
            await client.send(b"C" if agreed else b"A")
            return agreed, await client.recv(100)


async def test_two_processes(private: Path) -> None:
    async with worker(private) as (_, port):
        for _ in range(20):
            assert await call_worker(private, port) == (True, b"smc-r")


async def test_of_several_processes_the_accepting_one_answers(private: Path) -> None:
    async with worker(private) as (first, port), worker(private, port=port) as (second, _):
        assert len(sockets_below(private)) == 2
        for _ in range(30):
            assert await call_worker(private, port) == (True, b"smc-r")
        for each in (first, second):
            # Each process accepted some: the kernel's hash picks one process for all 30 connections
            # only once in 2^29 runs.
            assert await each.line() == "smc-r"


async def test_a_plain_process_on_the_same_port_is_never_sent_clc(private: Path) -> None:
    async with worker(private) as (_, port), worker(private, "plain", port):
        seen = set()
        for _ in range(60):
            agreed, word = await call_worker(private, port, wait=0.2)
            seen.add((agreed, word))
            if len(seen) == 2:
                break
        assert seen == {(True, b"smc-r"), (False, b"tcp")}


async def test_a_plain_server_on_the_specific_address(private: Path) -> None:
    async with worker(private, address="0.0.0.0") as (_, port):
        with trio.socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await plain.bind(("127.0.0.1", port))
            plain.listen(5)
            async with bound() as client:
                announcement = await announce(private, client, ("127.0.0.1", port))
                await client.connect(("127.0.0.1", port))
                reason = await announcement.accepted(deadline_after(SHORT))
                assert reason is FallbackReason.PEER_NOT_CAPABLE
                connection, _ = await plain.accept()
                with connection:
                    client.shutdown(socket.SHUT_WR)
                    assert await connection.recv(1) == b""


async def test_the_socket_of_a_killed_process_is_removed(private: Path) -> None:
    async with worker(private) as (killed, port):
        assert len(sockets_below(private)) == 1
        killed.process.kill()
        await killed.process.wait()
        assert len(sockets_below(private)) == 1
        there = ("127.0.0.1", port)
        outcome = Discovery(private).announce(("127.0.0.1", 1), there)
        assert outcome is FallbackReason.PEER_NOT_CAPABLE
        assert sockets_below(private) == []


async def test_publishing_removes_sockets_of_dead_processes(private: Path) -> None:
    async with worker(private) as (killed, port):
        killed.process.kill()
        await killed.process.wait()
        async with serving(private, port=port) as server:
            assert len(sockets_below(private)) == 1
            await agree(private, server, server.address)
    assert sockets_below(private) == []


async def test_a_stopped_process_delays_no_other(private: Path) -> None:
    """The worker's queue is full of unread messages."""
    async with serving(private) as server:
        (name,) = sockets_below(private)
        with (
            short_path(name.parent / "1-stopped") as path,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            stopped.bind(path)
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.sendto(b"?", path)
            with trio.fail_after(PATIENCE):
                await agree(private, server, server.address)
            os.unlink(path)


@pytest.mark.parametrize("shared", ["port", "socket"])
async def test_a_worker_that_is_killed(shared: str, private: Path) -> None:
    """Connections that only the killed worker could accept end.  All others are SMC-R."""
    results: list[tuple[bool, bytes]] = []
    connected = 0

    async def call(port: int) -> None:
        nonlocal connected
        async with bound() as client:
            with await announce(private, client, ("127.0.0.1", port)) as announcement:
                await client.connect(("127.0.0.1", port))
                connected += 1
                agreed = await announcement.accepted(deadline_after()) is None
                word = b""
                with contextlib.suppress(ConnectionError):
                    await client.send(b"C" if agreed else b"A")
                    word = await client.recv(100)
                results.append((agreed, word))

    with socket.socket() as listening, contextlib.ExitStack() as stopped:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        inherited = listening if shared == "socket" else None
        async with (
            worker(private, inherited=inherited) as (first, port),
            worker(private, port=port, inherited=inherited) as (second, _),
        ):
            for each in (first, second):
                each.process.send_signal(signal.SIGSTOP)
                stopped.callback(each.process.send_signal, signal.SIGCONT)
            async with trio.open_nursery() as nursery:
                # Sooner than the deadline of each call.
                nursery.cancel_scope.deadline = deadline_after(PATIENCE)
                for _ in range(16):
                    nursery.start_soon(call, port)
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert connected == 16
                first.process.kill()
                await first.process.wait()
                second.process.send_signal(signal.SIGCONT)
            assert len(results) == 16
            # The kernel's hash picks one process for all 16 connections once in 32,768 runs.
            ended = {(False, b"")} if shared == "port" else set()
            assert set(results) == {(True, b"smc-r")} | ended
            for _ in range(10):
                assert await call_worker(private, port) == (True, b"smc-r")
            assert len(sockets_below(private)) == 1


OTHER_RELEASE = """
import trio
import trio_smc
from trio_smc.rendezvous.discovery import announcing, publication
from trio_smc.rnic.soft import messages

for module in (announcing, publication, messages):
    module.VERSION += 1

async def main():
    async with trio_smc.open_stack() as stack:
        (listener,) = await stack.open_listeners(0, host="127.0.0.1")
        async with listener:
            print(listener.socket.getsockname()[1], flush=True)
            async with await listener.accept() as stream:
                await stream.send_all(f"{stream.fallback.origin} {stream.fallback.reason}".encode())

trio.run(main)
"""


async def test_two_releases_side_by_side(runtime_directory: Path) -> None:
    """Their software RNICs differ, so both processes use TCP, and know the reason."""
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[3])}
    command = [sys.executable, "-c", OTHER_RELEASE]
    async with trio_smc.open_stack() as stack, trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdout=subprocess.PIPE, env=environment)
        process: trio.Process = await nursery.start(run)
        port = int(await Worker(process).line())
        with trio.fail_after(PATIENCE):
            async with await stack.open_stream("127.0.0.1", port) as stream:
                assert stream.fallback is not None
                assert stream.fallback.reason is FallbackReason.VERSION_MISMATCH
                assert stream.fallback.origin is Origin.LOCAL
                assert await stream.receive_some() == b"peer version-mismatch"
        assert process.stdout is not None
        await process.wait()
        await process.stdout.aclose()
