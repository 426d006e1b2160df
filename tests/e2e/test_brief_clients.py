"""Clients that end before their server has accepted them: it accepts them all, as over TCP.

An unmodified server counts its clients, writes them to a log, or waits for a number of them.  TCP
hands over each connection that was made, whatever has become of it since.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from socket import IPPROTO_TCP, SO_KEEPALIVE, SO_REUSEADDR, SOL_SOCKET, TCP_KEEPIDLE
from typing import Any

import pytest
import trio

import trio_smc
from tests.e2e import brief_client
from tests.e2e.brief_client import CONNECTIONS, HOST
from tests.e2e.test_careless import clear_directory
from tests.timing import PATIENCE
from trio_smc import Config


async def observe(transport: str, how: str, size: int) -> list[tuple[bytes, Any, Any]]:
    """Return for each connection what the server received, and the kinds of errors behind it: of
    receiving, and of ending its own side."""
    config = Config(tcp_option="off", learn_short=False)
    seen: list[tuple[bytes, Any, Any]] = []
    async with trio_smc.open_stack(config) as stack:
        [listener] = await stack.open_listeners(0, host=HOST)
        arguments = [transport, how, size, listener.socket.getsockname()[1]]
        command = [sys.executable, "-m", brief_client.__name__, *map(str, arguments)]
        modes = set()
        with trio.fail_after(2 * PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_client, command)
                while len(seen) < CONNECTIONS:
                    stream = await listener.accept()
                    modes.add(stream.mode)
                    stream.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)  # as many servers do at once
                    assert stream.getsockopt(SOL_SOCKET, SO_KEEPALIVE) == 1
                    assert stream.getsockopt(IPPROTO_TCP, TCP_KEEPIDLE) != 0
                    assert stream.getsockopt(SOL_SOCKET, SO_REUSEADDR) == 1
                    received, error, own_error = b"", None, None
                    try:
                        while data := await stream.receive_some():
                            received += data
                    except trio.BrokenResourceError as broken:
                        error = type(broken.__cause__)
                    try:
                        await stream.send_eof()
                    except trio.BrokenResourceError as broken:
                        own_error = getattr(broken.__cause__, "errno", None)
                    seen.append((received, error, own_error))
                    await trio.aclose_forcefully(stream)
        await listener.aclose()
    await clear_directory()
    assert modes == {"tcp" if transport == "tcp" else "smc-r"}
    return seen


async def run_client(command: list[str]) -> None:
    await trio.run_process(command, check=False, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("size", [0, 3], ids=["silent", "sends"])
@pytest.mark.parametrize("how", ["reset", "close", "leave", "SIGKILL"])
async def test_a_client_that_ends_at_once_is_accepted_as_over_tcp(how: str, size: int) -> None:
    reference = await observe("tcp", how, size)
    errors = (ConnectionResetError, errno.ENOTCONN) if how == "reset" else (None, None)
    assert reference == [(b"x" * size, *errors)] * CONNECTIONS
    assert await observe("enabled", how, size) == reference
