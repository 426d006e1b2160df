"""`WeakSet`: objects that go away leave the set, and no Python code runs meanwhile."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trio_smc._base.weak_set import WeakSet

if TYPE_CHECKING:
    from types import FrameType


class Thing:
    """May be referred to weakly."""

    itself: Thing


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


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="collects garbage otherwise")
def test_an_object_goes_away_without_python_code() -> None:
    weak: WeakSet[Thing] = WeakSet()
    thing = Thing()
    thing.itself = thing
    weak.add(thing)
    del thing
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(Path(frame.f_code.co_filename).name)

    gc.collect(1)
    sys.setprofile(profile)
    gc.collect()
    sys.setprofile(None)
    assert not list(weak)
    assert not {"weak_set.py", "weakref.py", "_weakrefset.py"}.intersection(calls)
