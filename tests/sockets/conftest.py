"""`enable()` around a test, with the settings of its module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import trio_smc


@pytest.fixture
def enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Call `enable` with the module's CONFIG before the run, like the first line of a program."""
    trio_smc.enable(request.module.CONFIG)
    try:
        yield
    finally:
        trio_smc.disable()
