"""What Trio's users may rely on: the stream contract, over SMC-R and over TCP."""

from __future__ import annotations

import pytest
from trio.testing import check_half_closeable_stream

from tests.stream_pairs import open_pairs, smc_config, tcp_config

STACKS = [pytest.param(1, id="one-stack"), pytest.param(2, id="two-stacks")]


@pytest.mark.parametrize("stacks", STACKS)
async def test_contract_over_smc(stacks: int) -> None:
    async with open_pairs(smc_config(), stacks=stacks) as pairs:
        await check_half_closeable_stream(pairs.make, pairs.clogged)


async def test_contract_over_tcp() -> None:
    async with open_pairs(tcp_config()) as pairs:
        await check_half_closeable_stream(pairs.make, pairs.clogged)
