"""A process that sends, closes its streams and exits at once loses nothing."""

from __future__ import annotations

import pytest

from tests.e2e.leaving import leave_at_once


@pytest.mark.full
async def test_fifty_clients_leave_at_once(seed: int) -> None:
    assert await leave_at_once(50, seed) > 0
