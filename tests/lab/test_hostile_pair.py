"""A peer over RoCE that lies or vanishes costs its own connection only."""

from __future__ import annotations

import pytest

from tests.lab import liar, runner
from tests.lab.failures import describe_failure


@pytest.mark.lab
@pytest.mark.timeout(1000)
def test_liars_cost_their_own_connection() -> None:
    done = runner.hostile()
    for version, lies in ((1, liar.LIES), (2, liar.V2_LIES)):
        for lie in lies:
            assert f"client: ok {lie} (version {version})," in done.output, describe_failure(done)
    assert "server: ok" in done.output, describe_failure(done)
    assert done.returncode == 0, describe_failure(done)
