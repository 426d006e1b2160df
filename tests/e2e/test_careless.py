"""Programs that never close their streams lose nothing that TCP would keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import trio_smc
from tests.e2e import careless
from tests.timing import PATIENCE, SLOWER
from trio_smc import Config, SmcStream
from trio_smc.rendezvous import handshake
from trio_smc.rendezvous.negotiation import Negotiation

QUICK_EXIT = 0.2 * SLOWER
"""Seconds, without the time for which others had the processor; a wait for the peer would take
`shutdown_timeout`, 5 s."""


QUIET = """
import trio, trio_smc

async def main():
    [listener] = await trio_smc.open_listeners(0, host="127.0.0.1")
    print(listener.socket.getsockname()[1], flush=True)
    async with listener, await listener.accept() as stream:
        while await stream.receive_some():
            pass
        print("the end", flush=True)

trio.run(main)
"""


class Seen:
    """The connections and ends that the server has seen."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []
        self.ended = trio.Event()

    async def handler(self, stream: SmcStream) -> None:
        """Count the received bytes and the kinds of ends."""
        assert stream.mode == "smc-r"
        count, end = 0, "end"
        try:
            while data := await stream.receive_some():
                count += len(data)
        except trio.BrokenResourceError:
            end = "error"
        self.ends.append((count, end))
        self.ended.set()

    async def wait(self, count: int) -> list[tuple[int, str]]:
        """All of them."""
        with trio.fail_after(PATIENCE):
            while len(self.ends) < count:
                self.ended = trio.Event()
                await self.ended.wait()
        return self.ends


@asynccontextmanager
async def serving(handler: object, **options: Any) -> AsyncIterator[int]:
    async with (
        trio_smc.open_stack(Config(tcp_option="off", learn_short=False, **options)),
        trio.open_nursery() as nursery,
    ):
        [listener] = await nursery.start(
            lambda **kw: trio_smc.serve(handler, 0, host=careless.HOST, **kw)  # type: ignore[arg-type]
        )
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()
    await clear_directory()


async def clear_directory() -> None:
    """The next process removes the files that a killed process has left there."""
    async with trio_smc.open_stack(Config(tcp_option="off", learn_short=False)):
        [listener] = await trio_smc.open_listeners(0, host=careless.HOST)
        await listener.aclose()


def command(how: str, smc: str, port: int, count: int) -> list[str]:
    return [sys.executable, "-m", careless.__name__, how, smc, str(port), str(count)]


async def run(how: str, smc: str, port: int, count: int = 1) -> trio.Process:
    process = await trio.lowlevel.open_process(
        command(how, smc, port, count), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    with trio.fail_after(PATIENCE):
        await process.wait()
    return process


@pytest.mark.parametrize("smc", ["ours", "enabled"])
@pytest.mark.parametrize("how", ["returns", "exit", "error", "interrupt", "forgets", "_exit"])
async def test_all_arrives_and_then_the_end(how: str, smc: str) -> None:
    seen = Seen()
    async with serving(seen.handler) as port:
        await run(how, smc, port, 3)
        assert await seen.wait(3) == [(len(careless.SENT), "end")] * 3


async def test_a_process_that_ends_behind_its_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server notices the end of the queue pair before it reads SMC Confirm: nothing is lost."""
    seen = Seen()
    clients: list[trio.Process] = []
    held: list[Negotiation] = []
    sent = Negotiation.sent

    def wait_for_its_end(negotiation: Negotiation) -> None:
        sent(negotiation)
        if negotiation.state == "ACCEPTED" and not negotiation.first_contact:
            held.append(negotiation)
            [client] = clients
            os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)

    async def wait_readable_later(sock: Any) -> None:
        for _ in range(50 if held else 0):
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.wait_readable(sock)

    monkeypatch.setattr(Negotiation, "sent", wait_for_its_end)
    monkeypatch.setattr(handshake, "wait_readable", wait_readable_later)
    async with serving(seen.handler, spin=0) as port:
        client = await trio.lowlevel.open_process(command("_exit", "ours", port, 2))
        clients.append(client)
        assert await seen.wait(2) == [(len(careless.SENT), "end")] * 2
        await client.wait()
    assert held


async def test_unread_data_makes_it_a_reset() -> None:
    ends: list[str] = []
    over = trio.Event()

    async def handler(stream: SmcStream) -> None:
        await stream.send_all(careless.HELLO)
        try:
            while await stream.receive_some():
                pass
            ends.append("end")
        except trio.BrokenResourceError as error:
            ends.append(type(error.__cause__).__name__)
        over.set()

    async with serving(handler) as port:
        process = await trio.lowlevel.open_process(
            command("waits", "ours", port, 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        with trio.fail_after(PATIENCE):
            await process.stdout.receive_some()
            await trio.sleep(0.2)
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()
            await over.wait()
    assert ends == ["ConnectionResetError"]


async def deaf(stream: SmcStream) -> None:
    """A handler that neither reads nor closes."""
    await trio.sleep_forever()


async def test_a_killed_process_prints_nothing_here() -> None:
    """In a program that has not configured logging."""
    server = await trio.lowlevel.open_process(
        [sys.executable, "-c", QUIET], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stdout is not None
    assert server.stderr is not None
    with trio.fail_after(PATIENCE):
        port = int(await server.stdout.receive_some())
        process = await trio.lowlevel.open_process(
            command("waits", "ours", port, 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdout.receive_some()
        process.kill()
        await process.wait()
        await process.stdin.aclose()
        await process.stdout.aclose()
        assert await server.stderr.receive_some() == b""
        assert (await server.stdout.receive_some()).strip() == b"the end"
        await server.wait()
        await server.stdout.aclose()
        await server.stderr.aclose()
    await clear_directory()


async def test_idle_streams_delay_no_exit() -> None:
    """Their peers never close."""
    async with serving(deaf) as port:
        assert await time_to_end("waits", port, 200) < QUICK_EXIT


async def test_an_interrupt_ends_the_wait_for_peers() -> None:
    """The end of a run waits for the peer's answer to a close, for at most `shutdown_timeout`."""
    async with serving(deaf) as port:
        assert await time_to_end("closes", port, 3, interrupt=True) < 0.5 + QUICK_EXIT


async def time_to_end(how: str, port: int, count: int, *, interrupt: bool = False) -> float:
    """Seconds from when the program returns until its run is over, but for those in which either
    end was to run and had to wait for a processor."""
    process = await trio.lowlevel.open_process(
        command(how, "ours", port, count), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with trio.fail_after(2 * PATIENCE):
        assert await process.stdout.receive_some(1) == b"\n"
        start, before = time.monotonic(), careless.waited()
        await process.stdin.aclose()
        if interrupt:
            await trio.sleep(0.5)
            process.send_signal(signal.SIGINT)
        received = b""
        while piece := await process.stdout.receive_some():
            received += piece
        await process.stdout.aclose()
        await process.wait()
    began, end, waited = map(float, received.split())
    return end - start - (waited - began) - (careless.waited() - before)
