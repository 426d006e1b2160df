"""A call that the system refuses costs speed, not the program."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from tests.e2e import refusing_system
from tests.timing import PATIENCE

pytestmark = pytest.mark.processes

TCP = {
    "os.eventfd", "os.memfd_create", "os.sched_yield", "resource.getrlimit", "socket.send_fds",
    "bind AF_UNIX", "fcntl 1033",
}  # fmt: skip
"""Calls without which a connection is TCP."""
COOKIE = "getsockopt AF_INET 1 57"
SMC_R = {COOKIE, "getsockopt AF_INET 6 9", "os.listdir"}
"""Calls without which SMC-R works."""


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize(
    ("number", "unknown"),
    [
        pytest.param(errno.EPERM, [], id="EPERM"),
        pytest.param(errno.EMFILE, [], id="EMFILE"),
        pytest.param(errno.EPERM, [COOKIE], id="EPERM-without-cookies", marks=pytest.mark.full),
    ],
)
def test_each_connection_delivers_its_bytes(number: int, unknown: list[str]) -> None:
    """A sandbox refuses a call with EPERM; a process or a system without descriptors has EMFILE.

    ``unknown``: calls that the system refuses as well, as QEMU's user mode does.
    """
    command = [sys.executable, "-m", refusing_system.__name__, str(number), *unknown]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=4 * PATIENCE
    )
    outcomes = json.loads(done.stdout)
    wrong = {call: both for call, both in outcomes.items() if not set(both) <= {"smc-r", "tcp"}}
    assert not wrong
    assert len(outcomes) > 30
    for call in TCP:
        assert outcomes[call] == ["tcp", "tcp"], call
    for call in SMC_R:
        assert outcomes[call] == ["smc-r", "smc-r"], call
