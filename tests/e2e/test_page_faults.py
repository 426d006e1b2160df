"""The memory of received messages stays with the receiver's process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from tests.timing import PATIENCE

MODULE = [sys.executable, "-m", "tests.e2e.page_faults"]


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps have other thresholds")
@pytest.mark.parametrize("size", [150_000, 1 << 20, 2 << 20])
def test_messages_cost_no_page_faults(size: int) -> None:
    """Without `trio_smc.host.heap`, a message of 1 MiB costs 736."""
    server = subprocess.Popen(
        [*MODULE, "serve", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        done = subprocess.run(
            [*MODULE, port, str(size)], capture_output=True, text=True, check=True, timeout=PATIENCE
        )
        server.communicate(timeout=PATIENCE)
    result = json.loads(done.stdout)
    assert result["mode"] == "smc-r"
    assert result["faults"] < 10
