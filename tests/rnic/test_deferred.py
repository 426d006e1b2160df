"""Deferred work, pass by pass."""

from __future__ import annotations

import pytest

from trio_smc.rnic.deferred import DEFERRED_PASSES, Deferred


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def deferred(failures: list[BaseException]) -> Deferred:
    return Deferred(failures.append)


def test_work_runs_in_the_next_pass(deferred: Deferred) -> None:
    done: list[int] = []
    deferred.now.append(lambda: done.append(1))
    deferred.begin_pass(sleeping=False)
    deferred.begin_pass(sleeping=False)
    assert done == [1]


def test_work_may_add_work(deferred: Deferred) -> None:
    done: list[int] = []
    deferred.now.append(lambda: deferred.now.append(lambda: done.append(1)))
    deferred.begin_pass(sleeping=False)
    assert done == [1]


def test_work_that_is_due_soon_waits_for_a_sleep_or_some_passes(deferred: Deferred) -> None:
    done: list[str] = []
    deferred.add_soon(lambda: done.append("sleep"))
    deferred.begin_pass(sleeping=False)
    assert not done
    deferred.begin_pass(sleeping=True)
    assert done == ["sleep"]
    deferred.add_soon(lambda: done.append("passes"))
    for _ in range(DEFERRED_PASSES - 1):
        deferred.begin_pass(sleeping=False)
        assert done == ["sleep"]
    deferred.begin_pass(sleeping=False)
    assert done == ["sleep", "passes"]


def test_work_that_fails_does_not_stop_the_rest(
    deferred: Deferred, failures: list[BaseException]
) -> None:
    done: list[int] = []
    problem = RuntimeError("no good")

    def fail() -> None:
        raise problem

    deferred.now += [fail, lambda: done.append(1)]
    deferred.add_soon(lambda: done.append(2))
    deferred.run_all()
    assert failures == [problem]
    assert done == [1, 2]


def test_cleared_work_never_runs(deferred: Deferred) -> None:
    done: list[int] = []
    deferred.now.append(lambda: done.append(1))
    deferred.add_soon(lambda: done.append(2))
    deferred.clear()
    deferred.run_all()
    assert not done
