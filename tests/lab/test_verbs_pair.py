"""Two guests of the lab exchange bytes through the RNIC interface over real verbs."""

from __future__ import annotations

import os

import pytest

from tests.lab import runner


@pytest.mark.lab
@pytest.mark.timeout(240)
def test_bytes_between_two_guests(seed: int) -> None:
    lab = runner.lab_directory()
    if lab is None:
        assert os.environ.get("CI") != "true", "TRIO_SMC_LAB does not name the lab's directory"
        pytest.skip("TRIO_SMC_LAB does not name the lab's directory")
    done = runner.run_pair(lab, runner.verbs_commands(seed), seconds=150)
    assert done.returncode == 0, done.stdout
    for role in ("server", "client"):
        assert f"{role}: ok bytes_both_ways" in done.stdout, done.stdout
        assert f"{role}: ok close" in done.stdout, done.stdout
    assert "client: ok peer_death" in done.stdout, done.stdout
