"""trio_smc and the Linux kernel's own SMC-R, in the guests of the lab."""

from __future__ import annotations

import re
import sys

import pytest

from tests.lab import guest_interop, runner, setup
from tests.lab.failures import describe_failure, kernel_crash

MESSAGES = {
    "streams": {
        "Proposal", "Accept", "Confirm", "Decline", "CONFIRM LINK", "ADD LINK", "CONFIRM RKEY",
        "DELETE RKEY", "CDC",
    },
    # tshark does not know LLC messages of version 2 whose length is not big-endian.
    "v2": {"Proposal", "Accept", "Confirm", "Decline", "CDC"},
    "links": {
        "Proposal", "Accept", "Confirm", "CONFIRM LINK", "ADD LINK", "ADD LINK CONTINUATION",
        "DELETE LINK", "CONFIRM RKEY", "TEST LINK", "DELETE RKEY", "CDC",
    },
}  # fmt: skip
"""The messages that tshark must find in a suite's capture."""


OTHERS = [
    pytest.param("v2", name, marks=pytest.mark.other_kernel)
    for name, source in setup.KERNELS.items()
    if name != setup.DEFAULT and not source.is_built
]
"""Kernels with their own module speak version 2 in the lab.  One that is built whole is for the
conformance suite only."""


@pytest.mark.lab
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("suite", "kernel"), [*((each, setup.DEFAULT) for each in guest_interop.SUITES), *OTHERS]
)
def test_with_the_kernel(suite: str, kernel: str) -> None:
    """Each step of `tests.lab.guest_interop`; smc_diag in the guest says which mode it was.

    A kernel that crashes, or whose tasks hang, has to be asked again, once: docs/interop.md knows
    of both.
    """
    done = runner.with_kernel(suite, kernel=kernel)
    crash = kernel_crash(done)
    if crash is not None:
        sys.stdout.write(f"{done.output}\nthe guest's kernel has failed, so all again: {crash}\n")
        done = runner.with_kernel(suite, kernel=kernel)
    for step in guest_interop.SUITES[suite]:
        assert f"interop: ok {step.__name__} " in done.output, describe_failure(done)
    assert done.returncode == 0, describe_failure(done)
    if suite != "quick":  # one guest has no wire
        [read] = re.findall(r"\[wire\] tshark reads (.*)", done.output)
        seen = {each.partition(" ")[2] for each in read.split(", ")}
        assert MESSAGES[suite] <= seen, read
