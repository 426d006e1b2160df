"""Two processes, both directions at once, every byte in its place."""

from __future__ import annotations

import pytest

from tests.e2e.transfer import RINGS, transfer


@pytest.mark.parametrize("ring", RINGS)
async def test_both_directions_at_once(ring: int, seed: int) -> None:
    result = await transfer(ring, total=16 << 20, small=1000, seed=seed)
    assert result["writes"] > 1000
