"""A failed run in the lab is told on one screen: what failed, then how it ended."""

from __future__ import annotations

import pytest

from tests.lab.machine import NO_STATUS, Finished
from tests.lab.telling import kernel_crash, told

NOISE = "[a] [ 26.1] rxe0: qp#36 make_send_cqe: non-flush error status = 10\n"
FAILURE = (
    "[a] lab: up\n"
    "[a] tests/lab/guest_ports.py::test_this PASSED\n"
    "[a] tests/lab/guest_ports.py::test_that FAILED\n"
    "[a] tests/lab/guest_ports.py:30: in test_that\n"
    "[a] E   trio.TooSlowError\n"
)


def test_what_failed_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    output = FAILURE + "[a] and so on\n" * 500 + NOISE * 20
    said = told(Finished(1, output)).splitlines()
    assert said[:3] == [
        "status 1", "[a] tests/lab/guest_ports.py::test_that FAILED", "[a] E   trio.TooSlowError",
    ]  # fmt: skip
    assert said[-1] == "[a] and so on"
    assert len(said) < 30
    assert capsys.readouterr().out == output, "all of it is there for whoever asks"


@pytest.mark.parametrize(
    "line",
    [
        "[b]     | AssertionError: not within 60 s: symmetric",
        "[a] interop: FAILED link_down after 9.1 s",
        "[lab] guest a was not done after 500 s",
        "[b] [   40.1] Kernel panic - not syncing: Fatal exception in interrupt",
    ],
)
def test_a_line_that_tells_is_found(line: str) -> None:
    output = f"[a] lab: up\n{line}\n" + "[a] and so on\n" * 500
    said = told(Finished(NO_STATUS, output)).splitlines()
    assert said[0].startswith(f"status {NO_STATUS} no status: ")
    assert said[1] == line
    assert "[a] lab: up" not in said


def test_a_crash_of_a_kernel_is_told_from_a_failure() -> None:
    crash = "[b] [  311.7] kernel BUG at mm/usercopy.c:102!"
    assert kernel_crash(Finished(NO_STATUS, f"[a] lab: up\n{crash}\n" + FAILURE)) == crash
    assert kernel_crash(Finished(1, FAILURE)) is None
    assert kernel_crash(Finished(NO_STATUS, "[lab] guest a was not done after 500 s\n")) is None
