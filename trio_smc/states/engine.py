"""Declared state machines, flattened to tables and run by a small engine.

Theory of operation
-------------------
Every state machine is declared once as a python-statemachine chart. The library checks the
structure when the class is created, and tests compare the engine with the library. Programs do not
import the library, because that makes each start slower (docs/decisions.md, "state machines are
declared with python-statemachine"). Instead `scripts.states` turns each chart into a ``Table`` of
the generated module ``tables``, and a ``Machine`` runs one of them. At its first use in a state, an
event is compiled to a function: the edges of the state in their order, the guards as ``if``, the
actions as calls. A new connection runs a dozen events, and reading the edges each time took twice
as long.

A chart holds states and edges, nothing else. Guards are attributes of the model. Actions are
methods without arguments, of the model or, with a path, of one of its parts::

    class DoorChart(Chart):
        OPEN = State(initial=True)
        SHUT = State(final=True)
        edge(OPEN, "push", SHUT, when="!blocked", do="bell.ring latch", source="4.8.1 (2)")
        ignore(OPEN, "push", source="4.8.1 (2)")

A ``Machine`` behaves like the library with the flags of ``Chart``:

- A machine takes the first edge in declaration order whose guards all hold. If there is none, the
  event is refused (``IllegalEvent``).
- Actions run in order before the state changes. If one raises, the state stays the same, all
  queued events are dropped and the exception propagates.
- An event that an action sends is queued and runs after the current one, first in, first out
  (run to completion). If a queued event is refused, the outer ``send`` raises.
- When a machine enters a state declared final, queued events are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Edge", "Guard", "IllegalEvent", "Machine", "Model", "Table"]


class Guard(NamedTuple):
    """A boolean attribute of the model.  ``negated``: the guard holds if the attribute is false."""

    name: str
    negated: bool

    def __str__(self) -> str:
        return f"!{self.name}" if self.negated else self.name


class Edge(NamedTuple):
    """One edge. ``source`` is the RFC paragraph, or the reason for the edge.

    The target of an internal edge is the state in which it starts.
    """

    guards: tuple[Guard, ...]
    target: str
    actions: tuple[str, ...]
    internal: bool
    source: str

    @property
    def ignored(self) -> bool:
        """True if the edge has no actions and keeps the state."""
        return self.internal and not self.actions


# An event in a state, compiled: calls the actions of the first edge whose guards hold, and returns
# the new state, or None if the edge is internal. Raises IllegalEvent.
_Step = Callable[[Any], str | None]


class Table:
    """A flattened chart.

    ``states`` and ``events`` keep the order of declaration. ``stopped`` are the states declared
    final. ``final`` are the states that a machine never leaves: those declared final, and those
    that have ignored edges only. ``values`` maps states to their declared numbers (a state without
    a number is missing). ``edges`` maps ``(state, event)`` to the edges, in the order of trial.
    """

    __slots__ = (
        "_steps",
        "edges",
        "events",
        "final",
        "initial",
        "name",
        "states",
        "stopped",
        "values",
    )

    def __init__(
        self,
        *,
        name: str,
        initial: str,
        states: tuple[str, ...],
        stopped: Iterable[str],
        events: tuple[str, ...],
        edges: Mapping[tuple[str, str], tuple[Edge, ...]],
        values: Mapping[str, int],
    ) -> None:
        self.name: str = name
        self.initial: str = initial
        self.states: tuple[str, ...] = states
        self.events: tuple[str, ...] = events
        self.edges: Mapping[tuple[str, str], tuple[Edge, ...]] = edges
        self.values: Mapping[str, int] = values
        left = {state for (state, _), row in edges.items() if any(not e.ignored for e in row)}
        self.stopped: frozenset[str] = frozenset(stopped)
        self.final: frozenset[str] = frozenset(states) - left
        self._steps: dict[tuple[str, str], _Step] = {}

    def _compile(self, state: str, event: str) -> _Step:
        lines = ["def step(model):"]
        for edge in self.edges.get((state, event), ()):
            guards = " and ".join(
                f"not model.{each.name}" if each.negated else f"model.{each.name}"
                for each in edge.guards
            )
            lines.append(f"    if {guards or True}:")
            lines += [f"        model.{action}()" for action in edge.actions]
            lines.append(f"        return {None if edge.internal else edge.target!r}")
        lines.append("    refuse()")
        names: dict[str, Any] = {"refuse": lambda: self._refuse(state, event)}
        source = "\n".join(lines)  # all of it comes from the declared chart
        exec(compile(source, f"<{self.name}: {event} in {state}>", "exec"), names)
        step: _Step = names["step"]
        self._steps[state, event] = step
        return step

    def _refuse(self, state: str, event: str) -> None:
        raise IllegalEvent(self.name, state, event)

    @property
    def guards(self) -> tuple[str, ...]:
        """The model attributes that guards read, in order of first use."""
        return tuple(
            dict.fromkeys(g.name for row in self.edges.values() for e in row for g in e.guards)
        )

    @property
    def actions(self) -> tuple[str, ...]:
        """The methods that edges call, as paths from the model, in order of first use."""
        return tuple(
            dict.fromkeys(a for row in self.edges.values() for e in row for a in e.actions)
        )

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The (state, event) pairs without an edge, which are always refused."""
        return tuple(
            (state, event)
            for state in self.states
            for event in self.events
            if (state, event) not in self.edges
        )


