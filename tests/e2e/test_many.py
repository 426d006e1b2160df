"""Very many connections, at once and one after the other."""

from __future__ import annotations

import pytest

from tests.e2e.many import check_nothing_left, echo_at_once, open_and_close

pytestmark = pytest.mark.full

CONNECTIONS = 1000
CONSTANT = 32
"""Descriptors that the connections share: further RMBs, listeners, what the process has anyway."""


async def test_a_thousand_connections_at_once() -> None:
    before, during = await echo_at_once(CONNECTIONS)
    for was, now in zip(before, during, strict=True):
        assert now["open_connections"] == CONNECTIONS
        assert now["groups"] == now["links"] == 1
        assert now["descriptors"] - was["descriptors"] <= CONNECTIONS + CONSTANT
        assert now["threads"] == was["threads"]


async def test_closed_connections_leave_nothing(seed: int) -> None:
    before, after = await open_and_close(100, 1000, seed)
    check_nothing_left(before, after, traced=64 << 10, rss=2 << 20)
