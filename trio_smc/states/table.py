"""What a chart becomes: a flat table of edges, read by the engine and by the renderings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Guard:
    """A boolean attribute of the model; ``negated`` wants it false."""

    name: str
    negated: bool

    def __str__(self) -> str:
        return f"!{self.name}" if self.negated else self.name


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge. ``source`` is the RFC paragraph; an internal edge has its own state as target."""

    guards: tuple[Guard, ...]
    target: str
    actions: tuple[str, ...]
    internal: bool
    source: str

    @property
    def ignored(self) -> bool:
        """Whether the edge does nothing at all."""
        return self.internal and not self.actions


# What the engine reads: (attribute, wanted) pairs, actions, the new state or None.
_Row = tuple[tuple[tuple[str, bool], ...], tuple[str, ...], str | None]


class Table:
    """A flattened chart.

    ``states`` and ``events`` keep the order of declaration. ``final`` are the states that are
    never left: declared final, or with ignored edges only. ``values`` maps states to the
    numbers declared for them (a state without one is missing). ``edges`` maps
    ``(state, event)`` to the edges in the order they are tried.
    """

    __slots__ = (
        "_rows",
        "_stopped",
        "edges",
        "events",
        "final",
        "initial",
        "name",
        "states",
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
        self.name = name
        self.initial = initial
        self.states = states
        self.events = events
        self.edges = edges
        self.values = values
        left = {state for (state, _), row in edges.items() if any(not e.ignored for e in row)}
        self._stopped = frozenset(stopped)
        self.final = frozenset(states) - left
        self._rows: dict[tuple[str, str], tuple[_Row, ...]] = {
            pair: tuple(
                (
                    tuple((guard.name, not guard.negated) for guard in e.guards),
                    e.actions,
                    None if e.internal else e.target,
                )
                for e in row
            )
            for pair, row in edges.items()
        }

    @property
    def guards(self) -> tuple[str, ...]:
        """The model attributes that guards read, in order of first use."""
        return tuple(
            dict.fromkeys(g.name for row in self.edges.values() for e in row for g in e.guards)
        )

    @property
    def actions(self) -> tuple[str, ...]:
        """The model methods that edges call, in order of first use."""
        return tuple(
            dict.fromkeys(a for row in self.edges.values() for e in row for a in e.actions)
        )

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The (state, event) pairs without any edge: refused whatever the guards say."""
        return tuple(
            (state, event)
            for state in self.states
            for event in self.events
            if (state, event) not in self.edges
        )
