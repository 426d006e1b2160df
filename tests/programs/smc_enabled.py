"""A pytest plug-in: an unchanged test suite runs with `trio_smc.enable()`.

`python -m pytest -p smc_enabled ...` (with this directory on PYTHONPATH).  SMC_CHECKPOINTS says
what `Config.checkpoints` is, if it is to be set.  Streams over SMC-R are counted; a run in which
there was none fails.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any, cast

import pytest
import trio

import trio_smc
from trio_smc.streams.rdma_stream import RdmaStream

_streams = 0
"""Streams over SMC-R so far, of both ends."""


def pytest_configure(config: pytest.Config) -> None:
    """Enable before the first run, and for the runs of Trio's own decorator."""
    checkpoints = cast(Any, os.environ.get("SMC_CHECKPOINTS", "amortised"))
    # If a test accepts only after it has connected, it waits for the whole `handshake_timeout`.
    trio_smc.enable(
        trio_smc.Config(
            checkpoints=checkpoints,
            receive_buffer=256 * 1024,
            handshake_timeout=3,
            learn_short=False,
        )
    )
    # `trio.testing.trio_test` reads this name.
    cast(Any, trio)._core.run = trio.run
    initialize = RdmaStream.__init__

    @wraps(initialize)
    def count(self: RdmaStream, *arguments: Any) -> None:
        global _streams
        _streams += 1
        initialize(self, *arguments)

    cast(Any, RdmaStream).__init__ = count


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run without streams over SMC-R."""
    if exitstatus == pytest.ExitCode.OK and not _streams:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts in a form that a caller can read."""
    terminalreporter.write_line(f"streams smc-r {_streams}")
