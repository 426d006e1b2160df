"""Two guests of the lab exchange bytes through the RNIC interface over real verbs."""

from __future__ import annotations

import pytest

from tests.lab import runner
from tests.lab.failures import describe_failure


@pytest.mark.lab
@pytest.mark.timeout(1000)
def test_bytes_between_two_guests(seed: int) -> None:
    done = runner.verbs(seed)
    assert done.returncode == 0, describe_failure(done)
    for role in ("server", "client"):
        assert f"{role}: ok bytes_both_ways" in done.output, describe_failure(done)
        assert f"{role}: ok close" in done.output, describe_failure(done)
    assert "client: ok peer_death" in done.output, describe_failure(done)
