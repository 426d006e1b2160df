"""Many connections that end at once, and badly, cost little memory and processor time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.timing import SLOWER

MOST_MEMORY = 50 << 20
MOST_PROCESSOR = 0.5 * SLOWER
"""Seconds."""
LONGEST_PAUSE = 0.020 * SLOWER
"""Seconds of processor time in which the loop looks at nothing else."""


@pytest.mark.parametrize(
    ("case", "connections"), [("killed", 1000), ("unread", 200), ("left", 200)]
)
def test_cost_of_a_sudden_end(case: str, connections: int) -> None:
    command = [sys.executable, "-m", "tests.e2e.sudden_end", case, str(connections)]
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=55 * SLOWER, check=True).stdout
    cost = json.loads(output)
    assert cost["memory"] < MOST_MEMORY, cost
    assert cost["processor"] < MOST_PROCESSOR, cost
    assert cost["work"] < LONGEST_PAUSE, cost