class IllegalEvent(Exception):
    """An event that the table does not allow in the machine's state.

    ``table``, ``state`` and ``event`` are the names of the table, the state and the event.
    """

    def __init__(self, table: str, state: str, event: str) -> None:
        super().__init__(f"{table}: event {event!r} is not allowed in state {state}")
        self.table = table
        self.state = state
        self.event = event


class Model(Protocol):
    """The interface of a model, besides the guards and actions that its table names."""

    def state_changed(self, old: str, new: str, event: str) -> None:
        """Called once after the state went from ``old`` to another state ``new``."""


class Machine:
    """One running machine: a table, its model and the state.

    ``model`` carries the guards (attributes or properties, read for their truth), the actions
    (methods without arguments, its own or those of its parts) and ``state_changed``. ``state``
    replaces the table's initial state. Raises ``ValueError`` if the table has no such state.
    """

    __slots__ = ("_model", "_queue", "_table", "state")

    state: str
    _queue: list[str] | None

    def __init__(self, table: Table, model: Model, *, state: str | None = None) -> None:
        if state is None:
            state = table.initial
        elif state not in table.states:
            raise ValueError(f"{table.name} has no state {state!r}")
        self._table = table
        self._model: Any = model
        self._queue = None  # a list while an event is being processed
        self.state = state

    def send(self, event: str) -> bool:
        """Process ``event`` and then the events that its actions send.

        Returns True if an edge was taken, possibly an internal one. Returns False if the event was
        only queued, because an action or ``state_changed`` made this call. Raises ``IllegalEvent``
        if the table has no edge for the state and the event, or no edge whose guards hold.
        """
        if self._queue is not None:
            if self.state in self._table.stopped:
                raise IllegalEvent(self._table.name, self.state, event)
            self._queue.append(event)
            return False
        queue = self._queue = []
        try:
            self._step(event)
            for queued in queue:  # actions may append to the queue meanwhile
                if self.state in self._table.stopped:
                    break
                self._step(queued)
        finally:
            self._queue = None
        return True

    def release_model(self) -> None:
        """Drop the reference to the model, so that no reference cycle is left.

        No-op before a final state. From then on the model is not needed, because the edges of a
        final state have neither guards nor actions.
        """
        if self.state in self._table.final:
            self._model = None

    def can(self, event: str) -> bool:
        """True if the machine would accept ``event`` now."""
        model = self._model
        return any(
            all(bool(getattr(model, guard.name)) is not guard.negated for guard in edge.guards)
            for edge in self._table.edges.get((self.state, event), ())
        )

    def _step(self, event: str) -> None:
        table, model, old = self._table, self._model, self.state
        step = table._steps.get((old, event)) or table._compile(old, event)
        new = step(model)
        if new is not None:
            self.state = new
            model.state_changed(old, new, event)
