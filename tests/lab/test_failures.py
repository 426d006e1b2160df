"""A failed run in the lab is told on one screen: what failed, then how it ended."""

from __future__ import annotations

import pytest

from tests.lab.failures import describe_failure, kernel_crash
from tests.lab.machine import NO_STATUS, Finished

NOISE = "[a] [ 26.1] rxe0: qp#36 make_send_cqe: non-flush error status = 10\n"
FAILURE = (
    "[a] lab: up\n"
    "[a] tests/lab/guest_ports.py::test_this PASSED\n"
    "[a] tests/lab/guest_ports.py::test_that FAILED\n"
    "[a] tests/lab/guest_ports.py:30: in test_that\n"
    "[a] E   trio.TooSlowError\n"
)


def test_the_failure_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    output = FAILURE + "[a] and so on\n" * 500 + NOISE * 20
    lines = describe_failure(Finished(1, output)).splitlines()
    assert lines[:3] == [
        "status 1", "[a] tests/lab/guest_ports.py::test_that FAILED", "[a] E   trio.TooSlowError",
    ]  # fmt: skip
    assert lines[-1] == "[a] and so on"
    assert len(lines) < 30
    assert capsys.readouterr().out == output, "the whole output is printed"


@pytest.mark.parametrize(
    "line",
    [
        "[b]     | AssertionError: not within 60 s: symmetric",
        "[a] interop: FAILED link_down after 9.1 s",
        "[lab] guest a was not done after 500 s",
        "[b] [   40.1] Kernel panic - not syncing: Fatal exception in interrupt",
    ],
)
def test_a_line_with_the_cause_is_found(line: str) -> None:
    output = f"[a] lab: up\n{line}\n" + "[a] and so on\n" * 500
    lines = describe_failure(Finished(NO_STATUS, output)).splitlines()
    assert lines[0].startswith(f"status {NO_STATUS} no status: ")
    assert lines[1] == line
    assert "[a] lab: up" not in lines


@pytest.mark.parametrize(
    "crash",
    [
        "[b] [  311.7] kernel BUG at mm/usercopy.c:102!",
        "[b] [  363.6] INFO: task kworker/0:8:1000 blocked for more than 120 seconds.",
        "[b] kernel log: [   41.9] WARNING: CPU: 0 PID: 12 at net/smc/smc_core.c:1193 lgr_free",
    ],
)
def test_a_crash_of_a_kernel_is_not_a_failure(crash: str) -> None:
    assert kernel_crash(Finished(NO_STATUS, f"[a] lab: up\n{crash}\n" + FAILURE)) == crash
    assert kernel_crash(Finished(1, FAILURE)) is None
    assert kernel_crash(Finished(NO_STATUS, "[lab] guest a was not done after 500 s\n")) is None
