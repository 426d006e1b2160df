"""A pytest plug-in: unchanged test suites of other projects run over SMC-R.

`python -m pytest -p smc_for_tcp SUITE` (with this directory on PYTHONPATH) gives the suite
`trio_smc.open_stream`, `open_listeners` and `serve` under the names `trio.open_tcp_stream`,
`open_tcp_listeners` and `serve_tcp`, which it and the project under test use.

The environment variable SMC_CHECKPOINTS sets `Config.checkpoints`.

Every stream handed out is counted by its end and mode. A run in which any stream fell back to
TCP, or in which no stream was opened, fails.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import pytest
import trio
import trio.testing

import trio_smc

COUNTS: Counter[tuple[str, str]] = Counter()
"""Streams handed out so far, by (end, mode)."""

CONFIG = trio_smc.Config(
    checkpoints=cast(Any, os.environ.get("SMC_CHECKPOINTS", "amortised")), learn_short=False
)

QUIET = 0.25
"""Seconds without any event after which a clock that jumps does so."""

# trio_smc itself uses `trio.open_tcp_listeners`, and needs Trio's function then.
_real_open_tcp_listeners = trio.open_tcp_listeners
_requested_by_us: ContextVar[bool] = ContextVar("asked_by_us", default=False)


async def open_tcp_stream(host: str | bytes, port: int, **options: Any) -> trio_smc.SmcStream:
    """Replace `trio.open_tcp_stream`, and count.

    A TCP connection is in the listener's backlog when connect returns; the server's side of an
    SMC-R handshake ends a moment after the client's (RFC 7609, 3.5.2.1).  Tests that count on
    the first get it, if the listener is in this run and a task accepts.
    """
    accepted = COUNTS["server", trio_smc.Mode.SMC_R]
    stream = await trio_smc.open_stream(host, port, config=CONFIG, **options)
    COUNTS["client", stream.mode] += 1
    # Not Trio's clock: the suite may have stopped it.
    patience = time.monotonic() + QUIET
    while COUNTS["server", trio_smc.Mode.SMC_R] == accepted and time.monotonic() < patience:
        await trio.lowlevel.checkpoint()
    return stream


async def open_tcp_listeners(port: int, **options: Any) -> Sequence[trio.abc.Listener[Any]]:
    """Replace `trio.open_tcp_listeners`."""
    if _requested_by_us.get():
        return await _real_open_tcp_listeners(port, **options)
    token = _requested_by_us.set(True)
    try:
        return await trio_smc.open_listeners(port, config=CONFIG, **options)
    finally:
        _requested_by_us.reset(token)


async def serve_tcp(
    handler: Callable[[Any], Awaitable[object]],
    port: int,
    *,
    handler_nursery: trio.Nursery | None = None,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Replace `trio.serve_tcp`."""
    await trio.serve_listeners(
        handler,
        list(await open_tcp_listeners(port, **options)),
        handler_nursery=handler_nursery,
        task_status=task_status,
    )


_accept = trio_smc.SmcListener.accept


async def accept(listener: trio_smc.SmcListener) -> trio_smc.SmcStream:
    """Replace `SmcListener.accept`, and count."""
    stream = await _accept(listener)
    COUNTS["server", stream.mode] += 1
    return stream


class Fixtures:
    """Fixtures of suites that must wait for completions."""

    @pytest.fixture
    def autojump_clock(self) -> trio.testing.MockClock:
        """Jump after a moment without events, not at once.

        Like bytes on a real network, completions come from outside of the Trio run: all tasks
        being blocked does not mean that no data is in flight.
        """
        return trio.testing.MockClock(autojump_threshold=QUIET)


def pytest_configure(config: pytest.Config) -> None:
    """Replace Trio's functions: callers look up its public names at each call."""
    for ours in (open_tcp_stream, open_tcp_listeners, serve_tcp):
        setattr(trio, ours.__name__, ours)
    setattr(trio_smc.SmcListener, "accept", accept)  # noqa: B010
    # Registered last, so that its fixtures take precedence.
    config.pluginmanager.register(Fixtures(), "smc_for_tcp_fixtures")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run with a fallback, or without streams over SMC-R."""
    ends = {end for (end, mode), count in COUNTS.items() if mode == trio_smc.Mode.SMC_R and count}
    others = sum(count for (_, mode), count in COUNTS.items() if mode != trio_smc.Mode.SMC_R)
    if exitstatus == pytest.ExitCode.OK and (others or ends != {"client", "server"}):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts in a form that a caller can read."""
    for (end, mode), count in sorted(COUNTS.items()):
        terminalreporter.write_line(f"streams {end} {mode} {count}")
