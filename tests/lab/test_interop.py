"""trio_smc and the Linux kernel's own SMC-R, in the guests of the lab."""

from __future__ import annotations

import pytest

from tests.lab import guest_interop, runner


@pytest.mark.lab
@pytest.mark.timeout(700)
@pytest.mark.parametrize("suite", list(guest_interop.SUITES))
def test_with_the_kernel(suite: str) -> None:
    """Each step of `tests.lab.guest_interop`; smc_diag in the guest says which mode it was."""
    done = runner.with_kernel(suite)
    for step in guest_interop.SUITES[suite]:
        assert f"interop: ok {step.__name__} " in done.output, done.output
    assert done.returncode == 0, done.output
