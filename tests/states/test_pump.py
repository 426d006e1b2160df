"""The modes of the pump: the hooks and the waiter of the doorbell in each state."""

from __future__ import annotations

import pytest

from trio_smc.states.engine import Edge, Machine
from trio_smc.states.tables import PUMP

HOOKS: dict[str, set[str]] = {
    "STOPPED": set(),
    "IDLE": set(),
    "BUSY": {"before"},
    "SLEEPY": {"before", "after"},
    "SOLO": set(),
}


class Solo:
    """Records if a solo reader waits on the doorbell."""

    def __init__(self, *, active: bool) -> None:
        self.active = active

    def end(self) -> None:
        assert self.active
        self.active = False


class Model:
    """Records the effects of the actions on a pump in ``state``."""

    def __init__(self, state: str, *, has_one_doorbell: bool) -> None:
        self.has_one_doorbell = has_one_doorbell
        self.hooks = set(HOOKS[state])
        self.solo = Solo(active=state == "SOLO")
        self.disarmed = state in ("BUSY", "SLEEPY")

    def add_before_hook(self) -> None:
        assert "before" not in self.hooks
        self.hooks.add("before")

    def add_after_hook(self) -> None:
        assert "after" not in self.hooks
        self.hooks.add("after")

    def remove_before_hook(self) -> None:
        self.hooks.remove("before")

    def remove_after_hook(self) -> None:
        self.hooks.remove("after")

    def release_doorbell(self) -> None:
        assert not self.solo.active
        self.solo.active = True

    def disarm_rnics(self) -> None:
        self.disarmed = True

    def restart_counts(self) -> None:
        pass

    def state_changed(self, old: str, new: str, event: str) -> None:
        pass


def edges() -> list[tuple[str, str, Edge]]:
    return [(state, event, each) for (state, event), row in PUMP.edges.items() for each in row]


@pytest.mark.parametrize(("state", "event", "edge"), edges())
def test_an_edge_leaves_the_hooks_of_its_target(state: str, event: str, edge: Edge) -> None:
    model = Model(state, has_one_doorbell=bool(edge.guards))
    machine = Machine(PUMP, model, state=state)
    machine.send(event)
    assert machine.state == edge.target
    assert model.hooks == HOOKS[edge.target]
    assert model.solo.active == (edge.target == "SOLO")
    if edge.target == "BUSY":
        assert model.disarmed, "a peer would ring the doorbell of a loop that is awake"


@pytest.mark.parametrize("state", PUMP.states)
def test_each_state_can_be_stopped(state: str) -> None:
    machine = Machine(PUMP, Model(state, has_one_doorbell=True), state=state)
    machine.send("stop")
    assert machine.state == "STOPPED"


@pytest.mark.parametrize("state", PUMP.states)
def test_the_pump_may_be_needed_in_each_state(state: str) -> None:
    machine = Machine(PUMP, Model(state, has_one_doorbell=True), state=state)
    machine.send("needed")
    assert machine.state == "STOPPED" if state == "STOPPED" else HOOKS[machine.state]


@pytest.mark.parametrize("state", PUMP.states)
@pytest.mark.parametrize("has_one_doorbell", [False, True])
def test_a_reader_may_request_solo_mode_in_each_state(state: str, has_one_doorbell: bool) -> None:
    machine = Machine(PUMP, Model(state, has_one_doorbell=has_one_doorbell), state=state)
    machine.send("sole_reader")
    becomes_solo = has_one_doorbell and bool(HOOKS[state])
    assert machine.state == ("SOLO" if becomes_solo else state)
