"""One guest of the lab: the contract of RNICs over soft-RoCE, and what becomes of ports."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.lab import guest_contract, runner
from tests.lab.failures import describe_failure
from tests.rnic.contract import RnicContract


@pytest.mark.lab
@pytest.mark.timeout(800)
def test_the_contract_over_soft_roce(seed: int) -> None:
    """Each test of the contract has run and passed, but for those with a reason."""
    done = runner.contract(seed)
    assert done.returncode == 0, describe_failure(done)
    # Not read from the console, where the kernel writes, too.
    cases = list(ET.fromstring(done.results).iter("testcase"))
    bad = {"failure", "error", "skipped"}
    failed = [c.get("name") for c in cases if bad & {each.tag for each in c}]
    assert failed == [], describe_failure(done)
    passed = {case.attrib["name"].partition("[")[0] for case in cases}
    contract = {name for name in dir(RnicContract) if name.startswith("test_")}
    assert contract - passed == set(guest_contract.IMPOSSIBLE), describe_failure(done)
