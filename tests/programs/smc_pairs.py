"""A pytest plug-in: tests that make a pair of connected streams get a pair over SMC-R.

`python -m pytest -p smc_pairs ...` (with this directory on PYTHONPATH): while an async test runs,
`trio.testing.memory_stream_pair`, also under that name in the test's own module, hands out SMC-R
streams. They are opened in advance, because the call for a pair is not async.

The used pairs are counted; a run that used none fails.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest
import trio
import trio.testing

import trio_smc

Pair = tuple[trio_smc.SmcStream, trio_smc.SmcStream]

NAME = "memory_stream_pair"
AT_HAND = 32
"""Pairs for one test; Trio's own check of a stream uses about 20."""
CONFIG = trio_smc.Config(receive_buffer=64 * 1024, require_smc=True)

used = 0


@asynccontextmanager
async def open_pairs(count: int) -> AsyncIterator[deque[Pair]]:
    """Open pairs, hand them out, and close those that the test did not close."""
    pairs: deque[Pair] = deque()
    (listener,) = await trio_smc.open_listeners(0, host="127.0.0.1", config=CONFIG)
    async with listener:
        for _ in range(count):
            client = await trio_smc.open_stream(*listener.socket.getsockname(), config=CONFIG)
            pairs.append((client, await listener.accept()))
    streams = [stream for pair in pairs for stream in pair]
    try:
        yield pairs
    finally:
        for stream in streams:
            await trio.aclose_forcefully(stream)


def with_pairs(test: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    """Return the test, with pairs at hand."""
    module = inspect.getmodule(test)

    @wraps(test)
    async def wrapper(**arguments: Any) -> None:
        async with open_pairs(AT_HAND) as pairs:

            def take() -> Pair:
                global used
                used += 1
                return pairs.popleft()

            with pytest.MonkeyPatch.context() as patch:
                for where in (trio.testing, module):
                    if hasattr(where, NAME):
                        patch.setattr(where, NAME, take)
                await test(**arguments)

    return wrapper


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Wrap the test before the plug-in that runs async tests reads it."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pyfuncitem.obj = with_pairs(pyfuncitem.obj)
    return (yield)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that used no pair."""
    if exitstatus == pytest.ExitCode.OK and not used:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts in a form that a caller can read."""
    terminalreporter.write_line(f"pairs smc-r {used}")
