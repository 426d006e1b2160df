"""Ratios of the benchmarks."""

from __future__ import annotations

import math

import pytest

from benchmarks.report import ratios
from benchmarks.workloads import Metric


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_a_ratio_above_1_is_better(smaller_is_better: bool) -> None:
    metric = Metric(name="x", unit="s", smaller_is_better=smaller_is_better)
    good, bad = (1.0, 4.0) if smaller_is_better else (4.0, 1.0)
    assert ratios(metric, [bad, good], [good, bad]) == [4.0, 0.25]


def test_ratios_of_values_too_small_to_measure() -> None:
    metric = Metric(name="x", unit="s", smaller_is_better=True)
    assert ratios(metric, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]) == [math.inf, 1.0, 0.0]
