"""A process that stands still keeps its connections on one host, as over TCP."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

import trio_smc
from tests.e2e.test_careless import clear_directory
from tests.timing import PATIENCE
from trio_smc import Config, SmcStream, Stack
from trio_smc.datapath.rmb import Rmbe

HOST = "127.0.0.1"
TIMERS = {"test_link_interval": 0.1, "test_link_timeout": 0.1, "llc_timeout": 0.2}
PAST_ALL_TIMERS = 1.0
"""Seconds: three times the interval and the longest time-out together."""

ECHO = f"""
import sys, time, trio, trio_smc

async def echo(stream):
    async for data in stream:
        if data == b"block":
            time.sleep({PAST_ALL_TIMERS})  # a handler that blocks the loop
        await stream.send_all(data)

async def main():
    async with trio_smc.open_stack(trio_smc.Config(**{TIMERS!r})), trio.open_nursery() as nursery:
        [listener] = await nursery.start(lambda **kw: trio_smc.serve(echo, 0, host="{HOST}", **kw))
        print(listener.socket.getsockname()[1], flush=True)

trio.run(main)
"""


@pytest.fixture
async def server() -> AsyncIterator[tuple[trio.Process, int]]:
    """An echo server in another process, and its port."""
    process = await trio.lowlevel.open_process([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with trio.fail_after(PATIENCE):
        port = int(await process.stdout.receive_some())
    yield process, port
    process.kill()
    await process.wait()
    await process.stdout.aclose()
    await clear_directory()
    # A client would remove the names of a listener that was killed.
    shutil.rmtree(Config().private_directory() / "tcp")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[Stack, SmcStream]]:
    """A stack with short timers and a stream to the server."""
    async with (
        trio_smc.open_stack(Config(**TIMERS)) as stack,  # type: ignore[arg-type]
        await trio_smc.open_stream(HOST, port) as stream,
    ):
        assert stream.mode == "smc-r"
        await exchange(stream, b"before")
        yield stack, stream


async def exchange(stream: SmcStream, data: bytes) -> None:
    with trio.fail_after(PATIENCE):
        await stream.send_all(data)
        assert await stream.receive_some() == data


async def test_a_stopped_process(server: tuple[trio.Process, int]) -> None:
    process, port = server
    async with connected(port) as (_, stream):
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            await trio.sleep(PAST_ALL_TIMERS)
            await stream.send_all(b"meanwhile")
            process.send_signal(signal.SIGCONT)
            with trio.fail_after(PATIENCE):
                assert await stream.receive_some() == b"meanwhile"
            await exchange(stream, b"after")


async def test_a_handler_that_blocks(server: tuple[trio.Process, int]) -> None:
    _, port = server
    async with connected(port) as (_, blocking), await trio_smc.open_stream(HOST, port) as other:
        await exchange(blocking, b"block")
        await exchange(other, b"other")


async def test_a_request_of_rkeys_waits_for_a_stopped_process(
    server: tuple[trio.Process, int],
) -> None:
    process, port = server
    async with connected(port) as (stack, stream):
        [group] = stack.runtime.groups.groups
        elements: list[Rmbe | None] = []
        process.send_signal(signal.SIGSTOP)
        group.request_element(16 << 20, elements.append)
        await trio.sleep(PAST_ALL_TIMERS)
        assert not elements
        process.send_signal(signal.SIGCONT)
        await exchange(stream, b"after")
        [element] = elements
        assert element is not None
        group.own_rmbs.release(element, 0)


async def test_the_end_of_a_stopped_process_is_noticed(server: tuple[trio.Process, int]) -> None:
    process, port = server
    async with connected(port) as (_, stream):
        process.send_signal(signal.SIGSTOP)
        await trio.sleep(PAST_ALL_TIMERS)
        process.kill()
        with trio.fail_after(PATIENCE):
            assert await stream.receive_some() == b""
