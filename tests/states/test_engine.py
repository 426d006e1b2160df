"""The behaviour that the engine guarantees, and the charts that ``flatten`` refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from statemachine import State, StateChart

from scripts.states.flatten import flatten
from tests.states.paths import Path
from trio_smc.states.chart import Chart, edge, ignore
from trio_smc.states.engine import Guard, IllegalEvent, Machine


class DoorChart(Chart):
    OPEN = State(initial=True)
    SHUT = State(value=5)
    GONE = State(final=True)

    edge(OPEN, "push", SHUT, when="oiled !blocked", do="swing latch", source="1")
    ignore(OPEN, "push", when="blocked", source="2")
    edge(SHUT, "push", GONE, do="swing", source="3")
    edge(SHUT, "pull", OPEN, do="swing", source="4")
    edge(SHUT, "knock", do="bell.ring answer", source="5")


DOOR = flatten(DoorChart)


class Door:
    """A model whose actions also call a function from ``orders``, once."""

    def __init__(self, state: str | None = None) -> None:
        self.oiled = True
        self.blocked = False
        self.log: list[str] = []
        self.orders: dict[str, Callable[[], object]] = {}
        self.machine = Machine(DOOR, self, state=state)

    def _act(self, name: str) -> None:
        self.log.append(name)
        self.orders.pop(name, lambda: None)()

    def swing(self) -> None:
        self._act("swing")

    def latch(self) -> None:
        self._act("latch")

    def answer(self) -> None:
        self._act("answer")

    @property
    def bell(self) -> Path:
        return Path("bell", self._act)

    def state_changed(self, old: str, new: str, event: str) -> None:
        self._act(f"{old}-{event}-{new}")


def test_table() -> None:
    assert DOOR.name == "Door"
    assert DOOR.initial == "OPEN"
    assert DOOR.states == ("OPEN", "SHUT", "GONE")
    assert DOOR.events == ("push", "pull", "knock")
    assert DOOR.final == {"GONE"}
    assert DOOR.values == {"SHUT": 5}
    assert DOOR.guards == ("oiled", "blocked")
    assert DOOR.actions == ("swing", "latch", "bell.ring", "answer")
    assert DOOR.missing == (
        ("OPEN", "pull"),
        ("OPEN", "knock"),
        ("GONE", "push"),
        ("GONE", "pull"),
        ("GONE", "knock"),
    )
    first, second = DOOR.edges["OPEN", "push"]
    assert first.guards == (Guard("oiled", False), Guard("blocked", True))
    assert (first.target, first.actions, first.internal, first.source, first.ignored) == (
        "SHUT",
        ("swing", "latch"),
        False,
        "1",
        False,
    )
    assert (second.target, second.internal, second.ignored) == ("OPEN", True, True)


def test_actions_come_before_the_state_and_state_changed_last() -> None:
    door = Door()
    seen = []
    door.orders["latch"] = lambda: seen.append(door.machine.state)
    assert door.machine.send("push") is True
    assert seen == ["OPEN"]
    assert door.log == ["swing", "latch", "OPEN-push-SHUT"]
    assert door.machine.state == "SHUT"


def test_internal_edges_change_nothing() -> None:
    door = Door("SHUT")
    assert door.machine.send("knock") is True
    assert door.log == ["bell.ring", "answer"]
    assert door.machine.state == "SHUT"


def test_refusals_name_table_state_and_event() -> None:
    door = Door()
    door.oiled = False
    for event in ("push", "pull", "no_such_event"):
        assert not door.machine.can(event)
        with pytest.raises(IllegalEvent) as caught:
            door.machine.send(event)
        assert (caught.value.table, caught.value.state, caught.value.event) == (
            "Door",
            "OPEN",
            event,
        )
    door.blocked = True
    assert door.machine.can("push")
    assert door.machine.send("push")
    assert door.log == []


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ValueError, match="no state 'AJAR'"):
        Door("AJAR")


def test_events_sent_by_actions_run_afterwards_in_order() -> None:
    door = Door()
    returned = []
    door.orders["swing"] = lambda: returned.extend(
        [door.machine.send("knock"), door.machine.send("pull")]
    )
    door.orders["OPEN-push-SHUT"] = lambda: returned.append(door.machine.send("push"))
    assert door.machine.send("push") is True
    assert returned == [False, False, False]
    assert door.log == [
        "swing",
        "latch",
        "OPEN-push-SHUT",
        "bell.ring",
        "answer",
        "swing",
        "SHUT-pull-OPEN",
        "swing",
        "latch",
        "OPEN-push-SHUT",
    ]


def test_a_failing_action_keeps_the_state_and_drops_queued_events() -> None:
    door = Door()
    door.orders["swing"] = lambda: door.machine.send("knock")

    def fail() -> None:
        raise OSError("stuck")

    door.orders["latch"] = fail
    with pytest.raises(OSError, match="stuck"):
        door.machine.send("push")
    assert door.machine.state == "OPEN"
    door.log.clear()
    assert door.machine.send("push")
    assert door.log == ["swing", "latch", "OPEN-push-SHUT"]


def test_a_refused_queued_event_raises_from_the_outer_send() -> None:
    door = Door()
    door.orders["swing"] = lambda: [door.machine.send("no_such_event"), door.machine.send("knock")]
    with pytest.raises(IllegalEvent):
        door.machine.send("push")
    assert door.machine.state == "SHUT"
    assert door.log == ["swing", "latch", "OPEN-push-SHUT"]  # the queued "knock" was dropped


def test_events_queued_when_a_final_state_is_entered_are_dropped() -> None:
    door = Door("SHUT")
    door.orders["swing"] = lambda: door.machine.send("knock")
    assert door.machine.send("push")
    assert door.log == ["swing", "SHUT-push-GONE"]
    door = Door("SHUT")
    door.orders["SHUT-push-GONE"] = lambda: door.machine.send("knock")
    with pytest.raises(IllegalEvent):
        door.machine.send("push")
    assert door.machine.state == "GONE"


def two_states() -> tuple[State, State]:
    return State(initial=True), State(final=True)


def with_nesting() -> type[StateChart[Any]]:
    class Nested(Chart):
        class A(State.Compound):
            inner = State(initial=True)
            other = State(final=True)
            edge(inner, "go", other, source="1")

        B = State(final=True)
        edge(A, "leave", B, source="1")  # type: ignore[arg-type]  # the library makes A a State

    return Nested


def with_entry_action() -> type[StateChart[Any]]:
    class Entry(Chart):
        A, B = State(initial=True), State(final=True, enter="hello")
        edge(A, "go", B, source="1")

    return Entry


def with_library_edge() -> type[StateChart[Any]]:
    class Uncited(Chart):
        A, B = two_states()
        go = A.to(B)

    return Uncited


def with_empty_paragraph() -> type[StateChart[Any]]:
    class Empty(Chart):
        A, B = two_states()
        edge(A, "go", B, source=" ")

    return Empty


def with_own_method() -> type[StateChart[Any]]:
    class Code(Chart):
        A, B = two_states()
        edge(A, "go", B, source="1")

        def on_go(self) -> None:
            """The library would run this method, but the engine would not."""

    return Code


def with_action_named_like_an_event() -> type[StateChart[Any]]:
    class Clash(Chart):
        A, B = two_states()
        edge(A, "go", B, do="go", source="1")

    return Clash


def with_guard_that_is_an_action() -> type[StateChart[Any]]:
    class Both(Chart):
        A, B = two_states()
        edge(A, "go", B, when="ring", do="ring", source="1")

    return Both


def with_expression() -> type[StateChart[Any]]:
    class Expression(Chart):
        A, B = two_states()
        edge(A, "go", B, when="a|b", source="1")

    return Expression


def with_empty_part() -> type[StateChart[Any]]:
    class Part(Chart):
        A, B = two_states()
        edge(A, "go", B, do="bell..ring", source="1")

    return Part


def with_guard_of_a_part() -> type[StateChart[Any]]:
    class Part(Chart):
        A, B = two_states()
        edge(A, "go", B, when="bell.muffled", source="1")

    return Part


def with_unreachable_edge() -> type[StateChart[Any]]:
    class Behind(Chart):
        A, B = two_states()
        edge(A, "go", B, source="1")
        edge(A, "go", when="late", source="1")

    return Behind


def with_other_flags() -> type[StateChart[Any]]:
    class Flags(Chart):
        catch_errors_as_events = True
        A, B = two_states()
        edge(A, "go", B, source="1")

    return Flags


def with_trap() -> type[StateChart[Any]]:
    class Trap(Chart):
        A, B, C = State(initial=True), State(), State()
        edge(A, "go", B, source="1")
        edge(A, "end", C, source="1")
        edge(B, "spin", do="turn", source="1")
        ignore(C, "go", source="1")

    return Trap


@pytest.mark.parametrize(
    ("declare", "reason"),
    [
        (with_nesting, "nested or parallel"),
        (with_entry_action, "entry, exit or invoke"),
        (with_library_edge, "RFC paragraph"),
        (with_empty_paragraph, "RFC paragraph"),
        (with_own_method, "on_go is code"),
        (with_action_named_like_an_event, "'go' is not a name that only the model can have"),
        (with_guard_that_is_an_action, "guard and action"),
        (with_expression, r"'a\|b' is not a name"),
        (with_empty_part, r"'bell\.\.ring' is not a name"),
        (with_guard_of_a_part, r"'bell\.muffled' is not a name"),
        (with_unreachable_edge, "behind an unguarded one"),
        (with_other_flags, "catch_errors_as_events"),
        (with_trap, r"no way out of \['B'\]"),
    ],
)
def test_flatten_refuses(declare: Callable[[], type[StateChart[Any]]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        flatten(declare())
