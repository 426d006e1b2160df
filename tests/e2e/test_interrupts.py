"""Ctrl-C in the middle of the stack's own work: the peer sees the end, as over TCP."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

import trio_smc
from tests.e2e.interrupted import DATA, PLACES
from tests.e2e.interrupted_anywhere import PROGRAMS
from tests.e2e.process_end import HOST
from tests.timing import PATIENCE
from trio_smc import Config, Mode, SmcStream

pytestmark = pytest.mark.processes

_SIGNALS = 60
"""Runs with a signal in `test_a_run_ends_at_once`; each takes about 20 ms. Chosen."""


@pytest.mark.parametrize("api", PROGRAMS)
def test_a_run_ends_at_once(api: str, seed: int) -> None:
    module = "tests.e2e.interrupted_anywhere"
    command = [sys.executable, "-m", module, api, str(_SIGNALS), str(seed)]
    process = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, timeout=5 * PATIENCE
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("place", PLACES)
async def test_the_peer_of_an_interrupted_process_sees_its_end(place: str) -> None:
    received = 0
    async with (
        trio_smc.open_stack(Config(require_smc=True)) as stack,
        trio.open_nursery() as nursery,
    ):
        [listener] = await stack.open_listeners(0, host=HOST)
        port = listener.socket.getsockname()[1]
        command = [sys.executable, "-m", "tests.e2e.interrupted", str(port), place]
        with trio.fail_after(PATIENCE):
            nursery.start_soon(trio.run_process, command)  # raises if the exit code is not 0
            stream: SmcStream = await listener.accept()
            assert stream.mode is Mode.SMC_R
            async with stream:
                while received < len(DATA):
                    received += len(await stream.receive_some())
                await stream.send_all(DATA)
                while data := await stream.receive_some():
                    received += len(data)
                    if place == "receive" and received == 2 * len(DATA):
                        await stream.send_all(DATA)
    # A send that was interrupted has sent all or nothing.
    assert received == 2 * len(DATA)
