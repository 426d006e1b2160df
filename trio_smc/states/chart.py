"""Declares a state machine with python-statemachine.

A chart contains states and edges only. Guards are attributes of the model, actions are methods of
the model or of its parts; a chart contains only the names of both. The structure is checked twice:
by the library when the class is created, and by `scripts.states.flatten`, which refuses features of
the library that the engine does not run.
"""

from __future__ import annotations

from typing import Any

from statemachine import State, StateChart
from statemachine.transition import Transition


class Chart(StateChart[Any]):
    """Base class of every declaration. It sets the flags of the library as the engine behaves."""

    allow_event_without_transition = False
    catch_errors_as_events = False
    atomic_configuration_update = True


class CitedTransition(Transition):
    """A transition of the library with the paragraph of the RFC, or the reason, for it."""

    citation: str


def edge(
    states: State | tuple[State, ...],
    events: str,
    target: State | None = None,
    *,
    when: str = "",
    do: str = "",
    source: str,
) -> None:
    """Declare one edge (one per state and event) inside a chart's class body.

    ``events``, ``when`` and ``do`` are names separated by blanks: the events, the guards
    (all must hold; ``!name`` holds if the attribute is false) and the actions in their order
    (``part.name`` is a method of an attribute of the model).
    Without ``target``, or if it is the same state, the edge is internal: actions run, the state
    stays and ``state_changed`` is not called. ``source`` is the paragraph of the RFC that requires
    the edge, or the reason for the edge if the RFC has none.
    """
    guards = when.split()
    for state in states if isinstance(states, tuple) else (states,):
        for event in events.split():
            transition = CitedTransition(
                state,
                target or state,
                event=event,
                internal=target is None or target is state,
                cond=[name for name in guards if not name.startswith("!")] or None,
                unless=[name[1:] for name in guards if name.startswith("!")] or None,
                on=do.split() or None,
            )
            transition.citation = source
            state.transitions.add_transitions(transition)


def ignore(states: State | tuple[State, ...], events: str, *, when: str = "", source: str) -> None:
    """Declare that ``events`` (names separated by blanks) change nothing in ``states``."""
    edge(states, events, when=when, source=source)
