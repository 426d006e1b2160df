"""Weak collections: objects that go away leave them, and no Python code runs meanwhile."""

from __future__ import annotations

import gc
import sys
from _thread import interrupt_main
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import ref

import pytest

from trio_smc._base.weak import WeakKeyMapping, WeakSet, WeakValueMapping

if TYPE_CHECKING:
    from types import FrameType


class Thing:
    """May be referred to weakly."""

    itself: Thing


class Interrupting(ref[Any]):
    """Raises SIGINT when its object goes away, and runs no Python code for that."""

    interrupt = interrupt_main

    def __new__(cls, thing: object) -> Self:
        return super().__new__(cls, thing, methodcaller("interrupt"))


def in_set(thing: Thing) -> Callable[[], bool]:
    """Add an object to a collection; returns a function that is true if something is left."""
    weak: WeakSet[Thing] = WeakSet()
    weak.add(thing)
    return lambda: any(True for _ in weak)


def as_key(thing: Thing) -> Callable[[], bool]:
    weak: WeakKeyMapping[Thing, Thing] = WeakKeyMapping()
    weak[thing] = Thing()
    value = ref(weak.get(thing))
    return lambda: value() is not None


def as_value(thing: Thing) -> Callable[[], bool]:
    weak: WeakValueMapping[int, Thing] = WeakValueMapping()
    weak[1] = thing
    return lambda: bool(weak.keys())


COLLECTIONS: Final = pytest.mark.parametrize("add", [in_set, as_key, as_value])


def test_objects_leave_the_set_when_they_go_away() -> None:
    weak: WeakSet[Thing] = WeakSet()
    first, second = Thing(), Thing()
    for thing in (first, second, first):
        weak.add(thing)
    assert list(weak) == [first, second]
    del first, thing
    assert list(weak) == [second]
    weak.discard(second)
    weak.discard(Thing())
    assert not list(weak)


def test_objects_that_go_away_during_an_iteration() -> None:
    weak: WeakSet[Thing] = WeakSet()
    things = [Thing() for _ in range(3)]
    for thing in things:
        weak.add(thing)
    del thing
    seen = 0
    for _ in weak:
        seen += 1
        things.clear()
    assert seen == 1


def test_a_value_goes_away_with_its_key() -> None:
    weak: WeakKeyMapping[Thing, Thing] = WeakKeyMapping()
    key, value = Thing(), Thing()
    gone = ref(value)
    weak[key] = value
    weak[key] = value
    assert weak.get(key) is value
    assert weak.get(Thing()) is None
    del value
    assert weak.get(key) is gone()
    del key
    assert gone() is None


def test_a_key_goes_away_with_its_value() -> None:
    weak: WeakValueMapping[str, Thing] = WeakValueMapping()
    first, second = Thing(), Thing()
    weak["first"] = weak["other"] = first
    assert weak.get("first") is first
    weak["first"] = second
    del first
    assert (weak.get("first"), weak.get("other")) == (second, None)
    assert set(weak.keys()) == {"first"}
    del second
    assert not weak.keys()


@pytest.mark.parametrize("interrupts_first", [False, True])
@COLLECTIONS
def test_an_interrupt_is_raised_while_an_object_goes_away(
    add: Callable[[Thing], Callable[[], bool]], interrupts_first: bool
) -> None:
    """Python calls the callbacks for an object in an order that is not documented."""
    thing = Thing()
    kept = Interrupting(thing) if interrupts_first else None
    has_some = add(thing)
    kept = kept or Interrupting(thing)
    assert has_some()
    things = [thing]
    del thing
    with pytest.raises(KeyboardInterrupt):
        remove(things)
    assert not has_some()
    assert kept() is None


def remove(things: list[Any]) -> None:
    """Remove the last references to objects, and let Python look for signals."""
    things.clear()
    for _ in range(2):
        pass


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="collects garbage otherwise")
@COLLECTIONS
def test_an_object_goes_away_without_python_code(
    add: Callable[[Thing], Callable[[], bool]],
) -> None:
    gc.collect()  # the objects of other tests
    thing = Thing()
    thing.itself = thing
    has_some = add(thing)
    del thing
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(Path(frame.f_code.co_filename).name)

    assert has_some()
    sys.setprofile(profile)
    gc.collect()
    sys.setprofile(None)
    assert not has_some()
    assert not {"weak.py", "weakref.py", "_weakrefset.py"}.intersection(calls)
