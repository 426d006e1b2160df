"""The engine against python-statemachine: same states, same actions, same refusals."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from statemachine import StateChart
from statemachine.exceptions import TransitionNotAllowed

from scripts.states.flatten import flatten
from scripts.states.generate import MACHINES
from tests.states.paths import Path, parts
from trio_smc.states.engine import IllegalEvent, Machine, Table

RUN = 12  # events before both restart in another state


class Boom(Exception):
    """Raised by an action on purpose."""


@dataclass
class World:
    """The input of both models for one event: guard values, and the effect of the n-th action."""

    guards: dict[str, bool]
    plan: dict[int, str] = field(default_factory=dict)  # an event to send, or "!" to raise


class Recorder:
    """A model that reads its guards from a `World` and records its actions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[tuple[str, ...]] = []
        self.count = 0
        self.machine: Any = None

    def act(self, name: str) -> None:
        self.log.append(("action", name))
        order = self.world.plan.get(self.count)
        self.count += 1
        if order == "!":
            raise Boom(name)
        if order is not None:
            self.machine.send(order)

    def state_changed(self, old: str, new: str, event: str) -> None:
        self.log.append(("changed", old, new, event))


class LibraryListener:
    """Gives the library's model the engine's ``state_changed``."""

    def __init__(self, model: Recorder) -> None:
        self.model = model

    def after_transition(self, event: str, source: Any, target: Any) -> None:
        if source.id != target.id:
            self.model.state_changed(source.id, target.id, str(event))


def recorder_for(table: Table) -> type[Recorder]:
    """A model class with exactly the guards and actions that the table names."""

    def guard(name: str) -> property:
        return property(lambda self: self.world.guards[name])

    def action(name: str) -> Any:
        return lambda self: self.act(name)

    def part(name: str) -> property:
        return property(lambda self: Path(name, self.act))

    members: dict[str, Any] = {name: guard(name) for name in table.guards}
    # The library looks up a path as one name.
    members |= {name: action(name) for name in table.actions}
    members |= {name: part(name) for name in parts(table.actions)}
    return type("Model", (Recorder,), members)


class Pair:
    """The engine and the library with equal models, started in the same state."""

    def __init__(self, chart: type[StateChart[Any]], table: Table, state: str) -> None:
        self.world = World(dict.fromkeys(table.guards, False))
        model = recorder_for(table)
        self.ours, self.theirs = model(self.world), model(self.world)
        self.ours.machine = Machine(table, self.ours, state=state)
        self.theirs.machine = chart(
            self.theirs,
            state_field="library_state",
            start_value=next(s.value for s in chart.states if s.id == state),
            listeners=[LibraryListener(self.theirs)],
        )

    def send(self, event: str, guards: dict[str, bool], plan: dict[int, str]) -> None:
        """Send one event to both; AssertionError if they differ."""
        self.world.guards.update(guards)
        self.world.plan = plan
        outcomes = []
        for model in (self.ours, self.theirs):
            model.log.clear()
            model.count = 0
            try:
                model.machine.send(event)
            except (IllegalEvent, TransitionNotAllowed):
                outcome = "refused"
            except Boom as boom:
                outcome = f"boom in {boom}"
            else:
                outcome = "taken"
            outcomes.append((outcome, list(model.log), self.state_of(model)))
        assert outcomes[0] == outcomes[1], (event, guards, plan)

    @staticmethod
    def state_of(model: Recorder) -> str:
        if isinstance(model.machine, Machine):
            return model.machine.state
        (state,) = model.machine.configuration
        return str(state.id)


def random_plan(rng: random.Random, table: Table) -> dict[int, str]:
    # At most one nested event.  After a refused event the library keeps the rest of its queue for
    # the next send, but the engine drops the queue, as it does after an exception.
    plan = {}
    if rng.random() < 0.2:
        plan[rng.randrange(3)] = rng.choice(table.events)
    if rng.random() < 0.1:
        plan[rng.randrange(5)] = "!"
    return plan


@pytest.mark.parametrize("events", [600, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MACHINES)
def test_random_events(name: str, events: int, rng: random.Random) -> None:
    chart = MACHINES[name]
    table = flatten(chart)
    for _ in range(events // RUN):
        pair = Pair(chart, table, rng.choice(table.states))
        for _ in range(RUN):
            guards = {guard: rng.random() < 0.5 for guard in table.guards}
            event = "no_such_event" if rng.random() < 0.02 else rng.choice(table.events)
            pair.send(event, guards, random_plan(rng, table))


@pytest.mark.parametrize("name", MACHINES)
def test_every_edge(name: str) -> None:
    """Each pair of state and event with every value of the guards it reads."""
    chart = MACHINES[name]
    table = flatten(chart)
    taken = set()
    for (state, event), row in table.edges.items():
        read = sorted({guard.name for edge in row for guard in edge.guards})
        for values in product((False, True), repeat=len(read)):
            guards = dict(zip(read, values, strict=True))
            Pair(chart, table, state).send(event, guards, {})
            first = next(
                (
                    number
                    for number, edge in enumerate(row)
                    if all(guards[g.name] is not g.negated for g in edge.guards)
                ),
                None,
            )
            taken.add((state, event, first))
    declared = {(*pair, number) for pair, row in table.edges.items() for number in range(len(row))}
    assert declared <= taken, "an edge that no guard values reach"
