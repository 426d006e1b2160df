"""A process that has no free descriptor uses its connections as over TCP.

Over TCP only a new connection needs a descriptor. So no call on an open connection may need one
over SMC-R, not even the first call of its kind in the process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
