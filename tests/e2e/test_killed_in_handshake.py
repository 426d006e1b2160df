"""A process is killed in the middle of a handshake: its peer gets the connection, and then its end.

Over TCP the kernel has made the connection by then, whatever becomes of the two processes.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import trio

import trio_smc
from tests.e2e import killed_in_handshake
from tests.e2e.killed_in_handshake import CONFIG, HOST
from tests.e2e.test_process_ends import running
from tests.timing import PATIENCE
from trio_smc import FallbackReason, SmcStream

COMMAND = [sys.executable, "-m", killed_in_handshake.__name__]


@pytest.fixture(autouse=True)
def remove_names(runtime_directory: Path) -> Iterator[None]:
    """Remove the names of the killed process, which another process would remove only later."""
    yield
    shutil.rmtree(runtime_directory / "trio-smc")


async def check_ended(stream: SmcStream, *, is_server: bool) -> None:
    """The peer has died, and nothing has been sent.  A server reads the end, as over TCP."""
    if stream.fallback is not None:
        assert stream.fallback.reason is FallbackReason.ENDED_IN_HANDSHAKE
    if not is_server:
        with contextlib.suppress(trio.BrokenResourceError):  # a message was not read: a reset
            assert await stream.receive_some() == b""
    assert await stream.receive_some() == b""
    await stream.aclose()


CLIENT = ["out PROPOSAL", "in ACCEPT", "out CONFIRM"]
SERVER = ["in PROPOSAL", "out ACCEPT", "in CONFIRM"]
LINK = ["in CONFIRM_LINK", "out CONFIRM_LINK"]  # of a first contact


def cases(messages: list[str]) -> list[tuple[int, str]]:
    """Numbers of connections before the one in which the process is killed, and messages."""
    return [*product([0, 1], messages), *product([0], LINK)]


@pytest.mark.parametrize(("before", "message"), cases(SERVER))
async def test_a_client_gets_the_connection_of_a_server_that_is_killed(
    before: int, message: str
) -> None:
    with trio.fail_after(2 * PATIENCE):
        async with (
            trio_smc.open_stack(CONFIG) as stack,
            running([*COMMAND, "server", str(before), message]) as process,
        ):
            assert process.stdout is not None
            port = int(await process.stdout.receive_some())
            earlier = [await stack.open_stream(HOST, port) for _ in range(before)]
            stream = await stack.open_stream(HOST, port)
            assert await process.wait() == -signal.SIGKILL
            for each in (*earlier, stream):
                await check_ended(each, is_server=False)


@pytest.mark.parametrize(("before", "message"), cases(CLIENT))
async def test_a_server_gets_the_connection_of_a_client_that_is_killed(
    before: int, message: str
) -> None:
    with trio.fail_after(2 * PATIENCE):
        async with trio_smc.open_stack(CONFIG) as stack:
            [listener] = await stack.open_listeners(0, host=HOST)
            port = listener.socket.getsockname()[1]
            command = [*COMMAND, "client", str(before), message, str(port)]
            async with running(command) as process:
                streams = [await listener.accept() for _ in range(before + 1)]
                assert await process.wait() == -signal.SIGKILL
                for each in streams:
                    await check_ended(each, is_server=True)
            await listener.aclose()
