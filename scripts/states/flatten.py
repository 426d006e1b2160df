"""Flattens a chart to a table, and refuses what the engine does not run."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from statemachine import StateChart
from statemachine.transition import Transition

from trio_smc.states.chart import Chart, CitedTransition
from trio_smc.states.engine import Edge, Guard, Table

__all__ = ["flatten"]


def flatten(chart: type[StateChart[Any]]) -> Table:
    """Turn a chart into a table.

    Raises ``ValueError`` for features that the engine does not run: nested or parallel states,
    eventless and multi-target transitions, entry and exit actions, external self-transitions, flags
    other than ``Chart``'s. Also for declarations that must be mistakes: an edge without its RFC
    paragraph, an edge behind an unguarded one, a guard or action with the name of an attribute of
    the chart (the library would call that attribute), a state that reaches no final state.
    """
    _check_chart(chart)
    edges: dict[tuple[str, str], list[Edge]] = {}
    events: dict[str, None] = {}
    for state in chart.states:
        for transition in state.transitions:
            flat = _flatten_transition(chart, transition)
            for event in map(str, transition.events):
                events[event] = None
                row = edges.setdefault((state.id, event), [])
                if row and not row[-1].guards:
                    raise ValueError(
                        f"{chart.__name__}: {state.id}/{event} has an edge behind an unguarded one"
                    )
                row.append(flat)
    initial = chart.initial_state
    if initial is None:  # the library refuses such a chart first
        raise ValueError(f"{chart.__name__}: no initial state")
    table = Table(
        name=chart.__name__.removesuffix("Chart"),
        initial=initial.id,
        states=tuple(state.id for state in chart.states),
        stopped=(state.id for state in chart.final_states),
        events=tuple(events),
        edges={pair: tuple(row) for pair, row in edges.items()},
        values={s.id: s.value for s in chart.states if isinstance(s.value, int)},
    )
    _check_table(table, chart)
    return table


def _check_chart(chart: type[StateChart[Any]]) -> None:
    where = chart.__name__
    for flag in (
        "allow_event_without_transition",
        "catch_errors_as_events",
        "atomic_configuration_update",
    ):
        if getattr(chart, flag) is not getattr(Chart, flag):
            raise ValueError(f"{where}: {flag} differs from Chart's")
    for base in chart.__mro__[: chart.__mro__.index(StateChart)]:
        for name, value in vars(base).items():
            if isinstance(value, (FunctionType, property, classmethod, staticmethod)):
                raise ValueError(f"{where}: {name} is code; actions belong to the model")
    for state in chart.states:
        if state.states or state.history or state.parallel:
            raise ValueError(f"{where}: {state.id} is nested or parallel")
        if any(not spec.is_convention for spec in state._specs):
            raise ValueError(f"{where}: {state.id} has entry, exit or invoke actions")


def _flatten_transition(chart: type[StateChart[Any]], transition: Transition) -> Edge:
    where = f"{chart.__name__}: {transition}"
    if not isinstance(transition, CitedTransition) or not transition.citation.strip():
        raise ValueError(f"{where}: declare it with edge() and its RFC paragraph")
    target = transition.target
    if target is None or len(transition.targets) != 1 or transition.is_eventless:
        raise ValueError(f"{where}: an edge needs exactly one target and an event")
    if target is transition.source and not transition.internal:
        raise ValueError(f"{where}: an external self-transition")
    if any(not event.isidentifier() for event in map(str, transition.events)):
        raise ValueError(f"{where}: event names are plain identifiers")
    for group in (transition.before, transition.after, transition.validators):
        if any(not spec.is_convention for spec in group):
            raise ValueError(f"{where}: only guards and actions are supported")
    guards = tuple(Guard(str(spec.func), not spec.expected_value) for spec in transition.cond)
    actions = tuple(str(spec.func) for spec in transition.on if not spec.is_convention)
    paths = {guard.name: [guard.name] for guard in guards} | {a: a.split(".") for a in actions}
    for name, parts in paths.items():
        # The library looks names up in the chart as well as in the model and calls both.
        if not all(map(str.isidentifier, parts)) or hasattr(chart, name):
            raise ValueError(f"{where}: {name!r} is not a name that only the model can have")
    return Edge(guards, target.id, actions, transition.internal, transition.citation)


def _check_table(table: Table, chart: type[StateChart[Any]]) -> None:
    both = set(table.guards) & set(table.actions)
    if both:
        raise ValueError(f"{chart.__name__}: guard and action at once: {sorted(both)}")
    # The library does this for declared final states only, and never for absorbing ones.
    alive = set(table.final)
    grown = True
    while grown:
        reached = {s for (s, _), row in table.edges.items() if any(e.target in alive for e in row)}
        grown = not reached <= alive
        alive |= reached
    if table.final and alive != set(table.states):
        raise ValueError(f"{chart.__name__}: no way out of {sorted(set(table.states) - alive)}")
