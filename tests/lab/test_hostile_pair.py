"""A peer over RoCE that lies or vanishes costs its own connection only."""

from __future__ import annotations

import pytest

from tests.lab import liar, runner
from tests.lab.telling import told


@pytest.mark.lab
@pytest.mark.timeout(1000)
def test_liars_cost_their_own_connection() -> None:
    done = runner.hostile()
    for lie in liar.LIES:
        assert f"client: ok {lie}," in done.output, told(done)
    assert "server: ok" in done.output, told(done)
    assert done.returncode == 0, told(done)
