"""The time at which a listener accepts a connection that another process could also accept."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trio_smc.connecting.acceptance import Acceptance
from trio_smc.states.engine import IllegalEvent


async def time_left_to_others(acceptance: Acceptance) -> float:
    """Seconds for which the listener leaves a connection to other processes."""
    began = trio.current_time()
    if acceptance.is_later:
        await acceptance.leave_to_others(None)
    return trio.current_time() - began


async def test_a_connection_is_left_to_others_while_no_task_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    acceptance = Acceptance(on_demand=False)
    assert not acceptance.is_on_demand
    assert await time_left_to_others(acceptance) == pytest.approx(0.01)


async def test_a_connection_is_accepted_at_once_while_a_call_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    acceptance = Acceptance(on_demand=True)
    acceptance.begin_call()
    acceptance.begin_call()
    acceptance.end_call()
    assert await time_left_to_others(acceptance) == 0
    acceptance.end_call()
    assert await time_left_to_others(acceptance) == pytest.approx(0.01)


async def test_a_call_ends_the_wait_for_other_processes(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    acceptance = Acceptance(on_demand=False)
    waited: list[float] = []

    async def wait() -> None:
        waited.append(await time_left_to_others(acceptance))

    nursery.start_soon(wait)
    await trio.sleep(0.004)
    acceptance.client_waits()  # does not end the wait
    await trio.sleep(0.002)
    acceptance.begin_call()
    await trio.testing.wait_all_tasks_blocked()
    assert waited == [pytest.approx(0.006)]


@pytest.mark.parametrize("event", ["begin_call", "client_waits"])
async def test_on_demand_a_call_or_a_client_is_awaited(
    event: str, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    acceptance = Acceptance(on_demand=True)
    nursery.start_soon(acceptance.wait_for_demand)
    await trio.sleep(60)
    assert len(nursery.child_tasks) == 1
    getattr(acceptance, event)()
    await trio.testing.wait_all_tasks_blocked()
    assert not acceptance.is_on_demand
    assert not nursery.child_tasks


def test_a_call_cannot_end_before_it_begins() -> None:
    acceptance = Acceptance(on_demand=False)
    acceptance.calls = 1
    with pytest.raises(IllegalEvent):
        acceptance.end_call()
