"""Fixtures: the private directory of a test, and the end of its `Discovery` objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trio_smc.rendezvous.discovery.same_host import Discovery


@pytest.fixture
def private(runtime_directory: Path) -> Path:
    """A private directory that does not exist yet."""
    return runtime_directory / "trio-smc"


@pytest.fixture(autouse=True)
def all_closed(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Discovery]]:
    """Close every Discovery of a test at its end, as a stack does."""
    made: list[Discovery] = []
    create = Discovery.__init__

    def note(self: Discovery, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Discovery, "__init__", note)
    yield made
    for each in made:
        each.close()
