"""Two guests of the lab, trio_smc in both: streams over two RNICs, and links that fail."""

from __future__ import annotations

import pytest

from tests.lab import guest_ours, runner
from tests.lab.failures import describe_failure


@pytest.mark.lab
@pytest.mark.timeout(1000)
def test_streams_survive_links() -> None:
    done = runner.ours()
    assert done.returncode == 0, describe_failure(done)
    for role in ("server", "client"):
        for step in guest_ours.STEPS:
            assert f"{role}: ok {step}: " in done.output, describe_failure(done)
