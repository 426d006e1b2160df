"""One guest of the lab: the contract of RNICs over soft-RoCE, and what becomes of ports."""

from __future__ import annotations

import re

import pytest

from tests.lab import guest_contract, runner
from tests.rnic_contract import RnicContract


@pytest.mark.lab
@pytest.mark.timeout(400)
def test_the_contract_over_soft_roce(seed: int) -> None:
    """Each test of the contract has run and passed, but for those with a reason."""
    done = runner.contract(seed)
    assert done.returncode == 0, done.output
    outcomes = re.findall(r"(PASSED|SKIPPED|XFAIL\w*|FAILED|ERROR) \S*::(test_\w+)", done.output)
    passed = {name for outcome, name in outcomes if outcome == "PASSED"}
    assert {outcome for outcome, _ in outcomes} == {"PASSED"}, done.output
    contract = {name for name in dir(RnicContract) if name.startswith("test_")}
    assert contract - passed == set(guest_contract.IMPOSSIBLE), done.output
