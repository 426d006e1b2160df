"""A hung test fails with its tasks' stacks, and the tests after it still run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TIMEOUT = "2"
"""Seconds; the test that is fine needs some hundredths of one, also on a machine that is busy."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def test_a_hung_async_test_is_located_and_the_rest_goes_on(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import trio
        async def wait_for_nothing():
            await trio.Event().wait()
        async def test_hangs():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_nothing)
        async def test_is_fine():
            await trio.lowlevel.checkpoint()
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "tests.conftest", "-p", "no:cacheprovider", "-o", "trio_mode=true",
        "--timeout", TIMEOUT,
    )  # fmt: skip
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["hung; *", "task *wait_for_nothing", "*await trio.Event().wait()"])


def test_a_blocked_test_is_ended_by_force(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import time
        def test_blocks():
            time.sleep(30)
        def test_is_fine():
            pass
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout", TIMEOUT
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Timeout*"])


def test_a_test_that_calculates_has_its_time_on_the_processor(pytester: pytest.Pytester) -> None:
    """It may wait longer for the processor, but neither work longer nor wait for ever."""
    pytester.makepyfile(
        """
        import time
        import pytest
        pytestmark = pytest.mark.calculates
        def test_works_for_ever():
            while True:
                pass
        @pytest.mark.timeout(0.1)
        def test_waits_for_ever():
            time.sleep(30)
        def test_has_to_wait():
            time.sleep(1.5)
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout", "1"
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*Timeout*1*"])


@pytest.mark.parametrize(("patience", "passed"), [("25", 0), ("250", 1)])
def test_a_time_out_of_one_test_is_longer_on_a_slow_machine(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, patience: str, passed: int
) -> None:
    monkeypatch.setenv("TRIO_SMC_PATIENCE", patience)
    pytester.makepyfile(
        """
        import time
        import pytest
        @pytest.mark.timeout(0.5)
        def test_takes_long():
            time.sleep(1)
        """
    )
    result = pytester.runpytest_subprocess("-p", "tests.conftest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=passed, failed=1 - passed)


@pytest.fixture
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_ignored")
def test_processes_can_be_interrupted_also_in_the_background_of_a_shell(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import signal, subprocess, sys
        def test_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            with subprocess.Popen(["sleep", "30"]) as sleeper:
                sleeper.send_signal(signal.SIGINT)
                assert sleeper.wait(5) == -signal.SIGINT
        """
    )
    result = pytester.runpytest_subprocess("-p", "tests.conftest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
