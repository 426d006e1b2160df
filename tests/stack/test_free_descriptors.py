"""A program with a low limit of descriptors does what it does over TCP."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.stack import low_limits
from tests.timing import PATIENCE

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("side", ["server", "client"])
def test_each_low_limit_has_the_outcome_of_tcp(side: str) -> None:
    found = {}
    for transport in ("tcp", "smc"):
        command = [sys.executable, "-m", low_limits.__name__, transport, side]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=4 * PATIENCE, check=True
        )
        found[transport] = json.loads(done.stdout)
    assert len(found["tcp"]) == len(low_limits.LIMITS)
    assert ["ok"] * low_limits.CONNECTIONS in found["tcp"].values()
    assert len({str(each) for each in found["tcp"].values()}) > 1  # some limits are too low
    assert found["smc"] == found["tcp"]


def test_many_listeners_leave_descriptors_for_the_program() -> None:
    command = [sys.executable, "-m", low_limits.__name__, "smc", "listeners"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    found = json.loads(done.stdout)
    assert found["listeners"] == low_limits.LISTENERS
    assert found["files"] == low_limits.FILES
    assert found["first"] == "smc-r"
    assert found["last"] == "out-of-resources"
    assert found["descriptors-after-close"] == found["descriptors-before"]


def test_the_last_listener_refuses_if_smc_r_is_required() -> None:
    command = [sys.executable, "-m", low_limits.__name__, "required", "listeners"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE, check=True)
    found = json.loads(done.stdout)
    assert found["listeners"] == low_limits.LISTENERS
    assert found["first"] == "smc-r"
    assert "SMC-R is required" in found["last"]
