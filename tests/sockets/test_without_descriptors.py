"""A process that has few or no free descriptors uses its connections as over TCP.

Over TCP only a new connection needs a descriptor. So no call on an open connection may need one
over SMC-R, not even the first call of its kind in the process. If there are too few descriptors for
a stack, a new connection is TCP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest
import trio

from tests.peers import echo
from tests.sockets import few_descriptors
from tests.sockets.without_descriptors import CALLS
from tests.timing import PATIENCE

pytestmark = pytest.mark.processes


def outcomes(transport: str) -> dict[str, str]:
    """The outcome of each call."""
    command = [sys.executable, "-m", "tests.sockets.without_descriptors", transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_calls_of_a_process_without_a_free_descriptor() -> None:
    over_tcp = outcomes("tcp")
    assert len(over_tcp) == len(CALLS)
    assert all(over_tcp.values())  # each child process has written an outcome
    assert outcomes("smc") == over_tcp


async def test_the_first_connection_of_a_process_with_few_free_descriptors() -> None:
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host="127.0.0.1"))
        port = str(listener.socket.getsockname()[1])
        for transport in ("tcp", "smc"):
            command = [sys.executable, "-m", few_descriptors.__name__, transport, port]
            with trio.fail_after(2 * PATIENCE):
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
            assert json.loads(done.stdout) == ["?"] * len(few_descriptors.NUMBERS), transport
        nursery.cancel_scope.cancel()
