"""One guest of the lab: programs at the commit limit, where vm.overcommit_memory is 2."""

from __future__ import annotations

import pytest

from tests.lab import guest_overcommit, runner
from tests.lab.failures import describe_failure


@pytest.mark.lab
@pytest.mark.timeout(500)
def test_programs_survive_at_the_commit_limit() -> None:
    done = runner.overcommit()
    assert done.returncode == 0, describe_failure(done)
    for step in guest_overcommit.STEPS:
        assert f"ok {step.__name__}" in done.output, describe_failure(done)
