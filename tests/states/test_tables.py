"""The generated tables match the declarations, and no program needs the library."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.states import __main__
from scripts.states.flatten import flatten
from scripts.states.generate import MACHINES, TABLES, source
from trio_smc.states import USABLE, tables
from trio_smc.states.engine import Table


def test_the_generated_module_is_current() -> None:
    assert TABLES.read_text(encoding="utf-8") == source(MACHINES), "make states"


@pytest.mark.parametrize("name", MACHINES)
def test_a_generated_table_equals_its_chart(name: str) -> None:
    ran, declared = getattr(tables, name.upper()), flatten(MACHINES[name])
    # A class that is compiled has no __slots__, and the same descriptors.
    # `_steps` has what was used so far.
    found = [part for part, kind in vars(Table).items() if inspect.isdatadescriptor(kind)]
    parts = [part for part in found if part != "_steps"]
    assert len(parts) > 5
    for part in parts:
        assert getattr(ran, part) == getattr(declared, part), part


def test_a_stale_module_is_noticed_and_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "tables.py"
    stale.write_text(source(MACHINES).replace("TESTING", "TRYING"))
    monkeypatch.setattr(__main__, "TABLES", stale)
    assert __main__.main(["--check"]) == 1
    assert "tables.py: differs from the declarations" in capsys.readouterr().err
    __main__.main([str(tmp_path / "docs")])
    assert stale.read_text() == source(MACHINES)


def test_a_group_is_used_in_states_that_it_has() -> None:
    assert set(tables.LINK_GROUP.states) > USABLE


def test_programs_import_neither_the_library_nor_asyncio() -> None:
    listed = "import sys, trio_smc; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, check=True, text=True
    )
    modules = done.stdout.split()
    assert "trio_smc.states.tables" in modules
    assert {"statemachine", "asyncio"}.isdisjoint(modules)
