"""`smc-conform` in one guest of the lab, and trio_smc or the kernel's SMC-R in the other.

A plain run has a share of the checks, of version 1 with the kernel as server and of version 2 with
the kernel as client; all checks take minutes for each kernel, version and role (``--all-kernels``).

A check that trio_smc does not pass is a failure, unless it differs for a documented reason.  A
check that the kernel does not pass must have its reason in `scripts/conform_findings.toml`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from scripts.conform import DIFFERS
from scripts.conform_findings import findings
from smc_conform.catalogue import all_checks
from tests.lab import runner, setup
from tests.lab.failures import describe_failure, kernel_crash
from tests.lab.machine import ARTEFACTS, Finished

ROLES = ("server", "client")
OURS = [
    (version, role, part)
    for version in (1, 2)
    for role in ROLES
    for part in runner.parts_of(version)
]


def kernels() -> Iterator[tuple[str, int, str, str]]:
    """Each kernel of the lab, in the versions that it speaks there."""
    for name, source in setup.KERNELS.items():
        for version in source.versions:
            for role in ROLES:
                for part in runner.parts_of(version):
                    # With its own module a kernel does not notice that soft-RoCE has lost a link.
                    if part != "failover" or source.module_is_built:
                        yield name, version, role, part


def verdicts(done: Finished, name: str, role: str) -> dict[str, list[str]]:
    """The checks by verdict."""
    path = ARTEFACTS / name / f"{role}.json"
    assert path.exists(), describe_failure(done)
    found: dict[str, list[str]] = {}
    for each in json.loads(path.read_text())["checks"]:
        found.setdefault(each["verdict"], []).append(each["id"])
    return found


def test_each_check_is_in_a_part() -> None:
    """Checks of failover are in one part only: one crashes Linux, and has guests of its own."""
    for check in all_checks():
        parts = [
            part
            for part, patterns in runner.PARTS.items()
            if any(fnmatchcase(check.id, pattern) for pattern in patterns)
        ]
        assert parts, check.id
        assert check.area != "failover" or len(parts) == 1, check.id
    assert runner.PARTS["validation"] == ("failover/4.6.1-4",)


def test_reports_of_single_checks_have_a_directory_of_their_own() -> None:
    name = runner.reports_of("kernel", "server", 1, "clc/C.6-4,clc/A.2-*", "7.3")
    assert name == "conform-7.3-v1-server-clc-C.6-4-clc-A.2-"
    assert runner.reports_of("ours", "client", 2, "links") == "conform-ours-v2-client-links"


@pytest.mark.lab
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("version", "role"), [(1, "server"), (2, "client")])
def test_a_share_with_the_kernel(version: int, role: str) -> None:
    judge_the_kernel(setup.DEFAULT, version, role, runner.SHARE)


@pytest.mark.lab
@pytest.mark.other_kernel
@pytest.mark.timeout(runner.CONFORM_TIME + 160)
@pytest.mark.parametrize(("version", "role", "part"), OURS)
def test_ours_over_soft_roce(version: int, role: str, part: str) -> None:
    done = runner.conform("ours", role, version, part)
    found = verdicts(done, runner.reports_of("ours", role, version, part), role)
    assert found.get("fail", []) == [], describe_failure(done)
    assert found.get("inconclusive", []) == [], describe_failure(done)
    assert set(found.get("differs", [])) <= DIFFERS
    assert found["pass"]


@pytest.mark.lab
@pytest.mark.other_kernel
@pytest.mark.timeout(runner.CONFORM_TIME + 160)
@pytest.mark.parametrize(("kernel", "version", "role", "part"), list(kernels()))
def test_the_kernel(kernel: str, version: int, role: str, part: str) -> None:
    judge_the_kernel(kernel, version, role, part)


def judge_the_kernel(kernel: str, version: int, role: str, part: str) -> None:
    """Run a part of the suite; each failed check must have its reason."""
    done = runner.conform("kernel", role, version, part, kernel=kernel)
    found = verdicts(done, runner.reports_of("kernel", role, version, part, kernel), role)
    known = findings()
    failed = found.get("fail", [])
    assert [name for name in failed if name not in known] == []
    if not any(known[name].crashes for name in failed):
        assert kernel_crash(done) is None, describe_failure(done)
        assert found["pass"]
